"""The commands `subscriber migrate …`.

As in main.py, only the modules that --help needs are imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber.cli.dsn import Source, Target
from subscriber.cli.environment import run_command
from subscriber.cli.options import Json
from subscriber.cli.setting_option import read_settings

if TYPE_CHECKING:
    from subscriber.migration.hooks import MoveHook

app = typer.Typer(
    name="migrate",
    help="Move a database to another server, and back, without the loss of a commit.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="The subscription on the target that replicates the source.", metavar="NAME")]
Back = Annotated[
    str | None,
    typer.Option(
        "--back-name", help="The subscription on the source for the way back.", metavar="NAME", show_default="NAME_back"
    ),
]
BackConnection = Annotated[
    str | None,
    typer.Option(
        "--back-connection",
        help="The connection string by which the source's worker reaches the target.",
        metavar="DSN",
        show_default="--target",
    ),
]
MaxPause = Annotated[
    float, typer.Option(help="Seconds without writes, after which the old server opens again.", min=0.1)
]
MaxLag = Annotated[float, typer.Option(help="Seconds that the new server may be behind before the pause.", min=0.01)]
LagWindow = Annotated[float, typer.Option(help="Seconds for which the lag must be lower than --max-lag.", min=0)]
MaxAge = Annotated[float, typer.Option(help="Wait for older transactions, in seconds. Younger ones are ended.", min=0)]
Margin = Annotated[int, typer.Option(help="Increments by which sequences are advanced further.", min=0)]
LargeObjects = Annotated[
    bool, typer.Option("--large-objects", help="Copy the large objects that differ, during the pause.")
]
Verify = Annotated[bool, typer.Option("--verify", help="Compare all tables during the pause.")]
VerifiedWithin = Annotated[
    float | None,
    typer.Option(
        "--verified-within",
        help="Seconds within which `migrate verify` must have found no difference.",
        min=1,
        show_default="not checked",
    ),
]
WaiveGate = Annotated[
    list[str] | None,
    typer.Option(
        "--waive",
        help="A condition that need not hold, such as long_transaction; may be given several times.",
        metavar="CONDITION",
    ),
]
HookOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hook",
        help="A shell command or a URL, called for pause, switch and resume, or for one EVENT; repeatable.",
        metavar="[EVENT=]ACTION",
        show_default=False,
    ),
]
Pgbouncer = Annotated[
    str | None,
    typer.Option("--pgbouncer", help="The admin console of a PgBouncer that pauses clients.", metavar="DSN"),
]
PgbouncerConfig = Annotated[
    Path | None,
    typer.Option("--pgbouncer-config", help="Its file with section [databases].", metavar="FILE", dir_okay=False),
]
PgbouncerDatabase = Annotated[
    str | None,
    typer.Option(
        "--pgbouncer-database",
        help="The database by which clients connect to it.",
        metavar="NAME",
        show_default="that of --source",
    ),
]
Programs = Annotated[
    Path | None,
    typer.Option(help="The directory of pg_dump and pg_restore.", metavar="DIRECTORY", show_default="found on PATH"),
]
Publication = Annotated[
    str | None,
    typer.Option(
        help="The publication on the source; created for all tables if missing.", metavar="NAME", show_default="NAME"
    ),
]
Schema = Annotated[bool, typer.Option(help="Copy roles and definitions to the target.")]
Waive = Annotated[
    list[str] | None,
    typer.Option("--waive", help="The name of a finding to accept; may be given several times.", metavar="FINDING"),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without-publication", help="A publication to leave out; may be given several times.", metavar="NAME"
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Sessions that build indexes and foreign keys.", min=1)]
StartJobs = Annotated[
    int,
    typer.Option("--jobs", "-j", help="Tables that are copied, and indexes that are built, at the same time.", min=1),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the steps and statements, and change nothing.")]


def _move(
    command: str,
    source: str,
    target: str,
    name: str,
    hook: list[str] | None,
    pgbouncer: str | None,
    pgbouncer_config: Path | None,
    pgbouncer_database: str | None,
    **given: Any,
) -> None:
    from subscriber.cli.commands.migrate import run_move

    hooks = _hooks(source, hook, pgbouncer, pgbouncer_config, pgbouncer_database)
    run_command(run_move, command, source, target, name, hooks=hooks, settings=read_settings(None), **given)


def _hooks(
    source: str, hooks: list[str] | None, console: str | None, config: Path | None, database: str | None
) -> tuple[MoveHook, ...]:
    """Return the hooks of a command. PgBouncer pauses first, and resumes first."""
    from subscriber.migration.hooks import MoveHook, address, parse_hook
    from subscriber.migration.pgbouncer import pgbouncer_hook

    if (console is None) is not (config is None):
        raise typer.BadParameter("--pgbouncer and --pgbouncer-config are given together")
    found = [parse_hook(text) for text in hooks or []]
    if console is not None and config is not None:
        found.insert(0, MoveHook(pgbouncer_hook(console, config, database or address(source)[2])))
    return tuple(found)


@app.command()
def status(source: Source, target: Target, name: Name, back_name: Back = None, json: Json = False) -> None:
    """Print where a move stands, both fences, and the next commands.

    Exits 1 while applications can write nowhere.
    """
    from subscriber.cli.commands.migrate import run_status

    run_command(run_status, source, target, name, back_name=back_name, json=json)


@app.command()
def plan(
    source: Source,
    target: Target,
    name: Name,
    publication: Publication = None,
    schema: Schema = True,
    large_objects: Annotated[bool, typer.Option("--large-objects", help="The move copies large objects.")] = False,
    programs: Programs = None,
    json: Json = False,
) -> None:
    """Print what is left of a move, and change nothing.

    The next command is printed as with its --dry-run: steps, statements, conditions and estimates. An estimate is the
    last duration of the step, for example in a rehearsal; of the copy, it follows from the size of the database.
    """
    from subscriber.cli.commands.migrate import run_plan
    from subscriber.migration.start import StartOptions

    options = StartOptions(publication, schema=schema, large_objects=large_objects, programs=programs)
    run_command(run_plan, source, target, name, options=options, json=json)


@app.command()
def start(
    source: Source,
    target: Target,
    name: Name,
    publication: Publication = None,
    source_connection: Annotated[
        str | None,
        typer.Option(
            help="The connection string by which the target's worker reaches the source.",
            metavar="DSN",
            show_default="--source",
        ),
    ] = None,
    waive: Waive = None,
    schema: Schema = True,
    large_objects: Annotated[bool, typer.Option("--large-objects", help="Copy large objects.")] = False,
    programs: Programs = None,
    jobs: StartJobs = 4,
    subscription_options: Annotated[
        str,
        typer.Option("--with", help="More options of CREATE SUBSCRIPTION, as in WITH (…).", metavar="OPTIONS"),
    ] = "",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Copy an empty target from the source, and let it follow: definitions, rows, indexes, statistics.

    Refuses what `preflight` finds, unless it is fixed or waived. The target is fenced. After a kill, run it again.
    """
    from subscriber.cli.commands.migrate import run_start
    from subscriber.migration.start import StartOptions

    options = StartOptions(
        publication, source_connection, tuple(waive or ()), schema, large_objects, programs, jobs, subscription_options
    )
    settings = read_settings(None)
    run_command(run_start, source, target, name, options=options, settings=settings, dry_run=dry_run, json=json)


