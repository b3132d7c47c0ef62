"""The net effect of a range of the change log, computed by Spark and handed to a sink on the executors.

    pieces of the log ─▶ a net for each piece and table ─▶ shuffled by table and key, in the pieces' order
                      ─▶ folded into one net for each part of a table ─▶ sink(table, net, part) ─▶ results

A table of which rows have changed their keys, or that was truncated, stays in one part: what belongs together
cannot be told by the key. All others are divided among the executors.

A task may be tried again, or run twice: what a sink does must be harmless then. Only what it returns counts.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from subscriber.errors import ApplyError, ConnectionLost, ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.pipeline.net import Net
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Delete, Insert, Relation, ReplicaIdentity, Update
from subscriber.spool.changelog import PIECE, ChangeLog, Piece, scan

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
Described: TypeAlias = tuple[Relation, ...]

# For a session of our own: the JVM only passes bytes on, and compiling that thoroughly takes longer than it saves.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
LARGEST = 64 * 1024 * 1024  # bytes of the log that one task nets in memory
PARTS = 8  # that a table is divided into at most, if there are as many executors

_INSERT, _UPDATE, _TRUNCATE, _NEW = b"IUTN"
_NETS = "relation string, part int, piece long, whole boolean, net binary"
_RESULTS = "relation string, part int, result binary"


class Sink(Protocol[R_co]):
    """What is done with a part of a table's net, on an executor; picklable, and so is its result."""

    def __call__(self, table: Table, net: Net, part: int) -> R_co: ...


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the publisher describes it. A net's columns may be fewer or more: those of its last change."""

    schema: str
    name: str
    relation: Relation  # the newest in the range

    @property
    def label(self) -> str:
        """schema.name"""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class Keys:
    """Which columns are a table's key. `named` are those that are not the publisher's replica identity, by table."""

    named: Mapping[str, tuple[str, ...]]

    def of(self, relation: Relation) -> tuple[int, ...] | None:
        """Indexes of the key columns; None for a table whose rows are known by all their values, or only added."""
        columns = self.named.get(f"{relation.schema}.{relation.name}")
        if columns is not None:
            names = [column.name for column in relation.columns]
            if not all(name in names for name in columns):
                raise ApplyError(f'the publisher does not send the key of "{relation.schema}.{relation.name}"')
            return tuple(names.index(name) for name in columns) or None
        if relation.replica_identity is ReplicaIdentity.FULL:
            return None
        return tuple(index for index, column in enumerate(relation.columns) if column.is_key) or None


def net_changes(
    spark: SparkSession, log: ChangeLog, start: Lsn, end: Lsn, keys: Keys, wanted: frozenset[str] | None, sink: Sink[R]
) -> list[tuple[str, int, R]]:
    """(schema.table, part, what the sink returned) for the net effect of (start, end].

    `wanted` are the tables, None all. Blocks: call it in a thread. Raises ApplyError where changes contradict each
    other, and Spark's own errors when a sink keeps failing.
    """
    from pyspark.sql import functions as f

    # Large pieces: a row that changes in several of them travels as often.
    size = log.reach(start).size // (2 * spark.sparkContext.defaultParallelism)
    pieces = log.pieces(start, end, size=min(max(size, PIECE), LARGEST))
    if not pieces:
        return []
    parts = max(1, min(PARTS, spark.sparkContext.defaultParallelism))
    work = NetPieces(log.directory, tuple(pieces), keys, wanted, parts)
    nets = spark.range(0, len(pieces), 1, len(pieces)).mapInArrow(work, _NETS).persist()
    try:
        failed = f.when(f.col("relation").isNull(), f.col("net")).alias("failed")
        special = nets.where("whole OR relation IS NULL").select("relation", failed).collect()
        for row in special:
            if row.failed is not None:
                raise pickle.loads(row.failed)
        whole = sorted({row.relation for row in special})
        placed = nets.withColumn("part", f.when(f.col("relation").isin(whole), f.lit(0)).otherwise(f.col("part")))
        folded = (
            placed.repartition(parts, "relation", "part")
            .sortWithinPartitions("relation", "part", "piece")
            .mapInArrow(_Fold(sink), _RESULTS)
        )
        results = [(row.relation, row.part, pickle.loads(row.result)) for row in folded.collect()]
        for _, _, result in results:
            if isinstance(result, SubscriberError):
                raise result
        return results
    finally:
        nets.unpersist()


