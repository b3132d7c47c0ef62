"""`pgsnapshot`: tables of any PostgreSQL server as Spark data frames, as of one moment, read in parallel.

    from subscriber.spark.sources.pgsnapshot import exported_snapshot, register

    register(spark)
    with exported_snapshot("postgresql://…/shop") as snapshot:
        orders = spark.read.format("pgsnapshot").options(**snapshot).option("table", "public.orders").load()
        items = spark.read.format("pgsnapshot").options(**snapshot).option("table", "public.items").load()
        …                                              both as of the same moment, until the block ends

    option      meaning
    conninfo    the server: a URI or key=value string
    table       schema.table, written as in SQL
    snapshot    name of a snapshot that the server has exported. Without one the table is one partition, because
                only the rows of a single statement are of one moment
    partitions  number of partitions; by default one for each 128 MiB of the table
    by          ctid (blocks of the table, the default) or the name of an integer column (ranges of its values)
    columns     columns to read, separated by commas; by default all. With an empty text the data frame has no columns
                and as many rows, which the server counts
    where       a condition in SQL that the server evaluates
    text        columns to read as text, separated by commas; * for all columns whose type Spark does not have

Spark tells a data source in Python neither the columns nor, unless a setting of the session permits it, the filters of
a query. So all columns and rows of the table are read without `columns` and `where`, even for count().

Types are exact. A type that Spark does not have (intervals, ranges, numeric without precision, …) is an error that
names the columns, unless they are read as text. A value that its type cannot hold (infinity in a date, NaN in
numeric(10,2)) is an error as well. COPY sends text, which is split in C and parsed by pyarrow. No error contains a
value of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from anyio.from_thread import start_blocking_portal
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from subscriber.changelog.row_columns import split_lines
from subscriber.connection.connect import open_session
from subscriber.connection.session import Session
from subscriber.connection.settings import EXACT_TEXT
from subscriber.display import json_text, near_word
from subscriber.errors import ServerError, SubscriberError, ValueUnsupported
from subscriber.protocol.messages import RelationColumn
from subscriber.publisher.partitions import PART_BYTES, TablePartition, partition_table
from subscriber.quoting import identifier, literal
from subscriber.spark.sources.arrow_types import arrow_array, arrow_type, cells_array
from subscriber.spark.sources.options import check_options
from subscriber.spark.tasks import spare_collector, sparing_collector
from subscriber.sqlstate import (
    FEATURE_NOT_SUPPORTED,
    INVALID_PARAMETER_VALUE,
    NUMERIC_VALUE_OUT_OF_RANGE,
    UNDEFINED_COLUMN,
    UNDEFINED_OBJECT,
    UNDEFINED_TABLE,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPTIONS = ("conninfo", "table", "snapshot", "partitions", "by", "columns", "where", "text")
APPLICATION_NAME = "subscriber pgsnapshot"
BATCH = 4 * 1024 * 1024  # bytes of text in one Arrow batch
COUNTED = 1024 * 1024  # rows without columns in one Arrow batch
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# Types that are read as they are, because Spark has no other type for them.
_TEXTS = {18, 19, 25, 114, 142, 1042, 1043, 2950, 3802}  # char, name, text, json, xml, bpchar, varchar, uuid, jsonb
_INTEGERS = {20, 21, 23}
_COLUMNS = """
SELECT a.attname, coalesce(base.oid, t.oid), CASE WHEN base.oid IS NULL THEN a.atttypmod ELSE t.typtypmod END,
       coalesce(base.typtype, t.typtype)
  FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
  LEFT JOIN pg_catalog.pg_type base ON base.oid = t.typbasetype
 WHERE a.attrelid = {relid} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_TABLES = """
SELECT pg_catalog.format('%I.%I', n.nspname, c.relname)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
"""


def register(spark: SparkSession) -> None:
    """Register the data source `pgsnapshot` with a session.

    Args:
        spark: the session.
    """
    from subscriber.spark.session import ship

    ship(spark)
    spark.dataSource.register(PgSnapshot)


@contextmanager
def exported_snapshot(conninfo: str) -> Iterator[dict[str, str]]:
    """Export a snapshot of a server that is valid until the end of the block.

    Args:
        conninfo: the server's connection string.

    Returns:
        The options `conninfo` and `snapshot` of the data source.

    Raises:
        SubscriberError: the server cannot be reached, or refuses.
    """
    with start_blocking_portal() as portal:
        session = portal.call(_open, conninfo)
        try:
            portal.call(session.query, _BEGIN)
            ((name,),) = portal.call(session.rows, "SELECT pg_catalog.pg_export_snapshot()")
            yield {"conninfo": conninfo, "snapshot": name or ""}
        finally:
            portal.call(session.abort)


async def _open(conninfo: str) -> Session:
    return await open_session(
        conninfo, application_name=APPLICATION_NAME, settings={**EXACT_TEXT, "client_encoding": "UTF8"}
    )


@dataclass
class Range(InputPartition):
    """The rows of one partition, and their columns."""

    select: str
    schema: pa.Schema

    def __repr__(self) -> str:
        return "Range()"


