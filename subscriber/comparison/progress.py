"""ComparisonProgress: the progress of a comparison or a repair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """The progress of a comparison.

    `done` and `total` are bytes of tables on both servers, or rows to repair, see `unit`; 0 and 0: not known yet.
    """

    phase: str
    done: int = 0
    total: int = 0
    unit: str = "bytes"


OnProgress = Callable[[ComparisonProgress], None]
