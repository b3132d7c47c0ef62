"""Nets compared with a dictionary of rows: the same rows at the end, for any division into pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import Identity
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.writer import log_writer
from subscriber.errors import ApplyError, ProtocolError
from subscriber.protocol.messages import Delete, Insert, OldPart, Update
from subscriber.protocol.tuple_data import TupleData
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.net_job import NetPieces, NetTables, RowKeys
from subscriber.spark.changes.raw_rows import UNCHANGED, Value, cells, lacks, raw_row, values
from tests.changelog.stream import START, Writer, relation

COLUMNS = ("id", "note", "big")
Change = Insert | Update | Delete | None  # None: truncate
Rows = dict[bytes, tuple[bytes, bytes]]

keys = st.sampled_from([b"1", b"2", b"3", b"4", b"5"])
texts = st.sampled_from([b"a", b"b", b"c"])


def row(status: bytes, *values: bytes | None) -> TupleData:
    return TupleData.join(status, values)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rows, list[Change], Rows]:
    """Draw earlier rows, a publisher's changes, and the resulting rows."""
    before: Rows = draw(st.dictionaries(keys, st.tuples(texts, texts)))
    now, changes = dict(before), list[Change]()
    for _ in range(draw(st.integers(0, 12))):
        key, new_key, note, big = draw(keys), draw(keys), draw(texts), draw(texts)
        kind = draw(st.sampled_from(["change", "change", "change", "move", "delete", "truncate"]))
        if kind == "truncate":
            if not draw(st.integers(0, 3)):
                changes.append(None)
                now.clear()
        elif key not in now:
            changes.append(Insert(None, 1, row(b"ttt", key, note, big)))
            now[key] = (note, big)
        elif kind == "delete":
            changes.append(Delete(None, 1, OldPart.KEY, row(b"tnn", key, None, None)))
            del now[key]
        else:
            new_key = new_key if kind == "move" and new_key not in now else key
            old = None if new_key == key else row(b"tnn", key, None, None)
            if toasted := draw(st.booleans()):
                big = now[key][1]
            new = row(b"ttu", new_key, note, None) if toasted else row(b"ttt", new_key, note, big)
            changes.append(Update(None, 1, None if old is None else OldPart.KEY, old, new))
            del now[key]
            now[new_key] = (note, big)
    return before, changes, now


def net_of(changes: Sequence[Change]) -> Net:
    net = Net(COLUMNS, (0,))
    for change in changes:
        if change is None:
            net.truncate()
        else:
            net.add(change)
    return net


def name(key: bytes) -> bytes:
    (text,) = values(key, 1)
    assert isinstance(text, bytes)
    return text


def applied(before: Rows, net: Net) -> Rows:
    """Apply a net to rows as a target does."""
    remaining = {} if net.truncated else dict(before)
    origins = {key: net.origins.get(key, key) for key in net.rows}
    leaving = {origin: remaining.pop(name(origin)) for origin in origins.values() if origin is not None}
    for gone in net.gone:
        del remaining[name(gone)]
    assert net.lacking == {key for key, row in net.rows.items() if UNCHANGED in values(row, 3)}
    for key, final in net.rows.items():
        origin = origins[key]
        old: tuple[bytes, bytes] = (b"?", b"?") if origin is None else leaving[origin]
        sent = values(final, 3)[1:]
        note, big = (then if value is UNCHANGED else value for then, value in zip(old, sent, strict=True))
        assert isinstance(note, bytes)
        assert isinstance(big, bytes)
        assert name(key) not in remaining
        remaining[name(key)] = (note, big)
    return remaining


@given(histories(), st.lists(st.integers(0, 12), max_size=3))
@settings(max_examples=400)
def test_the_nets_of_pieces_make_the_net_of_all(history: tuple[Rows, list[Change], Rows], cuts: list[int]) -> None:
    before, changes, after = history
    whole = net_of(changes)
    assert applied(before, whole) == after
    bounds = [0, *sorted(min(cut, len(changes)) for cut in cuts), len(changes)]
    folded = Net(COLUMNS, (0,))
    for first, last in pairwise(bounds):
        folded.then(net_of(changes[first:last]))
    assert folded == whole
    assert applied(before, folded) == after


@given(histories(), st.integers(1, 5))
@settings(max_examples=100)
def test_parts_have_everything_once(history: tuple[Rows, list[Change], Rows], number: int) -> None:
    net = net_of([change for change in history[1] if change is not None and not isinstance(change, Update)][:1])
    parts = dict(net.parts(number))
    assert sum(len(part) for part in parts.values()) == len(net)
    assert len(parts) <= number


def test_a_bag_has_as_many_of_a_row_as_there_are() -> None:
    net = Net(("a", "b"), None)
    for change in (
        Insert(None, 1, row(b"tt", b"1", b"x")),
        Insert(None, 1, row(b"tt", b"1", b"x")),
        Delete(None, 1, OldPart.ROW, row(b"tt", b"1", b"x")),
        Delete(None, 1, OldPart.ROW, row(b"tt", b"2", b"x")),
        Update(None, 1, OldPart.ROW, row(b"tt", b"3", b"big"), row(b"tu", b"4", None)),
    ):
        net.add(change)
    assert net.more == Counter({raw_row((b"1", b"x")): 1, raw_row((b"4", b"big")): 1})
    assert net.fewer == Counter({raw_row((b"2", b"x")): 1, raw_row((b"3", b"big")): 1})


