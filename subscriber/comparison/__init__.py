"""Comparison of both sides of a subscription. Each name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.comparison.comparison import verify
    from subscriber.comparison.progress import ComparisonProgress
    from subscriber.comparison.result import Comparison, TableComparison

__all__ = ["Comparison", "ComparisonProgress", "TableComparison", "verify"]

_HOMES = {
    "Comparison": "subscriber.comparison.result",
    "ComparisonProgress": "subscriber.comparison.progress",
    "TableComparison": "subscriber.comparison.result",
    "verify": "subscriber.comparison.comparison",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'subscriber.comparison' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
