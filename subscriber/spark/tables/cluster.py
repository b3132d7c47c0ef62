"""The cluster columns of a table: rows are stored in the order of their values, as after PostgreSQL's CLUSTER.

Each task writes its rows in this order. So its files, and the row groups in them, have narrow ranges of the first
cluster column, and readers skip most files and row groups by their statistics. NULLs are last. Rows with equal values
keep their order.

**Invariants.**

- Rows are sorted in bounded memory, however many there are, and however many have the same values. Rows that memory
  does not hold are in sorted temporary files. One block of each file is in memory.
- A column of a type without an order is never a cluster column. Clustering decides where rows are, and not which rows
  there are, so it never sets a table aside after the load: it ends with the column, or with the type that has an order.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import ApplyError
from subscriber.spark.tables.stage import has_ranges

HINT = "Choose other columns with --cluster."

Cluster: TypeAlias = tuple[str, ...]  # the cluster columns of a table
Key: TypeAlias = tuple[tuple[bool, Any], ...]  # the values of a row in the cluster columns, and whether each is NULL

_RUNS = 64  # sorted files


def check_cluster(cluster: Cluster, schema: pa.Schema) -> None:
    """Raise ApplyError if a table with these columns cannot have the cluster columns."""
    for name in cluster:
        if name not in schema.names:
            raise ApplyError(f'it has no column "{name}" for its clustering', hint=HINT)
        if cluster.count(name) > 1:
            raise ApplyError(f'its cluster columns have column "{name}" twice', hint=HINT)
        if not has_ranges(kind := schema.field(name).type):
            raise ApplyError(f"it cannot be clustered by {name}: the column is {kind}", hint=HINT)


def following_cluster(cluster: Iterable[str], names: Mapping[str, str], schema: pa.Schema) -> Cluster:
    """Return the cluster columns after columns have changed.

    Args:
        cluster: the cluster columns.
        names: the new names of columns. Columns without one are dropped.
        schema: the columns afterwards. One whose type has no order is not a cluster column any more.
    """
    present = (names[name] for name in cluster if name in names)
    return tuple(name for name in present if name in schema.names and has_ranges(schema.field(name).type))


# --- rows in order --------------------------------------------------------------------------------


def clustered(
    batches: Iterable[pa.RecordBatch], cluster: Cluster, memory: int, most: int = _RUNS
) -> Iterator[pa.RecordBatch]:
    """Yield rows in the order of cluster columns.

    Args:
        batches: the rows.
        cluster: the columns.
        memory: bytes of the rows that are sorted at a time. They are in memory twice for a moment.
        most: sorted files of the same size, from which on they become one file.
    """
    held, size = list[pa.RecordBatch](), 0
    with tempfile.TemporaryDirectory(prefix="subscriber-") as directory:
        runs = _Runs(Path(directory), cluster, memory // (4 * most), most)
        for batch in batches:
            if held and size + batch.nbytes > memory:
                runs.add(held)
                held, size = [], 0
            held.append(batch)
            size += batch.nbytes
        if not runs.is_empty:
            runs.add(held)
            yield from runs.rows()
        elif held:
            yield from _sorted(held, cluster)


def _sorted(batches: Sequence[pa.RecordBatch], cluster: Cluster) -> list[pa.RecordBatch]:
    """Return rows in order, in one batch, or in none if there are no rows."""
    rows = pa.Table.from_batches(batches).combine_chunks()
    # The names of keys are read as paths if they begin with a dot.
    keys = pa.table([rows[name] for name in cluster], names=[str(place) for place in range(len(cluster))])
    order = pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names])  # NULLs are last
    return list(rows.take(order).combine_chunks().to_batches())


class _Run(NamedTuple):
    """Sorted rows in a file, in blocks, and the key of the first row of each block."""

    path: Path
    level: int  # how often its rows have been merged
    keys: list[Key]


class _Runs:
    """The sorted files of a task. Of equal rows, those of an earlier file come first."""

    def __init__(self, directory: Path, cluster: Cluster, block: int, most: int) -> None:
        self._directory = directory
        self._cluster = cluster
        self._block = block  # bytes of a block
        self._most = most
        self._runs = list[_Run]()

    @property
    def is_empty(self) -> bool:
        """Return True if no rows are stored."""
        return not self._runs

    def add(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Store rows in order. Many files of the same level become one."""
        if pieces := _sorted(batches, self._cluster):
            self._runs.append(self._stored(iter(pieces), 0))
        while len(last := self._runs[-self._most :]) == self._most and last[0].level == last[-1].level:
            self._runs[-self._most :] = [self._stored(self._merged(last), last[0].level + 1)]
            for run in last:
                run.path.unlink()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order."""
        return self._merged(self._runs)

    def _stored(self, pieces: Iterator[pa.RecordBatch], level: int) -> _Run:
        path, keys, first = self._directory / uuid4().hex, list[Key](), next(pieces)
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema, options=options) as writer:
            for piece in chain([first], pieces):
                rows = max(1, len(piece) * self._block // max(piece.nbytes, 1))
                for start in range(0, len(piece), rows):
                    keys.append(key_of(piece, start, self._cluster))
                    writer.write_batch(piece.slice(start, rows))
        return _Run(path, level, keys)

    def _merged(self, runs: Sequence[_Run]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of files in order.

        Blocks are read in the order of their first rows. The first row of the next block is a cut: the rows before it
        are all in memory. Behind the cut, each file has a part of one block at most.
        """
        order = sorted((key, number, block) for number, run in enumerate(runs) for block, key in enumerate(run.keys))
        with ExitStack() as stack:
            files = [pa.ipc.open_file(stack.enter_context(pa.OSFile(str(run.path)))) for run in runs]
            waiting: list[list[pa.RecordBatch]] = [[] for _ in runs]
            for start in range(0, len(order), self._most):
                end = start + self._most
                for _, number, block in order[start:end]:
                    waiting[number].append(files[number].get_batch(block))
                cut = order[end] if end < len(order) else None
                ready = list[pa.RecordBatch]()
                for number, blocks in enumerate(waiting):
                    if blocks:
                        before = self._before(cut, blocks[-1], number)
                        ready += [*blocks[:-1], blocks[-1].slice(0, before)]
                        waiting[number] = [blocks[-1].slice(before)]
                yield from _sorted(ready, self._cluster)

    def _before(self, cut: tuple[Key, int, int] | None, block: pa.RecordBatch, number: int) -> int:
        """Return the number of rows before the cut in a block of file `number`. The cut is a row of another block."""
        if cut is None or cut[1] == number:
            return len(block)
        search = bisect_right if number < cut[1] else bisect_left
        return search(range(len(block)), cut[0], key=lambda place: key_of(block, place, self._cluster))


def key_of(rows: pa.RecordBatch, place: int, cluster: Cluster) -> Key:
    """Return the values of the cluster columns of a row. Python can compare them."""
    numbers = (_number(rows[name].slice(place, 1))[0].as_py() for name in cluster)
    return tuple((value is None, value) for value in numbers)


def from_key_on(columns: Sequence[pa.ChunkedArray], key: Key) -> pa.ChunkedArray:
    """Return, for each row, whether its key is `key` or a later one. `columns` are the cluster columns."""
    is_from = pa.chunked_array([pa.repeat(pa.scalar(True), len(columns[0]))])  # of equal keys
    for column, (is_null, value) in reversed(list(zip(map(_number, columns), key, strict=True))):
        null = column.is_null()
        if is_null:
            is_from = pc.and_(null, is_from)
            continue
        later = pc.or_(null, pc.fill_null(pc.greater(column, pa.scalar(value, column.type)), False))
        same = pc.fill_null(pc.equal(column, pa.scalar(value, column.type)), False)
        is_from = pc.or_(later, pc.and_(same, is_from))
    return is_from


def _number(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return times as numbers: Python does not have those of all years."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.int32()) if pa.types.is_date32(column.type) else column
