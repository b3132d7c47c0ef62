"""What many changes of a table come to: steps, each of which the server can do set by set.

A step is rows of one table that one statement can apply, because no two of them are about the same row:
inserts, updates of the same columns by key, updates of keys, deletes. A change goes into the step of its kind that
comes after the last one in which its row was touched, or into a new step at the end; so for every row
the order is kept, and different rows do not care (tables where they could are `strict`, see below). An
update of a row that the batch inserts or updates anyway replaces what it would have become.

The reference path is the measure. A batch must leave what applying one change after another leaves, or
fail; that it failed says nothing, it is then rolled back and applied one by one. Hence:

- A step is done only if it hits exactly as many rows as it has. Keys that are equal for the server
  but not byte by byte (1.0 and 1.00) become two rows here and one there: the numbers differ.
- Versions of a row that are replaced are never seen by the server. So that happens only where the server
  could have had nothing against them: the publisher's column types are the target's, which has no CHECK
  and no domain, and no NULL stood in a column that takes none.
- `strict` tables have unique indexes besides the key, or exclusion constraints, in which different rows meet:
  their inserts and deletes are in the order of the stream, and an update hits only a row whose columns of these
  indexes stay as they are.
- What SQL cannot do set by set, or not in the same way, is refused before: refusal() in fitting.py.

Values stay the bytes that came. A cell is a value with the four bytes of its length before it, which is what
COPY BINARY, the elements of an array and TupleData have in common; rows to insert in text are kept without.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from subscriber.apply.fitting import fixed_columns, may_skip_versions, refusal
from subscriber.apply.relation_map import RelationMapping
from subscriber.native import compiled
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.tuples import BINARY, NULL, TEXT, UNCHANGED
from subscriber.protocol.walstream import XLOG_DATA, XLOG_DATA_HEADER

NULL_CELL = b"\xff\xff\xff\xff"
NULL_TEXT = b"\\N"  # compared by identity: a value may be the same two bytes

Cells = list[bytes | None]  # None: the column was not sent
Key = bytes | tuple[bytes, ...] | int
Adder = Callable[[bytes, int], bool]  # of the bytes of a change and where its first row's columns begin

_length_at = struct.Struct(">I").unpack_from
_head_at = struct.Struct(">BH").unpack_from
_INSERT, _UPDATE, _DELETE = 0x49, 0x55, 0x44
_NEW, _KEY, _ROW = 0x4E, 0x4B, 0x4F


class Kind(Enum):
    INSERT = "insert"
    UPDATE = "update"
    KEY_UPDATE = "key update"  # rows begin with the old key's cells
    DELETE = "delete"  # rows are the key's cells


@dataclass(slots=True)
class Step:
    """Rows of one statement. `sent` has True for each column that an update sets."""

    kind: Kind
    index: int  # among the table's steps
    sent: tuple[bool, ...] = ()
    rows: dict[Key, Cells] = field(default_factory=dict)
    nulls: int = 0  # in rows to insert in text: what there is of backslashes if no value has one


class TableBatch:
    """The changes of one table in one batch."""

    def __init__(self, mapping: RelationMapping, *, binary: bool) -> None:
        """`binary`: the values came in the types' binary form; all of them."""
        self.mapping = mapping
        self.binary = binary
        self.steps: list[Step] = []
        self.found_by: object = None  # the call of Batch.take() that has asked for it
        self.strict = mapping.local.other_unique
        self.ncols = len(mapping.attributes)
        self._may_skip_versions = may_skip_versions(mapping)
        self._not_null = [i for i, column in enumerate(mapping.attributes) if column.sets and column.sets.not_null]
        self._has_identity_always = any(column.identity_always for column in mapping.attributes)
        self.fixed = (fixed_columns(mapping) or ()) if self.strict else ()  # columns that no update may change
        self._may_take_runs = True
        self._all = (True,) * self.ncols
        self._rest = b"n" * (self.ncols - 1)  # what comes after the key in most deletes
        self._form = BINARY if binary else TEXT
        self._search = mapping.search
        self._single = mapping.search[0] if mapping.search is not None and len(mapping.search) == 1 else None
        self._latest: dict[object, Step] = {}  # by kind and columns
        self._touched: dict[Key, int] = {}  # row to the index of the step that touched it last
        self._serial = 0
        self._comes_or_goes = -1  # the index of the last step of inserts or deletes

    def forget_rows(self) -> None:
        """They have been sent; which they were is all that will be asked."""
        self.steps = []

    def meets(self, other: TableBatch) -> bool:
        """Whether changes of the two, of one table, cannot be applied in any order: they touch a row in common."""
        if self.strict or other.strict:
            return True
        if self._search is None or other._search is None:
            return False
        return self.binary != other.binary or not self._touched.keys().isdisjoint(other._touched)

    def adder(self, head: bytes) -> Adder | None:
        """What adds a change that begins with `head`: letter, relid, marker and number of columns of the first row."""
        kind, marker, ncols = head[0], *_head_at(head, 5)
        if ncols != self.ncols or refusal(self.mapping, kind, with_old=marker != _NEW, binary=self.binary):
            return None
        if kind == _INSERT and marker == _NEW:
            return self.insert
        if kind == _UPDATE:
            return self.update if marker == _NEW else self.update_from if marker in (_KEY, _ROW) else None
        return self.delete if kind == _DELETE and marker in (_KEY, _ROW) else None

    # --- many changes alike ------------------------------------------------------------------------

    def take_run(
        self, head: bytes, waiting: Iterable[bytes], most: int, largest: int, longest: int
    ) -> tuple[list[bytes], int]:
        """Take inserts or updates that begin with `head` off the front of `waiting`, as cut_run() does.

        They and their bytes; none where they are not of as many rows that nothing has touched. Then each is looked at
        by itself, as are those that come after them.
        """
        add = self.adder(head)
        if not self._may_take_runs or (add != self.insert and add != self.update):
            return [], 0
        kind = Kind.INSERT if add == self.insert else Kind.UPDATE
        if self.strict and kind is Kind.INSERT:
            return [], 0
        as_values = kind is Kind.INSERT and not self.binary
        wanted, null = (0, NULL_TEXT) if as_values else (self._form, NULL_CELL)
        changes, rows, size, nulls = cut_run(waiting, most, largest, longest, head, self.ncols, wanted, null)
        keys = self._keys(rows, 0 if as_values or self.binary else 4)
        by: object = self._all if kind is Kind.UPDATE else kind.value
        step = self._latest.get(by)
        touched = dict.fromkeys(keys, len(self.steps) if step is None else step.index)
        if len(touched) < len(rows) or not self._touched.keys().isdisjoint(touched):
            self._may_take_runs = False
            return [], 0
        if not rows or (
            nulls and kind is Kind.UPDATE and any(row[i] is null for row in rows for i in self._search or ())
        ):
            return [], 0
        if step is None:
            step = self._begin(kind, self._all if kind is Kind.UPDATE else ())
        step.rows.update(zip(keys, rows, strict=True))
        if as_values:
            step.nulls += nulls
        self._touched.update(touched)
        return changes, size

    def _keys(self, rows: list[Cells], start: int) -> list[Key]:
        """What whole rows are known by; `start`: where in a cell its value begins."""
        if self._single is not None:
            single = self._single
            return [row[single][start:] for row in rows]  # type: ignore[index]
        if self._search is None:
            self._serial += len(rows)
            return list(range(self._serial - len(rows) + 1, self._serial + 1))
        search = self._search
        return [tuple([row[i][start:] for i in search]) for row in rows]  # type: ignore[index]

    # --- one change each; False: it cannot be part of a batch --------------------------------------

    def insert(self, data: bytes, pos: int) -> bool:
        """The row that begins at `pos` of `data` and goes to its end."""
        if self.binary:
            row, end = cells(data, pos, self.ncols, BINARY, NULL_CELL)
            nulls = 0
        else:
            row, end, nulls = values(data, pos, self.ncols, NULL_TEXT)
        if end != len(data) or not row or None in row:
            return False
        key: Key
        if self._single is not None:
            key = row[self._single] or b""
        elif self._search is None:
            self._serial += 1
            key = self._serial
        else:
            key = tuple([row[i] or b"" for i in self._search])
        step = self._latest.get("insert")
        last = self._touched.get(key, -1)
        if step is None or last >= step.index or (self.strict and step.index != self._comes_or_goes):
            step = self._begin(Kind.INSERT)
        step.rows[key] = row
        step.nulls += nulls
        self._touched[key] = step.index
        return True

    def update_from(self, data: bytes, pos: int) -> bool:
        """The row as it was, at `pos`, and the new one after it."""
        if self._search is None:
            return False
        old, end = cells(data, pos, self.ncols, self._form, NULL_CELL)
        marker, ncols = _head_at(data, end)
        if not old or marker != _NEW or ncols != self.ncols:
            return False
        new, after = cells(data, end + 3, self.ncols, self._form, NULL_CELL)
        if after != len(data) or not new:
            return False
        if any(old[i] != new[i] for i in self._search):
            return self._update_key(old, new)
        return self._update(new)

    def update(self, data: bytes, pos: int) -> bool:
        """The new row, which is found by its own key."""
        new, end = cells(data, pos, self.ncols, self._form, NULL_CELL)
        return bool(new) and end == len(data) and self._update(new)

    def _update(self, new: Cells) -> bool:
        if self._search is None:
            return False
        key = self._key(new)
        if key is None:
            return False
        sent = self._all if None not in new else tuple([cell is not None for cell in new])
        last = self._touched.get(key)
        if last is None or not self._replace(self.steps[last], key, new, sent):
            step = self._latest.get(sent)
            if step is None or (last is not None and step.index <= last):
                step = self._begin(Kind.UPDATE, sent)
            step.rows[key] = new
            self._touched[key] = step.index
        return True

    def delete(self, data: bytes, pos: int) -> bool:
        if self._search is None:
            return False
        key: Key | None
        if self._single == 0 and data[pos] == self._form:
            end = pos + 5 + _length_at(data, pos + 1)[0]
            key = data[pos + (1 if self.binary else 5) : end]
            row: Cells = [data[pos + 1 : end]]
            if data[end:] != self._rest and cells(data, end, self.ncols - 1, self._form, NULL_CELL)[1] != len(data):
                return False
        else:
            old, end = cells(data, pos, self.ncols, self._form, NULL_CELL)
            key = self._key(old) if old and end == len(data) else None
            if key is None:
                return False
            row = [old[i] for i in self._search]
        step = self._latest.get("delete")
        last = self._touched.get(key, -1)
        if step is None or last >= step.index or (self.strict and step.index != self._comes_or_goes):
            step = self._begin(Kind.DELETE)
        step.rows[key] = row
        self._touched[key] = step.index
        return True

    def _update_key(self, old: Cells, new: Cells) -> bool:
        before, after = self._key(old), self._key(new)
        if before is None or after is None or before == after or self._has_identity_always:
            return False
        sent = tuple([cell is not None for cell in new])
        last = max(self._touched.get(before, -1), self._touched.get(after, -1))
        step = self._latest.get((Kind.KEY_UPDATE, sent))
        if step is None or step.index <= last:
            step = self._begin(Kind.KEY_UPDATE, sent)
        assert self._search is not None
        step.rows[before] = [*[old[i] for i in self._search], *new]
        self._touched[before] = self._touched[after] = step.index
        return True

    def _key(self, cells: Cells) -> Key | None:
        """What the row is known by; None when a part of it was not sent or is NULL."""
        start = 0 if self.binary else 4  # as insert() has it
        if self._single is not None:
            cell = cells[self._single]
            return None if cell is None or cell == NULL_CELL else cell[start:]
        key = []
        for i in self._search or ():
            cell = cells[i]
            if cell is None or cell == NULL_CELL:
                return None
            key.append(cell[start:])
        return tuple(key)

    def _replace(self, step: Step, key: Key, new: Cells, sent: tuple[bool, ...]) -> bool:
        """Let the row become `new` at once, if nobody can tell the difference."""
        row = step.rows.get(key)
        if row is None or not self._may_skip_versions:  # None: touched by its new key
            return False
        if self.fixed and not self._stays(step, row, new):
            return False
        if step.kind is Kind.UPDATE and step.sent == sent:
            if any(row[i] == NULL_CELL for i in self._not_null):
                return False
            step.rows[key] = new
            return True
        if step.kind is not Kind.INSERT:
            return False
        null = NULL_CELL if self.binary else NULL_TEXT
        if any(row[i] == null for i in self._not_null):
            return False
        for i, cell in enumerate(new):
            if cell is None:
                continue
            if self.binary:
                row[i] = cell
            else:
                step.nulls += (cell == NULL_CELL) - (row[i] is NULL_TEXT)
                row[i] = NULL_TEXT if cell == NULL_CELL else cell[4:]
        return True

    def _stays(self, step: Step, row: Cells, new: Cells) -> bool:
        """Whether the columns that no update may change are the same in both versions of a row."""
        as_values = step.kind is Kind.INSERT and not self.binary
        for i in self.fixed:
            cell = new[i]
            if cell is not None and as_values:
                cell = NULL_TEXT if cell == NULL_CELL else cell[4:]
                if (cell is NULL_TEXT) != (row[i] is NULL_TEXT):
                    return False
            if cell != row[i] and (cell is not None or step.kind is not Kind.INSERT):
                return False
        return True

    def _begin(self, kind: Kind, sent: tuple[bool, ...] = ()) -> Step:
        step = Step(kind, len(self.steps), sent)
        self.steps.append(step)
        if kind in (Kind.INSERT, Kind.DELETE):
            self._comes_or_goes = step.index
        if kind is Kind.UPDATE:
            self._latest[sent] = step
        elif kind is Kind.KEY_UPDATE:
            self._latest[kind, sent] = step
        else:
            self._latest[kind.value] = step
        return step