class NetPieces:
    """On an executor: the nets of some pieces."""

    def __init__(
        self,
        directory: Path,
        pieces: tuple[Piece, ...],
        keys: Keys,
        wanted: frozenset[str] | None,
        parts: int,
    ) -> None:
        self._directory = directory
        self._pieces = pieces
        self._keys = keys
        self._wanted = wanted
        self._parts = parts

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        def row(relation: str | None, part: int, piece: int, whole: bool, net: object) -> pa.RecordBatch:
            values = [[relation], [part], [piece], [whole], [pickle.dumps(net)]]
            types = [pa.string(), pa.int32(), pa.int64(), pa.bool_(), pa.binary()]
            arrays = [pa.array(value, kind) for value, kind in zip(values, types, strict=True)]
            return pa.RecordBatch.from_arrays(arrays, names=["relation", "part", "piece", "whole", "net"])

        for batch in batches:
            for number in batch.column(0).to_pylist():
                try:
                    with _uncollected():
                        found = self.nets(self._pieces[number])
                except SubscriberError as error:  # what trying again cannot help
                    yield row(None, 0, number, False, error)
                    continue
                for table, net in found:
                    whole = net.truncated or net.moved
                    divided = [(0, net)] if whole or self._parts == 1 else net.parts(self._parts)
                    for part, some in divided:
                        yield row(table.label, part, number, whole, (table, some.dump()))

    def nets(self, piece: Piece) -> list[tuple[Table, Net]]:
        """Each table that changes in it, and its net. Raises ApplyError."""
        tables: dict[str, tuple[Table, Net]] = {}
        known: dict[int, tuple[Described, Net]] = {}  # by id() of the tuple, which stays taken while it is kept here
        where = None
        try:
            for begin, number, relations, payload in scan(self._directory, piece, wanted=self._wants):
                where = begin, number, relations
                found = known.get(id(relations))
                if found is not None:
                    _add(found[1], payload)
                elif payload[0] == _TRUNCATE:
                    for relation in filter(self._wants, relations):
                        self._of(relation, tables).truncate()
                elif relations:
                    net = self._of(relations[0], tables)
                    known[id(relations)] = relations, net
                    _add(net, payload)
        except (ApplyError, ProtocolError) as error:
            if where is not None:
                error.context.append(_context(*where))
            raise
        return list(tables.values())

    def _wants(self, relation: Relation) -> bool:
        return self._wanted is None or f"{relation.schema}.{relation.name}" in self._wanted

    def _of(self, relation: Relation, tables: dict[str, tuple[Table, Net]]) -> Net:
        table = Table(relation.schema, relation.name, relation)
        columns, key = tuple(column.name for column in relation.columns), self._keys.of(relation)
        if table.label in tables:
            net = tables[table.label][1]
            if net.columns != columns:
                net.reshape(columns, key)
        else:
            net = Net(columns, key)
        tables[table.label] = (table, net)
        return net


def _add(net: Net, payload: bytes) -> None:
    """Take a change of a row."""
    letter = payload[0]
    # Most changes are these two, and a row of theirs begins after letter, relation, N and the number of columns.
    if letter == _UPDATE and payload[5] == _NEW:
        net.replace(payload[8:])
    elif letter == _INSERT:
        net.insert(payload[8:])
    else:
        message = Decoder().decode(payload)
        assert isinstance(message, Insert | Update | Delete)
        net.add(message)


def _context(begin: Begin, number: int, relations: Described) -> str:
    names = ", ".join(f'"{relation.schema}.{relation.name}"' for relation in relations)
    return f"change {number} of table {names} in transaction {begin.xid}, finished at {begin.final_lsn}"


class _Fold(Generic[R]):
    """On an executor: the nets of each part, which come together and in order, folded and given to the sink."""

    def __init__(self, sink: Sink[R]) -> None:
        self._sink = sink

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        rows: Iterator[dict[str, Any]] = (row for batch in batches for row in batch.to_pylist())
        for (relation, part), nets in groupby(rows, key=lambda row: (row["relation"], row["part"])):
            result: R | SubscriberError
            try:
                with _uncollected():
                    table, net = _folded(row["net"] for row in nets)
                result = self._sink(table, net, part)
            except ConnectionLost:
                raise  # another attempt may not meet it
            except SubscriberError as error:
                result = error
            yield pa.RecordBatch.from_pydict(
                {"relation": [relation], "part": pa.array([part], pa.int32()), "result": [pickle.dumps(result)]}
            )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would look at millions of tuples again and again; there are no cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _folded(nets: Iterator[bytes]) -> tuple[Table, Net]:
    """One net of those that follow each other, and the table as the last one knows it."""
    table, dumped = pickle.loads(next(nets))
    folded = Net.load(dumped)
    for pickled in nets:
        table, dumped = pickle.loads(pickled)
        try:
            folded.then(Net.load(dumped))
        except ApplyError as error:
            error.context.append(f'change of table "{table.label}"')
            raise
    return table, folded
