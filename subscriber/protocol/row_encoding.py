"""Encode rows for the server: as COPY data, or column by column for arrays.

A row is either the cells that row_extraction.py cut out, or the message of its change, which contains one row or two.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from subscriber._speedups import compiled
from subscriber.protocol.copy_text import NULL_FIELD, escape
from subscriber.protocol.row_extraction import NULL_CELL, VALUES, Cells, split_rows
from subscriber.protocol.tuple_data import BINARY

AnyRow = Cells | bytes

_COUNT = struct.Struct(">H")


def cells_of(row: AnyRow, form: int) -> Cells:
    """The cells of a row, or of both. Raises ValueError if there are not as many as it says."""
    if isinstance(row, list):
        return row
    (ncols,) = _COUNT.unpack_from(row, VALUES - _COUNT.size)
    for rows in (1, 2):
        cells = split_rows(row, VALUES, ncols, rows, form)
        if cells is not None:
            return cells
    raise ValueError("a change that was taken for whole is not")


@compiled
def copy_rows(rows: Sequence[AnyRow], form: int) -> bytes:
    """Encode rows with values of `form` as COPY data. In binary, the header and the trailer of COPY are left out."""
    cut = [cells_of(row, form) for row in rows]
    if form == BINARY:
        return b"".join([_COUNT.pack(len(row)) + b"".join(row) for row in cut])  # type: ignore[arg-type]
    lines = [[NULL_FIELD if cell == NULL_CELL else cell[4:] for cell in row] for row in cut]  # type: ignore[index]
    data = b"\n".join([b"\t".join(line) for line in lines]) + b"\n"
    nulls = sum([row.count(NULL_CELL) for row in cut])
    tabs = sum([len(row) - 1 for row in cut])
    # A thing to escape in any value makes one of the numbers too large.
    if data.count(b"\\") == nulls and data.count(b"\t") == tabs and data.count(b"\n") == len(cut) and b"\r" not in data:
        return data
    return b"".join([b"\t".join([_escaped(cell) for cell in row]) + b"\n" for row in cut])


def _escaped(cell: bytes | None) -> bytes:
    assert cell is not None
    if cell == NULL_CELL:
        return NULL_FIELD
    return escape(cell[4:])


@compiled
def columns(rows: Sequence[AnyRow], places: Sequence[int], form: int) -> list[bytes]:
    """Return the cells of all rows, by column. `places` count from the end of a row, so they are below 0."""
    cut = [cells_of(row, form) for row in rows]
    return [b"".join([row[place] for row in cut]) for place in places]  # type: ignore[misc]
