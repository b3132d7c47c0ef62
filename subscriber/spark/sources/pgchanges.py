"""`pgchanges`: the change log as a Spark data source, for batches and for streams.

    spark.read.format("pgchanges").load(directory)
    spark.readStream.format("pgchanges").option("maxChangesPerTrigger", 100_000).load(directory)

Options:

    path                   the directory of the log, under the same name on driver and executors
    start                  an LSN; only transactions committed after it are read. Default: the start of the log;
                           a stream also accepts "latest". An existing checkpoint takes precedence
    end                    of a batch: an LSN, the end of the range. Default: the end of the log
    tables                 schema.table, …; default: all
    consumer               of a stream: the name under which the log keeps what Spark has not committed
    maxChangesPerTrigger   a micro-batch ends with the transaction that reaches this number of changes, or bytes;
    maxBytesPerTrigger     by default it has all available changes

A row is one change. Transactions are never divided between micro-batches. Values are in the text format of their types.
A NULL is null in `after`. A value that did not change and was not sent is that of `before` under REPLICA IDENTITY FULL.
Otherwise it is missing in `after` and named in `unchanged`.
`before` is the publisher's old row: its key, the whole row under REPLICA IDENTITY FULL, or null.

`pgcdc` has the columns' own types (cdc_tables.py), and reads the same change in less time. Only this source has tables
that are published later, messages, and changes after any DDL in one query, because its columns are always the same.

**Invariants.**

- Offsets are positions of the log, so the same offsets always mean the same rows.
- The log waits only for streams that are consumers. Reading changes that retention has removed is an error.
- If there is nothing new, latestOffset() waits, so that Spark does not call it ninety times a second. Positions without
  changes make no batch, except at intervals, so that a stream over quiet tables does not fall behind retention.

**Failure cases**, besides those of changelog/reader.py:

- Segment sealed after a batch was planned: the executor finds it under its new name.
- Segment removed after a batch was planned: the query fails, and no row of the batch is committed.
- Damage in the index, or in rows: planning fails on the driver, or a task on an executor; the query names the file.
- Machine crashed, and the log now ends before a batch that Spark plans again: the query fails until the archiver has
  continued the log. A batch never has fewer rows the second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from subscriber.changelog.pieces import Piece
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import location
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.spark.sources.arrow_rows import SCHEMA, batches
from subscriber.spark.sources.log_positions import (
    LogTail,
    StreamConsumer,
    changes_and_size,
    consumer_option,
    end_position,
    read_limit,
    start_option,
    start_position,
)
from subscriber.spark.sources.options import OF_BATCHES, OF_STREAMS, check_options, position_option, positive_number
from subscriber.spark.tasks import spare_collector, sparing_collector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

OPTIONS = ("path", "start", "tables")


class ChangesSource(DataSource):
    """The data source, see the head of the module. register() registers it with a session."""

    @classmethod
    def name(cls) -> str:
        return "pgchanges"

    def schema(self) -> str:
        spare_collector()
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        spare_collector()
        check_options(self.name(), self.options, {*OPTIONS, *OF_BATCHES}, has_streams=True)
        return ChangesReader(self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        check_options(self.name(), self.options, {*OPTIONS, *OF_STREAMS}, has_streams=True)
        return ChangesStreamReader(self.options)


def register(spark: SparkSession) -> None:
    """Register the data source `pgchanges` with a session, and send the package to its executors.

    Args:
        spark: the session.
    """
    from subscriber.spark.session import ship

    ship(spark)
    spark.dataSource.register(ChangesSource)


class LogPartition(InputPartition):
    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.piece = piece


class _Reading:
    """The state of both readers; pickled for the executors."""

    def __init__(self, options: Any) -> None:
        if not options.get("path"):
            raise StatementError("pgchanges needs the directory of a change log", hint="Pass it to load().")
        self.directory = location(options["path"])
        self.start = start_option("pgchanges", options)
        self.end = position_option("pgchanges", options, "end")
        self.consumer = consumer_option(options)
        named = options.get("tables", "")
        self._tables = frozenset(name.strip() for name in named.split(",")) if named else None
        self.max_changes = positive_number("pgchanges", options, "maxChangesPerTrigger")
        self.max_bytes = positive_number("pgchanges", options, "maxBytesPerTrigger")

    def first(self, log: ChangeLog) -> Lsn:
        return start_position(log, self.start)

    def between(self, log: ChangeLog, start: Lsn, end: Lsn) -> list[LogPartition]:
        return [LogPartition(piece) for piece in log.pieces(start, end)]

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LogPartition)
        return sparing_collector(batches(self.directory, partition.piece, self._wants))

    def _wants(self, relation: Relation) -> bool:
        return self._tables is None or f"{relation.schema}.{relation.name}" in self._tables


class ChangesReader(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self._reading = _Reading(options)

    def partitions(self) -> Sequence[InputPartition]:
        log = ChangeLog(self._reading.directory)
        end = end_position(log, self._reading.end)
        partitions = self._reading.between(log, self._reading.first(log), end)
        return partitions or [LogPartition(Piece(Lsn(0), 0, 0, Lsn(0), Lsn(0)))]  # Spark requires at least one

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, LogPartition)
        return self._reading.rows(partition) if partition.piece.size else iter(())


class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Any) -> None:
        self._reading = _Reading(options)
        self._initial: Lsn | None = None
        self._tail = LogTail()
        self._consumer = StreamConsumer(self._reading.consumer, ChangesSource.name(), self._reading.directory)

    def _log(self) -> ChangeLog:
        return ChangeLog(self._reading.directory)

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        if self._initial is None:
            log = self._log()
            position = self._reading.first(log)
            self._consumer.begin(log, position)
            self._initial = position
        return _offset(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return read_limit(self._reading.max_changes, self._reading.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._tail.stop_at_end(self._log())

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        log, begin = self._log(), Lsn.parse(start["lsn"])
        changes, size = changes_and_size(limit)
        end = self._tail.next_end(log, begin, partial(log.reach, begin, changes=changes, size=size))
        return start if end is None else _offset(end)

    def reportLatestOffset(self) -> dict[str, str]:  # noqa: N802
        return _offset(self._log().end())

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        return self._reading.between(self._log(), Lsn.parse(start["lsn"]), Lsn.parse(end["lsn"]))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._reading.rows(partition)

    def commit(self, end: dict[str, str]) -> None:
        self._consumer.move(Lsn.parse(end["lsn"]))


def _offset(lsn: Lsn) -> dict[str, str]:
    return {"lsn": str(lsn)}
