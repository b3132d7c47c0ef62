"""Durations as PostgreSQL writes them in settings that have milliseconds as their unit: 60000, '60s', '1.5min'."""

from __future__ import annotations

import re

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
