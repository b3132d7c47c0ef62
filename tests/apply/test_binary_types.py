"""Which tables are copied in binary though nobody said so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from subscriber.apply.binary_types import SAME_IN_BINARY, same_in_binary
from subscriber.apply.relation_map import ColumnSets, LocalColumn, RelationMapping, map_relation
from subscriber.protocol.messages import Relation, RelationColumn, ReplicaIdentity
from tests.apply.build import column, local

INT, BIGINT, TEXT, MONEY, INTERVAL, REGCLASS, MOOD = 23, 20, 25, 790, 1186, 2205, 16385


def of_type(name: str, oid: int) -> LocalColumn:
    return replace(column(name), sets=ColumnSets(oid, -1, False, "", oid, True, True))


def mapping(theirs: list[int], ours: list[int | None]) -> RelationMapping:
    """A table whose columns have these types on the publisher and here; None: the type is not known."""
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


def test_every_type_is_built_in() -> None:
    assert all(oid < 10000 for oid in SAME_IN_BINARY)
