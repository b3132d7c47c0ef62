"""Numbers that cannot mislead: positions, rates over a window, the lag of a copy, and the WAL of the slot."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from subscriber.apply.table_states import TableState
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.store.workers import WorkerStatus
from subscriber.cli.status_lines import to_text
from subscriber.lsn import Lsn
from subscriber.status import slot_wal
from subscriber.status.history import POINTS, StatusHistory
from subscriber.status.model import SubscriptionStatus, assess
from subscriber.status.report import as_json
from subscriber.status.slot_wal import SlotLimits
from subscriber.status.snapshot import PublisherAnswer
from subscriber.status.stages import STAGES, WalsenderPositions, lag_by_stage
from tests.cli.test_status_report import NOW, PUBLISHER, STREAMING, SUBSCRIPTION, look

GIB = 1024**3


def seen(
    history: StatusHistory,
    second: float,
    *,
    reported: float | None = None,
    publisher: PublisherAnswer = PUBLISHER,
    relations: list[SubscriptionRel] | None = None,
    workers: tuple[WorkerStatus, ...] = (),
    **worker: object,
) -> SubscriptionStatus:
    """Add a snapshot that is taken `second` seconds after NOW, of a worker that reported at `reported`."""
    at = NOW + timedelta(seconds=second if reported is None else reported)
    apply = replace(STREAMING, updated_at=at, **worker)  # type: ignore[arg-type]
    snapshot = replace(look(apply, *workers, relations=relations), at=NOW + timedelta(seconds=second))
    (status,) = history.add(snapshot, [assess(SUBSCRIPTION, snapshot, publisher)])
    return status


def test_rates_do_not_depend_on_the_moments_of_questions() -> None:
    history = StatusHistory()
    assert seen(history, 0.1, reported=0, transactions=0).rates is None
    # Ten questions a second. The worker reports once a second, 300 transactions each time.
    rates = [
        seen(history, tenth / 10, reported=tenth // 10, transactions=300 * (tenth // 10)).rates
        for tenth in range(1, 400)
    ]
    assert {round(rate.transactions) for rate in rates if rate is not None} == {300}
    assert sum(rate is None for rate in rates) < 10


def test_a_rate_falls_to_zero_with_the_changes_and_starts_anew_with_the_worker() -> None:
    history = StatusHistory()
    for second in range(20):
        seen(history, second, transactions=10 * second, bytes=10)
    for second in range(20, 40, 2):  # no report while nothing changes
        status = seen(history, second, reported=19, transactions=190, bytes=10)
    assert status.rates is not None
    assert status.rates.transactions == 0
    assert seen(history, 41, transactions=5, bytes=1).rates is None


def test_positions_never_contradict_each_other() -> None:
    late = replace(STREAMING, received_lsn=Lsn(0x1000))  # reported before the publisher answered
    status = assess(SUBSCRIPTION, look(late), replace(PUBLISHER, confirmed=Lsn(0x2000), position=Lsn(0x1800)))
    assert status.received == status.confirmed == status.publisher.position == Lsn(0x2000)
    assert status.lag_bytes == 0


@pytest.mark.parametrize(
    ("sent", "received", "applied", "flushed", "reported", "sizes"),
    [
        (0x2800, 0x2800, 0x2800, 0x2800, 0x2800, (0x800, 0, 0, 0, 0x800)),
        (0x3000, 0x2100, 0x2000, 0x2000, 0x2100, (0, 0xF00, 0x100, 0, 0)),
        (0x3000, 0x2100, 0x2000, 0x2000, 0x3000, (0, 0, 0x1000, 0, 0)),  # the worker's report is newer
        (0x3000, 0x3000, 0x3000, 0x2000, 0x3000, (0, 0, 0, 0x1000, 0)),
        (0x9000, 0x9000, 0x1000, 0x9000, 0x9000, (0, 0, 0, 0, 0x1000)),  # positions of different moments
    ],
)
def test_the_stages_add_up_to_the_lag(
    sent: int, received: int, applied: int, flushed: int, reported: int, sizes: tuple[int, ...]
) -> None:
    walsender = WalsenderPositions(Lsn(sent), Lsn(received), Lsn(flushed), Lsn(applied))
    stages = lag_by_stage(Lsn(0x3000), Lsn(0x2000), walsender, Lsn(reported))
    assert stages == dict(zip(STAGES, sizes, strict=True))
    assert sum(stages.values()) == 0x1000
    assert lag_by_stage(Lsn(0x3000), Lsn(0x2000), WalsenderPositions(), Lsn(reported)) == {}


def test_the_lag_of_a_copy_is_reported_as_a_copy() -> None:
    def copying(done: int) -> list[SubscriptionRel]:
        states = ["r"] * done + ["d"] + ["i"] * (9 - done)
        return [SubscriptionRel(100 + n, "public", f"t{n}", TableState(state), None) for n, state in enumerate(states)]

    caught_up, history = replace(PUBLISHER, confirmed=PUBLISHER.position), StatusHistory()
    seen(history, 0, publisher=caught_up, relations=copying(2))
    status = seen(history, 30, publisher=caught_up, relations=copying(5))
    assert status.uncopied == 5
    assert status.copy_seconds_left == pytest.approx(50)
    assert "  lag           0 B, 0 s; 5 of 10 tables are not copied yet, about 50 s left" in text(status)
    assert as_json(status, NOW)["uncopied"] == 5


def test_the_time_until_the_slot_is_lost() -> None:
    history = StatusHistory()
    for second in range(0, 90, 10):
        limits = SlotLimits(max_bytes=64 * GIB, safe_bytes=20 * GIB - second * GIB // 60)
        publisher = replace(PUBLISHER, retained_bytes=44 * GIB + second * GIB // 60, limits=limits)
        status = seen(history, second, publisher=publisher)
    assert not status.is_wrong
    (slot,) = [line for line in text(status) if line.startswith("  slot ")]
    assert slot.endswith("at most 64.0 GiB, growing by 17.1 MiB/s, lost in about 18 min 40 s)")
    assert as_json(status, NOW)["publisher"]["seconds_until_full"] == 1120

    tight = replace(publisher, limits=SlotLimits(max_bytes=64 * GIB, safe_bytes=12 * GIB))
    (problem,) = seen(history, 90, publisher=tight).problems
    assert problem.kind == "wal"
    assert problem.hint is not None
    assert problem.hint.endswith("subscriber reseed s")


def test_the_time_without_a_connection() -> None:
    limits = slot_wal.parse([("-1", None, "3600", str((NOW - timedelta(minutes=10)).timestamp()), None, None)])
    assert (limits.max_bytes, limits.seconds_until_idle(NOW)) == (None, 3000)
    status = assess(SUBSCRIPTION, look(STREAMING), replace(PUBLISHER, limits=limits))
    assert "without a connection, lost in 50 min" in " ".join(text(status))
    assert slot_wal.parse([("67108864", "-5", None, None, "wal_removed", None)]).is_tight


def test_the_history_is_bounded() -> None:
    history = StatusHistory()
    for second in range(0, 4000, 2):
        seen(history, second, transactions=second)
    points = history.points(SUBSCRIPTION.oid)
    assert len(points) <= POINTS
    assert timedelta(minutes=55) < points[-1].at - points[0].at <= timedelta(minutes=75)
    history.add(replace(look(), subscriptions=[]), [])
    assert history.points(SUBSCRIPTION.oid) == ()


def text(status: SubscriptionStatus) -> list[str]:
    return to_text(look(), [status]).splitlines()
