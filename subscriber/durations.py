"""Durations as PostgreSQL writes them in settings with the unit milliseconds ('60s', '1.5min'), and daily windows."""

from __future__ import annotations

import re
from dataclasses import dataclass

MILLISECONDS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "min": 60_000.0, "h": 3_600_000.0, "d": 86_400_000.0}
GREATEST = 2**31 - 1  # milliseconds; a setting is a 32-bit integer
_TEXT = re.compile(r"\s*([+-]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))\s*([a-zA-Z]*)\s*")


def parse_milliseconds(text: str) -> int:
    """Read a duration. Returns milliseconds, rounded.

    Raises:
        ValueError: The text is no duration. Its message is the hint that PostgreSQL gives, or empty.

    Source: parse_int() in src/backend/utils/misc/guc.c.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError
    number, unit = match.groups()
    if unit and unit not in MILLISECONDS:
        raise ValueError('Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".')
    value = float(int(number, 16)) if "x" in number.lower() else float(number)
    milliseconds = value * MILLISECONDS[unit or "ms"]
    if abs(milliseconds) > GREATEST:
        raise ValueError("Value exceeds integer range.")
    return round(milliseconds)


_WINDOW = re.compile(r"\s*([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]):([0-5]\d)\s*")
_DAY = 86_400  # seconds


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A time of the day in which work is allowed, such as 22:00-06:00. Both times are in seconds since midnight.

    A window that ends before its start ends on the next day. A window with two equal times is always open.
    """

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> DailyWindow:
        """Parse two times of the day.

        Raises:
            ValueError: the text is no window.
        """
        match = _WINDOW.fullmatch(text)
        if match is None:
            raise ValueError("two times of the day are required, for example 22:00-06:00")
        start_hour, start_minute, end_hour, end_minute = map(int, match.groups())
        return cls((start_hour * 60 + start_minute) * 60, (end_hour * 60 + end_minute) * 60)

    def seconds_until_open(self, now: float) -> float:
        """Return the time until the window opens. 0: it is open at `now`, in seconds since midnight."""
        length = (self.end - self.start) % _DAY or _DAY
        return 0.0 if (now - self.start) % _DAY < length else (self.start - now) % _DAY

    def __str__(self) -> str:
        return "-".join(f"{time // 3600:02d}:{time // 60 % 60:02d}" for time in (self.start, self.end))
