"""Statements on the progress records of workers.

A record is a large object. migrations/schema.sql describes its layout in section 4; view `progress` shows all.
"""

from __future__ import annotations

import asyncpg

from subscriber.apply.progress import ProgressClaim
from subscriber.lsn import Lsn, optional_lsn

PROGRESS = "SELECT remote_lsn::text AS remote_lsn FROM subscriber.progress WHERE subid = $1 AND relid = $2"
CONFIRMED = "SELECT confirmed_lsn::text FROM subscriber.progress WHERE subid = $1 AND relid = 0"
APPLY_PROGRESS = "SELECT subid::bigint, remote_lsn::text FROM subscriber.progress WHERE relid = 0"
TABLES = "SELECT relid FROM subscriber.progress_record WHERE subid = $1 AND relid <> 0"
SAVE_PROGRESS = "SELECT subscriber.set_progress($1::oid, $2::oid, $3::text::pg_lsn)"
# For RowApplier.execute_at_end(): the transaction has emptied the table of the record, which is then copied.
NOTE_EMPTIED = "SELECT subscriber.note_emptied($1, $2)"
REMOVE_PROGRESS = "SELECT subscriber.remove_progress($1::oid, $2::oid)"
CLAIM_PROGRESS = """
SELECT c.record, c.fence, c.reached::text AS reached, c.confirmed::text AS confirmed
  FROM subscriber.claim_progress($1::oid, $2::oid) c
"""
MOVE_BACK = """
SELECT subscriber.set_progress(p.subid, p.relid, $2::text::pg_lsn)
  FROM subscriber.progress p WHERE p.subid = $1 AND p.remote_lsn > $2::text::pg_lsn
"""
# A table whose copy or synchronization worker is beyond the position has all changes before it.
MOVE_TABLES_BACK = """
UPDATE subscriber.subscription_rel r
   SET srsubstate = CASE r.srsubstate WHEN 'f' THEN 's' ELSE r.srsubstate END, srsublsn = $2::text::pg_lsn
 WHERE r.srsubid = $1 AND r.srsubstate IN ('f', 's', 'r') AND greatest(r.srsublsn, (
           SELECT p.remote_lsn FROM subscriber.progress p WHERE (p.subid, p.relid) = (r.srsubid, r.srrelid)
       )) > $2::text::pg_lsn
"""
SAVE_CONFIRMED = "SELECT subscriber.set_confirmed($1::oid, $2::text::pg_lsn)"


async def load(connection: asyncpg.Connection, subid: int, relid: int = 0) -> Lsn | None:
    """Return the position of a worker, or None if it has none yet."""
    row = await connection.fetchrow(PROGRESS, subid, relid)
    return None if row is None else optional_lsn(row["remote_lsn"])


async def load_confirmed(connection: asyncpg.Connection, subid: int) -> Lsn | None:
    """Return the position that was confirmed without a commit, or None if there is none."""
    return optional_lsn(await connection.fetchval(CONFIRMED, subid))


async def load_all(connection: asyncpg.Connection) -> dict[int, Lsn]:
    """Return the position of each apply worker that has one, by subscription."""
    rows = await connection.fetch(APPLY_PROGRESS)
    return {subid: Lsn.parse(position) for subid, position in rows if position is not None}


async def load_tables(connection: asyncpg.Connection, subid: int) -> set[int]:
    """Return the relids of the subscription's tables and parallel apply workers that have a record."""
    return {row["relid"] for row in await connection.fetch(TABLES, subid)}


async def save(connection: asyncpg.Connection, subid: int, relid: int, remote_lsn: Lsn) -> None:
    """Set the position of a worker that is not running, and create its record if there is none."""
    await connection.execute(SAVE_PROGRESS, subid, relid, str(remote_lsn))


async def claim(connection: asyncpg.Connection, subid: int, relid: int = 0, *, generation: int) -> ProgressClaim | None:
    """Take over a worker's progress record.

    Afterwards no other session can commit a transaction with an older claim. `connection` must be outside of a
    transaction and commit synchronously, so the position is durable when this returns.

    Args:
        connection: A connection to the target.
        subid: The subscription.
        relid: The table or parallel apply worker; 0 is the apply worker.
        generation: The generation of the subscription's settings that the worker has loaded.

    Returns:
        The claim, or None if the worker has no record.

    Raises:
        asyncpg.SerializationError: A concurrent commit changed the record; the next attempt reads its position.
        asyncpg.LockNotAvailableError: A concurrent commit has lasted for ten seconds.
    """
    row = await connection.fetchrow(CLAIM_PROGRESS, subid, relid)
    if row is None or row["record"] is None:
        return None
    reached, confirmed = Lsn.parse(row["reached"]), optional_lsn(row["confirmed"])
    return ProgressClaim(subid, generation, row["record"], row["fence"], reached, confirmed)


async def move_back(connection: asyncpg.Connection, subid: int, position: Lsn) -> None:
    """Set all positions of a subscription and its tables that are higher than `position` to it.

    The stream then starts at `position`. So do the changes of a table that was being synchronized beyond it.
    `connection` must be in a transaction.
    """
    await connection.execute(MOVE_TABLES_BACK, subid, str(position))
    await connection.execute(MOVE_BACK, subid, str(position))


async def save_confirmed(connection: asyncpg.Connection, subid: int, position: Lsn | None) -> None:
    """Record that the worker confirms `position` to the publisher without a commit. None deletes the record."""
    await connection.execute(SAVE_CONFIRMED, subid, None if position is None else str(position))


async def remove(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """Delete the record of a table that is synchronized, or of a worker that has ended."""
    await connection.execute(REMOVE_PROGRESS, subid, relid)
