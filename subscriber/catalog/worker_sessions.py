"""The sessions of launchers and workers on the target: tables `session`, `launcher` and `own_session`.

A place is (subid, relid). At most one session has a place, for as long as its backend lives:

    relid 0           the apply worker
    relid of a table  the worker that synchronizes the table
    1 to 12288        further sessions of the apply worker
    12289 to 16382    further sessions of table synchronization workers that copy by ranges (worker/tablesync/places.py)
    REPAIR            `subscriber repair` (repair/batch.py), which ends and drops its origin and progress record itself
    HOLDER            `subscriber verify`, while it holds the apply worker (catalog/pause_requests.py)

Table `own_session` has the sessions that have registered themselves: those of a launcher, of workers, and of statements
that build indexes. The fence of a move admits the sessions of these tables, and no session for its application_name.

Only functions of the schema change these tables, so no other role can keep a worker from its place. Functions also end
registered sessions. So no role registers the session of another one: the session of a worker registers itself for its
subscription, and then the launcher gives it a place. A place separates workers that register. A worker that has lost
its place cannot commit: the fence of the progress record refuses it (targets/postgres/session/progress.py).

A worker reads its subscription, or its table's state, only after it has its place. register() waits for a statement
about the subscription, which has the subscription's row locked, and finds what that has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import asyncpg

FIRST_RANGE_SESSION = 12289
REPAIR = 16383  # the last number below the OIDs of tables

IDENTITY = """
SELECT a.pid, a.backend_start FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid()
"""
REGISTER = "SELECT subscriber.register_session($1::oid, $2::oid, $3::int4, $4::timestamptz)"
RELEASE = "SELECT subscriber.release_session($1::oid, $2::oid, $3::int4)"
LIVING = "SELECT l.relid, l.pid FROM subscriber.living_sessions($1::oid) l"
TERMINATE = "SELECT subscriber.terminate_workers($1::oid, $2::oid)"
TERMINATE_SESSION = "SELECT subscriber.terminate_session($1::oid, $2::int4)"
REGISTER_OWN_SESSION = """
SELECT subscriber.register_own_session($1::oid, a.backend_start)
  FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
"""
APPLY_ROLE = """
SELECT s.role::bigint FROM subscriber.session s
 WHERE s.subid = $1::oid AND s.relid = 0 AND subscriber.is_alive(s.pid, s.backend_start, s.role)
"""
LEAD = "SELECT subscriber.lead($1::text, $2::timestamptz, $3::interval)"
RENEW_LEAD = "SELECT subscriber.renew_lead($1::text, $2::int4)"
RESIGN = "SELECT subscriber.resign($1::text, $2::int4)"
LAUNCHER_NAME = "subscriber launcher"  # application_name of the session that leads, or waits to lead
LAUNCHERS = f"""
SELECT count(*) FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = pg_catalog.current_database() AND a.application_name = '{LAUNCHER_NAME}'
"""
LEADER = """
SELECT l.pid, pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - l.renewed) AS age
  FROM subscriber.launcher l WHERE EXISTS (SELECT FROM pg_catalog.pg_stat_activity a WHERE a.pid = l.pid)
"""

# Not included: waits of one session of a subscription for another session of the same subscription.
LOCK_WAITS = """
WITH ours AS (
    SELECT s.subid, s.pid FROM subscriber.session s JOIN pg_catalog.pg_stat_activity a ON a.pid = s.pid
     WHERE a.usesysid = s.role AND coalesce(a.backend_start = s.backend_start, true)
), waits AS (
    SELECT o.subid, o.pid, extract(epoch FROM pg_catalog.clock_timestamp() - min(l.waitstart))::float8 AS seconds
      FROM ours o JOIN pg_catalog.pg_locks l ON l.pid = o.pid AND NOT l.granted GROUP BY o.subid, o.pid
)
SELECT w.subid::bigint, w.pid, w.seconds,
       ARRAY(SELECT CASE b.pid WHEN 0 THEN 'a prepared transaction'
                    ELSE pg_catalog.format('process %s ("%s")', b.pid, a.application_name) END
               FROM (SELECT DISTINCT pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid))) b (pid)
               LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = b.pid
              WHERE b.pid NOT IN (SELECT o.pid FROM ours o WHERE o.subid = w.subid) ORDER BY b.pid)
  FROM waits w WHERE w.seconds > $1 ORDER BY w.seconds DESC
