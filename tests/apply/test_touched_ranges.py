"""Recorded ranges contain every key that was touched, also after they have become wider, and after a reload."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.touched_ranges import (
    SINGLE_KEYS,
    WHOLE_TABLE,
    RangesToRecord,
    TouchedRanges,
    TouchedTable,
    as_parameter,
)
from subscriber.protocol.tuple_data import BINARY, TEXT

LIMIT = 8
INT8, TEXT_OID, DATE, UUID_OID = 20, 25, 1082, 2950


def mapping(*types: int, oid: int = 1) -> RelationMapping:
    columns = [SimpleNamespace(type_oid=type_oid) for type_oid in types]
    attributes = [SimpleNamespace(name=f"c{n}") for n in range(len(types))]
    local, search = SimpleNamespace(oid=oid), tuple(range(len(types))) or None
    return cast(
        "RelationMapping",
        SimpleNamespace(search=search, attributes=attributes, remote=SimpleNamespace(columns=columns), local=local),
    )


def contains(stored: list[TouchedTable], key: int) -> bool:
    return any(
        table.width == WHOLE_TABLE or (table.width >= 0 and key >> table.width in table.ranges) for table in stored
    )


KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(-50, 50)


@given(
    st.lists(st.tuples(st.sets(KEYS, min_size=1, max_size=20), st.sampled_from(["text", "binary", "reload", "undo"])))
)
def test_every_key_is_recorded(batches: list[tuple[set[int], str]]) -> None:
    table, known, stored, touched = mapping(INT8), TouchedRanges(LIMIT), list[TouchedTable](), set[int]()
    for keys, kind in batches:
        if kind == "reload":
            known.load([TouchedTable.from_json(value) for value in json.loads(as_parameter(stored))])
        form = BINARY if kind == "binary" else TEXT
        cells = [b"%d" % key if form == TEXT else b"\0\0\0\x08" + key.to_bytes(8, "big", signed=True) for key in keys]
        more = known.touch(table, cells, form)
        if kind == "undo":
            known.forget()
            continue
        touched |= keys
        if more is not None:
            assert len(more.ranges) <= LIMIT
            stored.append(more)
    assert all(contains(stored, key) for key in touched)


def test_a_transaction_records_wide_ranges_once() -> None:
    table, known, pending = mapping(INT8), TouchedRanges(LIMIT), RangesToRecord()
    for number in range(0, 1000, 10):
        if (touched := known.touch(table, [b"%d" % number], TEXT)) is not None:
            pending.add(touched)
    (recorded,) = pending.take()
    assert len(recorded.ranges) <= LIMIT
    assert all(contains([recorded], number) for number in range(0, 1000, 10))
    assert not pending.take()
    # After a rollback to a savepoint the earlier ranges are recorded too.
    known = TouchedRanges(LIMIT)
    for number in (1, 2):
        touched = known.touch(table, [b"%d" % number], TEXT)
        assert touched is not None
        pending.add(touched)
        pending.keep()
        known.forget()
    assert [*map(sorted, (table.ranges for table in pending.take()))] == [[1], [2]]


def test_keys_without_an_order_are_recorded_one_by_one() -> None:
    known, two = TouchedRanges(LIMIT), mapping(INT8, TEXT_OID)
    touched = known.touch(two, [(b"1", b"a"), (b"2", b"b")], TEXT)
    assert touched == TouchedTable(1, ("c0", "c1"), SINGLE_KEYS, {("31", "61"), ("32", "62")})
    assert known.touch(two, [(b"\0\0\0\x01\x01", b"\0\0\0\x01a")], BINARY) is None
    # Too many keys stand for the whole table, which is recorded once.
    assert known.touch(two, [(b"%d" % n, b"") for n in range(LIMIT)], TEXT) == TouchedTable(
        1, ("c0", "c1"), WHOLE_TABLE
    )
    assert known.touch(two, [(b"5", b"")], TEXT) is None
    assert known.touch_all(two) is None
    no_key, date = mapping(oid=2), mapping(DATE, oid=3)
    assert known.touch(no_key, [1, 2], TEXT) == TouchedTable(2, (), WHOLE_TABLE)
    assert known.touch(date, [b"2024-01-01"], TEXT) is not None
    assert known.touch(date, [b"\0\0\0\x04\0\0\0\0"], BINARY) == TouchedTable(3, ("c0",), WHOLE_TABLE)
    assert known.touch(mapping(UUID_OID, oid=4), [b"\0\0\0\x10" + bytes(16)], BINARY) is not None
