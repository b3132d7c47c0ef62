"""Statements on `subscriber.copied_range`: the ranges of tables that are copied with copy_engine = ranges.

A row without a snapshot is a key whose row has to be read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from subscriber.lsn import Lsn, optional_lsn

_LOAD = """
SELECT c.rangeid, c.relid::bigint AS relid, c.key_columns, c.key_types::bigint[] AS key_types, c.key_comparisons,
       c.low, c.high, c.single, c.snapshot, c.lsn::text AS lsn, c.timeline
  FROM subscriber.copied_range c WHERE c.subid = $1 AND ($2::oid IS NULL OR c.relid = $2) ORDER BY c.rangeid
"""
_ADD_SINGLE = """
INSERT INTO subscriber.copied_range (subid, relid, key_columns, key_types, low, single, timeline, key_comparisons)
VALUES ($1, $2, $3, $4::bigint[]::oid[], $5, true, $6, $7) RETURNING rangeid
"""
_REMOVE = "DELETE FROM subscriber.copied_range WHERE subid = $1 AND relid = $2"


@dataclass(frozen=True, slots=True)
class CopiedRange:
    """One row of `subscriber.copied_range`. Keys are values as the publisher prints them."""

    rangeid: int
    relid: int  # OID on the target
    key_columns: Sequence[str]
    key_types: Sequence[int]
    key_comparisons: Sequence[str | None]  # type and collation of columns that only the publisher can compare
    low: Sequence[str] | None
    high: Sequence[str] | None
    single: bool
    snapshot: str | None  # None: a key to read again
    lsn: Lsn | None
    timeline: int


async def load(connection: asyncpg.Connection, subid: int, relid: int | None = None) -> list[CopiedRange]:
    """Return the ranges of one table, or of all tables of the subscription, in the order of their creation."""
    return [
        CopiedRange(**{**dict(row), "lsn": optional_lsn(row["lsn"])})
        for row in await connection.fetch(_LOAD, subid, relid)
    ]


async def add_single(connection: asyncpg.Connection, subid: int, single: CopiedRange) -> int:
    """Store a key whose row has to be read again. Returns the number of the row."""
    low = list(single.low or ())
    columns, types = list(single.key_columns), list(single.key_types)
    values = columns, types, low, single.timeline, list(single.key_comparisons)
    return int(await connection.fetchval(_ADD_SINGLE, subid, single.relid, *values))


async def remove(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """Delete all ranges of a table."""
    await connection.execute(_REMOVE, subid, relid)
