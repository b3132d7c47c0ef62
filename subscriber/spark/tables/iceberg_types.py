"""Columns and statistics of files as Iceberg has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from subscriber.errors import ApplyError
from subscriber.spark.tables.data_files import NUMBER, NewFile
from subscriber.spark.tables.partitions import PartitionValues
from subscriber.spark.tables.position_deletes import FILE_PATH, POSITION, NewDeletes

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TYPES: Sequence[tuple[pa.DataType, PrimitiveType]] = (
    (pa.bool_(), BooleanType()),
    (pa.int32(), IntegerType()),
    (pa.int64(), LongType()),
    (pa.float32(), FloatType()),
    (pa.float64(), DoubleType()),
    (pa.string(), StringType()),
    (pa.binary(), BinaryType()),
    (pa.date32(), DateType()),
    (pa.timestamp("us"), TimestampType()),
    (pa.timestamp("us", tz="UTC"), TimestamptzType()),
)
_ICEBERG: Mapping[pa.DataType, PrimitiveType] = {**dict(_TYPES), pa.int16(): IntegerType()}
_ARROW: Mapping[PrimitiveType, pa.DataType] = {iceberg: arrow for arrow, iceberg in _TYPES}
_WIDER = {(IntegerType(), LongType()), (FloatType(), DoubleType())}


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return the columns of a table as those of its files, with their numbers."""
    return pa.schema(
        [pa.field(field.name, _arrow(field), metadata={NUMBER: str(field.field_id)}) for field in schema.fields]
    )


def _arrow(field: NestedField) -> pa.DataType:
    kind = field.field_type
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, ListType):
        element = _arrow(NestedField(kind.element_id, field.name, kind.element_type))
        return pa.list_(pa.field("element", element, metadata={NUMBER: str(kind.element_id)}))
    if isinstance(kind, StructType):
        return pa.struct(list(arrow_schema(Schema(*kind.fields))))
    if not isinstance(kind, PrimitiveType) or kind not in _ARROW:
        raise ApplyError(
            f'column "{field.name}" of its Iceberg table is {kind}, which is not supported here',
            hint="Another program has changed the table.",
        )
    return _ARROW[kind]


def iceberg_type(kind: pa.DataType, numbers: Iterator[int]) -> IcebergType:
    """Return the type of a column. The elements of a list, and the fields of a struct, get some of the numbers."""
    if pa.types.is_list(kind):
        return ListType(next(numbers), iceberg_type(kind.value_type, numbers), element_required=False)
    if pa.types.is_struct(kind):
        return StructType(
            *(
                NestedField(next(numbers), field.name, iceberg_type(field.type, numbers), required=False)
                for field in kind.fields
            )
        )
    return DecimalType(kind.precision, kind.scale) if pa.types.is_decimal(kind) else _ICEBERG[kind]


def is_readable_as(kind: IcebergType, wanted: IcebergType) -> bool:
    """Return True if files with values of type `kind` can be read as `wanted`: it is the same type, or a wider one."""
    if isinstance(kind, DecimalType) and isinstance(wanted, DecimalType):
        return kind.scale == wanted.scale and kind.precision <= wanted.precision
    return kind == wanted or (kind, wanted) in _WIDER


def partition_record(values: PartitionValues) -> Record:
    """Return the values of a partition as a manifest has them."""
    return Record(*map(_raw, values))


def _raw(value: Any) -> Any:
    match value:
        case datetime():
            return (value.replace(tzinfo=value.tzinfo or UTC) - _EPOCH) // timedelta(microseconds=1)
        case date():
            return (value - _EPOCH.date()).days
        case _:
            return value


def partition_values(file: IcebergFile) -> PartitionValues:
    """Return the values of a file's partition, as manifests have them."""
    return tuple(file.partition[place] for place in range(len(file.partition)))


