"""The problems of a subscription. No I/O here.

A subscription is healthy if it has no problems. If find() returns a problem, `subscriber status` exits 1, /health
answers 503, the page is red, and metric subscriber_subscription_ok is 0.

An old report proves nothing: a frozen process does not report that it is frozen. The age of the launcher's lease and of
the worker's report is therefore checked before the contents of the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from subscriber import formatting
from subscriber.catalog.store.workers import WorkerState, WorkerStatus
from subscriber.display import shell_word, sql_identifier
from subscriber.remedy import Remedy, command_of, hint_of
from subscriber.settings import DEFAULTS
from subscriber.sizes import UNITS
from subscriber.status import forgotten, unpublished
from subscriber.status.slot_wal import ALARM_SHARE
from subscriber.status.snapshot import PublisherAnswer, StatusSnapshot
from subscriber.status.table_states import TableStatus
from subscriber.status.unpublished import Absent
from subscriber.subscription import Subscription

STATES = (
    WorkerState.STREAMING,
    WorkerState.CONNECTING,
    WorkerState.WAITING_TO_RETRY,
    WorkerState.STOPPED,
    WorkerState.DISABLED,
    "no launcher",
    "not responding",
)
# Kinds of problems, which are label values in metrics.
NO_LAUNCHER = "no launcher"
NOT_RESPONDING = "not responding"
FAILING = "failing"
STOPPED = "stopped"
DISABLED = "disabled by an error"
GAVE_UP = "given up"
HANDED_BACK = "handed back"
ADOPTED_IN_PART = "adopted in part"
LOCKED = "locked"
SLOT = "slot"
TABLE = "table"
SEQUENCE = "sequence"
QUARANTINE = "quarantine"
WAL = "wal"
PUBLICATION = "publication"
PUBLISHER = "publisher"
FORGOTTEN = "forgotten"
DIFFERENT = "different"
KINDS = (
    NO_LAUNCHER,
    NOT_RESPONDING,
    FAILING,
    STOPPED,
    DISABLED,
    GAVE_UP,
    HANDED_BACK,
    ADOPTED_IN_PART,
    LOCKED,
    SLOT,
    TABLE,
    SEQUENCE,
    QUARANTINE,
    WAL,
    PUBLICATION,
    PUBLISHER,
    FORGOTTEN,
    DIFFERENT,
)

SILENCE = 20.0  # seconds without a renewed lease (renewed every 10 s), or without a report (sent every 5 s)
LOCK_PATIENCE = 10.0  # seconds that a session may wait for a lock
_NOTHING_ABSENT = Absent()
_DISABLED = (HANDED_BACK, ADOPTED_IN_PART, DISABLED, GAVE_UP)  # the reason why a subscription is disabled


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that needs attention. `kind` is one of KINDS."""

    kind: str
    message: str
    remedy: Remedy | None = None

    @property
    def hint(self) -> str | None:
        """Return the text of `remedy`. None: there is none."""
        return hint_of(self.remedy)

    @property
    def command(self) -> str | None:
        """Return the next command. None: there is none."""
        return command_of(self.remedy)


def state_of(subscription: Subscription, look: StatusSnapshot, worker: WorkerStatus | None) -> str:
    """Return one of STATES. `worker` is the report of the apply worker; None if there is none.

    A worker that has failed connects and streams in each attempt, until it fails at the same position again. It waits
    to retry until it is past that position, so a loop of errors has one state.
    """
    if not subscription.enabled:
        return WorkerState.DISABLED
    if look.launcher_pid is None:
        return "no launcher"
    if _silence(look, worker) is not None:
        return "not responding"
    if worker is None or worker.state == WorkerState.STARTING:
        return WorkerState.CONNECTING
    if worker.state not in STATES:
        return "not responding"
    if worker.error is not None and worker.state in (WorkerState.CONNECTING, WorkerState.STREAMING):
        return WorkerState.WAITING_TO_RETRY
    return worker.state


def find(
    subscription: Subscription,
    look: StatusSnapshot,
    worker: WorkerStatus | None,
    publisher: PublisherAnswer,
    tables: Sequence[TableStatus],
    absent: Absent = _NOTHING_ABSENT,
    forgotten_after: float = DEFAULTS.forgotten_after,
) -> tuple[Problem, ...]:
    """Return all problems of one subscription, the most severe first.

    Args:
        worker: the report of the apply worker; None if there is none.
        tables: those that are not ready.
        absent: tables whose changes do not arrive, or would be an error.
        forgotten_after: seconds until something that keeps WAL counts as forgotten.
    """
    problems = [
        *_of_worker(subscription, look, worker, publisher, tables, absent),
        *_of_both_sides(subscription, look, publisher, absent),
    ]
    if not any(problem.kind in _DISABLED for problem in problems):
        messages = forgotten.find_problems(subscription, publisher, look.at, forgotten_after)
        problems += [Problem(FORGOTTEN, *said) for said in messages]
    return tuple(
        problem if problem.remedy is not None else replace(problem, remedy=next_step(subscription))
        for problem in problems
    )


