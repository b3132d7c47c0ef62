"""Statements on `subscriber.repairs`: the rows that repairs have changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from subscriber.lsn import Lsn

LOAD = """
SELECT r.repaired_at, r.role::text AS role, r.command, r.relation, r.lsn::text AS lsn, r.action, r.key::text AS key,
       r.row_before::text AS row_before, r.row_after::text AS row_after
  FROM subscriber.repairs r WHERE r.subid = $1::oid AND r.repaired_at >= coalesce($2::timestamptz, '-infinity')
 ORDER BY r.repaired_at
"""
# The last transactions. A large repair of a table has several.
LOAD_LAST = """
SELECT max(t.repaired_at) AS repaired_at, t.role::text AS role, t.command, t.relation,
       sum(pg_catalog.jsonb_array_length(t.changes))::bigint AS rows
  FROM (SELECT * FROM subscriber.repair_transaction WHERE subid = $1::oid ORDER BY id DESC LIMIT 200) t
 GROUP BY t.role, t.command, t.relation, t.repaired_at::date ORDER BY 1 DESC LIMIT $2
"""
# For RowApplier.execute_at_end(): a row of `repair_transaction` as JSON, with the rows that the transaction repairs.
RECORD_REPAIR = "SELECT subscriber.record_repair($1, $2, $3)"
ROLE = "SELECT session_user::text"
NOW = "SELECT pg_catalog.clock_timestamp()"


@dataclass(frozen=True, slots=True)
class RepairedRow:
    """A row of `subscriber.repairs`. Values are texts by column.

    `key` is None if the table has no key. `row_before` and `row_after` are None if they were not recorded, or if there
    was no such row.
    """

    repaired_at: datetime
    role: str
    command: str
    relation: str
    lsn: Lsn
    action: str  # insert, update, delete
    key: dict[str, str | None] | None
    row_before: dict[str, str | None] | None
    row_after: dict[str, str | None] | None


@dataclass(frozen=True, slots=True)
class RepairedTable:
    """The repairs of a table on one day. `rows` is their number, and `repaired_at` the time of the last one."""

    repaired_at: datetime
    role: str
    command: str
    relation: str
    rows: int


async def load_last(connection: asyncpg.Connection, subid: int, limit: int) -> list[RepairedTable]:
    """Return the tables that were repaired last, the newest first."""
    return [RepairedTable(*row) for row in await connection.fetch(LOAD_LAST, subid, limit)]


async def load(
    connection: asyncpg.Connection, subid: int, *, since: datetime | None = None
) -> AsyncIterator[RepairedRow]:
    """Yield the repaired rows of a subscription, the oldest first. Reads a thousand rows at a time.

    Args:
        connection: a session of a role that owns the subscription.
        subid: OID of the subscription.
        since: the time of the first repair, by the clock of the target. None: all.
    """
    async with connection.transaction(readonly=True):
        async for row in connection.cursor(LOAD, subid, since, prefetch=1000):
            yield RepairedRow(
                row["repaired_at"],
                row["role"],
                row["command"],
                row["relation"],
                Lsn.parse(row["lsn"]),
                row["action"],
                _json(row["key"]),
                _json(row["row_before"]),
                _json(row["row_after"]),
            )


async def now(connection: asyncpg.Connection) -> datetime:
    """Return the time of the target's clock, which repairs are recorded with."""
    time: datetime = await connection.fetchval(NOW)
    return time


async def current_role(connection: asyncpg.Connection) -> str:
    """Return the role that has logged in."""
    role: str = await connection.fetchval(ROLE)
    return role


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
