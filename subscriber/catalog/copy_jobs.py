"""State of a copy of several tables from one snapshot by many executors, in the catalog.

There is at most one for each subscription. Its tables are in datasync while parts are missing and in finishedcopy
after that. The group's progress, slot, origin and session are those of one table synchronization, under the relid
COPY_JOB_RELID, which no table has. The head of spark/copy/job.py describes the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import asyncpg

from subscriber.connection.pipeline import Pipeline
from subscriber.lsn import Lsn

COPY_JOB_RELID = 0xFFFFFFFF  # relid of records that belong to all tables of a group; no server assigns that OID

_BULK_COPY = """
SELECT c.copyid, c.fence, c.lsn::text AS lsn, coalesce(array_agg(r.relid::bigint ORDER BY r.relid)
         FILTER (WHERE r.relid IS NOT NULL), '{}') AS relids, coalesce(array_agg(r.parts ORDER BY r.relid)
         FILTER (WHERE r.relid IS NOT NULL), '{}') AS parts
  FROM subscriber.bulk_copy c LEFT JOIN subscriber.bulk_copy_rel r USING (copyid)
 WHERE c.subid = $1 GROUP BY c.copyid, c.fence, c.lsn
"""
_ADD = "INSERT INTO subscriber.bulk_copy (subid, lsn) VALUES ($1, $2::text::pg_lsn) RETURNING copyid, fence"
_REPLACE = "DELETE FROM subscriber.bulk_copy WHERE subid = $1"
_ADD_TABLES = """
INSERT INTO subscriber.bulk_copy_rel (copyid, relid, parts)
SELECT $1, relid, parts FROM unnest($2::oid[], $3::int[]) AS t (relid, parts)
"""
# Waits for executors that are at work for it: the key they insert refers to these rows.
_REMOVE_TABLE = "DELETE FROM subscriber.bulk_copy_rel WHERE copyid = $1 AND relid = $2"
_NEW_FENCE = """
UPDATE subscriber.bulk_copy SET fence = pg_catalog.uuid_send(pg_catalog.gen_random_uuid()) WHERE copyid = $1
"""
# Of a table in more than one part it is known that it was empty before.
_SPOIL = "UPDATE subscriber.bulk_copy_rel SET parts = greatest(parts, 2) WHERE copyid = $1 AND relid = $2"
_FORGET_PARTS = "DELETE FROM subscriber.copy_done WHERE copyid = $1 AND relid = $2"
_REMOVE = "DELETE FROM subscriber.bulk_copy WHERE copyid = $1"
_DONE = """
SELECT d.relid::bigint AS relid, array_agg(d.part) AS parts, sum(d.rows)::bigint AS rows, sum(d.bytes)::bigint AS bytes
  FROM subscriber.copy_done d WHERE d.copyid = $1 GROUP BY d.relid
"""

# For sessions of executors, which may have no privilege on our tables.
_CLAIM = "SELECT c.relid::bigint, c.part FROM subscriber.claim_parts($1::bigint, $2, $3::oid[], $4::int[]) c"
_RECORD = "SELECT subscriber.record_parts($1::bigint, $2, $3::oid[], $4::int[], $5::bigint[], $6::bigint[])"


@dataclass(frozen=True, slots=True)
class BulkCopy:
    """One row of `subscriber.bulk_copy`. `parts` says of each table, by its OID on the target, in how many it is.

    Without tables it is only announced.
    """

    copyid: int
    fence: bytes  # executors have to show it
    lsn: Lsn  # of the snapshot
    parts: dict[int, int]


@dataclass(slots=True)
class CopiedRows:
    """The committed rows of one table."""

    parts: set[int] = field(default_factory=set)
    rows: int = 0
    bytes: int = 0


async def load(connection: asyncpg.Connection, subid: int) -> BulkCopy | None:
    """None: the subscription has none."""
    row = await connection.fetchrow(_BULK_COPY, subid)
    if row is None:
        return None
    parts = dict(zip(row["relids"], row["parts"], strict=True))
    return BulkCopy(row["copyid"], row["fence"], Lsn.parse(row["lsn"]), parts)


async def add(connection: asyncpg.Connection, subid: int, lsn: Lsn, parts: dict[int, int]) -> BulkCopy:
    """Begin one, in place of the subscription's earlier one. `parts` as in BulkCopy."""
    await connection.execute(_REPLACE, subid)
    row = await connection.fetchrow(_ADD, subid, str(lsn))
    assert row is not None
    await connection.execute(_ADD_TABLES, row["copyid"], list(parts), list(parts.values()))
    return BulkCopy(row["copyid"], row["fence"], lsn, parts)


async def announce(connection: asyncpg.Connection, subid: int) -> None:
    """Announce a copy, so that no worker starts to synchronize a table that the copy may include."""
    async with connection.transaction():
        await add(connection, subid, Lsn(0), {})


async def spoil(connection: asyncpg.Connection, copyid: int, relid: int) -> None:
    """Say that all parts of a table are missing, and that it may have rows that are to be removed.

    Waits for all executors that are at work for the copy. None can begin again: the copy has another fence.
    """
    async with connection.transaction():
        await connection.execute(_NEW_FENCE, copyid)
        await connection.execute(_SPOIL, copyid, relid)
        await connection.execute(_FORGET_PARTS, copyid, relid)


async def remove_table(connection: asyncpg.Connection, copyid: int, relid: int) -> None:
    """Remove a table and its parts. Waits for a session that is copying a part; no session can start another part."""
    await connection.execute(_REMOVE_TABLE, copyid, relid)


async def remove(connection: asyncpg.Connection, copyid: int) -> None:
    """All tables have been handed over, or it is to be done again."""
    await connection.execute(_REMOVE, copyid)


async def copied(connection: asyncpg.Connection, copyid: int) -> dict[int, CopiedRows]:
    """Return the committed rows by the table's OID. Tables without committed rows are left out."""
    return {
        row["relid"]: CopiedRows(set(row["parts"]), row["rows"] or 0, row["bytes"] or 0)
        for row in await connection.fetch(_DONE, copyid)
    }


async def claim(
    pipeline: Pipeline, copyid: int, fence: bytes, parts: Sequence[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the members of `parts` (relid, number) that are not copied yet. Called by executors.

    Waits for a session that is copying one of these parts. Raises ServerError (55000) if another copy has begun.
    """
    rows = await pipeline.rows(_CLAIM, str(copyid), _bytea(fence), *map(_array, zip(*parts, strict=True)))
    return {(int(relid or 0), int(number or 0)) for relid, number in rows}


async def record(
    pipeline: Pipeline, copyid: int, fence: bytes, counts: Mapping[tuple[int, int], tuple[int, int]]
) -> None:
    """Record the rows and bytes of each claimed part, by (relid, number)."""
    columns = (*zip(*counts, strict=True), *zip(*counts.values(), strict=True))
    await pipeline.rows(_RECORD, str(copyid), _bytea(fence), *map(_array, columns))


def _bytea(data: bytes) -> str:
    return f"\\x{data.hex()}"


def _array(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"
