"""The data of `subscriber status`: from catalog rows and the publisher's answer to text and JSON. No I/O here.

    rows ── assess() ─▶ SubscriptionStatus ── as_json() ─▶ a dictionary with stable keys
                                           └─ describe() ─▶ lines for people, plain or coloured

`state` is one of status_problems.STATES. Positions are of the publisher's WAL; every time is UTC.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from subscriber import formatting
from subscriber.catalog.hooked_tables import Sources
from subscriber.catalog.store.quarantine import QuarantineSummary
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.store.subscription_sequence import SubscriptionSequence
from subscriber.catalog.store.workers import APPLY_WORKER, WorkerStatus
from subscriber.catalog.table_names import LostTable
from subscriber.lsn import Lsn
from subscriber.publisher.standby_slots import StandbySlot
from subscriber.remedy import Remedy, command_of, hint_of, json_of
from subscriber.status import problems as status_problems
from subscriber.status import sequences as status_sequences
from subscriber.status import slot_statistics, slot_wal, table_states, unpublished
from subscriber.status import transactions as status_transactions
from subscriber.status.problems import LockWait, Problem
from subscriber.status.sequences import SequencesStatus
from subscriber.status.slot_statistics import SlotStatistics
from subscriber.status.slot_wal import SlotLimits
from subscriber.status.stages import WalsenderPositions, lag_by_stage
from subscriber.status.table_states import TableStatus
from subscriber.status.transactions import OpenTransactions, Prepared
from subscriber.status.unpublished import Absent
from subscriber.subscription import Subscription

TABLE_STATES = {
    "i": "waiting",
    "d": "copying",
    "f": "copied",
    "w": "copied",
    "c": "catching up",
    "s": "caught up",
    "r": "ready",
}
SYNC_FAILED = "failed"
_UNCOPIED = ("waiting", "copying", SYNC_FAILED)
_SHOWN = (
    status_problems.NOT_RESPONDING,
    status_problems.LOCKED,
    status_problems.SEQUENCE,
    status_problems.QUARANTINE,
    status_problems.WAL,
    status_problems.GAVE_UP,
)  # other problems already have lines
LATE = 15.0  # seconds; the publisher sends a message at least every 10 s, and the worker reports every second


@dataclass(frozen=True, slots=True)
class PublisherAnswer:
    """The publisher's answer about a subscription's slot.

    If it could not be queried, all fields but `error` are None or empty.
    """

    position: Lsn | None = None  # end of its WAL; on a standby the replay position
    confirmed: Lsn | None = None  # the slot's confirmed_flush_lsn; None without the slot
    slot_exists: bool | None = None
    slot_active: bool | None = None
    wal_status: str | None = None  # reserved, extended, unreserved, lost
    retained_bytes: int | None = None  # bytes of WAL retained because of the slot
    replay_lag: float | None = None  # seconds, as the publisher measures it; None if nothing is unconfirmed
    now: datetime | None = None  # its clock
    published: frozenset[tuple[str, str]] = frozenset()  # schema and name of the publications' tables
    statistics: SlotStatistics = field(default_factory=SlotStatistics)
    standby_slots: tuple[StandbySlot, ...] = ()  # of standbys that its walsender waits for
    limits: SlotLimits = field(default_factory=SlotLimits)
    walsender: WalsenderPositions = field(default_factory=WalsenderPositions)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second over a fixed window, see history.py."""

    transactions: float
    changes: float
    bytes: float


