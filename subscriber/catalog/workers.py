"""Getting a subscription's workers out of the way, for statements that take something from under them.

A worker is asked first (its subscription is disabled, which the launcher is told at once) and given some seconds to end
in its own way; then its session on the target is ended, which loses nothing: what it had not committed comes again.
While the statement's transaction lasts, the worker's lock is ours and no new one can start.
"""

from __future__ import annotations

import time

import anyio
import asyncpg

from subscriber.catalog import locks
from subscriber.errors import StatementError

GRACE = 5.0  # seconds for a worker to end by itself; one that is applying needs to roll back
PATIENCE = 30.0  # seconds for a session to end once it was told to: a big transaction may have to be rolled back
POLL = 0.02  # seconds

TERMINATE = "SELECT subscriber.terminate_workers($1::oid, $2::oid)"


async def wait_until_gone(connection: asyncpg.Connection, subid: int, *, grace: float = GRACE) -> None:
    """Wait for all workers of the subscription, which has been told to stop; after `grace` seconds end them.

    Raises StatementError (55006) if they don't go.
    """
    asked = time.monotonic()
    while living := await locks.workers(connection, subid):
        waited = time.monotonic() - asked
        if waited >= grace:
            await connection.fetchval(TERMINATE, subid, None)
        if waited >= grace + PATIENCE:
            raise _still_running(living)
        await anyio.sleep(POLL)


async def hold_apply_worker(connection: asyncpg.Connection, subid: int) -> None:
    """Until the transaction ends, no apply worker of the subscription can start; living workers are ended."""
    await _hold(connection, subid, None, locks.apply_worker_key(subid))


async def hold_table_sync(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """Until the transaction ends, nobody can synchronize that table for the subscription; a living worker is ended."""
    await _hold(connection, subid, relid, locks.table_sync_key(subid, relid))


async def _hold(connection: asyncpg.Connection, subid: int, relid: int | None, key: tuple[int, int]) -> None:
    """End the workers until the lock is ours: one may have been started anew in between."""
    asked = time.monotonic()
    while await connection.fetchval(TERMINATE, subid, relid) or not await connection.fetchval(
        locks.TRY_LOCK_FOR_TRANSACTION, *key
    ):
        if time.monotonic() - asked >= PATIENCE:
            raise _still_running(await locks.workers(connection, subid))
        await anyio.sleep(POLL)


async def check_none_is_running(connection: asyncpg.Connection, subid: int) -> None:
    """Raises StatementError (55000) while a worker of the subscription lives.

    Afterwards none can start until the transaction ends.
    """
    if await locks.workers(connection, subid) or not await connection.fetchval(
        locks.TRY_LOCK_FOR_TRANSACTION, *locks.apply_worker_key(subid)
    ):
        raise StatementError(
            'cannot alter "two_phase" when logical replication worker is still running',
            hint="Try again after some time.",
            sqlstate="55000",
        )


def _still_running(living: dict[int, int]) -> StatementError:
    return StatementError(
        "logical replication worker is still running",
        detail=f"Its sessions on this server are: {', '.join(map(str, living.values()))}.",
        hint="Try again after some time.",
        sqlstate="55006",
    )
