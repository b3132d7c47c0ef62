"""Getting a subscription's workers out of the way, for statements that take something from under them.

A worker is asked first (its subscription is disabled, which the launcher is told at once) and given some seconds to end
in its own way; then its session on the target is ended, which loses nothing: what it had not committed comes again.
While the statement's transaction lasts, it has the subscription's row locked and no new one can start.
"""

from __future__ import annotations

import time

import anyio
import asyncpg

from subscriber.catalog import worker_sessions
from subscriber.errors import StatementError
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE

PATIENCE = 30.0  # seconds for a session to end once it was told to: a big transaction may have to be rolled back
POLL = 0.02  # seconds


async def wait_until_gone(connection: asyncpg.Connection, subid: int, *, grace: float) -> None:
    """Wait for all workers of the subscription, which has been told to stop; after `grace` seconds end them.

    Raises StatementError (55006) if they don't go.
    """
    asked = time.monotonic()
    while living := await worker_sessions.living(connection, subid):
        waited = time.monotonic() - asked
        if waited >= grace:
            await worker_sessions.terminate(connection, subid, None)
        if waited >= grace + PATIENCE:
            raise _still_running(living)
        await anyio.sleep(POLL)


async def end_workers(connection: asyncpg.Connection, subid: int, relid: int | None = None) -> None:
    """End the session that has the place `relid`, or with None all of the subscription, and wait until it is gone.

    The connection's transaction has the subscription's row locked, so none can start before it ends. Raises
    StatementError (55006) if a session does not end.
    """
    asked = time.monotonic()
    while await worker_sessions.terminate(connection, subid, relid):
        if time.monotonic() - asked >= PATIENCE:
            raise _still_running(await worker_sessions.living(connection, subid))
        await anyio.sleep(POLL)


async def check_none_is_running(connection: asyncpg.Connection, subid: int) -> None:
    """Raises StatementError (55000) while a worker of the subscription lives.

    None can start before the connection's transaction ends, which has the subscription's row locked.
    """
    if await worker_sessions.living(connection, subid):
        raise StatementError(
            'cannot alter "two_phase" when logical replication worker is still running',
            hint="Try again after some time.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _still_running(living: dict[int, int]) -> StatementError:
    return StatementError(
        "logical replication worker is still running",
        detail=f"Its sessions on this server are: {', '.join(map(str, living.values()))}.",
        hint="Try again after some time.",
        sqlstate=OBJECT_IN_USE,
    )
