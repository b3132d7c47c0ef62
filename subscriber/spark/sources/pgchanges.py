"""`pgchanges`: the change log as a Spark data source, for batches and for streams.

    spark.read.format("pgchanges").load(directory)
    spark.readStream.format("pgchanges").option("maxChangesPerTrigger", 100_000).load(directory)

Options:

    path                   the directory of the log, which driver and executors see under this name
    start                  an LSN; the changes of what committed after it are read. Default: all there are;
                           of a stream also "latest". A checkpoint that is there wins
    end                    of a batch: an LSN, as far as which is read. Default: as far as the log goes
    tables                 schema.table, …; default: all
    maxChangesPerTrigger   a micro-batch ends with the transaction in which so many changes, or bytes, are reached;
    maxBytesPerTrigger     by default it has all there are

A row is one change; transactions are never divided between micro-batches. Values are the types' text. A NULL is
null in `after`; what is unchanged and was not sent is not in it, and named in `unchanged`. `before` is what the
publisher gives of the row before: its key, all of it under REPLICA IDENTITY FULL, or null.

typed_changes() makes of one table's changes structs with the columns' own types.

Offsets are positions of the log, so the same offsets always mean the same rows. The log never waits for a stream:
what retention has removed is an error. When there is nothing new, latestOffset() waits for it instead of being
asked ninety times a second; positions without changes make no batch, except now and then, so that a stream
over quiet tables does not fall behind retention.

Failure cases, besides those of changelog/reader.py:

- Segment sealed after a batch was planned: the executor finds it under its new name.
- Segment removed after a batch was planned: the query fails, and no row of the batch is committed.
- Damage in the index, or in rows: planning fails on the driver, or a task on an executor; the query names the file.
- Machine crashed, and the log now ends before a batch that Spark plans again: the query fails until the archiver has
  continued the log. A batch never has fewer rows the second time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from subscriber.changelog.reader import ChangeLog, Piece, Reach, read
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation, RelationColumn
from subscriber.spark.sources.arrow_rows import SCHEMA, batches
from subscriber.spark.sources.arrow_types import arrow_type

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

WAIT = 1.0  # seconds that latestOffset() waits for something new
POLL = 0.02  # seconds between two looks while it waits
HEARTBEAT = 60.0  # seconds after which a position without changes makes a batch


class ChangesSource(DataSource):
    """See the top of the file. register() makes it known to a session by its name."""

    @classmethod
    def name(cls) -> str:
        return "pgchanges"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return ChangesReader(self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return ChangesStreamReader(self.options)


def register(spark: SparkSession) -> None:
    """Make `pgchanges` known to a session that has not found it by itself."""
    spark.dataSource.register(ChangesSource)


def typed_changes(
    changes: DataFrame, directory: Path | str, table: str, *, as_text: Collection[str] = frozenset()
) -> DataFrame:
    """One table's changes, of a DataFrame that `pgchanges` gave, a stream's too, with values of the columns' own types.

    `table` is schema.name. The columns: commit_lsn, commit_time, xid, number, op, before and after (structs with the
    table's newest columns, as the log has them now; null where there is no such row), unchanged. Columns in
    `as_text` stay text. A value that its type cannot hold fails the query. Raises StatementError if the log has no
    change of the table.
    """
    from pyspark.sql import functions as f

    relation = ChangeLog(directory).relation(table)
    if relation is None:
        raise StatementError(f'the change log has no change of table "{table}"', sqlstate="42P01")

    def struct(side: str) -> Column:
        fields = [_typed(f.col(side)[c.name], c, c.name in as_text).alias(c.name) for c in relation.columns]
        return f.when(f.col(side).isNotNull(), f.struct(*fields)).alias(side)

    wanted = (f.col("schema") == relation.schema) & (f.col("table") == relation.name)
    plain = ("commit_lsn", "commit_time", "xid", "number", "op")
    return changes.where(wanted).select(*plain, struct("before"), struct("after"), "unchanged")


def _typed(text: Column, column: RelationColumn, as_text: bool) -> Column:
    from pyspark.sql import functions as f

    kind = arrow_type(column)
    if as_text or pa.types.is_string(kind):
        return text
    if pa.types.is_binary(kind):
        return f.unhex(f.substr(text, f.lit(3)))
    return text.cast(from_arrow_type(kind))


class LogPartition(InputPartition):
    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.piece = piece


class _Reading:
    """What both readers share; goes to the executors by pickle."""

    def __init__(self, options: Any) -> None:
        if not options.get("path"):
            raise StatementError("pgchanges needs the directory of a change log", hint="Give it to load().")
        self.directory = Path(options["path"])
        self.start: str = options.get("start", "")
        self.end: str = options.get("end", "")
        named = options.get("tables", "")
        self._tables = frozenset(name.strip() for name in named.split(",")) if named else None
        self.max_changes = _number(options, "maxChangesPerTrigger")
        self.max_bytes = _number(options, "maxBytesPerTrigger")

    def first(self, log: ChangeLog) -> Lsn:
        if self.start == "latest":
            return log.end()
        return log.start() if self.start in ("", "earliest") else parse(self.start)

    def between(self, log: ChangeLog, start: Lsn, end: Lsn) -> list[LogPartition]:
        return [LogPartition(piece) for piece in log.pieces(start, end)]

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogPartition)
        return batches(read(self.directory, partition.piece, wanted=self._wants))

    def _wants(self, relation: Relation) -> bool:
        return self._tables is None or f"{relation.schema}.{relation.name}" in self._tables


def _number(options: Any, name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if not value.isdigit() or not int(value):
        raise StatementError(f'option "{name}" of pgchanges must be a positive number, not "{value}"')
    return int(value)


def parse(text: str) -> Lsn:
    """Raises StatementError for anything that is not an LSN."""
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise StatementError(str(error), sqlstate="22P02") from None


class ChangesReader(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self._reading = _Reading(options)

    def partitions(self) -> Sequence[InputPartition]:
        log = ChangeLog(self._reading.directory)
        last = log.end()
        end = parse(self._reading.end) if self._reading.end else last
        if end > last:
            raise StatementError(
                f"the change log ends at {last}", detail=f"Changes up to {end} were asked for.", sqlstate="55000"
            )
        found = self._reading.between(log, self._reading.first(log), end)
        return found or [LogPartition(Piece(Lsn(0), 0, 0, Lsn(0), Lsn(0)))]  # Spark wants at least one

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, LogPartition)
        return self._reading.rows(partition) if partition.piece.size else iter(())


class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Any) -> None:
        self._reading = _Reading(options)
        self._initial: Lsn | None = None
        self._last: Lsn | None = None  # of availableNow: where the log ended when the query started
        self._moved = time.monotonic()

    def _log(self) -> ChangeLog:
        return ChangeLog(self._reading.directory)

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        if self._initial is None:
            self._initial = self._reading.first(self._log())
        return _offset(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._reading.max_changes is not None:
            return ReadMaxRows(self._reading.max_changes)
        if self._reading.max_bytes is not None:
            return ReadMaxBytes(self._reading.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = self._log().end()

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        log, begin = self._log(), Lsn.parse(start["lsn"])
        if self._last is not None:
            return _offset(max(begin, min(self._reach(log, begin, limit).position, self._last)))
        until, seen = time.monotonic() + WAIT, begin
        while time.monotonic() < until:
            if (end := log.end()) > seen:
                seen = end
                found = self._reach(log, begin, limit)
                if found.changes or time.monotonic() - self._moved > HEARTBEAT:
                    self._moved = time.monotonic()
                    return _offset(found.position)
            time.sleep(POLL)
        return start

    def _reach(self, log: ChangeLog, begin: Lsn, limit: ReadLimit) -> Reach:
        changes = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        return log.reach(begin, changes=changes, size=size)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        return self._reading.between(self._log(), Lsn.parse(start["lsn"]), Lsn.parse(end["lsn"]))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._reading.rows(partition)


def _offset(lsn: Lsn) -> dict[str, str]:
    return {"lsn": str(lsn)}
