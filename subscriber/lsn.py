"""Lsn: a position in the publisher's write-ahead log."""

from __future__ import annotations

import re

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class Lsn(int):
    """A byte position in WAL. 0 means "none". str() returns PostgreSQL's text format: two hexadecimal numbers.

    PostgreSQL 19 prints leading zeros in the second number. Messages in its words do so, too (server_version.py).

    >>> Lsn.parse("16/B374D848")
    Lsn('16/B374D848')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Parse the text format, also with the leading zeros of PostgreSQL 19 in the second number.

        Raises:
            ValueError: the text is not a position.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f'invalid input syntax for type pg_lsn: "{text}"')
        return cls((int(match[1], 16) << 32) | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn('{self}')"


def optional_lsn(text: str | None) -> Lsn | None:
    """Parse the text format of a position that may be NULL. Raises ValueError as Lsn.parse()."""
    return None if text is None else Lsn.parse(text)
