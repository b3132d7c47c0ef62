"""Rows of the target that the publisher did not have when its tables were compared last, and that were kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subscriber import formatting
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.display import shell_word

MOST_NAMED = 5  # tables in a line


def find(relations: Sequence[SubscriptionRel]) -> Mapping[str, int]:
    """Return the number of extra rows by table, without tables that have none."""
    return {f"{table.namespace}.{table.name}": table.extra for table in relations if table.extra}


def describe(extra: Mapping[str, int], subscription: str) -> list[tuple[str, str]]:
    """Return (label, text) of the lines about extra rows."""
    if not extra:
        return []
    shown = [f"{formatting.count(number, 'row')} of {name}" for name, number in list(extra.items())[:MOST_NAMED]]
    if len(extra) > MOST_NAMED:
        shown.append(f"and of {formatting.count(len(extra) - MOST_NAMED, 'other table')}")
    kept = f"kept by the last comparison, not the publisher's: {', '.join(shown)}"
    return [("extra rows", f"{kept}; their keys: subscriber verify {shell_word(subscription)}")]


def as_json(extra: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys of a status."""
    return {"extra_rows": dict(extra)}
