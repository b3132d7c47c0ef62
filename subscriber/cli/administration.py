"""The commands that define, check and administer subscriptions.

As in main.py, only the modules that --help needs are imported here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from subscriber.cli.app_option import AppOption
from subscriber.cli.dsn import ApplyTarget, MaybeSource, Target, required_config
from subscriber.cli.environment import run_command
from subscriber.cli.options import Json, MaybePublications, Name
from subscriber.cli.quarantine_action import Action
from subscriber.cli.setting_option import SettingOption, read_settings


def exec_(
    target: Target,
    statements: Annotated[
        str,
        typer.Argument(help="One or more statements, separated by semicolons; - reads stdin.", metavar="STATEMENTS"),
    ],
    app_name: AppOption = None,
    setting: SettingOption = None,
) -> None:
    """Run CREATE, ALTER and DROP SUBSCRIPTION statements.

    The syntax is that of PostgreSQL 18. The command prints nothing on success. NOTICE and WARNING lines go to stderr as
    psql prints them. After an error the command exits 3, and a failed statement has changed nothing. The role of the
    connection string owns the subscription. An empty text ('') creates or upgrades schema "subscriber" on the target,
    and nothing else.
    """
    from subscriber.cli.commands.exec import run_statements

    settings = read_settings(setting)
    text = sys.stdin.read() if statements == "-" else statements
    if app_name is None:
        raise typer.Exit(run_statements(target, text, settings))
    from subscriber.cli.app_name import load_app

    raise typer.Exit(run_statements(target, text, settings, load_app(app_name).hooks))


def status(
    target: Target,
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these subscriptions.", metavar="[NAME]...", show_default=False)
    ] = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C, with rates.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two snapshots with --watch.", min=0.1)] = 1.0,
    setting: SettingOption = None,
) -> None:
    """Show subscriptions: state, lag, tables, errors.

    Exits 1 if a subscription is stopped, failing, or enabled without a launcher. --watch adds rates. With --json, each
    snapshot is one line.
    """
    from subscriber.cli.status.show import show

    settings = read_settings(setting)
    run_command(show, target, names or [], json=json, watch=watch, interval=interval, settings=settings)


def check(
    target: Target,
    name: Annotated[
        str | None, typer.Argument(help="An existing subscription.", metavar="[NAME]", show_default=False)
    ] = None,
    source: MaybeSource = None,
    publications: MaybePublications = None,
    apply_target: ApplyTarget = None,
    two_phase: Annotated[bool, typer.Option("--two-phase", help="Also check for two_phase = true.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print statements for roles with the least privileges, for both servers.")
    ] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="With --fix: run the target's statements, as its superuser.")
    ] = False,
    credentials: Annotated[
        Path | None,
        typer.Option(
            help="With --execute: the directory for the connection strings of new roles.",
            metavar="DIRECTORY",
            show_default="they are printed",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Find the problems that would keep a subscription from working.

    Each finding has a fix; exits 1 if a finding is an error. Give the name of an existing subscription, or the source
    and publications of a new one. --fix prints scripts for psql instead: they set up the roles of the launcher, of the
    session that applies changes, and of the connection to the publisher.
    """
    from subscriber.cli.commands.check import run_checks, run_fix

    if name is None and (source is None or not publications) and not fix:
        raise typer.BadParameter("give the NAME of a subscription, or --source and --publication")
    if execute and not fix:
        raise typer.BadParameter("--execute needs --fix")
    if credentials is not None and not execute:
        raise typer.BadParameter("--credentials needs --execute")
    from_source, found = None if name else source, publications or []
    if fix:
        run_command(
            run_fix,
            target,
            from_source,
            found,
            name=name,
            apply_target=apply_target,
            execute=execute,
            credentials=credentials,
            json=json,
        )
    run_command(
        run_checks, target, from_source, found, name=name, apply_target=apply_target, two_phase=two_phase, json=json
    )


