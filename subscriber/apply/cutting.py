"""Rows cut out of changes as the walsender sent them, one change, a run of them or whole transactions at a time.

A cell is a value with the four bytes of its length before it, which is what COPY BINARY, the elements of an array and
TupleData have in common; rows to insert in text are kept without. Nothing here decides what becomes of a row. What is
damaged, or unusual, ends what is taken: whoever looks at that next, a message at a time, will tell.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from subscriber.native import compiled
from subscriber.protocol.tuples import NULL, TEXT, UNCHANGED
from subscriber.protocol.walstream import XLOG_DATA, XLOG_DATA_HEADER

NULL_CELL = b"\xff\xff\xff\xff"
NULL_TEXT = b"\\N"  # compared by identity: a value may be the same two bytes

BODY = XLOG_DATA_HEADER.size  # where the message begins in the walsender's payload
VALUES = BODY + 8  # where the first row's columns begin in that of a change

Cells = list[bytes | None]  # None: the column was not sent

AddRow = Callable[[Cells, int], None]  # of a row and how many of its values are NULL
Row = tuple[AddRow, Cells, int]  # the same, and who takes it
Ended = tuple[int, int, int, int, int]  # finish LSN, commit time, xid, end LSN; number of changes up to its end

OF_ONE = 32  # changes at most of a transaction that is taken whole: with more that is not quicker

_length_at = struct.Struct(">I").unpack_from
_head_at = struct.Struct(">BH").unpack_from
_BEGIN = struct.Struct(">BQqI")
_COMMIT = struct.Struct(">BBQQq")
_B, _C, _N = b"BCN"

AROUND = 2 * BODY + _BEGIN.size + _COMMIT.size  # bytes of a transaction that are no change


class Shape(NamedTuple):
    """How to cut those changes of a table that begin alike, and who takes what comes of it."""

    add: AddRow
    ncols: int
    rows: int  # 2: as it was and as it is; they become one, of twice as many columns
    wanted: int  # the form of the values, BINARY or TEXT; 0: text, without lengths
    null: bytes
    partial: bool  # a column may be one that was not sent
    key: tuple[int, ...]  # columns that need a value


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


@compiled
def cut(data: bytes, pos: int, shape: Shape) -> Row | None:
    """The row, or rows, that begin at `pos` of `data` and go to its end; None: they are others than `shape` says."""
    try:
        row, pos, nulls = _cells(data, pos, shape)
        if shape.rows == 2:
            marker, ncols = _head_at(data, pos)
            new, pos, more = _cells(data, pos + 3, shape)
            if marker != _N or ncols != shape.ncols or not row or not new:
                return None
            row, nulls = row + new, nulls + more
    except (IndexError, struct.error):
        return None
    if pos != len(data) or not row or (None in row and not shape.partial):
        return None
    if any(row[i] is None or row[i] is shape.null for i in shape.key):
        return None
    return shape.add, row, nulls


def _cells(data: bytes, pos: int, shape: Shape) -> tuple[Cells, int, int]:
    if not shape.wanted:
        return values(data, pos, shape.ncols, shape.null)
    row, pos = cells(data, pos, shape.ncols, shape.wanted, shape.null)
    return row, pos, sum([cell is shape.null for cell in row])


@compiled
def cut_run(
    waiting: Iterable[bytes], most: int, largest: int, longest: int, head: bytes, shape: Shape
) -> tuple[list[bytes], list[Cells], int, int]:
    """Changes at the front of `waiting` that all begin with `head` and whose rows were sent in full.

    At most `most` of them, up to `largest` bytes and none longer than `longest`. The changes and their rows; their
    bytes, and how many values are NULL.
    """
    changes: list[bytes] = []
    rows: list[Cells] = []
    size = nulls = 0
    shape = shape._replace(partial=False)
    for payload in waiting:
        if len(rows) >= most or size >= largest or len(payload) > longest:
            break
        if payload[BODY:VALUES] != head or payload[0] != XLOG_DATA:
            break
        found = cut(payload, VALUES, shape)
        if found is None:
            break
        _, row, count = found
        changes.append(payload)
        rows.append(row)
        size += len(payload)
        nulls += count
    return changes, rows, size, nulls


@compiled
def cut_changes(
    waiting: Iterable[bytes], most: int, largest: int, longest: int, find: Callable[[bytes], Shape | None], inside: bool
) -> tuple[list[Ended], list[bytes], list[Row]]:
    """Changes of rows at the front of `waiting`, and what cut() makes of them.

    `inside`: of a transaction that has begun, up to whatever is no change. Otherwise of whole transactions from BEGIN
    to COMMIT, of up to OF_ONE changes each, and where these end; it stops before one with anything else in it, or with
    nothing. At most `most` changes of `largest` bytes, none longer than `longest`. `find` is asked once for the shape
    of changes that begin like that (BODY to VALUES); None: they are not to be taken.
    """
    ended: list[Ended] = []
    changes: list[bytes] = []
    rows: list[Row] = []
    shapes: dict[bytes, Shape | None] = {}
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
            row = cut(payload, VALUES, shape) if shape is not None and length <= longest else None
            if row is None or (begin and len(rows) - stop >= OF_ONE):
                break
            changes.append(payload)
            rows.append(row)
            size += length
    if not inside:
        del changes[stop:], rows[stop:]
    return ended, changes, rows


def _end(begin: tuple[int, ...], payload: bytes, number: int) -> Ended | None:
    _, finish_lsn, commit_time, xid = begin
    _, flags, commit_lsn, end_lsn, _ = _COMMIT.unpack_from(payload, BODY)
    if flags or not finish_lsn or commit_lsn != finish_lsn:
        return None
    return finish_lsn, commit_time, xid, end_lsn, number
