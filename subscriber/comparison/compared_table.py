"""ComparedTable: how a table is compared, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from subscriber.comparison.checksums import TableSide
from subscriber.comparison.result import TableComparison
from subscriber.publisher.partitions import TablePartition
from subscriber.publisher.tables import PublishedTable


@dataclass(slots=True)
class ComparedTable:
    """A table that can be compared."""

    found: TableComparison
    sides: tuple[TableSide, TableSide]  # the publisher's, the target's
    parts: tuple[list[TablePartition], list[TablePartition]]
    local_names: tuple[str, ...]
    published: PublishedTable
    local_table: tuple[str, str]  # schema and name on the target
    relid: int  # on the target
    state: str  # of the copy, as in subscription_rel
    ready: str  # position of that state
    buckets: int = 1
    wanted: list[int] = field(default_factory=list)  # buckets to read again
