"""Subscriptions of the extension pglogical on the target, for the command that takes one over.

Their definitions and the states of their tables are in tables of schema pglogical. Their position is that of a
replication origin with the name of the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import asyncpg

from subscriber.lsn import Lsn, optional_lsn

READY = "r"  # the state of a table, and of a subscription, whose initial copy has ended

# A table of the extension, and not one that another role has made.
_TABLE = """
SELECT {wanted}
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
   AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass AND d.deptype = 'e'
  JOIN pg_catalog.pg_extension e ON e.oid = d.refobjid AND e.extname = 'pglogical'
 WHERE n.nspname = 'pglogical' AND c.relname = 'subscription' AND c.relkind = 'r'
"""
_INSTALLED = _TABLE.format(wanted="true")
_READABLE = _TABLE.format(
    wanted="pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')"
)
_NAMES = "SELECT s.sub_name::text FROM pglogical.subscription s ORDER BY 1"
_DISABLED = """
SELECT s.sub_name::text FROM pglogical.subscription s JOIN pg_catalog.pg_replication_origin o
    ON o.roname = s.sub_slot_name::text WHERE NOT s.sub_enabled
"""
_FIND = """
SELECT s.sub_id::bigint, s.sub_name::text, s.sub_enabled, s.sub_slot_name::text, s.sub_replication_sets,
       s.sub_forward_origins, s.sub_apply_delay <> '0' AS is_delayed, i.if_dsn, n.node_name::text
  FROM pglogical.subscription s JOIN pglogical.node_interface i ON i.if_id = s.sub_origin_if
  JOIN pglogical.local_node l ON l.node_id = s.sub_target JOIN pglogical.node n ON n.node_id = l.node_id
 WHERE s.sub_name = $1::text
"""
_UNREADY = """
SELECT coalesce(x.sync_nspname || '.' || x.sync_relname, 'the subscription'), x.sync_status::text
  FROM pglogical.local_sync_status x WHERE x.sync_subid = $1::oid AND x.sync_status <> 'r' ORDER BY 1
"""
_IS_READY = """
SELECT EXISTS (SELECT FROM pglogical.local_sync_status x
                WHERE x.sync_subid = $1::oid AND x.sync_relname IS NULL AND x.sync_status = 'r')
"""
_WORKERS = """
SELECT a.pid FROM pg_catalog.pg_stat_activity a WHERE a.datname = pg_catalog.current_database()
   AND a.backend_type LIKE 'pglogical %' AND a.backend_type LIKE '%:' || $1::oid::text ORDER BY a.pid
"""
_OTHERS = "SELECT EXISTS (SELECT FROM pglogical.subscription)"
_HAS_ORIGIN = "SELECT EXISTS (SELECT FROM pg_catalog.pg_replication_origin WHERE roname = $1::text)"


@dataclass(frozen=True, slots=True)
class PglogicalSubscription:
    """One row of pglogical.subscription."""

    oid: int
    name: str
    enabled: bool
    slot_name: str  # also the name of its replication origin
    replication_sets: tuple[str, ...]
    forward_origins: tuple[str, ...]
    is_delayed: bool  # apply_delay is not 0
    node: str  # of this database
    conninfo: str = field(repr=False)


async def is_installed(connection: asyncpg.Connection) -> bool:
    """Return True if the database has the extension."""
    return bool(await connection.fetchval(_INSTALLED))


async def find(connection: asyncpg.Connection, name: str) -> PglogicalSubscription | None:
    """Return the subscription with this name, or None if there is none, or no extension."""
    if not await is_installed(connection):
        return None
    row = await connection.fetchrow(_FIND, name)
    if row is None:
        return None
    return PglogicalSubscription(
        oid=row["sub_id"],
        name=row["sub_name"],
        enabled=row["sub_enabled"],
        slot_name=row["sub_slot_name"],
        replication_sets=tuple(row["sub_replication_sets"]),
        forward_origins=tuple(row["sub_forward_origins"]),
        is_delayed=row["is_delayed"],
        node=row["node_name"],
        conninfo=row["if_dsn"],
    )


async def load_names(connection: asyncpg.Connection) -> list[str]:
    """Return the names of all subscriptions."""
    if not await connection.fetchval(_READABLE):
        return []
    return [row["sub_name"] for row in await connection.fetch(_NAMES)]


async def load_disabled(connection: asyncpg.Connection) -> set[str]:
    """Return the names of disabled subscriptions that have their origin. Empty if the role may not read them."""
    if not await connection.fetchval(_READABLE):
        return set()
    return {row["sub_name"] for row in await connection.fetch(_DISABLED)}


async def load_unready(connection: asyncpg.Connection, oid: int) -> list[str]:
    """Return the tables whose initial copy has not ended, with their states: `public.a (d)`."""
    unready = [f"{name} ({state})" for name, state in await connection.fetch(_UNREADY, oid)]
    if not unready and not await connection.fetchval(_IS_READY, oid):
        return ["the subscription (no state)"]
    return unready


async def load_conflict_resolution(connection: asyncpg.Connection) -> str:
    """Return the setting pglogical.conflict_resolution."""
    return str(await connection.fetchval("SELECT pg_catalog.current_setting('pglogical.conflict_resolution')"))


async def tracks_commits(connection: asyncpg.Connection) -> bool:
    """Return True if the server knows the origins of rows, so that pglogical resolves conflicts of updates."""
    return bool(await connection.fetchval("SHOW track_commit_timestamp") == "on")


async def load_workers(connection: asyncpg.Connection, oid: int) -> list[int]:
    """Return the process IDs of a subscription's workers."""
    return [row["pid"] for row in await connection.fetch(_WORKERS, oid)]


async def lock(connection: asyncpg.Connection) -> None:
    """Keep other sessions from changing subscriptions, until the connection's transaction ends."""
    await connection.execute("LOCK TABLE pglogical.subscription IN SHARE ROW EXCLUSIVE MODE")


async def set_enabled(connection: asyncpg.Connection, name: str, *, enabled: bool) -> None:
    """Enable or disable a subscription. Its worker ends soon after the commit."""
    action = "enable" if enabled else "disable"
    # All arguments: no function of another role in the schema is a better match.
    await connection.execute(f"SELECT pglogical.alter_subscription_{action}($1::text::name, false)", name)


async def has_origin(connection: asyncpg.Connection, name: str) -> bool:
    """Return True if there is a replication origin with this name."""
    return bool(await connection.fetchval(_HAS_ORIGIN, name))


async def load_position(connection: asyncpg.Connection, origin: str) -> Lsn:
    """Return the position of an origin that no worker has, after a flush of the local commit that it belongs to.

    The advance to the same position proves that no worker has the origin.

    Raises asyncpg's error (55006) if a worker has it.
    """
    progress = "SELECT pg_catalog.pg_replication_origin_progress($1::text, true)::text"
    position = optional_lsn(await connection.fetchval(progress, origin)) or Lsn(0)
    if position:
        advance = "SELECT pg_catalog.pg_replication_origin_advance($1::text, $2::text::pg_lsn)"
        await connection.execute(advance, origin, str(position))
    return position


async def drop(connection: asyncpg.Connection, name: str) -> bool:
    """Drop the subscription, and its publisher's node if nothing else uses it. Returns True if it was the last one."""
    await connection.execute("SELECT pglogical.drop_subscription($1::text::name, true)", name)
    return not await connection.fetchval(_OTHERS)