def adopt(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription of PostgreSQL's own, or of pglogical.", metavar="NAME")],
    publications: Annotated[
        list[str] | None,
        typer.Option(
            "--publication",
            "-p",
            help="For pglogical: a publication in place of replication sets; may be given several times.",
            metavar="NAME",
        ),
    ] = None,
    json: Json = False,
    setting: SettingOption = None,
) -> None:
    """Take over a subscription that PostgreSQL or pglogical runs, without a copy.

    The new subscription has its name, position and tables, of PostgreSQL's also owner, options and slot. The old one
    does not exist any more. Needs a superuser. The command refuses what it cannot take over exactly, and the old
    subscription then continues. After a kill, run it again. `subscriber hand-back` returns one to PostgreSQL.
    """
    from subscriber.cli.commands.adopt import run_adopt

    run_command(run_adopt, target, name, publications=publications or (), json=json, settings=read_settings(setting))


def hand_back(
    target: Target,
    name: Name,
    json: Json = False,
    setting: SettingOption = None,
) -> None:
    """Return a subscription to PostgreSQL, which continues without a copy.

    Needs a superuser, and a target that reaches the publisher. The command refuses what PostgreSQL would not continue
    exactly, and names the statement that removes the obstacle. After a kill, run it again.
    """
    from subscriber.cli.commands.adopt import run_hand_back

    run_command(run_hand_back, target, name, json=json, settings=read_settings(setting))


def quarantine_(
    target: Target,
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    name: Name,
    lsn: Annotated[
        str | None, typer.Argument(help="The transaction, by its position.", metavar="[LSN]", show_default=False)
    ] = None,
    change: Annotated[int | None, typer.Option(help="edit: the number of the change.", min=1)] = None,
    column: Annotated[
        str | None, typer.Option(help="edit: set this column. Without it, the change is discarded.", metavar="NAME")
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="edit: the value of the column. Default: NULL.", show_default=False)
    ] = None,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="discard: also the transactions that depend on it.")
    ] = False,
    json: Json = False,
) -> None:
    """List, show, retry, discard and edit transactions in quarantine.

    `list` prints the transactions and exits 1 if there are any. `show` prints the changes of one, with their numbers.
    `retry` has the worker apply all transactions in order, or one and those that depend on it. The statement
    ALTER SUBSCRIPTION ... QUARANTINE does the same.
    """
    from subscriber.cli.commands.quarantine import run_quarantine

    run_command(
        run_quarantine,
        target,
        action,
        name,
        lsn,
        change=change,
        column=column,
        value=value,
        cascade=cascade,
        json=json,
    )


def uninstall_(
    target: Target,
    drop_subscriptions: Annotated[
        bool, typer.Option("--drop-subscriptions", help="Drop all subscriptions and their slots first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and change nothing.")
    ] = False,
    setting: SettingOption = None,
) -> None:
    """Remove schema "subscriber" from the target database, with all that belongs to it.

    The replicated tables and their rows stay. The command refuses while subscriptions exist, a launcher runs, or
    objects of other schemas depend on the schema. Roles that `check --fix` created stay as well.
    """
    from subscriber.cli.commands.uninstall import run_uninstall

    settings = read_settings(setting)
    run_command(run_uninstall, target, drop_subscriptions=drop_subscriptions, dry_run=dry_run, settings=settings)


config = typer.Typer(
    name="config",
    help="Show and check the configuration file, whose targets --target can name.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@config.command("show")
def show_config(context: typer.Context, json: Json = False) -> None:
    """Print the configured targets without passwords."""
    from subscriber.cli.commands.config import print_config

    raise typer.Exit(print_config(required_config(context), json=json))


@config.command("check")
def check_config(context: typer.Context) -> None:
    """Find the problems of the configuration file, without a connection.

    Reports unknown keys, connection strings that are invalid, variables and files that do not exist, and a password in
    a file that others can read. Exits 1 if there is a problem. `subscriber check` examines the servers.
    """
    from subscriber.cli.commands.config import print_problems

    raise typer.Exit(print_problems(required_config(context)))
