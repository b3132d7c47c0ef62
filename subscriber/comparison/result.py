"""The result of a comparison: for each table the keys of the rows that differ, never their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from subscriber.lsn import Lsn
from subscriber.remedy import Remedy

KEYS = 1000  # rows listed for each table and kind of difference

Key = tuple[str | None, ...]  # the key's columns as text; without a key all columns


class ComparedRows(StrEnum):
    """The rows of a table that were read."""

    ALL = "all"
    TOUCHED = "touched"  # those in ranges of keys that the stream has changed
    NONE = "none"  # the stream has changed none


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
    foreign_count: int = 0  # rows of the publisher that do not belong to the subscription by its rule of ownership
    differing_buckets: int = 0  # different buckets whose rows were not read or counted
    unexplained_buckets: int = 0  # different buckets in which no row differs
    compared: ComparedRows = ComparedRows.ALL
    lsn: Lsn | None = field(default=None, compare=False)  # the position of the comparison
    since: Lsn | None = None  # the position at which other rows were read last; None: all were read
    note: str | None = None  # reason why it was not compared
    remedy: Remedy | None = field(default=None, compare=False)  # what to do about that
    is_changed: bool = False  # the reason is a change of the table itself, so that another comparison may succeed

    @property
    def listed(self) -> int:
        """Return the number of keys in the lists."""
        return len(self.missing) + len(self.extra) + len(self.changed)

    def leave_out(self, note: str, remedy: Remedy | None = None, *, is_changed: bool = False) -> None:
        """Record the reason why the table is not compared."""
        self.note, self.remedy, self.is_changed = note, remedy, is_changed

    def identify(self, key: tuple[str, ...]) -> None:
        """Record the names of the key's columns."""
        self.key = key

    def count_rows(self, rows: int, target_rows: int) -> None:
        """Record the number of rows on both sides."""
        self.rows, self.target_rows = rows, target_rows

    def leave_buckets(self, buckets: int) -> None:
        """Record that this number of buckets differs, and that their rows are not read."""
        self.differing_buckets = buckets

    def estimate(self) -> None:
        """Take the difference of the numbers of rows for the rows that differ, because none is read."""
        self.missing_count = max(0, self.rows - self.target_rows)
        self.extra_count = max(0, self.target_rows - self.rows)

    def add_changed(self, key: Key, columns: Callable[[], tuple[str, ...]], limit: int) -> None:
        """Count a row that both sides have, and list it and its columns while there are fewer than `limit`."""
        self.changed_count += 1
        if len(self.changed) < limit:
            self.changed[key] = columns()

    def add_unpaired(self, key: Key, missing: int, extra: int, limit: int, *, lists_extra: bool) -> None:
        """Count rows of a key that one side has, and list the key while there are fewer than `limit`."""
        self.missing_count += missing
        self.extra_count += extra
        if missing and len(self.missing) < limit:
            self.missing.append(key)
        if extra and lists_extra and len(self.extra) < limit:
            self.extra.append(key)

    def leave_unexplained(self, buckets: int) -> None:
        """Count different buckets in which no row differs."""
        self.unexplained_buckets += buckets

    def restrict(self, compared: ComparedRows, since: Lsn) -> None:
        """Record that only some rows are read, because the others were read at position `since`."""
        self.compared, self.since = compared, since

    def add(self, part: TableComparison) -> None:
        """Add the result for some more rows."""
        self.rows += part.rows
        self.target_rows += part.target_rows
        self.missing = [*self.missing, *part.missing][:KEYS]
        self.extra = [*self.extra, *part.extra][:KEYS]
        self.changed = dict([*self.changed.items(), *part.changed.items()][:KEYS])
        self.missing_count += part.missing_count
        self.extra_count += part.extra_count
        self.changed_count += part.changed_count
        self.foreign_count += part.foreign_count
        self.differing_buckets += part.differing_buckets
        self.unexplained_buckets += part.unexplained_buckets
        self.note, self.remedy = self.note or part.note, self.remedy or part.remedy
        self.is_changed = self.is_changed or part.is_changed

    @property
    def is_same(self) -> bool:
        """Return True if no row that was read differs."""
        return self.note is None and not self.extra_count and not self.differs

    @property
    def differs(self) -> bool:
        """Return True if a row that was read differs, apart from rows that only the target has."""
        return bool(
            self.missing_count
            or self.changed_count
            or self.foreign_count
            or self.differing_buckets
            or self.unexplained_buckets
        )


@dataclass(slots=True)
class Comparison:
    """The result of comparing all tables of a subscription.

    Attributes:
        lsn: the position of the publisher. If tables were compared at different positions, the last one.
        tables: the results.
    """

    lsn: Lsn
    tables: list[TableComparison]

    @classmethod
    def of(cls, tables: list[TableComparison], lsn: Lsn) -> Comparison:
        """Return the comparison of `tables`, each of which may have a position of its own. `lsn`: that of the first."""
        return cls(max((table.lsn for table in tables if table.lsn is not None), default=lsn), tables)

    @property
    def is_at_one_position(self) -> bool:
        """Return True if all tables were compared at `lsn`."""
        return all(table.lsn in (None, self.lsn) for table in self.tables)

    def remedies(self) -> list[Remedy]:
        """Return what to do about tables that were not compared, each once."""
        return list({str(table.remedy): table.remedy for table in self.tables if table.remedy is not None}.values())

    @property
    def is_complete(self) -> bool:
        """Return True if all rows were read on both sides."""
        return all(table.compared is ComparedRows.ALL for table in self.tables)

    @property
    def is_same(self) -> bool:
        """Return True if no row that was read differs."""
        return all(table.is_same for table in self.tables)
