"""The steps and results of a move, printed for people or as JSON lines."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from subscriber.cli.messages import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable, printable_lines, shell_word
from subscriber.formatting import in_seconds
from subscriber.migration.migration import Migration
from subscriber.migration.plan import STEPS, StepStage
from subscriber.migration.results import MigrationStatus, MoveResult, StepEvent
from subscriber.migration.running_command import Result

SHOWN = 5  # names of a list in a line for people


async def follow(
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


def show(json: bool, dry_run: bool = False) -> Callable[[StepEvent], None]:
    return _json_event if json else _planned if dry_run else _event


def _event(event: StepEvent) -> None:
    if event.state == "done":
        print(printable(f"{event.step:10} {in_seconds(event.seconds):>8}  {_figures(event)}".rstrip()), flush=True)
    elif event.state == "progress":
        print(printable(f"{event.step:10} {'':8}  {_figures(event)}"), flush=True)
    elif event.state == "failed":
        print(printable(f"{event.step:10} {in_seconds(event.seconds):>8}  failed: {event.error}"), flush=True)


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


def _figures(event: StepEvent) -> str:
    figures = {key: value for key, value in event.detail.items() if key not in ("statements", "seconds")}
    return ", ".join(f"{key} {_few(value)}" for key, value in figures.items() if value not in (None, [], {}))


def _few(value: Any) -> Any:
    """Return the first names of a long list, and the number of the others. --json has all."""
    is_long = isinstance(value, list) and len(value) > SHOWN
    return f"{value[:SHOWN]} and {len(value) - SHOWN} more" if is_long else value


def print_title(command: str, name: str, json: bool) -> None:
    if not json:
        print(printable(f"-- subscriber migrate {command} {shell_word(name)}"))


def print_steps(command: str, json: bool) -> None:
    """Print the steps of a later command, whose statements depend on the ones before."""
    for step in STEPS:
        if json:
            print(json_text({"event": "later", "command": command, **asdict(step)}))
        else:
            print(f"{step.name:10} {step.does}")


def print_moved(moved: MoveResult, json: bool) -> None:
    if json:
        print(json_text({"event": "moved", **asdict(moved)}))
        return
    pause = "" if moved.pause is None else f", after a pause of {in_seconds(moved.pause)}"
    print(printable(f"applications write to the {moved.serving}{pause}"))
    for warning in moved.warnings:
        print_message("WARNING", warning, hint="Run the command again.")


def as_json(found: MigrationStatus) -> dict[str, Any]:
    return {
        "serving": found.standing.serving,
        "phase": found.standing.phase,
        "paused": found.standing.phase.is_paused,
        "servers": [asdict(server) for server in found.servers],
        "commands": list(found.commands),
        "start_step": found.start_step,
    }


def describe(found: MigrationStatus, name: str) -> list[str]:
    serving = found.standing.serving
    if found.standing.phase.is_paused:
        lines = [f"INTERRUPTED ({found.standing.phase}): applications cannot write. They have written to the {serving}"]
    else:
        lines = [f"{found.standing.phase}: applications write to the {serving}"]
    if found.start_step is not None:
        lines = [f"start has not ended: its step {found.start_step} is left; applications write to the {serving}"]
    for server in found.servers:
        subscriptions = ", ".join(
            f"subscription {subscription} {'enabled' if enabled else 'disabled'}"
            for subscription, enabled in server.subscriptions.items()
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
