"""Choices of a comparison. The module imports nothing, because the command line reads it."""

from __future__ import annotations

from enum import StrEnum


class ComparisonEngine(StrEnum):
    ASYNCIO = "asyncio"  # this process
    SPARK = "spark"  # executors


class ComparisonStart(StrEnum):
    """The state whose later changes are compared."""

    LAST = "last"  # comparison
