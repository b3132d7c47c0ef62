"""Events: the differences between two snapshots of a target's subscriptions. No I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from subscriber.catalog.store.conflict_history import ConflictRecord
from subscriber.remedy import Remedy
from subscriber.status.model import TABLE_STATES, SubscriptionStatus
from subscriber.status.snapshot import StatusSnapshot


@dataclass(frozen=True, slots=True)
class StateChanged:
    """A subscription was created or dropped, or has another state."""

    subscription: str
    state: str | None  # streaming, connecting, waiting to retry, stopped, disabled, …; None: it was dropped
    before: str | None  # None: it was created


@dataclass(frozen=True, slots=True)
class TableStateChanged:
    """A table was added or removed, or has another state of its synchronization."""

    subscription: str
    table: str  # schema.table on the target
    state: str | None  # waiting, copying, copied, catching up, caught up, ready; None: it was removed
    before: str | None  # None: it was added


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker has failed. It retries, except in state stopped or disabled."""

    subscription: str
    table: str | None  # None: the apply worker
    message: str
    hint: str | None  # the next command
    sqlstate: str | None
    is_transient: bool  # a retry alone can solve it
    remedy: Remedy | None = None  # the hint as fields


@dataclass(frozen=True, slots=True)
class ConflictDetected:
    """A conflict has occurred. It was resolved, or has stopped the stream."""

    subscription: str
    conflict: ConflictRecord


@dataclass(frozen=True, slots=True)
class LagCrossed:
    """The lag has risen above the limit, or has fallen below it."""

    subscription: str
    seconds: float
    is_above: bool


Event: TypeAlias = StateChanged | TableStateChanged | WorkerFailed | ConflictDetected | LagCrossed


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """The facts that events are derived from."""

    snapshot: StatusSnapshot
    statuses: Sequence[SubscriptionStatus]
    conflicts: Sequence[ConflictRecord] = ()


def find_events(before: EventSnapshot, now: EventSnapshot, lag_limit: float | None = None) -> Iterator[Event]:
    """Yield the events between two snapshots, those of one subscription together.

    Args:
        before: The earlier snapshot.
        now: The later one.
        lag_limit: Seconds of lag whose crossing is an event. None: there are no such events.
    """
    states, earlier = ({status.name: status for status in snapshot.statuses} for snapshot in (now, before))
    tables, earlier_tables = _tables(now.snapshot), _tables(before.snapshot)
    failures, earlier_failures = _failures(now.snapshot), _failures(before.snapshot)
    for name in dict.fromkeys([*earlier, *states]):
        status, past = states.get(name), earlier.get(name)
        state = None if status is None else status.state
        past_state = None if past is None else past.state
        if state != past_state:
            yield StateChanged(name, state, past_state)
        ours, theirs = tables.get(name, {}), earlier_tables.get(name, {})
        for table in dict.fromkeys([*theirs, *ours]):
            if ours.get(table) != theirs.get(table):
                yield TableStateChanged(name, table, ours.get(table), theirs.get(table))
        for key, failure in failures.get(name, {}).items():
            if key not in earlier_failures.get(name, {}):
                yield failure
        if lag_limit is not None and status is not None and status.lag_seconds is not None:
            was_above = past is not None and past.lag_seconds is not None and past.lag_seconds > lag_limit
            if (status.lag_seconds > lag_limit) != was_above:
                yield LagCrossed(name, status.lag_seconds, not was_above)
    known = {(conflict.id, conflict.occurrences) for conflict in before.conflicts}
    for conflict in reversed(now.conflicts):  # the oldest first
        if (conflict.id, conflict.occurrences) not in known:
            yield ConflictDetected(conflict.subscription, conflict)


def _tables(snapshot: StatusSnapshot) -> dict[str, dict[str, str]]:
    return {
        subscription.name: {
            f"{relation.namespace}.{relation.name}": TABLE_STATES.get(relation.state, relation.state)
            for relation in snapshot.relations.get(subscription.oid, ())
        }
        for subscription in snapshot.subscriptions
    }


def _failures(snapshot: StatusSnapshot) -> Mapping[str, Mapping[object, WorkerFailed]]:
    """Return the last failure of each worker. The key tells two failures of a worker apart."""
    failures: dict[str, dict[object, WorkerFailed]] = {}
    names = {subscription.oid: subscription.name for subscription in snapshot.subscriptions}
    for worker in snapshot.workers:
        if worker.error is None or worker.subid not in names:
            continue
        relations = snapshot.relations.get(worker.subid, ())
        table = next(
            (f"{relation.namespace}.{relation.name}" for relation in relations if relation.relid == worker.relid), None
        )
        failures.setdefault(names[worker.subid], {})[worker.relid, worker.error_time] = WorkerFailed(
            names[worker.subid],
            table,
            worker.error,
            worker.error_hint,
            worker.error_sqlstate,
            bool(worker.error_is_transient),
            worker.error_remedy,
        )
    return failures