def add_decoded(table: TableBatch, change: Insert | Update | Delete) -> bool:
    first = change.new if isinstance(change, Insert) else change.old
    if isinstance(change, Update):
        if change.new.ncols != table.ncols or (change.old is not None and change.old.ncols != table.ncols):
            return False
        if change.old is None:
            return table.update(change.new.raw, 0)
        both = change.old.raw + struct.pack(">BH", _NEW, change.new.ncols) + change.new.raw
        return table.update_from(both, 0)
    assert first is not None
    if first.ncols != table.ncols:
        return False
    return table.insert(first.raw, 0) if isinstance(change, Insert) else table.delete(first.raw, 0)


# --- reading rows: nothing where the row has what a batch does not take -----------------------------


@compiled
def cells(data: bytes, pos: int, ncols: int, wanted: int, null: bytes) -> tuple[Cells, int]:
    """`ncols` cells from `pos`, and where they end; no cells when one is neither `wanted`, NULL nor unchanged."""
    row: Cells = []
    append = row.append
    length_at = _length_at
    for _ in range(ncols):
        kind = data[pos]
        if kind == wanted:
            start = pos + 1
            pos += 5 + length_at(data, start)[0]
            append(data[start:pos])
        elif kind == NULL:
            pos += 1
            append(null)
        elif kind == UNCHANGED:
            pos += 1
            append(None)
        else:
            return [], pos
    return row, pos