"""


@dataclass(frozen=True, slots=True)
class Backend:
    """A session of the target, as the server knows it."""

    pid: int
    started: datetime

    @classmethod
    async def of(cls, connection: asyncpg.Connection) -> Backend:
        """The backend behind `connection`."""
        row = await connection.fetchrow(IDENTITY)
        assert row is not None
        return cls(*row)


@dataclass(frozen=True, slots=True)
class Leader:
    """The launcher that leads. `age`: seconds since it has renewed its lease."""

    pid: int
    age: float


async def register(connection: asyncpg.Connection, subid: int, relid: int, backend: Backend) -> int | None:
    """Give `backend` a place: the session of `connection`, or one that has registered itself for the subscription.

    Args:
        relid: the place, see the top of the file.

    Returns:
        None if the place is the backend's now, else the process ID of the living session that has it.

    Raises:
        asyncpg.UndefinedObjectError: the subscription does not exist.
        asyncpg.LockNotAvailableError: a statement about the subscription lasts longer than five seconds.
        asyncpg.InsufficientPrivilegeError: the session has not registered itself for the subscription.
    """
    holder: int | None = await connection.fetchval(REGISTER, subid, relid, backend.pid, backend.started)
    return holder


async def register_own(connection: asyncpg.Connection, subid: int, relid: int) -> bool:
    """Give the place to the session of `connection`; false if another session has it."""
    return await register(connection, subid, relid, await Backend.of(connection)) is None


async def register_without_place(connection: asyncpg.Connection) -> None:
    """Register the session of `connection` as one of a launcher or worker, for as long as it lives."""
    await connection.execute(REGISTER_OWN_SESSION, None)


async def release(connection: asyncpg.Connection, subid: int, relid: int, pid: int) -> None:
    """Give a place back, if it is that backend's. The end of the backend does the same."""
    await connection.execute(RELEASE, subid, relid, pid)


async def release_own(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """Give back the place of the session of `connection`. A pooler invents the process ID that the client knows."""
    await release(connection, subid, relid, (await Backend.of(connection)).pid)


async def living(connection: asyncpg.Connection, subid: int) -> dict[int, int]:
    """The process IDs of the sessions that work for a subscription, by relid."""
    return {row["relid"]: row["pid"] for row in await connection.fetch(LIVING, subid)}


async def holder(connection: asyncpg.Connection, subid: int, relid: int) -> int | None:
    """The process ID of the session that has a place; None if it is free."""
    return (await living(connection, subid)).get(relid)


async def apply_role(connection: asyncpg.Connection, subid: int) -> int | None:
    """Return the OID of the role of the apply worker's session; None if there is no worker."""
    role: int | None = await connection.fetchval(APPLY_ROLE, subid)
    return role


async def terminate(connection: asyncpg.Connection, subid: int, relid: int | None) -> int:
    """End the session that has a place, or with None all of the subscription; how many lived."""
    ended: int = await connection.fetchval(TERMINATE, subid, relid)
    return ended


async def terminate_session(connection: asyncpg.Connection, subid: int, pid: int) -> bool:
    """End one session of the subscription; whether it lived."""
    ended: bool = await connection.fetchval(TERMINATE_SESSION, subid, pid)
    return ended


async def lead(connection: asyncpg.Connection, instance: str, backend: Backend, patience: float) -> bool:
    """Become the launcher that leads.

    Args:
        connection: the session that leads.
        instance: names this process; a former session of the same instance is ended.
        backend: that of `connection`.
        patience: seconds after which a leader that does not renew its lease is ended and replaced.

    Returns:
        False if another launcher leads.
    """
    became: bool = await connection.fetchval(LEAD, instance, backend.started, timedelta(seconds=patience))
    return became


async def renew_lead(connection: asyncpg.Connection, instance: str, pid: int) -> bool:
    """Renew the lease; false if another launcher leads now."""
    leads: bool = await connection.fetchval(RENEW_LEAD, instance, pid)
    return leads


async def resign(connection: asyncpg.Connection, instance: str, pid: int) -> None:
    """Stop to lead, so that a standby need not wait."""
    await connection.execute(RESIGN, instance, pid)


async def leader(connection: asyncpg.Connection) -> Leader | None:
    """The launcher that leads; None if there is none, or its backend has ended."""
    row = await connection.fetchrow(LEADER)
    return None if row is None else Leader(row["pid"], row["age"])


async def count_launchers(connection: asyncpg.Connection) -> int:
    """Return the number of launchers: the one that leads, and its standbys. A role sees those of its own sessions."""
    return int(await connection.fetchval(LAUNCHERS))


async def load_lock_waits(connection: asyncpg.Connection, seconds: float) -> list[asyncpg.Record]:
    """Return the sessions that have waited longer than `seconds` for a lock, longest first.

    Each row has the subscription, the process ID, the seconds, and descriptions of the sessions that hold the lock.
    """
    return list(await connection.fetch(LOCK_WAITS, seconds))
