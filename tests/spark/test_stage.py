"""Nets as lines of COPY, and back; without a server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from subscriber.apply.relation_map import LocalColumn, LocalRelation
from subscriber.protocol.copy_text import split_values
from subscriber.spark.catchup.staging import Stage, StagingLines
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.raw_rows import UNCHANGED, Value, raw_row, values


def stage(*names: str) -> Stage:
    columns = tuple(LocalColumn(name, "text", None, None, False, False) for name in names)
    return Stage("catchup_1_1", LocalRelation(1, "public", "t", False, "o", columns, ("id",), ""))


texts = st.binary(max_size=6) | st.sampled_from([b"\\N", b"\\", b"\t", b"\n", b"\r\n", b"", b"\\t", b"a\\Nb"])
cells: st.SearchStrategy[Value] = st.one_of(texts, st.none(), st.just(UNCHANGED))


@given(st.lists(st.tuples(cells, cells), max_size=5))
def test_every_value_comes_back_as_it_was(rows: list[tuple[Value, Value]]) -> None:
    net = Net(("id", "a", "b"), (0,))
    for number, (a, b) in enumerate(rows):
        key, whole = raw_row((b"%d" % number,)), raw_row((b"%d" % number, a, b))
        net.rows[key] = whole
        if UNCHANGED in (a, b):
            net.lacking.add(key)
    assert Net.load(net.dump()) == net
    lines = StagingLines(stage("id", "local", "a", "b"), net)
    found = [split_values(line) for line in lines.lines()]
    assert lines.columns == ["part", "kind", "mask", "o1", "c1", "c3", "c4"]
    for (key, raw), (_, *front, origin, identity, a, b) in zip(net.rows.items(), found, strict=True):
        sent, row = [identity, a, b], values(raw, 3)
        first, *rest = [b"1" if value is UNCHANGED else b"0" for value in row]
        assert front == [b"u", first + b"1" + b"".join(rest)]
        assert (origin,) == values(key, 1)
        assert sent == [None if value is UNCHANGED else value for value in row]
    copied = lines.copied(net)
    assert (copied.changed, copied.new, copied.gone) == (len(rows), 0, 0)
    assert 2 in copied.masked
