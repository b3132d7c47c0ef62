"""The merge of a batch into a table's files, by executors. The driver plans the tasks, and commits (table_merge.py).

    1. A FileTask for each group of files that may have a staged row's key. It finds the rows that the batch changes. If
       there are any, it writes the files' rows again as one file, without the deleted rows and with the changed ones.
       Or it writes the positions of the changed rows of a file only (position_deletes.py).
    2. An InsertTask for the staged rows that no file has, or whose former versions are deleted by their positions. It
       writes a new file.

A file is written again if it is small, or if it would have too many deleted rows (`FileLimits`). Otherwise positions
are written, if the format of the table has them. For these files a task reads the columns of the key only, and all
columns of the row groups with rows of which the batch has not all values: their new versions are carried to the
InsertTask in a staged file.

**Invariants.**

- A file has a staged key only if the key is within the file's smallest and largest key. So a batch reads and writes
  the files of the keys that it changes, whatever the size of the table.
- A row whose position is deleted is never found, read or written again.
- A task holds the staged rows' keys and one row group in memory, never a table.
- A task that is repeated writes another file. Only files that a task has reported are committed.
- Small files that a batch does not change are written again together when there are many in a partition.
- A file has one partition. The rows of a task that have others are written to other files (partitions.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.changelog.storage import Location, local_file
from subscriber.errors import ApplyError
from subscriber.spark.tables.data_files import (
    LIMITS,
    DataFile,
    DataFolder,
    FileLimits,
    NewFile,
    batches_with,
    opened_file,
    read_columns,
    rows_in_memory,
)
from subscriber.spark.tables.partitions import PartitionValues
from subscriber.spark.tables.position_deletes import NewDeletes, left_rows
from subscriber.spark.tables.stage import OP, PUTS, unchanged, value, write_arrow

Result = TypeVar("Result")


class Versions(NamedTuple):
    """The columns of a table that has all versions of its rows.

    Staged rows with a key apply to the version in which `end` is NULL: the current one.
    """

    end: str
    closed: frozenset[str]  # the columns that get a value when a version ends, `end` among them


class Columns(NamedTuple):
    """The columns of a table, by the numbers that the staged rows have."""

    names: tuple[str, ...]
    versions: Versions | None = None  # None: the table has only the current version of each row


@dataclass(frozen=True, slots=True)
class MergedTable:
    """A table that a batch changes: what all of its tasks need."""

    folder: DataFolder
    names: tuple[str, ...]  # of the columns, which the staged rows have by number
    key: tuple[int, ...]  # indexes of `names`; empty for a table without a key
    staged: tuple[Location, ...]
    staging: Location  # the directory of staged rows
    limits: FileLimits = LIMITS
    versions: Versions | None = None

    def opened(self) -> AbstractContextManager[list[pa.Table]]:
        """Open the staged rows. They are mapped, not read."""
        return _opened(self.staged)

    def rows(self, staged: pa.Table) -> pa.Table:
        """Return staged rows with the columns of the table."""
        rows = pa.table([staged[value(index)] for index in range(len(self.names))], names=list(self.names))
        return rows.select(self.folder.schema.names).cast(self.folder.schema)


@contextmanager
def _opened(paths: Sequence[Location]) -> Iterator[list[pa.Table]]:
    with ExitStack() as stack:
        files = [stack.enter_context(local_file(path)) for path in paths]
        yield [pa.ipc.open_file(stack.enter_context(pa.memory_map(str(file)))).read_all() for file in files]


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
    small = defaultdict[PartitionValues, list[DataFile]](list)
    for file in files:
        if file.size < limits.small:
            small[file.partition].append(file)
    groups = [group for some in small.values() if len(some) >= limits.many for group in _together(some, limits)]
    tasks = [FileTask(table, group, True) for group in groups]
    if table.key:
        grouped = {file.path for group in groups for file in group}
        others = (file for file in files if file.path not in grouped)
        tasks += [FileTask(table, (file,), False) for file in others if file.may_have(ranges)]
    return tasks


def _together(small: Iterable[DataFile], limits: FileLimits) -> Iterator[tuple[DataFile, ...]]:
    """Yield groups of small files that are written again as one file each: neighbours by the first cluster column.

    Files of a table without cluster columns are neighbours by their keys.
    """
    group, size = list[DataFile](), 0
    for file in sorted(small, key=_place):
        if group and size + file.size > limits.target:
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.size
    yield tuple(group)


def _place(file: DataFile) -> tuple[Any, ...]:
    return file.cluster is None, file.cluster, file.low is None, file.low, file.path


class Files(NamedTuple):
    """The result of a FileTask.

    `removed` are the files that `added` replaces. `found` has, for each staged file, the numbers of the rows that
    `added` and `carried` have.
    """

    removed: tuple[DataFile, ...]
    added: list[NewFile]
    found: list[list[int]]
    deletes: tuple[NewDeletes, ...] = ()
    carried: tuple[Location, ...] = ()  # staged files with rows for an InsertTask


class MatchedFile(NamedTuple):
    """An opened file of a table. `places` has the numbers of the staged rows that apply to its rows, or null."""

    file: DataFile
    parquet: pq.ParquetFile
    deleted: pa.Array  # the positions of deleted rows
    left: pa.Array | None  # for each row, whether it is not deleted; None: none is
    places: pa.Array

    @property
    def is_changed(self) -> bool:
        return bool(self.places.null_count < len(self.places))

    def batches(self, table: MergedTable) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Yield the rows that are not deleted, with their places."""
        first = 0
        for batch in self.parquet.iter_batches(rows_in_memory(self.parquet, table.limits)):
            rows, places = table.folder.aligned(batch, self.file), self.places.slice(first, len(batch))
            left = None if self.left is None else self.left.slice(first, len(batch))
            first += len(batch)
            yield (rows, places) if left is None else (rows.filter(left), places.filter(left))

    def changed(self, table: MergedTable, places: pa.Array) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Yield the rows that have one of `places`, with these. Row groups without such rows are not read."""
        for first, batch in batches_with(self.parquet, places.is_valid(), table.limits):
            indexes = places.slice(first, len(batch))
            yield table.folder.aligned(batch, self.file).filter(indexes.is_valid()), indexes.drop_null()


@dataclass(frozen=True, slots=True)
class FileTask:
    """Applies the staged rows to a group of files.

    `whole`: the files are written again even if none of their rows changes. Otherwise there is one file.
    """

    table: MergedTable
    files: tuple[DataFile, ...]
    whole: bool

    def __call__(self) -> Files:
        """Run the task, on an executor."""
        with ExitStack() as stack:
            staged = StagedRows.of(self.table, stack.enter_context(self.table.opened()))
            if self._may_be_kept:
                with opened_file(self._path(self.files[0]), partly=True) as parquet:
                    matched = self._found(staged, self.files[0], parquet)
                    if not matched.is_changed or self._is_kept(matched):
                        return self._deleted(staged, matched)
            parquets = [stack.enter_context(opened_file(self._path(file))) for file in self.files]
            files = [self._found(staged, file, parquet) for file, parquet in zip(self.files, parquets, strict=True)]
            chosen = [matched for matched in files if self.whole or matched.is_changed]
            numbers = staged.numbers([matched.places for matched in files])
            batches = (batch for matched in chosen for batch in staged.applied(self.table, matched))
            added = self.table.folder.write(batches, self.table.limits)
            return Files(tuple(matched.file for matched in chosen), added, numbers)

    @property
    def _may_be_kept(self) -> bool:
        """Return True if positions of the file's deleted rows can be written instead of the file."""
        limits = self.table.limits
        is_possible = self.table.folder.address is not None and limits.deleted > 0
        return is_possible and not self.whole and self.files[0].size >= limits.rewritten

    def _path(self, file: DataFile) -> Location:
        return self.table.folder.directory / file.path

    def _found(self, staged: StagedRows, file: DataFile, parquet: pq.ParquetFile) -> MatchedFile:
        deleted, places = self.table.folder.deleted(file), staged.places(self.table, file, parquet)
        left = left_rows(len(places), deleted) if len(deleted) else None
        return MatchedFile(file, parquet, deleted, left, places if left is None else pc.if_else(left, places, None))

    def _is_kept(self, one: MatchedFile) -> bool:
        """Return True if few of a file's rows are deleted after the batch."""
        rows = len(one.places)
        deleted = len(one.deleted) + rows - one.places.null_count
        return bool(deleted <= self.table.limits.deleted * rows)

    def _deleted(self, staged: StagedRows, one: MatchedFile) -> Files:
        """Write the positions of the changed rows, and the new versions of those that are carried."""
        wanted = staged.carried(self.table, one.places)
        deletes, carried = list[NewDeletes](), list[Location]()
        if one.is_changed:
            changed = pc.indices_nonzero(one.places.is_valid()).cast(pa.int64())
            deletes.append(self.table.folder.delete(one.file, pa.concat_arrays([one.deleted, changed])))
        if wanted.null_count < len(wanted):
            batches = (
                batch
                for rows, place in one.changed(self.table, wanted)
                for batch in staged.changed(self.table, rows, place)
            )
            carried.append(write_arrow(self.table.folder.schema, batches, self.table.staging))
        return Files((), [], staged.numbers([wanted]), tuple(deletes), tuple(carried))