class PgSnapshot(DataSource):
    """The data source, see the head of the module."""

    @classmethod
    def name(cls) -> str:
        return "pgsnapshot"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        for name in ("conninfo", "table"):
            if name not in options:
                raise SubscriberError(f'pgsnapshot needs the option "{name}"', sqlstate=INVALID_PARAMETER_VALUE)
        self._table = SnapshotTable(dict(options))

    def schema(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        spare_collector()
        schema: StructType = from_arrow_schema(self._table.read_schema())
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return _SnapshotReader(self._table)


class _SnapshotReader(DataSourceReader):
    def __init__(self, table: SnapshotTable) -> None:
        self._table = table

    def partitions(self) -> Sequence[InputPartition]:
        spare_collector()
        return self._table.partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Range)
        return sparing_collector(self._table.read(partition))


@dataclass(slots=True)
class SnapshotColumn:
    """A column of the table, and its Arrow type."""

    name: str
    kind: pa.DataType


class SnapshotTable:
    """The table that the options name, described on the driver and read on executors. Holds no connection."""

    def __init__(self, options: Mapping[str, str]) -> None:
        check_options("pgsnapshot", options, OPTIONS)
        self._options = options
        self._conninfo = options["conninfo"]
        self._snapshot = options.get("snapshot")
        self._text = _names(options.get("text", ""))
        self._wanted = _names(options["columns"]) if "columns" in options else None
        self._where = options.get("where") or None

    def read_schema(self) -> pa.Schema:
        """Return the columns with their types.

        Raises SubscriberError if the table is missing, or a type is not supported.
        """
        with start_blocking_portal() as portal:
            columns: list[SnapshotColumn] = portal.call(self._in_session, self._columns)
        return _schema(columns)

    def partitions(self) -> list[Range]:
        with start_blocking_portal() as portal:
            ranges: list[Range] = portal.call(self._in_session, self._plan)
        return ranges

    def read(self, partition: Range) -> Iterator[pa.RecordBatch]:
        """Yield the partition's rows in batches."""
        with start_blocking_portal() as portal:
            batches = self._batches(partition)
            try:
                while (batch := portal.call(anext, batches, None)) is not None:
                    yield batch
            finally:
                portal.call(batches.aclose)

    async def _in_session(self, ask: Any) -> Any:
        session = await _open(self._conninfo)
        try:
            await self._begin(session)
            name = self._options["table"]
            ((relid,),) = await session.rows(f"SELECT pg_catalog.to_regclass({literal(name)})::oid")
            if relid is None:
                tables = [table or "" for (table,) in await session.rows(_TABLES)]
                raise SubscriberError(
                    f'relation "{name}" does not exist',
                    hint=near_word(name, tables)
                    or "Write it as schema.table, with the quotes of SQL if it needs them.",
                    sqlstate=UNDEFINED_TABLE,
                )
            return await ask(session, int(relid))
        finally:
            session.abort()

    async def _begin(self, session: Session) -> None:
        if not self._snapshot:
            await session.query(_BEGIN)
            return
        try:
            await session.query(f"{_BEGIN}; SET TRANSACTION SNAPSHOT {literal(self._snapshot)}")
        except ServerError as error:
            if error.sqlstate in (INVALID_PARAMETER_VALUE, UNDEFINED_OBJECT):
                raise SubscriberError(
                    f'the server has no snapshot "{self._snapshot}"',
                    detail="Spark reads rows when a result is needed. A snapshot ends with the block of "
                    "exported_snapshot().",
                    hint="Use the data frame within the block, or leave out the option snapshot.",
                    sqlstate=error.sqlstate,
                ) from None
            raise

    async def _columns(self, session: Session, relid: int) -> list[SnapshotColumn]:
        rows = await session.rows(_COLUMNS.format(relid=relid))
        columns = [
            self._column(name or "", int(oid or 0), int(modifier or -1), typtype or "")
            for name, oid, modifier, typtype in self._chosen(rows)
        ]
        refused = [column.name for column in columns if column.kind is None]
        if refused:
            table = self._options["table"]
            names = json_text(",".join(refused))
            raise SubscriberError(
                f"Spark has no type for column{'s' * (len(refused) > 1)} {', '.join(refused)} of {table}",
                hint=f'Read them as text: .option("text", {names}), or "*" for all such columns.',
                sqlstate=FEATURE_NOT_SUPPORTED,
            )
        return columns

    def _chosen(self, rows: list[Any]) -> list[Any]:
        """Return the rows of the catalog for the wanted columns, in the order of the table."""
        names = [row[0] for row in rows]
        for name in self._wanted or ():
            if name not in names:
                raise SubscriberError(
                    f'{self._options["table"]} has no column "{name}"',
                    hint=near_word(name, names) or f"Its columns are {', '.join(names)}.",
                    sqlstate=UNDEFINED_COLUMN,
                )
        return [row for row in rows if self._wanted is None or row[0] in self._wanted]

    def _column(self, name: str, oid: int, modifier: int, typtype: str) -> SnapshotColumn:
        kind = arrow_type(RelationColumn(False, name, oid, modifier))
        if name in self._text:
            kind = pa.string()
        elif kind == pa.string() and oid not in _TEXTS and typtype != "e" and "*" not in self._text:
            kind = None
        return SnapshotColumn(name, kind)

    async def _plan(self, session: Session, relid: int) -> list[Range]:
        columns = await self._columns(session, relid)
        selects = await self._selects(session, relid, columns)
        return [Range(select, _schema(columns)) for select in selects]

    async def _selects(self, session: Session, relid: int, columns: Sequence[SnapshotColumn]) -> list[str]:
        selected = ", ".join(identifier(column.name) for column in columns) or "count(*)"
        number = int(self._options.get("partitions", "0"))
        by = self._options.get("by", "ctid")
        whole = f"SELECT {selected} FROM {self._options['table']}"
        if not self._snapshot or number == 1:
            return [_filtered(whole, self._where)]
        if by != "ctid":
            ranges = await self._ranges(session, relid, by, max(number, 2))
            return [_filtered(whole, condition, self._where) for condition in ranges]
        size = PART_BYTES
        if number:
            parts = await partition_table(session, relid, PART_BYTES)
            size = max(1, await _size(session, parts) // number)
        parts = await partition_table(session, relid, size)
        condition = None if self._where is None else f"({self._where})"
        return [part.select(selected, condition=condition) for part in parts] or [_filtered(whole, self._where)]

    async def _ranges(self, session: Session, relid: int, by: str, number: int) -> list[str | None]:
        """Return conditions that divide the table by an integer column. None: all rows."""
        rows = await session.rows(_COLUMNS.format(relid=relid))
        if not any(name == by and int(oid or 0) in _INTEGERS for name, oid, _, _ in rows):
            raise SubscriberError(
                f'"{by}" is not an integer column of {self._options["table"]}', sqlstate=INVALID_PARAMETER_VALUE
            )
        name, table = identifier(by), self._options["table"]
        ((low, high),) = await session.rows(f"SELECT min({name}), max({name}) FROM {table}")
        if low is None or high is None:
            return [None]
        first, width = int(low), int(high) - int(low) + 1
        edges = [first + width * i // number for i in range(number + 1)]
        return [*(f"{name} >= {a} AND {name} < {b}" for a, b in itertools.pairwise(edges) if a < b), f"{name} IS NULL"]

    async def _batches(self, partition: Range) -> AsyncGenerator[pa.RecordBatch, None]:
        session = await _open(self._conninfo)
        try:
            await self._begin(session)
            if not partition.schema.names:
                ((number,),) = await session.rows(partition.select)
                for batch in rows_without_columns(int(number or 0)):
                    yield batch
                return
            waiting: list[bytes] = []
            size = 0
            async for rows in session.copy_out(f"COPY ({partition.select}) TO STDOUT"):
                waiting += rows
                size += sum(map(len, rows))
                if size >= BATCH:
                    yield to_arrow(b"".join(waiting), partition.schema)
                    waiting, size = [], 0
            if waiting:
                yield to_arrow(b"".join(waiting), partition.schema)
        finally:
            session.abort()


def _names(text: str) -> set[str]:
    return {name.strip() for name in text.split(",")} if text else set()


def _schema(columns: Sequence[SnapshotColumn]) -> pa.Schema:
    return pa.schema([(column.name, column.kind) for column in columns])


def _filtered(select: str, *conditions: str | None) -> str:
    conditions_joined = " AND ".join(f"({condition})" for condition in conditions if condition is not None)
    return f"{select} WHERE {conditions_joined}" if conditions_joined else select


async def _size(session: Session, parts: Sequence[TablePartition]) -> int:
    """Return the size of the parts' heaps in bytes."""
    heaps = ", ".join(literal(heap) for heap in {part.heap for part in parts})
    rows = await session.rows(
        f"SELECT sum(pg_catalog.pg_relation_size(h::pg_catalog.regclass)) FROM unnest(ARRAY[{heaps}]) h"
    )
    return int(rows[0][0] or 0)


def rows_without_columns(number: int) -> Iterator[pa.RecordBatch]:
    """Yield batches that have `number` rows, and no columns."""
    for first in range(0, number, COUNTED):
        rows = pa.Array.from_buffers(pa.struct([]), min(COUNTED, number - first), [None], children=[])
        yield pa.RecordBatch.from_struct_array(rows)


def to_arrow(text: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Convert whole rows of COPY's text format to a batch of `schema`, which has columns.

    Raises:
        SubscriberError: a value does not fit the type of its column. The message names the column.
    """
    number = text.count(b"\n")  # in a value it is escaped
    columns = zip(split_lines(text, len(schema)), schema, strict=True)
    try:
        arrays = [arrow_array(cells_array(number, cells), field.type, field.name) for cells, field in columns]
    except ValueUnsupported as error:
        raise SubscriberError(
            f'a value of column "{error.column}" does not fit Spark\'s type for it',
            hint=f'Read the column as text: .option("text", {json_text(error.column or "")})',
            sqlstate=NUMERIC_VALUE_OUT_OF_RANGE,
        ) from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
