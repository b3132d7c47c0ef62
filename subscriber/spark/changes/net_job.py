"""The net effect of a range of the change log, computed by Spark and passed to a sink on the executors.

    pieces of the log ─▶ a net for each piece and table ─▶ shuffled by table and key, in the pieces' order
                      ─▶ folded into one net for each part of a table ─▶ sink(table, net, part) ─▶ results

**Invariants.**

- A table with rows that changed their keys, or with a TRUNCATE, stays in one part, because the key does not identify
  the related changes. All other tables are divided among the executors.
- An error of one table is returned beside the nets of the others. The caller decides whether these are usable.
- A task may be retried or run twice, so a sink must be idempotent. Only its returned value counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from subscriber.changelog.piece_reader import scan
from subscriber.changelog.pieces import Piece
from subscriber.changelog.reader import PIECE, ChangeLog
from subscriber.changelog.storage import Location
from subscriber.display import sql_name
from subscriber.errors import ApplyError, ConnectionLost, LoadNeeded, ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Delete, Insert, Relation, ReplicaIdentity, Update
from subscriber.spark.changes.loaded_rows import LoadedRows
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.net_shuffle import NetDataFrame, NetPlacement, NetRdd, PieceNet, Place
from subscriber.spark.tasks import is_connect, parallelism, spark_errors

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


@dataclass(frozen=True, slots=True)
class NetTables:
    """The tables whose changes are netted, as schema.table."""

    wanted: frozenset[str] | None = None  # None: all
    ignored: frozenset[str] = frozenset()
    # The only valid description of each table, None for a table without a schema history. None: all are valid.
    described: Mapping[str, Relation | None] | None = None
    # The tables whose rows are of several snapshots.
    loaded: Mapping[str, LoadedRows] = field(default_factory=dict)

    def has(self, relation: Relation) -> bool:
        """Return True if changes of the relation are netted."""
        label = f"{relation.schema}.{relation.name}"
        return label not in self.ignored and (self.wanted is None or label in self.wanted)

    def check(self, relation: Relation) -> None:
        """Raise LoadNeeded if the description of a relation is not valid, ApplyError if that is not known."""
        if self.described is None:
            return
        table = sql_name(relation.schema, relation.name)
        label = f"{relation.schema}.{relation.name}"
        if label not in self.described:
            raise LoadNeeded(f"table {table} was published later than the tables that were loaded")
        expected = self.described[label]
        if expected is None:
            raise ApplyError(f"the change log has no schema history of table {table}")
        if expected.relid != relation.relid:
            raise LoadNeeded(f"table {table} was dropped and created again")
        if expected != relation:
            raise LoadNeeded(f"table {table} has other columns than the schema history of the change log says")


@dataclass(frozen=True, slots=True)
class Netted(Generic[R]):
    """The result of net_changes()."""

    parts: list[tuple[str, R]]  # schema.table, and the result of the sink; a table may have several
    errors: dict[str, SubscriberError]  # the first error of each table whose changes cannot be netted or stored


def net_changes(
    spark: SparkSession,
    log: ChangeLog,
    start: Lsn,
    end: Lsn,
    keys: RowKeys,
    tables: NetTables,
    sink: Sink[R],
) -> Netted[R]:
    """Compute the net effect of (start, end] and pass it to `sink` on the executors.

    This call blocks, so call it in a thread.

    Args:
        spark: the session.
        log: the change log.
        start: the start of the range.
        end: the end of the range.
        keys: the key columns of tables.
        tables: the tables.
        sink: processes a part of a table.

    Returns:
        The results of the sink, and the errors of tables. Such an error is that changes contradict each other, or that
        the sink raised it.

    Raises:
        SubscriberError: the log cannot be read, or a sink failed in every attempt.
    """
    at_once = parallelism(spark)
    # Large pieces: a row that changes in several pieces is shuffled several times.
    size = log.reach(start).size // (2 * at_once)
    pieces = log.pieces(start, end, size=min(max(size, PIECE), LARGEST))
    if not pieces:
        return Netted([], {})
    parts = max(1, min(PARTS, at_once))
    work = NetPieces(log.directory, keys, tables, parts)
    shuffle = NetDataFrame(spark) if is_connect(spark) else NetRdd(spark)
    errors: dict[str, SubscriberError] = {}
    with spark_errors(), shuffle.compute(work, pieces):
        special = shuffle.special()
        for relation, error in special:
            if error is not None and not relation:
                raise error
            if error is not None:
                errors.setdefault(relation, error)
        placement = NetPlacement(frozenset(relation for relation, _ in special), frozenset(errors))
        results = shuffle.fold(placement, _Fold(sink), parts)
    netted = []
    for relation, result in results:
        if isinstance(result, SubscriberError):
            errors.setdefault(relation, result)
        else:
            netted.append((relation, result))
    return Netted([(relation, result) for relation, result in netted if relation not in errors], errors)


class NetPieces:
    """Computes the nets of pieces, on an executor."""

    def __init__(self, directory: Location, keys: RowKeys, tables: NetTables, parts: int) -> None:
        self._directory = directory
        self._keys = keys
        self._tables = tables
        self._parts = parts

    def __call__(self, numbered: tuple[int, Piece]) -> Iterator[PieceNet]:
        number, piece = numbered
        try:
            with _uncollected():
                tables = self.nets(piece, is_first=number == 0)
        except SubscriberError as error:  # a retry would not help
            yield PieceNet("", 0, number, False, error)
            return
        for table_net in tables:
            if table_net.error is not None:
                yield PieceNet(table_net.table.label, 0, number, False, table_net.error)
                continue
            net = table_net.net
            whole = net.truncated or net.moved
            divided = [(0, net)] if whole or self._parts == 1 else net.parts(self._parts)
            for part, some in divided:
                yield PieceNet(table_net.table.label, part, number, whole, (table_net.table, some.dump()))

    def nets(self, piece: Piece, *, is_first: bool = False) -> list[TableNet]:
        """Return the net of each table that changes in the piece.

        Args:
            piece: the piece.
            is_first: it is the first of the range.

        Raises:
            ProtocolError: the log is damaged.
        """
        tables = self._started() if is_first else {}
        # The keys are id() of the tuples, which stay valid because the tuples are referenced here.
        known: dict[int, tuple[Described, TableNet]] = {}
        where = None
        try:
            for begin, number, relations, payload in scan(self._directory, piece, wanted=self._tables.has):
                where = begin, number, relations
                entry = known.get(id(relations))
                if entry is not None:
                    entry[1].add(payload, where)
                elif payload[0] == _TRUNCATE:
                    for relation in filter(self._tables.has, relations):
                        self._of(relation, tables, where).truncate(where)
                elif relations:
                    table_net = self._of(relations[0], tables, where)
                    known[id(relations)] = relations, table_net
                    table_net.add(payload, where)
        except ProtocolError as error:
            if where is not None:
                error.context.append(_context(*where))
            raise
        return list(tables.values())

    def _of(self, relation: Relation, tables: dict[str, TableNet], where: Where) -> TableNet:
        table = NetTable(relation.schema, relation.name, relation)
        table_net = tables.get(table.label)
        if table_net is not None and table_net.error is not None:
            return table_net
        try:
            self._tables.check(relation)
            columns, key = tuple(column.name for column in relation.columns), self._keys.of(relation)
            if table_net is None:
                table_net = self._new(table, Net(columns, key))
            elif table_net.net.columns != columns:
                table_net.net.reshape(columns, key)
            table_net.table = table
        except ApplyError as error:
            table_net = TableNet(table, Net((), None))
            table_net.fail(error, where)
        tables[table.label] = table_net
        return table_net

    def _new(self, table: NetTable, net: Net) -> TableNet:
        loaded = self._tables.loaded.get(table.label)
        if loaded is None:
            return TableNet(table, net)
        net.overlaps = True
        return LoadedTableNet(table, net, loaded=loaded)

    def _started(self) -> dict[str, TableNet]:
        """Return the nets of tables that begin with rows."""
        nets = {}
        for label, loaded in self._tables.loaded.items():
            if loaded.again:
                relation = loaded.relation
                net = Net(tuple(column.name for column in relation.columns), self._keys.of(relation))
                loaded.start(net)
                nets[label] = self._new(NetTable(relation.schema, relation.name, relation), net)
        return nets


Where: TypeAlias = tuple[Begin, int, Described]  # a change: its transaction, its number there, and its relations


@dataclass(slots=True)
class TableNet:
    """The net of a table in a piece of the log. After an error the net is of no use."""

    table: NetTable
    net: Net
    error: SubscriberError | None = None

    def add(self, payload: bytes, where: Where) -> None:
        """Add the change of a row. Keeps the first error."""
        if self.error is not None:
            return
        letter = payload[0]
        try:
            # Most changes are these two. Their row begins after letter, relation, N and the number of columns.
            if letter == _UPDATE and payload[5] == _NEW:
                self.net.replace(payload[8:])
            elif letter == _INSERT:
                self.net.insert(payload[8:])
            else:
                message = Decoder().decode(payload)
                assert isinstance(message, Insert | Update | Delete)
                self.net.add(message)
        except ApplyError as error:
            self.fail(error, where)

    def truncate(self, where: Where) -> None:
        """Add a TRUNCATE."""
        self.net.truncate()

    def fail(self, error: SubscriberError, where: Where) -> None:
        """Keep the error. The net is of no use afterwards."""
        error.context.append(_context(*where))
        self.error, self.net = error, Net((), None)


@dataclass(slots=True)
class LoadedTableNet(TableNet):
    """The net of a table whose rows are of several snapshots."""

    loaded: LoadedRows = field(kw_only=True)

    def add(self, payload: bytes, where: Where) -> None:
        if self.error is not None:
            return
        message = Decoder().decode(payload)
        assert isinstance(message, Insert | Update | Delete)
        try:
            self.loaded.add(self.net, message, where[0])
        except ApplyError as error:
            self.fail(error, where)

    def truncate(self, where: Where) -> None:
        if self.error is not None:
            return
        try:
            self.loaded.truncate(self.net, where[0])
        except ApplyError as error:
            self.fail(error, where)


def _context(begin: Begin, number: int, relations: Described) -> str:
    names = ", ".join(f'"{relation.schema}.{relation.name}"' for relation in relations)
    return f"change {number} of table {names} in transaction {begin.xid}, finished at {begin.final_lsn}"


class _Fold(Generic[R]):
    """Folds the nets of each part, which arrive in order, and passes them to the sink; on an executor."""

    def __init__(self, sink: Sink[R]) -> None:
        self._sink = sink

    def __call__(
        self, placed: Iterable[tuple[Place, tuple[NetTable, bytes]]]
    ) -> Iterator[tuple[str, R | SubscriberError]]:
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
            yield relation, result


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
