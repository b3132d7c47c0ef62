"""What the publisher counts about a subscription's slot: a reason for lag that positions do not show. No I/O here.

A transaction larger than the publisher's logical_decoding_work_mem is written to its disk, unless it is streamed. A
publisher since 19 counts how often the limit was exceeded. A standby since 19 says why it did not synchronize the slot.
All users may read both views. The counters begin with the slot, or with pg_stat_reset_replication_slot().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from subscriber import formatting
from subscriber import server_features as features
from subscriber.publisher.answers import count, parsing, seconds
from subscriber.quoting import literal

# The columns of slot synchronization have no meaning on a primary, which may be a standby that was promoted.
_EXPLAINED = """
       t.mem_exceeded_count,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN s.slotsync_skip_reason END,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN t.slotsync_skip_count END,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN extract(epoch FROM t.slotsync_last_skip)::float8 END
"""
_STATISTICS = """
SELECT t.spill_txns, t.spill_bytes, {explained}
  FROM pg_catalog.pg_replication_slots s
  JOIN pg_catalog.pg_stat_replication_slots t ON t.slot_name = s.slot_name
 WHERE s.slot_name = {slot}
"""


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """The publisher's statistics of one slot. A field is None if the publisher's version does not have it."""

    spilled_transactions: int | None = None  # written to the publisher's disk while they were decoded
    spilled_bytes: int | None = None
    memory_exceeded: int | None = None  # how often logical_decoding_work_mem was exceeded
    sync_skip_reason: str | None = None  # why a standby did not synchronize the slot last time; None: it did
    sync_skips: int | None = None
    last_sync_skip: datetime | None = None


def query(slot: str, server_version: int) -> str | None:
    """Return the query for a publisher of this version. None: it has no statistics of slots."""
    if not features.SLOT_STATISTICS.is_in(server_version):
        return None
    explained = _EXPLAINED if features.SLOT_SYNC_STATISTICS.is_in(server_version) else "NULL, NULL, NULL, NULL"
    return _STATISTICS.format(explained=explained, slot=literal(slot))


def parse(rows: Sequence[tuple[str | None, ...]]) -> SlotStatistics:
    """Parse the answer to query(). No row: there is no such slot. Raises ProtocolError if it is malformed."""
    if not rows:
        return SlotStatistics()
    with parsing("the statistics of its slot"):
        ((transactions, size, exceeded, reason, skips, last_skip),) = rows
        return SlotStatistics(
            spilled_transactions=count(transactions),
            spilled_bytes=count(size),
            memory_exceeded=None if exceeded is None else count(exceeded),
            sync_skip_reason=reason,
            sync_skips=None if skips is None else count(skips),
            last_sync_skip=None if last_skip is None else datetime.fromtimestamp(seconds(last_skip), UTC),
        )


def describe(statistics: SlotStatistics, now: datetime | None) -> list[tuple[str, str]]:
    """Return (label, text) of the lines about the slot; none for what has not happened.

    Args:
        statistics: the statistics.
        now: the publisher's time. None: not known.
    """
    decoding = []
    if statistics.spilled_transactions:
        spilled = formatting.count(statistics.spilled_transactions, "transaction")
        decoding.append(f"{spilled} spilled to disk ({formatting.in_bytes(statistics.spilled_bytes or 0)})")
    if statistics.memory_exceeded:
        decoding.append(f"logical_decoding_work_mem exceeded {formatting.count(statistics.memory_exceeded, 'time')}")
    lines = [("decoding", ", ".join(decoding))] if decoding else []
    if statistics.sync_skip_reason is not None:
        skips = f", skipped {formatting.count(statistics.sync_skips, 'time')}" if statistics.sync_skips else ""
        if statistics.last_sync_skip is not None and now is not None:
            ago = max(0.0, (now - statistics.last_sync_skip).total_seconds())
            skips += f", last {formatting.in_seconds(ago)} ago"
        lines.append(("slot sync", f"not synchronized: {statistics.sync_skip_reason}{skips}"))
    return lines


def as_json(statistics: SlotStatistics) -> dict[str, Any]:
    """Return the keys of the publisher's statistics, which have the names of its columns."""
    last = statistics.last_sync_skip
    return {
        "spill_txns": statistics.spilled_transactions,
        "spill_bytes": statistics.spilled_bytes,
        "mem_exceeded_count": statistics.memory_exceeded,
        "slotsync_skip_reason": statistics.sync_skip_reason,
        "slotsync_skip_count": statistics.sync_skips,
        "slotsync_last_skip": None if last is None else last.isoformat(timespec="milliseconds"),
    }
