"""Changes of the log and rows of a snapshot as batches of pgcdc, see cdc_batch.py.

**Invariants.**

- `_seq` is unique. A row of a snapshot has the number of the row, and one position less than the snapshot. No commit
  record starts there, so these rows sort before all changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.piece_reader import LoggedRows, scan_rows
from subscriber.changelog.pieces import Piece
from subscriber.changelog.row_columns import SEQUENCE_WIDTH, Values, sequence_numbers, split_lines
from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.spark.sources.arrow_types import cells_array, multiples
from subscriber.spark.sources.cdc_batch import (
    ABOUT,
    CdcTableRows,
    Extras,
    RowTexts,
    cdc_batch,
    names_of,
    side_of,
)
from subscriber.spark.sources.cdc_tables import CdcTable, Fit, Misfit, Placement
from subscriber.spark.sources.table_snapshot import SnapshotRows, TableSnapshot
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.timestamps import to_unix

BATCH = 10_000  # rows of a snapshot
_TIME = dict(ABOUT)["_commit_ts"]


def misfit_error(table: CdcTable, misfit: Fit) -> ApplyError:
    """Return the error of a table whose changes do not fit the query's columns."""
    assert isinstance(misfit, Misfit)
    again = "leave out the option schemaPosition" if table.is_pinned else "start the query again"
    return ApplyError(
        f"changes of table {table.label} do not fit the columns of the query: {misfit.reason}",
        hint=f"If a column was added, {again}, or set the option rescue to true. Otherwise take a new snapshot for a "
        f'new query, or start one with the first of these changes: .option("start", "{misfit.position}")',
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


def _extras(values: Values, place: Placement) -> Extras:
    pairs = zip(place.extra, values, strict=True)
    return [(name, value.decode(errors="replace")) for (_, name), value in pairs if value is not None]


def _all_extras(number: int, columns: Sequence[pa.Array], place: Placement) -> list[Extras]:
    values = [column.to_pylist() for column in columns]
    return [_extras([column[i] for column in values], place) for i in range(number)]


def _strings(number: int, width: int, data: bytes | bytearray) -> pa.Array:
    """Return texts of the same length."""
    offsets = multiples(width, number + 1).buffers()[1]
    return pa.Array.from_buffers(pa.string(), number, [None, offsets, pa.py_buffer(data)])


def _numbers(kind: pa.DataType, data: bytes | bytearray) -> pa.Array:
    return pa.Array.from_buffers(kind, len(data) * 8 // kind.bit_width, [None, pa.py_buffer(data)])


# --- a snapshot ---------------------------------------------------------------------------------


def snapshot_batches(
    rows: SnapshotRows, snapshot: TableSnapshot, table: CdcTable, tables: Sequence[CdcTable], *, rescue: bool
) -> Iterator[pa.RecordBatch]:
    """Convert a part of a snapshot to batches.

    Raises:
        ApplyError: the rows do not fit the query.
        ValueUnsupported: a value does not fit its column, and `rescue` is false.
    """
    if isinstance(table.snapshot, Misfit):
        raise misfit_error(table, table.snapshot)
    place = table.snapshot
    assert place is not None
    first = rows.file.first + rows.skip
    lines = rows.lines(snapshot.directory)
    for start in range(0, len(lines), BATCH):
        chunk = lines[start : start + BATCH]
        number = len(chunk)
        cells = split_lines(b"\n".join([*chunk, b""]), place.width)
        texts = [cells_array(number, column) for column in cells]
        columns = [
            pa.array([fill] * number, pa.binary()) if source is None else texts[source]
            for source, fill in zip(place.sources, place.fills, strict=True)
        ]
        position = array("q", [snapshot.position - 1]) * number
        about = [
            pa.repeat(table.label, number),
            pa.repeat(pa.scalar(int(snapshot.position), pa.int64()), number),
            _strings(number, SEQUENCE_WIDTH, sequence_numbers(position.tobytes(), _range(first, number).tobytes())),
            pa.nulls(number, pa.int64()),
            pa.repeat(pa.scalar(to_unix(snapshot.taken), _TIME), number),
        ]
        part = CdcTableRows(
            table,
            _numbers(pa.int64(), _range(0, number).tobytes()),
            RowTexts(number, number, None, []),
            RowTexts(number, 0, None, columns),
            names_of(number, None, table),
            _all_extras(number, [texts[i] for i, _ in place.extra], place) if rescue else None,
        )
        yield cdc_batch(pa.repeat("r", number), about, [part], tables, rescue=rescue)
        first += number


def _range(first: int, number: int) -> array[int]:
    return array("q", range(first, first + number))


# --- the log ------------------------------------------------------------------------------------


def change_batches(
    directory: Location, piece: Piece, tables: Sequence[CdcTable], *, rescue: bool
) -> Iterator[pa.RecordBatch]:
    """Convert the changes in a piece of the log to batches. Changes of other tables are skipped.

    Raises:
        The errors of changelog/piece_reader.py:read().
        ApplyError: changes do not fit the query.
        ValueUnsupported: a value does not fit its column, and `rescue` is false.
    """
    kinds = _Kinds(tables)
    for rows in scan_rows(directory, piece, kinds.number):
        if rows.found.ops:
            yield _change_batch(rows, kinds, tables, rescue=rescue)


class _Kinds:
    """The numbers of tables with a placement, whose rows are gathered together."""

    def __init__(self, tables: Sequence[CdcTable]) -> None:
        self._tables = {table.label: table for table in tables}
        self.known: list[tuple[CdcTable, Placement]] = []

    def number(self, relation: Relation, commit: Lsn) -> int:
        """Return the number for a relation, as of a commit; -1 if it is of another table."""
        table = self._tables.get(f"{relation.schema}.{relation.name}")
        if table is None:
            return -1
        kind = table, _place(table, relation, commit)
        if kind not in self.known:
            self.known.append(kind)
        return self.known.index(kind)


def _place(table: CdcTable, relation: Relation, commit: Lsn) -> Placement:
    fit = table.fit(commit)
    if isinstance(fit, Misfit):
        raise misfit_error(table, fit)
    if tuple(column.name for column in relation.columns) != fit.names:
        raise misfit_error(table, Misfit("has other columns than the schema history of the change log", commit))
    return fit


def _change_batch(rows: LoggedRows, kinds: _Kinds, tables: Sequence[CdcTable], *, rescue: bool) -> pa.RecordBatch:
    located = rows.found
    number = len(located.ops)
    of = _numbers(pa.int32(), located.kinds)
    labels = pa.array([table.label for table, _ in kinds.known], pa.string())
    about = [
        labels.take(of),
        _numbers(pa.int64(), located.lsns),
        _strings(number, SEQUENCE_WIDTH, sequence_numbers(located.lsns, located.numbers)),
        _numbers(pa.int64(), located.xids),
        _numbers(_TIME, located.times),
    ]
    ops = _strings(number, 1, located.ops)
    parts = [_table_rows(rows, ops, of, kind, *kinds.known[kind], rescue=rescue) for kind in pc.unique(of).to_pylist()]
    return cdc_batch(ops, about, parts, tables, rescue=rescue)


def _table_rows(
    rows: LoggedRows, ops: pa.Array, of: pa.Array, kind: int, table: CdcTable, place: Placement, *, rescue: bool
) -> CdcTableRows:
    sources = [-1 if source is None else source for source in place.sources]
    gathered = rows.gather(kind, place.width, sources, place.fills)
    places = pc.indices_nonzero(pc.equal(of, kind)).cast(pa.int64())
    extras: list[Extras] | None = None
    if rescue:
        extra = rows.gather(kind, place.width, [index for index, _ in place.extra], [None] * len(place.extra))
        sides = [side_of(extra.number, *side).columns for side in (extra[1:3], extra[3:5])]
        before, after = ([column.to_pylist() for column in columns] for columns in sides)
        extras = [
            _extras([column[i] for column in (before if op == "d" else after)], place)
            for i, op in enumerate(ops.take(places).to_pylist())
        ]
    return CdcTableRows(
        table,
        places,
        side_of(gathered.number, gathered.before, gathered.before_columns),
        side_of(gathered.number, gathered.after, gathered.after_columns),
        names_of(gathered.number, gathered.unsent, table),
        extras,
    )
