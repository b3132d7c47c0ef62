"""The status of a subscription. No I/O here.

    StatusSnapshot, PublisherAnswer ── assess() ─▶ SubscriptionStatus ─▶ report.py: text and JSON

`state` is one of problems.STATES. Positions are of the publisher's WAL; every time is UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from subscriber.apply.table_states import TableState
from subscriber.catalog.store.audit import ComparedTables
from subscriber.catalog.store.quarantine import QuarantineSummary
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.store.workers import APPLY_WORKER, WorkerState, WorkerStatus
from subscriber.catalog.table_names import LostTable
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy, command_of, hint_of
from subscriber.settings import DEFAULTS
from subscriber.status import extra_rows, unpublished
from subscriber.status import problems as status_problems
from subscriber.status import sequences as status_sequences
from subscriber.status import transactions as status_transactions
from subscriber.status.problems import Problem
from subscriber.status.sequences import SequencesStatus
from subscriber.status.snapshot import PublisherAnswer, StatusSnapshot
from subscriber.status.stages import lag_by_stage
from subscriber.status.table_states import TableStatus
from subscriber.status.transactions import OpenTransactions
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
LATE = 15.0  # seconds; the publisher sends a message at least every 10 s, and the worker reports every second


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
    comparison: ComparedTables | None = None  # the last one that has ended
    extra_rows: Mapping[str, int] = field(default_factory=dict)  # by table, rows that the last comparison has kept
    copy_seconds_left: float | None = None  # an estimate for the initial copy of all tables; from a history

    problems: tuple[Problem, ...] = ()

    @property
    def error_hint(self) -> str | None:
        """The hint of the error, as text. None: there is no error, or it has no hint."""
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


def assess(
    subscription: Subscription,
    look: StatusSnapshot,
    publisher: PublisherAnswer,
    forgotten_after: float = DEFAULTS.forgotten_after,
) -> SubscriptionStatus:
    """Combine the facts about one subscription. StatusHistory.add() adds those that need earlier snapshots."""
    worker = _apply_worker(look, subscription.oid)
    state = status_problems.state_of(subscription, look, worker)
    if state == WorkerState.STREAMING and publisher.slot_active is False:
        state = WorkerState.CONNECTING  # the worker has not noticed yet that the publisher has ended its walsender
    worker_alive = None if state in ("no launcher", WorkerState.DISABLED) else worker
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
    if publisher.position is not None and confirmed and publisher.slot_exists is not False:
        lag_bytes = max(0, publisher.position - confirmed)
    absent = unpublished.find(
        publisher.published, look.memberships.get(subscription.oid, ()), look.lost.get(subscription.oid, ())
    )
    tables, not_ready = _tables(subscription, look, absent.lost)
    retry_in = None
    if state == WorkerState.WAITING_TO_RETRY and worker is not None:
        retry_in = 0.0 if worker.next_retry is None else max(0.0, (worker.next_retry - look.at).total_seconds())
    problems = status_problems.find(subscription, look, worker, publisher, not_ready, absent, forgotten_after)
    return SubscriptionStatus(
        name=subscription.name,
        state=state,
        enabled=subscription.enabled,
        publications=subscription.publications,
        slot=subscription.slot_name,
        retry_in=retry_in,
        error=(worker.error if worker else None) or subscription.gave_up,
        error_remedy=_error_remedy(subscription, worker),
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
        comparison=look.comparisons.get(subscription.oid),
        extra_rows=extra_rows.find(look.relations.get(subscription.oid, ())),
        stages=lag_by_stage(publisher.position, publisher.confirmed, publisher.walsender, received),
    )


def _apply_worker(look: StatusSnapshot, subid: int) -> WorkerStatus | None:
    return next((w for w in look.workers if w.subid == subid and w.relid == APPLY_WORKER), None)


def _lag_seconds(
    state: str, lag_bytes: int | None, worker: WorkerStatus | None, publisher: PublisherAnswer
) -> float | None:
    """Return the age of the last confirmed change in seconds; None if it cannot be computed.

    Without a stream, nothing shows that the publisher has no change. So a lag of 0 bytes is then no lag of 0 seconds.
    """
    if lag_bytes == 0 and state == WorkerState.STREAMING:
        return 0.0
    lags = [] if publisher.replay_lag is None else [publisher.replay_lag]
    if worker is not None and worker.last_msg_send_time is not None and publisher.now is not None:
        outstanding = (worker.received_lsn or Lsn(0)) > (worker.latest_end_lsn or Lsn(0))
        if outstanding or state != WorkerState.STREAMING:
            lags.append(max(0.0, (publisher.now - worker.last_msg_send_time).total_seconds()))
    if worker is not None and worker.latest_end_time is not None and publisher.now is not None:
        behind = (publisher.now - worker.latest_end_time).total_seconds()
        if behind > LATE or worker.error is not None:  # else the next keepalive may report that nothing is unconfirmed
            lags.append(behind)
    if not lags and state == WorkerState.STREAMING and publisher.position is not None:
        return 0.0  # connected, and the publisher has nothing unconfirmed
    return max(lags, default=None)


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
        if relation.state is not TableState.READY:
            if worker is not None and worker.error:
                state = SYNC_FAILED
            not_ready.append(_table(relation, state, worker, look, _error_remedy(subscription, worker)))
        counted[state] = counted.get(state, 0) + 1
    return counted, tuple(not_ready)


def _error_remedy(subscription: Subscription, worker: WorkerStatus | None) -> Remedy | None:
    """Return the remedy of a worker's error. None: it has no error."""
    if worker is None or worker.error is None:
        return None
    return worker.error_remedy or status_problems.next_step(subscription)


def _table(
    relation: SubscriptionRel, state: str, worker: WorkerStatus | None, look: StatusSnapshot, remedy: Remedy | None
) -> TableStatus:
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
        error_remedy=remedy,
    )
