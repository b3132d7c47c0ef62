"""The files of a table with cluster columns, written again so that their ranges do not overlap.

Each task of a load by ranges, and each batch, puts only its own rows in order. So a table gets files whose ranges
overlap, and a reader has to open all of them. Here executors read the keys of each file, and the driver finds the files
that overlap. Their rows are divided into slices by their keys, one executor writes each slice, and the driver commits.

**Invariants.**

- The rows of the table stay the same. Their number is compared before the commit.
- Memory is bounded, as in cluster.py. A file is read once by each slice that has one of its rows.
- A file that overlaps no other one stays. So a table that is in order is not written again.

**Failure cases.**

- Killed before the commit: the new files are removed with the others that are not used.
- Another program commits first: the table stays as it is, and the new files are not used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.errors import ApplyError
from subscriber.spark.tables.cluster import Key, clustered, from_key_on, key_of
from subscriber.spark.tables.data_files import (
    DataFile,
    DataFolder,
    FileLimits,
    NewFile,
    batches_with,
    opened_file,
    read_columns,
)
from subscriber.spark.tables.merge import run
from subscriber.spark.tables.partitions import PartitionValues
from subscriber.spark.tables.position_deletes import left_rows
from subscriber.spark.tables.table_format import StoredTable
from subscriber.spark.tasks import parallelism, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

_SLICES = 4  # of a partition at most, for each task that runs at a time


class Reclustered(NamedTuple):
    """The result of recluster(): the number of files before and afterwards, and the version of the table."""

    removed: int
    added: int
    version: int | None  # None: no files overlap, and nothing was done


class FileKeys(NamedTuple):
    """The keys of a file in order: the first, some in between, and the last. Empty if the file has no rows."""

    file: DataFile
    rows: int
    keys: tuple[Key, ...]


def recluster(
    spark: SparkSession,
    table: StoredTable,
    limits: FileLimits,
    *,
    check: Callable[[], None] = lambda: None,
    on_rows: Callable[[int, int], None] = lambda *_: None,
) -> Reclustered:
    """Write the files of a table again that overlap in its cluster columns. It keeps its position.

    Args:
        spark: the session.
        table: the table, just opened. Without cluster columns nothing is done.
        limits: how the table is divided into files.
        check: called before the commit.
        on_rows: called with the number of rows that are written, and of all that are to be.

    Returns:
        What was done.

    Raises:
        ApplyError: a file cannot be read or written, or the table has a feature that is not supported here.
        CommitConflict: another program has changed the table meanwhile, and nothing has changed here.
    """
    work, number = Reclustering(table, limits), parallelism(spark)
    tasks = work.slice_tasks(_results(spark, work.keys_tasks()), _SLICES * number)
    added = list[NewFile]()
    for first in range(0, len(tasks), number):
        on_rows(sum(file.rows for file in added), work.rows)
        added += [file for files in _results(spark, tasks[first : first + number]) for file in files]
    check()
    return work.commit(added)


def _results(spark: SparkSession, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run tasks on executors. Raises the first error that another attempt would not correct."""
    results = []
    for answer in run_tasks(spark, run, tasks):
        if isinstance(answer, ApplyError):
            raise answer
        results.append(answer)
    return results


class Reclustering:
    """The tasks for the files of one table that overlap, and the commit of the files they write."""

    def __init__(self, table: StoredTable, limits: FileLimits) -> None:
        self._table = table
        self._limits = limits
        self._groups = list[list[FileKeys]]()

    @property
    def rows(self) -> int:
        """Return the number of rows in files that overlap, after slice_tasks()."""
        return sum(member.rows for group in self._groups for member in group)

    def keys_tasks(self) -> list[KeysTask]:
        """Return the tasks that read the keys of the files: none, if the table has no cluster columns."""
        if not self._table.folder.cluster:
            return []
        self._table.check_writable()
        return [KeysTask(self._table.folder, file, self._limits) for file in self._table.files(None)]

    def slice_tasks(self, found: Iterable[FileKeys], most: int) -> list[SliceTask]:
        """Return the tasks that write the rows of files that overlap.

        Args:
            found: the results of keys_tasks().
            most: tasks for the rows of one partition.
        """
        self._groups = overlapping(found)
        folder, limits = self._table.folder, self._limits
        return [
            SliceTask(folder, *group_slice, limits)
            for group in self._groups
            for group_slice in slices(group, limits, most)
        ]

    def commit(self, added: Sequence[NewFile]) -> Reclustered:
        """Replace the files that overlap by those that the tasks have written."""
        written, removed = sum(file.rows for file in added), [member.file for group in self._groups for member in group]
        if written != self.rows:
            raise ApplyError(f"its files have {self.rows} rows, and those in their place have {written}")
        if not removed:
            return Reclustered(0, 0, None)
        version = self._table.commit(removed, added, self._table.position, same_rows=True)
        return Reclustered(len(removed), len(added), version)


