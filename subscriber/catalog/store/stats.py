"""Statements on the counters of pg_stat_subscription_stats: errors, and conflicts by type."""

from __future__ import annotations

from collections.abc import Mapping

import asyncpg

from subscriber.apply.conflicts.types import ConflictType

CONFLICTS = tuple(conflict.value for conflict in ConflictType)
COUNTERS = (
    "apply_error_count",
    "sync_error_count",
    "sync_seq_error_count",
    *(f"confl_{conflict}" for conflict in CONFLICTS),
)
ADD_STATS = f"""
UPDATE subscriber.subscription_stats t
   SET {", ".join(f"{name} = t.{name} + ${number}::bigint" for number, name in enumerate(COUNTERS, 2))}
 WHERE t.subid = $1::oid
"""
LOAD_STATS = f"SELECT subid::bigint, {', '.join(COUNTERS)} FROM subscriber.subscription_stats"


async def load_stats(connection: asyncpg.Connection) -> dict[int, tuple[int, ...]]:
    """Return the counters of each subscription that has some, in the order of COUNTERS."""
    return {row[0]: tuple(row)[1:] for row in await connection.fetch(LOAD_STATS)}


async def add_stats(connection: asyncpg.Connection, subid: int, counts: Mapping[str, int]) -> None:
    """Add to the subscription's counters. Does nothing if the subscription has been dropped.

    Raises:
        KeyError: `counts` has a name that is not in COUNTERS.
    """
    if unknown := counts.keys() - set(COUNTERS):
        raise KeyError(f"no such counter: {', '.join(sorted(unknown))}")
    await connection.execute(ADD_STATS, subid, *(counts.get(name, 0) for name in COUNTERS))
