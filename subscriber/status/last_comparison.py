"""The last comparison of a subscription that has ended, as the status shows it. No I/O here."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from subscriber.catalog.store.audit import ComparedTables
from subscriber.formatting import count


def describe(last: ComparedTables | None, now: datetime) -> list[tuple[str, str]]:
    """Return (label, text) of the line about the comparison; none if there was none."""
    if last is None:
        return []
    day = "" if last.ended.date() == now.date() else f"{last.ended:%Y-%m-%d} "
    tables = count(last.tables, "table")
    result = f"{last.different} of {tables} DIFFERENT" if last.different else f"{tables} without a difference"
    partly = "" if last.complete else ", not all rows were read"
    return [("compared", f"{day}{last.ended:%H:%M:%S} UTC at {last.lsn}: {result}{partly}")]


def as_json(last: ComparedTables | None) -> dict[str, Any]:
    """Return the key of the status about the comparison."""
    if last is None:
        return {"comparison": None}
    figures = {"lsn": last.lsn, "tables": last.tables, "different": last.different, "complete": last.complete}
    return {"comparison": {"ended": last.ended.isoformat(timespec="milliseconds"), **figures}}
