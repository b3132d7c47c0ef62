"""PostgreSQL's epoch, 2000-01-01, and its distance from the Unix epoch.

The protocol and binary values count microseconds, dates count days, since PostgreSQL's epoch.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

EPOCH_WITHOUT_ZONE: Final = datetime(2000, 1, 1)
EPOCH: Final = EPOCH_WITHOUT_ZONE.replace(tzinfo=UTC)
EPOCH_DAY: Final = EPOCH.toordinal()  # as date.toordinal() counts
UNIX_EPOCH_OFFSET_US: Final = 946_684_800_000_000  # PostgreSQL's epoch in microseconds since 1970


def to_datetime(microseconds: int) -> datetime:
    """Return the time that is `microseconds` after PostgreSQL's epoch, in UTC.

    Raises:
        OverflowError: Python does not have the year.
    """
    return EPOCH + timedelta(microseconds=microseconds)


def to_unix(microseconds: int) -> int:
    """Return a time of PostgreSQL's in microseconds since 1970."""
    return microseconds + UNIX_EPOCH_OFFSET_US


def from_unix(microseconds: int) -> int:
    """Return a time in microseconds since 1970 as PostgreSQL counts it."""
    return microseconds - UNIX_EPOCH_OFFSET_US
