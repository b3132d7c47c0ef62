"""Statements on the prepared transactions of subscriptions."""

from __future__ import annotations

import asyncpg

from subscriber.lsn import Lsn
from subscriber.names import is_prepared_gid, prepared_prefix

# Restricted to this database: the other databases of the cluster have subscriptions of their own.
PREPARED_HERE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts x WHERE x.database = pg_catalog.current_database()
                  AND starts_with(x.gid, $1::text))
"""
NAMES_HERE = """
SELECT x.gid FROM pg_catalog.pg_prepared_xacts x WHERE x.database = pg_catalog.current_database()
   AND starts_with(x.gid, $1::text) ORDER BY x.gid
"""
COMMITTED_AHEAD = "SELECT EXISTS (SELECT FROM subscriber.prepared p WHERE p.subid = $1 AND p.committed)"
PREPARED = """
SELECT subid::bigint, gid, publisher_gid, prepared_at FROM subscriber.prepared WHERE NOT committed ORDER BY prepared_at
"""
PREPARED_AFTER = """
SELECT p.gid FROM subscriber.prepared p JOIN pg_catalog.pg_prepared_xacts x ON x.gid = p.gid
 WHERE p.subid = $1 AND NOT p.committed AND p.prepare_end_lsn > $2::text::pg_lsn
       AND x.database = pg_catalog.current_database()
 ORDER BY p.prepare_end_lsn
"""
FORGET_PREPARED = "SELECT subscriber.forget_prepared($1::oid)"


async def has_prepared_transactions(connection: asyncpg.Connection, subid: int) -> bool:
    """Return True if a transaction of the subscription, `pg_gid_<subid>_<xid>`, is prepared on the target."""
    return bool(await connection.fetchval(PREPARED_HERE, prepared_prefix(subid)))


async def load_prepared_names(connection: asyncpg.Connection, subid: int) -> list[str]:
    """Return the names of the subscription's transactions that are prepared on the target."""
    rows = await connection.fetch(NAMES_HERE, prepared_prefix(subid))
    return [row["gid"] for row in rows if is_prepared_gid(row["gid"], subid)]


async def has_committed_ahead(connection: asyncpg.Connection, subid: int) -> bool:
    """Return True if a prepared transaction was committed on the target, and the progress record is still before it.

    The reason is a worker that was killed after COMMIT PREPARED, or a manual COMMIT PREPARED.
    """
    return bool(await connection.fetchval(COMMITTED_AHEAD, subid))


async def load_prepared(connection: asyncpg.Connection) -> list[asyncpg.Record]:
    """Return subid, gid, publisher_gid and prepared_at of the transactions that are prepared, oldest first."""
    return list(await connection.fetch(PREPARED))


async def load_prepared_after(connection: asyncpg.Connection, subid: int, position: Lsn) -> list[str]:
    """Return the names of transactions that are prepared on the target, and that the publisher prepared later."""
    return [row["gid"] for row in await connection.fetch(PREPARED_AFTER, subid, str(position))]


async def delete_prepared(connection: asyncpg.Connection, subid: int) -> None:
    """Delete the subscription's rows about prepared transactions. The transactions stay prepared."""
    await connection.execute(FORGET_PREPARED, subid)
