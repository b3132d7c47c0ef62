"""`pgcdc`: the rows of tables at one position, and all changes after it, as a Spark data source.

    from subscriber.spark import write_snapshot

    write_snapshot("postgresql://…/shop", log="/srv/log", directory="/srv/snapshot")
    options = {"tables": "public.orders", "snapshot": "/srv/snapshot"}
    spark.readStream.format("pgcdc").options(**options).load("/srv/log")

Options:

    path                   the directory of the change log, under the same name on driver and executors; or its URL
    tables                 schema.table, …
    snapshot               a directory or URL of write_snapshot(): its rows, followed by the changes after its position
    start                  without a snapshot: "earliest" (the default: all changes of the log), "latest", or an LSN:
                           the transactions whose commit record starts there or later
    end                    of a batch: an LSN: the transactions whose commit record starts before. Default: all
    mode                   cdc (the default, see cdc_batch.py), debezium or delta (cdc_modes.py)
    text                   columns to read as text, separated by commas; a name, or schema.table.column
    rescue                 true: values that do not fit are in the column _rescued, not errors
    schemaPosition         an LSN: the query has the columns of this position. Default: the newest
    consumer               of a stream: the name under which the log keeps what Spark has not committed
    maxChangesPerTrigger   a micro-batch has at most this number of rows or changes, or bytes; one transaction that is
    maxBytesPerTrigger     larger is a micro-batch of its own
    conninfo, …            the query writes the log itself, straight from a publisher, and the snapshot if there is
                           none: publisher_log.py has the options

**Invariants.**

- Offsets are a number of snapshot rows and a position of the log, so the same offsets always mean the same rows.
- The columns are fixed when the query starts. A micro-batch ends before changes that do not fit them. Then the query
  fails, and all changes before these have been delivered.
- Transactions are never divided between micro-batches. No micro-batch has both rows of the snapshot and changes.
- The log waits only for streams that are consumers. Reading changes that retention has removed is an error.

**Failure cases**, in addition to those of pgchanges.py:

- Driver killed: the checkpoint names the offsets of the micro-batch, and the same rows are read again.
- Snapshot replaced by another one after the query started: its position differs from that of the offsets, and the query
  fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from subscriber.changelog.pieces import Piece
from subscriber.changelog.reader import ChangeLog, Reach
from subscriber.changelog.storage import location
from subscriber.display import near_word
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.sources.cdc_modes import mode_schema, projected, row_of_table
from subscriber.spark.sources.cdc_rows import change_batches, misfit_error, snapshot_batches
from subscriber.spark.sources.cdc_tables import CdcTable, table_candidates
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
from subscriber.spark.sources.stream_origin import Begin, StreamOrigin, identities_after
from subscriber.spark.sources.table_snapshot import SnapshotRows, TableSnapshot
from subscriber.spark.tasks import spare_collector, sparing_collector
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from subscriber.spark.publisher_log import PublisherLog

MODES = ("cdc", "debezium", "delta")
_TRUTHS = {"true": True, "false": False}
_REQUIRED = {
    "path": "Pass the directory of a change log to load().",
    "tables": 'Name the tables: .option("tables", "schema.table, …")',
}
_OF_PUBLISHER = ("publications", "slot", "keepSize", "keepAge")
_COMMON = (
    *("path", "tables", "snapshot", "start", "mode", "text", "rescue", "schemaPosition", "conninfo"),
    *_OF_PUBLISHER,
)
BATCH_OPTIONS = (*_COMMON, *OF_BATCHES)
STREAM_OPTIONS = (*_COMMON, *OF_STREAMS)


def register(spark: SparkSession) -> None:
    """Register the data source `pgcdc` with a session, and send the package to its executors.

    Args:
        spark: the session.
    """
    from subscriber.spark.session import ship

    ship(spark)
    spark.dataSource.register(CdcSource)


class CdcSource(DataSource):
    """The data source, see the head of the module. register() registers it with a session."""

    @classmethod
    def name(cls) -> str:
        return "pgcdc"

    def schema(self) -> StructType:
        self._begin()
        return CdcQuery(self.options, {*BATCH_OPTIONS, *STREAM_OPTIONS}).schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        self._begin()
        return CdcReader(CdcQuery(self.options, BATCH_OPTIONS, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        self._begin()
        return CdcStreamReader(CdcQuery(self.options, STREAM_OPTIONS, schema))

    def _begin(self) -> None:
        spare_collector()
        if self.options.get("conninfo"):
            from subscriber.spark.publisher_log import show_waits

            show_waits()


@dataclass
class CdcPartition(InputPartition):
    """Rows of the snapshot, or a piece of the log, with the tables as of its planning. Neither: nothing."""

    tables: tuple[CdcTable, ...]
    rows: SnapshotRows | None = None
    piece: Piece | None = None

    def __repr__(self) -> str:
        return "CdcPartition()"


class CdcQuery:
    """The options of a query, and its tables. Holds no open file; pickled for the executors, without the publisher."""

    def __init__(self, options: Any, known: Any, schema: StructType | None = None) -> None:
        """Check the options.

        Args:
            options: the options.
            known: names of the options that the query may have.
            schema: the columns that Spark expects; None: choose them.

        Raises:
            StatementError: an option is unknown, missing or invalid.
            SubscriberError: with `conninfo`: log or snapshot do not exist, and cannot be written.
        """
        check_options("pgcdc", options, known, has_streams=True)
        for name, hint in _REQUIRED.items():
            if not options.get(name):
                raise StatementError(f'pgcdc needs the option "{name}"', hint=hint, sqlstate=INVALID_PARAMETER_VALUE)
        self.path: str = options["path"]
        self.labels = _names(options["tables"])
        self.mode = _choice(options, "mode", MODES)
        self.rescue = _TRUTHS[_choice(options, "rescue", ("false", "true"))]
        self.max_changes = positive_number("pgcdc", options, "maxChangesPerTrigger")
        self.max_bytes = positive_number("pgcdc", options, "maxBytesPerTrigger")
        self.end = position_option("pgcdc", options, "end")
        self.consumer = consumer_option(options)
        self.start = start_option("pgcdc", options)
        if options.get("snapshot") and self.start:
            raise StatementError(
                "pgcdc has the options snapshot and start, which exclude each other",
                hint="A snapshot is followed by the changes after its position.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
        self._text = frozenset(_names(options.get("text", "")))
        self._position = position_option("pgcdc", options, "schemaPosition")
        self._expected = schema
        self.publisher = _publisher_log(options)
        if self.publisher is not None:
            self.publisher.begin()
            if options.get("snapshot"):
                self.publisher.take_snapshot(options["snapshot"], self.labels, self.consumer)
        self.snapshot = TableSnapshot.read(options["snapshot"]) if options.get("snapshot") else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "publisher": None}

    def log(self) -> ChangeLog:
        """Open the change log. Raises StatementError if the snapshot is of another publisher."""
        log = ChangeLog(self.path)
        if self.snapshot is not None and self.snapshot.system_id != log.identity.system_id:
            raise StatementError(
                f'the snapshot in "{self.snapshot.directory}" is of another publisher than the change log',
                hint="Take a snapshot with subscriber.spark.write_snapshot().",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        return log

    def schema(self) -> StructType:
        """Return the columns of the query, with its origin.

        Raises:
            StatementError: the log does not have a table, or a column of the option `text`.
        """
        log = self.log()
        tables = self.tables(log)
        self._check_text(tables)
        schema: StructType = from_arrow_schema(mode_schema(self.mode, tables, rescue=self.rescue))
        _, position = self.first(log)
        begin: Begin = "snapshot" if self.snapshot is not None else "start" if self.start else ""
        identities = {table.label: identities_after(table.identities, position) for table in tables}
        StreamOrigin(begin, identities).add_to(schema)
        return schema

    def _check_text(self, tables: Sequence[CdcTable]) -> None:
        known = {name for table in tables for c in table.columns for name in (c.name, f"{table.label}.{c.name}")}
        for name in sorted(self._text - known):
            raise StatementError(
                f'no table of the query has the column "{name}" of the option "text"',
                hint=near_word(name, sorted(known))
                or f"Its columns are {', '.join(c.name for table in tables for c in table.columns)}.",
                sqlstate=UNDEFINED_COLUMN,
            )

    def tables(self, log: ChangeLog) -> tuple[CdcTable, ...]:
        """Return the tables, with the columns that Spark expects, as the log describes their versions now.

        Raises:
            StatementError: the log does not have a table, or it never had these columns.
        """
        tables = tuple(self._table(log, label) for label in self.labels)
        if self._expected is not None:
            mode_schema(self.mode, tables, rescue=self.rescue)  # raises if the replica identity has changed
        return tables

    def _table(self, log: ChangeLog, label: str) -> CdcTable:
        version = None if self.snapshot is None else self.snapshot.version(label)
        expected = None if self._expected is None else row_of_table(self.mode, self._expected, label, self.labels)
        for table in table_candidates(
            log, label, version, as_text=self._text, rescue=self.rescue, position=self._position
        ):
            if expected is None or from_arrow_type(table.struct()).simpleString() == expected:
                return table
        raise StatementError(
            f"table {label} never had the columns that the query expects",
            hint="Remove .schema() from the query, or load the table again.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )

    # --- ranges ---------------------------------------------------------------------------------

    def first(self, log: ChangeLog) -> tuple[int, Lsn]:
        """Return the number of the first row of the snapshot that is read, and the position where changes begin."""
        if self.snapshot is not None:
            return 0, self.snapshot.position
        return 0, start_position(log, self.start)

    def row_count(self) -> int:
        """Return the number of rows of the snapshot, of all its tables."""
        files = self.snapshot.files if self.snapshot is not None else ()
        return files[-1].first + files[-1].rows if files else 0

    def reach_rows(self, first: int, limit: ReadLimit) -> int:
        """Return the number of the row at which a micro-batch that begins at row `first` ends."""
        assert self.snapshot is not None
        rows, size = changes_and_size(limit)
        taken = Reach(Lsn(0), 0, 0)
        for file in self.snapshot.files:
            left = file.first + file.rows - max(first, file.first)
            if left <= 0 or file.table not in self.labels:
                continue
            if taken.has(rows, size) or (taken.size and size is not None and taken.size + file.size > size):
                return file.first
            if rows is not None and taken.changes + left > rows:
                return max(first, file.first) + rows - taken.changes
            taken = Reach(Lsn(0), taken.changes + left, taken.size + file.size)
        return self.row_count()

    def snapshot_rows(self, tables: tuple[CdcTable, ...], first: int, end: int) -> list[CdcPartition]:
        """Return the partitions of rows of the snapshot. Raises ApplyError if they do not fit the query."""
        partitions = []
        for file in self.snapshot.files if self.snapshot is not None else ():
            low, high = max(first, file.first), min(end, file.first + file.rows)
            if low < high and file.table in self.labels:
                partitions.append(CdcPartition(tables, SnapshotRows(file, low - file.first, high - low)))
        return partitions

    def changes(self, log: ChangeLog, tables: tuple[CdcTable, ...], start: Lsn, end: Lsn) -> list[CdcPartition]:
        """Return the partitions of a range of the log."""
        return [CdcPartition(tables, piece=piece) for piece in log.pieces(start, end)]

    # --- on executors ---------------------------------------------------------------------------

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, on an executor."""
        assert isinstance(partition, CdcPartition)
        batches = self._batches(partition)
        return sparing_collector(projected(self.mode, batches, partition.tables, rescue=self.rescue))

    def _batches(self, partition: CdcPartition) -> Iterator[pa.RecordBatch]:
        tables = partition.tables
        if partition.rows is not None:
            assert self.snapshot is not None
            label = partition.rows.file.table
            table = next(table for table in tables if table.label == label)
            return snapshot_batches(partition.rows, self.snapshot, table, tables, rescue=self.rescue)
        if partition.piece is not None:
            return change_batches(ChangeLog(self.path).directory, partition.piece, tables, rescue=self.rescue)
        return iter(())


