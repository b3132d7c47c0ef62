"""Which changes of a table a range contains already: each rule of subscriber/ranges/__init__.py."""

from __future__ import annotations

from collections import Counter
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.catalog.store.copied_ranges import CopiedRange
from subscriber.lsn import Lsn
from subscriber.protocol.tuple_data import TupleData
from subscriber.ranges.keys import KeyColumn, RangeKey
from subscriber.ranges.snapshot import TransactionSnapshot
from subscriber.ranges.table_ranges import Decision, Effect, KeyRange, RangeSnapshot, RangeState, TableRanges, effect
from subscriber.worker.apply.range_changes import restore, stored_range

KEY = RangeKey((KeyColumn("id", 20),))
BEFORE, END = Lsn(900), Lsn(1000)


def seeing(*running: int, xmax: int = 100) -> RangeSnapshot:
    """A snapshot at position END in which all transactions before `xmax` have ended but `running`."""
    return RangeSnapshot(TransactionSnapshot(min((*running, xmax)), xmax, frozenset(running)), END)


def copy(ranges: TableRanges, until: int | None, snapshot: RangeSnapshot) -> KeyRange:
    """Copy the next range up to a key."""
    part = ranges.next_unread()
    assert part is not None
    if until is not None:
        ranges.split(part, (until,))
    assert part.begin(snapshot)
    assert part.accept()
    part.state = RangeState.COPIED
    return part


@pytest.mark.parametrize("text", ["", "1:2", "5:4:", "3:9:2", "3:9:9", "0:0:", "a:b:c"])
def test_a_damaged_snapshot_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid snapshot|unpack|literal"):
        TransactionSnapshot.parse(text)


def test_a_snapshot_sees_ended_transactions_of_its_epoch() -> None:
    snapshot = TransactionSnapshot.parse("10:20:10,14")
    assert [xid for xid in range(8, 22) if snapshot.sees(xid)] == [8, 9, 11, 12, 13, 15, 16, 17, 18, 19]
    assert TransactionSnapshot.parse(str(snapshot)) == snapshot
    # Transactions before and behind the end of an epoch.
    epoch = 1 << 32
    wrapped = TransactionSnapshot.parse(f"{3 * epoch - 5}:{3 * epoch + 5}:{3 * epoch - 5},{3 * epoch + 1}")
    seen = [xid for xid in (epoch - 6, epoch - 5, epoch - 4, 0, 1, 2, 4, 5) if wrapped.sees(xid)]
    assert seen == [epoch - 6, epoch - 4, 0, 2, 4]


@pytest.mark.parametrize(
    ("oid", "text", "binary"),
    [
        (21, "-3", b"\xff\xfd"),
        (23, "70000", b"\x00\x01\x11\x70"),
        (20, "-1", b"\xff" * 8),
        (2950, str(UUID(int=7)), b"\x00" * 15 + b"\x07"),
    ],
)
def test_a_key_is_the_same_in_text_and_in_binary(oid: int, text: str, binary: bytes) -> None:
    key = RangeKey((KeyColumn("id", oid),))
    rows = [TupleData.join(b"n" + status, [None, value]) for status, value in ((b"t", text.encode()), (b"b", binary))]
    assert key.of_row(["a", "id"], rows[0]) == key.of_row(["a", "id"], rows[1]) == key.from_texts([text])
    assert key.texts(key.of_row(["a", "id"], rows[1])) == [text]


def test_a_key_that_was_not_sent_is_taken_from_the_old_row() -> None:
    old, new = TupleData.join(b"t", [b"5"]), TupleData.join(b"u", [None])
    assert KEY.of_row(["id"], new, old) == (5,)
    with pytest.raises(ValueError, match="has no value"):
        KEY.of_row(["id"], new)


def test_several_columns_are_compared_as_a_row() -> None:
    key = RangeKey((KeyColumn("a", 23), KeyColumn('b"c', 2950)))
    one = str(UUID(int=1))
    assert key.condition((1, 1), None) == (
        f"""("a", "b""c") OPERATOR(pg_catalog.>=) ('1'::pg_catalog.int4, '{one}'::pg_catalog.uuid)"""
    )
    assert key.condition(None, None) == "true"


def test_a_range_is_decided_by_visibility_and_not_by_position() -> None:
    ranges = TableRanges(KEY)
    copy(ranges, 10, seeing(50))
    part = ranges.find((9,))
    assert part.decide(49, BEFORE) is Decision.SKIP
    # The commit of 50 precedes the position of the snapshot, but waited for a standby when the snapshot was taken.
    assert part.decide(50, BEFORE) is Decision.APPLY
    assert part.decide(100, BEFORE) is Decision.APPLY
    # The number 49 was used in an earlier epoch.
    assert part.decide(49, END) is Decision.APPLY


def test_a_snapshot_has_to_see_what_was_skipped() -> None:
    ranges = TableRanges(KEY)
    part = ranges.find((1,))
    assert part.decide(50, BEFORE) is Decision.SKIP
    assert not part.begin(seeing(50))
    assert part.state is RangeState.UNREAD
    rest = ranges.split(part, (10,))
    assert not rest.begin(seeing(50)), "both parts of a divided range remember it"
    assert part.begin(seeing(51))
    assert not rest.begin(seeing(50)), "the other part still remembers it"
    ranges.forget_seen(seeing(51).snapshot)
    assert not rest.skipped


