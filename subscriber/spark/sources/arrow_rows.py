"""Changes of the log as Arrow batches, in the columns that `pgchanges` has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from subscriber.changelog.reader import LoggedChange
from subscriber.protocol.messages import Delete, Insert, LogicalMessage, OldPart, Relation, Truncate, Update
from subscriber.protocol.tuple_data import UNCHANGED, TupleData
from subscriber.timestamps import to_unix

BATCH = 5_000  # rows

# Spark's schema and Arrow's must be the same to the letter.
SCHEMA = """
commit_lsn bigint, commit_time timestamp, xid bigint, number bigint, op string, schema string, `table` string,
key array<string>, before map<string, string>, after map<string, string>, unchanged array<string>,
prefix string, content binary
"""
_VALUES = pa.map_(pa.string(), pa.string())
ARROW = pa.schema(
    [
        ("commit_lsn", pa.int64()),
        ("commit_time", pa.timestamp("us", tz="UTC")),
        ("xid", pa.int64()),
        ("number", pa.int64()),
        ("op", pa.string()),
        ("schema", pa.string()),
        ("table", pa.string()),
        ("key", pa.list_(pa.string())),
        ("before", _VALUES),
        ("after", _VALUES),
        ("unchanged", pa.list_(pa.string())),
        ("prefix", pa.string()),
        ("content", pa.binary()),
    ]
)

Values = list[tuple[str, str | None]]
Row = tuple[Any, ...]


def batches(changes: Iterator[LoggedChange]) -> Iterator[pa.RecordBatch]:
    """A row for each change; a truncate has one for each of its tables."""
    rows = (row for change in changes for row in change_rows(change))
    while chunk := list(islice(rows, BATCH)):
        columns = [pa.array(column, field.type) for column, field in zip(zip(*chunk, strict=True), ARROW, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=ARROW)


def change_rows(change: LoggedChange) -> Iterator[Row]:
    """The change as values for ARROW's columns."""
    begin, message = change.begin, change.message
    where = (begin.final_lsn, to_unix(begin.commit_time), begin.xid, change.number)
    if isinstance(message, LogicalMessage):
        yield (*where, "message", None, None, None, None, None, None, message.prefix, message.content)
        return
    for relation in change.relations:
        named = (*where, type(message).__name__.lower(), relation.schema, relation.name, key_of(relation))
        if isinstance(message, Truncate):
            yield (*named, None, None, None, None, None)
        else:
            yield (*named, *_values_of(relation, message), None, None)


def key_of(relation: Relation) -> list[str]:
    """Names of the columns of the replica identity; all of them under FULL."""
    return [column.name for column in relation.columns if column.is_key]


def _values_of(
    relation: Relation, message: Insert | Update | Delete
) -> tuple[Values | None, Values | None, list[str] | None]:
    before = after = unchanged = None
    if not isinstance(message, Insert) and message.old is not None:
        before = _pairs(relation, message.old, keys_only=message.old_part is OldPart.KEY)[0]
    if not isinstance(message, Delete):
        after, unchanged = _pairs(relation, message.new)
    return before, after, unchanged


def _pairs(relation: Relation, row: TupleData, *, keys_only: bool = False) -> tuple[Values, list[str]]:
    """Return (name, text) of each sent column, and the names of columns that were not sent because unchanged."""
    pairs: Values = []
    unchanged = []
    for column, status, value in zip(relation.columns, *row.split(), strict=True):
        if keys_only and not column.is_key:
            continue
        if status == UNCHANGED:
            unchanged.append(column.name)
        else:
            pairs.append((column.name, None if value is None else value.decode(errors="replace")))
    return pairs, unchanged
