"""Tables that are copied and followed in binary although the subscription does not set `binary`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from subscriber.apply.batch.binary_types import SAME_IN_BINARY, same_in_binary, text_format_reason
from subscriber.apply.relation_map import BatchColumnInfo, LocalColumn, RelationMapping, map_relation
from subscriber.protocol.messages import Relation, RelationColumn, ReplicaIdentity
from tests.apply.build import column, local

INT, INTS, BIGINT, TEXT, MONEY, INTERVAL, REGCLASS, MOOD = 23, 1007, 20, 25, 790, 1186, 2205, 16385


def of_type(name: str, oid: int) -> LocalColumn:
    return replace(column(name), batch_info=BatchColumnInfo(oid, -1, False, "", oid, True, True))


def mapping(theirs: list[int], ours: list[int | None]) -> RelationMapping:
    """Return a table whose columns have these types on the publisher and here; None: the type is not known."""
    names = [f"c{number}" for number in range(len(theirs))]
    remote = tuple(RelationColumn(False, name, oid, -1) for name, oid in zip(names, theirs, strict=True))
    columns = [column(n) if oid is None else of_type(n, oid) for n, oid in zip(names, ours, strict=True)]
    return map_relation(Relation(None, 16384, "s", "t", ReplicaIdentity.DEFAULT, remote), local(*columns))


def test_the_same_built_in_types() -> None:
    assert same_in_binary(mapping([INT, TEXT], [INT, TEXT]))
    assert same_in_binary(mapping([], []))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(INT, BIGINT), (INT, None), (MOOD, MOOD), (MONEY, MONEY), (INTERVAL, INTERVAL), (REGCLASS, REGCLASS)],
)
def test_any_other_column_makes_it_text(theirs: int, ours: int | None) -> None:
    assert not same_in_binary(mapping([TEXT, theirs], [TEXT, ours]))


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (INT, BIGINT, "is of type t20, and of type int4 on the publisher"),
        (MOOD, BIGINT, "is of type t20, and of another on the publisher"),
        (MOOD, MOOD + 1, "is of type t16386"),  # other servers have other numbers for it
        (MONEY, MONEY, "is of type t790"),
    ],
)
def test_why_text_is_told_by_the_first_column(theirs: int, ours: int, words: str) -> None:
    table = mapping([TEXT, theirs, MOOD], [TEXT, ours, MOOD])
    named = tuple(
        replace(c, type_name=f"t{c.batch_info.type_oid}") for c in table.attributes if c.batch_info is not None
    )
    table.attributes = named
    assert text_format_reason(table) == f'column "c1" of table "s.t" {words}'


def test_arrays_are_quicker_as_text_where_they_can_be_part_of_a_batch() -> None:
    table = mapping([INT, INTS], [INT, INTS])
    assert text_format_reason(table) is None  # no key: row by row in either format
    array = replace(of_type("c1", INTS), batch_info=BatchColumnInfo(INTS, -1, False, "", INTS, True, False))
    key = of_type("c0", INT)
    remote = (RelationColumn(True, "c0", INT, -1), RelationColumn(False, "c1", INTS, -1))
    relation = Relation(None, 16384, "s", "t", ReplicaIdentity.DEFAULT, remote)
    table = map_relation(relation, local(key, array, identity=("c0",)))
    assert same_in_binary(table)
    assert text_format_reason(table) == 'updates of table "s.t", which has a column of arrays, are quicker from text'


def test_every_type_is_built_in() -> None:
    assert all(oid < 10000 for oid in SAME_IN_BINARY)
