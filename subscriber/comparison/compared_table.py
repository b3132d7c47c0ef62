"""ComparedTable: how a table is compared, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from subscriber.comparison.checksums import TableSide, buckets_for, refined_parts
from subscriber.comparison.key_selection import KeySelection, NumberedKey, numbered_range, range_selections
from subscriber.comparison.result import TableComparison
from subscriber.ownership import TableOwnership
from subscriber.publisher.partitions import TablePartition, heaps
from subscriber.publisher.tables import PublishedTable

ROWS_TO_READ = 2000  # without another sum, at least


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
    ownership: TableOwnership
    readers: Mapping[str, str] = field(default_factory=dict)  # the role that reads a heap of the target, if it switches
    lists_extra: bool = True  # False: rows that only the target has are counted, and not listed
    buckets: int = 1
    wanted: list[int] = field(default_factory=list)  # buckets to read again
    rows_in_ranges: dict[int, int] = field(default_factory=dict)  # of the buckets `wanted`, if they are ranges

    @property
    def range_key(self) -> NumberedKey | None:
        """Return the kind of the key, if ranges of it can be the buckets. The key is never NULL then."""
        source, target = (side.range_key for side in self.sides)
        return source if source is target and self.published.replica_identity != "f" else None

    @property
    def range_width(self) -> int | None:
        """Return the width of the ranges that are the buckets. None: they are not ranges."""
        return self.sides[0].range_width

    def is_worth_refining(self, buckets: int) -> bool:
        """Return True if the buckets `wanted` should be divided before their rows are read.

        A sum costs a server about a microsecond for each row of the table. A row that is read costs some fifty.

        Args:
            buckets: the number of buckets whose rows may be read.
        """
        rows = max(self.found.rows, self.found.target_rows)
        read = rows * len(self.wanted) // self.buckets
        return len(self.wanted) > buckets or read > max(ROWS_TO_READ, rows // 50)

    def divide(self, width: int | None) -> None:
        """Let ranges of the key be the buckets. `width`: None: the buckets are hashes."""
        source, target = self.sides
        self.sides = replace(source, range_width=width), replace(target, range_width=width)
        if width is None:
            self.rows_in_ranges = {}

    def refine(self) -> None:
        """Make the buckets smaller."""
        self.buckets *= refined_parts(max(self.found.rows, self.found.target_rows), self.buckets)

    def want(self, buckets: list[int]) -> None:
        """Read the rows of these buckets next."""
        self.wanted = buckets

    def take_wanted(self) -> list[int]:
        """Return the buckets whose rows were to be read. None is to be read any more."""
        wanted, self.wanted = self.wanted, []
        return wanted

    def count_ranges(self, source: Mapping[int, tuple[int, int]], target: Mapping[int, tuple[int, int]]) -> None:
        """Record the number of rows of the ranges that are to be read, from the sums of both sides."""
        none = (0, 0)
        self.rows_in_ranges = {
            bucket: max(source.get(bucket, none)[0], target.get(bucket, none)[0]) for bucket in self.wanted
        }

    def select(self, selection: KeySelection | None, width: int | None = None) -> ComparedTable:
        """Return the table as one part for each heap, of which the servers read some rows with an index.

        Args:
            selection: the rows. None: all rows.
            width: see divide(). None: the buckets are not ranges.
        """
        source, target = (
            replace(side, selection=side.selection if selection is None else selection, range_width=width)
            for side in self.sides
        )
        here, other = ([replace(heap, size=0) for heap in heaps(parts)] for parts in self.parts)
        buckets = 1 if selection is None else buckets_for(selection.rows)
        return replace(self, sides=(source, target), parts=(here, other), buckets=buckets, wanted=[])

    def select_ranges(self, ranges: Mapping[int, int], width: int, buckets: int | None = None) -> list[ComparedTable]:
        """Return a part for each query for the rows of some ranges.

        Args:
            ranges: the number of rows of each range at most.
            width: the width of the ranges.
            buckets: the width of the parts' own buckets. None: they have no ranges.
        """
        assert self.range_key is not None
        numbered = (numbered_range(number, width, rows) for number, rows in ranges.items())
        return [self.select(selection, buckets) for selection in range_selections(numbered, self.range_key)]
