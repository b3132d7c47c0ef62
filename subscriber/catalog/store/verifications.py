"""Statements on `subscriber.touched_range` and `subscriber.verification`: the ranges that a comparison has to read.

A comparison calls begin() while the apply worker is paused at its position, and end() when it has the result. Of two
comparisons, only the one that has begun last can end: the other one's ranges may be touched again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from subscriber.apply.touched_ranges import TouchedTable
from subscriber.lsn import Lsn

_LOAD = (
    "SELECT t.touched::text AS touched FROM subscriber.touched_range t WHERE t.subid = $1 AND t.verification IS NULL"
)
_FIND = "SELECT v.publisher, v.tables::text FROM subscriber.verification v WHERE v.subid = $1"
_BEGIN = """
INSERT INTO subscriber.verification AS v (subid, number) VALUES ($1, subscriber.new_id())
ON CONFLICT (subid) DO UPDATE SET number = excluded.number RETURNING v.number
"""
_TAKE = "UPDATE subscriber.touched_range SET verification = $2 WHERE subid = $1"
_TAKEN = "SELECT t.touched::text AS touched FROM subscriber.touched_range t WHERE t.subid = $1 AND t.verification = $2"
_END = """
UPDATE subscriber.verification SET publisher = $3, tables = $4::text::jsonb WHERE subid = $1 AND number = $2
RETURNING true
"""
_REMOVE = "DELETE FROM subscriber.touched_range WHERE subid = $1 AND verification = $2"
# The number is a time, see new_id() in migrations/schema.sql.
_LAST = """
SELECT '2026-01-01 00:00:00+00'::timestamptz + v.number / 1024 * interval '1 microsecond',
       v.publisher IS NOT NULL, pg_catalog.jsonb_array_length(v.tables)
  FROM subscriber.verification v WHERE v.subid = $1::oid
"""
_FORGET = "DELETE FROM subscriber.verification WHERE subid = $1"


@dataclass(frozen=True, slots=True)
class VerifiedTable:
    """A table that had no difference.

    Attributes:
        relid: the OID on the target.
        ready: the position at which its copy was handed over. Another copy has another position.
        key: the columns of its key on the target.
        lsn: the position of its last comparison as a whole.
    """

    relid: int
    ready: str
    key: tuple[str, ...]
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class Verification:
    """The last comparison of a subscription.

    Attributes:
        publisher: the system identifier and the timeline. None: it has not ended.
        tables: the tables without a difference, by OID.
    """

    publisher: str | None
    tables: dict[int, VerifiedTable]


@dataclass(frozen=True, slots=True)
class LastVerification:
    """The start of a comparison, its end if there is one, and the number of tables without a difference."""

    began: datetime
    has_ended: bool
    same: int


async def load_last(connection: asyncpg.Connection, subid: int) -> LastVerification | None:
    """Return the last comparison of a subscription with `track_ranges`; None if there is none."""
    row = await connection.fetchrow(_LAST, subid)
    return None if row is None else LastVerification(*row)


async def load(connection: asyncpg.Connection, subid: int) -> list[TouchedTable]:
    """Return the ranges that no comparison has read."""
    return _tables(await connection.fetch(_LOAD, subid))


async def begin(connection: asyncpg.Connection, subid: int) -> tuple[int, list[TouchedTable], Verification | None]:
    """Begin a comparison.

    Returns:
        Its number, all ranges that were touched since the last one that has ended, and that one. None: there is none.
    """
    async with connection.transaction():
        unfinished = await connection.fetchrow(_FIND, subid)
        number = int(await connection.fetchval(_BEGIN, subid))
        await connection.execute(_TAKE, subid, number)
        touched = _tables(await connection.fetch(_TAKEN, subid, number))
    return number, touched, None if unfinished is None else _verification(*unfinished)


async def end(
    connection: asyncpg.Connection, subid: int, number: int, publisher: str, tables: Sequence[VerifiedTable]
) -> bool:
    """End a comparison. Returns False if another one has begun, or if its result is no longer valid."""
    stored = [{"relid": table.relid, "ready": table.ready, "key": table.key, "lsn": str(table.lsn)} for table in tables]
    async with connection.transaction():
        if not await connection.fetchval(_END, subid, number, publisher, json.dumps(stored)):
            return False
        await connection.execute(_REMOVE, subid, number)
    return True


async def forget(connection: asyncpg.Connection, subid: int) -> None:
    """Forget the last comparison, because the target is changed without touching ranges."""
    await connection.execute(_FORGET, subid)


def _tables(rows: Sequence[asyncpg.Record]) -> list[TouchedTable]:
    return [TouchedTable.from_json(table) for row in rows for table in json.loads(row["touched"])]


def _verification(publisher: str | None, tables: str) -> Verification:
    verified = [
        VerifiedTable(table["relid"], table["ready"], tuple(table["key"]), Lsn.parse(table["lsn"]))
        for table in json.loads(tables)
    ]
    return Verification(publisher, {table.relid: table for table in verified})
