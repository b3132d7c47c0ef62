"""`subscriber adopt` and `subscriber hand-back`: move a subscription between PostgreSQL and this program."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio

from subscriber.catalog import locks, worker_sessions
from subscriber.catalog.commands.adopt import adopt_subscription
from subscriber.catalog.commands.hand_back import hand_back_subscription
from subscriber.catalog.commands.handover import LOCK_TIMEOUT, POLL, Moved
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.cli.commands.exec import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable
from subscriber.errors import StatementError
from subscriber.formatting import count
from subscriber.settings import Settings
from subscriber.sqlstate import OBJECT_IN_USE

LAUNCHER_START = 1.0  # seconds for a launcher to become the leader
MOVE_PATIENCE = 60.0  # seconds for the command of another user to end


async def run_adopt(target: str, name: str, *, json: bool, settings: Settings, publications: Sequence[str] = ()) -> int:
    """Take over a subscription of PostgreSQL's own or of pglogical, and print each step. Returns the exit status."""
    move = partial(adopt_subscription, publications=publications)
    moved = await _move(move, "subscriber adopt", target, name, json, settings)
    _print_result(moved, name, "subscriber", json)
    return 0


async def run_hand_back(target: str, name: str, *, json: bool, settings: Settings) -> int:
    """Return a subscription to PostgreSQL, and print each step. Returns the exit status."""
    moved = await _move(hand_back_subscription, "subscriber hand-back", target, name, json, settings)
    _print_result(moved, name, "PostgreSQL", json)
    return 0


async def _move(
    move: Callable[..., Awaitable[Moved | None]],
    command: str,
    target: str,
    name: str,
    json: bool,
    settings: Settings,
) -> Moved | None:
    """Run a move on a connection to the target. Notices go to stderr, steps to stdout."""

    def notice(severity: str, message: str, detail: str | None, hint: str | None) -> None:
        print_message(severity, message, detail, hint, sys.stderr)

    def on_step(event: str, text: str) -> None:
        line.show(f"moving the subscription, {text}")
        print(json_text({"event": event, "subscription": name}) if json else printable(text), flush=True)

    line = ProgressLine("moving the subscription", json=json)
    async with (
        CatalogConnection.open(target, command, lock_timeout=LOCK_TIMEOUT) as catalog,
        catalog.use() as connection,
    ):
        await refuse_standby(connection)
        await ensure_schema(connection)
        await _wait_for_other_move(connection)
        with line:
            moved = await move(connection, name, notice=notice, on_step=on_step, settings=settings)
        if moved is not None and moved.enabled and move is not hand_back_subscription:
            await _warn_of_no_launcher(connection, notice, settings)
    return moved


async def _wait_for_other_move(connection: Connection) -> None:
    """Wait until no other command moves a subscription of the database. The lock ends with the connection.

    Raises:
        StatementError: the other command has not ended within MOVE_PATIENCE seconds.
    """
    deadline = time.monotonic() + MOVE_PATIENCE
    while not await locks.try_lock(connection, locks.MOVE):
        if time.monotonic() >= deadline:
            raise StatementError(
                "another command moves a subscription of this database",
                detail=f"Its session has the advisory lock {locks.MOVE}, which pg_locks shows.",
                hint="Wait for its end, then run this command again.",
                sqlstate=OBJECT_IN_USE,
            )
        await anyio.sleep(POLL)


async def _warn_of_no_launcher(connection: Connection, notice: Notice, settings: Settings) -> None:
    """Warn if no launcher leads. One that had no subscription looks for some now and then, so this waits for it."""
    deadline = time.monotonic() + settings.empty_database_poll_interval + LAUNCHER_START
    while await worker_sessions.leader(connection) is None:
        if time.monotonic() >= deadline:
            notice("WARNING", "no launcher is running", None, "Start one on this database: subscriber run")
            return
        await anyio.sleep(POLL)


def _print_result(moved: Moved | None, name: str, owner: str, json: bool) -> None:
    if moved is None:
        line: dict[str, object] = {"event": "nothing", "subscription": name}
        text = f"{name} is a subscription of {owner} already"
    else:
        line = {
            "event": "done",
            "subscription": name,
            "slot": moved.slot,
            "lsn": str(moved.position),
            "tables": moved.tables,
            "sequences": moved.sequences,
            "enabled": moved.enabled,
        }
        what = [count(moved.tables, "table"), *([count(moved.sequences, "sequence")] if moved.sequences else [])]
        state = "enabled" if moved.enabled else "disabled, as before"
        text = f"{name} is a subscription of {owner} now, at {moved.position} with slot {moved.slot} and"
        text += f" {' and '.join(what)}; it is {state}"
    print(json_text(line) if json else printable(text))
