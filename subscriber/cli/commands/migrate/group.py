"""The commands `subscriber migrate …` that make a move."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber.cli.commands.migrate.diff import diff
from subscriber.cli.commands.migrate.options import (
    Back,
    BackConnection,
    DryRun,
    HookOption,
    LagWindow,
    LargeObjects,
    Margin,
    MaxAge,
    MaxLag,
    MaxPause,
    Name,
    Pgbouncer,
    PgbouncerConfig,
    PgbouncerDatabase,
    Programs,
    Publication,
    Schema,
    StartJobs,
    VerifiedWithin,
    Verify,
    Waive,
    WaiveGate,
)
from subscriber.cli.commands.migrate.preflight import preflight
from subscriber.cli.commands.migrate.report import report
from subscriber.cli.commands.migrate.schema import schema
from subscriber.cli.dsn import Source, Target
from subscriber.cli.lazy_commands import CommandGroup
from subscriber.cli.messages import print_message
from subscriber.cli.options import Json
from subscriber.cli.setting_option import read_settings
from subscriber.display import json_text, printable, shell_word
from subscriber.formatting import in_seconds

if TYPE_CHECKING:
    from subscriber.migration.hooks import MoveHook
    from subscriber.migration.migration import Migration
    from subscriber.migration.results import MigrationStatus, StepEvent

PAUSED = 1  # the exit status of `status` while applications can write nowhere

migrate = CommandGroup("Move a database to another server, and back, without the loss of a commit.")


@migrate.add
async def status(source: Source, target: Target, name: Name, back_name: Back = None, json: Json = False) -> int:
    """Print where a move stands, both fences, and the next commands.

    Exits 1 while applications can write nowhere.
    """
    from subscriber.cli.commands.migrate.lines import as_json, describe
    from subscriber.migration.migration import move_database

    async with move_database(source, target, name, back_name=back_name, run=False, partial=True) as moving:
        move_status = await moving.status()
    print(json_text(as_json(move_status)) if json else "\n".join(map(printable, describe(move_status, name))))
    return PAUSED if move_status.standing.phase.is_paused else 0


@migrate.add
async def plan(
    source: Source,
    target: Target,
    name: Name,
    publication: Publication = None,
    schema: Schema = True,
    large_objects: Annotated[bool, typer.Option("--large-objects", help="The move copies large objects.")] = False,
    programs: Programs = None,
    json: Json = False,
) -> int:
    """Print what is left of a move, and change nothing.

    The next command is printed as with its --dry-run: steps, statements, conditions and estimates. An estimate is the
    last duration of the step, for example in a rehearsal; of the copy, it follows from the size of the database.
    """
    from subscriber.cli.commands.migrate import lines
    from subscriber.migration.migration import move_database
    from subscriber.migration.plan import Phase, Side
    from subscriber.migration.start import StartOptions

    options = StartOptions(publication, schema=schema, large_objects=large_objects, programs=programs)
    async with move_database(source, target, name, dry_run=True) as moving:
        standing = await moving.standing()
        if standing.phase is Phase.FINISHED:
            return 0
        call: Callable[[], Awaitable[Any]]
        command, call, later = "finish", moving.finish, list[str]()
        if standing.phase is not Phase.FINISHING:
            if not await moving.is_started():
                command, call, later = "start", partial(moving.start, options), ["cutover"]
            elif standing.serving is Side.SOURCE:
                command, call = "cutover", moving.cutover
            else:
                later = ["back"]
        lines.print_title(command, name, json)
        await lines.follow(moving, call(), lines.show(json, dry_run=True))
    for command in later:
        lines.print_title(command, name, json)
        lines.print_steps(command, json)
    return 0


@migrate.add
async def start(
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
) -> int:
    """Copy an empty target from the source, and let it follow: definitions, rows, indexes, statistics.

    Refuses what `preflight` finds, unless it is fixed or waived. The target is fenced. After a kill, run it again.
    """
    from subscriber.cli.commands.migrate import lines
    from subscriber.migration.migration import move_database
    from subscriber.migration.start import StartOptions

    options = StartOptions(
        publication, source_connection, tuple(waive or ()), schema, large_objects, programs, jobs, subscription_options
    )
    async with move_database(source, target, name, dry_run=dry_run, settings=read_settings(None)) as moving:
        await lines.follow(moving, moving.start(options), lines.show(json, dry_run), _jobs_notice(moving))
        if dry_run:
            return 0
        move_status = await moving.status()
    if not json:
        print(f"the target follows the source; next: subscriber migrate {move_status.commands[0]} {shell_word(name)}")
    _warn_of_no_launcher(move_status, moving)
    return 0


@migrate.add
async def verify(source: Source, target: Target, name: Name, back_name: Back = None, json: Json = False) -> int:
    """Compare all rows of both servers while applications write, and store the result in the report.

    `cutover` and `back` ask for it with --verified-within. Exits with an error if tables differ.
    """
    from subscriber.cli.commands.migrate import lines
    from subscriber.migration.migration import move_database

    async with move_database(source, target, name, back_name=back_name, settings=read_settings(None)) as moving:
        await lines.follow(moving, moving.verify(), lines.show(json))
    if not json:
        print("no row differs")
    return 0


@migrate.add
async def rehearse(
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
) -> int:
    """Do everything up to the pause, and say how long the pause would be."""
    from subscriber.cli.commands.migrate import lines
    from subscriber.migration.migration import move_database
    from subscriber.migration.steps import MoveOptions

    options = MoveOptions(
        max_pause=max_pause, max_lag=max_lag, lag_window=lag_window, max_transaction_age=max_transaction_age
    )
    settings = read_settings(None)
    async with move_database(source, target, name, back_name=back_name, options=options, settings=settings) as moving:
        rehearsal = await lines.follow(moving, moving.rehearse(freeze=freeze), lines.show(json))
    if json:
        print(json_text({"event": "rehearsed", **asdict(rehearsal)}))
    else:
        said = "the pause was" if freeze else "without the end of sessions, the pause would be about"
        print(f"{said} {in_seconds(rehearsal.estimate if rehearsal.pause is None else rehearsal.pause)}")
    return 0


@migrate.add
async def cutover(
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
) -> int:
    """Move the applications from the source to the target.

    Both servers are fenced for a moment, so no application writes to both. The source then replicates the target, so
    that `back` loses nothing. An error before the switch opens the source again. After a kill, run the command again,
    or `abort`.
    """
    return await _move("cutover", **locals())


@migrate.add
async def back(
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
) -> int:
    """Move the applications back from the target to the source, as `cutover` has moved them there."""
    return await _move("back", **locals())


@migrate.add
async def abort(
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
) -> int:
    """Undo an interrupted cutover: the server that applications have written to opens again.

    Removes its fence and the way back. Also works while the other server cannot be reached, unless it may be open.
    """
    from subscriber.cli.commands.migrate import lines
    from subscriber.migration.migration import move_database
    from subscriber.migration.steps import MoveOptions

    options = MoveOptions(hooks=_hooks(source, hook, pgbouncer, pgbouncer_config, pgbouncer_database))
    async with move_database(
        source, target, name, back_name=back_name, options=options, run=False, partial=True, dry_run=dry_run
    ) as moving:
        standing = await lines.follow(moving, moving.abort(), lines.show(json, dry_run))
    if not dry_run:
        line = {"event": "aborted", "serving": standing.serving}
        print(json_text(line) if json else f"applications can write to the {standing.serving}")
    return 0


@migrate.add
async def finish(
    source: Source,
    target: Target,
    name: Name,
    back_name: Back = None,
    release: Annotated[bool, typer.Option("--release", help="Also open the server without applications.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """End the move: drop both subscriptions, and remove the fence of the server that applications write to.

    Publications that the move has created are dropped, too. There is no way back after this. The other server stays
    fenced, because a write there would be lost.
    """
    from subscriber.cli.commands.migrate import lines
    from subscriber.migration.migration import move_database

    async with move_database(source, target, name, back_name=back_name, run=False, dry_run=dry_run) as moving:
        standing = await lines.follow(moving, moving.finish(release=release), lines.show(json, dry_run))
    if not dry_run:
        serving, other, fenced = standing.serving, standing.serving.other, "open" if release else "fenced"
        line = {"event": "finished", "serving": serving, other: fenced}
        print(json_text(line) if json else f"the {serving} has the database; the {other} is {fenced}")
    return 0


for function in (preflight, schema, diff, report):
    migrate.add(function)


async def _move(
    command: str,
    source: str,
    target: str,
    name: str,
    back_name: str | None,
    hook: list[str] | None,
    pgbouncer: str | None,
    pgbouncer_config: Path | None,
    pgbouncer_database: str | None,
    dry_run: bool,
    json: bool,
    waive: list[str] | None,
    back_connection: str | None = None,
    **limits: Any,
) -> int:
    """Run `cutover` or `back`, and print its steps. Returns the exit status."""
    from subscriber.cli.commands.migrate import lines
    from subscriber.migration.migration import move_database
    from subscriber.migration.steps import MoveOptions

    hooks = _hooks(source, hook, pgbouncer, pgbouncer_config, pgbouncer_database)
    options = MoveOptions(back_conninfo=back_connection, waive=tuple(waive or ()), hooks=hooks, **limits)
    settings = read_settings(None)
    async with move_database(
        source, target, name, back_name=back_name, options=options, dry_run=dry_run, settings=settings
    ) as moving:
        call = moving.cutover() if command == "cutover" else moving.back()
        moved = await lines.follow(moving, call, lines.show(json, dry_run))
        if dry_run:
            return 0
        move_status = await moving.status()
    lines.print_moved(moved, json)
    _warn_of_no_launcher(move_status, moving)
    return 0


def _hooks(
    source: str, hooks: list[str] | None, console: str | None, config: Path | None, database: str | None
) -> tuple[MoveHook, ...]:
    """Return the hooks of a command. PgBouncer pauses first, and resumes first."""
    from subscriber.migration.hooks import MoveHook, address, parse_hook
    from subscriber.migration.pgbouncer import pgbouncer_hook

    if (console is None) is not (config is None):
        raise typer.BadParameter("--pgbouncer and --pgbouncer-config are given together")
    parsed = [parse_hook(text) for text in hooks or []]
    if console is not None and config is not None:
        parsed.insert(0, MoveHook(pgbouncer_hook(console, config, database or address(source)[2])))
    return tuple(parsed)


def _jobs_notice(moving: Migration) -> Callable[[StepEvent], None]:
    """Return a function for the events of `start`: says once if another launcher copies the tables."""
    from subscriber.migration.plan import Side

    progress: list[StepEvent] = []

    def listen(event: StepEvent) -> None:
        if event.step != "copy" or event.state != "progress":
            return
        progress.append(event)  # the second one: a table is copied
        if len(progress) == 2 and moving.launchers is not None and Side.TARGET not in moving.launchers.leading:
            print_message(
                "NOTICE",
                "another process runs the launcher of the target, so --jobs has no effect on the copy",
                hint="Its settings are max_sync_workers and index_sessions, as in subscriber run --setting"
                " max_sync_workers=4.",
            )

    return listen


def _warn_of_no_launcher(found: MigrationStatus, moving: Migration) -> None:
    """Warn of a following server on which no other launcher waits to continue."""
    for server in found.servers:
        is_ours = moving.launchers is not None and server.side in moving.launchers.leading
        if server.side is found.standing.following and is_ours and not server.standby:
            print_message(
                "WARNING",
                f"no launcher is running on the {server.side}",
                "Its subscription replicates nothing now.",
                f"Start one: subscriber run --target DSN, with the connection string of the {server.side}",
            )
