"""Rows that were read in several snapshots, and the changes since then: together the rows of one position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from subscriber.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    Delete,
    Insert,
    OldPart,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Update,
)
from subscriber.protocol.tuple_data import TupleData
from subscriber.ranges.snapshot import TransactionSnapshot
from subscriber.ranges.table_ranges import RangeSnapshot
from subscriber.spark.changes.loaded_rows import LoadedRows, ReadRow
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.raw_rows import UNCHANGED, Key, raw_row, values

RELATION = Relation(
    None,
    1,
    "public",
    "t",
    ReplicaIdentity.DEFAULT,
    (RelationColumn(True, "id", 23, -1), RelationColumn(False, "note", 25, -1), RelationColumn(False, "big", 25, -1)),
)
FIRST = 100  # the number of the first transaction

Rows = dict[int, tuple[bytes, bytes]]  # note and big, by key
Change = Insert | Update | Delete


def row(status: bytes, *found: bytes | None) -> TupleData:
    return TupleData.join(status, found)


def text(key: int) -> bytes:
    return str(key).encode()


@dataclass
class Transaction:
    """A change of a row, or a TRUNCATE (None). The rows before and after it are those of the keys that it touches."""

    change: Change | None
    keys: frozenset[int]
    before: Rows
    after: Rows

    def apply(self, rows: Rows) -> None:
        for key in self.before:
            del rows[key]
        rows.update(self.after)


@dataclass
class History:
    """The rows before the first transaction, the transactions, and what a snapshot of each range sees."""

    rows: Rows
    transactions: list[Transaction]
    limits: list[int]  # the first keys of the ranges but the first
    snapshots: list[tuple[int, frozenset[int]]]  # number of ended transactions, and the unseen ones

    def seen(self, snapshot: tuple[int, frozenset[int]]) -> Rows:
        """Return the rows that a snapshot sees."""
        rows, (ended, running) = dict(self.rows), snapshot
        for number, transaction in enumerate(self.transactions[:ended]):
            if number not in running:
                transaction.apply(rows)
        return rows


def begin(number: int) -> Begin:
    return Begin(Lsn(1000 + number), 0, FIRST + number)


def read_in(snapshot: tuple[int, frozenset[int]]) -> RangeSnapshot:
    ended, running = snapshot
    xids = frozenset(FIRST + number for number in running)
    xmax = FIRST + ended
    return RangeSnapshot(TransactionSnapshot(min([*xids, xmax]), xmax, xids), Lsn(1000 + ended))


@st.composite
def histories(draw: st.DrawFn) -> History:
    keys, texts = st.integers(1, 6), st.sampled_from([b"a", b"b", b"c"])
    now: Rows = draw(st.dictionaries(keys, st.tuples(texts, texts)))
    first, transactions = dict(now), list[Transaction]()
    for _ in range(draw(st.integers(0, 14))):
        key, other, note, big = draw(keys), draw(keys), draw(texts), draw(texts)
        before, touched = ({key: now[key]} if key in now else {}), {key}
        change: Change | None
        if draw(st.integers(0, 9)) == 0:
            change, before, after, touched = None, dict(now), {}, set(range(1, 7))
        elif key not in now:
            change, after = Insert(None, 1, row(b"ttt", text(key), note, big)), {key: (note, big)}
        elif draw(st.integers(0, 3)) == 0:
            change, after = Delete(None, 1, OldPart.KEY, row(b"tnn", text(key), None, None)), {}
        else:
            new_key = other if other not in now else key
            old = None if new_key == key else row(b"tnn", text(key), None, None)
            if unsent := draw(st.booleans()):
                big = now[key][1]
            new = row(b"ttu", text(new_key), note, None) if unsent else row(b"ttt", text(new_key), note, big)
            change, after = Update(None, 1, None if old is None else OldPart.KEY, old, new), {new_key: (note, big)}
        transaction = Transaction(change, frozenset({*touched, *after}), before, after)
        transaction.apply(now)
        transactions.append(transaction)
    limits = sorted(draw(st.sets(st.integers(2, 6), max_size=3)))
    return History(first, transactions, limits, [draw(snapshots(transactions)) for _ in range(len(limits) + 1)])


@st.composite
def snapshots(draw: st.DrawFn, transactions: Sequence[Transaction], least: int = 0) -> tuple[int, frozenset[int]]:
    """Draw what a snapshot sees: not all transactions whose commit record is written, as with a slow standby.

    A transaction that waits for the rows of another one has no commit record. So a snapshot that does not see a
    transaction sees no later change of its rows.
    """
    ended = draw(st.integers(least, len(transactions)))
    running, locked = set[int](), set[int]()
    for number, transaction in enumerate(transactions[:ended]):
        if number >= least and (draw(st.integers(0, 3)) == 0 or not locked.isdisjoint(transaction.keys)):
            running.add(number)
            locked |= transaction.keys
    return ended, frozenset(running)


def net_of(loaded: LoadedRows, transactions: Sequence[Transaction], cut: int) -> Net:
    """Return the net of the changes, in two pieces."""
    net = Net(("id", "note", "big"), (0,), overlaps=True)
    loaded.start(net)
    for first, last in pairwise([0, min(cut, len(transactions)), len(transactions)]):
        piece = Net(net.columns, net.key, overlaps=True)
        for number in range(first, last):
            change = transactions[number].change
            if change is None:
                loaded.truncate(piece, begin(number))
            else:
                loaded.add(piece, change, begin(number))
        net.then(piece)
    return net


def applied(rows: Rows, net: Net) -> Rows:
    """Apply a net to rows as the merge does: a deleted key may be missing, and a row with a new one replaces one."""
    remaining = {} if net.truncated else dict(rows)

    def number(key: Key) -> int:
        (cell,) = values(key, 1)
        assert isinstance(cell, bytes)
        return int(cell)

    origins = {key: net.origins.get(key, key) for key in net.rows}
    leaving = {origin: remaining.pop(number(origin), None) for origin in origins.values() if origin is not None}
    for key in net.gone:
        remaining.pop(number(key), None)
    for key, final in net.rows.items():
        origin = origins[key]
        old: Any = None if origin is None else leaving[origin]
        note, big = (old[i] if cell is UNCHANGED else cell for i, cell in enumerate(values(final, 3)[1:]))
        assert isinstance(note, bytes)
        assert isinstance(big, bytes)
        remaining[number(key)] = note, big
    return remaining


@given(histories(), st.integers(0, 14), st.data())
@settings(max_examples=500)
def test_the_rows_of_all_ranges_become_those_of_the_end(history: History, cut: int, data: st.DataObject) -> None:
    base = Rows()
    for (low, high), snapshot in zip(pairwise([None, *history.limits, None]), history.snapshots, strict=True):
        base.update(
            {
                key: stored_row
                for key, stored_row in history.seen(snapshot).items()
                if (low is None or key >= low) and (high is None or key < high)
            }
        )
    now = history.seen((len(history.transactions), frozenset()))
    again: dict[Key, ReadRow] = {}
    snapshot = data.draw(snapshots(history.transactions, max(ended for ended, _ in history.snapshots)))
    while True:
        net = net_of(LoadedRows(RELATION, again), history.transactions, cut)
        unknown = [key for key in net.lacking if net.origins.get(key, key) is None]
        if not unknown:
            break
        seen = history.seen(snapshot)
        for key in unknown:
            (cell,) = values(key, 1)
            assert isinstance(cell, bytes)
            read = seen.get(int(cell))
            again[key] = ReadRow(None if read is None else raw_row((cell, *read)), read_in(snapshot))
        snapshot = len(history.transactions), frozenset()
    assert all(net.origins.get(key, key) == key for key in net.lacking)
    assert applied(base, net) == now
