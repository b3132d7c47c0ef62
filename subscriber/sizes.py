"""Sizes of memory and disk as PostgreSQL writes them in settings: '200GB'."""

from __future__ import annotations

import re

UNITS = {"B": 1, "kB": 1024, "MB": 1024**2, "GB": 1024**3, "TB": 1024**4}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Read a size. Returns bytes, rounded; 0 needs no unit.

    Raises:
        ValueError: the text is not a size. The message is a hint.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError("A number with a unit is required, for example 200GB.")
    number, unit = match.groups()
    if unit not in UNITS and (unit or float(number)):
        raise ValueError('Valid units for this parameter are "B", "kB", "MB", "GB", and "TB".')
    return round(float(number) * UNITS.get(unit, 1))
