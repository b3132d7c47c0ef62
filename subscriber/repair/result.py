"""The result of a repair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from subscriber.display import shell_word
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.repair.changes import RowChanges

MOST_NAMED = 10  # tables in a command


@dataclass(slots=True)
class TableRepair:
    """The repair of one table. Counts are of rows."""

    name: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    unrepaired: int = 0  # rows that another session or a prepared transaction has locked
    refused: int = 0  # rows that a server refuses to read or to change, for the reason `error`
    extra: int = 0  # rows that the publisher does not have, and that were kept
    doubtful: tuple[str, ...] = ()  # other subscriptions that may own the extra rows
    outside: int = 0  # rows of the publisher outside the rule of ownership
    note: str | None = None  # reason why the table was not repaired completely
    remedy: Remedy | None = field(default=None, compare=False)  # what to do about that
    error: SubscriberError | None = field(default=None, repr=False, compare=False)  # the first of a refused row

    def add(self, later: TableRepair) -> None:
        """Add the result of a later repair of the same table."""
        self.inserted += later.inserted
        self.updated += later.updated
        self.deleted += later.deleted
        self.unrepaired = later.unrepaired
        self.refused = later.refused
        self.extra = later.extra
        self.doubtful = later.doubtful
        self.outside = later.outside
        self.note, self.remedy = later.note, later.remedy
        self.error = later.error

    def refuse(self, rows: int, error: SubscriberError) -> None:
        """Count rows that a server has refused. The first error is the note. Its detail may have values of the row."""
        self.refused += rows
        self.error = self.error or error
        self.note, self.remedy = self.error.message, self.error.remedy

    def leave_out(self, note: str) -> None:
        """Record the reason why the table is not repaired."""
        self.note = note

    def lock_out(self, rows: int) -> None:
        """Count rows that another session has locked."""
        self.unrepaired += rows

    def keep(self, extra: int, doubtful: tuple[str, ...], outside: int = 0) -> None:
        """Record the rows that are kept or left out, and the other subscriptions that may own them."""
        self.extra, self.doubtful, self.outside = extra, doubtful, outside

    def count_changes(self, changes: RowChanges) -> None:
        """Count the changes of a batch. A comparison has counted the extra rows that it does not list."""
        self.deleted += len(changes.deletes)
        self.updated += len(changes.updates)
        self.inserted += len(changes.inserts)
        self.extra = max(0, self.extra - changes.respelled) + len(changes.extra)

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
        return self.note is None and not (self.unrepaired or self.extra or self.outside)


@dataclass(slots=True)
class Repair:
    """The repair of a subscription's tables.

    Attributes:
        lsn: the position of the first comparison. A row was repaired at this position or a later one.
        tables: each compared table.
        statements: with `dry_run`, the statements in their order.
        bytes_read: bytes of rows that the publisher has sent to this process.
        compare_again: tables with more differences than one list may have.
        subscription: the name of the subscription.
    """

    lsn: Lsn
    tables: list[TableRepair] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    bytes_read: int = 0
    compare_again: set[str] = field(default_factory=set)
    subscription: str = ""

    def read(self, size: int) -> None:
        """Count bytes of rows that the publisher has sent."""
        self.bytes_read += size

    def repeat(self, tables: set[str]) -> None:
        """Compare these tables again, and no others."""
        self.compare_again = tables

    def remedies(self) -> Iterator[Remedy]:
        """Yield what to do about tables and rows that are refused, and how extra rows are deleted or get an owner."""
        yield from {str(table.remedy): table.remedy for table in self.tables if table.remedy is not None}.values()
        extra = [table for table in self.tables if table.extra]
        for shared in [table for table in extra if table.doubtful][:1]:
            yield extra_rows_remedy(self.subscription, shared)
        if own := [table for table in extra if not table.doubtful]:
            yield delete_extra_remedy(self.subscription, own)

    @property
    def is_complete(self) -> bool:
        return not self.compare_again and all(table.is_complete for table in self.tables)


def extra_rows_detail(table: TableRepair) -> str:
    """Return who may own the extra rows of a table, as a sentence."""
    if table.doubtful:
        names = ", ".join(f'"{name}"' for name in table.doubtful)
        return f"They may belong to subscriptions that write to the table, too: {names}."
    return "The publisher may have deleted them meanwhile, or a session of the target may have written them."


def extra_rows_remedy(subscription: str, table: TableRepair) -> Remedy:
    """Return how the extra rows of a table are deleted, or get an owner."""
    if table.doubtful:
        advice = "Give each subscription of the table a rule of ownership: ALTER SUBSCRIPTION … SET (source_tag = …)."
        return Remedy(advice)
    return delete_extra_remedy(subscription, [table])


def delete_extra_remedy(subscription: str, tables: Sequence[TableRepair]) -> Remedy:
    """Return the command that deletes the extra rows of tables."""
    names = [table.name for table in tables] if len(tables) <= MOST_NAMED else []
    words = " ".join(map(shell_word, (subscription, *names)))
    return Remedy("if no application needs these rows", f"subscriber repair {words} --delete-extra")
