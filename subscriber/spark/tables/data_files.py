"""The Parquet files of a Delta or Iceberg table: read, written, and what is known of their contents.

A column of a file is found by the number that the format gave it, where the schema of the table has numbers (Iceberg),
and otherwise by its name (Delta). The columns of Delta's partitions are in the names of folders, not in the files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.changelog.storage import Location, OpenFile, local_file, open_file, stored_file
from subscriber.settings import DEFAULTS, Settings
from subscriber.spark.tables.cluster import Cluster, clustered
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.partitions import (
    PartitionLimits,
    Partitions,
    PartitionValues,
    by_partition,
    hive_folder,
)
from subscriber.spark.tables.position_deletes import NewDeletes, left_rows, read_positions, write_positions
from subscriber.spark.tables.stage import has_ranges

NUMBER = b"PARQUET:field_id"  # in the metadata of a column, which pyarrow writes to and reads from files


class FileLimits(NamedTuple):
    """The sizes by which a table is divided into files."""

    rows: int = 65_536  # in a row group, and at a time in memory
    memory: int = 16 * 1024 * 1024  # bytes of Arrow arrays, likewise
    largest: int = 96 * 1024 * 1024  # bytes of a file, from which on rows are written to the next one
    target: int = 64 * 1024 * 1024  # bytes; files are written again together up to this size
    small: int = 16 * 1024 * 1024  # bytes below which files are written again together
    many: int = 8  # small files of a table, from which on that is done
    rewritten: int = DEFAULTS.lake_rewrite_size  # bytes of a file below which a change of a row writes it again
    deleted: float = DEFAULTS.lake_deleted_percent / 100  # rows of a larger file beyond which it is written again
    partitions: int = 10_000  # of the rows that a task writes

    @classmethod
    def of(cls, settings: Settings) -> FileLimits:
        """Return the limits for a lake."""
        return cls(rewritten=settings.lake_rewrite_size, deleted=settings.lake_deleted_percent / 100)

    @property
    def in_order(self) -> FileLimits:
        """Return the limits for rows in the order of cluster columns: smaller row groups have narrower ranges."""
        return self._replace(rows=max(1, self.rows // 4))

    @property
    def by_partition(self) -> PartitionLimits:
        """Return how rows are divided by partitions."""
        return PartitionLimits(4 * self.memory, 2 * self.largest, self.partitions)


LIMITS = FileLimits()

_STATISTICS = 32  # columns, as Delta's own writers do
_LONGEST = 64  # characters of a text in the statistics


class DataFile(NamedTuple):
    """A file of a table, with the smallest and largest value of the first column of the key; None: unknown.

    `deletes` are the files with the positions of its deleted rows. `cluster` is the smallest value of the first cluster
    column; None: there is none, or it is unknown.
    """

    path: str  # in the directory of the table, as `deletes`
    size: int
    low: Any
    high: Any
    deletes: tuple[str, ...] = ()
    partition: PartitionValues = ()  # as the format has them
    cluster: Any = None

    def may_have(self, ranges: Sequence[tuple[Any, Any]] | None) -> bool:
        """Return True if a key of one of the ranges may be in the file. None: the ranges are not known."""
        if ranges is None or self.low is None or self.high is None:
            return True
        # Delta's writers cut times off after the milliseconds.
        top = self.high + timedelta(milliseconds=1) if isinstance(self.high, datetime) else self.high
        return any(low <= top and high >= self.low for low, high in ranges)


class ColumnStatistics(NamedTuple):
    """The statistics of a column in a file. `low` and `high` are None if smallest and largest value are unknown."""

    nulls: int
    low: Any = None
    high: Any = None


class NewFile(NamedTuple):
    """A file that a task has written. `columns` has its first columns, by name."""

    path: str  # in the directory of the table
    size: int
    rows: int
    columns: Mapping[str, ColumnStatistics]
    partition: PartitionValues = ()


class DataFolder(NamedTuple):
    """The folder of a table's files, and the columns that they have.

    `address` is the location of the directory as the metadata of the table have it, with a slash at the end. None: rows
    of a file cannot be deleted by their positions.
    """

    directory: Location  # of the table
    prefix: str  # of the names of new files: empty, or a folder in the directory
    schema: pa.Schema
    address: str | None = None
    layout: Layout = NO_LAYOUT
    is_hive: bool = False  # the columns of partitions are in the names of folders, not in files

    @property
    def partitions(self) -> Partitions:
        """Return the partitions of the table."""
        return self.layout.partitions

    @property
    def cluster(self) -> Cluster:
        """Return the cluster columns of the table."""
        return self.layout.cluster

    @property
    def _file_schema(self) -> pa.Schema:
        """Return the columns of new files."""
        if not self.is_hive:
            return self.schema
        elsewhere = {partition.column for partition in self.partitions}
        return pa.schema([field for field in self.schema if field.name not in elsewhere])

    def aligned(self, batch: pa.RecordBatch, file: DataFile) -> pa.RecordBatch:
        """Return rows of a file with the columns of the table. A file that is older than a column does not have it."""
        return pa.RecordBatch.from_arrays(self.columns(batch, file, self.schema.names), schema=self.schema)

    def columns(self, rows: pa.RecordBatch | pa.Table, file: DataFile, names: Sequence[str]) -> list[pa.Array]:
        """Return columns of rows of a file, as the table has them."""
        known = {partition.column: value for partition, value in zip(self.partitions, file.partition, strict=True)}
        return aligned_columns(rows, self.schema, names, known if self.is_hive else {})

    def rows(self, files: Iterable[DataFile]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of files that are not deleted."""
        for file in files:
            with opened_file(self.directory / file.path) as opened:
                left = left_rows(opened.metadata.num_rows, self.deleted(file)) if file.deletes else None
                first = 0
                for batch in opened.iter_batches(rows_in_memory(opened, LIMITS)):
                    rows = self.aligned(batch, file)
                    yield rows if left is None else rows.filter(left.slice(first, len(batch)))
                    first += len(batch)

    def deleted(self, file: DataFile) -> pa.Array:
        """Return the positions of the deleted rows of a file."""
        return read_positions(self.directory, file.deletes)

    def delete(self, file: DataFile, positions: pa.Array) -> NewDeletes:
        """Write the positions of all deleted rows of a file to a new file."""
        return write_positions(self.directory, self.prefix, file.path, f"{self.address}{file.path}", positions)

    def write(self, batches: Iterable[pa.RecordBatch], limits: FileLimits = LIMITS) -> list[NewFile]:
        """Write rows to new files. Returns none if there are no rows."""
        if self.cluster:
            batches, limits = clustered(batches, self.cluster, 2 * limits.memory), limits.in_order
        if not self.partitions:
            return self._write_partition((), batches, limits)
        # The rows of a partition keep their order.
        divided = by_partition(batches, self.partitions, limits.by_partition)
        return [file for values, rows in divided for file in self._write_partition(values, rows, limits)]

    def _write_partition(
        self, values: PartitionValues, batches: Iterable[pa.RecordBatch], limits: FileLimits
    ) -> list[NewFile]:
        schema = self._file_schema
        groups = _row_groups((rows.select(schema.names) for rows in batches), schema, limits)
        return [self._write_file(values, schema, first, groups, limits) for first in groups]

    def _write_file(
        self, values: PartitionValues, schema: pa.Schema, first: pa.Table, rest: Iterator[pa.Table], limits: FileLimits
    ) -> NewFile:
        """Write row groups to a file until it is large enough, or none is left."""
        folder = hive_folder(self.partitions, values) if self.is_hive else ""
        name = f"{self.prefix}{folder}part-00000-{uuid4()}-c000.zstd.parquet"
        with (
            stored_file(self.directory / name) as local,
            pq.ParquetWriter(local, schema, compression="zstd") as writer,
        ):
            writer.write_table(first, len(first))
            while local.stat().st_size < limits.largest and (group := next(rest, None)) is not None:
                writer.write_table(group, len(group))
            writer.close()
            metadata = pq.read_metadata(local)
            return NewFile(name, local.stat().st_size, metadata.num_rows, _statistics(metadata, schema), values)


