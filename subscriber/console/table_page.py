"""The tables of one subscription as a JSON document: a part of them, searched and sorted. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.console.documents import hint_parts
from subscriber.status import table_states
from subscriber.status.model import TABLE_STATES, SubscriptionStatus
from subscriber.status.snapshot import StatusSnapshot
from subscriber.status.table_states import TableStatus

PAGE_ROWS = 50  # tables in one answer

# The states of tables in the order in which they are sorted: tables with a problem first.
_STATE_ORDER = ("failed", "copying", "catching up", "copied", "caught up", "waiting", "ready")


class TablePage(TypedDict):
    """A part of a subscription's tables."""

    total: int
    matching: int
    offset: int
    counts: dict[str, int]
    rows: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TableQuery:
    """The tables of a subscription that a page shows.

    Attributes:
        search: a part of schema.table, in any case. Empty: all tables.
        state: only tables in this state. Empty: all.
        sort: `name`, `state`, `rows` or `bytes`.
        descending: the order is reversed.
        offset: number of matching tables before the first one that is shown.
    """

    search: str = ""
    state: str = ""
    sort: str = "state"
    descending: bool = False
    offset: int = 0


def tables(look: StatusSnapshot, status: SubscriptionStatus, query: TableQuery) -> TablePage:
    """Return the tables of a subscription that match `query`."""
    subscription = next(stored for stored in look.subscriptions if stored.name == status.name)
    unready = {table.name: table for table in status.not_ready}
    lost = {table.relid: table.what for table in status.absent.lost}
    search = query.search.casefold()
    listed: list[tuple[str, str]] = []  # name and state
    relations = look.relations.get(subscription.oid, ())
    for relation in relations:
        name = f"{relation.namespace}.{relation.name}"
        state = lost.get(relation.relid) or (unready[name].state if name in unready else _state(relation))
        if search in name.casefold() and query.state in ("", state):
            listed.append((name, state))

    def order(table: tuple[str, str]) -> tuple[float, str]:
        name, state = table
        if query.sort in ("rows", "bytes"):
            progress = unready.get(name)
            return (0 if progress is None else getattr(progress, f"copy_{query.sort}")), name
        return (_STATE_ORDER.index(state) if state in _STATE_ORDER else -1) if query.sort == "state" else 0, name

    listed.sort(key=order, reverse=query.descending)
    shown = listed[query.offset : query.offset + PAGE_ROWS]
    return {
        "total": len(relations),
        "matching": len(listed),
        "offset": query.offset,
        "counts": dict(status.tables),
        "rows": [
            _progress(unready[name]) if name in unready else {"table": name, "state": state} for name, state in shown
        ],
    }


def _progress(table: TableStatus) -> dict[str, Any]:
    return {**table_states.as_json(table), "error_hint": hint_parts(table.error_remedy)}


def _state(relation: SubscriptionRel) -> str:
    return TABLE_STATES.get(relation.state, relation.state)
