"""The database that the catalog belongs to: table `identity`, compared with the database that it is in.

Both are the same unless the database was moved, restored, copied or upgraded, or its server is a standby that was
promoted. Subscriptions then stop until a user confirms with subscriber.rebind() that they run here.

This module does not detect a physical copy that keeps timeline and system identifier. The copy's progress record does:
see worker/apply/confirmed_position.py.
"""

from __future__ import annotations

import asyncpg

from subscriber import telemetry
from subscriber.errors import CatalogMoved, ConnectionLost, StatementError
from subscriber.sqlstate import INVALID_PARAMETER_VALUE

IN_RECOVERY = "SELECT pg_catalog.pg_is_in_recovery()"
MAY_COMPARE = "SELECT pg_catalog.has_function_privilege('subscriber.present_identity()', 'EXECUTE')"
COMPARE = """
SELECT i.system_identifier, i.timeline, i.database_oid, i.database_name::text,
       p.system_identifier, p.timeline, p.database_oid, p.database_name::text
  FROM subscriber.present_identity() p LEFT JOIN subscriber.identity i ON true
"""
ADOPT = "SELECT subscriber.adopt_timeline()"
# A server has a start of its own, also a physical copy with the same system identifier.
DATABASE = """
SELECT pg_catalog.pg_postmaster_start_time()::text, d.oid::bigint
  FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""
SYNC_ID = "SELECT i.sync_id FROM subscriber.identity i"

_HINT = (
    "If the original no longer replicates, as the owner of schema subscriber: SELECT subscriber.rebind();"
    " In a copy beside the original, remove the subscriptions:"
    " ALTER SUBSCRIPTION ... DISABLE, ALTER SUBSCRIPTION ... SET (slot_name = NONE), DROP SUBSCRIPTION."
)
_FAILOVER_HINT = (
    "If this is the server that replicates from now on, as the owner of schema subscriber: SELECT subscriber.rebind();"
    " To continue after every failover: SELECT subscriber.accept_timelines(true);"
)


async def sync_id(connection: asyncpg.Connection) -> str:
    """Return the part of the names of table synchronization slots that keeps targets apart."""
    identifier: str = await connection.fetchval(SYNC_ID)
    return identifier


async def refuse_standby(connection: asyncpg.Connection) -> None:
    """Raise ConnectionLost on a standby, where the tables of schema "subscriber" cannot be read."""
    if await connection.fetchval(IN_RECOVERY):
        raise ConnectionLost(
            "the target is a standby, which cannot read the subscriptions",
            hint="Connect to the primary, or promote this server.",
        )


async def refuse_same_database(source: asyncpg.Connection, target: asyncpg.Connection) -> None:
    """Refuse two connections to the same database of the same server.

    Raises:
        StatementError: they are.
    """
    there, here = [await connection.fetchrow(DATABASE) for connection in (source, target)]
    if there == here:
        raise StatementError(
            "source and target are the same database",
            hint="Check the connection strings of --source and --target.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )


async def check(connection: asyncpg.Connection) -> None:
    """Refuse a catalog that belongs to another database.

    `connection` is to a server that takes writes, and the tables are restored (schema.restore()). A new timeline is
    stored where subscriber.accept_timelines(true) was called. Does nothing for a role that owns no subscription and
    runs none: its statements are refused with errors of their own.

    Raises:
        CatalogMoved: the database is another one than the catalog belongs to, or has a new timeline.
    """
    if not await connection.fetchval(MAY_COMPARE):
        return
    row = await connection.fetchrow(COMPARE)
    assert row is not None
    stored, present = tuple(row)[:4], tuple(row)[4:]
    known_timeline = stored[1] if stored[1] is not None and present[1] is not None else present[1]
    if (stored[0], known_timeline, *stored[2:]) == present:
        return
    only_timeline = (stored[0], *stored[2:]) == (present[0], *present[2:])
    if only_timeline and (former := await connection.fetchval(ADOPT)) is not None:
        telemetry.log(
            telemetry.LOG, f"the target continues on timeline {present[1]} after {former}", event="target.timeline"
        )
        return
    raise CatalogMoved(
        "the target is on another timeline than its subscriptions"
        if only_timeline
        else "the subscriptions of this database belong to another database",
        detail=f"They belong to {_words(*stored)}. This is {_words(*present)}.",
        hint=_FAILOVER_HINT if only_timeline else _HINT,
    )


async def is_bound(connection: asyncpg.Connection) -> bool:
    """Return True if check() raises no error."""
    try:
        await check(connection)
    except CatalogMoved:
        return False
    return True


def _words(system: str | None, timeline: int | None, oid: int | None, name: str | None) -> str:
    if system is None:
        return "an unknown database"
    return f'database "{name}" with OID {oid} of system {system}, timeline {timeline or "unknown"}'
