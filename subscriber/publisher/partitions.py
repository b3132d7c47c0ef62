"""Split a table into parts that several connections can read at the same time, under one snapshot.

A part is a range of blocks of one heap: of the table, or of a leaf of a partitioned table. A leaf that is a foreign
table is one part, whose rows no snapshot holds. Block ranges need no index,
so they exist for tables with and without a key. A range is selected by ctid, which servers since 14 can seek.
Before 14 each part would read the whole table, so there a heap is one part.

The last range of a heap has no end. While a snapshot lasts, the rows that it sees are moved only by a rewrite of the
table (VACUUM FULL, CLUSTER, some ALTER TABLE, TRUNCATE). After a rewrite a range contains other rows. `filenode`
shows a rewrite, provided that the reader holds a lock on the heap. It is the file that the snapshot of
partition_table() sees: the current file may already be that of a rewrite after the snapshot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from subscriber import server_features as features
from subscriber.connection.session import Session
from subscriber.publisher.answers import count, oid, parsing
from subscriber.quoting import qualified

PART_BYTES = 128 * 1024 * 1024  # of a heap, unless the caller says otherwise; some seconds of work
BLOCK = 8192  # bytes; only an estimate hangs on it
MAX_HEAP_BYTES = 32 * 1024**4  # as large as a heap can be, and so the number of its parts is bounded

_HEAPS = """
SELECT n.nspname, c.relname, nullif(c.relfilenode, 0), coalesce(pg_catalog.pg_relation_size(c.oid), 0)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
"""
_OF_TREE = (
    " WHERE c.relkind IN ('r', 'f') AND c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree({relid}))"
    " ORDER BY 1, 2"
)


@dataclass(frozen=True, slots=True)
class TablePartition:
    """Some rows of a table. `first` and `end` are block numbers; None: from the beginning, to the end."""

    schema: str  # schema of the heap: of the table itself, or of a leaf partition
    name: str
    # Of the heap in the snapshot of partition_table(). None: a partitioned table and a foreign table have none.
    filenode: int | None
    first: int | None = None
    end: int | None = None
    only: bool = True  # not the tables that inherit from it: they are published on their own
    size: int = 0  # estimate in bytes

    @property
    def heap(self) -> str:
        """The heap's name, quoted."""
        return qualified(self.schema, self.name)

    @property
    def can_be_locked(self) -> bool:
        """False for a foreign table."""
        return self.filenode is not None or not self.only

    def select(self, columns: str, filters: tuple[str, ...] = (), condition: str | None = None) -> str:
        """Return a query for the part's rows.

        Args:
            columns: the columns, in SQL.
            filters: conditions in SQL; one must hold. Empty: all rows.
            condition: another condition, which must hold too. None: there is none.
        """
        conditions = [] if condition is None else [condition]
        if self.first is not None:
            conditions.append(f"ctid >= '({self.first},0)'::pg_catalog.tid")
        if self.end is not None:
            conditions.append(f"ctid < '({self.end},0)'::pg_catalog.tid")
        if filters:
            conditions.append(f"({' OR '.join(filters)})")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {columns} FROM {'ONLY ' if self.only else ''}{self.heap}{where}"


def whole(schema: str, name: str, parts: list[TablePartition]) -> TablePartition:
    """All of a table, whose parts are `parts`, as one."""
    if {(part.schema, part.name) for part in parts} == {(schema, name)}:
        return TablePartition(schema, name, parts[0].filenode)
    return TablePartition(schema, name, None, only=False)


def heaps(parts: Sequence[TablePartition]) -> list[TablePartition]:
    """The heaps of a table, whose parts are `parts`, each as one part."""
    by_heap: dict[str, TablePartition] = {}
    for part in parts:
        size = part.size + (by_heap[part.heap].size if part.heap in by_heap else 0)
        by_heap[part.heap] = replace(part, first=None, end=None, size=size)
    return list(by_heap.values())


async def partition_table(session: Session, relid: int, part_bytes: int) -> list[TablePartition]:
    """The parts of a table, of about `part_bytes` each, in the order of the table; at least one.

    `relid` is the table's OID on that server. A partitioned table needs a server since 12, as it does to be published.
    """
    if features.PARTITION_TREES.is_in(session.server_version):
        heaps = await session.rows(_HEAPS + _OF_TREE.format(relid=relid))
    else:
        heaps = []
    if not heaps:  # no member of a partition tree
        heaps = await session.rows(f"{_HEAPS} WHERE c.oid = {relid}")
    ranges = features.TID_RANGE_SCANS.is_in(session.server_version)
    with parsing("the files of a table"):
        return [
            part
            for schema, name, filenode, size in heaps
            for part in _cut_heap(
                schema or "",
                name or "",
                None if filenode is None else oid(filenode),
                count(size, MAX_HEAP_BYTES),
                part_bytes if ranges else None,
            )
        ]


def _cut_heap(schema: str, name: str, filenode: int | None, size: int, part_bytes: int | None) -> list[TablePartition]:
    number = 1 if part_bytes is None else max(1, round(size / part_bytes))
    blocks = size // BLOCK
    edges: list[int | None] = [None, *(blocks * i // number for i in range(1, number)), None]
    return [
        TablePartition(schema, name, filenode, first, end, size=size // number)
        for first, end in itertools.pairwise(edges)
    ]