@dataclass(frozen=True, slots=True)
class SubscriptionStatus:
    """The status of one subscription at one moment. A field is None if its value is not known."""

    name: str
    state: str  # one of STATES
    enabled: bool
    publications: tuple[str, ...]
    slot: str | None
    retry_in: float | None  # seconds
    error: str | None  # the apply worker's last error, until the worker is past the position of the error
    error_remedy: Remedy | None
    error_time: datetime | None
    received: Lsn | None
    confirmed: Lsn | None
    publisher: PublisherAnswer
    lag_bytes: int | None
    lag_seconds: float | None
    rates: Rates | None  # None until the history spans a window
    transactions: int  # since the worker started
    changes: int
    bytes: int
    tables: Mapping[str, int]  # state as text -> number of tables
    not_ready: tuple[TableStatus, ...]
    apply_errors: int
    sync_errors: int
    sequence_errors: int = 0
    skip_lsn: Lsn | None = None
    limits: tuple[str, ...] = ()  # capabilities that this target lacks, as warnings
    one_by_one: Mapping[str, int] = field(default_factory=dict)  # number of changes applied row by row, by reason
    unfinished: OpenTransactions = field(default_factory=OpenTransactions)
    conflicts: Mapping[str, int] = field(default_factory=dict)  # number of conflicts, by type
    format: str | None = None  # value format of the stream: binary or text; None: no stream yet
    format_reason: str | None = None  # reason for text, if the subscription does not set the format
    absent: Absent = field(default_factory=Absent)
    sequences: SequencesStatus = field(default_factory=SequencesStatus)
    quarantine: QuarantineSummary = field(default_factory=QuarantineSummary)
    stages: Mapping[str, int] = field(default_factory=dict)  # bytes of the lag in each stage; empty: not known
    retained_growth: float | None = None  # of the publisher's kept WAL, in bytes per second; from a history
    wal_budget: int | None = None  # in bytes; None: there is no limit
    copy_seconds_left: float | None = None  # an estimate for the initial copy of all tables; from a history

    problems: tuple[Problem, ...] = ()

    @property
    def error_hint(self) -> str | None:
        """What to do about the error, as text. None: there is no error, or nothing is known."""
        return hint_of(self.error_remedy)

    @property
    def error_command(self) -> str | None:
        """The next command. None: as `error_hint`, or it has no command."""
        return command_of(self.error_remedy)

    @property
    def is_wrong(self) -> bool:
        """Return True if the subscription has a problem."""
        return bool(self.problems)

    @property
    def kept_bytes(self) -> int | None:
        """The WAL that the publisher keeps for any slot of the subscription; None: not known."""
        kept = (self.publisher.retained_bytes, self.publisher.limits.sync_bytes)
        return max((size for size in kept if size is not None), default=None)

    @property
    def seconds_until_given_up(self) -> float | None:
        """The time until `wal_budget` is exceeded. None: there is no budget, or the kept WAL does not grow."""
        if self.wal_budget is None or self.kept_bytes is None or not self.retained_growth or self.retained_growth < 0:
            return None
        return max(0, self.wal_budget - self.kept_bytes) / self.retained_growth

    @property
    def uncopied(self) -> int:
        """The number of tables whose initial copy has not ended. The lag says nothing about them."""
        return sum(number for state, number in self.tables.items() if state in _UNCOPIED)

    @property
    def copied_share(self) -> float | None:
        """The share of tables whose rows are copied, from 0 to 1. None: all are."""
        if not self.uncopied:
            return None
        partial = sum((table.percent or 0) / 100 for table in self.not_ready)
        total = sum(self.tables.values())
        return (total - self.uncopied + partial) / total


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """The catalog rows of one snapshot."""

    at: datetime  # the target's clock
    launcher_pid: int | None  # process id of its backend on the target; None: no launcher runs
    subscriptions: Sequence[Subscription]
    workers: Sequence[WorkerStatus]
    relations: Mapping[int, Sequence[SubscriptionRel]]  # by subid
    progress: Mapping[int, Lsn] = field(default_factory=dict)  # by subid
    errors: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)  # by subid: apply, tables, sequences
    prepared: Mapping[int, Sequence[Prepared]] = field(default_factory=dict)  # by subid
    conflicts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # by subid: number of conflicts by type
    launcher_age: float | None = None  # seconds since the launcher renewed its lease; None: not known
    lock_waits: Mapping[int, Sequence[LockWait]] = field(default_factory=dict)  # by subid: the long waits
    lost: Mapping[int, Sequence[LostTable]] = field(default_factory=dict)  # by subid
    sources: Mapping[int, Sources] = field(default_factory=dict)  # by subid: the source tables of tables with hooks
    sequences: Mapping[int, Sequence[SubscriptionSequence]] = field(default_factory=dict)  # by subid
    quarantine: Mapping[int, QuarantineSummary] = field(default_factory=dict)  # by subid; none for an empty one
    handed_back: Collection[str] = ()  # names of subscriptions that `subscriber hand-back` has disabled
    adopted_in_part: Collection[str] = ()  # names that `subscriber adopt` has not finished to take from pglogical


