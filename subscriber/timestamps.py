"""PostgreSQL's epoch, 2000-01-01, and conversions to other epochs.

Times of the protocol and of binary values are microseconds since PostgreSQL's epoch. Dates are days since then.
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
    """Convert microseconds since PostgreSQL's epoch to microseconds since 1970."""
    return microseconds + UNIX_EPOCH_OFFSET_US


def from_unix(microseconds: int) -> int:
    """Convert microseconds since 1970 to microseconds since PostgreSQL's epoch."""
    return microseconds - UNIX_EPOCH_OFFSET_US
