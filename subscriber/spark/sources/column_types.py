"""The types of pgcdc's columns: those of arrow_types.py, arrays, and composite types.

An array of one dimension is a list. A value that a list cannot represent, because it has more dimensions or other
bounds than 1, does not fit its column.

A composite type is a struct, if the schema history of the log has its attributes. A text with fewer fields is of a time
before the last attributes were added (changelog/schema_history.py), and these are null. A text with more fields does
not fit its column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pyarrow as pa

from subscriber.change_stream.types.containers import ArrayFromText, composite_fields
from subscriber.changelog.schema_history import LoggedType
from subscriber.errors import ValueUnsupported
from subscriber.protocol.messages import RelationColumn
from subscriber.spark.sources.arrow_types import arrow_array, arrow_type

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


def column_type(column: RelationColumn, types: Sequence[LoggedType] = ()) -> pa.DataType:
    """Return the column's type in Arrow and Spark. `types`: the composite types, and arrays of them, that it uses."""
    row_type = next((kind for kind in types if kind.oid == column.type_oid), None)
    if row_type is not None and row_type.element is None:
        return pa.struct(
            [
                (name, column_type(RelationColumn(False, name, type_oid, modifier), types))
                for name, type_oid, modifier in row_type.attributes
            ]
        )
    element = _ELEMENTS.get(column.type_oid) if row_type is None else row_type.element
    if element is None:
        return arrow_type(column)
    return pa.list_(column_type(replace(column, type_oid=element), types))


def extends(kind: pa.DataType, later: pa.DataType) -> bool:
    """Return True if texts of type `kind` are converted to `later` exactly: attributes were added or renamed."""
    if pa.types.is_list(kind) and pa.types.is_list(later):
        return extends(kind.value_type, later.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(later):
        return kind.num_fields <= later.num_fields and all(
            extends(kind.field(i).type, later.field(i).type) for i in range(kind.num_fields)
        )
    return bool(kind == later)


def has_struct(kind: pa.DataType) -> bool:
    """Return True if values of a type have structs."""
    return has_struct(kind.value_type) if pa.types.is_list(kind) else bool(pa.types.is_struct(kind))


def column_array(texts: pa.BinaryArray, kind: pa.DataType, label: str) -> pa.Array:
    """Convert texts to an array of `kind`. Raises ValueUnsupported that names `label`, never the value."""
    if pa.types.is_struct(kind):
        return _struct_array(texts, kind, label)
    if not pa.types.is_list(kind):
        return arrow_array(texts, kind, label)
    lists = [None if value is None else _elements(value, kind, label) for value in texts.to_pylist()]
    elements = [element for array in lists if array is not None for element in array]
    flat = column_array(pa.array(elements, pa.binary()), kind.value_type, label)
    ends = accumulate((0 if array is None else len(array) for array in lists), initial=0)
    mask = pa.array([array is None for array in lists], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(list(ends), pa.int32()), flat, type=kind, mask=mask)


def _struct_array(texts: pa.BinaryArray, kind: pa.StructType, label: str) -> pa.Array:
    width = kind.num_fields
    columns: list[list[bytes | None]] = [[] for _ in range(width)]
    nothing: list[bytes | None] = [None] * width
    for value in texts.to_pylist():
        try:
            fields = nothing if value is None else composite_fields(value)
        except ValueError:
            raise _unsupported(kind, label) from None
        if len(fields) > width:
            raise _unsupported(kind, label)
        for column, field in zip(columns, [*fields, *nothing[len(fields) :]], strict=True):
            column.append(field)
    arrays = [
        column_array(pa.array(column, pa.binary()), kind.field(i).type, label) for i, column in enumerate(columns)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=texts.is_null())


def _unsupported(kind: pa.DataType, label: str) -> ValueUnsupported:
    return ValueUnsupported(f'a value of column "{label}" cannot be stored as {kind}', column=label)


def _same(value: bytes) -> bytes:
    return value


_array_from_text = ArrayFromText(_same)


def _elements(value: bytes, kind: pa.DataType, label: str) -> list[bytes | None]:
    elements = [] if value.startswith(b"[") else _array_from_text(value)
    if value.startswith(b"[") or any(isinstance(element, list) for element in elements):
        raise _unsupported(kind, label)
    return elements
