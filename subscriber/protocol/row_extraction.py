"""Extract rows from changes as the walsender sent them: from one change, from a run, or from whole transactions.

A cell is a value after the four bytes of its length. COPY BINARY, the elements of an array and TupleData share this
format. A run is many changes with the same header. Only the keys of a run are extracted: its rows stay in the bytes of
their messages until row_encoding.py encodes them for the server. This module does not decide how a row is applied.
Extraction stops before a damaged or unusual message, and the reader that decodes messages one by one reports it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from subscriber._speedups import compiled
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.tuple_data import NULL, TEXT, UNCHANGED

NULL_CELL = b"\xff\xff\xff\xff"

BODY = XLOG_DATA_HEADER.size  # where the message begins in the walsender's payload
VALUES = BODY + 8  # where the first row's columns begin in that of a change

Key = bytes | tuple[bytes, ...]  # of a column or several, in binary with their lengths
Cells = list[bytes | None]  # None: the column was not sent

AddRow = Callable[[Cells], None]
Row = tuple[AddRow, Cells]  # and who takes it
TransactionEnd = tuple[
    int, int, int, int, int
]  # finish LSN, commit time, xid, end LSN; number of changes up to its end

MAX_CHANGES_PER_SMALL_TRANSACTION = (
    32  # changes at most of a transaction that is taken whole: with more that is not quicker
)

_length_at = struct.Struct(">I").unpack_from
_head_at = struct.Struct(">BH").unpack_from
_BEGIN = struct.Struct(">BQqI")
_COMMIT = struct.Struct(">BBQQq")
_B, _C, _N = b"BCN"

TRANSACTION_OVERHEAD = 2 * BODY + _BEGIN.size + _COMMIT.size  # bytes of a transaction that are no change


class RowLayout(NamedTuple):
    """The layout of changes of a table that begin with the same bytes, and the callback that receives the rows."""

    add: AddRow
    ncols: int
    rows: int  # 2: as it was and as it is; they become one, of twice as many columns
    form: int  # of the values, BINARY or TEXT
    partial: bool  # a column may be one that was not sent
    key: tuple[int, ...]  # columns that need a value


class RunLayout(NamedTuple):
    """The same of a run, whose rows have to be whole."""

    ncols: int
    rows: int
    form: int
    key: tuple[int, ...]  # the columns that a row is known by; none: it is not


def split_cells(data: bytes, pos: int, ncols: int, form: int) -> tuple[Cells, int]:
    """`ncols` cells from `pos`, and where they end; no cells when one is neither of `form`, NULL nor unchanged."""
    row: Cells = []
    append = row.append
    length_at = _length_at
    for _ in range(ncols):
        kind = data[pos]
        if kind == form:
            start = pos + 1
            pos += 5 + length_at(data, start)[0]
            append(data[start:pos])
        elif kind == NULL:
            pos += 1
            append(NULL_CELL)
        elif kind == UNCHANGED:
            pos += 1
            append(None)
        else:
            return [], pos
    return row, pos


def split_rows(data: bytes, pos: int, ncols: int, rows: int, form: int) -> Cells | None:
    """The cells of one or two rows that begin at `pos` and go to the end of `data`; None: they are others."""
    try:
        row, pos = split_cells(data, pos, ncols, form)
        if rows == 2:
            marker, again = _head_at(data, pos)
            new, pos = split_cells(data, pos + 3, ncols, form)
            if marker != _N or again != ncols or not row or not new:
                return None
            row += new
    except (IndexError, struct.error):
        return None
    return row if row and pos == len(data) else None


@compiled
def extract_row(data: bytes, pos: int, shape: RowLayout) -> Row | None:
    """The row, or rows, that begin at `pos` of `data` and go to its end; None: they are others than `shape` says."""
    row = split_rows(data, pos, shape.ncols, shape.rows, shape.form)
    if row is None or (None in row and not shape.partial):
        return None
    if any(row[i] in (None, NULL_CELL) for i in shape.key):
        return None
    return shape.add, row


@compiled
def extract_keys(
    waiting: Iterable[bytes], most: int, largest: int, longest: int, head: bytes, run: RunLayout
) -> tuple[list[bytes], list[Key], list[Key], int]:
    """Extract the keys of the changes at the front of `waiting` that belong to one run.

    Args:
        waiting: messages; the taken ones are not removed.
        most: maximum number of changes.
        largest: size of all changes together after which no more are taken, in bytes.
        longest: maximum size of one change, in bytes.
        head: the bytes with which each change of the run begins.
        run: layout of the rows.

    Returns:
        The changes, the keys of their first rows, the keys of their last rows, and the size of the changes in bytes.
    """
    changes: list[bytes] = []
    before: list[Key] = []
    after = before if run.rows == 1 else []
    size = 0
    for payload in waiting:
        if len(changes) >= most or size >= largest or len(payload) > longest:
            break
        if payload[BODY:VALUES] != head or payload[0] != XLOG_DATA:
            break
        row = split_rows(payload, VALUES, run.ncols, run.rows, run.form)
        if row is None or None in row:
            break
        first, last = row[: run.ncols], row[-run.ncols :]
        if any(NULL_CELL in (first[i], last[i]) for i in run.key):
            break
        if run.key:
            before.append(row_key(first, run.key, run.form))
            if after is not before:
                after.append(row_key(last, run.key, run.form))
        changes.append(payload)
        size += len(payload)
    return changes, before, after, size


def row_key(row: Cells, key: tuple[int, ...], form: int) -> Key:
    """Return the key of a row: the values of its columns `key`, which were all sent."""
    start = 4 if form == TEXT else 0
    if len(key) == 1:
        return row[key[0]][start:]  # type: ignore[index]
    return tuple([row[i][start:] for i in key])  # type: ignore[index]


@compiled
def extract_changes(
    waiting: Iterable[bytes],
    most: int,
    largest: int,
    longest: int,
    find: Callable[[bytes], RowLayout | None],
    inside: bool,
) -> tuple[list[TransactionEnd], list[bytes], list[Row]]:
    """Extract the row changes at the front of `waiting` with extract_row().

    Args:
        waiting: messages; the taken ones are not removed.
        most: maximum number of changes.
        largest: size of all changes together after which no more are taken, in bytes.
        longest: maximum size of one change, in bytes.
        find: returns the layout for changes that begin with these bytes (BODY to VALUES), or None if such changes must
            not be taken. Called once for each such beginning.
        inside: True: a transaction has begun, and changes are taken up to the first message of another kind. False:
            whole transactions are taken from BEGIN to COMMIT. Each has at least one change, at most
            MAX_CHANGES_PER_SMALL_TRANSACTION, and no other messages.

    Returns:
        The ends of the whole transactions, the changes, and their rows.
    """
    ended: list[TransactionEnd] = []
    changes: list[bytes] = []
    rows: list[Row] = []
    shapes: dict[bytes, RowLayout | None] = {}
    size = stop = 0
    begin: tuple[int, ...] = ()
    for payload in waiting:
        length = len(payload)
        if len(rows) >= most or size >= largest or length < VALUES or payload[0] != XLOG_DATA:
            break
        if not begin and not inside:
            if payload[BODY] != _B or length != BODY + _BEGIN.size:
                break
            begin = _BEGIN.unpack_from(payload, BODY)
        elif payload[BODY] == _C and length == BODY + _COMMIT.size:
            end = _end(begin, payload, len(rows)) if begin and len(rows) > stop else None
            if end is None:
                break
            ended.append(end)
            begin, stop = (), len(rows)
        else:
            head = payload[BODY:VALUES]
            if head not in shapes:
                shapes[head] = find(head)
            shape = shapes[head]
            row = extract_row(payload, VALUES, shape) if shape is not None and length <= longest else None
            if row is None or (begin and len(rows) - stop >= MAX_CHANGES_PER_SMALL_TRANSACTION):
                break
            changes.append(payload)
            rows.append(row)
            size += length
    if not inside:
        del changes[stop:], rows[stop:]
    return ended, changes, rows


def _end(begin: tuple[int, ...], payload: bytes, number: int) -> TransactionEnd | None:
    _, finish_lsn, commit_time, xid = begin
    _, flags, commit_lsn, end_lsn, _ = _COMMIT.unpack_from(payload, BODY)
    if flags or not finish_lsn or commit_lsn != finish_lsn:
        return None
    return finish_lsn, commit_time, xid, end_lsn, number
