"""`subscriber migrate …`: run a move, and print its steps for people or as JSON lines."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from subscriber.cli.commands.exec import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable, printable_lines, shell_word
from subscriber.formatting import in_seconds
from subscriber.migration.hooks import MoveHook
from subscriber.migration.migration import Migration, move_database
from subscriber.migration.plan import STEPS, Phase, Side, StepStage
from subscriber.migration.results import MigrationStatus, MoveResult, StepEvent
from subscriber.migration.running_command import Result
from subscriber.migration.start import StartOptions
from subscriber.migration.steps import MoveOptions
from subscriber.settings import Settings

SHOWN = 5  # names of a list in a line for people
PAUSED = 1  # the exit status of `status` while applications can write nowhere


async def run_status(source: str, target: str, name: str, *, back_name: str | None, json: bool) -> int:
    """Print where a move stands. Returns the exit status."""
    async with move_database(source, target, name, back_name=back_name, run=False, partial=True) as moving:
        found = await moving.status()
    print(json_text(_status_json(found)) if json else "\n".join(map(printable, _describe(found, name))))
    return PAUSED if found.standing.phase.is_paused else 0


def _show(json: bool, dry_run: bool = False) -> Callable[[StepEvent], None]:
    return _json_event if json else _planned if dry_run else _event


async def run_plan(source: str, target: str, name: str, *, options: StartOptions, json: bool) -> int:
    """Print the commands of a move that are left, the next one with its statements. Returns the exit status."""
    later = ["cutover"]
    show = _show(json, True)
    async with move_database(source, target, name, dry_run=True) as moving:
        standing = await moving.standing()
        if standing.phase is Phase.FINISHED:
            later = []
        elif standing.phase is Phase.FINISHING:
            _title("finish", name, json)
            await _follow(moving, moving.finish(), show)
            later = []
        elif not await moving.is_started():
            _title("start", name, json)
            await _follow(moving, moving.start(options), show)
        elif standing.serving is Side.SOURCE:
            _title("cutover", name, json)
            await _follow(moving, moving.cutover(), show)
            later = []
        else:
            _title("finish", name, json)
            await _follow(moving, moving.finish(), show)
            later = ["back"]
    for command in later:
        _title(command, name, json)
        _print_steps(command, json)
    return 0


def _title(command: str, name: str, json: bool) -> None:
    if not json:
        print(printable(f"-- subscriber migrate {command} {shell_word(name)}"))


async def run_start(
    source: str, target: str, name: str, *, options: StartOptions, settings: Settings, dry_run: bool, json: bool
) -> int:
    """Let the target follow the source, and print the steps. Returns the exit status."""
    async with move_database(source, target, name, dry_run=dry_run, settings=settings) as moving:
        await _follow(moving, moving.start(options), _show(json, dry_run), _jobs_notice(moving))
        if dry_run:
            return 0
        found = await moving.status()
    if not json:
        print(f"the target follows the source; next: subscriber migrate {found.commands[0]} {shell_word(name)}")
    _warn_of_no_launcher(found, moving)
    return 0


async def run_verify(
    source: str, target: str, name: str, *, back_name: str | None, settings: Settings, json: bool
) -> int:
    """Compare all rows of both servers. Returns the exit status."""
    async with move_database(source, target, name, back_name=back_name, settings=settings) as moving:
        await _follow(moving, moving.verify(), _show(json))
    if not json:
        print("no row differs")
    return 0


async def run_rehearsal(
    source: str,
    target: str,
    name: str,
    *,
    back_name: str | None,
    freeze: bool,
    settings: Settings,
    json: bool,
    **limits: Any,
) -> int:
    """Measure the pause that a move would have. Returns the exit status."""
    options = MoveOptions(**limits)
    async with move_database(source, target, name, back_name=back_name, options=options, settings=settings) as moving:
        found = await _follow(moving, moving.rehearse(freeze=freeze), _show(json))
    if json:
        print(json_text({"event": "rehearsed", **asdict(found)}))
    else:
        said = "the pause was" if freeze else "without the end of sessions, the pause would be about"
        print(f"{said} {in_seconds(found.estimate if found.pause is None else found.pause)}")
    return 0


async def run_move(
    command: str,
    source: str,
    target: str,
    name: str,
    *,
    back_name: str | None,
    dry_run: bool,
    settings: Settings,
    json: bool,
    back_connection: str | None = None,
    waive: list[str] | None = None,
    **limits: Any,
) -> int:
    """Run `cutover` or `back`, and print its steps. Returns the exit status."""
    options = MoveOptions(back_conninfo=back_connection, waive=tuple(waive or ()), **limits)
    async with move_database(
        source, target, name, back_name=back_name, options=options, dry_run=dry_run, settings=settings
    ) as moving:
        call = moving.cutover() if command == "cutover" else moving.back()
        moved = await _follow(moving, call, _show(json, dry_run))
        if dry_run:
            return 0
        found = await moving.status()
    _print_moved(moved, json)
    _warn_of_no_launcher(found, moving)
    return 0


async def run_abort(
    source: str,
    target: str,
    name: str,
    *,
    back_name: str | None,
    hooks: tuple[MoveHook, ...],
    dry_run: bool,
    json: bool,
) -> int:
    """Undo an interrupted move. Returns the exit status."""
    async with move_database(
        source,
        target,
        name,
        back_name=back_name,
        options=MoveOptions(hooks=hooks),
        run=False,
        partial=True,
        dry_run=dry_run,
    ) as moving:
        standing = await _follow(moving, moving.abort(), _show(json, dry_run))
    if dry_run:
        return 0
    line = {"event": "aborted", "serving": standing.serving}
    print(json_text(line) if json else f"applications can write to the {standing.serving}")
    return 0


async def run_finish(
    source: str, target: str, name: str, *, back_name: str | None, release: bool, dry_run: bool, json: bool
) -> int:
    """End a move. Returns the exit status."""
    async with move_database(source, target, name, back_name=back_name, run=False, dry_run=dry_run) as moving:
        standing = await _follow(moving, moving.finish(release=release), _show(json, dry_run))
    if dry_run:
        return 0
    fenced = "open" if release else "fenced"
    line = {"event": "finished", "serving": standing.serving, standing.serving.other: fenced}
    print(
        json_text(line)
        if json
        else f"the {standing.serving} has the database; the {standing.serving.other} is {fenced}"
    )
    return 0


def _jobs_notice(moving: Migration) -> Callable[[StepEvent], None]:
    """Return a function for the events of `start`: says once if another launcher copies the tables."""
    progress: list[StepEvent] = []

    def listen(event: StepEvent) -> None:
        if event.step != "copy" or event.state != "progress":
            return
        progress.append(event)  # the second one: a table is copied
        if len(progress) == 2 and moving.launchers is not None and Side.TARGET not in moving.launchers.leading:
            print_message(
                "NOTICE",
                "another process runs the launcher of the target, so --jobs has no effect on the copy",
                None,
                "Its settings are max_sync_workers and index_sessions, as in subscriber run --setting"
                " max_sync_workers=4.",
                sys.stderr,
            )

    return listen


async def _follow(
    moving: Migration,
    command: Awaitable[Result],
    show: Callable[[StepEvent], None],
    listen: Callable[[StepEvent], None] = lambda _: None,
) -> Result:
    """Run a command of a move, and show its events, which `listen` gets, too.

    SIGTERM and SIGINT cancel the command. Before the switch, that opens the serving server again.
    """
    with ProgressLine("connecting", json=show is _json_event) as line:
        async with moving.running(command) as running:
            with _on_signal(running.cancel):
                async for event in running:
                    if event.state == "begin":
                        line.show(event.step)
                    show(event)
                    listen(event)
    if running.canceled:
        raise KeyboardInterrupt
    return running.result


@contextmanager
def _on_signal(action: Callable[[], None]) -> Iterator[None]:
    # A task with anyio's receiver would need a group, which would wrap the error of the command.
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _event(event: StepEvent) -> None:
    if event.state == "done":
        print(printable(f"{event.step:10} {in_seconds(event.seconds):>8}  {_figures(event)}".rstrip()), flush=True)
    elif event.state == "progress":
        print(printable(f"{event.step:10} {'':8}  {_figures(event)}"), flush=True)
    elif event.state == "failed":
        print(printable(f"{event.step:10} {in_seconds(event.seconds):>8}  failed: {event.error}"), flush=True)


def _figures(event: StepEvent) -> str:
    figures = {key: value for key, value in event.detail.items() if key not in ("statements", "seconds")}
    return ", ".join(f"{key} {_few(value)}" for key, value in figures.items() if value not in (None, [], {}))


def _few(value: Any) -> Any:
    """Return the first names of a long list, and the number of the others. --json has all."""
    is_long = isinstance(value, list) and len(value) > SHOWN
    return f"{value[:SHOWN]} and {len(value) - SHOWN} more" if is_long else value


def _planned(event: StepEvent) -> None:
    """Print a step of a dry run."""
    detail = event.detail
    print(printable(f"{event.step:10} {detail.get('does') or ''}".rstrip()))
    facts = []
    if detail.get("waits"):
        facts.append(f"waits until: {detail['waits']}")
    if detail.get("limit") is not None:
        facts.append(f"at most {detail['limit']:g} s")
    elif detail.get("stage") == StepStage.PAUSE:
        facts.append("within --max-pause")
    if detail.get("estimate") is not None:
        facts.append(f"estimate {in_seconds(detail['estimate'])}")
    if detail.get("undo"):
        facts.append(f"undo: {detail['undo']}")
    if facts:
        print(printable(f"           {'; '.join(facts)}"))
    for noted in detail["statements"]:
        print(printable_lines(f"{noted['on']}: {noted['statement'].rstrip(';')};", indent=" " * 4))
    if event.error:
        print(printable_lines(f"REFUSED: {event.error}", indent=" " * 4))


def _json_event(event: StepEvent) -> None:
    print(json_text({"event": "step", **asdict(event)}), flush=True)


def _print_moved(moved: MoveResult, json: bool) -> None:
    if json:
        print(json_text({"event": "moved", **asdict(moved)}))
        return
    pause = "" if moved.pause is None else f", after a pause of {in_seconds(moved.pause)}"
    print(printable(f"applications write to the {moved.serving}{pause}"))
    for warning in moved.warnings:
        print_message("WARNING", warning, None, "Run the command again.", sys.stderr)


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
                sys.stderr,
            )


def _print_steps(command: str, json: bool) -> None:
    """Print the steps of a later command, whose statements depend on the ones before."""
    for step in STEPS:
        if json:
            print(json_text({"event": "later", "command": command, **asdict(step)}))
        else:
            print(f"{step.name:10} {step.does}")


def _status_json(found: MigrationStatus) -> dict[str, Any]:
    return {
        "serving": found.standing.serving,
        "phase": found.standing.phase,
        "paused": found.standing.phase.is_paused,
        "servers": [asdict(server) for server in found.servers],
        "commands": list(found.commands),
        "start_step": found.start_step,
    }


def _describe(found: MigrationStatus, name: str) -> list[str]:
    serving = found.standing.serving
    if found.standing.phase.is_paused:
        lines = [f"INTERRUPTED ({found.standing.phase}): applications cannot write. They have written to the {serving}"]
    else:
        lines = [f"{found.standing.phase}: applications write to the {serving}"]
    if found.start_step is not None:
        lines = [f"start has not ended: its step {found.start_step} is left; applications write to the {serving}"]
    for server in found.servers:
        subscriptions = ", ".join(
            f"subscription {one} {'enabled' if enabled else 'disabled'}"
            for one, enabled in server.subscriptions.items()
        )
        launcher = "launcher runs" if server.launcher else "no launcher"
        lines.append(
            f"  {server.side}: fence {server.fence} ({server.tables} tables), {subscriptions or 'no subscription'},"
            f" {launcher}"
        )
    if found.commands:
        word = shell_word(name)
        lines.append(f"next: {' or '.join(f'subscriber migrate {command} {word}' for command in found.commands)}")
    return lines
