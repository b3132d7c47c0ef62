"""Repair of the rows of a target that differ from the publisher's. Each name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.repair.new_slot import reseed
    from subscriber.repair.result import Repair, TableRepair
    from subscriber.repair.tables import repair

__all__ = ["Repair", "TableRepair", "repair", "reseed"]

_HOMES = {
    "Repair": "subscriber.repair.result",
    "TableRepair": "subscriber.repair.result",
    "reseed": "subscriber.repair.new_slot",
    "repair": "subscriber.repair.tables",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'subscriber.repair' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
