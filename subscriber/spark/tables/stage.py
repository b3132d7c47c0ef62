"""A part of a table's net effect as an Arrow file, written on an executor. merge.py applies it to the table.

    op d   the row with this key is deleted; only the key's columns are set
    op u   the row with this key has, or gets, these values; if unchanged<n> is true, column n does not change
    op m   the same, but the row's old key is in from<n>, and unchanged columns have the values of that row
    op +   the table has one more of this row, whatever its key
    op -   a table without a key has one fewer of this row

A table with all versions of its rows (scd/target.py) has + for a new version, and

    op c   the current version of the row with this key, if there is one, ends: only the columns of `Versions` change
    op e   so do all other current versions

The columns of the file are named by number: op, value0, value1, unchanged1, from0, …. So a column of the table may have
any name. A key occurs once among d, u, m and c. File names are unique; the driver reads only files that a task has
reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pyarrow as pa

from subscriber.changelog.storage import Location, stored_file
from subscriber.protocol.messages import RelationColumn
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.net_job import NetTable
from subscriber.spark.changes.raw_rows import UNCHANGED, Value, Values, values
from subscriber.spark.sources.arrow_types import arrow_array, arrow_type

OP = "op"
PUTS = ("u", "m", "+")  # the ops after which the table has the row
RANGES = 256  # of the keys in a file

Entry = tuple[str, Values | None, Values]  # op, the old key (of m), values


def value(index: int) -> str:
    """Return the file's column with the values of a column of the table."""
    return f"value{index}"


def unchanged(index: int) -> str:
    """Return the file's column that is true where the value does not change. The file may lack it."""
    return f"unchanged{index}"


def origin(index: int) -> str:
    """Return the file's column with the old values of a key's column. The file may lack it."""
    return f"from{index}"


@dataclass(frozen=True, slots=True)
class Staged:
    """The result of a task.

    `key` are indexes of the table's columns; None for a table without a key. `puts` are the rows that the table has
    afterwards. `moved`: there are rows of op m. `ranges` have all keys, by the first column of the key; None: unknown.
    """

    path: Location
    key: tuple[int, ...] | None
    truncated: bool
    rows: int
    puts: int
    moved: bool
    ranges: tuple[tuple[Any, Any], ...] | None
    columns: tuple[RelationColumn, ...] = ()  # of the publisher's table


def write_arrow(schema: pa.Schema, batches: Iterable[pa.RecordBatch], directory: Location) -> Location:
    """Write rows to a new file in a directory. Returns the file."""
    path = directory / f"{uuid4().hex}.arrow"
    with stored_file(path) as local, pa.OSFile(str(local), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def write_staged(
    staged: pa.Table,
    directory: Location,
    key: tuple[int, ...] | None,
    *,
    truncated: bool,
    columns: tuple[RelationColumn, ...] = (),
) -> Staged:
    """Write rows to a new file.

    Args:
        staged: the rows, with the columns of a file.
        directory: where the file is written.
        key: the indexes of the key's columns; None for a table without a key.
        truncated: the table has no other rows afterwards.
        columns: those of the publisher's table.
    """
    path = write_arrow(staged.schema, staged.to_batches(), directory)
    ops = Counter(staged[OP].to_pylist())
    ranges = None if key is None or ops["e"] else _ranges(staged[value(key[0])])
    puts = sum(ops[op] for op in PUTS)
    return Staged(path, key, truncated, len(staged), puts, ops["m"] > 0, ranges, columns)


@dataclass(frozen=True, slots=True)
class ToArrow:
    """The sink: writes into `directory`, which driver and executors reach. `as_text` are schema.table.column."""

    directory: Location
    as_text: frozenset[str]

    def __call__(self, table: NetTable, net: Net, part: int) -> Staged:
        columns = table.relation.columns
        entries = list(_entries(net))
        arrays: dict[str, pa.Array] = {OP: pa.array([op for op, _, _ in entries], pa.string())}
        for index, column in enumerate(columns):
            label = f"{table.label}.{column.name}"
            kind = self.kind(table.label, column)
            cells = [entry[2][index] for entry in entries]
            arrays[value(index)] = arrow_array([_plain(cell) for cell in cells], kind, label)
            if UNCHANGED in cells:
                arrays[unchanged(index)] = pa.array([cell is UNCHANGED for cell in cells], pa.bool_())
            if net.key is not None and index in net.key and any(entry[0] == "m" for entry in entries):
                place = net.key.index(index)
                before = [_plain(entry[1][place]) if entry[1] is not None else None for entry in entries]
                arrays[origin(index)] = arrow_array(before, kind, label)
        return write_staged(pa.table(arrays), self.directory, net.key, truncated=net.truncated, columns=columns)

    def kind(self, table: str, column: RelationColumn) -> pa.DataType:
        return pa.string() if f"{table}.{column.name}" in self.as_text else arrow_type(column)


def has_ranges(kind: pa.DataType) -> bool:
    """Return True if the statistics of a file have the smallest and largest value of columns of this type."""
    kinds = pa.types.is_integer, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp
    return any(is_kind(kind) for is_kind in kinds)


def _ranges(keys: pa.ChunkedArray) -> tuple[tuple[Any, Any], ...] | None:
    """Return ranges that together have all values. There are several, so that one distant value makes none wide."""
    if not has_ranges(keys.type):
        return None
    sorted_keys = keys.combine_chunks().sort().to_pylist()
    size = max(1, len(sorted_keys) // RANGES)
    return tuple(
        (sorted_keys[start], sorted_keys[min(start + size, len(sorted_keys)) - 1])
        for start in range(0, len(sorted_keys), size)
    )


def _plain(cell: Value) -> bytes | None:
    return cell if isinstance(cell, bytes) else None


def _entries(net: Net) -> Iterator[Entry]:
    ncols = len(net.columns)
    if net.key is None:
        for op, bag in (("-", net.fewer), ("+", net.more)):
            for row, count in bag.items():
                yield from [(op, None, values(row, ncols))] * count
        return
    width = len(net.key)
    left = set(net.gone)
    for key, row in net.rows.items():
        before, after = net.origins.get(key, key), values(row, ncols)
        if before is None:  # new; unsent values are NULL here, because the column's default is not known
            yield "u", None, tuple([None if cell is UNCHANGED else cell for cell in after])
        elif before == key or key not in net.lacking:
            yield "u", None, after
        else:
            yield "m", values(before, width), after
        if before is not None and before != key:
            left.add(before)
    for key in left - net.rows.keys():
        only_key: list[Value] = [None] * ncols
        for index, cell in zip(net.key, values(key, width), strict=True):
            only_key[index] = cell
        yield "d", None, tuple(only_key)