class _Ranges(io.RawIOBase):
    """A file of which single ranges are read, for a library that reads files of Python."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file = file
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size()}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._file.size() - self._place if size < 0 else size, self._place)
        self._place += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def opened_file(path: Location, *, partly: bool = False) -> Iterator[pq.ParquetFile]:
    """Open a file. `partly`: few of its columns or row groups are read, so that an object is not fetched whole."""
    if partly and not isinstance(path, Path):
        with closing(_Ranges(open_file(path))) as ranges, pq.ParquetFile(ranges) as opened:
            yield opened
        return
    with local_file(path) as local, pq.ParquetFile(local, memory_map=True) as opened:
        yield opened


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema, limits: FileLimits) -> Iterator[pa.Table]:
    """Yield rows in groups as large as the limits allow."""
    run, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        first = 0
        while first < len(batch):
            fitting = _rows_within(limits, len(batch), batch.nbytes)
            run.append(batch.slice(first, max(1, fitting - rows)))
            rows, size, first = rows + len(run[-1]), size + run[-1].nbytes, first + len(run[-1])
            if rows >= _rows_within(limits, rows, size):
                yield pa.Table.from_batches(run, schema)
                run, rows, size = [], 0, 0
    if run:
        yield pa.Table.from_batches(run, schema)


def batches_with(
    file: pq.ParquetFile, wanted: pa.Array | pa.ChunkedArray, limits: FileLimits
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a file, without row groups that have no wanted row.

    Args:
        file: the file.
        wanted: for each row of the file, whether it is wanted.
        limits: how many rows to read at a time.

    Yields:
        The number of the first row of a batch, and the batch.
    """
    first, size = 0, rows_in_memory(file, limits)
    for number in range(file.metadata.num_row_groups):
        end = first + file.metadata.row_group(number).num_rows
        if pc.any(wanted.slice(first, end - first)).as_py():
            for batch in file.iter_batches(size, row_groups=[number]):
                yield first, batch
                first += len(batch)
        first = end


