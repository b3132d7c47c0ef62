"""Copy-on-write of a Delta table's files, by executors. The driver plans the tasks, and commits their files (delta.py).

    1. A FileTask for each group of files that may have a staged row's key. It finds the rows that the batch changes. If
       there are any, it writes the files' rows again as one file, without the deleted rows and with the changed ones.
    2. An InsertTask for the staged rows that no file has. It writes a new file.

**Invariants.**

- A file has a staged key only if the key is within the file's smallest and largest key. So a batch reads and writes
  the files of the keys that it changes, whatever the size of the table.
- A task holds the staged rows' keys and one row group in memory, never a table.
- A task that is repeated writes another file. Only files that a task has reported are committed.
- Small files that a batch does not change are written again together when there are many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.changelog.storage import Location, local_file, stored_file
from subscriber.errors import ApplyError
from subscriber.spark.lake.stage import OP, has_ranges, unchanged, value

_STATISTICS = 32  # columns, as Delta's own writers do
_LONGEST = 64  # characters of a text in the statistics


class FileLimits(NamedTuple):
    """How a table is divided into files."""

    rows: int = 65_536  # in a row group, and at a time in memory
    target: int = 64 * 1024 * 1024  # bytes; files are written again together up to this size
    small: int = 16 * 1024 * 1024  # bytes below which files are written again together
    many: int = 8  # small files of a table, from which on that is done


LIMITS = FileLimits()


class DataFile(NamedTuple):
    """A file of a Delta table, with the smallest and largest value of the first column of the key; None: unknown."""

    path: str  # in the directory of the table
    size: int
    low: Any
    high: Any

    def may_have(self, ranges: Sequence[tuple[Any, Any]] | None) -> bool:
        """Return True if a key of one of the ranges may be in the file. None: the ranges are not known."""
        if ranges is None or self.low is None or self.high is None:
            return True
        # Delta's writers cut times off after the milliseconds.
        top = self.high + timedelta(milliseconds=1) if isinstance(self.high, datetime) else self.high
        return any(low <= top and high >= self.low for low, high in ranges)


class NewFile(NamedTuple):
    """A file that a task has written, with its statistics in Delta's JSON."""

    path: str
    size: int
    statistics: str


@dataclass(frozen=True, slots=True)
class MergedTable:
    """A table that a batch changes: what all of its tasks need."""

    directory: Location
    schema: pa.Schema
    names: tuple[str, ...]  # of the columns, which the staged rows have by number
    key: tuple[int, ...]  # indexes of `names`; empty for a table without a key
    staged: tuple[Location, ...]
    limits: FileLimits = LIMITS

    @contextmanager
    def opened(self) -> Iterator[list[pa.Table]]:
        """Open the staged rows. They are mapped, not read."""
        with ExitStack() as stack:
            files = [stack.enter_context(local_file(path)) for path in self.staged]
            yield [pa.ipc.open_file(stack.enter_context(pa.memory_map(str(file)))).read_all() for file in files]

    def rows(self, staged: pa.Table) -> pa.Table:
        """Return staged rows with the columns of the table."""
        rows = pa.table([staged[value(index)] for index in range(len(self.names))], names=list(self.names))
        return rows.select(self.schema.names).cast(self.schema)


def file_tasks(
    table: MergedTable, files: Sequence[DataFile], ranges: Sequence[tuple[Any, Any]] | None
) -> list[FileTask]:
    """Return the tasks for the files of a table that a batch may change, and for many small files.

    Args:
        table: the table.
        files: its files.
        ranges: ranges of the first column of the key, with all staged keys; None: not known.
    """
    limits = table.limits
    small = sorted(
        (file for file in files if file.size < limits.small), key=lambda file: (file.low is None, file.low, file)
    )
    if len(small) < limits.many:
        small = []
    tasks, group = [], list[DataFile]()
    for file in small:
        if group and sum(one.size for one in group) + file.size > limits.target:
            tasks.append(FileTask(table, tuple(group), True))
            group = []
        group.append(file)
    if group:
        tasks.append(FileTask(table, tuple(group), True))
    if table.key:
        tasks += [FileTask(table, (file,), False) for file in files if file not in small and file.may_have(ranges)]
    return tasks


