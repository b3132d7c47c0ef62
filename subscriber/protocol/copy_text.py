"""Rows in COPY's text format, and back: status and values, as TupleData.split() gives them.

Source: CopyAttributeOutText() in copyto.c, CopyReadAttributesText() in copyfromparse.c.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from subscriber.errors import ProtocolError
from subscriber.protocol.tuple_data import NULL, TEXT

_NULL = b"\\N"
_LETTERS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_BACKSLASH = re.compile(rb"\\(.)", re.DOTALL)
_SPECIAL = re.compile(rb"[\\\b\f\n\r\t\v]")
_ESCAPES = {b"\\": b"\\\\", **{value: b"\\" + letter for letter, value in _LETTERS.items()}}


def split_line(line: bytes, ncols: int) -> tuple[bytes, list[bytes | None]]:
    """Cut one line, with or without its newline. Raises ProtocolError if it has not `ncols` columns."""
    fields = line.removesuffix(b"\n").split(b"\t") if ncols else []
    if len(fields) != ncols:
        raise ProtocolError(f"a row of COPY has {len(fields)} columns instead of {ncols}")
    values = [None if field == _NULL else _unescaped(field) for field in fields]
    return bytes(NULL if value is None else TEXT for value in values), values


def join_line(values: Sequence[bytes | None]) -> bytes:
    """The line of a row, with its newline; None is NULL."""
    return b"\t".join([_NULL if value is None else _escaped(value) for value in values]) + b"\n"


def _unescaped(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    return _BACKSLASH.sub(lambda match: _LETTERS.get(match[1], match[1]), field)


def _escaped(value: bytes) -> bytes:
    return _SPECIAL.sub(lambda match: _ESCAPES[match[0]], value)
