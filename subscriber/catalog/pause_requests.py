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
    """The worker is to stop before the first transaction that finishes at `stop_at` or later; 0: where it is.

    `held_at` is where it stands, with everything before `stop_at` committed and nothing of what is after it. None: it
    is on its way.
    """

    stop_at: Lsn
    held_at: Lsn | None


async def load(connection: asyncpg.Connection, subid: int) -> PauseRequest | None:
    """None: nobody has asked."""
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
    """Let the worker go on."""
    await connection.execute(_RELEASE, subid)


async def requester_is_gone(connection: asyncpg.Connection, subid: int) -> bool:
    """Whether nobody waits any more for what was asked."""
    return await worker_sessions.holder(connection, subid, HOLDER) is None