def test_bags_of_pieces_cancel_out() -> None:
    first, second = Net(("a",), None), Net(("a",), None)
    first.add(Insert(None, 1, row(b"t", b"1")))
    first.add(Delete(None, 1, OldPart.ROW, row(b"t", b"2")))
    second.add(Delete(None, 1, OldPart.ROW, row(b"t", b"1")))
    second.add(Insert(None, 1, row(b"t", b"2")))
    first.then(second)
    assert len(first) == 0


def test_a_column_that_comes_later_is_unchanged_in_what_came_before() -> None:
    net = Net(("id", "note"), (0,))
    net.add(Insert(None, 1, row(b"tt", b"1", b"a")))
    net.reshape(("id", "more", "note"), (0,))
    key = raw_row((b"1",))
    assert net.rows == {key: raw_row((b"1", UNCHANGED, b"a"))}
    net.add(Update(None, 1, None, None, row(b"ttu", b"1", b"m", None)))
    assert net.rows == {key: raw_row((b"1", b"m", b"a"))}
    assert net.origins == {key: None}


INSERT = Insert(None, 1, row(b"ttt", b"1", b"a", b"b"))
DELETE = Delete(None, 1, OldPart.KEY, row(b"tnn", b"1", None, None))


@pytest.mark.parametrize("changes", [[INSERT, INSERT], [DELETE, DELETE], [None, DELETE]])
def test_changes_that_contradict_each_other_are_refused(changes: list[Change]) -> None:
    with pytest.raises(ApplyError):
        net_of(changes)
    folded = Net(COLUMNS, (0,))
    with pytest.raises(ApplyError):  # noqa: PT012 - which of them is refused is not the point
        for change in changes:
            folded.then(net_of([change]))


def test_a_row_that_moves_through_another_ones_place_keeps_its_own_values() -> None:
    net = net_of(
        [
            Update(None, 1, OldPart.KEY, row(b"tnn", b"1", None, None), row(b"tuu", b"9", None, None)),
            Update(None, 1, OldPart.KEY, row(b"tnn", b"2", None, None), row(b"tuu", b"1", None, None)),
            Update(None, 1, OldPart.KEY, row(b"tnn", b"9", None, None), row(b"tuu", b"2", None, None)),
        ]
    )
    one, two = raw_row((b"1",)), raw_row((b"2",))
    assert net.rows == {one: raw_row((b"1", UNCHANGED, UNCHANGED)), two: raw_row((b"2", UNCHANGED, UNCHANGED))}
    assert net.origins == {one: two, two: one}
    assert net.moved


def test_a_piece_has_a_net_for_each_table_however_often_that_is_described(tmp_path: Path) -> None:
    """Also if a new description has the memory address of a freed one."""
    source, builder = Writer(), BlockBuilder(START)
    writer = log_writer(tmp_path)
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    for number in range(300):
        for message in source.transaction([(number % 7, 9000), (number % 5, 3)]):
            builder.add(message)
        writer.append(builder.take())
    writer.sync()
    writer.close()
    log = ChangeLog(tmp_path)
    pieces = log.pieces(START, log.end(), size=1 << 40)
    nets = NetPieces(tmp_path, RowKeys({f"public.t{n}": () for n in range(7)}), NetTables(), 1).nets(pieces[0])
    assert {part.table.label: part.net.more.total() for part in nets} == {
        f"public.t{n}": len(range(n, 300, 7)) + (len(range(n, 300, 5)) if n < 5 else 0) for n in range(7)
    }


def test_a_table_that_is_described_in_another_way_has_an_error_and_the_others_have_nets(tmp_path: Path) -> None:
    source, builder = Writer(), BlockBuilder(START)
    writer = log_writer(tmp_path)
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    for message in source.transaction([(number, 3) for number in range(5)]):
        builder.add(message)
    writer.append(builder.take())
    writer.sync()
    writer.close()
    log = ChangeLog(tmp_path)
    (piece,) = log.pieces(START, log.end())
    whole, other, again = relation(0), relation(1), relation(2)
    described = {
        "public.t0": whole,
        "public.t1": replace(other, columns=other.columns[:1]),
        "public.t2": replace(again, relid=again.relid + 100),
        "public.t3": None,
    }
    tables = NetTables(described=described)
    nets = NetPieces(tmp_path, RowKeys({f"public.t{number}": () for number in range(5)}), tables, 1).nets(piece)
    assert {part.table.label: part.error and part.error.message for part in nets} == {
        "public.t0": None,
        "public.t1": 'table "public"."t1" has other columns than the schema history of the change log says',
        "public.t2": 'table "public"."t2" was dropped and created again',
        "public.t3": 'the change log has no schema history of table "public"."t3"',
        "public.t4": 'table "public"."t4" was published later than the tables that were loaded',
    }
    ignored = NetTables(ignored=frozenset({"public.t1"}), wanted=frozenset({"public.t0", "public.t1"}))
    (part,) = NetPieces(tmp_path, RowKeys({"public.t0": ()}), ignored, 1).nets(piece)
    assert part.table.label == "public.t0"


any_value: st.SearchStrategy[Value] = st.one_of(
    st.binary(max_size=5), st.sampled_from([b"u", b"ut", b"ut\0\0\0\0", b"nu"]), st.none(), st.just(UNCHANGED)
)


@given(st.lists(any_value, max_size=5), st.binary(max_size=12))
def test_a_raw_row_has_its_values_and_damaged_bytes_are_refused(row: list[Value], noise: bytes) -> None:
    raw = raw_row(tuple(row))
    assert values(raw, len(row)) == tuple(row)
    assert lacks(raw, len(row)) == (UNCHANGED in row)
    for other in (raw + b"n", raw[:-1], noise):
        with suppress(ProtocolError):
            assert b"".join(cells(other, len(row))) == other
            assert other != raw + b"n"
