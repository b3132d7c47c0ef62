"""The metrics of a subscription, computed from its status: name, meaning and value of each.

Names follow Prometheus's conventions (base units, `_total` for counters). Labels are subscription names and fixed
words, never values from rows or connection strings. A metric without a known value is left out rather than set to 0, so
that no rate is computed from it. A worker's counters restart from 0 with the worker, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from subscriber.status.model import SYNC_FAILED, TABLE_STATES, SubscriptionStatus
from subscriber.status.problems import KINDS, STATES

# Metrics of this process and its target: name -> help text.
TARGET_UP = ("subscriber_target_up", "whether the target answers; if not, there are no other metrics")
GENERAL = {
    TARGET_UP[0]: TARGET_UP[1],
    "subscriber_launcher_up": "whether a launcher is active on the target",
    "subscriber_launcher_standby": "whether this process waits for another launcher to end",
}


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric of each subscription. With `label` there is one metric for each value that `of` returns."""

    name: str
    says: str
    of: Callable[[SubscriptionStatus, datetime], float | Mapping[str, float] | None]  # at that time; None: not known
    label: str = ""

    @property
    def is_counter(self) -> bool:
        """True if the value only grows, until the worker restarts."""
        return self.name.endswith("_total")

    def samples(self, status: SubscriptionStatus, now: datetime) -> dict[str, float]:
        """Return the known values by the value of the label. Without a label, the key is an empty string."""
        answer = self.of(status, now)
        if isinstance(answer, Mapping):
            return {value: float(number) for value, number in answer.items()}
        return {} if answer is None else {"": float(answer)}


def _states(status: SubscriptionStatus, _now: datetime) -> Mapping[str, float]:
    return {state: state == status.state for state in STATES}


def _problems(status: SubscriptionStatus, _now: datetime) -> Mapping[str, float]:
    kinds = [problem.kind for problem in status.problems]
    return {kind: kinds.count(kind) for kind in KINDS}


def _tables(status: SubscriptionStatus, _now: datetime) -> Mapping[str, float]:
    return {state: status.tables.get(state, 0) for state in dict.fromkeys([*TABLE_STATES.values(), SYNC_FAILED])}


def _oldest_prepared(status: SubscriptionStatus, now: datetime) -> float:
    ages = [(now - prepared.since).total_seconds() for prepared in status.unfinished.prepared if prepared.since]
    return max(0.0, *ages) if ages else 0.0


def _runs(status: SubscriptionStatus) -> bool:
    """Return True if there is a worker with valid counters."""
    return status.state not in ("no launcher", "disabled")


