"""Check that no session of ours waits long for a lock of the target without a report.

The check has no session in the database itself unless a session waits there, because tests count the database's
sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

from tests.plugins.fix_cluster import Database

INTERVAL = 4.0  # seconds between two checks; shorter tests are not checked
LONGEST = 10.0  # seconds that a wait may take without a report
TIMEOUT = 5.0  # seconds for a check
WAITSTART_SINCE = 14  # the major version from which a server knows since when a lock is waited for

# The waiting session, its statement, the lock, and the holders of the lock.
WAITING = """
SELECT a.pid, pg_catalog.format('process %s ("%s") for %s of %s, held by %s: %s', a.pid, a.application_name, l.mode,
                                coalesce('relation ' || l.relation, l.locktype), pg_catalog.pg_blocking_pids(a.pid),
                                pg_catalog.left(a.query, 200))
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid)
 WHERE NOT l.granted AND a.datname = $1 AND a.application_name LIKE 'subscriber%'
       AND l.waitstart < pg_catalog.clock_timestamp() - $2 * interval '1 s'
"""
TOLD = "SELECT count(*) FROM subscriber.worker WHERE waiting_for IS NOT NULL"


@asynccontextmanager
async def watched_for_waits(database: Database, logged: Callable[[], bool]) -> AsyncIterator[None]:
    """Fail at the end if a wait was found during the block. `logged`: whether the log has reported one recently."""
    waits: list[str] = []
    task = asyncio.create_task(_look_again_and_again(database, logged, waits))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    if waits:
        pytest.fail(f"waits for more than {LONGEST} s that nobody was told of:\n" + "\n".join(waits))


async def _look_again_and_again(database: Database, logged: Callable[[], bool], waits: list[str]) -> None:
    before: set[int] = set()  # processes that waited in the previous check, and have had time to report it
    while not waits:
        await asyncio.sleep(INTERVAL)
        # The server may be down, full or frozen; the database may be gone.
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            waiting = await _waiting(database)
            if set(waiting) & before and not logged() and not await _told(database):
                waits += [waiting[pid] for pid in waiting if pid in before]
            before = set(waiting)


async def _waiting(database: Database) -> dict[int, str]:
    """Return the descriptions of the waits, by process."""
    connection = await _connect(database.server.dsn())
    try:
        if connection.get_server_version().major < WAITSTART_SINCE:
            return {}
        rows = await connection.fetch(WAITING, database.name, LONGEST, timeout=TIMEOUT)
        return {row[0]: row[1] for row in rows}
    finally:
        connection.terminate()


async def _told(database: Database) -> bool:
    """Return True if a worker's status reports a wait."""
    connection = await _connect(database.dsn())
    try:
        return bool(await connection.fetchval(TOLD, timeout=TIMEOUT))
    finally:
        connection.terminate()


async def _connect(dsn: str) -> asyncpg.Connection[asyncpg.Record]:
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(dsn, timeout=TIMEOUT)
    return connection
