"""The documents of the console, from snapshots without a server."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from subscriber.apply.table_states import TableState
from subscriber.catalog.store.conflict_history import ConflictRecord
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.store.workers import WorkerStatus
from subscriber.console import documents
from subscriber.console.facts import SubscriptionFacts
from subscriber.console.observer import Seen
from subscriber.console.table_page import PAGE_ROWS, TableQuery
from subscriber.console.table_page import tables as table_page
from subscriber.lsn import Lsn
from subscriber.status.history import StatusHistory
from subscriber.status.model import SubscriptionStatus, assess
from subscriber.status.snapshot import StatusSnapshot
from tests.cli.test_status_report import NOW, PUBLISHER, STREAMING, SUBSCRIPTION, look

COPYING = WorkerStatus(
    SUBSCRIPTION.oid, 101, "table synchronization", "copying", copy_rows=5, copy_bytes=500, copy_total_bytes=1000
)
FAILED = WorkerStatus(SUBSCRIPTION.oid, 102, "table synchronization", "waiting", error="no such column")
CONFLICT = ConflictRecord(
    7,
    "s",
    "public.t",
    "insert_exists",
    {"id": "secret"},
    745,
    Lsn(0x3000),
    NOW,
    NOW + timedelta(seconds=1),
    3,
    "error",
    "error",
)

TARGET = documents.overview("1", "shop", Seen(look(STREAMING)), "active", {})


def tables(number: int, *states: str) -> StatusSnapshot:
    """Return a snapshot of `number` tables t100, t101, …: the first have `states`, and the others are ready."""
    every = [*states, *"r" * (number - len(states))]
    relations = [
        SubscriptionRel(100 + n, "public", f"t{100 + n}", TableState(state), None) for n, state in enumerate(every)
    ]
    return look(STREAMING, COPYING, FAILED, relations=relations)


def status_of(snapshot: StatusSnapshot) -> SubscriptionStatus:
    return assess(SUBSCRIPTION, snapshot, PUBLISHER)


def names(snapshot: StatusSnapshot, query: TableQuery) -> list[str]:
    return [row["table"] for row in table_page(snapshot, status_of(snapshot), query)["rows"]]


@pytest.mark.parametrize(
    ("snapshot", "tone"),
    [
        (look(STREAMING), "good"),
        (look(replace(STREAMING, state="connecting")), "busy"),
        (look(launcher=None), "wrong"),
        (tables(3, "i"), "busy"),
        (tables(3, "r", "d"), "busy"),
        (tables(3, "r", "r", "d"), "wrong"),  # a table that has failed
    ],
)
def test_the_tone_of_a_subscription_follows_its_state(snapshot: StatusSnapshot, tone: str) -> None:
    seen = Seen(snapshot, [status_of(snapshot)])
    (summary,) = documents.overview("1", "shop", seen, "active", {})["subscriptions"]
    assert summary["tone"] == tone
    assert (summary["tone"] == "wrong") == bool(summary["problems"])


def test_tables_are_sorted_and_searched_and_cut() -> None:
    snapshot = tables(10_000, "i", "d", "d")
    assert names(snapshot, TableQuery())[:4] == ["public.t102", "public.t101", "public.t100", "public.t1000"]
    assert names(snapshot, TableQuery(search="T1009", sort="name"))[:2] == ["public.t1009", "public.t10090"]
    assert names(snapshot, TableQuery(state="copying")) == ["public.t101"]
    assert names(snapshot, TableQuery(sort="bytes", descending=True))[0] == "public.t101"
    assert names(snapshot, TableQuery(search="t101", offset=0, sort="state"))[0] == "public.t101"
    page = table_page(snapshot, status_of(snapshot), TableQuery(offset=9_990))
    assert (page["total"], page["matching"], len(page["rows"])) == (10_000, 10_000, 10)
    assert len(table_page(snapshot, status_of(snapshot), TableQuery(offset=50))["rows"]) == PAGE_ROWS
    assert table_page(snapshot, status_of(snapshot), TableQuery(search="nowhere"))["rows"] == []


def test_a_conflict_has_no_values_of_its_key() -> None:
    snapshot = look(STREAMING)
    document = documents.detail(TARGET, snapshot, status_of(snapshot), SubscriptionFacts([CONFLICT]), ())
    (conflict,) = document["conflicts"]
    assert conflict["key_columns"] == ["id"]
    assert conflict["statement"] == "ALTER SUBSCRIPTION \"s\" SKIP (lsn = '0/3000');"
    assert "secret" not in str(document)


def test_a_stream_sends_each_point_once() -> None:
    history = StatusHistory()
    for second in range(0, 60, 5):
        snapshot = replace(look(STREAMING), at=NOW + timedelta(seconds=second))
        history.add(snapshot, [status_of(snapshot)])
    points, since = history.points(SUBSCRIPTION.oid), NOW.timestamp() + 40
    document = documents.detail(TARGET, snapshot, status_of(snapshot), SubscriptionFacts(), points, since=since)
    assert document["points"]["at"] == [NOW.timestamp() + second for second in (45, 50, 55)]
    assert {len(column) for column in document["points"].values()} == {3}  # type: ignore[arg-type]
