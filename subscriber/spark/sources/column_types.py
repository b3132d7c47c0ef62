"""The types of pgcdc's columns: those of arrow_types.py, and arrays.

An array of one dimension is a list. A value that a list cannot represent, because it has more dimensions or other
bounds than 1, does not fit its column.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pyarrow as pa

from subscriber.change_stream.types.containers import ArrayFromText
from subscriber.errors import ValueUnsupported
from subscriber.protocol.messages import RelationColumn
from subscriber.spark.sources.arrow_types import arrow_array, arrow_type
from subscriber.sqlstate import NUMERIC_VALUE_OUT_OF_RANGE

# The OID of an array type, and of its elements' type. Arrays of other types are text.
_ELEMENTS = {
    199: 114,  # json
    1000: 16,  # bool
    1001: 17,  # bytea
    1003: 19,  # name
    1005: 21,  # int2
    1007: 23,  # int4
    1009: 25,  # text
    1014: 1042,  # bpchar
    1015: 1043,  # varchar
    1016: 20,  # int8
    1021: 700,  # float4
    1022: 701,  # float8
    1115: 1114,  # timestamp
    1182: 1082,  # date
    1183: 1083,  # time
    1185: 1184,  # timestamptz
    1187: 1186,  # interval
    1231: 1700,  # numeric
    2951: 2950,  # uuid
    3807: 3802,  # jsonb
}


def column_type(column: RelationColumn) -> pa.DataType:
    """Return the column's type in Arrow and Spark."""
    element = _ELEMENTS.get(column.type_oid)
    if element is None:
        return arrow_type(column)
    return pa.list_(arrow_type(replace(column, type_oid=element)))


def column_array(texts: pa.BinaryArray, kind: pa.DataType, label: str) -> pa.Array:
    """Convert texts to an array of `kind`. Raises ValueUnsupported that names `label`, never the value."""
    if not pa.types.is_list(kind):
        return arrow_array(texts, kind, label)
    lists = [None if value is None else _elements(value, kind, label) for value in texts.to_pylist()]
    flat = arrow_array([element for found in lists if found is not None for element in found], kind.value_type, label)
    ends = accumulate((0 if found is None else len(found) for found in lists), initial=0)
    mask = pa.array([found is None for found in lists], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(list(ends), pa.int32()), flat, type=kind, mask=mask)


def _same(value: bytes) -> bytes:
    return value


_array_from_text = ArrayFromText(_same)


def _elements(value: bytes, kind: pa.DataType, label: str) -> list[bytes | None]:
    found = [] if value.startswith(b"[") else _array_from_text(value)
    if value.startswith(b"[") or any(isinstance(element, list) for element in found):
        error = ValueUnsupported(
            f'a value of column "{label}" cannot be stored as {kind}', sqlstate=NUMERIC_VALUE_OUT_OF_RANGE
        )
        error.column = label
        raise error
    return found