def overlapping(found: Iterable[FileKeys]) -> list[list[FileKeys]]:
    """Return the groups of files that overlap, within their partitions. Files with the same limit do not overlap."""
    by_partition = defaultdict[PartitionValues, list[FileKeys]](list)
    for member in found:
        if member.keys:
            by_partition[member.file.partition].append(member)
    groups = list[list[FileKeys]]()
    for some in by_partition.values():
        last: Key | None = None
        for member in sorted(some, key=lambda one: (one.keys[0], one.keys[-1])):
            if last is None or member.keys[0] >= last:
                groups.append([])
            groups[-1].append(member)
            last = member.keys[-1] if last is None else max(last, member.keys[-1])
    return [group for group in groups if len(group) > 1]


def slices(
    group: Sequence[FileKeys], limits: FileLimits, most: int
) -> list[tuple[tuple[DataFile, ...], Key | None, Key | None]]:
    """Divide the rows of files into slices of a similar number of rows, `most` at most.

    Returns:
        For each slice the files that may have its rows, its first key, and the first key of the next slice. None:
        there is no limit.
    """
    number = max(1, min(most, math.ceil(sum(member.file.size for member in group) / limits.target)))
    keys = sorted(key for member in group for key in member.keys)
    cuts = sorted({keys[len(keys) * place // number] for place in range(1, number)} - {keys[0]})
    return [
        (tuple(member.file for member in group if _may_have(member, low, high)), low, high)
        for low, high in pairwise([None, *cuts, None])
    ]


def _may_have(one: FileKeys, low: Key | None, high: Key | None) -> bool:
    return (low is None or one.keys[-1] >= low) and (high is None or one.keys[0] < high)


@dataclass(frozen=True, slots=True)
class KeysTask:
    """Reads the keys of a file."""

    folder: DataFolder
    file: DataFile
    limits: FileLimits

    def __call__(self) -> FileKeys:
        """Run the task, on an executor."""
        folder, cluster, every = self.folder, self.folder.cluster, self.limits.in_order.rows
        with opened_file(folder.directory / self.file.path, partly=True) as parquet:
            rows = pa.table(cluster_columns(folder, self.file, parquet), names=cluster)
            if self.file.deletes:
                rows = rows.filter(left_rows(len(rows), folder.deleted(self.file)))
        keys, number, last = list[Key](), 0, list[Key]()
        for batch in clustered(rows.to_batches(self.limits.rows), cluster, self.limits.memory):
            keys += [key_of(batch, place, cluster) for place in range(-number % every, len(batch), every)]
            number += len(batch)
            last = [key_of(batch, len(batch) - 1, cluster)]
        return FileKeys(self.file, number, (*keys, *last))


@dataclass(frozen=True, slots=True)
class SliceTask:
    """Writes the rows of files from the key `low` on, up to the key `high`, to new files. None: there is no limit."""

    folder: DataFolder
    files: tuple[DataFile, ...]
    low: Key | None
    high: Key | None
    limits: FileLimits

    def __call__(self) -> list[NewFile]:
        """Run the task, on an executor."""
        return self.folder.write(self._batches(), self.limits)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            with opened_file(self.folder.directory / file.path, partly=True) as parquet:
                wanted = self._wanted(file, parquet)
                for first, batch in batches_with(parquet, wanted, self.limits):
                    chosen = wanted.slice(first, len(batch)).combine_chunks()
                    yield self.folder.aligned(batch, file).filter(chosen)

    def _wanted(self, file: DataFile, parquet: pq.ParquetFile) -> pa.ChunkedArray:
        """Return, for each row of a file, whether it is in the slice."""
        columns = cluster_columns(self.folder, file, parquet)
        wanted = pa.chunked_array([pa.repeat(pa.scalar(True), len(columns[0]))])
        if self.low is not None:
            wanted = from_key_on(columns, self.low)
        if self.high is not None:
            wanted = pc.and_not(wanted, from_key_on(columns, self.high))
        if file.deletes:
            wanted = pc.and_(wanted, left_rows(len(wanted), self.folder.deleted(file)))
        return wanted


def cluster_columns(folder: DataFolder, file: DataFile, parquet: pq.ParquetFile) -> list[pa.ChunkedArray]:
    """Return the cluster columns of a file, as the table has them, also of deleted rows."""
    return folder.columns(read_columns(parquet, folder.schema, folder.cluster), file, folder.cluster)
