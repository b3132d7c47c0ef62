"""A batch: changes of several small transactions, or of one large transaction, that are applied together.

A batch ends at a COMMIT of the stream, so it leaves the target in a state that the publisher had. Only a transaction
that is larger than a batch is applied in slices, within one transaction of the target. table_batch.py turns the
changes into steps, which are applied. The changes themselves are kept until the target has answered: a rejected batch
is applied again, row by row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from subscriber.apply.batch.eligibility import ineligible_reason
from subscriber.apply.batch.table_batch import TableBatch
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.row_extraction import (
    BODY,
    TRANSACTION_OVERHEAD,
    VALUES,
    RowLayout,
    TransactionEnd,
    extract_changes,
)
from subscriber.protocol.tuple_data import BINARY, TupleData

Payload = bytes | Insert | Update | Delete  # as the walsender sent it, or decoded


class AppendedChanges(NamedTuple):
    """Changes that were taken off a queue."""

    changes: int
    bytes: int


class AppendResult(NamedTuple):
    """Whole transactions that were taken, `end_lsn` of the last; and how many bytes they were."""

    transactions: int
    changes: int
    bytes: int
    end_lsn: Lsn


class CommitCallbacks(NamedTuple):
    """Commit handling for transactions that are taken from the queue as a whole."""

    needs_boundary: Callable[[Lsn], bool]  # whether the worker acts at a boundary there, or at one before
    on_committed: Callable[[int], None]  # called with the number of a transaction, once it and all before are committed
    number: int  # of the first; each further one has one more


class TransactionRun(NamedTuple):
    """Transactions one after another, and where each ends."""

    ended: list[TransactionEnd]
    ends: CommitCallbacks

    def part(self, index: int, changes: list[Payload], several: TransactionRun | None = None) -> TransactionSlice:
        finish_lsn, commit_time, xid, end_lsn, _ = self.ended[index]
        transaction = RemoteTransaction(xid, Lsn(finish_lsn), commit_time, is_open_on_target=True)
        on_committed = partial(self.ends.on_committed, self.ends.number + index)
        return TransactionSlice(transaction, changes, Lsn(end_lsn), on_committed, several)


@dataclass(slots=True, eq=False)
class TransactionSlice:
    """A remote transaction in a batch, or a slice of a large one. `changes` are kept to apply them again row by row.

    A slice may stand for `several` transactions, of which `transaction` is the last. The others are needed only if
    the batch is rejected.
    """

    transaction: RemoteTransaction
    changes: list[Payload] = field(default_factory=list)
    end_lsn: Lsn | None = None  # None: its COMMIT has not been received
    on_committed: Callable[[], None] | None = None
    several: TransactionRun | None = None

    def transactions(self) -> Iterator[TransactionSlice]:
        """Return the changes of each transaction."""
        if self.several is None:
            yield self
            return
        start = 0
        for index, (*_, stop) in enumerate(self.several.ended):
            yield self.several.part(index, self.changes[start:stop])
            start = stop


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The size at which a batch is full, and the sizes of its parts. The reference page "Settings" explains them."""

    rows: int
    bytes: int
    steps: int  # for one table
    small_transaction: int  # changes
    run: int  # changes
    largest_message: int  # bytes