class StagedRows(NamedTuple):
    """The staged rows of a table: their keys, and the files that they are in."""

    parts: list[pa.Table]
    rows: pa.Table
    keys: pa.Table  # the key's columns k0, k1, … and the number of the row, of all rows that apply to one in a file
    rest: int | None  # the number of the row that applies to all other current versions

    @classmethod
    def of(cls, table: MergedTable, parts: list[pa.Table]) -> StagedRows:
        """Read the keys of the staged rows."""
        rows = pa.concat_tables(parts, promote_options="default")
        names = [f"k{place}" for place in range(len(table.key))]
        columns = [rows[value(index)].cast(table.folder.schema.field(table.names[index]).type) for index in table.key]
        keys = pa.table([*columns, pa.array(range(len(rows)), pa.int64())], names=[*names, "number"])
        if table.versions is None:
            return cls(parts, rows, keys, None)
        rest = pc.index(rows[OP], "e").as_py()
        applied = pc.is_in(rows[OP], pa.array(["+", "e"]))
        return cls(parts, rows, keys.filter(pc.invert(applied)), rest if rest >= 0 else None)

    def places(self, table: MergedTable, file: DataFile, parquet: pq.ParquetFile) -> pa.Array:
        """Return, for each row of a file, the number of the staged row that applies to it, or null."""
        names, versions = [table.names[index] for index in table.key], table.versions
        if not names:
            return pa.nulls(parquet.metadata.num_rows, pa.int64())
        wanted = names if versions is None else [*names, versions.end]
        read = table.folder.columns(read_columns(parquet, table.folder.schema, wanted), file, wanted)
        places = self._by_key(read[: len(names)])
        if versions is None:
            return places
        if self.rest is not None:
            places = pc.fill_null(places, self.rest)
        return pc.if_else(pc.is_null(read[-1]), places, None).combine_chunks()

    def _by_key(self, keys: list[pa.ChunkedArray]) -> pa.Array:
        """Return, for each key, the number of the staged row with it, or null."""
        if len(keys) == 1:
            place = pc.index_in(keys[0], value_set=self.keys["k0"].combine_chunks())
            return self.keys["number"].take(place).combine_chunks()
        rows = pa.table([*keys, pa.array(range(len(keys[0])), pa.int64())], names=[*self.keys.column_names[:-1], "row"])
        joined = rows.join(self.keys, self.keys.column_names[:-1], join_type="left outer").sort_by("row")
        return joined["number"].combine_chunks()

    def numbers(self, places: Sequence[pa.Array]) -> list[list[int]]:
        """Return the numbers of the rows that were found, by staged file and within it."""
        all_found = pa.chunked_array([place.drop_null() for place in places], pa.int64())
        put_numbers = pc.filter(all_found, pc.is_in(self.rows[OP].take(all_found), pa.array(PUTS))).sort().to_pylist()
        result, first = [], 0
        for part in self.parts:
            end = first + len(part)
            result.append([number - first for number in put_numbers if first <= number < end])
            first = end
        return result

    def carried(self, table: MergedTable, places: pa.Array) -> pa.Array:
        """Return the places of the rows that a task carries: their new versions have values of the former ones."""
        if table.versions is not None:
            return places
        names = map(unchanged, range(len(table.names)))
        columns = [self.rows[name] for name in names if name in self.rows.column_names]
        if not columns:
            return pa.nulls(len(places), places.type)
        lacks = reduce(pc.or_, (pc.fill_null(column, False) for column in columns))
        return pc.if_else(lacks.combine_chunks().take(places), places, None)

    def applied(self, table: MergedTable, file: MatchedFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file with the changes."""
        for old, places in file.batches(table):
            if places.null_count == len(places):
                yield old
            else:
                yield from self.changed(table, old, places)

    def changed(self, table: MergedTable, old: pa.RecordBatch, places: pa.Array) -> Iterator[pa.RecordBatch]:
        """Yield rows with the changes. `places` has the numbers of the staged rows that apply to them, or null."""
        new = self.rows.take(places)  # null where the row does not change
        is_kept = pc.is_null(places)
        closed = frozenset(table.names) if table.versions is None else table.versions.closed
        columns = []
        for name in table.folder.schema.names:
            if name not in closed:
                columns.append(old[name])
                continue
            index, kept = table.names.index(name), is_kept
            if unchanged(index) in new.column_names:
                kept = pc.or_(kept, pc.fill_null(new[unchanged(index)], False))
            columns.append(pc.if_else(kept, old[name], new[value(index)].cast(old[name].type)))
        is_left = pc.fill_null(pc.not_equal(new[OP], "d"), True)
        yield from pa.table(columns, schema=table.folder.schema).filter(is_left).combine_chunks().to_batches()


@dataclass(frozen=True, slots=True)
class InsertTask:
    """Writes staged rows to new files. `found` has the numbers of the rows that are in other files, by staged file.

    `carried` are staged files with rows of the table.
    """

    table: MergedTable
    found: tuple[frozenset[int], ...]
    carried: tuple[Location, ...] = ()

    def __call__(self) -> list[NewFile]:
        """Run the task, on an executor."""
        with self.table.opened() as parts, _opened(self.carried) as carried:
            batches = (batch for rows in carried for batch in rows.to_batches(self.table.limits.rows))
            return self.table.folder.write(chain(self._batches(parts), batches), self.table.limits)

    def _batches(self, parts: list[pa.Table]) -> Iterator[pa.RecordBatch]:
        for part, matched in zip(parts, self.found, strict=True):
            wanted = pc.is_in(part[OP], pa.array(PUTS))
            if matched:
                numbers = pa.array(range(len(part)), pa.int64())
                wanted = pc.and_not(wanted, pc.is_in(numbers, pa.array(sorted(matched), pa.int64())))
            rows = part.filter(wanted)
            for index in range(len(self.table.names)):
                if unchanged(index) in rows.column_names and pc.any(rows[unchanged(index)]).as_py():
                    raise ApplyError("a row was changed that is not in the table")
            yield from self.table.rows(rows).to_batches(self.table.limits.rows)


def run(task: Callable[[], Result]) -> Result | ApplyError:
    """Run a task on an executor. Returns an error that another attempt would not correct."""
    try:
        return task()
    except ApplyError as error:
        return error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, FileNotFoundError) as error:
        return ApplyError(f"its files cannot be read or written: {error}")
