"""The shuffle of the nets of pieces: each part of a table comes to one executor, in the order of the pieces.

NetRdd and NetDataFrame have the same methods. NetDataFrame is for sessions of Spark Connect, which have no RDDs: a net
is a row of a DataFrame, as pickled bytes. NetRdd needs no Arrow for it, and its workers start faster.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

from subscriber.changelog.pieces import Piece
from subscriber.errors import SubscriberError
from subscriber.spark.tasks import sparing

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

    from subscriber.spark.changes.net_job import NetTable

R = TypeVar("R")
Place: TypeAlias = tuple[str, int, int]  # relation, part, piece: also the order in which nets are folded
Special: TypeAlias = tuple[str, SubscriberError | None]  # a table, and its error
PlacedNet: TypeAlias = "tuple[Place, tuple[NetTable, bytes]]"
Fold: TypeAlias = Callable[[Iterable[PlacedNet]], Iterator[tuple[str, R | SubscriberError]]]
Work: TypeAlias = "Callable[[tuple[int, Piece]], Iterator[PieceNet]]"

_NETS = "relation string, part int, piece int, whole boolean, error binary, net binary"
_ROWS_OF_A_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"


class PieceNet(NamedTuple):
    """The net of a piece of the log for one part of a table, or the error of the table or of the whole piece."""

    relation: str  # schema.name; empty for an error of the piece
    part: int
    piece: int  # number
    whole: bool  # the table must not be divided
    net: tuple[NetTable, bytes] | SubscriberError


@dataclass(frozen=True, slots=True)
class NetPlacement:
    """Assigns each net a place, on an executor. `whole` are the tables that are not divided, `failed` are left out."""

    whole: frozenset[str]
    failed: frozenset[str]

    def __call__(self, nets: Iterable[PieceNet]) -> Iterator[PlacedNet]:
        for net in nets:
            if net.relation not in self.failed:
                assert not isinstance(net.net, SubscriberError)
                yield (net.relation, 0 if net.relation in self.whole else net.part, net.piece), net.net


class NetRdd:
    """The nets of pieces as an RDD."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._nets: RDD[PieceNet]

    @contextmanager
    def compute(self, work: Work, pieces: Sequence[Piece]) -> Iterator[None]:
        """Compute the nets, and keep them for the block."""
        from pyspark import StorageLevel

        numbered = self._context.parallelize(list(enumerate(pieces)), len(pieces))
        self._nets = numbered.mapPartitions(sparing(partial(_all, work))).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield
        finally:
            self._nets.unpersist()

    def special(self) -> list[Special]:
        """Return the tables that must not be divided, and those with errors."""
        return self._nets.mapPartitions(sparing(_special)).collect()

    def fold(self, placement: NetPlacement, fold: Fold[R], parts: int) -> list[tuple[str, R | SubscriberError]]:
        """Bring the nets of each part together, in the order of their pieces, and fold them."""
        placed = self._nets.mapPartitions(sparing(placement))
        return placed.repartitionAndSortWithinPartitions(parts, _partition).mapPartitions(sparing(fold)).collect()


def _all(work: Work, pieces: Iterable[tuple[int, Piece]]) -> Iterator[PieceNet]:
    return chain.from_iterable(map(work, pieces))


def _special(nets: Iterable[PieceNet]) -> Iterator[Special]:
    for net in nets:
        error = net.net if isinstance(net.net, SubscriberError) else None
        if net.whole or error is not None:
            yield net.relation, error


def _partition(place: Place) -> int:
    """Distribute the parts of one table over different executors, and small tables over all executors."""
    return place[1] + crc32(place[0].encode())


class NetDataFrame:
    """The nets of pieces as rows of a DataFrame."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._nets: DataFrame

    @contextmanager
    def compute(self, work: Work, pieces: Sequence[Piece]) -> Iterator[None]:
        """Compute the nets, and keep them for the block."""

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch["id"].to_pylist():
                    for net in work((number, pieces[number])):
                        yield _row(net)

        number = len(pieces)
        self._nets = self._spark.range(0, number, 1, number).mapInArrow(sparing(run), _NETS).persist()
        try:
            yield
        finally:
            self._nets.unpersist()

    def special(self) -> list[Special]:
        """Return the tables that must not be divided, and those with errors."""
        rows = self._nets.where("whole OR error IS NOT NULL").select("relation", "error").collect()
        return [(row.relation, None if row.error is None else pickle.loads(row.error)) for row in rows]

    def fold(self, placement: NetPlacement, fold: Fold[R], parts: int) -> list[tuple[str, R | SubscriberError]]:
        """Bring the nets of each part together, in the order of their pieces, and fold them."""
        import pyarrow as pa
        from pyspark.sql import functions as f

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for result in fold(_placed(batches)):
                yield pa.record_batch([pa.array([pickle.dumps(result)], pa.binary())], names=["result"])

        relation = f.col("relation")
        part = f.when(relation.isin(*placement.whole), 0).otherwise(f.col("part"))
        nets = self._nets.where(~relation.isin(*placement.failed)).withColumn("part", part)
        placed = nets.repartition(parts, "relation", "part").sortWithinPartitions("relation", "part", "piece")
        with _one_net_in_a_batch(self._spark):
            return [pickle.loads(row.result) for row in placed.mapInArrow(sparing(run), "result binary").collect()]


def _row(net: PieceNet) -> pa.RecordBatch:
    import pyarrow as pa

    pickled = pickle.dumps(net.net)
    error, data = (pickled, None) if isinstance(net.net, SubscriberError) else (None, pickled)
    columns = [
        pa.array([net.relation], pa.string()),
        pa.array([net.part], pa.int32()),
        pa.array([net.piece], pa.int32()),
        pa.array([net.whole], pa.bool_()),
        pa.array([error], pa.binary()),
        pa.array([data], pa.binary()),
    ]
    return pa.record_batch(columns, names=["relation", "part", "piece", "whole", "error", "net"])


def _placed(batches: Iterable[pa.RecordBatch]) -> Iterator[PlacedNet]:
    for batch in batches:
        for row in batch.to_pylist():
            yield (row["relation"], row["part"], row["piece"]), pickle.loads(row["net"])


@contextmanager
def _one_net_in_a_batch(spark: SparkSession) -> Iterator[None]:
    """Let a worker have one net in memory at a time, as batches are counted in rows by default."""
    before = spark.conf.get(_ROWS_OF_A_BATCH)
    assert before is not None
    spark.conf.set(_ROWS_OF_A_BATCH, "1")
    try:
        yield
    finally:
        spark.conf.set(_ROWS_OF_A_BATCH, before)
