"""What workers count for pg_stat_subscription_stats: errors, and conflicts by their type."""

from __future__ import annotations

from collections.abc import Mapping

import asyncpg

from subscriber.apply.conflicts.types import ConflictType

CONFLICTS = tuple(conflict.value for conflict in ConflictType)
COUNTERS = ("apply_error_count", "sync_error_count", *(f"confl_{conflict}" for conflict in CONFLICTS))
ADD_STATS = f"""
INSERT INTO subscriber.subscription_stats AS t (subid, {", ".join(COUNTERS)})
SELECT $1::oid, {", ".join(f"${number}::bigint" for number in range(2, 2 + len(COUNTERS)))}
 WHERE EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = $1)
ON CONFLICT (subid) DO UPDATE SET {", ".join(f"{name} = t.{name} + excluded.{name}" for name in COUNTERS)}
"""


async def add_stats(connection: asyncpg.Connection, subid: int, counts: Mapping[str, int]) -> None:
    """Add to the subscription's counters, by their names in COUNTERS; nothing happens if it is gone.

    Raises KeyError for a name that is no counter.
    """
    if unknown := counts.keys() - set(COUNTERS):
        raise KeyError(f"no such counter: {', '.join(sorted(unknown))}")
    await connection.execute(ADD_STATS, subid, *(counts.get(name, 0) for name in COUNTERS))
