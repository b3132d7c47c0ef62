"""The result of a comparison: for each table the keys of the rows that differ, never their values."""

from __future__ import annotations

from dataclasses import dataclass, field

from subscriber.lsn import Lsn

KEYS = 1000  # rows listed for each table and kind of difference

Key = tuple[str | None, ...]  # the key's columns as text; without a key all columns


@dataclass(slots=True)
class TableComparison:
    """The result of comparing one table.

    Lists have the keys of rows, at most KEYS of each kind. The counts include all rows.
    """

    name: str
    rows: int = 0  # on the publisher
    target_rows: int = 0
    key: tuple[str, ...] = ()  # names of the key's columns; empty: rows are compared as a whole
    missing: list[Key] = field(default_factory=list)  # on the target
    extra: list[Key] = field(default_factory=list)  # only there
    changed: dict[Key, tuple[str, ...]] = field(default_factory=dict)  # key -> names of columns
    missing_count: int = 0
    extra_count: int = 0
    changed_count: int = 0
    differing_buckets: int = 0  # different buckets whose rows were not read or counted
    unexplained_buckets: int = 0  # different buckets in which no row differs
    note: str | None = None  # reason why it was not compared

    @property
    def listed(self) -> int:
        """Return the number of keys in the lists."""
        return len(self.missing) + len(self.extra) + len(self.changed)

    @property
    def is_same(self) -> bool:
        return self.note is None and not (
            self.missing_count
            or self.extra_count
            or self.changed_count
            or self.differing_buckets
            or self.unexplained_buckets
        )


@dataclass(slots=True)
class Comparison:
    """The result of comparing all tables of a subscription as of position `lsn` of the publisher."""

    lsn: Lsn
    tables: list[TableComparison]

    @property
    def is_same(self) -> bool:
        return all(table.is_same for table in self.tables)
