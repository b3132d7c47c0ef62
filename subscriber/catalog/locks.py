"""The advisory locks of a schema upgrade, of a subscription that changes hands, and of a database that moves.

Any role can hold them. So they only keep well-behaved commands from upgrading at the same time (catalog/schema.py), and
from moving subscriptions (cli/commands/adopt.py) or databases (migration/server.py) at the same time.
"""

from __future__ import annotations

import asyncpg

# A pair of int4, which collides with no application's bigint.
SCHEMA_UPGRADE = (1937072755, -1)
MOVE = (1937072755, -2)
MIGRATION = (1937072755, -3)

TRY_LOCK = "SELECT pg_catalog.pg_try_advisory_lock($1::int4, $2::int4)"
UNLOCK = "SELECT pg_catalog.pg_advisory_unlock($1::int4, $2::int4)"


async def try_lock(connection: asyncpg.Connection, key: tuple[int, int]) -> bool:
    """Take a session lock if it is free; false if another session has it."""
    return bool(await connection.fetchval(TRY_LOCK, *key))


async def unlock(connection: asyncpg.Connection, key: tuple[int, int]) -> None:
    """Give a session lock back; the end of the connection does the same."""
    await connection.execute(UNLOCK, *key)
