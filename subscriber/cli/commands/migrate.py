"""`subscriber migrate …`: run a move, and print its steps for people or as JSON lines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import anyio

from subscriber.cli.commands.exec import print_message
from subscriber.display import json_text, printable
from subscriber.formatting import in_seconds
from subscriber.migration.hooks import MoveHook
from subscriber.migration.migration import Migration, move_database
from subscriber.migration.plan import STEPS, StepStage
from subscriber.migration.results import MigrationStatus, MoveResult, StepEvent
from subscriber.migration.start import StartOptions
from subscriber.migration.steps import MoveOptions

PAUSED = 1  # the exit status of `status` while applications can write nowhere


async def run_status(source: str, target: str, name: str, *, back_name: str | None, json: bool) -> int:
    """Print where a move stands. Returns the exit status."""
    async with move_database(source, target, name, back_name=back_name, run=False, partial=True) as moving:
        found = await moving.status()
    print(json_text(_status_json(found)) if json else "\n".join(map(printable, _describe(found, name))))
    return PAUSED if found.standing.phase.is_paused else 0


async def run_start(source: str, target: str, name: str, *, options: StartOptions, json: bool) -> int:
    """Let the target follow the source, and print the steps. Returns the exit status."""
    show = _json_event if json else _event
    async with move_database(source, target, name, on_event=show) as moving:
        await moving.start(options)
        found = await moving.status()
    if not json:
        print(f"the target follows the source; next: subscriber migrate {found.commands[0]} {name}")
    _warn_of_no_launcher(found, moving)
    return 0


async def run_rehearsal(
    source: str, target: str, name: str, *, back_name: str | None, freeze: bool, json: bool, **limits: Any
) -> int:
    """Measure the pause that a move would have. Returns the exit status."""
    show = _json_event if json else _event
    options = MoveOptions(**limits)
    async with move_database(source, target, name, back_name=back_name, options=options, on_event=show) as moving:
        found = await moving.rehearse(freeze=freeze)
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
    json: bool,
    back_connection: str | None = None,
    **limits: Any,
) -> int:
    """Run `cutover` or `back`, and print its steps. Returns the exit status."""
    if dry_run:
        _print_plan(json)
        return 0
    options = MoveOptions(back_conninfo=back_connection, **limits)
    show = _json_event if json else _event
    async with move_database(source, target, name, back_name=back_name, options=options, on_event=show) as moving:
        moved = await _until_signal(moving.cutover if command == "cutover" else moving.back)
        found = await moving.status()
    _print_moved(moved, json)
    _warn_of_no_launcher(found, moving)
    return 0


async def run_abort(
    source: str, target: str, name: str, *, back_name: str | None, hooks: tuple[MoveHook, ...], json: bool
) -> int:
    """Undo an interrupted move. Returns the exit status."""
    show = _json_event if json else _event
    options = MoveOptions(hooks=hooks)
    async with move_database(
        source, target, name, back_name=back_name, options=options, on_event=show, run=False, partial=True
    ) as moving:
        standing = await moving.abort()
    line = {"event": "aborted", "serving": standing.serving}
    print(json_text(line) if json else f"applications can write to the {standing.serving}")
    return 0


async def run_finish(source: str, target: str, name: str, *, back_name: str | None, release: bool, json: bool) -> int:
    """End a move. Returns the exit status."""
    show = _json_event if json else _event
    async with move_database(source, target, name, back_name=back_name, on_event=show, run=False) as moving:
        standing = await moving.finish(release=release)
    fenced = "open" if release else "fenced"
    line = {"event": "finished", "serving": standing.serving, standing.serving.other: fenced}
    print(
        json_text(line)
        if json
        else f"the {standing.serving} has the database; the {standing.serving.other} is {fenced}"
    )
    return 0


async def _until_signal(work: Callable[[], Awaitable[MoveResult]]) -> MoveResult:
    """Run a move, and cancel it on SIGTERM. Before the switch, that opens the serving server again."""
    result: list[MoveResult] = []

    async def watch(scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        result.append(await work())
        tasks.cancel_scope.cancel()
    if not result:
        raise KeyboardInterrupt
    return result[0]


def _event(event: StepEvent) -> None:
    if event.state == "done":
        figures = {key: value for key, value in event.detail.items() if key not in ("statements", "seconds")}
        said = ", ".join(f"{key} {value}" for key, value in figures.items() if value not in (None, [], {}))
        print(printable(f"{event.step:10} {in_seconds(event.seconds):>8}  {said}".rstrip()), flush=True)
    elif event.state == "progress":
        print(printable(f"{event.step:10} {event.detail}"), flush=True)
    elif event.state == "failed":
        print(printable(f"{event.step:10} {in_seconds(event.seconds):>8}  failed: {event.error}"), flush=True)


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
        if server.side is found.standing.following and server.side in moving.leading:
            print_message(
                "WARNING",
                f"no launcher is running on the {server.side}",
                "Its subscription replicates nothing now.",
                f"Start one: subscriber run --target DSN, with the connection string of the {server.side}",
                sys.stderr,
            )


def _print_plan(json: bool) -> None:
    for step in STEPS:
        if json:
            print(json_text(asdict(step)))
            continue
        limit = (
            "within --max-pause" if step.limit is None and step.stage is StepStage.PAUSE else f"at most {step.limit} s"
        )
        print(f"{step.name:10} {step.where:10} {step.does}")
        print(f"{'':10} {'':10} waits until: {step.waits}; {limit}" if step.waits else f"{'':21} {limit}")


def _status_json(found: MigrationStatus) -> dict[str, Any]:
    return {
        "serving": found.standing.serving,
        "phase": found.standing.phase,
        "paused": found.standing.phase.is_paused,
        "servers": [asdict(server) for server in found.servers],
        "commands": list(found.commands),
    }


def _describe(found: MigrationStatus, name: str) -> list[str]:
    serving = found.standing.serving
    if found.standing.phase.is_paused:
        lines = [f"INTERRUPTED ({found.standing.phase}): applications cannot write. They have written to the {serving}"]
    else:
        lines = [f"{found.standing.phase}: applications write to the {serving}"]
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
        lines.append(f"next: {' or '.join(f'subscriber migrate {command} {name}' for command in found.commands)}")
    return lines