@app.command()
def verify(source: Source, target: Target, name: Name, back_name: Back = None, json: Json = False) -> None:
    """Compare all rows of both servers while applications write, and store the result in the report.

    `cutover` and `back` ask for it with --verified-within. Exits with an error if tables differ.
    """
    from subscriber.cli.commands.migrate import run_verify

    run_command(run_verify, source, target, name, back_name=back_name, settings=read_settings(None), json=json)


@app.command()
def rehearse(
    source: Source,
    target: Target,
    name: Name,
    back_name: Back = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Also fence the old server for a moment, and open it again.")
    ] = False,
    max_pause: MaxPause = 5.0,
    max_lag: MaxLag = 1.0,
    lag_window: LagWindow = 30.0,
    max_transaction_age: MaxAge = 5.0,
    json: Json = False,
) -> None:
    """Do everything up to the pause, and say how long the pause would be."""
    from subscriber.cli.commands.migrate import run_rehearsal

    limits = {
        "max_pause": max_pause,
        "max_lag": max_lag,
        "lag_window": lag_window,
        "max_transaction_age": max_transaction_age,
    }
    settings = read_settings(None)
    run_command(
        run_rehearsal, source, target, name, back_name=back_name, freeze=freeze, settings=settings, json=json, **limits
    )


@app.command()
def cutover(
    source: Source,
    target: Target,
    name: Name,
    back_name: Back = None,
    back_connection: BackConnection = None,
    max_pause: MaxPause = 5.0,
    max_lag: MaxLag = 1.0,
    lag_window: LagWindow = 30.0,
    max_transaction_age: MaxAge = 5.0,
    sequence_margin: Margin = 0,
    verify: Verify = False,
    verified_within: VerifiedWithin = None,
    waive: WaiveGate = None,
    large_objects: LargeObjects = False,
    hook: HookOption = None,
    pgbouncer: Pgbouncer = None,
    pgbouncer_config: PgbouncerConfig = None,
    pgbouncer_database: PgbouncerDatabase = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Move the applications from the source to the target.

    Both servers are fenced for a moment, so no application writes to both. The source then replicates the target, so
    that `back` loses nothing. An error before the switch opens the source again. After a kill, run the command again,
    or `abort`.
    """
    _move("cutover", **locals())


@app.command()
def back(
    source: Source,
    target: Target,
    name: Name,
    back_name: Back = None,
    max_pause: MaxPause = 5.0,
    max_lag: MaxLag = 1.0,
    lag_window: LagWindow = 30.0,
    max_transaction_age: MaxAge = 5.0,
    sequence_margin: Margin = 0,
    verify: Verify = False,
    verified_within: VerifiedWithin = None,
    waive: WaiveGate = None,
    large_objects: LargeObjects = False,
    hook: HookOption = None,
    pgbouncer: Pgbouncer = None,
    pgbouncer_config: PgbouncerConfig = None,
    pgbouncer_database: PgbouncerDatabase = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Move the applications back from the target to the source, as `cutover` has moved them there."""
    _move("back", **locals())


@app.command()
def abort(
    source: Source,
    target: Target,
    name: Name,
    back_name: Back = None,
    hook: HookOption = None,
    pgbouncer: Pgbouncer = None,
    pgbouncer_config: PgbouncerConfig = None,
    pgbouncer_database: PgbouncerDatabase = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Undo an interrupted cutover: the server that applications have written to opens again.

    Removes its fence and the way back. Also works while the other server cannot be reached, unless it may be open.
    """
    from subscriber.cli.commands.migrate import run_abort

    hooks = _hooks(source, hook, pgbouncer, pgbouncer_config, pgbouncer_database)
    run_command(run_abort, source, target, name, back_name=back_name, hooks=hooks, dry_run=dry_run, json=json)


@app.command()
def finish(
    source: Source,
    target: Target,
    name: Name,
    back_name: Back = None,
    release: Annotated[bool, typer.Option("--release", help="Also open the server without applications.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """End the move: drop both subscriptions, and remove the fence of the server that applications write to.

    Publications that the move has created are dropped, too. There is no way back after this. The other server stays
    fenced, because a write there would be lost.
    """
    from subscriber.cli.commands.migrate import run_finish

    run_command(run_finish, source, target, name, back_name=back_name, release=release, dry_run=dry_run, json=json)


@app.command()
def preflight(
    source: Source,
    target: Target,
    waive: Waive = None,
    schema: Schema = True,
    large_objects: Annotated[bool, typer.Option("--large-objects", help="The move copies large objects.")] = False,
    programs: Programs = None,
    publication: Annotated[
        str | None,
        typer.Option(help="An existing publication that the move uses.", metavar="NAME", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Find what a move would leave behind, and what prevents it. Changes nothing.

    Prints a fix for each finding. Exits 1 if an error is neither fixed nor waived.
    """
    from subscriber.cli.commands.preflight import print_preflight

    run_command(
        print_preflight,
        source,
        target,
        schema=schema,
        large_objects=large_objects,
        programs=programs,
        publication=publication,
        waive=waive or [],
        json=json,
    )


@app.command()
def schema(
    source: Source,
    target: Target,
    after_copy: Annotated[
        bool, typer.Option("--after-copy", help="Create what the initial copy does not need, and analyze tables.")
    ] = False,
    programs: Programs = None,
    jobs: Jobs = 2,
    without: Without = None,
    large_objects: Annotated[
        bool, typer.Option("--large-objects", help="With --after-copy, also copy large objects.")
    ] = False,
    trusted_owner: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-owner", metavar="ROLE", help="Let code of this role have all rights of the target's role."
        ),
    ] = None,
    same_role: Annotated[
        list[str] | None,
        typer.Option(
            "--same-role", metavar="ROLE", help="This role of the target is the one of the source with its name."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Copy roles and definitions to the target with pg_dump. Subscriptions are left out.

    Before the initial copy: roles, tables and the rest of pre-data, primary keys and indexes of replica identities.
    With --after-copy: other indexes, constraints, triggers and so on. After a kill, the command continues.
    """
    from subscriber.cli.commands.schema_transfer import complete_definitions, copy_definitions

    if after_copy:
        if dry_run:
            raise typer.BadParameter("--dry-run is not possible with --after-copy; use diff --sql")
        run_command(
            complete_definitions,
            source,
            target,
            programs=programs,
            jobs=jobs,
            without=without or [],
            large_objects=large_objects,
            trusted_owners=trusted_owner or [],
        )
    if large_objects:
        raise typer.BadParameter("--large-objects needs --after-copy")
    run_command(
        copy_definitions,
        source,
        target,
        programs=programs,
        dry_run=dry_run,
        trusted_owners=trusted_owner or [],
        same_roles=same_role or [],
    )


@app.command()
def diff(
    source: Source,
    target: Target,
    without: Without = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print statements that make the target like the source.")] = False,
    json: Json = False,
) -> None:
    """Compare the definitions of both servers, from their catalogs. Exits 1 if they differ."""
    from subscriber.cli.commands.schema_diff import print_schema_diff

    run_command(print_schema_diff, source, target, without=without or [], json=json, sql=sql)


@app.command()
def report(
    source: Source,
    target: Target,
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option(
            help="A file: HTML if its name ends so, else JSON.", metavar="FILE", show_default="JSON on stdout"
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Compare this report with both servers in place of writing one.", metavar="FILE"),
    ] = None,
    rows: Annotated[bool, typer.Option(help="Count the rows of each table, and add their checksums.")] = True,
) -> None:
    """Write the report of a move: steps, statements, times, positions, rows, the pause and waived findings.

    With --check, exits 1 if the file was changed, or the servers disagree with it.
    """
    from subscriber.cli.commands.move_report import check_report, write_report

    if check is not None:
        run_command(check_report, source, target, name, check)
    run_command(write_report, source, target, name, output=output, checksums=rows)
