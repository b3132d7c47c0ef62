"""The status of a subscription as lines for people, and as a JSON value. No I/O here."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from subscriber import formatting
from subscriber.apply.conflicts.types import ConflictType
from subscriber.catalog.store.audit import ComparedTables
from subscriber.catalog.store.workers import WorkerState
from subscriber.display import shell_word
from subscriber.formatting import count
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy, json_of
from subscriber.status import extra_rows, slot_statistics, slot_wal, table_states, unpublished
from subscriber.status import problems as status_problems
from subscriber.status import sequences as status_sequences
from subscriber.status import transactions as status_transactions
from subscriber.status.model import SubscriptionStatus

HINT = "hint"  # the label of a next step, which may have several lines

_MISSING_ROWS = (ConflictType.UPDATE_MISSING, ConflictType.DELETE_MISSING)

# These problems have other lines: the last error, and those of tables.
_OF_ERROR = (status_problems.FAILING, status_problems.STOPPED, status_problems.DISABLED)


def state_in_words(status: SubscriptionStatus) -> str:
    """Return the state as text: `waiting to retry in 3 s`, `stopped: needs you` and so on."""
    match status.state:
        case WorkerState.WAITING_TO_RETRY if status.retry_in is not None:
            return (
                f"waiting to retry in {formatting.in_seconds(status.retry_in)}" if status.retry_in else "retrying now"
            )
        case WorkerState.STOPPED:
            return "stopped: needs you"
        case "no launcher":
            return "no launcher running"
        case state:
            return state


def describe(status: SubscriptionStatus, now: datetime) -> list[tuple[str, str]]:
    """Return (label, text) of the lines below a subscription's name. Tables that are not ready have separate lines."""
    lines = _problems(status)
    if status.error:
        since = ""
        if status.error_time is not None:
            ago = max(0.0, (now - status.error_time).total_seconds())
            since = f" ({status.error_time:%Y-%m-%d %H:%M:%S} UTC, {formatting.in_seconds(ago)} ago)"
        lines.append(("last error", status.error + since))
        if status.error_hint:
            lines.append((HINT, status.error_hint))
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
    lines += _conflicts(status)
    counts = ", ".join(f"{number} {state}" for state, number in status.tables.items())
    lines.append(("tables", counts or "none"))
    lines += status_sequences.describe(status.sequences)
    lines += unpublished.describe(status.absent, status.name)
    lines += extra_rows.describe(status.extra_rows, status.name)
    lines += _describe_comparison(status.comparison, now)
    return lines


def _problems(status: SubscriptionStatus) -> list[tuple[str, str]]:
    """Return the lines of problems, except those that the last error and the tables have."""
    have_lines = (status_problems.TABLE, *(_OF_ERROR if status.error else ()))
    lines = []
    for problem in status.problems:
        if problem.kind in have_lines:
            continue
        if problem.kind != status_problems.NO_LAUNCHER:  # the state says it
            lines.append(("problem", problem.message))
        if problem.hint:
            lines.append((HINT, problem.hint))
    return lines


def _conflicts(status: SubscriptionStatus) -> list[tuple[str, str]]:
    """Return the line of the conflicts, as counted by pg_stat_subscription_stats."""
    counted = [f"{number:,} {kind}" for kind, number in status.conflicts.items() if number]
    if not counted:
        return []
    lines = [("conflicts", ", ".join(counted))]
    if any(status.conflicts.get(kind.value) for kind in _MISSING_ROWS):
        see = Remedy(
            "rows were missing on the target. See which tables differ", f"subscriber verify {shell_word(status.name)}"
        )
        lines.append((HINT, str(see)))
    return lines


def _lag(status: SubscriptionStatus) -> list[tuple[str, str]]:
    if status.lag_bytes is None:
        return []
    seconds = "" if status.lag_seconds is None else f", {formatting.in_seconds(status.lag_seconds)}"
    if status.state != WorkerState.STREAMING and not status.lag_bytes and status.lag_seconds is None:
        return []  # nothing is known about changes that the publisher has not sent
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
        **extra_rows.as_json(status.extra_rows),
        **_comparison_fields(status.comparison),
    }


def _lsn(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(lsn)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")


def _describe_comparison(last: ComparedTables | None, now: datetime) -> list[tuple[str, str]]:
    """Return (label, text) of the line about the comparison; none if there was none."""
    if last is None:
        return []
    day = "" if last.ended.date() == now.date() else f"{last.ended:%Y-%m-%d} "
    tables = count(last.tables, "table")
    result = f"{last.different} of {tables} DIFFERENT" if last.different else f"{tables} without a difference"
    partly = "" if last.complete else ", not all rows were read"
    return [("compared", f"{day}{last.ended:%H:%M:%S} UTC at {last.lsn}: {result}{partly}")]


def _comparison_fields(last: ComparedTables | None) -> dict[str, Any]:
    """Return the key of the status about the comparison."""
    if last is None:
        return {"comparison": None}
    figures = {"lsn": last.lsn, "tables": last.tables, "different": last.different, "complete": last.complete}
    return {"comparison": {"ended": last.ended.isoformat(timespec="milliseconds"), **figures}}
