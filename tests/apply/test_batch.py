"""Changes applied in batches have the same result as changes applied one after another."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from subscriber.apply.batch.batch import Batch, CommitCallbacks, why_not_batched
from subscriber.apply.batch.table_batch import ChangeKind, TableBatch
from subscriber.apply.relation_map import BatchColumnInfo, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.protocol import encode
from subscriber.protocol.messages import Begin, Commit, Delete, Insert, OldPart, Update
from subscriber.protocol.row_encoding import cells_of
from subscriber.protocol.row_extraction import BODY, VALUES
from subscriber.settings import DEFAULTS
from subscriber.targets.postgres.target import batch_limits
from tests.apply import build

LIMITS = batch_limits(DEFAULTS)
ENVELOPE = b"w" + bytes(24)
RELID = 16384
SETS = BatchColumnInfo(23, -1, False, "pg_catalog.int4", 1007, True, True)


def mapping(
    search: tuple[int, ...] | None, *, other_unique: bool, unique_columns: tuple[str, ...] | None = None
) -> RelationMapping:
    columns = tuple(replace(build.column(name), batch_info=SETS) for name in ("a", "b", "c"))
    local = build.local(*columns, identity=("a",))
    local = replace(local, has_only_type_checks=True, other_unique=other_unique, unique_columns=unique_columns)
    return RelationMapping(build.remote("a*", "b*", "c"), local, columns, search, None, ())


def steps_of(table: TableBatch) -> Any:
    """Return the steps of the batch, for split and unsplit rows."""
    steps = []
    for step in table.steps:
        ncols = table.ncols * (1 + (step.kind is ChangeKind.KEY_UPDATE))
        rows = [(key, cells_of(row, table.form)[-ncols:]) for key, row in step.rows.items()]
        steps.append((step.kind, step.sent, rows))
    return steps


def gathered(waiting: list[bytes], table: TableBatch, run: int) -> Any:
    batch, left, transaction = Batch(replace(LIMITS, run=run)), deque(waiting), RemoteTransaction(1, Lsn(1), 0)
    batch.tables[RELID.to_bytes(4, "big")] = table
    while left and batch.append_raw(transaction, left, 7, lambda _: table)[0]:
        pass
    changes = [part.changes for part in batch.slices]
    return steps_of(table), changes, batch.rows, batch.bytes, list(left), table._touched


@st.composite
def runs(draw: st.DrawFn, binary: bool) -> list[bytes]:
    """Draw a few runs of changes of one kind, over few keys or many."""

    def value(number: int) -> str | bytes | object | None:
        special = draw(st.sampled_from([None, build.UNSENT, *[0] * 30]))
        return special if special != 0 else number.to_bytes(4, "big") if binary else str(number)

    payloads = []
    for _ in range(draw(st.integers(1, 4))):
        kind, first = draw(st.sampled_from("IIUUKMOD")), draw(st.integers(0, 40))
        for number in range(draw(st.integers(1, 12))):
            key = draw(st.integers(0, 3)) if draw(st.integers(0, 30)) == 0 else first + number
            row = build.row(value(key), value(key % 2), value(7))
            match kind:
                case "I":
                    message: Insert | Update | Delete = Insert(None, RELID, row)
                case "U":
                    message = Update(None, RELID, None, None, row)
                case "K":
                    message = Update(None, RELID, OldPart.KEY, build.row(value(key), value(1), None), row)
                case "M":
                    moved = build.row(value(key + draw(st.sampled_from([50] * 9 + [1]))), value(key % 2), value(7))
                    message = Update(None, RELID, OldPart.KEY, build.row(value(key), value(1), None), moved)
                case "O":
                    message = Update(None, RELID, OldPart.ROW, build.row(value(key), value(key % 2), value(1)), row)
                case _:
                    message = Delete(None, RELID, OldPart.KEY, build.row(value(key), value(key % 2), None))
            payloads.append(ENVELOPE + encode.encode(message))
    return payloads


@given(
    st.data(),
    st.booleans(),
    st.sampled_from([(0,), (0, 1), (2,), None]),
    st.booleans(),
    st.sampled_from([None, ("b",), ("b", "c")]),
)
def test_a_run_is_as_good_as_its_changes(
    data: st.DataObject,
    binary: bool,
    search: tuple[int, ...] | None,
    other_unique: bool,
    unique_columns: tuple[str, ...] | None,
) -> None:
    waiting = data.draw(runs(binary))
    table = mapping(search, other_unique=other_unique, unique_columns=unique_columns)
    together = gathered(waiting, TableBatch(table, binary=binary), 2)
    assert together == gathered(waiting, TableBatch(table, binary=binary), 10**6)


def taken(transactions: list[list[bytes]], table: TableBatch, *, whole: bool) -> Any:
    """Whole ones where they can be; not `whole`: one after another."""
    batch, done = Batch(LIMITS), list[int]()
    batch.tables[RELID.to_bytes(4, "big")] = table
    for index, changes in enumerate(transactions):
        begin, commit = Begin(Lsn(index + 1), 0, index), Commit(Lsn(index + 1), Lsn(index + 2), 0)
        waiting = deque([ENVELOPE + encode.encode(begin), *changes, ENVELOPE + encode.encode(commit)])
        ends = CommitCallbacks(lambda _: False, done.append, index)
        if not whole or batch.append_raw_transactions(waiting, 100, lambda _: table, ends) is None:
            waiting.popleft()
            transaction = RemoteTransaction(index, Lsn(index + 1), 0, is_open_on_target=True)
            while len(waiting) > 1 and batch.append_raw(transaction, waiting, 100, lambda _: table)[0]:
                pass
            if len(waiting) > 1:
                break  # the rest of the transaction cannot be batched
            batch.end(transaction, Lsn(index + 2), partial(done.append, index))
    ended = [transaction_part for part in batch.slices for transaction_part in part.transactions()]
    for part in ended:
        if part.on_committed is not None:
            part.on_committed()
    return (
        steps_of(table),
        [
            (transaction_part.transaction, transaction_part.changes, transaction_part.end_lsn)
            for transaction_part in ended
        ],
        batch.rows,
        batch.bytes,
        done,
    )


@given(st.lists(runs(binary=False), max_size=6), st.sampled_from([(0,), (0, 1), None]), st.booleans())
def test_whole_transactions_are_as_good_as_their_changes(
    transactions: list[list[bytes]], search: tuple[int, ...] | None, other_unique: bool
) -> None:
    table = mapping(search, other_unique=other_unique, unique_columns=("b",))
    together = taken(transactions, TableBatch(table, binary=False), whole=True)
    assert together == taken(transactions, TableBatch(table, binary=False), whole=False)


def test_several_transactions_are_taken_at_once_up_to_one_that_somebody_attends_to() -> None:
    table = TableBatch(mapping((0,), other_unique=False), binary=False)
    waiting: deque[bytes] = deque()
    for index in range(1, 6):
        insert = Insert(None, RELID, build.row(str(index), "1", None))
        for message in (Begin(Lsn(10 * index), 0, index), insert, Commit(Lsn(10 * index), Lsn(10 * index + 5), 0)):
            waiting.append(ENVELOPE + encode.encode(message))
    batch, done, size = Batch(LIMITS), list[int](), sum(map(len, waiting)) // 5
    taken = batch.append_raw_transactions(
        waiting, 100, lambda _: table, CommitCallbacks(lambda end: end >= 40, done.append, 8)
    )
    assert taken == (3, 3, 3 * size, Lsn(35))
    assert len(waiting) == 6
    (part,) = batch.slices
    assert (part.transaction.xid, part.end_lsn, len(part.changes)) == (3, 35, 3)
    assert part.on_committed is not None
    part.on_committed()
    assert done == [10]
    assert [
        (transaction.transaction.xid, transaction.transaction.finish_lsn, len(transaction.changes))
        for transaction in part.transactions()
    ] == [
        (1, 10, 1),
        (2, 20, 1),
        (3, 30, 1),
    ]
    assert (
        batch.append_raw_transactions(waiting, 100, lambda _: table, CommitCallbacks(lambda _: True, done.append, 11))
        is None
    )
    assert len(waiting) == 6
    assert batch.rows == 3


def test_an_update_of_a_row_that_was_deleted_is_a_step_of_its_own() -> None:
    """No publisher sends that; the server will say that the row is missing."""
    table = TableBatch(mapping((0,), other_unique=True, unique_columns=("b",)), binary=False)
    assert table.add(Delete(None, RELID, OldPart.KEY, build.row("1", None, None)))
    assert table.add(Update(None, RELID, None, None, build.row("1", "2", "3")))
    assert [step.kind for step in table.steps] == [ChangeKind.DELETE, ChangeKind.UPDATE]


def test_a_batch_goes_with_its_last_reference() -> None:
    """The last reference frees a batch. Garbage collection is rare, and ten thousands of rows would stay until then."""
    change = Insert(None, RELID, build.row("1", "1", None))
    batch = Batch(LIMITS)
    table = batch.table(mapping((0,), other_unique=False), change)
    waiting = deque([ENVELOPE + encode.encode(change)] * 3)
    assert batch.append_raw(RemoteTransaction(1, Lsn(1), 0), waiting, 7, batch.tables.get)[0] == 3
    seen = weakref.ref(table)
    gc.disable()
    try:
        del batch, table
        assert seen() is None
    finally:
        gc.enable()


def test_a_batch_takes_a_run_of_changes_without_repeated_rows_at_once() -> None:
    """And none that touches a row twice."""
    table = TableBatch(mapping((0,), other_unique=False), binary=False)
    rows = [Insert(None, RELID, build.row(str(number), "1", None)) for number in range(20)]
    waiting = [ENVELOPE + encode.encode(row) for row in rows]
    head = waiting[0][BODY:VALUES]
    changes, size = table.take_run(head, waiting, 100, 10**6, 10**6)
    assert changes == waiting
    assert size == sum(map(len, waiting))
    assert [list(step.rows.values()) for step in table.steps] == [waiting]
    assert table.take_run(head, waiting, 100, 10**6, 10**6) == ([], 0)


def test_columns_of_other_unique_indexes_stay_as_they_are_whatever_was_learnt_since() -> None:
    """A batch that is split is gathered again, though by then no more updates of the table would be taken."""
    table = mapping((0,), other_unique=True, unique_columns=("b",))
    update = Update(None, RELID, None, None, build.row("1", "2", "3"))
    batch, first, second = Batch(LIMITS), RemoteTransaction(1, Lsn(1), 0), RemoteTransaction(2, Lsn(2), 0)
    for transaction in (first, second):
        assert batch.add(transaction, batch.table(table, update), update)
    batch.slices[0].end_lsn = Lsn(1)
    table.unique_values_change = True
    for part in batch.split(with_open=False):
        (again,) = part.tables.values()
        assert again.fixed == (1,)
        assert [step.kind for step in again.steps] == [ChangeKind.UPDATE]
    assert why_not_batched(table, update) == "several unique indexes"
