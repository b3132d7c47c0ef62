"""Rows in pgoutput's format, for code that reads few of their values. No I/O.

A raw row is TupleData.raw: for each column a status byte (n, u, t, b), and after t and b a length and the value. Rows
that are replaced before their values are read are never split into values; the nets of long logs consist mostly of such
rows. Rows are validated lazily: only `values()` walks a whole row.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from types import EllipsisType
from typing import Final, TypeAlias

from subscriber.errors import ApplyError, ProtocolError
from subscriber.protocol.tuple_data import BINARY, NULL, TEXT
from subscriber.protocol.tuple_data import UNCHANGED as NOT_SENT

UNCHANGED: Final = ...  # marks a value that was not sent, as distinct from NULL
Value: TypeAlias = bytes | EllipsisType | None
Values: TypeAlias = tuple[Value, ...]
Key: TypeAlias = bytes  # the key's columns as a raw row

_length_at = struct.Struct(">I").unpack_from
_UNSENT = b"u"
# Matches u at the end, or before a column of less than 16 MiB: the next byte is NUL, which no text contains. Also
# matches some values that end in u.
_seems_unsent = re.compile(rb"u[nu]*(?:[tb]\x00|\Z)").search
_LONG = 1 << 24


def values(raw: bytes, ncols: int) -> Values:
    """Return the row's values. Raises ProtocolError if it is not a whole row of `ncols` columns."""
    return tuple([_value(cell) for cell in cells(raw, ncols)])


def cells(raw: bytes, ncols: int) -> list[bytes]:
    """Return each column's bytes, status byte first. Raises ProtocolError."""
    cells_of_row: list[bytes] = []
    pos = 0
    try:
        for _ in range(ncols):
            begin, kind = pos, raw[pos]
            if kind == TEXT or kind == BINARY:  # noqa: SIM109 - "in" takes twice as long
                pos += 5 + _length_at(raw, pos + 1)[0]
            elif kind == NULL or kind == NOT_SENT:  # noqa: SIM109
                pos += 1
            else:
                raise ProtocolError(f"unrecognized data representation type {chr(kind)!r}")
            cells_of_row.append(raw[begin:pos])
    except (IndexError, struct.error):
        pos = -1
    if pos != len(raw):
        raise ProtocolError(f"a row does not have the {ncols} columns of its relation")
    return cells_of_row


def _value(cell: bytes) -> Value:
    kind = cell[0]
    if kind == TEXT or kind == BINARY:  # noqa: SIM109
        return cell[5:]
    return None if kind == NULL else UNCHANGED


def raw_row(row: Values) -> bytes:
    """Return the raw row of `row`, the inverse of values(), with values as text."""
    parts = []
    for value in row:
        if isinstance(value, bytes):
            parts += [b"t", len(value).to_bytes(4, "big"), value]
        else:
            parts.append(b"n" if value is None else _UNSENT)
    return b"".join(parts)


def lacks(raw: bytes, ncols: int) -> bool:
    """Return True if a value of the row was not sent because it did not change. Fast if all values were sent."""
    if _UNSENT not in raw or (_seems_unsent(raw) is None and len(raw) < _LONG):
        return False
    return _UNSENT in cells(raw, ncols)


def over(before: bytes, after: bytes, ncols: int, columns: Sequence[int] | None = None) -> bytes:
    """Return `after`, with its unsent values replaced by those of `before`. `columns` are indexes; None: all."""
    old, new = cells(before, ncols), cells(after, ncols)
    for index in range(ncols) if columns is None else columns:
        if new[index] == _UNSENT:
            new[index] = old[index]
    return b"".join(new)


def nothing(ncols: int) -> bytes:
    """Return a row without any sent value."""
    return _UNSENT * ncols


def key_of(raw: bytes, columns: Sequence[int], ncols: int) -> Key:
    """Return the key of a row. Raises ApplyError if a value of the key was not sent or is NULL."""
    if columns == (0,) and raw[0] == TEXT:
        return raw[: 5 + _length_at(raw, 1)[0]]
    cells_of_row = cells(raw, ncols)
    key = [cells_of_row[index] for index in columns]
    if b"n" in key or _UNSENT in key:
        raise ApplyError("a change does not identify its row")
    return b"".join(key)