def assess(subscription: Subscription, look: StatusSnapshot, publisher: PublisherAnswer) -> SubscriptionStatus:
    """Combine the facts about one subscription. StatusHistory.add() adds those that need earlier snapshots."""
    worker = _apply_worker(look, subscription.oid)
    state = status_problems.state_of(subscription, look, worker)
    worker_alive = None if state in ("no launcher", "disabled") else worker
    received = worker_alive.received_lsn if worker_alive else None
    confirmed = publisher.confirmed or (worker_alive.latest_end_lsn if worker_alive else None)
    confirmed = confirmed or look.progress.get(subscription.oid)
    if received and confirmed:
        received = max(received, confirmed)  # the worker's report is older than the publisher's answer
    if publisher.position is not None:
        publisher = replace(publisher, position=max(publisher.position, received or Lsn(0), confirmed or Lsn(0)))
    apply_errors, sync_errors, sequence_errors = look.errors.get(subscription.oid, (0, 0, 0))
    sequences = status_sequences.find(look.sequences.get(subscription.oid, ()))
    lag_bytes = None
    if publisher.position is not None and confirmed:
        lag_bytes = max(0, publisher.position - confirmed)
    absent = unpublished.find(
        None if publisher.error is not None else publisher.published,
        look.relations.get(subscription.oid, ()),
        look.lost.get(subscription.oid, ()),
        look.sources.get(subscription.oid, {}),
    )
    tables, not_ready = _tables(subscription, look, absent.lost)
    retry_in = None
    if state == "waiting to retry" and worker is not None and worker.next_retry is not None:
        retry_in = max(0.0, (worker.next_retry - look.at).total_seconds())
    problems = status_problems.find(subscription, look, worker, publisher, not_ready, absent.lost)
    return SubscriptionStatus(
        name=subscription.name,
        state=state,
        enabled=subscription.enabled,
        publications=subscription.publications,
        slot=subscription.slot_name,
        retry_in=retry_in,
        error=(worker.error if worker else None) or subscription.gave_up,
        error_remedy=worker.error_remedy if worker else None,
        error_time=worker.error_time if worker else None,
        received=received or None,
        confirmed=confirmed or None,
        publisher=publisher,
        lag_bytes=lag_bytes,
        lag_seconds=_lag_seconds(state, lag_bytes, worker_alive, publisher),
        rates=None,
        transactions=worker_alive.transactions if worker_alive else 0,
        changes=worker_alive.changes if worker_alive else 0,
        bytes=worker_alive.bytes if worker_alive else 0,
        tables=tables,
        not_ready=not_ready,
        apply_errors=apply_errors,
        sync_errors=sync_errors,
        sequence_errors=sequence_errors,
        skip_lsn=subscription.skip_lsn or None,
        limits=worker_alive.limits if worker_alive else (),
        one_by_one=worker_alive.one_by_one if worker_alive else {},
        unfinished=status_transactions.find(worker_alive, look.workers, look.prepared.get(subscription.oid, ())),
        conflicts=look.conflicts.get(subscription.oid, {}),
        format=worker_alive.format if worker_alive else None,
        format_reason=worker_alive.format_reason if worker_alive else None,
        wal_budget=subscription.wal_budget_bytes,
        problems=problems,
        absent=absent,
        sequences=sequences,
        quarantine=look.quarantine.get(subscription.oid, QuarantineSummary()),
        stages=lag_by_stage(publisher.position, publisher.confirmed, publisher.walsender, received),
    )


def _apply_worker(look: StatusSnapshot, subid: int) -> WorkerStatus | None:
    return next((w for w in look.workers if w.subid == subid and w.relid == APPLY_WORKER), None)


def _lag_seconds(
    state: str, lag_bytes: int | None, worker: WorkerStatus | None, publisher: PublisherAnswer
) -> float | None:
    """Return the age of the last confirmed change in seconds; None if it cannot be computed."""
    if lag_bytes == 0:
        return 0.0
    found = [] if publisher.replay_lag is None else [publisher.replay_lag]
    if worker is not None and worker.last_msg_send_time is not None and publisher.now is not None:
        outstanding = (worker.received_lsn or Lsn(0)) > (worker.latest_end_lsn or Lsn(0))
        if outstanding or state != "streaming":
            found.append(max(0.0, (publisher.now - worker.last_msg_send_time).total_seconds()))
    if worker is not None and worker.latest_end_time is not None and publisher.now is not None:
        behind = (publisher.now - worker.latest_end_time).total_seconds()
        if behind > LATE or worker.error is not None:  # else the next keepalive may report that nothing is unconfirmed
            found.append(behind)
    if not found and state == "streaming" and publisher.position is not None:
        return 0.0  # connected, and the publisher has nothing unconfirmed
    return max(found, default=None)


def _tables(
    subscription: Subscription, look: StatusSnapshot, lost: Sequence[LostTable]
) -> tuple[dict[str, int], tuple[TableStatus, ...]]:
    workers = {w.relid: w for w in look.workers if w.subid == subscription.oid and w.relid != APPLY_WORKER}
    counted: dict[str, int] = {}
    not_ready = []
    for table in lost:
        counted[table.what] = counted.get(table.what, 0) + 1
    gone = {table.relid for table in lost}
    for relation in look.relations.get(subscription.oid, ()):
        if relation.relid in gone:
            continue
        state = TABLE_STATES.get(relation.state, relation.state)
        worker = workers.get(relation.relid)
        if relation.state != "r":
            if worker is not None and worker.error:
                state = SYNC_FAILED
            not_ready.append(_table(relation, state, worker, look))
        counted[state] = counted.get(state, 0) + 1
    return counted, tuple(not_ready)


