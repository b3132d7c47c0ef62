"""COPY's text format: the only module that escapes and unescapes values.

Values are escaped with no more than COPY FROM needs; `_speedups/row_encoding.c` has the same rule. They are unescaped
with every letter that COPY TO writes.

Source: CopyAttributeOutText() in copyto.c, CopyReadAttributesText() in copyfromparse.c.
"""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.errors import ProtocolError
from subscriber.protocol.tuple_data import NULL, TEXT

NULL_FIELD = b"\\N"
ESCAPED = (b"\\", b"\t", b"\n", b"\r")  # the backslash first, because the others are replaced by one
_LETTERS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def split_line(line: bytes, ncols: int) -> tuple[bytes, list[bytes | None]]:
    """Cut one line into status and values, as TupleData.split() gives them; with or without its newline.

    Raises:
        ProtocolError: the line does not have `ncols` columns.
    """
    values = split_values(line) if ncols else []
    if len(values) != ncols:
        raise ProtocolError(f"a row of COPY has {len(values)} columns instead of {ncols}")
    return bytes(NULL if value is None else TEXT for value in values), values


def split_values(line: bytes) -> list[bytes | None]:
    """Cut one line into its values, however many it has; None is NULL."""
    return [None if field == NULL_FIELD else unescape(field) for field in line.removesuffix(b"\n").split(b"\t")]


def join_line(values: Sequence[bytes | None]) -> bytes:
    """Return the line of a row, with its newline; None is NULL."""
    return join_fields(values) + b"\n"


def join_fields(values: Sequence[object]) -> bytes:
    """Return the fields of a row with tabs between them. A value that is not bytes is NULL."""
    fields = [value if isinstance(value, bytes) else NULL_FIELD for value in values]
    line = b"\t".join(fields)
    # Compares the special characters of the whole line with those that separators and NULLs use.
    if (
        line.count(b"\t") < len(fields)
        and b"\n" not in line
        and b"\r" not in line
        and (b"\\" not in line or line.count(b"\\") <= sum(not isinstance(value, bytes) for value in values))
    ):
        return line
    return b"\t".join([escape(value) if isinstance(value, bytes) else NULL_FIELD for value in values])


def escape(value: bytes) -> bytes:
    """Return a value as a field of a line. ESCAPED has the bytes that it replaces."""
    return value.replace(b"\\", b"\\\\").replace(b"\t", b"\\t").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def unescape(field: bytes) -> bytes:
    """Return the value of a field that is not NULL."""
    if b"\\" not in field:
        return field
    first, *rest = field.split(b"\\")
    parts, escaped = [first], False
    for part in rest:
        if escaped:  # the backslash before this part was escaped by the one before it
            parts.append(part)
            escaped = False
        elif part:
            parts.append(_LETTERS.get(part[:1], part[:1]) + part[1:])
        else:
            parts.append(b"\\")
            escaped = True
    return b"".join(parts)