def rows_in_memory(file: pq.ParquetFile, limits: FileLimits) -> int:
    """Return how many rows of a file to read at a time."""
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    return _rows_within(limits, file.metadata.num_rows, sum(group.total_byte_size for group in groups))


def _rows_within(limits: FileLimits, rows: int, size: int) -> int:
    """Return how many rows fit, if `rows` rows have `size` bytes."""
    return max(1, min(limits.rows, rows * limits.memory // max(size, 1)))


def aligned_columns(
    rows: pa.RecordBatch | pa.Table, schema: pa.Schema, names: Sequence[str], known: Mapping[str, Any]
) -> list[pa.Array]:
    """Return columns of a file, as the table has them. `known` are values that all rows have, by column."""
    aligned = []
    for field in map(schema.field, names):
        name = _name_in(rows.schema, field)
        if name is None or field.name in known:
            same = pa.repeat(pa.scalar(known.get(field.name), field.type), len(rows))
            aligned.append(same if isinstance(rows, pa.RecordBatch) else pa.chunked_array([same]))
        else:
            aligned.append(rows[name].cast(field.type))
    return aligned


def read_columns(file: pq.ParquetFile, schema: pa.Schema, names: Sequence[str]) -> pa.Table:
    """Read columns of the table from a file, by their names as they are: a dot has no meaning in them."""
    present = (_name_in(file.schema_arrow, schema.field(name)) for name in names)
    return file.read(columns=[name for name in present if name is not None])


def _name_in(file: pa.Schema, field: pa.Field) -> str | None:
    """Return the name that a column of the table has in a file. None: the file does not have the column."""
    number = (field.metadata or {}).get(NUMBER)
    if number is None:
        return field.name if field.name in file.names else None
    return next(
        (stored_field.name for stored_field in file if (stored_field.metadata or {}).get(NUMBER) == number), None
    )


def _leaves(kind: pa.DataType) -> int:
    """Return how many columns of a Parquet file a column takes."""
    if not pa.types.is_nested(kind):
        return 1
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))


def _statistics(metadata: pq.FileMetaData, schema: pa.Schema) -> dict[str, ColumnStatistics]:
    statistics = {}
    first = 0  # the file's number of the column
    for index, field in enumerate(schema):
        leaf, first = first, first + _leaves(field.type)
        if pa.types.is_nested(field.type):  # whose statistics are those of elements and fields
            continue
        groups = [metadata.row_group(number).column(leaf).statistics for number in range(metadata.num_row_groups)]
        if index >= _STATISTICS or not all(group is not None and group.has_null_count for group in groups):
            continue
        statistics[field.name] = ColumnStatistics(sum(group.null_count for group in groups))
        ranges = [(group.min, group.max) for group in groups if group.has_min_max]
        if has_ranges(field.type) and len(ranges) == sum(group.num_values > 0 for group in groups) and ranges:
            smallest, largest = min(low for low, _ in ranges), max(high for _, high in ranges)
            if not isinstance(largest, str) or len(largest) <= _LONGEST:
                statistics[field.name] = statistics[field.name]._replace(low=smallest, high=largest)
    return statistics
