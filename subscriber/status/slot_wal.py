"""The WAL that the publisher keeps for a subscription's slot, and the limits of the slot. No I/O here.

max_slot_wal_keep_size limits the size. idle_replication_slot_timeout of a publisher since 18 limits the time without a
connection. The publisher enforces both at its checkpoints. A slot that it has lost cannot be used again: `subscriber
reseed` creates another one, and repairs the rows that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from subscriber import formatting
from subscriber.publisher.answers import parsing, seconds, signed
from subscriber.quoting import literal

ALARM_SHARE = 0.2  # of the limit: less is a problem

# A row as JSON has the columns of later versions where there are any.
_LIMITS = """
SELECT pg_catalog.pg_size_bytes(pg_catalog.current_setting('max_slot_wal_keep_size')), s.safe_wal_size,
       extract(epoch FROM pg_catalog.current_setting('idle_replication_slot_timeout', true)::interval)::float8,
       extract(epoch FROM (pg_catalog.to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8,
       pg_catalog.to_jsonb(s) ->> 'invalidation_reason',
       (SELECT max(pg_catalog.pg_wal_lsn_diff(
                   CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                        ELSE pg_catalog.pg_current_wal_lsn() END, o.restart_lsn))::bigint
          FROM pg_catalog.pg_replication_slots o WHERE pg_catalog.starts_with(o.slot_name, {prefix}))
  FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = {slot}
"""


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """The publisher's limits for one slot. A field is None if there is no limit, or if it is not known."""

    max_bytes: int | None = None  # max_slot_wal_keep_size
    safe_bytes: int | None = None  # WAL that can be written before the slot is in danger; below 0: it is
    idle_timeout: float | None = None  # seconds, idle_replication_slot_timeout
    inactive_since: datetime | None = None  # since 17; None: a connection uses the slot
    invalidation_reason: str | None = None  # since 17; None: the slot is valid
    sync_bytes: int | None = None  # WAL kept for slots of table synchronization; None: there are none

    @property
    def is_tight(self) -> bool:
        """Return True if less than ALARM_SHARE of the size is left."""
        return bool(self.max_bytes and self.safe_bytes is not None and self.safe_bytes < self.max_bytes * ALARM_SHARE)

    def seconds_until_idle(self, now: datetime | None) -> float | None:
        """Return the time after which the slot has been without a connection for too long; None: there is no limit."""
        if not self.idle_timeout or self.inactive_since is None or now is None:
            return None
        return max(0.0, self.idle_timeout - (now - self.inactive_since).total_seconds())

    def seconds_until_full(self, growth: float | None) -> float | None:
        """Return the time after which the size is exceeded.

        Args:
            growth: of the kept WAL, in bytes per second. None: not known.

        Returns:
            Seconds. None: there is no limit, or the kept WAL does not grow.
        """
        if self.safe_bytes is None or growth is None or growth <= 0:
            return None
        return max(0, self.safe_bytes) / growth


def query(slot: str, sync_prefix: str) -> str:
    """Return the query for the limits of a slot. `sync_prefix` begins the names of slots of table synchronization."""
    return _LIMITS.format(slot=literal(slot), prefix=literal(sync_prefix))


def parse(rows: Sequence[tuple[str | None, ...]]) -> SlotLimits:
    """Parse the answer to query(). No row: there is no such slot. Raises ProtocolError if it is malformed."""
    if not rows:
        return SlotLimits()
    with parsing("the limits of its slot"):
        ((most, safe, idle, inactive, reason, kept),) = rows
        return SlotLimits(
            max_bytes=None if most is None or signed(most) < 0 else signed(most),
            safe_bytes=None if safe is None else signed(safe),
            idle_timeout=(seconds(idle) or None) if idle else None,
            inactive_since=None if inactive is None else datetime.fromtimestamp(seconds(inactive), UTC),
            invalidation_reason=reason,
            sync_bytes=None if kept is None else signed(kept),
        )


def describe(limits: SlotLimits, growth: float | None, now: datetime | None) -> list[str]:
    """Return notes about the limits, for the line of the slot."""
    notes = []
    if limits.max_bytes is not None:
        notes.append(f"at most {formatting.in_bytes(limits.max_bytes)}")
    if growth:
        direction = "growing" if growth > 0 else "shrinking"
        notes.append(f"{direction} by {formatting.in_bytes(abs(growth))}/s")
    if (left := limits.seconds_until_full(growth)) is not None:
        notes.append(f"lost in about {formatting.in_seconds(round(left))}" if left >= 1 else "about to be lost")
    if (left := limits.seconds_until_idle(now)) is not None:
        notes.append(f"without a connection, lost in {formatting.in_seconds(round(left))}")
    if limits.invalidation_reason is not None:
        notes.append(f"invalidated: {limits.invalidation_reason}")
    return notes


def as_json(limits: SlotLimits, growth: float | None, now: datetime | None) -> dict[str, Any]:
    """Return the limits as JSON keys: sizes in bytes, times in seconds."""
    until_full, until_idle = limits.seconds_until_full(growth), limits.seconds_until_idle(now)
    return {
        "max_slot_wal_keep_size": limits.max_bytes,
        "safe_wal_size": limits.safe_bytes,
        "retained_growth": None if growth is None else round(growth, 1),
        "seconds_until_full": None if until_full is None else round(until_full),
        "idle_replication_slot_timeout": limits.idle_timeout,
        "seconds_until_idle": None if until_idle is None else round(until_idle),
        "invalidation_reason": limits.invalidation_reason,
    }
