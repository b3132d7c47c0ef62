"""The publisher's text values as Arrow types.

A type without an exact Arrow counterpart is kept as text: intervals, arrays, ranges, numeric without precision. A value
that its Arrow type cannot hold (infinity in a date, NaN in a numeric(10,2)) raises an error that names the column. Such
a column can be kept as text with an option.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.row_columns import Cells, unhex_values
from subscriber.display import shell_word
from subscriber.errors import ValueUnsupported
from subscriber.protocol.messages import RelationColumn

NUMERIC = 1700
_TYPES: dict[int, pa.DataType] = {
    16: pa.bool_(),
    17: pa.binary(),  # bytea
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", tz="UTC"),
}
_NAMES = {
    pa.bool_(): "boolean",
    pa.binary(): "bytea",
    pa.int64(): "bigint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", tz="UTC"): "timestamptz",
}
MAX_PRECISION = 38  # of decimal128


def arrow_type(column: RelationColumn) -> pa.DataType:
    """Return the column's type in Arrow, Delta and Spark."""
    if column.type_oid == NUMERIC and column.type_modifier > 4:
        precision, scale = (column.type_modifier - 4) >> 16, (column.type_modifier - 4) & 0x7FF
        if precision <= MAX_PRECISION and scale <= precision:
            return pa.decimal128(precision, scale)
    return _TYPES.get(column.type_oid, pa.string())


def type_name(kind: pa.DataType) -> str:
    """Return PostgreSQL's name of a type that arrow_type() has returned."""
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    return _NAMES.get(kind, str(kind))


def cells_array(number: int, cells: Cells) -> pa.BinaryArray:
    """Return the values of a column of gathered rows."""
    (nulls, bits), offsets, data = cells
    return pa.Array.from_buffers(pa.binary(), number, [pa.py_buffer(part) for part in (bits, offsets, data)], nulls)


def multiples(step: int, number: int) -> pa.Int32Array:
    """Return 0, step, 2 * step, …: `number` values. Raises OverflowError if one is not an int32."""
    size = 1 << number.bit_length()
    return _multiples(step, size if step * size < 1 << 31 else number).slice(0, number)


@lru_cache(maxsize=8)  # batches of a task have about the same number of rows
def _multiples(step: int, number: int) -> pa.Int32Array:
    return pa.Array.from_buffers(pa.int32(), number, [None, pa.py_buffer(array("i", range(0, step * number, step)))])


def arrow_array(values: Sequence[bytes | None] | pa.BinaryArray, kind: pa.DataType, label: str) -> pa.Array:
    """Convert texts to an array of `kind`. Raises ValueUnsupported that names `label`, never the value."""
    texts = values if isinstance(values, pa.Array) else pa.array(values, pa.binary())
    try:
        if pa.types.is_boolean(kind):
            return pc.equal(texts, b"t")
        if pa.types.is_binary(kind):
            present, offsets, data = pa.concat_arrays([texts]).buffers()  # without an offset
            buffers = unhex_values(offsets[: (len(texts) + 1) * 4], data if data is not None else b"")
            return pa.Array.from_buffers(kind, len(texts), [present, *map(pa.py_buffer, buffers)])
        return pc.cast(texts.cast(pa.string()), kind)
    except (pa.ArrowInvalid, ValueError):
        if pa.types.is_string(kind):  # a publisher in SQL_ASCII sends unchecked bytes
            texts_read = [None if value is None else value.decode(errors="replace") for value in texts.to_pylist()]
            return pa.array(texts_read, kind)
        raise ValueUnsupported(
            f'a value of column "{label}" cannot be stored as {type_name(kind)}',
            column=label,
            hint=f"Keep the column as text: --text {shell_word(label)}",
        ) from None
