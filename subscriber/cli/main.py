"""The command `subscriber`.

`--help` and `exec` have to answer within 0.3 s. This module therefore imports only what --help needs. Each command
imports its own modules when it runs.

Exit statuses:

- 0: success.
- 1: the answer is no (something differs, a check failed).
- 2: wrong usage.
- 3: an error, printed as psql prints one.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from subscriber import __version__
from subscriber.cli import arguments, changelog, logs, migrate
from subscriber.cli.app_option import AppOption
from subscriber.cli.dsn import ApplyTarget, MaybeSource, Source, Target, Targets, read_targets
from subscriber.cli.environment import run_async
from subscriber.cli.http_option import HostOption, TokenOption, read_address, read_tokens
from subscriber.cli.logs import LogFormat
from subscriber.cli.quarantine_action import Action
from subscriber.cli.setting_option import SettingOption, read_settings
from subscriber.comparison.engine import ComparisonEngine, ComparisonStart
from subscriber.display import printable_lines
from subscriber.errors import SubscriberError
from subscriber.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

FAILED = 3
BUG = 1  # as in Python
SUMMARY = 200  # characters
_UsageError: Any = typer.BadParameter.__base__  # Typer does not export it


class _Commands(TyperGroup):
    """The group of commands. A usage error that quotes an argument shows no password of a connection string."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _redacted_messages():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _redacted_messages():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first sentence of each command's help, and not only its first 45 characters."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=SUMMARY)) for name, command in commands if command is not None]
            )


@contextmanager
def _redacted_messages() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if not error.message and getattr(getattr(error, "param", None), "metavar", None) == "DSN":  # it is missing
            error.message = f"Such as: {error.param.opts[0]} postgresql://user@host/database"
        error.message = redact(error.message)
        raise


app = typer.Typer(
    cls=_Commands,
    help="PostgreSQL's logical-replication subscriber, outside the server.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich costs 0.1 s, and help is often piped into less
    pretty_exceptions_enable=False,  # its tracebacks print local variables, which include passwords
    context_settings={"help_option_names": ["-h", "--help"]},
)

Publications = Annotated[
    list[str], typer.Option("--publication", "-p", help="A publication; may be given several times.", metavar="NAME")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RecordRows = Annotated[
    bool, typer.Option("--record-rows", help="Record rows in subscriber.repairs before and after, not only their keys.")
]


def _version(wanted: bool) -> None:
    if wanted:
        from subscriber._speedups import module, why_not

        speed = "compiled" if module is not None else f"not compiled, so slower: {why_not}"
        print(f"subscriber {__version__} ({speed})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version, and if it is compiled.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


def _finish(function: Callable[..., Awaitable[int]], *args: Any, **kwargs: Any) -> None:
    """Run a command to its end and exit with the status that it returns."""
    raise typer.Exit(run_async(function, *args, **kwargs))


@app.command("exec")
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


@app.command()
def run(
    target: Target,
    apply_target: ApplyTarget = None,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log lines on stderr.")] = LogFormat.RICH,
    debug: Annotated[bool, typer.Option("--debug", help="Also log DEBUG1 lines.")] = False,
    spool_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for streamed transactions that have not ended.",
            metavar="DIRECTORY",
            show_default="SUBSCRIBER_SPOOL_DIR, TMPDIR, or /var/tmp",
        ),
    ] = None,
    spool_limit: Annotated[
        int | None,
        typer.Option(
            help="Limit of each worker's files there, in MiB.",
            min=1,
            show_default="half of the free space at its start",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="Serve /metrics for Prometheus, /health, /status.json, and a page for people at /.",
            metavar="[HOST:]PORT",
            show_default="nowhere; HOST is 127.0.0.1",
        ),
    ] = None,
    http_hosts: HostOption = None,
    http_tokens: TokenOption = None,
    takeover_after: Annotated[
        float | None,
        typer.Option(
            help="Take over from another launcher that has not renewed its lease for this long.",
            metavar="SECONDS",
            min=1,
            show_default="30",
        ),
    ] = None,
    app_name: AppOption = None,
    setting: SettingOption = None,
) -> None:
    """Run all enabled subscriptions of the target database until SIGTERM or Ctrl-C.

    Changes of the catalog take effect immediately. If you start the command twice on one database, the second waits,
    and takes over when the first ends.
    """
    from subscriber import telemetry
    from subscriber.cli.commands.run import run
    from subscriber.cli.logs import configure

    address = tokens = None
    if http is not None:
        address, tokens = read_address(http, http_hosts), read_tokens(http_tokens)
    elif http_hosts:
        raise typer.BadParameter("--http-host needs --http")
    configure(log_format, level=telemetry.DEBUG if debug else telemetry.LOG)
    limit = None if spool_limit is None else spool_limit * 1024 * 1024
    settings = read_settings(setting, spool_dir=spool_dir, spool_limit=limit, takeover_after=takeover_after)
    from subscriber.cli.app_name import load_app

    _finish(run, target, apply_target, address, settings, load_app(app_name), tokens)


