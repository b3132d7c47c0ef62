"""A part of a table's net effect as an Arrow file, written on an executor. The driver merges it into the Delta table.

    op d   the row with this key is deleted; only the key's columns are set
    op u   the row with this key has, or gets, these values; if _u_<column> is true the column does not change
    op m   the same, but the row's old key is in _from_<column>, and unchanged columns have the values of that row
    op +   a table without a key has one more of this row
    op -   … one fewer

A key occurs once among d, u and m. File names are unique; the driver reads only files that a task has reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from subscriber.protocol.messages import RelationColumn
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.net_job import NetTable
from subscriber.spark.changes.raw_rows import UNCHANGED, Value, Values, values
from subscriber.spark.sources.arrow_types import arrow_array, arrow_type

OP = "_op"
STAYS = "_u_"
FROM = "_from_"

Entry = tuple[str, Values | None, Values]  # op, the old key (of m), values


@dataclass(frozen=True, slots=True)
class Staged:
    """The result of a task. `key` are column names; None for a table without a key."""

    path: Path
    columns: tuple[RelationColumn, ...]
    key: tuple[str, ...] | None
    truncated: bool
    rows: int


@dataclass(frozen=True, slots=True)
class ToArrow:
    """The sink: writes into `directory`, which driver and executors share. `as_text` are schema.table.column."""

    directory: Path
    as_text: frozenset[str]

    def __call__(self, table: NetTable, net: Net, part: int) -> Staged:
        columns = table.relation.columns
        entries = list(_entries(net))
        arrays: dict[str, pa.Array] = {OP: pa.array([op for op, _, _ in entries], pa.string())}
        for index, column in enumerate(columns):
            label = f"{table.label}.{column.name}"
            kind = self.kind(table.label, column)
            found = [entry[2][index] for entry in entries]
            arrays[column.name] = arrow_array([_plain(value) for value in found], kind, label)
            if UNCHANGED in found:
                arrays[STAYS + column.name] = pa.array([value is UNCHANGED for value in found], pa.bool_())
            if net.key is not None and index in net.key and any(entry[0] == "m" for entry in entries):
                place = net.key.index(index)
                before = [_plain(entry[1][place]) if entry[1] is not None else None for entry in entries]
                arrays[FROM + column.name] = arrow_array(before, kind, label)
        path = self.directory / f"{part}-{uuid4().hex}.arrow"
        staged = pa.table(arrays)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, staged.schema) as writer:
            writer.write_table(staged)
        key = None if net.key is None else tuple(net.columns[index] for index in net.key)
        return Staged(path, columns, key, net.truncated, len(entries))

    def kind(self, table: str, column: RelationColumn) -> pa.DataType:
        return pa.string() if f"{table}.{column.name}" in self.as_text else arrow_type(column)


def _plain(value: Value) -> bytes | None:
    return value if isinstance(value, bytes) else None


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
        origin, after = net.origins.get(key, key), values(row, ncols)
        if origin is None:  # new; unsent values are NULL here, because the column's default is not known
            yield "u", None, tuple([None if value is UNCHANGED else value for value in after])
        elif origin == key or key not in net.lacking:
            yield "u", None, after
        else:
            yield "m", values(origin, width), after
        if origin is not None and origin != key:
            left.add(origin)
    for key in left - net.rows.keys():
        only_key: list[Value] = [None] * ncols
        for index, value in zip(net.key, values(key, width), strict=True):
            only_key[index] = value
        yield "d", None, tuple(only_key)
