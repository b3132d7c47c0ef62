"""The last hour of a target's subscriptions, in memory: rates, the growth of WAL, the points of graphs. No I/O here.

A rate is the difference of two reports of one worker that are WINDOW or more apart, so it does not depend on the
moments at which somebody asks. A worker that starts again counts from zero, and so does its window. The memory of a
subscription is bounded: POINTS points, and the samples of GROWTH_WINDOW.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from subscriber.catalog.store.history import HistoryPoint
from subscriber.catalog.store.workers import APPLY_WORKER, WorkerStatus
from subscriber.status.model import Rates, SubscriptionStatus
from subscriber.status.snapshot import StatusSnapshot

WINDOW = timedelta(seconds=10)  # of rates
GROWTH_WINDOW = timedelta(minutes=2)  # of the kept WAL and of the initial copy, which change in steps
SHORTEST = timedelta(seconds=1)  # two samples that are closer together give no rate
QUIET = timedelta(seconds=2)  # a worker reports changes after at most 1 s
RESOLUTION = timedelta(seconds=5)  # of points
POINTS = 720  # an hour


@dataclass(frozen=True, slots=True)
class _Counters:
    at: datetime  # the worker's report
    started: datetime | None
    transactions: int
    changes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Gauges:
    at: datetime
    retained_bytes: int | None
    copied_share: float | None


@dataclass(slots=True)
class _Record:
    counters: deque[_Counters] = field(default_factory=deque)
    gauges: deque[_Gauges] = field(default_factory=deque)
    points: deque[HistoryPoint] = field(default_factory=lambda: deque(maxlen=POINTS))


class StatusHistory:
    """The history of all subscriptions of a target."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def add(self, snapshot: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> list[SubscriptionStatus]:
        """Add a snapshot. Returns its statuses with rates, growth and estimates.

        Args:
            snapshot: the catalog's rows. It is newer than all that were added.
            statuses: the statuses of its subscriptions, in the same order.
        """
        known = {subscription.oid for subscription in snapshot.subscriptions}
        self._records = {subid: record for subid, record in self._records.items() if subid in known}
        return [
            self._add(snapshot, subscription.oid, status)
            for subscription, status in zip(snapshot.subscriptions, statuses, strict=True)
        ]

    def points(self, subid: int) -> Sequence[HistoryPoint]:
        """Return the points of a subscription, the oldest first."""
        record = self._records.get(subid)
        return () if record is None else tuple(record.points)

    def restore(self, subid: int, points: Sequence[HistoryPoint]) -> None:
        """Put earlier points in front of those of a subscription. Only the newest POINTS points stay."""
        record = self._records.setdefault(subid, _Record())
        first = record.points[0].at if record.points else None
        earlier = [point for point in points if first is None or point.at < first]
        record.points = deque([*earlier, *record.points], maxlen=POINTS)

    def _add(self, snapshot: StatusSnapshot, subid: int, status: SubscriptionStatus) -> SubscriptionStatus:
        record = self._records.setdefault(subid, _Record())
        worker = next((row for row in snapshot.workers if (row.subid, row.relid) == (subid, APPLY_WORKER)), None)
        if worker is None or status.state in ("no launcher", "disabled", "not responding"):
            record.counters.clear()
            rates = None
        else:
            rates = _add_counters(record.counters, worker, snapshot.at)
        gauges = _Gauges(snapshot.at, status.publisher.retained_bytes, status.copied_share)
        growth, seconds_left = _add_gauges(record.gauges, gauges)
        status = replace(status, rates=rates, retained_growth=growth, copy_seconds_left=seconds_left)
        if not record.points or snapshot.at - record.points[-1].at >= RESOLUTION:
            record.points.append(_point(snapshot.at, status))
        return status


def _point(at: datetime, status: SubscriptionStatus) -> HistoryPoint:
    rates = status.rates
    return HistoryPoint(
        at,
        None if rates is None else rates.transactions,
        None if rates is None else rates.changes,
        None if rates is None else rates.bytes,
        status.lag_bytes,
        status.lag_seconds,
        status.publisher.retained_bytes,
    )


def _add_counters(samples: deque[_Counters], worker: WorkerStatus, now: datetime) -> Rates | None:
    counters = (worker.transactions, worker.changes, worker.bytes)
    at = worker.updated_at or now
    if samples:
        last = samples[-1]
        if last.started != worker.started or last.bytes > worker.bytes:
            samples.clear()
        else:
            # A worker writes no report while nothing changes, so old counters are still right.
            at = now if now - at > QUIET else max(at, last.at)
    sample = _Counters(at, worker.started, *counters)
    earlier = _earlier(samples, at, WINDOW)
    if not samples or at - samples[-1].at >= SHORTEST:
        samples.append(sample)
    if earlier is None:
        return None
    seconds = (at - earlier.at).total_seconds()
    return Rates(
        (sample.transactions - earlier.transactions) / seconds,
        (sample.changes - earlier.changes) / seconds,
        (sample.bytes - earlier.bytes) / seconds,
    )


def _earlier(samples: deque[_Counters], at: datetime, window: timedelta) -> _Counters | None:
    """Return the newest sample that is `window` older, or the oldest there is. Older ones are forgotten."""
    while len(samples) > 1 and at - samples[1].at >= window:
        samples.popleft()
    return samples[0] if samples and at - samples[0].at >= SHORTEST else None


def _add_gauges(samples: deque[_Gauges], sample: _Gauges) -> tuple[float | None, float | None]:
    """Return the growth of the kept WAL in bytes per second, and the seconds that the initial copy still takes."""
    while len(samples) > 1 and sample.at - samples[1].at >= GROWTH_WINDOW:
        samples.popleft()
    growth = seconds_left = None
    if samples and (seconds := (sample.at - samples[0].at).total_seconds()) >= WINDOW.total_seconds():
        earlier = samples[0]
        if sample.retained_bytes is not None and earlier.retained_bytes is not None:
            growth = (sample.retained_bytes - earlier.retained_bytes) / seconds
        if sample.copied_share is not None and earlier.copied_share is not None:
            copied = sample.copied_share - earlier.copied_share
            seconds_left = (1 - sample.copied_share) * seconds / copied if copied > 0 else None
    if not samples or sample.at - samples[-1].at >= SHORTEST:
        samples.append(sample)
    return growth, seconds_left
