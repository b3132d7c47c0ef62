"""The part of `subscriber status` about published tables whose changes cannot be applied. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from subscriber.catalog.hooked_tables import Sources
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.table_names import LostTable
from subscriber.display import sql_identifier
from subscriber.publisher.own_schema import OWN_SCHEMA
from subscriber.remedy import Remedy

NAMES_SHOWN = 10  # of published tables that are not subscribed; JSON has all


@dataclass(frozen=True, slots=True)
class Absent:
    """Published tables of one subscription that have no table on the target, or no row in the subscription."""

    lost: tuple[LostTable, ...] = ()  # a change of these tables is an error
    not_subscribed: tuple[str, ...] = ()  # schema.table; their changes are not applied


def find(
    published: frozenset[tuple[str, str]] | None,
    relations: Iterable[SubscriptionRel],
    lost: Sequence[LostTable],
    sources: Sources,
) -> Absent:
    """Compare the publications with the subscription's tables.

    Args:
        published: schema and name of the publications' tables; None if the publisher does not answer.
        sources: the source tables of tables with hooks.
    """
    if published is None:
        return Absent(tuple(lost))
    known = {sources.get(table.relid, (table.namespace, table.name)) for table in relations}
    names = {table: sources.get(table.relid, (table.namespace, table.name)) for table in lost}
    missing = sorted(published - known - set(names.values()))
    return Absent(
        tuple(table for table in lost if names[table] in published),
        tuple(f"{schema}.{name}" for schema, name in missing if schema != OWN_SCHEMA),
    )


def describe(absent: Absent, subscription: str) -> list[tuple[str, str]]:
    """Return (label, text) of each line."""
    lines = []
    for table in absent.lost:
        error = table.error()
        lines += [("lost table", error.message), ("hint", error.hint or "")]
    if names := absent.not_subscribed:
        more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
        lines.append(("not subscribed", ", ".join(names[:NAMES_SHOWN]) + more))
        lines.append(("hint", str(refresh_remedy(subscription))))
    return lines


def refresh_remedy(subscription: str) -> Remedy:
    """Return the statement that adds published tables to a subscription."""
    return Remedy(command=f"ALTER SUBSCRIPTION {sql_identifier(subscription)} REFRESH PUBLICATION;")


def as_json(absent: Absent) -> dict[str, Any]:
    """Return the tables as a JSON value."""
    return {
        "lost": [{"table": table.label, "what": table.what} for table in absent.lost],
        "not_subscribed": list(absent.not_subscribed),
    }
