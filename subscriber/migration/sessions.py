"""The sessions of a fenced server: which ones are ended, and when none is left.

A session that starts has a lock on its database from before the check of CONNECT until it is visible in
pg_stat_activity. So a session that was admitted before the fence closed is either a holder of that lock, or visible.
The locks are read first.

Sessions of superusers that begin after the fence has closed are not ended: nothing keeps superusers out, and the
triggers of the fence stop their writes.

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
# Columns of sessions that the role may not see are NULL. `began_before`: NULL counts as true.
SESSIONS = """
SELECT a.pid, r.rolname::text AS role, a.application_name, a.backend_type, coalesce(r.rolsuper, false) AS is_superuser,
       coalesce(a.backend_start <= $1::timestamptz, true) AS began_before,
       a.pid = pg_catalog.pg_backend_pid()
       OR coalesce(a.application_name LIKE 'subscriber%' AND (r.rolsuper OR r.rolname = ANY ($2::text[])), false)
       AS is_ours
  FROM pg_catalog.pg_stat_activity a LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
 WHERE a.datname = pg_catalog.current_database()
"""
# A walsender writes nothing, and the others end by themselves.
NOT_ENDED = ("walsender", "autovacuum worker", "parallel worker")
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


async def end_sessions(connection: asyncpg.Connection, closed: datetime, kept: Collection[str]) -> list[AppSession]:
    """End the sessions that a fence does not admit, and return those that were there.

    Call it until it returns none. `connection` must not be in a transaction.

    Args:
        connection: a session on the fenced server.
        closed: the time at which the fence was closed, by the server's clock.
        kept: roles of subscriber that are no superusers.
    """
    found, unseen = await find_sessions(connection, closed, kept)
    if found:
        await connection.fetch(TERMINATE, [session.pid for session in found])
    return found + unseen


async def find_sessions(
    connection: asyncpg.Connection, closed: datetime, kept: Collection[str]
) -> tuple[list[AppSession], list[AppSession]]:
    """Return the sessions that a fence does not admit, and those that are starting, see end_sessions()."""
    starting = {row["pid"] for row in await connection.fetch(STARTING)}
    rows = await connection.fetch(SESSIONS, closed, list(kept))
    found = [
        AppSession(row["pid"], row["role"], row["application_name"])
        for row in rows
        if not row["is_ours"]
        and row["backend_type"] not in NOT_ENDED
        and (row["began_before"] or not row["is_superuser"])
    ]
    unseen = starting - {row["pid"] for row in rows}
    return found, [AppSession(pid, None, "starting") for pid in sorted(unseen)]


def terminate_statement(pids: Iterable[int]) -> str:
    """Return the statement that ends these sessions."""
    return TERMINATE.replace("$1::int[]", f"ARRAY[{', '.join(map(str, sorted(pids)))}]")


async def prepared_transactions(connection: asyncpg.Connection) -> list[str]:
    """Return the names of prepared transactions of the database, which could still be committed."""
    return [row["gid"] for row in await connection.fetch(PREPARED)]
