"""The cluster columns of a table: rows are stored in the order of their values, as after PostgreSQL's CLUSTER.

Each task writes its rows in this order. So its files, and the row groups in them, have narrow ranges of the first
cluster column, and readers skip most of them by their statistics. NULLs are last. Rows with equal values keep their
order.

**Invariants.**

- Rows are sorted in bounded memory, however many rows have the same values. Rows that memory does not hold are in
  temporary files, each of which is sorted.
- A column of a type without an order is never a cluster column. Clustering decides where rows are, and not which rows
  there are, so it never sets a table aside after the load: it ends with the column, or with the type that has an order.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import ApplyError
from subscriber.spark.tables.stage import has_ranges

HINT = "Choose other columns with --cluster."

Cluster: TypeAlias = tuple[str, ...]  # the cluster columns of a table


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
    found = (names[name] for name in cluster if name in names)
    return tuple(name for name in found if name in schema.names and has_ranges(schema.field(name).type))


# --- rows in order --------------------------------------------------------------------------------


def clustered(batches: Iterable[pa.RecordBatch], cluster: Cluster, memory: int) -> Iterator[pa.RecordBatch]:
    """Yield rows in the order of cluster columns.

    Args:
        batches: the rows.
        cluster: the columns.
        memory: bytes of the rows that are sorted at a time.
    """
    held, size = list[pa.RecordBatch](), 0
    runs = list[pa.RecordBatch]()
    with tempfile.TemporaryDirectory(prefix="subscriber-") as directory:
        for batch in batches:
            if held and size + batch.nbytes > memory:
                runs += _stored(_sorted(held, cluster), Path(directory) / str(len(runs)))
                held, size = [], 0
            held.append(batch)
            size += batch.nbytes
        if runs:
            runs += _sorted(held, cluster)
            held = []
            yield from _merged(runs, cluster, memory // 4)
        elif held:
            yield from _sorted(held, cluster)


def _sorted(batches: Sequence[pa.RecordBatch], cluster: Cluster) -> list[pa.RecordBatch]:
    """Return rows in order, in one batch, or in none if there are no rows."""
    rows = pa.Table.from_batches(batches).combine_chunks()
    # The names of keys are read as paths if they begin with a dot.
    keys = pa.table([rows[name] for name in cluster], names=[str(place) for place in range(len(cluster))])
    order = pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names])  # NULLs are last
    return list(rows.take(order).combine_chunks().to_batches())


def _stored(rows: Sequence[pa.RecordBatch], path: Path) -> list[pa.RecordBatch]:
    """Write sorted rows to a file, and return them as they are mapped from it."""
    if not rows:
        return []
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows[0].schema) as writer:
        for batch in rows:
            writer.write_batch(batch)
    found = pa.ipc.open_file(pa.memory_map(str(path)))
    return [found.get_batch(number) for number in range(found.num_record_batches)]


def _merged(runs: Sequence[pa.RecordBatch], cluster: Cluster, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of sorted runs in order, at most about 2 * `size` bytes at a time.

    Rows of each run are chosen in equal distances, and all chosen rows are put in order. Between two of them each run
    has no more rows than one distance, which is `size` divided by the number of runs. A cut is a single row, not a
    value, so equal rows do not make a piece larger.
    """
    keys = [_Keys(run, cluster) for run in runs]
    chosen = []
    for number, run in enumerate(runs):
        distance = max(1, len(run) * size // (len(runs) * max(run.nbytes, 1)))
        chosen += [(keys[number].at(place), number, place) for place in range(distance, len(run), distance)]
    firsts = [0] * len(runs)
    for values, owner, place in sorted(chosen)[:: len(runs)]:
        ends = [
            place if number == owner else keys[number].place(values, firsts[number], is_after=number < owner)
            for number in range(len(runs))
        ]
        yield from _piece(runs, firsts, ends, cluster)
        firsts = ends
    yield from _piece(runs, firsts, [len(run) for run in runs], cluster)


def _piece(
    runs: Sequence[pa.RecordBatch], firsts: Sequence[int], ends: Sequence[int], cluster: Cluster
) -> list[pa.RecordBatch]:
    slices = zip(runs, firsts, ends, strict=True)
    return _sorted([run.slice(first, end - first) for run, first, end in slices], cluster)


class _Keys:
    """The values of the cluster columns of a sorted run, which Python can compare."""

    def __init__(self, run: pa.RecordBatch, cluster: Cluster) -> None:
        self._columns = [_comparable(run[name]) for name in cluster]
        self._places = range(len(run))

    def at(self, place: int) -> tuple[Any, ...]:
        found = (column[place].as_py() for column in self._columns)
        return tuple((value is None, value) for value in found)

    def place(self, values: tuple[Any, ...], first: int, *, is_after: bool) -> int:
        """Return the place from `first` on that a row with these values has, behind or before equal rows."""
        search = bisect_right if is_after else bisect_left
        return search(self._places, values, first, key=self.at)


def _comparable(column: pa.Array) -> pa.Array:
    """Return values as Python has them. It does not have the times of all years."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.int32()) if pa.types.is_date32(column.type) else column
