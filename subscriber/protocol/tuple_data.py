"""TupleData: one row of pgoutput, checked when it is decoded and cut into values only when asked."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from subscriber._speedups import compiled
from subscriber.errors import ProtocolError

NULL = 0x6E  # n: NULL; in an old key also "not part of the key"
UNCHANGED = 0x75  # u: an unchanged TOAST value that was not sent
TEXT = 0x74  # t: length and the type's text output
BINARY = 0x62  # b: length and the type's binary send output

MAX_COLUMNS = 0xFFFF  # what the count on the wire can say

_length_at = struct.Struct(">I").unpack_from


# A stream has millions of rows: slots, but not frozen, which would make construction four times slower.
# No code assigns to their attributes all the same.
@dataclass(slots=True)
class TupleData:
    """One row, in the column order of the publisher's relation.

    `raw` is the columns as the publisher sent them, without their count: one status byte for each
    column (n, u, t, b), and after t and b four bytes of length and the value. The decoder has checked
    it: exactly `ncols` columns, every length inside, no bytes after them. For a large message it may be
    a memoryview, despite its annotation (decode.in_place()). split() returns bytes in either case.
    """

    raw: bytes
    ncols: int

    def split(self) -> tuple[bytes, list[bytes | None]]:
        """Cut the row into `(status, values)`, both `ncols` long.

        `status` has one byte for each column. A value is None if the status is n (NULL) or u (not sent), so compare
        the status, not the value. Text is in the client encoding and not NUL-terminated.
        """
        return split_columns(self.raw, 0, self.ncols)

    @classmethod
    def join(cls, status: bytes, values: Sequence[bytes | None]) -> TupleData:
        """Build a row from what split() gives.

        Raises ValueError when `status` and `values` do not fit each other, or there are too many.
        """
        if len(status) > MAX_COLUMNS:
            raise ValueError(f"a row has at most {MAX_COLUMNS} columns, not {len(status)}")
        parts = bytearray()
        for kind, value in zip(status, values, strict=True):
            parts.append(kind)
            if kind in (TEXT, BINARY) and value is not None:
                parts += len(value).to_bytes(4, "big")
                parts += value
            elif kind not in (NULL, UNCHANGED) or value is not None:
                raise ValueError(f"column status {chr(kind)!r} does not go with its value")
        return cls(bytes(parts), len(status))


@compiled
def split_columns(data: bytes, pos: int, ncols: int) -> tuple[bytes, list[bytes | None]]:
    """`ncols` columns from `pos` on as TupleData.split() gives them; they have been checked."""
    length_at = _length_at
    status = bytearray()
    values: list[bytes | None] = []
    for _ in range(ncols):
        kind = data[pos]
        status.append(kind)
        if kind == TEXT or kind == BINARY:  # noqa: SIM109 - "in" takes twice as long
            start = pos + 5
            pos = start + length_at(data, pos + 1)[0]
            values.append(bytes(data[start:pos]))
        else:
            pos += 1
            values.append(None)
    return bytes(status), values


@compiled
def skip_columns(data: bytes, pos: int, ncols: int) -> int:
    """Check `ncols` columns that start at `pos` and return the position after them.

    Raises ProtocolError for an unknown status byte; IndexError or struct.error where the bytes end too
    early. The position returned may lie past the end, when the last length does: compare it.
    Source: logicalrep_read_tuple() in proto.c.
    """
    length_at = _length_at
    for _ in range(ncols):
        kind = data[pos]
        if kind == TEXT or kind == BINARY:  # noqa: SIM109 - "in" takes twice as long
            pos += 5 + length_at(data, pos + 1)[0]
        elif kind == NULL or kind == UNCHANGED:  # noqa: SIM109
            pos += 1
        else:
            raise ProtocolError(f"unrecognized data representation type {chr(kind)!r}")
    return pos
