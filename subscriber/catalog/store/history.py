"""Statements on `subscriber.history`: rates, lag and kept WAL of subscriptions, by the minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from datetime import datetime

import asyncpg

# A subscription may have been dropped since it was measured.
ADD = """
INSERT INTO subscriber.history (subid, at, transactions, changes, bytes, lag_bytes, lag_seconds, retained_bytes)
SELECT s.subid, $2::timestamptz, $3::float8, $4::float8, $5::float8, $6::bigint, $7::float8, $8::bigint
  FROM subscriber.subscription s WHERE s.subid = $1::oid
ON CONFLICT (subid, at) DO NOTHING
"""
LOAD = """
SELECT h.subid, h.at, h.transactions, h.changes, h.bytes, h.lag_bytes, h.lag_seconds, h.retained_bytes
  FROM subscriber.history h WHERE h.at > pg_catalog.clock_timestamp() - $1::float8 * interval '1 second'
 ORDER BY h.at
"""
FORGET = """
DELETE FROM subscriber.history
 WHERE at < pg_catalog.clock_timestamp() - $1::float8 * interval '1 second'
       OR at <= (SELECT h.at FROM subscriber.history h ORDER BY h.at DESC OFFSET $2 LIMIT 1)
"""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One moment of a subscription. A value is None if it is not known."""

    at: datetime
    transactions: float | None  # per second
    changes: float | None
    bytes: float | None
    lag_bytes: int | None
    lag_seconds: float | None
    retained_bytes: int | None


async def add(connection: asyncpg.Connection, points: Mapping[int, HistoryPoint]) -> None:
    """Store a point of each subscription, by its OID, in one transaction. Rates are means, lags are maxima."""
    await connection.executemany(ADD, [(subid, *astuple(point)) for subid, point in points.items()])


async def load(connection: asyncpg.Connection, seconds: float) -> dict[int, list[HistoryPoint]]:
    """Return the points of the last `seconds` by the OID of the subscription, the oldest first."""
    points: dict[int, list[HistoryPoint]] = {}
    for subid, *values in await connection.fetch(LOAD, seconds):
        points.setdefault(subid, []).append(HistoryPoint(*values))
    return points


async def forget(connection: asyncpg.Connection, seconds: float, rows: int) -> None:
    """Delete points that are older than `seconds`, and the oldest ones above the number `rows`."""
    await connection.execute(FORGET, seconds, rows)
