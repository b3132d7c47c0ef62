"""Versions of extensions."""

from __future__ import annotations


def is_older(version: str, other: str) -> bool:
    """Return True if `version` precedes `other`, number by number. Versions with other texts have no order."""
    try:
        return [int(part) for part in version.split(".")] < [int(part) for part in other.split(".")]
    except ValueError:
        return False