METRICS: Sequence[MetricSpec] = (
    MetricSpec("subscriber_subscription_ok", "0: `subscriber status` would exit 1", lambda s, _: not s.is_wrong),
    MetricSpec("subscriber_subscription_problem", "problems of each kind", _problems, "kind"),
    MetricSpec("subscriber_subscription_enabled", "whether the subscription is enabled", lambda s, _: s.enabled),
    MetricSpec("subscriber_subscription_state", "1 for the current state", _states, "state"),
    MetricSpec("subscriber_publisher_up", "whether the publisher answers", lambda s, _: s.publisher.error is None),
    MetricSpec(
        "subscriber_lag_bytes",
        "bytes of the publisher's WAL that are not yet durable on the target",
        lambda s, _: s.lag_bytes,
    ),
    MetricSpec(
        "subscriber_lag_seconds", "age of the last confirmed change on the publisher", lambda s, _: s.lag_seconds
    ),
    MetricSpec("subscriber_lag_stage_bytes", "the lag in each stage of replication", lambda s, _: s.stages, "stage"),
    MetricSpec("subscriber_received_lsn_bytes", "position received up to", lambda s, _: s.received),
    MetricSpec("subscriber_confirmed_lsn_bytes", "position confirmed up to", lambda s, _: s.confirmed),
    MetricSpec("subscriber_publisher_lsn_bytes", "end of the publisher's WAL", lambda s, _: s.publisher.position),
    MetricSpec("subscriber_slot_retained_bytes", "WAL kept for the slot", lambda s, _: s.publisher.retained_bytes),
    MetricSpec(
        "subscriber_slot_max_bytes",
        "the publisher's max_slot_wal_keep_size; none without a limit",
        lambda s, _: s.publisher.limits.max_bytes,
    ),
    MetricSpec(
        "subscriber_slot_safe_bytes",
        "WAL that the publisher can write before it removes WAL that the slot needs",
        lambda s, _: s.publisher.limits.safe_bytes,
    ),
    MetricSpec(
        "subscriber_slot_seconds_until_full",
        "time until that, at the present growth; none if the kept WAL does not grow",
        lambda s, _: s.publisher.limits.seconds_until_full(s.retained_growth),
    ),
    MetricSpec("subscriber_wal_kept_bytes", "WAL kept for any slot of the subscription", lambda s, _: s.kept_bytes),
    MetricSpec("subscriber_wal_budget_bytes", "wal_budget; none without a budget", lambda s, _: s.wal_budget),
    MetricSpec(
        "subscriber_wal_budget_seconds_left",
        "time until wal_budget is exceeded, at the present growth; none if the kept WAL does not grow",
        lambda s, _: s.seconds_until_given_up,
    ),
    MetricSpec(
        "subscriber_slot_seconds_until_idle",
        "time until idle_replication_slot_timeout, since 18; none while the slot has a connection",
        lambda s, _: s.publisher.limits.seconds_until_idle(s.publisher.now),
    ),
    MetricSpec(
        "subscriber_slot_spilled_transactions_total",
        "transactions that the publisher wrote to its disk while it decoded them, since 14",
        lambda s, _: s.publisher.statistics.spilled_transactions,
    ),
    MetricSpec(
        "subscriber_slot_spilled_bytes_total",
        "bytes that the publisher wrote to its disk for them, since 14",
        lambda s, _: s.publisher.statistics.spilled_bytes,
    ),
    MetricSpec(
        "subscriber_slot_memory_exceeded_total",
        "how often the publisher exceeded logical_decoding_work_mem, since 19",
        lambda s, _: s.publisher.statistics.memory_exceeded,
    ),
    MetricSpec(
        "subscriber_slot_sync_skips_total",
        "how often a standby did not synchronize the slot, since 19; only if the publisher is a standby",
        lambda s, _: s.publisher.statistics.sync_skips,
    ),
    MetricSpec(
        "subscriber_transactions_total",
        "transactions applied since the worker started",
        lambda s, _: s.transactions if _runs(s) else None,
    ),
    MetricSpec(
        "subscriber_changes_total",
        "changes applied since the worker started",
        lambda s, _: s.changes if _runs(s) else None,
    ),
    MetricSpec(
        "subscriber_received_bytes_total",
        "bytes of the stream since the worker started",
        lambda s, _: s.bytes if _runs(s) else None,
    ),
    MetricSpec(
        "subscriber_one_by_one_changes_total",
        "changes applied row by row since the worker started, by reason",
        lambda s, _: s.one_by_one,
        "reason",
    ),
    MetricSpec("subscriber_apply_errors_total", "errors of the apply worker", lambda s, _: s.apply_errors),
    MetricSpec(
        "subscriber_quarantined_transactions",
        "transactions in quarantine: they failed, or depend on such a one",
        lambda s, _: s.quarantine.number,
    ),
    MetricSpec("subscriber_sync_errors_total", "errors of table synchronization", lambda s, _: s.sync_errors),
    MetricSpec(
        "subscriber_conflicts_total", "conflicts by type, with PostgreSQL's names", lambda s, _: s.conflicts, "type"
    ),
    MetricSpec("subscriber_tables", "tables in each state", _tables, "state"),
    MetricSpec("subscriber_tables_uncopied", "tables whose initial copy has not ended", lambda s, _: s.uncopied),
    MetricSpec(
        "subscriber_tables_not_subscribed",
        "published tables that the subscription does not have; REFRESH PUBLICATION adds them",
        lambda s, _: len(s.absent.not_subscribed),
    ),
    MetricSpec(
        "subscriber_tables_unpublished",
        "tables of the subscription that are not published, or were not for a time",
        lambda s, _: len(s.absent.unpublished),
    ),
    MetricSpec("subscriber_parallel_workers", "parallel apply workers", lambda s, _: len(s.unfinished.parallel_pids)),
    MetricSpec(
        "subscriber_lock_waiting",
        "1: waits for another session's lock, or for 10 s or more for the target",
        lambda s, _: s.unfinished.waiting_for is not None,
    ),
    MetricSpec(
        "subscriber_streamed_transactions",
        "large transactions that are still running on the publisher",
        lambda s, _: len(s.unfinished.streamed),
    ),
    MetricSpec(
        "subscriber_streamed_bytes",
        "bytes that these transactions have sent so far",
        lambda s, _: sum(transaction.bytes for transaction in s.unfinished.streamed),
    ),
    MetricSpec(
        "subscriber_prepared_transactions",
        "prepared transactions on the target, which hold locks",
        lambda s, _: len(s.unfinished.prepared),
    ),
    MetricSpec(
        "subscriber_prepared_oldest_seconds", "age of the oldest transaction prepared on the target", _oldest_prepared
    ),
)