@app.command()
def console(
    targets: Targets = None,
    http: Annotated[
        str, typer.Option(help="Address of the page.", metavar="[HOST:]PORT", show_default="127.0.0.1:8000")
    ] = "8000",
    http_hosts: HostOption = None,
    http_tokens: TokenOption = None,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log lines on stderr.")] = LogFormat.RICH,
    setting: SettingOption = None,
) -> None:
    """Serve one page for the subscriptions of several target databases.

    The command runs no subscriptions: each target has its own launcher. A target that does not answer does not hide the
    others. `subscriber run --http` serves the same page for its own target.
    """
    from subscriber import telemetry
    from subscriber.cli.commands.console import run_console
    from subscriber.cli.logs import configure

    found, address, tokens = read_targets(targets), read_address(http, http_hosts), read_tokens(http_tokens)
    configure(log_format, level=telemetry.LOG)
    _finish(run_console, found, address, tokens, read_settings(setting))


@app.command()
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
    _finish(show, target, names or [], json=json, watch=watch, interval=interval, settings=settings)


@app.command()
def tail(
    source: Source,
    publications: Publications,
    slot: Annotated[
        str | None,
        typer.Option(help="Read this slot and confirm printed changes. Default: a temporary slot.", metavar="NAME"),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many changes.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json/--text", help="JSON lines, or text for people.")] = True,
    setting: SettingOption = None,
) -> None:
    """Print the decoded change stream of a publisher.

    Prints one line for each change, begin and commit. With --slot, printed changes are confirmed, in whole
    transactions, and are not sent again.
    """
    from subscriber.cli.commands.tail import follow

    _finish(follow, source, publications, slot=slot, limit=limit, json=json, settings=read_settings(setting))


@app.command()
def check(
    target: Target,
    name: Annotated[
        str | None, typer.Argument(help="An existing subscription.", metavar="[NAME]", show_default=False)
    ] = None,
    source: MaybeSource = None,
    publications: Annotated[
        list[str] | None,
        typer.Option("--publication", "-p", help="A publication; may be given several times.", metavar="NAME"),
    ] = None,
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
    where = {"name": name, "apply_target": apply_target, "json": json}
    given = [target, None if name else source, publications or []]
    if fix:
        _finish(run_fix, *given, **where, execute=execute, credentials=credentials)
    else:
        _finish(run_checks, *given, **where, two_phase=two_phase)


@app.command("copy")
def copy_(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")],
    apply_target: ApplyTarget = None,
    master: Annotated[
        str, typer.Option(help="Spark's master: local[4], spark://host:7077, yarn, …", metavar="URL")
    ] = "local[*,4]",
    part_size: Annotated[int, typer.Option(help="MiB of a table that one task copies.", min=1)] = 128,
    indexes: Annotated[
        bool, typer.Option("--indexes", help="Build the publisher's indexes that the target lacks, after the copy.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Make the initial copy of a subscription's tables with Spark.

    All tables that wait for their initial copy are split into partitions, which executors copy in parallel. `subscriber
    run` then brings the tables up to date. It starts such a copy itself for subscriptions WITH (copy_engine = spark).
    """
    from subscriber.cli.commands.copy import run_copy

    part_bytes = part_size * 1024 * 1024
    options = {"apply_target": apply_target, "master": master, "part_bytes": part_bytes, "indexes": indexes}
    _finish(run_copy, target, name, **options, quiet=quiet)


app.command()(changelog.archive)
app.command()(changelog.lake)
app.command()(changelog.catchup)
app.add_typer(migrate.app, name="migrate")


@app.command()
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

    _finish(run_adopt, target, name, publications=publications or (), json=json, settings=read_settings(setting))


@app.command("hand-back")
def hand_back(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")],
    json: Json = False,
    setting: SettingOption = None,
) -> None:
    """Return a subscription to PostgreSQL, which continues without a copy.

    Needs a superuser, and a target that reaches the publisher. The command refuses what PostgreSQL would not continue
    exactly, and names the statement that removes the obstacle. After a kill, run it again.
    """
    from subscriber.cli.commands.adopt import run_hand_back

    _finish(run_hand_back, target, name, json=json, settings=read_settings(setting))


@app.command("quarantine")
def quarantine_(
    target: Target,
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    name: Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")],
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

    _finish(
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


@app.command("verify")
def verify_(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")],
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Connections to each server.", min=1)] = 4,
    max_rate: Annotated[
        int | None, typer.Option(help="MiB of tables to read from each server in a second; not with Spark.", min=1)
    ] = None,
    engine: Annotated[
        ComparisonEngine | None, typer.Option(help="Default: asyncio, or spark with --master.", show_default=False)
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="Spark's master: local[4], spark://host:7077, yarn, …", metavar="URL")
    ] = None,
    since: Annotated[
        ComparisonStart | None,
        typer.Option(help="Read only what the stream has changed since then. Needs track_ranges.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Stores results in this file, table by table, and continues if it exists.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compare all tables of a subscription with the publisher's.

    Both sides are compared as of one position, while writes continue; `subscriber run` must be running. Reports the
    keys of the rows that differ, and in which columns. Exits 1 if a table differs or could not be compared, and 4 if
    nothing differs and some rows were not read, because the stream has not changed them since the last comparison.
    """
    from subscriber.cli.commands.verify import run_verify

    _finish(
        run_verify,
        target,
        name,
        engine=engine or (ComparisonEngine.SPARK if master else ComparisonEngine.ASYNCIO),
        master=master or "local[*,4]",
        jobs=jobs,
        max_rate=max_rate * 1024 * 1024 if max_rate else None,
        since_last=since is not None,
        resume=resume,
        json=json,
    )


@app.command("repair")
def repair_(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")],
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Only these tables of the publisher.", metavar="[SCHEMA.TABLE]...", show_default=False),
    ] = None,
    apply_target: ApplyTarget = None,
    from_verify: Annotated[
        Path | None,
        typer.Option(help="Output of verify --json: repair the rows that it names.", metavar="FILE", dir_okay=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the statements, and change nothing.")] = False,
    record_rows: RecordRows = False,
    history: Annotated[
        bool, typer.Option("--history", help="Print the rows that earlier repairs have changed, and change nothing.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Connections to each server.", min=1)] = 4,
    max_rate: Annotated[
        int | None, typer.Option(help="MiB of tables to read from each server in a second.", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """Make the rows of a subscription's tables equal to the publisher's.

    Compares the tables as verify does, and changes the rows that differ. Replication continues, and `subscriber run`
    must be running. Exits 1 if a table could not be repaired completely.
    """
    from subscriber.cli.commands.repair import run_history, run_repair

    if history:
        _finish(run_history, target, name, tables or None, json=json)
        return
    _finish(
        run_repair,
        target,
        name,
        tables=tables or None,
        apply_target=apply_target,
        from_verify=from_verify,
        dry_run=dry_run,
        record_rows=record_rows,
        jobs=jobs,
        max_rate=max_rate * 1024 * 1024 if max_rate else None,
        json=json,
    )


@app.command()
def resync(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")],
    tables: Annotated[
        list[str], typer.Argument(help="Tables of the target.", metavar="[SCHEMA.]TABLE...", show_default=False)
    ],
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Empty the tables and copy them, instead of repairing rows that differ.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the tables are synchronized.")] = True,
) -> None:
    """Synchronize tables again, while the others stream.

    Runs ALTER SUBSCRIPTION … REFRESH TABLE, and waits for the launcher. A kill of this command does not interrupt the
    launcher. Exits 1 if a table could not be synchronized at the first attempt.
    """
    from subscriber.cli.commands.resync import run_resync

    _finish(run_resync, target, name, tables, truncate=truncate, wait=wait)


@app.command()
def reseed(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")],
    json: Json = False,
) -> None:
    """Give a subscription a new slot, and make its tables equal to the publisher's without a copy.

    For a slot that is lost, a target that was restored, and tables that were copied by other means. The launcher's
    workers compare and repair the tables, and continue after a kill of this command. Run it again to wait for them.
    Exits 1 if a table could not be repaired.
    """
    from subscriber.cli.commands.repair import run_reseed

    _finish(run_reseed, target, name, json=json)


@app.command()
def demo(
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Move a database with its applications, back, and there again instead.")
    ] = False,
    seconds: Annotated[int, typer.Option(help="Seconds for which applications write undisturbed.", min=1)] = 20,
    scale: Annotated[int, typer.Option(help="pgbench's scale: 100,000 accounts each.", min=1)] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the servers running until Ctrl-C, and print their connection strings.")
    ] = False,
) -> None:
    """Replicate between two temporary servers, and verify the result.

    While pgbench and a writer of many types write, the worker is killed with SIGKILL and restarted. Then both sides are
    compared row by row; exits 1 if they differ.

    With --migrate, applications write to a shop that moves to the other server. Exits 1 if an order that was
    acknowledged is not there once.
    """
    if migrate:
        from subscriber.demo.move import run_move_demo

        _finish(run_move_demo, seconds=seconds, scale=scale, keep=keep)
        return
    from subscriber.demo.demo import run_demo

    _finish(run_demo, seconds=seconds, scale=scale, keep=keep)


@app.command("uninstall")
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
    _finish(run_uninstall, target, drop_subscriptions=drop_subscriptions, dry_run=dry_run, settings=settings)


def _print_errors(*errors: BaseException) -> None:
    """Print our errors as psql prints a server's. The members of a group are printed one after another."""
    from subscriber.cli.commands.exec import print_error

    for error in errors:
        if isinstance(error, BaseExceptionGroup):
            _print_errors(*error.exceptions)
        else:
            assert isinstance(error, SubscriberError)
            print_error(error, "", sys.stderr)


def _print_bug(error: BaseException) -> None:
    """Print a traceback. It is filtered, because the text of an exception may come from the publisher."""
    for line in traceback.format_exception(error):
        sys.stderr.write(printable_lines(redact(line.rstrip("\n")), "") + "\n")


def main() -> None:
    """Run the command line.

    Our errors become psql's lines on stderr and exit status 3. A bug becomes a traceback and exit status 1.
    """
    arguments.hide_passwords()
    logs.redact_unconfigured()
    try:
        app()
    except SubscriberError as error:
        _print_errors(error)
        sys.exit(FAILED)
    except BaseExceptionGroup as group:
        if group.split(SubscriberError)[1] is not None:
            _print_bug(group)
            sys.exit(BUG)
        _print_errors(group)
        sys.exit(FAILED)
    except BrokenPipeError:  # `subscriber tail | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _print_bug(error)
        sys.exit(BUG)
