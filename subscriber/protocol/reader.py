"""Bounds-checked big-endian reads of one message, for messages that are rare in a stream."""

from __future__ import annotations

import struct
from typing import Any

from subscriber.display import TEXT_LIMIT, shortened
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import UTF8, decode

NAME_LIMIT = 1024  # bytes; PostgreSQL's names have 63, and those of servers that were compiled for more have 255


class Reader:
    """Reads forward through one complete message and never past its end.

    `name` is the message's name in errors, as PostgreSQL prints it ("STREAM COMMIT"). Every method
    raises ProtocolError when the message is too short.
    """

    __slots__ = ("data", "name", "pos")

    def __init__(self, data: bytes, name: str, pos: int = 0) -> None:
        self.data = data
        self.pos = pos
        self.name = name

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Read fixed fields: one int for each format character of `layout`."""
        start = self._advance(layout.size)
        return layout.unpack_from(self.data, start)

    def uint(self, size: int) -> int:
        """Read an unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size), "big")

    def take(self, length: int) -> bytes:
        """Read `length` bytes; the caller has read the length as an unsigned number."""
        start = self._advance(length)
        return self.data[start : self.pos]

    def string(self, codec: str = UTF8) -> str:
        """Read a NUL-terminated string; see encodings.decode()."""
        return decode(self._bytes(), codec)

    def identifier(self, codec: str = UTF8) -> str:
        """Read the name of an object, such as a table.

        Raises:
            ProtocolError: no server has such a long name. A part of it would be the name of another object.
        """
        name = self._bytes()
        if len(name) > NAME_LIMIT:
            raise ProtocolError(
                f"{self.name} message has a name of {len(name):,} bytes",
                detail=f"Names have at most {NAME_LIMIT:,} bytes.",
            )
        return decode(name, codec)

    def text(self, codec: str = UTF8) -> str:
        """Read a string that is shown to people. A long one is shortened, see display.shortened()."""
        text = self._bytes()
        if len(text) <= TEXT_LIMIT:
            return decode(text, codec)
        # A character has at most four bytes. The cut may be inside one, which shortened() removes.
        return shortened(decode(text[: 5 * TEXT_LIMIT], codec), len(text))

    def _bytes(self) -> bytes:
        end = self.data.find(b"\0", self.pos)
        if end < 0:
            raise ProtocolError(
                f"{self.name} message has a string without an end",
                detail=f"No NUL byte after offset {self.pos} of {len(self.data)}.",
            )
        data = self.data[self.pos : end]
        self.pos = end + 1
        return data

    def finish(self) -> None:
        """Check that nothing is left over."""
        if self.pos != len(self.data):
            raise left_over(self.name, len(self.data) - self.pos)

    def _advance(self, length: int) -> int:
        start = self.pos
        if start + length > len(self.data):
            raise too_short(self.name, start, length, len(self.data))
        self.pos = start + length
        return start


def too_short(name: str, pos: int, length: int, size: int) -> ProtocolError:
    """The error for a message of `size` bytes that should have `length` more bytes at `pos`."""
    return ProtocolError(
        f"{name} message is too short",
        detail=f"{length} bytes are needed at offset {pos}, and the message has {size}.",
    )


def left_over(name: str, count: int) -> ProtocolError:
    """Create the error for a message with `count` extra bytes at its end."""
    return ProtocolError(
        f"{name} message has {count} bytes left over",
        hint="The publisher may speak another protocol version than was negotiated.",
    )


def non_zero_lsn(value: int, field: str, name: str) -> Lsn:
    """Check a position that has to be there; 0 is PostgreSQL's "none"."""
    if not value:
        raise ProtocolError(f"{field} is not set in {name} message")
    return Lsn(value)
