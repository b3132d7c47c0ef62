"""The shuffle of nets as an RDD and as rows of a DataFrame: the same parts, in the order of the pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from subscriber.changelog.pieces import Piece
from subscriber.errors import ApplyError, SubscriberError
from subscriber.spark.changes.net_shuffle import NetDataFrame, NetPlacement, NetRdd, PieceNet, PlacedNet

PIECES = 7
Folded = tuple[str, int, list[int]]


def work(numbered: tuple[int, Piece]) -> Iterator[PieceNet]:
    """Table a in three parts, table b that is not divided in one piece, and table c with an error in another one."""
    number, _ = numbered
    net = cast(Any, (f"described in {number}", b"%d" % number))
    for part in range(3):
        yield PieceNet("a", part, number, False, net)
        yield PieceNet('b" x', part, number, number == 4, net)
    yield PieceNet("c", 0, number, False, ApplyError("it is wrong") if number == 2 else net)


def fold(nets: Iterable[PlacedNet]) -> Iterator[tuple[str, Folded | SubscriberError]]:
    for (relation, part), payloads in groupby(nets, key=lambda net: net[0][:2]):
        yield relation, (relation, part, [int(net[1][1]) for net in payloads])


@pytest.mark.parametrize("shuffle", [NetRdd, NetDataFrame])
def test_the_parts_of_tables_come_together(spark: SparkSession, shuffle: type[NetRdd | NetDataFrame]) -> None:
    nets = shuffle(spark)
    with nets.compute(work, [cast(Piece, None)] * PIECES):
        special = nets.special()
        assert {relation for relation, error in special if error is None} == {'b" x'}
        assert [(relation, str(error)) for relation, error in special if error is not None] == [("c", "it is wrong")]
        folded = nets.fold(NetPlacement(frozenset({'b" x', "c"}), frozenset({"c"})), fold, 2)
    every = list(range(PIECES))
    assert sorted(result for _, result in folded if not isinstance(result, SubscriberError)) == [
        *(("a", part, every) for part in range(3)),
        ('b" x', 0, [number for number in every for _ in range(3)]),
    ]
