"""Changes of the log and rows of a snapshot as Arrow batches with typed columns, for pgcdc.

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

- `_seq` is unique. A row of a snapshot has the number of the row, and one position less than the snapshot. No commit
  record starts there, so these rows sort before all changes.
- A value that its column cannot hold is an error or in `_rescued`.
- Values are converted by column, because that takes a fraction of the time that it takes by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from subscriber.changelog.reader import Scanned
from subscriber.display import json_text
from subscriber.errors import ApplyError, ValueUnsupported
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, Truncate, Update
from subscriber.protocol.tuple_data import UNCHANGED
from subscriber.spark.sources.cdc_tables import CdcColumn, CdcTable, Fit, Misfit, Placement
from subscriber.spark.sources.column_types import column_array
from subscriber.spark.sources.table_snapshot import SnapshotRows, TableSnapshot
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.timestamps import to_unix

BATCH = 10_000  # rows
RESCUED = "_rescued"

_TEXTS = pa.map_(pa.string(), pa.string())
_ABOUT = [
    ("_table", pa.string()),
    ("_lsn", pa.int64()),
    ("_seq", pa.string()),
    ("_xid", pa.int64()),
    ("_commit_ts", pa.timestamp("us", tz="UTC")),
    ("_unchanged", pa.list_(pa.string())),
]

Values: TypeAlias = Sequence[bytes | None]
Extras: TypeAlias = list[tuple[str, str]]


class CdcRow(NamedTuple):
    """A row of the source. `before` and `after` have the values of the table's columns."""

    op: str
    table: CdcTable
    before: Values | None
    after: Values | None
    lsn: int
    number: int
    xid: int | None
    time: int  # microseconds since 1970
    unchanged: list[str] | None
    extras: Extras | None


def sequence_number(lsn: int, number: int) -> str:
    """Return the value of `_seq`."""
    return f"{lsn:016X}{number:010X}"


def row_type(tables: Sequence[CdcTable]) -> pa.DataType:
    """Return the type of `before` and `after`: the row, or a struct with a row for each of several tables."""
    if len(tables) == 1:
        return tables[0].struct()
    return pa.struct([(table.label, table.struct()) for table in tables])


def cdc_schema(tables: Sequence[CdcTable], *, rescue: bool) -> pa.Schema:
    """Return the columns of the source."""
    row = row_type(tables)
    rescued = [(RESCUED, _TEXTS)] if rescue else []
    return pa.schema([("op", pa.string()), ("before", row), ("after", row), *_ABOUT, *rescued])


# --- rows ---------------------------------------------------------------------------------------


def snapshot_rows(rows: SnapshotRows, snapshot: TableSnapshot, table: CdcTable) -> Iterator[CdcRow]:
    """Yield the rows of a part of a snapshot."""
    if isinstance(table.snapshot, Misfit):
        raise misfit_error(table, table.snapshot)
    place = table.snapshot
    assert place is not None
    time, first = to_unix(snapshot.taken), rows.file.first + rows.skip
    for number, values in enumerate(rows.values(snapshot.directory, place.width), first):
        after = values if place.is_same else _placed(values, place)
        yield CdcRow("r", table, None, after, snapshot.position, number, None, time, None, _extras(values, place))


def change_rows(changes: Iterable[Scanned], tables: Iterable[CdcTable]) -> Iterator[CdcRow]:
    """Yield the rows of changes of these tables."""
    labels = {table.label: table for table in tables}
    decode = Decoder().decode
    found: dict[int, tuple[tuple[Relation, ...], CdcTable, Placement]] = {}  # by the identity of the first
    for begin, number, relations, payload in changes:
        commit = begin.final_lsn
        message = decode(payload)
        if isinstance(message, Truncate):
            for relation in relations:
                if (truncated := labels.get(f"{relation.schema}.{relation.name}")) is not None:
                    time = to_unix(begin.commit_time)
                    yield CdcRow("t", truncated, None, None, commit, number, begin.xid, time, None, None)
            continue
        if not isinstance(message, Insert | Update | Delete):
            continue
        described = found.get(id(relations))
        if described is None:
            table = labels[f"{relations[0].schema}.{relations[0].name}"]
            described = found[id(relations)] = relations, table, _place(table, relations[0], commit)
        _, table, place = described
        yield _change_row(message, table, place, commit, number, begin.xid, to_unix(begin.commit_time))


def _place(table: CdcTable, relation: Relation, commit: Lsn) -> Placement:
    fit = table.fit(commit)
    if isinstance(fit, Misfit):
        raise misfit_error(table, fit)
    if tuple(column.name for column in relation.columns) != fit.names:
        raise misfit_error(table, Misfit("has other columns than the schema history of the change log", commit))
    return fit