def test_a_change_waits_for_the_range_that_is_being_read() -> None:
    part = TableRanges(KEY).find((1,))
    assert part.begin(seeing(50))
    assert part.decide(49, BEFORE) is Decision.SKIP
    assert part.decide(50, BEFORE) is Decision.WAIT
    assert part.accept()
    assert part.decide(50, BEFORE) is Decision.WAIT
    assert not part.spoil(), "its rows may be committed already"


def test_a_range_is_read_again_if_a_change_did_not_wait() -> None:
    part = TableRanges(KEY).find((1,))
    assert part.begin(seeing(50))
    assert part.spoil()
    assert part.decide(50, BEFORE) is Decision.SKIP
    assert not part.accept()
    part.reset()
    assert not part.begin(seeing(50))
    assert part.begin(seeing())


def test_a_moved_key_is_decided_by_both_ranges() -> None:
    apply, skip = Decision.APPLY, Decision.SKIP
    assert [effect(*both) for both in ((apply, apply), (apply, skip), (skip, apply), (skip, skip))] == [
        Effect.UPDATE,
        Effect.DELETE,
        Effect.INSERT,
        Effect.NOTHING,
    ]


def test_a_key_whose_large_value_is_unknown_is_a_range_of_its_own() -> None:
    ranges = TableRanges(KEY)
    copy(ranges, None, seeing(50))
    assert ranges.end == END
    ranges.add_single((7,), 50)
    assert ranges.unsettled
    assert not ranges.end
    assert ranges.find((7,)).decide(50, BEFORE) is Decision.SKIP
    assert ranges.find((8,)).decide(50, BEFORE) is Decision.APPLY
    assert ranges.next_unread() is ranges.find((7,))
    assert ranges.find((7,)).condition(KEY) == """("id") OPERATOR(pg_catalog.=) ('7'::pg_catalog.int8)"""


def test_a_truncate_covers_the_ranges_that_do_not_contain_it() -> None:
    ranges = TableRanges(KEY)
    copy(ranges, 10, seeing(50))
    copy(ranges, 20, seeing(xmax=60))
    # No range contains it: the table is truncated, and no range may be read until that has happened.
    seen_by_none = ranges.truncation(110, BEFORE)
    assert seen_by_none.whole
    assert ranges.unsettled
    # The second range contains it: its rows are newer.
    seen_by_one = ranges.truncation(50, BEFORE)
    assert not seen_by_one.whole
    assert seen_by_one.conditions == ("""("id") OPERATOR(pg_catalog.<) ('10'::pg_catalog.int8)""",)
    assert ranges.find((30,)).skipped == {50, 110}
    reading = ranges.next_unread()
    assert reading is not None
    assert reading.begin(seeing(80, xmax=200))
    assert ranges.waited_for(80, BEFORE) is reading


def test_truncate_leaves_a_key_that_was_read_later() -> None:
    ranges = TableRanges(KEY)
    copy(ranges, None, seeing(50))
    ranges.add_single((7,), 50)
    copy(ranges, None, seeing())
    assert ranges.truncation(50, BEFORE).conditions == ("true AND NOT (" + ranges.find((7,)).condition(KEY) + ")",)


def test_ranges_of_the_catalog() -> None:
    ranges = TableRanges(KEY)
    for low, high in ((None, (10,)), ((20,), (30,)), ((30,), None)):
        ranges.restore(KeyRange(low, high, state=RangeState.COPIED, read_in=seeing()))
    ranges.restore(KeyRange((5,), single=True))
    states = {number: ranges.find((number,)).state for number in (-1, 5, 9, 10, 19, 20, 30)}
    copied, unread = RangeState.COPIED, RangeState.UNREAD
    assert states == {-1: copied, 5: unread, 9: copied, 10: unread, 19: unread, 20: copied, 30: copied}
    missing = ranges.find((10,))
    assert (missing.low, missing.high) == ((10,), (20,))
    assert ranges.next_unread() is missing


def test_ranges_of_the_catalog_in_the_order_in_which_several_sessions_committed_them() -> None:
    ranges = TableRanges(KEY)
    for low, high in ((20,), (30,)), ((15,), (20,)), ((40,), None), ((30,), (40,)):
        ranges.restore(KeyRange(low, high, state=RangeState.COPIED, read_in=seeing()))
    assert [
        (table_range.low, table_range.high) for table_range in ranges if table_range.state is RangeState.UNREAD
    ] == [(None, (15,))]