def _table(relation: SubscriptionRel, state: str, worker: WorkerStatus | None, look: StatusSnapshot) -> TableStatus:
    running = look.launcher_pid is not None
    started = worker.started if worker else None
    return TableStatus(
        name=f"{relation.namespace}.{relation.name}",
        state=state,
        activity=worker.state if worker and running else None,
        copy_rows=worker.copy_rows if worker else 0,
        copy_bytes=worker.copy_bytes if worker else 0,
        copy_total_bytes=worker.copy_total_bytes if worker else 0,
        copy_seconds=max(0.0, (look.at - started).total_seconds()) if started else None,
        error=worker.error if worker else None,
        error_remedy=worker.error_remedy if worker else None,
    )


# --- text -----------------------------------------------------------------------------------------


def state_in_words(status: SubscriptionStatus) -> str:
    """Return the state as text: `waiting to retry in 3 s`, `stopped: needs you` and so on."""
    match status.state:
        case "waiting to retry" if status.retry_in is not None:
            return (
                f"waiting to retry in {formatting.in_seconds(status.retry_in)}" if status.retry_in else "retrying now"
            )
        case "stopped":
            return "stopped: needs you"
        case "no launcher":
            return "no launcher running"
        case state:
            return state


def describe(status: SubscriptionStatus, now: datetime) -> list[tuple[str, str]]:
    """Return (label, text) of the lines below a subscription's name. Tables that are not ready have separate lines."""
    lines = []
    for problem in status.problems:
        if problem.kind in _SHOWN:
            lines.append(("problem", problem.message))
        if problem.hint and problem.kind in (status_problems.NO_LAUNCHER, *_SHOWN):
            lines.append(("hint", problem.hint))
    if status.error:
        since = ""
        if status.error_time is not None:
            ago = max(0.0, (now - status.error_time).total_seconds())
            since = f" ({status.error_time:%Y-%m-%d %H:%M:%S} UTC, {formatting.in_seconds(ago)} ago)"
        lines.append(("last error", status.error + since))
        if status.error_hint:
            lines.append(("hint", status.error_hint))
    lines.append(("publications", ", ".join(status.publications)))
    lines.append(("slot", _slot(status)))
    publisher = status.publisher
    at = publisher.position if publisher.error is None else "not reachable"
    lines.append(
        ("positions", f"received {status.received or '-'}, confirmed {status.confirmed or '-'}, publisher {at or '-'}")
    )
    if publisher.error is not None:
        lines.append(("publisher", publisher.error))
    lines += _lag(status)
    lines += slot_statistics.describe(publisher.statistics, publisher.now)
    if publisher.standby_slots:
        standbys = "; ".join(standby.condition for standby in publisher.standby_slots)
        lines.append(("standby", f"the walsender waits for synchronized_standby_slots: {standbys}"))
    if status.rates is not None:
        rates = f"{status.rates.transactions:,.0f} transactions/s, {status.rates.changes:,.0f} changes/s"
        lines.append(("rates", f"{rates}, {formatting.in_bytes(status.rates.bytes)}/s"))
    if status.format is not None:
        lines.append(("format", status.format + (f": {status.format_reason}" if status.format_reason else "")))
    if status.one_by_one:
        reasons = sorted(status.one_by_one.items(), key=lambda item: -item[1])
        lines.append(("one by one", ", ".join(f"{number:,} ({reason})" for reason, number in reasons)))
    lines += status_transactions.describe(status.unfinished, now)
    lines += [("limit", limit) for limit in status.limits]
    if status.skip_lsn:
        lines.append(("skipping", f"the transaction that finishes at {status.skip_lsn}"))
    if status.apply_errors or status.sync_errors or status.sequence_errors:
        errors = f"{status.apply_errors:,} applying, {status.sync_errors:,} synchronizing"
        if status.sequence_errors:
            errors += f", {status.sequence_errors:,} synchronizing sequences"
        lines.append(("errors so far", errors))
    counts = ", ".join(f"{number} {state}" for state, number in status.tables.items())
    lines.append(("tables", counts or "none"))
    lines += status_sequences.describe(status.sequences)
    lines += unpublished.describe(status.absent, status.name)
    return lines


