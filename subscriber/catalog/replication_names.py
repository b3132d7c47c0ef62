"""Replication origins on the target, named as PostgreSQL names its own: `pg_<subid>` and `pg_<subid>_<relid>`.

An origin belongs to one session at a time, so parallel apply workers have theirs, `pg_<subid>_<n>` with n from 1:
no table's OID is below 16384.

pg_replication_origin_create() refuses names that begin with "pg_". So an origin is created under a name of
its own and renamed by an UPDATE of the system catalog, which superusers may do. Function
subscriber.create_origin(), made by the migrations with their owner's rights, does both in one transaction,
one caller at a time, for callers who own the subscription; drop_origin() likewise.
"""

from __future__ import annotations

import asyncpg

ALL = """
SELECT o.roname FROM pg_catalog.pg_replication_origin o
 WHERE o.roname ~ ('^pg_' || $1::oid || '(_[0-9]+)?$') ORDER BY length(o.roname), o.roname
"""
CREATE = "SELECT subscriber.create_origin($1::text)"
DROP = "SELECT subscriber.drop_origin($1::text)"


def apply_origin(subid: int) -> str:
    """The origin of a subscription's apply worker."""
    return f"pg_{subid}"


def table_sync_origin(subid: int, relid: int) -> str:
    """The origin of the worker that synchronizes target table `relid`, or of parallel apply worker number `relid`."""
    return f"pg_{subid}_{relid}"


def table_sync_slot(subid: int, relid: int, sync_id: str) -> str:
    """The publisher's slot for that worker; `sync_id` is the target's (catalog/identity.py)."""
    return f"pg_{subid}_sync_{relid}_{sync_id}"


async def create_origin(connection: asyncpg.Connection, name: str) -> int | None:
    """Create the origin if it isn't there, and return its id (1..65534) either way; None if nobody may.

    Part of the connection's transaction, if there is one. Raises asyncpg's error for 42501 (not the owner of the
    subscription), 42939 (not a name of a subscription's origin) and 54000 (no id is free).
    """
    origin: int | None = await connection.fetchval(CREATE, name)
    return origin


async def find_origins(connection: asyncpg.Connection, subid: int) -> list[str]:
    """Names of all origins there are of the subscription: of its workers that live, and of those that are gone."""
    return [row["roname"] for row in await connection.fetch(ALL, subid)]


async def drop_origin(connection: asyncpg.Connection, name: str, missing_ok: bool = False) -> bool:
    """Drop the origin; false if it was not there and `missing_ok`.

    A worker that has just ended may hold its origin a moment longer than its locks, so this waits up to five
    seconds. Raises asyncpg.UndefinedObjectError if it is missing, asyncpg.ObjectInUseError if it stays in use.
    """
    dropped: bool = await connection.fetchval(DROP, name)
    if not dropped and not missing_ok:
        raise asyncpg.UndefinedObjectError(f'replication origin "{name}" does not exist')
    return dropped
