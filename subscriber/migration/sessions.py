"""The sessions of a fenced server: which ones are ended, and when none is left.

A session that starts has a lock on its database from before the check of CONNECT until it is visible in
pg_stat_activity. So a session that was admitted before the fence closed is either a holder of that lock, or visible.
The locks are read first.

The fence admits these sessions, and none for its application_name, which any program can set:

- That of the command, and those that launchers and workers have registered (catalog/worker_sessions.py). A session of a
  superuser, or of a role with CONNECT, has REGISTRATION seconds to register. Until then it is waited for.
- Walsenders that stream. They execute no statement of a client before the stream ends, and then see the closed fence.
  Any other walsender of a database executes SQL like a session of an application.

Invariant: a transaction that has seen the open fence belongs to an admitted session, or its session is ended before
the marker of the move is committed.

Sessions of superusers that begin after the fence has closed are not ended: nothing keeps superusers out, and the
triggers of the fence stop their writes. The same is true of walsenders.

Source: InitPostgres() in src/backend/utils/init/postinit.c, which locks the database, calls CheckMyDatabase(), and then
pgstat_bestart().
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

import asyncpg

STARTING = """
SELECT l.pid FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.objid
 WHERE l.locktype = 'object' AND l.classid = 'pg_catalog.pg_database'::pg_catalog.regclass AND l.granted
   AND l.mode = 'RowExclusiveLock' AND d.datname = pg_catalog.current_database()
"""
REGISTRATION = 2.0  # seconds in which a session registers after it has begun
HAS_REGISTRY = "SELECT pg_catalog.to_regprocedure('subscriber.own_sessions()') IS NOT NULL"
REGISTERED = "SELECT s.pid FROM subscriber.own_sessions() s"
# Columns of sessions that the role may not see are NULL.
ALL = """
  FROM pg_catalog.pg_stat_activity a LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
  LEFT JOIN pg_catalog.pg_stat_get_wal_senders() w ON w.pid = a.pid
 WHERE a.datname = pg_catalog.current_database()
"""
# The session may write for an application. $1: the registered ones. Autovacuum and parallel workers end by themselves.
MAY_WRITE = """a.pid <> pg_catalog.pg_backend_pid() AND a.pid <> ALL ($1::int[])
       AND (a.backend_type IN ('autovacuum worker', 'parallel worker')
            OR a.backend_type = 'walsender' AND w.state IN ('catchup', 'streaming', 'stopping')) IS NOT TRUE"""
SESSIONS = f"""
SELECT a.pid, r.rolname::text AS role, a.application_name, {MAY_WRITE} AS may_write,
       coalesce(a.backend_start > $2::timestamptz, false) AS began_later,
       coalesce(r.rolsuper OR a.backend_type = 'walsender', false) AS may_begin_later,
       coalesce((r.rolsuper OR r.rolname = ANY ($3::text[])) AND pg_catalog.clock_timestamp() - a.backend_start
                < {REGISTRATION} * interval '1 second', false) AS may_register
{ALL}
"""
LONG_TRANSACTIONS = f"""
SELECT a.pid, r.rolname::text AS role, extract(epoch FROM pg_catalog.now() - a.xact_start)::int AS age
{ALL}   AND {MAY_WRITE} AND a.xact_start < pg_catalog.now() - $2::float8 * interval '1 second' ORDER BY a.xact_start
"""
TERMINATE = "SELECT pg_catalog.pg_terminate_backend(p) FROM pg_catalog.unnest($1::int[]) p"
PREPARED = """
SELECT x.gid FROM pg_catalog.pg_prepared_xacts x WHERE x.database = pg_catalog.current_database() ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class AppSession:
    """A session that a fence does not admit."""

    pid: int
    role: str | None
    application: str | None

    def __str__(self) -> str:
        who = f'{self.pid} of role "{self.role}"' if self.role is not None else str(self.pid)
        return f'{who} ("{self.application}")' if self.application else who


@dataclass(frozen=True, slots=True)
class FoundSessions:
    """Sessions of a fenced server that the fence does not admit. It is quiet when there are none.

    `starting`: it is not known yet whether the fence admits them.
    """

    ended: list[AppSession]
    starting: list[AppSession]

    def all(self) -> list[AppSession]:
        """Return the sessions of both kinds."""
        return self.ended + self.starting


async def end_sessions(connection: asyncpg.Connection, closed: datetime, kept: Collection[str]) -> FoundSessions:
    """End the sessions that a fence does not admit, and return those that were there.

    Call it until it returns none. `connection` must not be in a transaction.

    Args:
        connection: a session on the fenced server.
        closed: the time at which the fence was closed, by the server's clock.
        kept: roles of subscriber that are no superusers.
    """
    sessions = await find_sessions(connection, closed, kept)
    if sessions.ended:
        await connection.fetch(TERMINATE, [session.pid for session in sessions.ended])
    return sessions


async def find_sessions(connection: asyncpg.Connection, closed: datetime, kept: Collection[str]) -> FoundSessions:
    """Return the sessions that a fence does not admit, without ending them, see end_sessions()."""
    locked = {row["pid"] for row in await connection.fetch(STARTING)}
    # A session that registers after this is found below, and waited for or ended.
    rows = await connection.fetch(SESSIONS, await registered_sessions(connection), closed, list(kept))
    ended, starting = list[AppSession](), list[AppSession]()
    for row in rows:
        if row["may_write"] and not (row["began_later"] and row["may_begin_later"]):
            (starting if row["may_register"] else ended).append(
                AppSession(row["pid"], row["role"], row["application_name"])
            )
    starting += [AppSession(pid, None, "starting") for pid in sorted(locked - {row["pid"] for row in rows})]
    return FoundSessions(ended, starting)


async def registered_sessions(connection: asyncpg.Connection) -> list[int]:
    """Return the process IDs of the sessions that launchers and workers have registered."""
    if not await connection.fetchval(HAS_REGISTRY):  # a dry run, before the schema is created or upgraded
        return []
    return [row["pid"] for row in await connection.fetch(REGISTERED)]


async def long_transactions(connection: asyncpg.Connection, seconds: float) -> list[str]:
    """Return descriptions of sessions with a transaction older than that, which the fence would end."""
    rows = await connection.fetch(LONG_TRANSACTIONS, await registered_sessions(connection), seconds)
    return [f'process {row["pid"]} of role "{row["role"]}" for {row["age"]} s' for row in rows]


def terminate_statement(pids: Iterable[int]) -> str:
    """Return the statement that ends these sessions."""
    return TERMINATE.replace("$1::int[]", f"ARRAY[{', '.join(map(str, sorted(pids)))}]")


async def prepared_transactions(connection: asyncpg.Connection) -> list[str]:
    """Return the names of prepared transactions of the database, which could still be committed."""
    return [row["gid"] for row in await connection.fetch(PREPARED)]