@given(st.randoms(use_true_random=False))
def test_no_key_is_copied_twice_however_sessions_and_restarts_follow_each_other(chance: Random) -> None:
    ranges, rows, copied = TableRanges(KEY), list[CopiedRange](), Counter[int]()
    while (part := ranges.next_unread()) is not None or ranges.is_taken:
        if part is not None and chance.random() < 0.6:  # a session takes a range, or the first part of it
            low, high = part.low[0] if part.low else 0, part.high[0] if part.high else 60
            assert isinstance(low, int)
            assert isinstance(high, int)
            if high - low > 1 and chance.random() < 0.9:
                ranges.split(part, (chance.randrange(low + 1, high),))
            part.taken = True
            continue
        taken = [table_range for table_range in ranges if table_range.taken]
        if taken and chance.random() < 0.75:  # a session commits
            one = chance.choice(taken)
            assert one.begin(seeing())
            assert one.accept()
            one.state, one.taken = RangeState.COPIED, False
            rows.append(stored_range(len(rows) + 1, 7, ranges, one))
            copied.update(range(one.low[0] if one.low else 0, one.high[0] if one.high else 60))
            assert set(copied.values()) <= {1}
        else:  # the process is killed
            ranges = restore(rows, 1) or TableRanges(KEY)
    assert copied == Counter(range(60))


def test_a_snapshot_has_to_see_what_was_skipped_after_an_older_one_was_taken() -> None:
    """A session receives an older snapshot after another session has received a newer one."""
    ranges = TableRanges(KEY)
    first = ranges.next_unread()
    assert first is not None
    second = ranges.split(first, (10,))
    first.taken = second.taken = True
    assert first.decide(50, BEFORE) is Decision.SKIP
    assert second.begin(seeing())
    ranges.forget_seen(seeing().snapshot)
    assert not first.begin(seeing(50))
    assert first.begin(seeing())


ASKED = RangeKey((KeyColumn("k", 25, '"pg_catalog"."text" COLLATE "pg_catalog"."default"'),))


def test_the_publisher_is_asked_for_the_range_of_a_key_that_it_compares() -> None:
    ranges = TableRanges(ASKED)
    assert not ranges.lows_to_compare(("x",), BEFORE), "there is one range"
    copied = ranges.find(("x",))
    ranges.split(copied, ("b",))
    lows = ranges.lows_to_compare(("x",), BEFORE)
    assert lows == (("b",),)
    ranges.found(("x",), lows, 0)
    assert ranges.find(("x",)) is copied
    assert not ranges.lows_to_compare(("x",), BEFORE)
    # The answer does not hold for a range that was divided later.
    ranges.split(copied, ("a",))
    assert ranges.lows_to_compare(("x",), BEFORE) == (("a",), ("b",))
    ranges.found(("y",), lows, 0)
    assert ranges.lows_to_compare(("y",), BEFORE)
    query = ASKED.place_query(("x",), lows)
    constant = """'{}'::"pg_catalog"."text" COLLATE "pg_catalog"."default\""""
    assert query == (
        f"SELECT pg_catalog.count(*) FROM (VALUES ({constant.format('b')})) AS low (c0)"
        f" WHERE (c0) OPERATOR(pg_catalog.<=) ({constant.format('x')})"
    )


def test_ranges_that_contain_no_later_transaction_are_merged() -> None:
    ranges = TableRanges(ASKED)
    for low in ("b", "c", "d"):
        part = ranges.next_unread()
        assert part is not None
        ranges.split(part, (low,))
        assert part.begin(seeing())
        part.state = RangeState.COPIED
    assert len(ranges.lows_to_compare(("x",), BEFORE)) == 3, "a transaction before END may be in some of them only"
    assert ranges.lows_to_compare(("x",), END) == (("d",),)
    assert [(table_range.low, table_range.high) for table_range in ranges] == [(None, ("d",)), (("d",), None)]


def test_ranges_of_the_catalog_that_the_publisher_compares() -> None:
    ranges = TableRanges(ASKED)
    for low, high in ((None, ("z",)), (("z",), ("a",))):
        ranges.restore(KeyRange(low, high, state=RangeState.COPIED, read_in=seeing()))
    with pytest.raises(ValueError, match="the range before it is missing"):
        ranges.restore(KeyRange(("q",), ("r",), state=RangeState.COPIED, read_in=seeing()))
    part = ranges.next_unread()
    assert part is not None
    assert part.low == ("a",)
    # A TRUNCATE that some ranges contain.
    assert ranges.truncation(150, BEFORE).whole
    assert part.begin(seeing(xmax=200))
    part.state = RangeState.COPIED
    with pytest.raises(ValueError, match="the target cannot compare"):
        ranges.truncation(150, BEFORE)


def test_a_range_that_a_session_has_taken_is_no_other_sessions_next() -> None:
    ranges = TableRanges(KEY)
    first = ranges.next_unread()
    assert first is not None
    first.taken = True
    assert ranges.next_unread() is None
    assert ranges.is_taken
    second = ranges.split(first, (10,))
    assert ranges.next_unread() is second
    # The second range is committed first, and the first one is lost.
    assert second.begin(seeing())
    assert second.accept()
    second.state = RangeState.COPIED
    restored = TableRanges(KEY)
    restored.restore(KeyRange(second.low, second.high, state=RangeState.COPIED, read_in=second.read_in))
    gap = restored.next_unread()
    assert gap is not None
    assert (gap.low, gap.high) == (None, (10,))
    assert restored.find((9,)) is gap
    assert restored.find((10,)).state is RangeState.COPIED
