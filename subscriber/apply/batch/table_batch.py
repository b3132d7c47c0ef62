"""Changes of a table combined into steps, each of which the server can apply with one statement.

Purpose:
    A step is a set of rows of one table that one statement can apply, because no two belong to the same row:
    inserts, updates of the same columns by key, updates of keys, deletes. A change is added to the step of its kind
    that follows the last step with its row, or to a new step at the end. So the order of changes is kept for every
    row. The order between different rows is free, except in `strict` tables (see below). If the batch already
    inserts or updates a row, a later update replaces that row version.

Invariants:
    The reference path, row by row, defines the result. A batch must leave the same rows, or fail; a failed batch is
    rolled back and its changes are applied row by row. Hence:

    - A step succeeds only if it changes exactly as many rows as it has. Keys that the server considers equal but
      whose bytes differ (1.0 and 1.00) are two rows in a batch and one row on the server: the numbers differ.
    - The server never sees replaced row versions. So versions are replaced only where the server could not have
      rejected them: the publisher's column types are the target's, the target has no CHECK and no domain, and no
      NULL is in a NOT NULL column.
    - `strict` tables have unique indexes besides the key, or exclusion constraints, in which different rows can
      conflict. Their inserts and deletes keep the order of the stream, and a batched update must not change the
      columns of these indexes.
    - ineligible_reason() in eligibility.py rejects changes that SQL cannot apply in sets with the same result.

Values stay the bytes that the publisher sent: cells, as in protocol/row_extraction.py, and whole messages until the
cells are needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from enum import Enum

from subscriber.apply.batch.eligibility import fixed_columns, ineligible_reason, may_skip_versions
from subscriber.apply.relation_map import RelationMapping
from subscriber.protocol import row_extraction
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.row_encoding import AnyRow, cells_of
from subscriber.protocol.row_extraction import (
    NULL_CELL,
    Cells,
    RowLayout,
    RunLayout,
    extract_keys,
    extract_row,
    row_key,
)
from subscriber.protocol.tuple_data import BINARY, TEXT

Key = row_extraction.Key | int

_NEXT = struct.Struct(">BH")  # marker of a row and its number of columns
_head_at = _NEXT.unpack_from
_INSERT, _UPDATE, _DELETE = 0x49, 0x55, 0x44
_NEW, _KEY, _ROW = 0x4E, 0x4B, 0x4F


class ChangeKind(Enum):
    INSERT = "insert"
    UPDATE = "update"
    KEY_UPDATE = "key update"  # rows are the old one and the new one
    DELETE = "delete"


_KINDS = {_INSERT: ChangeKind.INSERT, _UPDATE: ChangeKind.UPDATE, _DELETE: ChangeKind.DELETE}  # of changes of one row


@dataclass(slots=True)
class BatchStep:
    """Rows of one statement. `sent` has True for each column that an update sets."""

    kind: ChangeKind
    index: int  # among the table's steps
    sent: tuple[bool, ...] = ()
    rows: dict[Key, AnyRow] = field(default_factory=dict)


class TableBatch:
    """The changes of one table in one batch."""

    def __init__(self, mapping: RelationMapping, *, binary: bool) -> None:
        """Create a batch. `binary`: all values are in the binary format of their types."""
        self.mapping = mapping
        self.binary = binary
        self.steps: list[BatchStep] = []
        self.strict = mapping.local.other_unique
        self.ncols = len(mapping.attributes)
        self._skipping: tuple[bool, list[int]] | None = None  # whether, and but for NULL in which; most need not know
        self.fixed = (fixed_columns(mapping) or ()) if self.strict else ()  # columns that no update may change
        self._may_take_runs = True
        self._all = (True,) * self.ncols
        self.form = BINARY if binary else TEXT
        self._search = mapping.search
        self._latest: dict[object, BatchStep] = {}  # by kind and columns
        self._touched: dict[Key, int] = {}  # row to the index of the step that touched it last
        self._serial = 0
        self._comes_or_goes = -1  # the index of the last step of inserts or deletes

    def forget_rows(self) -> None:
        """They have been sent; which they were is all that will be asked."""
        self.steps = []

    @property
    def touched_keys(self) -> KeysView[Key]:
        """The keys of all rows that the changes have touched. Without a key: a number for each row."""
        return self._touched.keys()

    def overlaps(self, other: TableBatch) -> bool:
        """Return True if two batches of a table have a row in common, so that their order matters."""
        if self.strict or other.strict:
            return True
        if self._search is None or other._search is None:
            return False
        return self.binary != other.binary or not self._touched.keys().isdisjoint(other._touched)

    def shape(self, head: bytes) -> RowLayout | None:
        """Return the layout of changes that begin with `head`: letter, relid, marker, columns of the first row.

        None: they cannot be part of a batch.
        """
        kind, marker, ncols = head[0], *_head_at(head, 5)
        if ncols != self.ncols or ineligible_reason(self.mapping, kind, with_old=marker != _NEW, binary=self.binary):
            return None
        return self._shape(kind, marker)

    def _shape(self, kind: int, marker: int) -> RowLayout | None:
        ncols, form = self.ncols, self.form
        if kind == _INSERT and marker == _NEW:
            return RowLayout(self.insert, ncols, 1, form, False, ())
        key = self._search
        if key is not None and kind == _UPDATE and marker == _NEW:
            return RowLayout(self.update, ncols, 1, form, True, key)
        if key is not None and kind == _UPDATE and marker in (_KEY, _ROW):
            both = (*key, *[ncols + i for i in key])
            return RowLayout(self.update_from, ncols, 2, form, True, both)
        if key is not None and kind == _DELETE and marker in (_KEY, _ROW):
            return RowLayout(self.delete, ncols, 1, form, True, key)
        return None

    def add(self, change: Insert | Update | Delete) -> bool:
        """Add a decoded change. Returns False if it cannot be part of a batch."""
        new, old = getattr(change, "new", None), getattr(change, "old", None)
        rows = [row for row in (old, new) if row is not None]
        shape = self._shape(change.letter[0], _NEW if old is None else _KEY)
        if shape is None or any(row.ncols != self.ncols for row in rows):
            return False
        row = extract_row(_NEXT.pack(_NEW, self.ncols).join([row.raw for row in rows]), 0, shape)
        if row is None:
            return False
        add, cells = row
        add(cells)
        return True

    # --- many changes alike ------------------------------------------------------------------------

    def take_run(
        self, head: bytes, waiting: Iterable[bytes], most: int, largest: int, longest: int
    ) -> tuple[list[bytes], int]:
        """Take changes that begin with `head` off the front of `waiting`, as extract_keys() does.

        Returns:
            The changes and their size in bytes. No changes if the batch already has one of their rows, or if two of
            them have the same row: the caller then takes these and the following changes one by one.
        """
        shape = self.shape(head) if self._may_take_runs else None
        kind = _KINDS[head[0]]
        if shape is None or (self.strict and kind is not ChangeKind.UPDATE):
            return [], 0
        run = RunLayout(self.ncols, shape.rows, self.form, self._search or ())
        changes, before, after, size = extract_keys(waiting, most, largest, longest, head, run)
        if not changes:
            return [], 0
        known: list[Key] = [*before] if run.key else [*self._serials(len(changes))]
        touches = known
        if before != after:
            kind, touches = ChangeKind.KEY_UPDATE, [*known, *after]
        sent = self._all if kind in (ChangeKind.UPDATE, ChangeKind.KEY_UPDATE) else ()
        step = self._latest.get(_place(kind, sent))
        touched = dict.fromkeys(touches, len(self.steps) if step is None else step.index)
        if len(touched) < len(touches) or not self._touched.keys().isdisjoint(touched):
            self._may_take_runs = False
            return [], 0
        if step is None:
            step = self._begin(kind, sent)
        step.rows.update(zip(known, changes, strict=True))
        self._touched.update(touched)
        return changes, size

    def _serials(self, number: int) -> range:
        """Return keys for rows without a key: each is another one."""
        self._serial += number
        return range(self._serial - number + 1, self._serial + 1)

    # --- single changes, from the rows of extract_row() ---------------------------------------------------

    def insert(self, row: Cells) -> None:
        key = self._key(row) if self._search is not None else self._serials(1)[0]
        step = self._latest.get("insert")
        last = self._touched.get(key, -1)
        if step is None or last >= step.index or (self.strict and step.index != self._comes_or_goes):
            step = self._begin(ChangeKind.INSERT)
        step.rows[key] = row
        self._touched[key] = step.index

    def update_from(self, both: Cells) -> None:
        """The row as it was, and as it is."""
        old, new = both[: self.ncols], both[self.ncols :]
        if [old[i] for i in self._search or ()] == [new[i] for i in self._search or ()]:
            self.update(new)
        else:
            self._update_key(old, new)

    def update(self, new: Cells) -> None:
        """Add an UPDATE of the row that is found by its own key."""
        key = self._key(new)
        sent = self._sent(new)
        last = self._touched.get(key)
        if last is None or not self._replace(self.steps[last], key, new, sent):
            step = self._latest.get(sent)
            if step is None or (last is not None and step.index <= last):
                step = self._begin(ChangeKind.UPDATE, sent)
            step.rows[key] = new
            self._touched[key] = step.index

    def delete(self, old: Cells) -> None:
        """Delete a row. At least the key of `old` was sent."""
        key = self._key(old)
        step = self._latest.get("delete")
        last = self._touched.get(key, -1)
        if step is None or last >= step.index or (self.strict and step.index != self._comes_or_goes):
            step = self._begin(ChangeKind.DELETE)
        step.rows[key] = old
        self._touched[key] = step.index

    def _update_key(self, old: Cells, new: Cells) -> None:
        before, after = self._key(old), self._key(new)
        sent = self._sent(new)
        last = max(self._touched.get(before, -1), self._touched.get(after, -1))
        step = self._latest.get(_place(ChangeKind.KEY_UPDATE, sent))
        if step is None or step.index <= last:
            step = self._begin(ChangeKind.KEY_UPDATE, sent)
        step.rows[before] = old + new
        self._touched[before] = self._touched[after] = step.index

    def _key(self, cells: Cells) -> Key:
        """Return the key of a row. The key of an inserted row that is NULL belongs to no row."""
        return row_key(cells, self._search or (), self.form)

    def _sent(self, new: Cells) -> tuple[bool, ...]:
        return self._all if None not in new else tuple([cell is not None for cell in new])

    def _replace(self, step: BatchStep, key: Key, new: Cells, sent: tuple[bool, ...]) -> bool:
        """Replace the row version in `step` with `new`, if that leaves the same result. Returns False if not."""
        row = step.rows.get(key)
        if row is None:  # it was touched by its new key
            return False
        if self._skipping is None:
            self._skipping = may_skip_versions(self.mapping), _not_null(self.mapping)
        may_skip, not_null = self._skipping
        if not may_skip:
            return False
        if step.kind is not ChangeKind.INSERT and (step.kind is not ChangeKind.UPDATE or step.sent != sent):
            return False
        cells = cells_of(row, self.form)[-self.ncols :]
        if self.fixed and not self._stays(step, cells, new):
            return False
        if NULL_CELL in [cells[i] for i in not_null]:
            return False
        if step.kind is ChangeKind.UPDATE:
            step.rows[key] = new
        else:
            step.rows[key] = [before if cell is None else cell for before, cell in zip(cells, new, strict=True)]
        return True

    def _stays(self, step: BatchStep, row: Cells, new: Cells) -> bool:
        """Return True if both versions of a row have the same values in the columns that no update may change."""
        return all(new[i] == row[i] or (new[i] is None and step.kind is ChangeKind.INSERT) for i in self.fixed)

    def _begin(self, kind: ChangeKind, sent: tuple[bool, ...] = ()) -> BatchStep:
        step = BatchStep(kind, len(self.steps), sent)
        self.steps.append(step)
        if kind in (ChangeKind.INSERT, ChangeKind.DELETE):
            self._comes_or_goes = step.index
        self._latest[_place(kind, sent)] = step
        return step


def _not_null(mapping: RelationMapping) -> list[int]:
    return [i for i, column in enumerate(mapping.attributes) if column.batch_info and column.batch_info.not_null]


def _place(kind: ChangeKind, sent: tuple[bool, ...]) -> object:
    """Return the key by which the latest steps of different kinds are stored."""
    return kind.value if not sent else sent if kind is ChangeKind.UPDATE else (kind.value, sent)
