"""The result of a repair."""

from __future__ import annotations

from dataclasses import dataclass, field

from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn


@dataclass(slots=True)
class TableRepair:
    """The repair of one table. Counts are of rows."""

    name: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    unrepaired: int = 0  # rows that another session or a prepared transaction has locked
    refused: int = 0  # rows that a server refuses to read or to change, for the reason `error`
    note: str | None = None  # reason why the table was not repaired completely
    error: SubscriberError | None = field(default=None, repr=False, compare=False)  # the first of a refused row

    def add(self, later: TableRepair) -> None:
        """Add the result of a later repair of the same table."""
        self.inserted += later.inserted
        self.updated += later.updated
        self.deleted += later.deleted
        self.unrepaired = later.unrepaired
        self.refused = later.refused
        self.note = later.note
        self.error = later.error

    def refuse(self, rows: int, error: SubscriberError) -> None:
        """Count rows that a server has refused. The first error is the note. Its detail may have values of the row."""
        self.refused += rows
        self.error = self.error or error
        self.note = self.error.message

    def count(self, action: str) -> None:
        """Count one row. `action`: insert, update or delete, as in subscriber.repairs."""
        self.inserted += action == "insert"
        self.updated += action == "update"
        self.deleted += action == "delete"

    @property
    def repaired(self) -> int:
        return self.inserted + self.updated + self.deleted

    @property
    def is_complete(self) -> bool:
        return self.note is None and not self.unrepaired


@dataclass(slots=True)
class Repair:
    """The repair of a subscription's tables.

    Attributes:
        lsn: the position of the first comparison. A row was repaired at this position or a later one.
        tables: each compared table.
        statements: with `dry_run`, the statements in their order.
        bytes_read: bytes of rows that the publisher has sent to this process.
        compare_again: tables with more differences than one list may have.
    """

    lsn: Lsn
    tables: list[TableRepair] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    bytes_read: int = 0
    compare_again: set[str] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return not self.compare_again and all(table.is_complete for table in self.tables)
