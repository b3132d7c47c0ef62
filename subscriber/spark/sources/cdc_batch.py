"""Batches of pgcdc: its columns, and texts of rows as Arrow arrays of their types.

    op           r: row of the snapshot, c: inserted, u: updated, d: deleted, t: truncated
    before       the old row as far as it was sent: its key, all columns under REPLICA IDENTITY FULL, or null
    after        the new row
    _table       schema.table
    _lsn         position of the commit record, or of the snapshot
    _seq         position and number in the transaction, in 26 hexadecimal digits, which sort as text
    _xid         transaction ID; null in a snapshot
    _commit_ts   time of the commit, or of the snapshot
    _unchanged   names of columns of `after` that are null because they did not change and were not sent
    _rescued     with the option rescue: the texts of values that have no place in the columns

**Invariants.**

- A value that its column cannot hold is an error or in `_rescued`.
- Values are converted by column. There is no Python object for a value, except in columns of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.row_columns import Bits, Cells
from subscriber.display import json_text
from subscriber.errors import ValueUnsupported
from subscriber.spark.sources.arrow_types import cells_array
from subscriber.spark.sources.cdc_tables import CdcColumn, CdcTable
from subscriber.spark.sources.column_types import column_array

RESCUED = "_rescued"

_TEXTS = pa.map_(pa.string(), pa.string())
_NAMES = pa.list_(pa.string())
ABOUT = [
    ("_table", pa.string()),
    ("_lsn", pa.int64()),
    ("_seq", pa.string()),
    ("_xid", pa.int64()),
    ("_commit_ts", pa.timestamp("us", tz="UTC")),
]

Extras: TypeAlias = list[tuple[str, str]]


def row_type(tables: Sequence[CdcTable]) -> pa.DataType:
    """Return the type of `before` and `after`: the row, or a struct with a row for each of several tables."""
    if len(tables) == 1:
        return tables[0].struct()
    return pa.struct([(table.label, table.struct()) for table in tables])


def cdc_schema(tables: Sequence[CdcTable], *, rescue: bool) -> pa.Schema:
    """Return the columns of the source."""
    row = row_type(tables)
    rescued = [(RESCUED, _TEXTS)] if rescue else []
    return pa.schema([("op", pa.string()), ("before", row), ("after", row), *ABOUT, ("_unchanged", _NAMES), *rescued])


class RowTexts(NamedTuple):
    """The texts of `before` or `after` of some rows. `present` is a bit for each row. None: the row has this side."""

    number: int
    nulls: int
    present: pa.Buffer | None
    columns: list[pa.Array]


def side_of(number: int, present: Bits, columns: Sequence[Cells]) -> RowTexts:
    """Return the texts of gathered rows."""
    nulls, bits = present
    return RowTexts(number, nulls, pa.py_buffer(bits), [cells_array(number, cells) for cells in columns])


def names_of(number: int, unsent: Cells | None, table: CdcTable) -> pa.Array:
    """Return the values of `_unchanged` of gathered rows."""
    if unsent is None:
        return pa.nulls(number, _NAMES)
    (nulls, bits), offsets, indexes = unsent
    chosen = pa.Array.from_buffers(pa.int32(), len(indexes) // 4, [None, pa.py_buffer(indexes)])
    names = pa.array([column.name for column in table.columns], pa.string()).take(chosen)
    return pa.Array.from_buffers(_NAMES, number, [pa.py_buffer(bits), pa.py_buffer(offsets)], nulls, children=[names])


@dataclass(slots=True)
class CdcTableRows:
    """Rows of a table in a batch.

    Attributes:
        table: the table.
        places: the indexes of the rows in the batch, ascending.
        before: their texts.
        after: their texts.
        unchanged: their values of `_unchanged`.
        extras: for each row, values of columns that the query does not have. None: the query does not keep them.
    """

    table: CdcTable
    places: pa.Array
    before: RowTexts
    after: RowTexts
    unchanged: pa.Array
    extras: list[Extras] | None


def cdc_batch(
    ops: pa.Array, about: Sequence[pa.Array], rows: Sequence[CdcTableRows], tables: Sequence[CdcTable], *, rescue: bool
) -> pa.RecordBatch:
    """Return a batch of cdc_schema().

    Args:
        ops: the column `op`.
        about: the columns of ABOUT.
        rows: all rows of the batch.
        tables: the tables of the query.
        rescue: values that do not fit are kept in `_rescued`.

    Raises:
        ValueUnsupported: a value does not fit its column, and `rescue` is false.
    """
    number = len(ops)
    before = _sides([(part, part.before) for part in rows], number, tables)
    after = _sides([(part, part.after) for part in rows], number, tables)
    unchanged = scattered([(part.places, part.unchanged) for part in rows], number, _NAMES)
    arrays = [ops, before, after, *about, unchanged]
    if rescue:
        rescued: list[Extras] = [[] for _ in range(number)]
        for part in rows:
            for place, extras in zip(part.places.to_pylist(), part.extras or (), strict=True):
                rescued[place] = extras
        arrays.append(pa.array([dict(extras) or None for extras in rescued], _TEXTS))
    return pa.RecordBatch.from_arrays(arrays, schema=cdc_schema(tables, rescue=rescue))


def _sides(sides: Sequence[tuple[CdcTableRows, RowTexts]], number: int, tables: Sequence[CdcTable]) -> pa.StructArray:
    """Return the array of `before` or `after`."""
    arrays = []
    for table in tables:
        parts = [(part.places, _struct(part, side)) for part, side in sides if part.table is table]
        arrays.append(scattered(parts, number, table.struct()))
    if len(tables) == 1:
        return arrays[0]
    mask = reduce(pc.and_, [array.is_null() for array in arrays])
    return pa.StructArray.from_arrays(arrays, fields=list(row_type(tables)), mask=mask)


def scattered(parts: Sequence[tuple[pa.Array, pa.Array]], number: int, kind: pa.DataType) -> pa.Array:
    """Return an array of `number` values that has the values of each part at their places, and null elsewhere."""
    if len(parts) == 1 and len(parts[0][0]) == number:
        return parts[0][1]
    if not parts:
        return pa.nulls(number, kind)
    places = pa.concat_arrays([places for places, _ in parts])
    everywhere = pa.array(range(number), pa.int64())
    others = everywhere.filter(pc.invert(pc.is_in(everywhere, places)))
    # The inverse permutation: for each place, which value is there. Beyond the last one there is a null.
    chosen = pc.sort_indices(pa.concat_arrays([places, others]))
    chosen = pc.min_element_wise(chosen, pa.scalar(len(places), pa.uint64()))
    return pa.concat_arrays([*(values for _, values in parts), pa.nulls(1, kind)]).take(chosen)


def _struct(rows: CdcTableRows, side: RowTexts) -> pa.StructArray:
    kind = rows.table.struct()
    if side.nulls == side.number:
        return pa.nulls(side.number, kind)
    arrays = [_column(rows, column, values) for column, values in zip(rows.table.columns, side.columns, strict=True)]
    return pa.Array.from_buffers(kind, side.number, [side.present], side.nulls, children=arrays)


def _column(rows: CdcTableRows, column: CdcColumn, values: pa.Array) -> pa.Array:
    """Convert the values of a column, and keep those that do not fit in `extras`."""
    label = f"{rows.table.label}.{column.name}"
    try:
        return column_array(values, column.kind, label)
    except ValueUnsupported as error:
        if rows.extras is None:
            error.amend(
                hint=(
                    f'Read the column as text: .option("text", {json_text(label)}), or set the option rescue to true.'
                )
            )
            raise
    texts = values.to_pylist()
    fitting = [text if text is not None and _fits(text, column, label) else None for text in texts]
    for extras, text, fits in zip(rows.extras, texts, fitting, strict=True):
        if text is not None and fits is None:
            extras.append((column.name, text.decode(errors="replace")))
    return column_array(pa.array(fitting, pa.binary()), column.kind, label)


def _fits(text: bytes, column: CdcColumn, label: str) -> bool:
    try:
        column_array(pa.array([text], pa.binary()), column.kind, label)
    except ValueUnsupported:
        return False
    return True