def _publisher_log(options: Any) -> PublisherLog | None:
    """Return what writes the log of the query. None: another program does."""
    if options.get("conninfo"):
        from subscriber.spark.publisher_log import PublisherLog  # executors and other queries do not need it

        return PublisherLog.of_options(options)
    for name in _OF_PUBLISHER:
        if options.get(name):
            raise StatementError(
                f'option "{name}" of pgcdc needs the option "conninfo"',
                hint="Without it, another program writes the log: `subscriber archive`, which has the same options.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
    return None


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _choice(options: Any, name: str, choices: Sequence[str]) -> str:
    value: str = options.get(name) or choices[0]
    if value.lower() not in choices:
        raise StatementError(
            f'option "{name}" of pgcdc cannot be "{value}"',
            hint=near_word(value, choices) or f"It can be {', '.join(choices)}.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return value.lower()


class CdcReader(DataSourceReader):
    def __init__(self, query: CdcQuery) -> None:
        self._query = query

    def partitions(self) -> Sequence[InputPartition]:
        query = self._query
        if query.publisher is not None:
            query.publisher.catch_up()
        log = query.log()
        tables, end = query.tables(log), end_position(log, query.end)
        rows, start = query.first(log)
        snapshot = query.snapshot_rows(tables, rows, query.row_count())
        return [*snapshot, *query.changes(log, tables, start, max(start, end))] or [CdcPartition(tables)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._query.rows(partition)


class CdcStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, query: CdcQuery) -> None:
        self._query = query
        self._initial: dict[str, str] | None = None
        self._tail = LogTail()
        self._consumer = StreamConsumer(query.consumer, CdcSource.name(), location(query.path))

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        if self._initial is None:
            log = self._query.log()
            rows, position = self._query.first(log)
            self._consumer.begin(log, position)
            self._initial = _offset(rows, position)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return read_limit(self._query.max_changes, self._query.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        if self._query.publisher is not None:
            self._query.publisher.catch_up()
        self._tail.stop_at_end(self._query.log())

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        if self._query.publisher is not None and not self._tail.has_end:
            self._query.publisher.follow()
        rows, begin = _parsed(start)
        if rows < (count := self._query.row_count()):
            return _offset(self._query.reach_rows(rows, limit), begin)
        log = self._query.log()
        end = self._tail.next_end(log, begin, partial(self._reach, log, begin, limit))
        return start if end is None else _offset(count, end)

    def _reach(self, log: ChangeLog, begin: Lsn, limit: ReadLimit) -> Reach:
        """Return the end of the next micro-batch. Raises ApplyError if changes that do not fit come next."""
        changes, size = changes_and_size(limit)
        reach = log.reach(begin, changes=changes, size=size, exceed=False)
        for table in self._query.tables(log):
            end = table.fitting_end(begin, reach.position)
            if end <= begin < reach.position:
                raise misfit_error(table, table.fit(begin))
            reach = reach._replace(position=end)
        return reach

    def reportLatestOffset(self) -> dict[str, str]:  # noqa: N802
        return _offset(self._query.row_count(), self._query.log().end())

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        (first_row, begin), (last_row, stop) = _parsed(start), _parsed(end)
        query, log = self._query, self._query.log()
        tables = query.tables(log)
        if first_row < last_row and query.snapshot is not None and query.snapshot.position != begin:
            raise StatementError(
                f'the snapshot in "{query.snapshot.directory}" is not the one that the query started with',
                detail=f"Its position is {query.snapshot.position} instead of {begin}.",
                hint="Restore the first one, or start a new query with another checkpoint.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        rows = query.snapshot_rows(tables, first_row, last_row)
        return [*rows, *query.changes(log, tables, begin, stop)] or [CdcPartition(tables)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._query.rows(partition)

    def commit(self, end: dict[str, str]) -> None:
        self._consumer.move(_parsed(end)[1])

    def stop(self) -> None:
        if self._query.publisher is not None:
            self._query.publisher.stop()


def _offset(rows: int, position: Lsn) -> dict[str, str]:
    return {"rows": str(rows), "lsn": f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"}


def _parsed(offset: dict[str, str]) -> tuple[int, Lsn]:
    return int(offset["rows"]), Lsn.parse(offset["lsn"])
