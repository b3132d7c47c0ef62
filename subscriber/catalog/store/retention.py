"""Statements about deleted rows that the target remembers: tables `deleted_row` and `retention`."""

from __future__ import annotations

from typing import NamedTuple

import asyncpg

from subscriber.lsn import Lsn

RESTORE = "SELECT subscriber.restore_deletes()"
SET_TRIGGERS = "SELECT problem, hint FROM subscriber.set_delete_triggers('100ms', NULL)"
# Transactions before `horizon` have ended, and their commits are before `position`.
SNAPSHOT = """
SELECT s.horizon, pg_catalog.pg_current_wal_insert_lsn()::text AS position
  FROM (SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text AS horizon OFFSET 0) s
"""
IS_CONFIRMED = """
SELECT coalesce(bool_and(s.confirmed_flush_lsn >= $1::text::pg_lsn), true)
  FROM pg_catalog.pg_replication_slots s
 WHERE s.slot_type = 'logical' AND s.database = pg_catalog.current_database() AND s.wal_status IS DISTINCT FROM 'lost'
"""
SET_RETENTION = "SELECT subscriber.set_retention($1::oid, $2::text::xid8)"
FORGET = "SELECT forgotten, expired, active FROM subscriber.forget_deletes($1::oid)"


class Snapshot(NamedTuple):
    """A point in the history of the target: its deletions up to now."""

    horizon: str  # the oldest transaction that has not ended
    position: Lsn


class Forgotten(NamedTuple):
    """The result of forget_deletes()."""

    unneeded: int  # rows that no subscription needs
    expired: int  # rows that may be needed, and are older than max_retention_duration
    active: bool  # no needed row of the subscription has been forgotten


async def restore_deletes(connection: asyncpg.Connection) -> None:
    """Read the large objects of deleted rows that are not in the table, as after a crash."""
    await connection.execute(RESTORE)


async def set_delete_triggers(connection: asyncpg.Connection) -> list[tuple[str, str]]:
    """Create and drop triggers as the subscriptions need them. Returns problem and hint of tables without one.

    A locked table is left for the next call, because other tasks wait for the connection.
    """
    return [(row["problem"], row["hint"]) for row in await connection.fetch(SET_TRIGGERS)]


async def take_snapshot(connection: asyncpg.Connection) -> Snapshot:
    """Return the present point of the target's history."""
    (row,) = await connection.fetch(SNAPSHOT)
    return Snapshot(row["horizon"], Lsn.parse(row["position"]))


async def is_confirmed(connection: asyncpg.Connection, position: Lsn) -> bool:
    """Return True if all subscribers of the target's database have confirmed the position."""
    confirmed: bool = await connection.fetchval(IS_CONFIRMED, str(position))
    return confirmed


async def set_retention(connection: asyncpg.Connection, subid: int, horizon: str) -> None:
    """Store that a subscription does not need the deletions of transactions before `horizon`."""
    await connection.execute(SET_RETENTION, subid, horizon)


async def forget_deletes(connection: asyncpg.Connection, subid: int) -> Forgotten:
    """Remove some of the deleted rows that no subscription needs, or that are too old. Returns the numbers of rows."""
    (row,) = await connection.fetch(FORGET, subid)
    return Forgotten(*row)
