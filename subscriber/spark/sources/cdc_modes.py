"""The option `mode` of pgcdc: the same changes in the columns of other tools.

    debezium   before, after, source, op, ts_ms: the envelope of Debezium's events
    delta      the table's columns, _change_type, _commit_version, _commit_timestamp: Delta's change data feed

Both are projections of a batch: no value is copied or converted again.

Mode `delta` needs REPLICA IDENTITY FULL, because each row has all values. A truncate has a row with the change type
`truncate` and null in the table's columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from subscriber.errors import StatementError
from subscriber.spark.sources.cdc_batch import RESCUED, cdc_schema
from subscriber.spark.sources.cdc_tables import CdcTable
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

_SOURCE = pa.struct(
    [
        ("schema", pa.string()),
        ("table", pa.string()),
        ("lsn", pa.int64()),
        ("sequence", pa.string()),
        ("txId", pa.int64()),
        ("ts_ms", pa.int64()),
        ("snapshot", pa.string()),
    ]
)
_DELTA = [
    ("_change_type", pa.string()),
    ("_commit_version", pa.int64()),
    ("_commit_timestamp", pa.timestamp("us", tz="UTC")),
    ("_seq", pa.string()),
]


def mode_schema(mode: str, tables: Sequence[CdcTable], *, rescue: bool) -> pa.Schema:
    """Return the columns of a mode: cdc, debezium or delta.

    Raises:
        StatementError: mode `delta` does not fit the tables.
    """
    plain = cdc_schema(tables, rescue=rescue)
    rescued = [plain.field(RESCUED)] if rescue else []
    if mode == "debezium":
        row = plain.field("after").type
        about = [("source", _SOURCE), ("op", pa.string()), ("ts_ms", pa.int64()), ("unchanged", pa.list_(pa.string()))]
        return pa.schema([("before", row), ("after", row), *about, *rescued])
    if mode == "delta":
        (table,) = _only_full(tables)
        return pa.schema([*table.struct(), *_DELTA, *rescued])
    return plain


def _only_full(tables: Sequence[CdcTable]) -> Sequence[CdcTable]:
    if len(tables) != 1:
        raise StatementError('mode "delta" of pgcdc reads one table', hint='Name it: .option("tables", "schema.table")')
    if not tables[0].is_full:
        raise StatementError(
            f'mode "delta" of pgcdc needs whole old rows, which the publisher does not send for {tables[0].label}',
            hint=f"On the publisher: ALTER TABLE {tables[0].label} REPLICA IDENTITY FULL. Then take a new snapshot.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    return tables


def row_of_table(mode: str, schema: StructType, label: str, labels: Sequence[str]) -> str:
    """Return the columns of a table in the columns of a query, in Spark's short notation."""
    if mode == "delta":
        names = {name for name, _ in _DELTA} | {RESCUED}
        rows = len(schema.names) - len([name for name in schema.names[-len(names) :] if name in names])
        return StructType(schema.fields[:rows]).simpleString()
    row = schema["after"].dataType
    assert isinstance(row, StructType)
    return (row if len(labels) == 1 else row[label].dataType).simpleString()


def projected(
    mode: str, batches: Iterator[pa.RecordBatch], tables: Sequence[CdcTable], *, rescue: bool
) -> Iterator[pa.RecordBatch]:
    """Return the batches in the columns of a mode."""
    if mode == "cdc":
        return batches
    schema = mode_schema(mode, tables, rescue=rescue)
    project = _debezium if mode == "debezium" else _delta
    return (project(batch, schema) for batch in batches)


def _debezium(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    ops, labels = batch["op"], batch["_table"].to_pylist()
    milliseconds = pc.floor(pc.divide(batch["_commit_ts"].cast(pa.int64()), 1000)).cast(pa.int64())
    names = [label.split(".", 1) for label in labels]
    source = pa.StructArray.from_arrays(
        [
            pa.array([schema for schema, _ in names], pa.string()),
            pa.array([name for _, name in names], pa.string()),
            batch["_lsn"],
            batch["_seq"],
            batch["_xid"],
            milliseconds,
            pc.if_else(pc.equal(ops, "r"), "true", "false"),
        ],
        fields=list(_SOURCE),
    )
    columns = [batch["before"], batch["after"], source, ops, milliseconds, batch["_unchanged"]]
    return pa.RecordBatch.from_arrays([*columns, *_rescued(batch)], schema=schema)


def _rescued(batch: pa.RecordBatch) -> list[pa.Array]:
    return [batch[RESCUED]] if RESCUED in batch.schema.names else []


def _delta(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    rows: list[int] = []
    kinds: list[str] = []
    is_old: list[bool] = []
    for index, op in enumerate(batch["op"].to_pylist()):
        for kind, old in _KINDS[op]:
            rows.append(index)
            kinds.append(kind)
            is_old.append(old)
    chosen = batch.take(pa.array(rows, pa.int32()))
    old = pa.array(is_old, pa.bool_())
    values = [pc.if_else(old, b, a) for b, a in zip(chosen["before"].flatten(), chosen["after"].flatten(), strict=True)]
    about = [pa.array(kinds, pa.string()), chosen["_lsn"], chosen["_commit_ts"], chosen["_seq"]]
    return pa.RecordBatch.from_arrays([*values, *about, *_rescued(chosen)], schema=schema)


# The rows of an operation: the change type, and whether the values are those of the old row.
_KINDS = {
    "r": [("insert", False)],
    "c": [("insert", False)],
    "u": [("update_preimage", True), ("update_postimage", False)],
    "d": [("delete", True)],
    "t": [("truncate", False)],
}
