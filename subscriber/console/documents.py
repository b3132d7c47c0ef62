"""The JSON documents of the console: an overview of all subscriptions, and one subscription.

Sizes are in bytes, durations in seconds, times in ISO 8601, positions are text. None is an unknown value. The page
formats values and decides nothing about their meaning. No I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

from subscriber.apply.table_states import TableState
from subscriber.catalog.store.audit import AuditRecord
from subscriber.catalog.store.conflict_history import ConflictRecord
from subscriber.catalog.store.history import HistoryPoint
from subscriber.catalog.store.migrations import StepRecord
from subscriber.catalog.store.quarantine import QuarantinedTransaction
from subscriber.catalog.store.repairs import RepairedTable
from subscriber.catalog.store.verifications import LastVerification
from subscriber.console.action import TaskState
from subscriber.console.facts import SubscriptionFacts
from subscriber.console.observer import Seen
from subscriber.display import sql_identifier
from subscriber.lsn import Lsn
from subscriber.remedy import Part, Remedy
from subscriber.status import transactions as status_transactions
from subscriber.status.model import SubscriptionStatus
from subscriber.status.problems import Problem
from subscriber.status.report import state_in_words
from subscriber.status.snapshot import StatusSnapshot
from subscriber.subscription import Subscription

SPARK_POINTS = 60  # of the small graph in the overview
SHOWN_NAMES = 100  # published tables that are not subscribed


class ProblemDocument(TypedDict):
    """A problem and its next step."""

    kind: str
    message: str
    hint: list[Part]


def _problem(problem: Problem) -> ProblemDocument:
    return {"kind": problem.kind, "message": problem.message, "hint": hint_parts(problem.remedy)}


def hint_parts(remedy: Remedy | None) -> list[Part]:
    """Return the text of a remedy in parts. A page marks the commands."""
    return [] if remedy is None else list(remedy.parts())


class Summary(TypedDict):
    """One subscription in the overview."""

    name: str
    state: str  # in words
    tone: str  # good, busy, wrong, off
    problems: list[ProblemDocument]
    tables: int
    uncopied: int
    copied_share: float | None
    copy_seconds_left: float | None
    lag_bytes: int | None
    lag_seconds: float | None
    transactions_per_second: float | None
    changes_per_second: float | None
    bytes_per_second: float | None
    retained_bytes: int | None
    max_slot_wal_keep_size: int | None
    wal_budget: int | None
    seconds_until_given_up: float | None
    retained_growth: float | None
    seconds_until_full: float | None
    seconds_until_idle: float | None
    not_subscribed: int
    quarantined: int
    spark: list[float | None]  # transactions per second, the oldest first


class Overview(TypedDict):
    """All subscriptions of a target."""

    key: str  # names the target in addresses
    target: str
    at: str | None
    error: str | None  # the reason why the target does not answer
    is_read: bool  # False before the first answer
    launcher: str  # active, standby, none
    subscriptions: list[Summary]


class Points(TypedDict):
    """The history as columns of the same length. A stream sends each point once."""

    at: list[float]  # seconds since 1970
    transactions: list[float | None]
    changes: list[float | None]
    bytes: list[float | None]
    lag_bytes: list[int | None]
    lag_seconds: list[float | None]
    retained_bytes: list[int | None]


class Detail(TypedDict):
    """One subscription."""

    key: str
    target: str
    at: str | None
    launcher: str
    summary: Summary
    points: Points
    publications: list[str]
    publisher_error: str | None
    slot: str | None
    slot_active: bool | None
    wal_status: str | None
    received_lsn: str | None
    confirmed_lsn: str | None
    publisher_lsn: str | None
    lag_stages: dict[str, int]
    error: str | None
    error_hint: list[Part]
    error_time: str | None
    skip_lsn: str | None
    format: str | None
    format_reason: str | None
    limits: list[str]
    totals: dict[str, int]
    one_by_one: dict[str, int]
    conflict_counts: dict[str, int]
    table_counts: dict[str, int]
    not_subscribed: list[str]
    open_transactions: dict[str, Any]
    conflicts: list[dict[str, Any]]
    quarantined: list[dict[str, Any]]
    sequences: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    repaired: list[dict[str, Any]]
    verification: dict[str, Any] | None
    actions: list[dict[str, Any]]
    task: dict[str, Any] | None
    enabled: bool
    may_act: bool  # a person with a token can act


def overview(
    key: str, target: str, seen: Seen, launcher: str, histories: Mapping[str, Sequence[HistoryPoint]]
) -> Overview:
    """Return the document of all subscriptions.

    Args:
        key: the name of the target in addresses.
        target: the name of the target for people.
        seen: a snapshot.
        launcher: the role of this process: active, standby or none.
        histories: the points of each subscription, by its name.
    """
    return {
        "key": key,
        "target": target,
        "at": None if seen.look is None else _time(seen.look.at),
        "error": seen.error,
        "is_read": seen.number > 0,
        "launcher": launcher,
        "subscriptions": [_summary(status, histories.get(status.name, ())) for status in seen.statuses],
    }


def detail(
    target: Overview,
    look: StatusSnapshot,
    status: SubscriptionStatus,
    facts: SubscriptionFacts,
    points: Sequence[HistoryPoint],
    *,
    since: float = 0,
    task: TaskState | None = None,
    may_act: bool = False,
) -> Detail:
    """Return the document of one subscription.

    Args:
        target: the document of its target.
        look: the snapshot of `status`.
        status: the subscription.
        facts: rows about it.
        points: its history.
        since: only newer points are in the document, in seconds since 1970.
        task: the comparison or repair that runs on the target, or the last one.
        may_act: a person with a token can act.
    """
    subscription = next(stored for stored in look.subscriptions if stored.name == status.name)
    publisher = status.publisher
    return {
        "key": target["key"],
        "target": target["target"],
        "at": target["at"],
        "launcher": target["launcher"],
        "summary": _summary(status, points),
        "points": _points([point for point in points if point.at.timestamp() > since]),
        "publications": list(status.publications),
        "publisher_error": publisher.error,
        "slot": status.slot,
        "slot_active": publisher.slot_active,
        "wal_status": publisher.wal_status,
        "received_lsn": _lsn(status.received),
        "confirmed_lsn": _lsn(status.confirmed),
        "publisher_lsn": _lsn(publisher.position),
        "lag_stages": dict(status.stages),
        "error": status.error,
        "error_hint": hint_parts(status.error_remedy),
        "error_time": _time(status.error_time),
        "skip_lsn": _lsn(status.skip_lsn),
        "format": status.format,
        "format_reason": status.format_reason,
        "limits": list(status.limits),
        "totals": {
            "transactions": status.transactions,
            "changes": status.changes,
            "bytes": status.bytes,
            "apply_errors": status.apply_errors,
            "sync_errors": status.sync_errors,
        },
        "one_by_one": dict(status.one_by_one),
        "conflict_counts": {kind: number for kind, number in status.conflicts.items() if number},
        "table_counts": dict(status.tables),
        "not_subscribed": list(status.absent.not_subscribed[:SHOWN_NAMES]),
        "open_transactions": status_transactions.as_json(status.unfinished, look.at),
        "conflicts": [_conflict(conflict) for conflict in facts.conflicts],
        "quarantined": [_quarantined(transaction) for transaction in facts.quarantined],
        "sequences": _sequences(look, subscription),
        "steps": [_step(step) for step in facts.steps],
        "repaired": [_repaired(table) for table in facts.repaired],
        "verification": _verification(facts.verification),
        "actions": [_action(record) for record in facts.actions],
        "task": None if task is None else _task(task),
        "enabled": status.enabled,
        "may_act": may_act,
    }


def _summary(status: SubscriptionStatus, points: Sequence[HistoryPoint]) -> Summary:
    limits, rates = status.publisher.limits, status.rates
    return {
        "name": status.name,
        "state": state_in_words(status),
        "tone": _tone(status),
        "problems": [_problem(problem) for problem in status.problems],
        "tables": sum(status.tables.values()),
        "uncopied": status.uncopied,
        "copied_share": status.copied_share,
        "copy_seconds_left": status.copy_seconds_left,
        "lag_bytes": status.lag_bytes,
        "lag_seconds": status.lag_seconds,
        "transactions_per_second": None if rates is None else rates.transactions,
        "changes_per_second": None if rates is None else rates.changes,
        "bytes_per_second": None if rates is None else rates.bytes,
        "retained_bytes": status.publisher.retained_bytes,
        "max_slot_wal_keep_size": limits.max_bytes,
        "wal_budget": status.wal_budget,
        "seconds_until_given_up": status.seconds_until_given_up,
        "retained_growth": status.retained_growth,
        "seconds_until_full": limits.seconds_until_full(status.retained_growth),
        "seconds_until_idle": limits.seconds_until_idle(status.publisher.now),
        "not_subscribed": len(status.absent.not_subscribed),
        "quarantined": status.quarantine.number,
        "spark": [point.transactions for point in points[-SPARK_POINTS:]],
    }


def _tone(status: SubscriptionStatus) -> str:
    if status.is_wrong:
        return "wrong"
    if not status.enabled:
        return "off"
    return "good" if status.state == "streaming" and not status.uncopied else "busy"


def _points(points: Sequence[HistoryPoint]) -> Points:
    return {
        "at": [round(point.at.timestamp(), 1) for point in points],
        "transactions": [_rounded(point.transactions) for point in points],
        "changes": [_rounded(point.changes) for point in points],
        "bytes": [_rounded(point.bytes) for point in points],
        "lag_bytes": [point.lag_bytes for point in points],
        "lag_seconds": [_rounded(point.lag_seconds) for point in points],
        "retained_bytes": [point.retained_bytes for point in points],
    }


def _conflict(conflict: ConflictRecord) -> dict[str, Any]:
    skip = f"ALTER SUBSCRIPTION {sql_identifier(conflict.subscription)} SKIP (lsn = '{conflict.finish_lsn}');"
    return {
        "id": conflict.id,
        "table": conflict.relation,
        "type": conflict.conflict_type,
        "index": conflict.index_name,
        # Whoever reaches the port can read the document, so it has no values of rows.
        "key_columns": None if conflict.key is None else list(conflict.key),
        "finish_lsn": str(conflict.finish_lsn),
        "remote_xid": conflict.remote_xid,
        "detected": _time(conflict.detected),
        "last_detected": _time(conflict.last_detected),
        "occurrences": conflict.occurrences,
        "policy": conflict.policy,
        "resolution": conflict.resolution,
        "statement": skip if conflict.resolution == "error" else None,
    }


def _quarantined(transaction: QuarantinedTransaction) -> dict[str, Any]:
    return {
        "finish_lsn": str(transaction.finish_lsn),
        "xid": transaction.xid,
        "parked": _time(transaction.parked),
        "relations": list(transaction.relations),
        "changes": transaction.changes,
        "depends_on": sorted(map(str, transaction.depends_on)),
        "error": transaction.error,
        "attempts": transaction.attempts,
    }


def _sequences(look: StatusSnapshot, subscription: Subscription) -> list[dict[str, Any]]:
    return [
        {
            "sequence": f"{sequence.schema}.{sequence.name}",
            "state": "ready" if sequence.state == TableState.READY else "waiting",
            "lsn": _lsn(sequence.lsn),
            "problem": sequence.problem,
        }
        for sequence in look.sequences.get(subscription.oid, ())[:SHOWN_NAMES]
    ]


def _step(step: StepRecord) -> dict[str, Any]:
    return {
        "command": step.command,
        "step": step.step,
        "began": _time(step.began),
        "ended": _time(step.ended),
        "error": step.error,
    }


def _repaired(table: RepairedTable) -> dict[str, Any]:
    return {
        "repaired_at": _time(table.repaired_at),
        "role": table.role,
        "command": table.command,
        "table": table.relation,
        "rows": table.rows,
    }


def _verification(last: LastVerification | None) -> dict[str, Any] | None:
    if last is None:
        return None
    return {"began": _time(last.began), "ended": last.has_ended, "same": last.same}


def _action(record: AuditRecord) -> dict[str, Any]:
    # The address of the client is in the table alone.
    return {
        "id": record.id,
        "began": _time(record.began),
        "ended": _time(record.ended),
        "who": record.who,
        "action": record.action,
        "arguments": dict(record.arguments),
        "result": record.result,
        "summary": record.summary,
    }


def _task(task: TaskState) -> dict[str, Any]:
    return {
        "action": task.action.name,
        "subscription": task.action.subscription,
        "who": task.who,
        "began": _time(task.began),
        "phase": task.progress.phase,
        "done": task.progress.done,
        "total": task.progress.total,
        "unit": task.progress.unit,
        "result": task.result,
        "hint": hint_parts(task.remedy),
        "summary": task.summary,
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 1)


def _lsn(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")