def _lag(status: SubscriptionStatus) -> list[tuple[str, str]]:
    if status.lag_bytes is None:
        return []
    seconds = "" if status.lag_seconds is None else f", {formatting.in_seconds(status.lag_seconds)}"
    lines = [("lag", formatting.in_bytes(status.lag_bytes) + seconds + _copying(status))]
    if any(status.stages.values()):
        shares = (f"{name} {formatting.in_bytes(size)}" for name, size in status.stages.items() if size)
        lines.append(("lag by stage", ", ".join(shares)))
    return lines


def _copying(status: SubscriptionStatus) -> str:
    if not status.uncopied:
        return ""
    left = status.copy_seconds_left
    estimate = "" if left is None else f", about {formatting.in_seconds(max(1, round(left)))} left"
    return f"; {status.uncopied:,} of {sum(status.tables.values()):,} tables are not copied yet{estimate}"


def _slot(status: SubscriptionStatus) -> str:
    if status.slot is None:
        return "none"
    publisher = status.publisher
    if publisher.slot_exists is False:
        return f"{status.slot}: does not exist on the publisher"
    notes = []
    if publisher.retained_bytes is not None:
        notes.append(f"publisher keeps {formatting.in_bytes(publisher.retained_bytes)} of WAL")
    if publisher.wal_status not in (None, "reserved"):
        notes.append(f"wal_status {publisher.wal_status}")
    if status.wal_budget is not None:
        left = status.seconds_until_given_up
        exceeded = "" if left is None else f", exceeded in about {formatting.in_seconds(round(left))}"
        notes.append(f"wal_budget {formatting.in_bytes(status.wal_budget)}{exceeded}")
    notes += slot_wal.describe(publisher.limits, status.retained_growth, publisher.now)
    return f"{status.slot} ({', '.join(notes)})" if notes else status.slot


def as_json(status: SubscriptionStatus, now: datetime) -> dict[str, Any]:
    """Return the status as a JSON value.

    Positions are text, times are in ISO 8601, sizes in bytes, durations in seconds.
    """
    publisher = status.publisher
    return {
        "name": status.name,
        "state": status.state,
        "ok": not status.is_wrong,
        "problems": [problem.message for problem in status.problems],
        "problem_commands": [problem.command for problem in status.problems],
        "enabled": status.enabled,
        "publications": list(status.publications),
        "slot": status.slot,
        "retry_in": status.retry_in,
        "error": status.error,
        "error_hint": status.error_hint,
        "error_command": status.error_command,
        "error_remedy": json_of(status.error_remedy),
        "error_time": _time(status.error_time),
        "received_lsn": _lsn(status.received),
        "confirmed_lsn": _lsn(status.confirmed),
        "publisher": {
            "lsn": _lsn(publisher.position),
            "slot_exists": publisher.slot_exists,
            "slot_active": publisher.slot_active,
            "wal_status": publisher.wal_status,
            "retained_bytes": publisher.retained_bytes,
            "wal_budget": status.wal_budget,
            "seconds_until_given_up": None if (left := status.seconds_until_given_up) is None else round(left),
            **slot_wal.as_json(publisher.limits, status.retained_growth, publisher.now),
            **slot_statistics.as_json(publisher.statistics),
            "waits_for_standby_slots": [standby.name for standby in publisher.standby_slots],
            "error": publisher.error,
        },
        "lag_bytes": status.lag_bytes,
        "lag_seconds": status.lag_seconds,
        "lag_stages": dict(status.stages),
        "uncopied": status.uncopied,
        "copy_seconds_left": None if status.copy_seconds_left is None else round(status.copy_seconds_left),
        "rates": None
        if status.rates is None
        else {
            "transactions": round(status.rates.transactions, 1),
            "changes": round(status.rates.changes, 1),
            "bytes": round(status.rates.bytes, 1),
        },
        "transactions": status.transactions,
        "changes": status.changes,
        "bytes": status.bytes,
        **status_transactions.as_json(status.unfinished, now),
        "skip_lsn": _lsn(status.skip_lsn),
        "quarantined": status.quarantine.number,
        "quarantined_failed": status.quarantine.failed,
        "quarantined_since": _time(status.quarantine.since),
        "limits": list(status.limits),
        "format": status.format,
        "format_reason": status.format_reason,
        "one_by_one": dict(status.one_by_one),
        "apply_error_count": status.apply_errors,
        "sync_error_count": status.sync_errors,
        "sync_seq_error_count": status.sequence_errors,
        "conflicts": dict(status.conflicts),
        "tables": dict(status.tables),
        "not_ready": [table_states.as_json(table) for table in status.not_ready],
        **status_sequences.as_json(status.sequences),
        **unpublished.as_json(status.absent),
    }


def _lsn(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
