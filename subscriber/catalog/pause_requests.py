"""Asking a subscription's apply worker to stay where it is, at a position and for a moment.

The session that wants it has the place HOLDER (catalog/worker_sessions.py) for as long as it wants it. A row of
`subscriber.hold` without such a session is a leftover, which the worker removes.
"""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from subscriber.catalog import worker_sessions
from subscriber.lsn import Lsn

HOLDER = 0xFFFFFFFE  # nothing gives that OID out

_LOAD = "SELECT stop_at::text AS stop_at, held_at::text AS held_at FROM subscriber.hold WHERE subid = $1"
_ASK = """
INSERT INTO subscriber.hold (subid, stop_at) VALUES ($1, $2::text::pg_lsn)
ON CONFLICT (subid) DO UPDATE SET stop_at = excluded.stop_at, held_at = NULL
"""
_ANSWER = """
UPDATE subscriber.hold SET held_at = $3::text::pg_lsn
 WHERE subid = $1 AND stop_at = $2::text::pg_lsn AND held_at IS NULL
"""
_RELEASE = "DELETE FROM subscriber.hold WHERE subid = $1"


@dataclass(frozen=True, slots=True)
class PauseRequest:
    """The worker must stop before the first transaction that finishes at `stop_at` or later; 0: immediately.

    `held_at` is the position at which it has stopped: all transactions before `stop_at` are committed, and no later
    ones. None: it has not stopped yet.
    """

    stop_at: Lsn
    held_at: Lsn | None


async def load(connection: asyncpg.Connection, subid: int) -> PauseRequest | None:
    """Return the request, or None if there is none."""
    row = await connection.fetchrow(_LOAD, subid)
    if row is None:
        return None
    return PauseRequest(Lsn.parse(row["stop_at"]), None if row["held_at"] is None else Lsn.parse(row["held_at"]))


async def request(connection: asyncpg.Connection, subid: int, stop_at: Lsn) -> None:
    """Have the worker stop there. The session of `connection` has the place HOLDER."""
    await connection.execute(_ASK, subid, str(stop_at))


async def acknowledge(connection: asyncpg.Connection, subid: int, stop_at: Lsn, held_at: Lsn) -> None:
    """The worker stands where it was asked to."""
    await connection.execute(_ANSWER, subid, str(stop_at), str(held_at))


async def release(connection: asyncpg.Connection, subid: int) -> None:
    """Let the worker resume."""
    await connection.execute(_RELEASE, subid)


async def requester_is_gone(connection: asyncpg.Connection, subid: int) -> bool:
    """Return True if the session that requested the pause has ended."""
    return await worker_sessions.holder(connection, subid, HOLDER) is None