class Batch:
    """Changes that have been appended and not been sent."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.tables: dict[bytes, TableBatch] = {}  # by the relid's four bytes
        self.slices: list[TransactionSlice] = []
        self.rows = 0
        self.bytes = 0
        self._shapes: dict[bytes, RowLayout | None] = {}  # by what changes begin with
        self._looked = 0  # rows when the tables' steps were counted last
        self._many_steps = False  # a table has more than the limit

    @property
    def steps(self) -> int:
        return sum(len(table.steps) for table in self.tables.values())

    @property
    def is_open(self) -> bool:
        """True if the batch ends in the middle of a transaction."""
        return bool(self.slices) and self.slices[-1].end_lsn is None

    @property
    def mappings(self) -> dict[int, RelationMapping]:
        """The mappings of all tables, by the publisher's OID."""
        return {table.mapping.remote.relid: table.mapping for table in self.tables.values()}

    @property
    def end_lsn(self) -> Lsn | None:
        """The end of the last transaction that is complete. None: none is."""
        ended = (part.end_lsn for part in reversed(self.slices))
        return next((end for end in ended if end is not None), None)

    def ends_with(self, transaction: RemoteTransaction) -> bool:
        """Return True if the last changes of the batch belong to the transaction."""
        return bool(self.slices) and self.slices[-1].transaction is transaction

    def end(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """The transaction ends with the batch."""
        last = self._slice(transaction)
        last.end_lsn, last.on_committed = end_lsn, on_committed

    def split(self, *, with_open: bool) -> tuple[Batch, Batch]:
        """Return the part to be sent, and the rest.

        Args:
            with_open: send an incomplete transaction, unless others precede it.

        Returns:
            The complete transactions, or everything. Then the incomplete transaction, or an empty batch.
        """
        if not self.is_open:
            return self, Batch(self.limits)
        if len(self.slices) == 1:
            return (self, Batch(self.limits)) if with_open else (Batch(self.limits), self)
        whole, rest = Batch(self.limits), Batch(self.limits)
        mappings = self.mappings
        for part in self.slices:
            half = rest if part.end_lsn is None else whole
            for payload in part.changes:
                change = decoded(payload)
                half.add(part.transaction, half.table(mappings[change.relid], change), change)
            half.slices[-1:] = [part]
        return whole, rest

    @property
    def is_due(self) -> bool:
        """True if the batch is to be applied now. It waits for the end of a small transaction."""
        limits = self.limits
        if self.rows < limits.rows and self.bytes < limits.bytes and not self._has_many_steps():
            return False
        return not self.is_open or len(self.slices) == 1 or len(self.slices[-1].changes) >= limits.small_transaction

    def _has_many_steps(self) -> bool:
        most = self.limits.steps
        if self.rows - self._looked >= most:  # of many tables it would take long to count for each row
            self._looked = self.rows
            self._many_steps = any(len(table.steps) > most for table in self.tables.values())
        return self._many_steps

    def fits(self, mapping: RelationMapping) -> bool:
        """Return True if the batch has no change of a table, or has them by the same mapping."""
        table = self.tables.get(_key(mapping))
        return table is None or table.mapping is mapping

    def _slice(self, transaction: RemoteTransaction) -> TransactionSlice:
        """Return the slice for the changes of `transaction`, which is being received."""
        slices = self.slices
        if not slices or slices[-1].transaction is not transaction:
            slices.append(TransactionSlice(transaction))
        return slices[-1]

    def append_raw(
        self,
        transaction: RemoteTransaction,
        waiting: deque[bytes],
        limit: int,
        find: Callable[[bytes], TableBatch | None],
    ) -> AppendedChanges:
        """Take row changes off the front of `waiting`, up to `limit`.

        Stops before any other message, before a change that `find(relid)` has no table for or that must not be part
        of a batch, before a malformed message, and when the batch is full. The caller then decodes the next message.
        """
        most, largest = self._room(limit)
        changes, size = self._take_run(waiting, most, largest, find)
        if not changes:
            largest_message = self.limits.largest_message
            _, changes, rows = extract_changes(waiting, most, largest, largest_message, self._finder(find), True)
            size = sum(map(len, changes))
            for add, row in rows:
                add(row)
        for _ in changes:
            waiting.popleft()
        if changes:
            self._slice(transaction).changes += changes
            self.rows += len(changes)
            self.bytes += size
        return AppendedChanges(len(changes), size)

    def _room(self, limit: int) -> tuple[int, int]:
        """Return the number of changes and bytes that append_raw() may take, at least 0."""
        limits = self.limits
        most = limits.rows + limits.small_transaction - self.rows
        return max(min(limit, most), 0), max(2 * limits.bytes - self.bytes, 0)

    def append_raw_transactions(
        self, waiting: deque[bytes], limit: int, find: Callable[[bytes], TableBatch | None], ends: CommitCallbacks
    ) -> AppendResult | None:
        """Take whole small transactions off the front of `waiting`, with up to `limit` changes. Returns None for none.

        Stops where append_raw() stops, and before a transaction whose commit boundary has to be processed.
        """
        most, largest = self._room(limit)
        largest_message = self.limits.largest_message
        ended, changes, rows = extract_changes(waiting, most, largest, largest_message, self._finder(find), False)
        while ended and ends.needs_boundary(Lsn(ended[-1][3])):
            ended.pop()
        if not ended:
            return None
        taken = ended[-1][-1]
        del changes[taken:]
        several = TransactionRun(ended, ends)
        self.slices.append(several.part(len(ended) - 1, [*changes], several))
        for add, row in rows[:taken]:
            add(row)
        for _ in range(taken + 2 * len(ended)):
            waiting.popleft()
        size = sum(map(len, changes))
        self.rows += taken
        self.bytes += size
        return AppendResult(len(ended), taken, size + TRANSACTION_OVERHEAD * len(ended), Lsn(ended[-1][3]))

    def _finder(self, find: Callable[[bytes], TableBatch | None]) -> Callable[[bytes], RowLayout | None]:
        """Return a function from the header of a change to its layout. It calls `find` for every header it is given."""
        shapes = self._shapes

        def shape(head: bytes) -> RowLayout | None:
            table = find(head[1:5]) if head[0] in b"IUD" else None
            if table is None:
                return None
            if head not in shapes:
                shapes[head] = table.shape(head)
            return shapes[head]

        return shape

    def _take_run(
        self, waiting: deque[bytes], most: int, largest: int, find: Callable[[bytes], TableBatch | None]
    ) -> tuple[list[bytes], int]:
        """append_raw() for changes alike at the front of `waiting`, if there are: they and their bytes."""
        run = self.limits.run
        if len(waiting) < run:
            return [], 0
        head = waiting[0][BODY:VALUES]
        if head != waiting[run - 1][BODY:VALUES] or head[:1] not in (b"I", b"U", b"D"):
            return [], 0
        table = find(head[1:5])
        if table is None:
            return [], 0
        return table.take_run(head, waiting, most, largest, self.limits.largest_message)

    def table(self, mapping: RelationMapping, change: Insert | Update | Delete) -> TableBatch:
        """Return the batch of a table."""
        key = _key(mapping)
        table = self.tables.get(key)
        if table is None:
            table = self.tables[key] = TableBatch(mapping, binary=is_binary(change))
        return table

    def add(self, transaction: RemoteTransaction, table: TableBatch, change: Insert | Update | Delete) -> bool:
        """Add a decoded change. Returns False if it cannot be part of a batch."""
        size = _size(change)
        if size > self.limits.largest_message or not table.add(change):
            return False
        self._slice(transaction).changes.append(change)
        self.rows += 1
        self.bytes += size
        return True


def _key(mapping: RelationMapping) -> bytes:
    return mapping.remote.relid.to_bytes(4, "big")


def decoded(payload: Payload) -> Insert | Update | Delete:
    if not isinstance(payload, bytes):
        return payload
    message = Decoder().decode(payload, BODY)
    assert isinstance(message, Insert | Update | Delete)
    return message


def _size(change: Insert | Update | Delete) -> int:
    rows = (getattr(change, "new", None), getattr(change, "old", None))
    return sum(len(row.raw) for row in rows if isinstance(row, TupleData))


def is_binary(change: Insert | Update | Delete) -> bool:
    """Return True if `change` has binary values. A row with only NULLs counts as text."""
    row = change.old if isinstance(change, Delete) else change.new
    return BINARY in row.split()[0]


def why_not_batched(mapping: RelationMapping, change: Insert | Update | Delete) -> str | None:
    """Why `change` cannot be part of any batch, in a few words; None: it can."""
    with_old = not isinstance(change, Insert) and change.old is not None
    return ineligible_reason(mapping, change.letter[0], with_old=with_old, binary=is_binary(change))