def iceberg_file(new: NewFile, directory: str, schema: Schema, spec: int, order: int | None) -> IcebergFile:
    """Return what a manifest has of a new file.

    Args:
        new: the file.
        directory: the location of the table, with a slash at the end.
        schema: the columns of the table.
        spec: the number of the specification of its partitions.
        order: the number of the sort order of its rows; None: they are in no order of the table.
    """
    fields = {name: schema.find_field(name) for name in new.columns}
    ranges = {name: column for name, column in new.columns.items() if column.low is not None}

    def bounds(side: str) -> dict[int, bytes]:
        return {
            fields[name].field_id: to_bytes(_primitive(fields[name]), getattr(column, side))
            for name, column in ranges.items()
        }

    return _file(
        spec,
        partition_record(new.partition),
        DataFileContent.DATA,
        directory + new.path,
        new.size,
        new.rows,
        nulls={fields[name].field_id: column.nulls for name, column in new.columns.items()},
        low=bounds("low"),
        high=bounds("high"),
        order=order,
    )


def iceberg_delete_file(new: NewDeletes, directory: str, data_file: IcebergFile) -> IcebergFile:
    """Return what a manifest has of a file of positions. Its two bounds of the path name the data file.

    Args:
        new: the file.
        directory: the location of the table, with a slash at the end.
        data_file: the file with the rows, whose partition the new file has.
    """
    path = to_bytes(StringType(), directory + new.data_file)
    return _file(
        data_file.spec_id,
        data_file.partition,
        DataFileContent.POSITION_DELETES,
        directory + new.path,
        new.size,
        new.rows,
        nulls={FILE_PATH: 0, POSITION: 0},
        low={FILE_PATH: path, POSITION: to_bytes(LongType(), new.first)},
        high={FILE_PATH: path, POSITION: to_bytes(LongType(), new.last)},
    )


def deleted_from(file: IcebergFile) -> str | None:
    """Return the location of the data file of which a delete file has positions; None: it has something else."""
    low, high = (file.lower_bounds or {}).get(FILE_PATH), (file.upper_bounds or {}).get(FILE_PATH)
    is_known = file.content == DataFileContent.POSITION_DELETES and file.file_format == FileFormat.PARQUET
    return low.decode() if is_known and low is not None and low == high else None


def _file(
    spec: int,
    partition: Record,
    content: DataFileContent,
    path: str,
    size: int,
    rows: int,
    *,
    nulls: Mapping[int, int],
    low: Mapping[int, bytes],
    high: Mapping[int, bytes],
    order: int | None = None,
) -> IcebergFile:
    file = IcebergFile.from_args(
        _table_format_version=2,
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=partition,
        record_count=rows,
        file_size_in_bytes=size,
        column_sizes={},
        value_counts=dict.fromkeys(nulls, rows),
        null_value_counts=nulls,
        nan_value_counts={},
        lower_bounds=low,
        upper_bounds=high,
        key_metadata=None,
        split_offsets=None,
        equality_ids=None,
        sort_order_id=order,
    )
    file.spec_id = spec
    return file


def key_range(file: IcebergFile, field: NestedField | None) -> tuple[Any, Any]:
    """Return the smallest and largest value that a file has in a column; None: unknown."""
    if field is None:
        return None, None
    low, high = (file.lower_bounds or {}).get(field.field_id), (file.upper_bounds or {}).get(field.field_id)
    if low is None or high is None:
        return None, None
    return _python(_primitive(field), low), _python(_primitive(field), high)


def _primitive(field: NestedField) -> PrimitiveType:
    assert isinstance(field.field_type, PrimitiveType)  # as _arrow() has checked
    return field.field_type


def _python(kind: PrimitiveType, bound: bytes) -> Any:
    value: Any = from_bytes(kind, bound)
    if isinstance(kind, DateType):
        return (_EPOCH + timedelta(days=value)).date()
    if isinstance(kind, TimestamptzType):
        return _EPOCH + timedelta(microseconds=value)
    if isinstance(kind, TimestampType):
        return (_EPOCH + timedelta(microseconds=value)).replace(tzinfo=None)
    return value
