"""The net effect of a range of the change log, computed by Spark and passed to a sink on the executors.

    pieces of the log ─▶ a net for each piece and table ─▶ shuffled by table and key, in the pieces' order
                      ─▶ folded into one net for each part of a table ─▶ sink(table, net, part) ─▶ results

**Invariants.**

- A table with rows that changed their keys, or with a TRUNCATE, stays in one part, because the key does not identify
  the related changes. All other tables are divided among the executors.
- A task may be retried or run twice, so a sink must be idempotent. Only its returned value counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar
from zlib import crc32

from subscriber.changelog.reader import PIECE, ChangeLog, Piece, scan
from subscriber.errors import ApplyError, ConnectionLost, ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Delete, Insert, Relation, ReplicaIdentity, Update
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.tasks import spark_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
Described: TypeAlias = tuple[Relation, ...]

# For a session created here: the JVM only passes bytes on, so thorough compilation costs more than it saves.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
LARGEST = 64 * 1024 * 1024  # bytes of the log that one task nets in memory
PARTS = 8  # maximum number of parts of a table, if there are as many executors

_INSERT, _UPDATE, _TRUNCATE, _NEW = b"IUTN"


class Sink(Protocol[R_co]):
    """Processes a part of a table's net on an executor. It and its result must be picklable."""

    def __call__(self, table: NetTable, net: Net, part: int) -> R_co: ...


@dataclass(frozen=True, slots=True)
class NetTable:
    """A table as the publisher describes it. A net may have other columns: those of its last change."""

    schema: str
    name: str
    relation: Relation  # the newest in the range

    @property
    def label(self) -> str:
        """Return schema.name."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The key columns of tables. `named` has, by table, the keys that are not the publisher's replica identity."""

    named: Mapping[str, tuple[str, ...]]

    def of(self, relation: Relation) -> tuple[int, ...] | None:
        """Return the indexes of the key columns; None if rows are identified by all their values, or only inserted."""
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
    spark: SparkSession,
    log: ChangeLog,
    start: Lsn,
    end: Lsn,
    keys: RowKeys,
    wanted: frozenset[str] | None,
    sink: Sink[R],
) -> list[tuple[str, int, R]]:
    """Compute the net effect of (start, end] and pass it to `sink` on the executors.

    This call blocks, so call it in a thread.

    Args:
        wanted: the tables, as schema.table; None: all.

    Returns:
        (schema.table, part, result of the sink) for each part.

    Raises:
        ApplyError: changes contradict each other.
        SubscriberError: a sink failed in every attempt.
    """
    from pyspark import StorageLevel

    context = spark.sparkContext
    # Large pieces: a row that changes in several pieces is shuffled several times.
    size = log.reach(start).size // (2 * context.defaultParallelism)
    pieces = log.pieces(start, end, size=min(max(size, PIECE), LARGEST))
    if not pieces:
        return []
    parts = max(1, min(PARTS, context.defaultParallelism))
    work = NetPieces(log.directory, keys, wanted, parts)
    with spark_errors():
        nets = (
            context.parallelize(list(enumerate(pieces)), len(pieces))
            .flatMap(work)
            .persist(StorageLevel.MEMORY_AND_DISK)
        )
        try:
            special = nets.filter(_is_special).map(_what_is_special).collect()
            for _, error in special:
                if error is not None:
                    raise error
            place = _Place(frozenset(relation for relation, _ in special))
            placed = nets.map(place).repartitionAndSortWithinPartitions(parts, _partition)
            results = placed.mapPartitions(_Fold(sink)).collect()
        finally:
            nets.unpersist()
    found = []
    for relation, part, result in results:
        if isinstance(result, SubscriberError):
            raise result
        found.append((relation, part, result))
    return found


class PieceNet(NamedTuple):
    """The net of a piece of the log for one part of a table, or the error of the piece."""

    relation: str  # schema.name
    part: int
    piece: int  # number
    whole: bool  # the table must not be divided
    net: tuple[NetTable, bytes] | SubscriberError


def _is_special(net: PieceNet) -> bool:
    return net.whole or isinstance(net.net, SubscriberError)


def _what_is_special(net: PieceNet) -> tuple[str, SubscriberError | None]:
    return net.relation, net.net if isinstance(net.net, SubscriberError) else None


Place: TypeAlias = tuple[str, int, int]  # relation, part, piece: also the order in which nets are folded


class _Place:
    """Assigns each net a place, on an executor. `whole` are the tables that are not divided."""

    def __init__(self, whole: frozenset[str]) -> None:
        self._whole = whole

    def __call__(self, net: PieceNet) -> tuple[Place, tuple[NetTable, bytes]]:
        assert not isinstance(net.net, SubscriberError)
        return (net.relation, 0 if net.relation in self._whole else net.part, net.piece), net.net


def _partition(place: Place) -> int:
    """Distribute the parts of one table over different executors, and small tables over all executors."""
    return place[1] + crc32(place[0].encode())


class NetPieces:
    """Computes the nets of pieces, on an executor."""

    def __init__(self, directory: Path, keys: RowKeys, wanted: frozenset[str] | None, parts: int) -> None:
        self._directory = directory
        self._keys = keys
        self._wanted = wanted
        self._parts = parts

    def __call__(self, numbered: tuple[int, Piece]) -> Iterator[PieceNet]:
        number, piece = numbered
        try:
            with _uncollected():
                found = self.nets(piece)
        except SubscriberError as error:  # a retry would not help
            yield PieceNet("", 0, number, False, error)
            return
        for table, net in found:
            whole = net.truncated or net.moved
            divided = [(0, net)] if whole or self._parts == 1 else net.parts(self._parts)
            for part, some in divided:
                yield PieceNet(table.label, part, number, whole, (table, some.dump()))

    def nets(self, piece: Piece) -> list[tuple[NetTable, Net]]:
        """Return each table that changes in the piece, with its net. Raises ApplyError."""
        tables: dict[str, tuple[NetTable, Net]] = {}
        # The keys are id() of the tuples, which stay valid because the tuples are referenced here.
        known: dict[int, tuple[Described, Net]] = {}
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

    def _of(self, relation: Relation, tables: dict[str, tuple[NetTable, Net]]) -> Net:
        table = NetTable(relation.schema, relation.name, relation)
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
    """Add the change of a row to the net."""
    letter = payload[0]
    # Most changes are these two. Their row begins after letter, relation, N and the number of columns.
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
    """Folds the nets of each part, which arrive in order, and passes them to the sink; on an executor."""

    def __init__(self, sink: Sink[R]) -> None:
        self._sink = sink

    def __call__(
        self, placed: Iterable[tuple[Place, tuple[NetTable, bytes]]]
    ) -> Iterator[tuple[str, int, R | SubscriberError]]:
        for (relation, part), nets in groupby(placed, key=lambda net: net[0][:2]):
            result: R | SubscriberError
            try:
                with _uncollected():
                    table, folded = _folded(net for _, net in nets)
                result = self._sink(table, folded, part)
            except ConnectionLost:
                raise  # it may not occur in another attempt
            except SubscriberError as error:
                result = error
            yield relation, part, result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector. It would check millions of tuples repeatedly, and there are no cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _folded(nets: Iterator[tuple[NetTable, bytes]]) -> tuple[NetTable, Net]:
    """Return the combination of consecutive nets, and the table as the last net describes it."""
    table, dumped = next(nets)
    folded = Net.load(dumped)
    for table, dumped in nets:
        try:
            folded.then(Net.load(dumped))
        except ApplyError as error:
            error.context.append(f'change of table "{table.label}"')
            raise
    return table, folded