class Files(NamedTuple):
    """The result of a FileTask.

    `removed` are the files that `added` replaces. `found` has, for each staged file, the numbers of the rows that
    the files have.
    """

    removed: tuple[DataFile, ...]
    added: NewFile | None
    found: list[list[int]]


@dataclass(frozen=True, slots=True)
class FileTask:
    """Applies the staged rows to a group of files.

    `whole`: the files are written again even if no row of them changes.
    """

    table: MergedTable
    files: tuple[DataFile, ...]
    whole: bool

    def __call__(self) -> Files:
        """Run the task, on an executor."""
        with ExitStack() as stack:
            staged = StagedRows.of(self.table, stack.enter_context(self.table.opened()))
            opened = []
            for file in self.files:
                local = stack.enter_context(local_file(self.table.directory / file.path))
                opened.append(stack.enter_context(pq.ParquetFile(local, memory_map=True)))
            places = [staged.places(self.table, file) for file in opened]
            chosen = [number for number, place in enumerate(places) if self.whole or place.null_count < len(place)]
            found = staged.numbers(places)
            if not chosen:
                return Files((), None, found)
            batches = (
                batch for number in chosen for batch in staged.applied(self.table, opened[number], places[number])
            )
            added = write_file(self.table, batches)
            return Files(tuple(self.files[number] for number in chosen), added, found)


class StagedRows(NamedTuple):
    """The staged rows of a table: their keys, and the files that they are in."""

    parts: list[pa.Table]
    rows: pa.Table
    keys: pa.Table  # the key's columns k0, k1, … and the number of the row

    @classmethod
    def of(cls, table: MergedTable, parts: list[pa.Table]) -> StagedRows:
        """Read the keys of the staged rows."""
        rows = pa.concat_tables(parts, promote_options="default")
        names = [f"k{place}" for place in range(len(table.key))]
        keys = [rows[value(index)].cast(table.schema.field(table.names[index]).type) for index in table.key]
        return cls(parts, rows, pa.table([*keys, pa.array(range(len(rows)), pa.int64())], names=[*names, "number"]))

    def places(self, table: MergedTable, file: pq.ParquetFile) -> pa.Array:
        """Return, for each row of a file, the number of the staged row with its key, or null."""
        names = [table.names[index] for index in table.key]
        if not names:
            return pa.nulls(file.metadata.num_rows, pa.int64())
        found = aligned_columns(read_columns(file, names), table.schema, names)
        if len(names) == 1:
            column = self.keys["k0"].combine_chunks()
            return pc.index_in(found[0], value_set=column).cast(pa.int64())
        rows = pa.table(
            [*found, pa.array(range(len(found[0])), pa.int64())], names=[*self.keys.column_names[:-1], "row"]
        )
        joined = rows.join(self.keys, self.keys.column_names[:-1], join_type="left outer").sort_by("row")
        return joined["number"].combine_chunks()

    def numbers(self, places: Sequence[pa.Array]) -> list[list[int]]:
        """Return the numbers of the rows that were found, by staged file and within it."""
        all_found = pa.chunked_array([place.drop_null() for place in places], pa.int64())
        found = pc.filter(all_found, pc.not_equal(self.rows[OP].take(all_found), "d")).sort().to_pylist()
        result, first = [], 0
        for part in self.parts:
            end = first + len(part)
            result.append([number - first for number in found if first <= number < end])
            first = end
        return result

    def applied(self, table: MergedTable, file: pq.ParquetFile, places: pa.Array) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file with the changes."""
        first = 0
        for rows in file.iter_batches(table.limits.rows):
            old = aligned(rows, table.schema)
            place = places.slice(first, len(old))
            first += len(old)
            if place.null_count == len(place):
                yield old
                continue
            new = self.rows.take(place)  # null where the row does not change
            is_kept = pc.is_null(place)
            columns = []
            for name in table.schema.names:
                index = table.names.index(name)
                kept = is_kept
                if unchanged(index) in new.column_names:
                    kept = pc.or_(kept, pc.fill_null(new[unchanged(index)], False))
                columns.append(pc.if_else(kept, old[name], new[value(index)].cast(old[name].type)))
            is_left = pc.fill_null(pc.not_equal(new[OP], "d"), True)
            yield from pa.table(columns, schema=table.schema).filter(is_left).combine_chunks().to_batches()


@dataclass(frozen=True, slots=True)
class InsertTask:
    """Writes staged rows to a new file. `found` has the numbers of the rows that are in other files, by staged file."""

    table: MergedTable
    found: tuple[frozenset[int], ...]

    def __call__(self) -> NewFile | None:
        """Run the task, on an executor."""
        with self.table.opened() as parts:
            return write_file(self.table, self._batches(parts))

    def _batches(self, parts: list[pa.Table]) -> Iterator[pa.RecordBatch]:
        for part, found in zip(parts, self.found, strict=True):
            wanted = pc.is_in(part[OP], pa.array(["u", "m", "+"]))
            if found:
                numbers = pa.array(range(len(part)), pa.int64())
                wanted = pc.and_not(wanted, pc.is_in(numbers, pa.array(sorted(found), pa.int64())))
            rows = part.filter(wanted)
            for index in range(len(self.table.names)):
                if unchanged(index) in rows.column_names and pc.any(rows[unchanged(index)]).as_py():
                    raise ApplyError("a row was changed that is not in the lake")
            yield from self.table.rows(rows).to_batches(self.table.limits.rows)


def run(task: FileTask | InsertTask) -> Files | NewFile | ApplyError | None:
    """Run a task on an executor. Returns an error that another attempt would not correct."""
    try:
        return task()
    except ApplyError as error:
        return error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, FileNotFoundError) as error:
        return ApplyError(f"its Delta table cannot be written: {error}")


def write_file(table: MergedTable, batches: Iterator[pa.RecordBatch]) -> NewFile | None:
    """Write rows to a new file of the table. Returns None if there are no rows."""
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return None
    name = f"part-00000-{uuid4()}-c000.zstd.parquet"
    path = table.directory / name
    with stored_file(path) as local, pq.ParquetWriter(local, table.schema, compression="zstd") as writer:
        writer.write_batch(first)
        for batch in batches:
            if batch.num_rows:
                writer.write_batch(batch)
        writer.close()
        size, statistics = local.stat().st_size, statistics_of(pq.read_metadata(local), table.schema)
    return NewFile(name, size, json.dumps(statistics))


def aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of a file with the columns of the table. A file that is older than a column does not have it."""
    return pa.RecordBatch.from_arrays(aligned_columns(batch, schema, schema.names), schema=schema)


