"""How far each worker is: its progress record on the target.

The record is a large object, whose layout is in migrations/versions/0013_unpublished.py. View `progress` shows all.
"""

from __future__ import annotations

import asyncpg

from subscriber.apply.progress import ProgressClaim
from subscriber.lsn import Lsn

PROGRESS = "SELECT remote_lsn::text AS remote_lsn FROM subscriber.progress WHERE subid = $1 AND relid = $2"
APPLY_PROGRESS = "SELECT subid::bigint, remote_lsn::text FROM subscriber.progress WHERE relid = 0"
TABLES = "SELECT relid FROM subscriber.progress_record WHERE subid = $1 AND relid <> 0"
SAVE_PROGRESS = "SELECT subscriber.set_progress($1::oid, $2::oid, $3::text::pg_lsn)"
REMOVE_PROGRESS = "SELECT subscriber.remove_progress($1::oid, $2::oid)"
CLAIM_PROGRESS = """
SELECT c.record, c.fence, c.reached::text AS reached, c.confirmed::text AS confirmed
  FROM subscriber.claim_progress($1::oid, $2::oid) c
"""
SAVE_CONFIRMED = "SELECT subscriber.set_confirmed($1::oid, $2::text::pg_lsn)"


async def load(connection: asyncpg.Connection, subid: int, relid: int = 0) -> Lsn | None:
    """The position of a worker; None before the first one was saved."""
    row = await connection.fetchrow(PROGRESS, subid, relid)
    return None if row is None else _lsn(row["remote_lsn"])


async def load_all(connection: asyncpg.Connection) -> dict[int, Lsn]:
    """Return the positions of all apply workers that have one, by subscription."""
    rows = await connection.fetch(APPLY_PROGRESS)
    return {subid: Lsn.parse(position) for subid, position in rows if position is not None}


async def load_tables(connection: asyncpg.Connection, subid: int) -> set[int]:
    """Return the tables and parallel apply workers of a subscription that have a record, by their number."""
    return {row["relid"] for row in await connection.fetch(TABLES, subid)}


async def save(connection: asyncpg.Connection, subid: int, relid: int, remote_lsn: Lsn) -> None:
    """Set the position of a worker that is not running, and make its record if there is none."""
    await connection.execute(SAVE_PROGRESS, subid, relid, str(remote_lsn))


async def claim(connection: asyncpg.Connection, subid: int, relid: int = 0, *, generation: int) -> ProgressClaim | None:
    """Take over a worker's progress record; None if there is none. `generation` is that of the worker's settings.

    Nothing that another session has not committed yet can be committed any more. `connection` has to be outside of a
    transaction and commit synchronously: then the position is durable when this returns.

    Raises:
        asyncpg.SerializationError: a commit came in between; the next attempt reads its position.
        asyncpg.LockNotAvailableError: a commit has lasted for ten seconds.
    """
    row = await connection.fetchrow(CLAIM_PROGRESS, subid, relid)
    if row is None or row["record"] is None:
        return None
    reached, confirmed = Lsn.parse(row["reached"]), _lsn(row["confirmed"])
    return ProgressClaim(subid, generation, row["record"], row["fence"], reached, confirmed)


async def save_confirmed(connection: asyncpg.Connection, subid: int, position: Lsn | None) -> None:
    """Record that the publisher is told of `position` without a commit; None forgets what is recorded."""
    await connection.execute(SAVE_CONFIRMED, subid, None if position is None else str(position))


async def remove(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """For a table that has been synchronized."""
    await connection.execute(REMOVE_PROGRESS, subid, relid)


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)