def next_step(subscription: Subscription) -> Remedy:
    """Return the remedy of a problem that has none of its own."""
    return Remedy(
        "find the cause",
        f"subscriber check {shell_word(subscription.name)}",
        then=Remedy("read the log of the launcher."),
    )


def _of_both_sides(
    subscription: Subscription, look: StatusSnapshot, publisher: PublisherAnswer, absent: Absent
) -> Iterator[Problem]:
    """Yield the problems of enabled and disabled subscriptions."""
    name = shell_word(subscription.name)
    if publisher.error is not None and (subscription.enabled or subscription.slot_name is not None):
        check = Remedy("see which side refuses", f"subscriber check {name}")
        remedy = check if publisher.error_remedy is None else publisher.error_remedy.with_alternative(check)
        yield Problem(PUBLISHER, f"the publisher does not answer the status: {publisher.error}", remedy)
    if publisher.slot_exists is False and subscription.slot_name is not None and subscription.gave_up is None:
        yield Problem(
            SLOT,
            f'replication slot "{subscription.slot_name}" does not exist on the publisher',
            _new_slot(subscription),
        )
    yield from _slot_limits(subscription, publisher)
    for message, remedy in unpublished.find_problems(absent, subscription):
        yield Problem(PUBLICATION, message, remedy)
    if different := look.different.get(subscription.oid, ()):
        names = unpublished.names_of([table.source for table in different])
        tables = "".join(f" {shell_word('.'.join(table.source))}" for table in different)
        yield Problem(
            DIFFERENT,
            f"{formatting.count(len(different), 'table')} differed from the publisher in the last comparison: {names}"
            f" at {max(table.lsn for table in different)}",
            Remedy("repair the rows that differ", f"subscriber repair {name}{tables}"),
        )


def _of_worker(
    subscription: Subscription,
    look: StatusSnapshot,
    worker: WorkerStatus | None,
    publisher: PublisherAnswer,
    tables: Sequence[TableStatus],
    absent: Absent,
) -> Iterator[Problem]:
    state = state_of(subscription, look, worker)
    error, remedy = (worker.error, worker.error_remedy) if worker is not None else (None, None)
    name = shell_word(subscription.name)
    if state == WorkerState.DISABLED:
        if subscription.name in look.handed_back:
            again = Remedy("if it was killed, run it again", f"subscriber hand-back {name}")
            yield Problem(HANDED_BACK, "disabled by subscriber hand-back, which has not ended", again)
        elif subscription.name in look.adopted_in_part:
            again = Remedy("if it was killed, run it again", f"subscriber adopt {name}")
            yield Problem(ADOPTED_IN_PART, "pglogical's subscription is disabled by subscriber adopt", again)
        elif subscription.gave_up is not None:
            yield Problem(GAVE_UP, f"given up: {subscription.gave_up}", _new_slot(subscription))
        elif error is not None and worker is not None and worker.state == WorkerState.DISABLED:
            yield Problem(DISABLED, f"disabled because of an error: {error}", remedy)
        return
    if state == "no launcher":
        yield Problem(NO_LAUNCHER, "no launcher is running", Remedy("start one", "subscriber run"))
    elif (silence := _silence(look, worker)) is not None:
        yield Problem(
            NOT_RESPONDING,
            silence,
            Remedy(
                "the launcher's process is frozen, or the target does not take its writes. A second launcher takes over"
                " from a frozen one",
                "subscriber run",
            ),
        )
    elif worker is None:
        yield Problem(NOT_RESPONDING, "no worker has reported yet")
    elif worker.state not in (*STATES, WorkerState.STARTING):
        upgrade = Remedy("the launcher may have another version. Restart it", "subscriber run")
        yield Problem(NOT_RESPONDING, f'the worker reports the unknown state "{worker.state}"', upgrade)
    for wait in look.lock_waits.get(subscription.oid, ()):
        yield Problem(
            LOCKED,
            f"no answer from the target for {wait.seconds:.0f} s, waiting for a lock held by {', '.join(wait.holders)}",
            Remedy(f"process {wait.pid} of the target waits. End the transaction that holds the lock."),
        )
    if state == WorkerState.STOPPED:
        yield Problem(STOPPED, error or "the worker has stopped", remedy)
    elif error is not None or state == WorkerState.WAITING_TO_RETRY:
        yield Problem(FAILING, error or "the worker waits for its next attempt", remedy)
    for table_lost in absent.lost:
        replaced = table_lost.error()
        yield Problem(TABLE, replaced.message, replaced.remedy)
    for table in tables:
        if table.error:
            yield Problem(TABLE, f"table {table.name}: {table.error}", table.error_remedy)
    check = Remedy("find the statement that corrects it", f"subscriber check {name}")
    for sequence in look.sequences.get(subscription.oid, ()):
        if sequence.problem is not None:
            yield Problem(SEQUENCE, sequence.problem, check)
    parked = look.quarantine.get(subscription.oid)
    if parked is not None:
        others = parked.number - parked.failed
        waiting = f"; {others} more depend on these" if others else ""
        yield Problem(
            QUARANTINE,
            f"{parked.failed} transaction{'s' * (parked.failed != 1)} in quarantine could not be applied{waiting}",
            Remedy(
                "see the errors",
                f"subscriber quarantine list {name}",
                then=Remedy("repair their cause, and retry", f"subscriber quarantine retry {name}"),
            ),
        )


