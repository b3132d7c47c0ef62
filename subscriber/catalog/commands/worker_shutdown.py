"""Stop a subscription's workers, for statements that remove or change what the workers use.

The statement first requests the stop: it disables the subscription, of which the launcher is notified. After some
seconds it terminates the sessions of the remaining workers on the target. Nothing is lost by that, because uncommitted
changes are sent again. While the statement's transaction lasts, it has the subscription's row locked and no worker can
start.
"""

from __future__ import annotations

import asyncpg

from subscriber.catalog import worker_sessions
from subscriber.errors import StatementError
from subscriber.limited_wait import LimitedWait
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE

PATIENCE = 30.0  # seconds for a terminated session to end: it may have to roll back a large transaction


async def wait_until_gone(connection: asyncpg.Connection, subid: int, *, grace: float) -> None:
    """Wait for all workers of the subscription, which is disabled. After `grace` seconds terminate their sessions.

    Raises StatementError (55006) if they do not end.
    """
    wait = LimitedWait("workers of the subscription to end", grace + PATIENCE)
    while living := await worker_sessions.living(connection, subid):
        if wait.seconds >= grace:
            await worker_sessions.terminate(connection, subid, None)
        if wait.is_over:
            raise _still_running(living)
        await wait.pause()


async def end_workers(connection: asyncpg.Connection, subid: int, relid: int | None = None) -> None:
    """End the session that has the place `relid`, or with None all of the subscription, and wait until it is gone.

    The connection's transaction has the subscription's row locked, so none can start before it ends. Raises
    StatementError (55006) if a session does not end.
    """
    wait = LimitedWait("sessions of workers to end", PATIENCE)
    while await worker_sessions.terminate(connection, subid, relid):
        if wait.is_over:
            raise _still_running(await worker_sessions.living(connection, subid))
        await wait.pause()


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
