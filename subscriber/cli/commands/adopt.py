"""`subscriber adopt` and `subscriber hand-back`: move a subscription between PostgreSQL and this program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber.cli.dsn import Target
from subscriber.cli.messages import print_message
from subscriber.cli.options import Json, Name
from subscriber.cli.progress import ProgressLine
from subscriber.cli.setting_option import SettingOption, read_settings
from subscriber.display import json_text, printable
from subscriber.errors import StatementError
from subscriber.formatting import count
from subscriber.sqlstate import OBJECT_IN_USE

if TYPE_CHECKING:
    from subscriber.catalog.commands.handover import Moved
    from subscriber.catalog.connection import Connection
    from subscriber.settings import Settings

LAUNCHER_START = 1.0  # seconds for a launcher to become the leader
MOVE_PATIENCE = 60.0  # seconds for the command of another user to end


async def adopt(
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
) -> int:
    """Take over a subscription that PostgreSQL or pglogical runs, without a copy.

    The new subscription has its name, position and tables, of PostgreSQL's also owner, options and slot. The old one
    does not exist any more. Needs a superuser. The command refuses what it cannot take over exactly, and the old
    subscription then continues. After a kill, run it again. `subscriber hand-back` returns one to PostgreSQL.
    """
    from subscriber.catalog.commands.adopt import adopt_subscription

    move = partial(adopt_subscription, publications=publications or ())
    return await _move(move, "adopt", target, name, read_settings(setting), owner="subscriber", json=json)


async def hand_back(
    target: Target,
    name: Name,
    json: Json = False,
    setting: SettingOption = None,
) -> int:
    """Return a subscription to PostgreSQL, which continues without a copy.

    Needs a superuser, and a target that reaches the publisher. The command refuses what PostgreSQL would not continue
    exactly, and names the statement that removes the obstacle. After a kill, run it again.
    """
    from subscriber.catalog.commands.hand_back import hand_back_subscription

    settings = read_settings(setting)
    return await _move(hand_back_subscription, "hand-back", target, name, settings, owner="PostgreSQL", json=json)


async def _move(
    move: Callable[..., Awaitable[Moved | None]],
    command: str,
    target: str,
    name: str,
    settings: Settings,
    *,
    owner: str,
    json: bool,
) -> int:
    """Run a move on a connection to the target. Notices go to stderr, steps and result to stdout."""
    from subscriber.catalog.commands.handover import LOCK_TIMEOUT
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.identity import refuse_standby
    from subscriber.catalog.schema import ensure_schema

    def on_step(event: str, text: str) -> None:
        line.show(f"moving the subscription, {text}")
        print(json_text({"event": event, "subscription": name}) if json else printable(text), flush=True)

    line = ProgressLine("moving the subscription", json=json)
    async with (
        CatalogConnection.open(target, f"subscriber {command}", lock_timeout=LOCK_TIMEOUT) as catalog,
        catalog.use() as connection,
    ):
        await refuse_standby(connection)
        await ensure_schema(connection)
        await _wait_for_other_move(connection)
        with line:
            moved = await move(connection, name, notice=print_message, on_step=on_step, settings=settings)
        if moved is not None and moved.enabled and owner == "subscriber":
            await _warn_of_no_launcher(connection, settings)
    _print_result(moved, name, owner, json=json)
    return 0


async def _wait_for_other_move(connection: Connection) -> None:
    """Wait until no other command moves a subscription of the database. The lock ends with the connection.

    Raises:
        StatementError: the other command has not ended within MOVE_PATIENCE seconds.
    """
    from subscriber.catalog import locks
    from subscriber.limited_wait import LimitedWait

    wait = LimitedWait("another command that moves a subscription", MOVE_PATIENCE)
    while not await locks.try_lock(connection, locks.MOVE):
        if wait.is_over:
            raise StatementError(
                "another command moves a subscription of this database",
                detail=f"Its session has the advisory lock {locks.MOVE}, which pg_locks shows.",
                hint="Wait for its end, then run this command again.",
                sqlstate=OBJECT_IN_USE,
            )
        await wait.pause()


async def _warn_of_no_launcher(connection: Connection, settings: Settings) -> None:
    """Warn if no launcher leads. One that had no subscription looks for some now and then, so this waits for it."""
    from subscriber.catalog import worker_sessions
    from subscriber.limited_wait import LimitedWait

    wait = LimitedWait("a launcher", settings.empty_database_poll_interval + LAUNCHER_START)
    while await worker_sessions.leader(connection) is None:
        if wait.is_over:
            print_message("WARNING", "no launcher is running", hint="Start one on this database: subscriber run")
            return
        await wait.pause()


def _print_result(moved: Moved | None, name: str, owner: str, *, json: bool) -> None:
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