def misfit_error(table: CdcTable, misfit: Fit) -> ApplyError:
    """Return the error of a table whose changes do not fit the query's columns."""
    assert isinstance(misfit, Misfit)
    return ApplyError(
        f"changes of table {table.label} do not fit the columns of the query: {misfit.reason}",
        hint="If a column was added, start the query again, or set the option rescue to true. Otherwise take a new "
        f'snapshot for a new query, or start one after that position: .option("start", "{misfit.position}")',
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


def _change_row(
    message: Insert | Update | Delete,
    table: CdcTable,
    place: Placement,
    commit: Lsn,
    number: int,
    xid: int,
    time: int,
) -> CdcRow:
    before: Values | None = None
    after: Values | None = None
    unchanged: list[str] | None = None
    extras: Extras | None = None
    if not isinstance(message, Insert) and message.old is not None:
        _, old = message.old.split()
        before = old if place.is_same else _placed(old, place, is_key=message.old_part is OldPart.KEY)
        if isinstance(message, Delete):
            extras = _extras(old, place)
    if not isinstance(message, Delete):
        status, new = message.new.split()
        after = new if place.is_same else _placed(new, place)
        if UNCHANGED in status:
            after, unchanged = list(after), []
            for index, source in enumerate(place.sources):
                if source is not None and status[source] == UNCHANGED:
                    if before is not None and message.old_part is OldPart.ROW:  # type: ignore[union-attr]
                        after[index] = before[index]
                    else:
                        unchanged.append(table.columns[index].name)
        extras = _extras(new, place)
    op = "c" if isinstance(message, Insert) else "u" if isinstance(message, Update) else "d"
    return CdcRow(op, table, before, after, commit, number, xid, time, unchanged or None, extras)


def _placed(values: Values, place: Placement, *, is_key: bool = False) -> Values:
    """Return the values of the query's columns. A key has no values of columns that were added later."""
    return [
        values[source] if source is not None else None if is_key else fill
        for source, fill in zip(place.sources, place.fills, strict=True)
    ]


def _extras(values: Values, place: Placement) -> Extras | None:
    found = [(name, value.decode(errors="replace")) for i, name in place.extra if (value := values[i]) is not None]
    return found or None


# --- batches ------------------------------------------------------------------------------------


def cdc_batches(rows: Iterator[CdcRow], tables: Sequence[CdcTable], *, rescue: bool) -> Iterator[pa.RecordBatch]:
    """Convert rows to batches of cdc_schema().

    Raises:
        ValueUnsupported: a value does not fit its column, and `rescue` is false.
    """
    schema = cdc_schema(tables, rescue=rescue)
    while chunk := list(islice(rows, BATCH)):
        rescued: list[Extras] | None = [row.extras or [] for row in chunk] if rescue else None
        arrays = [
            pa.array([row.op for row in chunk], pa.string()),
            _side(chunk, 2, tables, rescued),
            _side(chunk, 3, tables, rescued),
            pa.array([row.table.label for row in chunk], pa.string()),
            pa.array([row.lsn for row in chunk], pa.int64()),
            pa.array([sequence_number(row.lsn - (row.op == "r"), row.number) for row in chunk], pa.string()),
            pa.array([row.xid for row in chunk], pa.int64()),
            pa.array([row.time for row in chunk], pa.timestamp("us", tz="UTC")),
            pa.array([row.unchanged for row in chunk], pa.list_(pa.string())),
        ]
        if rescued is not None:
            arrays.append(pa.array([dict(extras) or None for extras in rescued], _TEXTS))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


@dataclass(slots=True)
class _Column:
    """Converts the values of a column, and keeps what does not fit in `rescued`."""

    table: CdcTable
    column: CdcColumn
    rescued: list[Extras] | None
    places: Sequence[int] = field(default_factory=list)  # of the values, in `rescued`

    def array(self, values: Values) -> pa.Array:
        label = f"{self.table.label}.{self.column.name}"
        try:
            return column_array(values, self.column.kind, label)
        except ValueUnsupported as error:
            if self.rescued is None:
                error.hint = (
                    f'Read the column as text: .option("text", {json_text(label)}), or set the option rescue to true.'
                )
                raise
        fitting = [self._fits(value, label) for value in values]
        for place, value, fits in zip(self.places, values, fitting, strict=True):
            if not fits and value is not None:
                self.rescued[place].append((self.column.name, value.decode(errors="replace")))
        return column_array(
            [v if fits else None for v, fits in zip(values, fitting, strict=True)], self.column.kind, label
        )

    def _fits(self, value: bytes | None, label: str) -> bool:
        try:
            column_array([value], self.column.kind, label)
        except ValueUnsupported:
            return False
        return True


def _side(
    chunk: Sequence[CdcRow], side: int, tables: Sequence[CdcTable], rescued: list[Extras] | None
) -> pa.StructArray:
    """Return the array of `before` (2) or `after` (3)."""
    if len(tables) == 1:
        return _structs(tables[0], [row[side] for row in chunk], range(len(chunk)), rescued)
    arrays = []
    for table in tables:
        places = [i for i, row in enumerate(chunk) if row.table is table and row[side] is not None]
        found = _structs(table, [chunk[i][side] for i in places], places, rescued)
        indexes: list[Any] = [None] * len(chunk)
        for index, place in enumerate(places):
            indexes[place] = index
        arrays.append(found.take(pa.array(indexes, pa.int32())))
    mask = pa.array([row[side] is None for row in chunk], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=list(row_type(tables)), mask=mask)


def _structs(
    table: CdcTable, rows: Sequence[Any], places: Sequence[int], rescued: list[Extras] | None
) -> pa.StructArray:
    nothing = (None,) * len(table.columns)
    cells = list(zip(*[nothing if row is None else row for row in rows], strict=True)) or [()] * len(table.columns)
    arrays = [
        _Column(table, column, rescued, places).array(values)
        for column, values in zip(table.columns, cells, strict=True)
    ]
    mask = pa.array([row is None for row in rows], pa.bool_())
    if not arrays:
        return pa.array([None if row is None else {} for row in rows], table.struct())
    return pa.StructArray.from_arrays(arrays, fields=list(table.struct()), mask=mask)