def _new_slot(subscription: Subscription) -> Remedy:
    reseed = f"subscriber reseed {shell_word(subscription.name)}"
    return Remedy("make a new slot, and repair only the rows that differ", reseed)


def _slot_limits(subscription: Subscription, publisher: PublisherAnswer) -> Iterator[Problem]:
    """Yield the problems of a slot that is lost, or about to be."""
    limits, kept = publisher.limits, publisher.retained_bytes or 0
    if_lost = Remedy("if the slot is lost", f"subscriber reseed {shell_word(subscription.name)}")
    if publisher.wal_status == "lost":
        if not subscription.enabled and subscription.gave_up is None:
            reason = limits.invalidation_reason or "wal_removed"
            yield Problem(
                SLOT,
                f'replication slot "{subscription.slot_name}" has been invalidated on the publisher: {reason}',
                _new_slot(subscription),
            )
        return
    if publisher.wal_status == "unreserved" or limits.is_tight:
        most = limits.max_bytes or 0
        yield Problem(
            WAL,
            f"the publisher keeps {formatting.in_bytes(kept)} of WAL for the slot, and is about to remove it: "
            f"max_slot_wal_keep_size is {formatting.in_bytes(most)}",
            Remedy("raise max_slot_wal_keep_size, or remove the cause of the lag", alternative=if_lost),
        )
    budget, kept = subscription.wal_budget_bytes, max(kept, limits.sync_bytes or 0)
    if budget is not None and subscription.gave_up is None and kept > budget * (1 - ALARM_SHARE):
        alter = f"ALTER SUBSCRIPTION {sql_identifier(subscription.name)} SET (wal_budget = '{_doubled(budget)}');"
        yield Problem(
            WAL,
            f"the publisher keeps {formatting.in_bytes(kept)} of WAL for the subscription: over wal_budget, which is "
            f"{formatting.in_bytes(budget)}, the launcher drops the slot",
            Remedy("remove the cause of the lag", alternative=Remedy("raise the budget", alter)),
        )
    left = limits.seconds_until_idle(publisher.now)
    if left is not None and limits.idle_timeout is not None and left < limits.idle_timeout / 2:
        connect = "remove the cause" if subscription.enabled else "enable the subscription"
        yield Problem(
            WAL,
            f"the slot has no connection, and idle_replication_slot_timeout of the publisher invalidates it in "
            f"{formatting.in_seconds(round(left))}",
            Remedy(f"{connect}, or raise idle_replication_slot_timeout", alternative=if_lost),
        )


def _doubled(budget: int) -> str:
    """Return twice a size, in a unit that divides it."""
    unit, size = next((unit, size) for unit, size in reversed(UNITS.items()) if not 2 * budget % size)
    return f"{2 * budget // size}{unit}"


def _silence(look: StatusSnapshot, worker: WorkerStatus | None) -> str | None:
    """Return the problem of a report that is too old; None if none is."""
    if look.launcher_age is not None and look.launcher_age > SILENCE:
        return f"the launcher has not renewed its lease for {formatting.in_seconds(round(look.launcher_age))}"
    if worker is not None and worker.updated_at is not None:
        age = (look.at - worker.updated_at).total_seconds()
        if age > SILENCE:
            return f"the worker has not reported for {formatting.in_seconds(round(age))}"
    return None