@compiled
def values(data: bytes, pos: int, ncols: int, null: bytes) -> tuple[Cells, int, int]:
    """The same for a row to insert in text: values without their lengths, and how many are NULL."""
    row: Cells = []
    append = row.append
    length_at = _length_at
    nulls = 0
    for _ in range(ncols):
        kind = data[pos]
        if kind == TEXT:
            start = pos + 5
            pos = start + length_at(data, pos + 1)[0]
            append(data[start:pos])
        elif kind == NULL or kind == UNCHANGED:  # noqa: SIM109 - "in" takes twice as long
            pos += 1
            nulls += 1
            append(null)
        else:
            return [], pos, 0
    return row, pos, nulls


BODY = XLOG_DATA_HEADER.size  # where the message begins in the walsender's payload
VALUES = BODY + 8  # where the first row's columns begin in that of a change


@compiled
def cut_run(
    waiting: Iterable[bytes], most: int, largest: int, longest: int, head: bytes, ncols: int, wanted: int, null: bytes
) -> tuple[list[bytes], list[Cells], int, int]:
    """Changes at the front of `waiting` that all begin with `head` and have one row, all of which was sent.

    At most `most` of them, up to `largest` bytes and none longer than `longest`. The changes, their rows as cells()
    gives them, or values() if `wanted` is 0; their bytes, and how many values are NULL.
    """
    changes: list[bytes] = []
    rows: list[Cells] = []
    size = nulls = 0
    for payload in waiting:
        if len(rows) >= most or size >= largest or len(payload) > longest:
            break
        if payload[BODY:VALUES] != head or payload[0] != XLOG_DATA:
            break
        try:
            if wanted:
                row, end = cells(payload, VALUES, ncols, wanted, null)
                count = sum([cell is null for cell in row])
            else:
                row, end, count = values(payload, VALUES, ncols, null)
        except (IndexError, struct.error):
            break
        if end != len(payload) or not row or None in row:
            break
        changes.append(payload)
        rows.append(row)
        size += len(payload)
        nulls += count
    return changes, rows, size, nulls
