"""Replication origins on the target; names.py has their names.

pg_replication_origin_create() refuses names that begin with "pg_". So an origin is created under a name of
its own and renamed by an UPDATE of the system catalog, which superusers may do. Function
subscriber.create_origin(), which runs with the rights of the schema's owner, does both in one transaction,
one caller at a time, for callers who own the subscription. drop_origin() drops one in the same way.
"""

from __future__ import annotations

import asyncpg

from subscriber import names

ALL = """
SELECT o.roname FROM pg_catalog.pg_replication_origin o
 WHERE o.roname ~ $1::text ORDER BY length(o.roname), o.roname
"""
CREATE = "SELECT subscriber.create_origin($1::text)"
DROP = "SELECT subscriber.drop_origin($1::text)"
RENAME = "UPDATE pg_catalog.pg_replication_origin SET roname = $2::text WHERE roname = $1::text"


async def create_origin(connection: asyncpg.Connection, name: str) -> int | None:
    """Create the origin if it is missing. Returns its id (1..65534), or None if no role may create one.

    Part of the connection's transaction, if there is one. Raises asyncpg's error for 42501 (not the owner of the
    subscription), 42939 (not a name of a subscription's origin) and 54000 (no id is free).
    """
    origin: int | None = await connection.fetchval(CREATE, name)
    return origin


async def find_origins(connection: asyncpg.Connection, subid: int) -> list[str]:
    """Return the names of all origins of the subscription: those of current workers, and those of earlier ones."""
    return [row["roname"] for row in await connection.fetch(ALL, names.origin_pattern(subid))]


async def drop_origin(connection: asyncpg.Connection, name: str, missing_ok: bool = False) -> bool:
    """Drop the origin; false if it was not there and `missing_ok`.

    A worker that has just ended may hold its origin a moment longer than its locks, so this waits up to five
    seconds. Raises asyncpg.UndefinedObjectError if it is missing, asyncpg.ObjectInUseError if it stays in use.
    """
    dropped: bool = await connection.fetchval(DROP, name)
    if not dropped and not missing_ok:
        raise asyncpg.UndefinedObjectError(f'replication origin "{name}" does not exist')
    return dropped


async def rename_origin(connection: asyncpg.Connection, name: str, new_name: str) -> bool:
    """Give an origin another name. Its id, its position and the rows that it has written stay its own.

    Unlike a drop, which clears the position at once, this is undone by a rollback.

    Args:
        connection: A connection of a superuser to the target.
        name: The origin.
        new_name: A name that no origin has.

    Returns:
        False if there is no origin `name`.
    """
    return await connection.execute(RENAME, name, new_name) == "UPDATE 1"