def aligned_columns(rows: pa.RecordBatch | pa.Table, schema: pa.Schema, names: Sequence[str]) -> list[pa.Array]:
    """Return columns of a file, as the table has them."""
    found = []
    for name in names:
        kind = schema.field(name).type
        found.append(rows[name].cast(kind) if name in rows.schema.names else pa.nulls(len(rows), kind))
    return found


def read_columns(file: pq.ParquetFile, names: Sequence[str]) -> pa.Table:
    """Read columns of a file, by their names as they are: a dot has no meaning in them."""
    return file.read(columns=[name for name in names if name in file.schema_arrow.names])


def statistics_of(metadata: pq.FileMetaData, schema: pa.Schema) -> Mapping[str, object]:
    """Return Delta's statistics of a file: the number of rows, and the smallest and largest values of columns."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index, field in enumerate(schema):
        groups = [metadata.row_group(number).column(index).statistics for number in range(metadata.num_row_groups)]
        if index >= _STATISTICS or not all(group is not None and group.has_null_count for group in groups):
            continue
        nulls[field.name] = sum(group.null_count for group in groups)
        ranges = [(group.min, group.max) for group in groups if group.has_min_max]
        if has_ranges(field.type) and len(ranges) == sum(group.num_values > 0 for group in groups) and ranges:
            smallest, largest = min(low for low, _ in ranges), max(high for _, high in ranges)
            if not isinstance(largest, str) or len(largest) <= _LONGEST:
                low[field.name], high[field.name] = _in_json(smallest), _in_json(largest)
    return {"numRecords": metadata.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _in_json(found: Any) -> Any:
    if isinstance(found, datetime):
        return found.strftime("%Y-%m-%dT%H:%M:%S.%f") + ("Z" if found.tzinfo is not None else "")
    return found.isoformat() if isinstance(found, date) else found
