"""Advisory locks by which launchers, workers and statements keep out of each other's way.

All are pairs of int4, so that they collide neither with an application's bigint locks nor with each other.
The worker locks are session locks: PostgreSQL releases them when the holder's connection ends, however it
ended, and a lock that can be taken proves that no such worker is alive.

    LAUNCHER, 0        the launcher of this database; a second one waits here as standby
    LAUNCHER, subid    the apply worker of that subscription
    LAUNCHER, -1       whoever is creating or upgrading schema "subscriber" (OIDs never give -1: see below)
    subid, relid       the worker that synchronizes that target table for that subscription; subids are above
                       3500000000, negative as int4, so these pairs never meet the others
    subid, number      a parallel apply worker of that subscription, from 1: no table's OID is below 16384

A worker reads its subscription, or its table's state, only after it has its lock: a DROP SUBSCRIPTION or REFRESH
PUBLICATION that is under way holds the same lock, and when it lets go there may be nothing left to do.
"""

from __future__ import annotations

import asyncpg

LAUNCHER = 1937072755

# OID 4294967295 would be this number too; nothing gives that OID out.
SCHEMA_UPGRADE = (LAUNCHER, -1)


def int4(oid: int) -> int:
    """The two's complement int4 with the same 32 bits as an OID: lock functions take no OIDs."""
    return oid - (1 << 32) if oid >= 1 << 31 else oid


def launcher_key() -> tuple[int, int]:
    """Held by the launcher on its own session."""
    return LAUNCHER, 0


def apply_worker_key(subid: int) -> tuple[int, int]:
    """Held by the apply worker of subscription `subid` on its target session."""
    return LAUNCHER, int4(subid)


def table_sync_key(subid: int, relid: int) -> tuple[int, int]:
    """Held by the worker that synchronizes target table `relid` for `subid`, on its target session.

    By a parallel apply worker likewise: `relid` is its number, counted from 1.
    """
    return int4(subid), int4(relid)


LOCK = "SELECT pg_catalog.pg_advisory_lock($1::int4, $2::int4)"
TRY_LOCK = "SELECT pg_catalog.pg_try_advisory_lock($1::int4, $2::int4)"
UNLOCK = "SELECT pg_catalog.pg_advisory_unlock($1::int4, $2::int4)"
TRY_LOCK_FOR_TRANSACTION = "SELECT pg_catalog.pg_try_advisory_xact_lock($1::int4, $2::int4)"

_THIS_DATABASE = "(SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())"

# Sessions that hold a lock, without taking it ourselves: a probe that took it could make the
# very worker it looks for fail to start. pg_locks shows the int4s as OIDs, hence the bigints.
HOLDER = f"""
SELECT l.pid FROM pg_catalog.pg_locks l
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.database = {_THIS_DATABASE}
   AND l.classid::bigint = $1::bigint & 4294967295 AND l.objid::bigint = $2::bigint & 4294967295
"""
WORKERS = f"""
SELECT CASE WHEN l.classid = $1::oid THEN l.objid::bigint ELSE 0 END, l.pid FROM pg_catalog.pg_locks l
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.database = {_THIS_DATABASE}
   AND (l.classid = $1::oid OR l.classid = {LAUNCHER}::oid AND l.objid = $1::oid)
"""


async def lock(connection: asyncpg.Connection, key: tuple[int, int]) -> None:
    """Wait for a session lock."""
    await connection.execute(LOCK, *key)


async def try_lock(connection: asyncpg.Connection, key: tuple[int, int]) -> bool:
    """Take a session lock if it is free; false if another session has it."""
    return bool(await connection.fetchval(TRY_LOCK, *key))


async def unlock(connection: asyncpg.Connection, key: tuple[int, int]) -> None:
    """Give a session lock back; the end of the connection does the same."""
    await connection.execute(UNLOCK, *key)


async def holder(connection: asyncpg.Connection, key: tuple[int, int]) -> int | None:
    """Backend pid of the session that holds the lock; None if it is free."""
    pid: int | None = await connection.fetchval(HOLDER, *key)
    return pid


async def workers(connection: asyncpg.Connection, subid: int) -> dict[int, int]:
    """Backend pids of the subscription's living workers, by the relid they synchronize.

    0 is the apply worker, and below 16384 are the numbers of parallel apply workers.
    """
    return {row[0]: row[1] for row in await connection.fetch(WORKERS, subid)}
