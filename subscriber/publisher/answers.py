"""A publisher's answers. One that is not as it has to be becomes a ProtocolError; it is no bug of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from subscriber.errors import ProtocolError

MAX_COUNT = 2**63 - 1
MAX_OID = 2**32 - 1


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Raise ProtocolError where the block cannot read an answer about `what`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, BufferError) as error:  # the last is asyncpg's
        raise ProtocolError(
            "invalid query response", detail=f"The publisher's answer about {what} has not the expected form."
        ) from error


def count(text: str | None, limit: int = MAX_COUNT) -> int:
    """Return a number from 0 to `limit`; NULL and nothing are 0. Raises ValueError for anything else."""
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or (number := int(text)) > limit:
        raise ValueError("no number, or one that is too large")
    return number


def signed(text: str | None) -> int:
    """Return a 64-bit integer. Raises ValueError."""
    return -count(text[1:], MAX_COUNT + 1) if text and text[0] == "-" else count(text)


def oid(text: str | None) -> int:
    """Return an OID. Raises ValueError."""
    return count(text, MAX_OID)


def modifier(text: str | None) -> int:
    """Return a type modifier; -1 is none. Raises ValueError."""
    return -1 if text in (None, "", "-1") else count(text, 2**31 - 1)


def seconds(text: str | None) -> float:
    """Return a number of seconds between the years 1 and 9999, as of 1970. Raises ValueError."""
    number = float(text or "")
    if not -6.2e10 < number < 2.5e11:
        raise ValueError("no number of seconds")
    return number
