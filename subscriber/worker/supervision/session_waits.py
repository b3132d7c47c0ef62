"""SessionWaitMonitor: logs long waits of sessions that copy tables, and of the launcher's own sessions.

An apply worker checks its own waits (worker/apply/lock_waits.py). No worker checks the waits of a COPY, of a statement
on the catalog, or of a flush. So the launcher checks these sessions at each `session_wait_interval`, on a connection
whose statements wait for no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

import anyio

from subscriber import telemetry
from subscriber.catalog.connection import CatalogConnection
from subscriber.settings import DEFAULTS, Settings

# pg_stat_activity hides the wait events of other roles' sessions, but pg_locks shows all locks.
WAITING = """
SELECT s.pid, l.what,
       ARRAY(SELECT CASE b.pid WHEN 0 THEN 'a prepared transaction'
                    ELSE pg_catalog.format('process %s ("%s")', b.pid, a.application_name) END
               FROM (SELECT DISTINCT pg_catalog.unnest(pg_catalog.pg_blocking_pids(s.pid))) b (pid)
               LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = b.pid ORDER BY b.pid) AS holders
  FROM pg_catalog.unnest($1::int[]) s (pid)
  JOIN LATERAL (SELECT pg_catalog.concat(w.locktype, ' ' || w.relation::pg_catalog.regclass::text) AS what
                  FROM pg_catalog.pg_locks w WHERE w.pid = s.pid AND NOT w.granted LIMIT 1) l ON true
UNION ALL
SELECT a.pid, NULL, ARRAY['a synchronous standby of the target']
  FROM pg_catalog.pg_stat_activity a WHERE a.pid = ANY ($1::int[]) AND a.wait_event = 'SyncRep'
"""


class SessionWaitMonitor:
    """Checks the waits of the sessions that a callback returns."""

    def __init__(self, sessions: Callable[[], Mapping[int, str]], settings: Settings = DEFAULTS) -> None:
        """Create the monitor. `sessions` returns descriptions of the sessions, by process ID of their backends."""
        self._sessions = sessions
        self._interval = settings.session_wait_interval
        self._log_delay = settings.lock_wait_log_delay
        self._since: dict[int, float] = {}
        self._logged: set[int] = set()

    async def run(self, catalog: CatalogConnection) -> None:
        """Check the sessions until canceled. `catalog` runs the queries."""
        while True:
            await anyio.sleep(self._interval)
            sessions = self._sessions()
            async with catalog.use() as connection:
                waiting = {row[0]: row[1:] for row in await connection.fetch(WAITING, list(sessions))}
            now = monotonic()
            for pid in self._since.keys() - waiting.keys():
                silent = now - self._since.pop(pid)
                if pid in self._logged:
                    self._logged.remove(pid)
                    what = f"the target answers again, after {silent:.0f} s"
                    telemetry.log(telemetry.LOG, what, event="target.answers")
            for pid, (what, holders) in waiting.items():
                silent = now - self._since.setdefault(pid, now)
                if silent >= self._log_delay and pid not in self._logged:
                    self._logged.add(pid)
                    _say(silent, pid, sessions[pid], what, holders)


def _say(silent: float, pid: int, who: str, what: str | None, holders: list[str]) -> None:
    lock = f", which has a lock of {what}" if what is not None else ""
    telemetry.log(
        telemetry.WARNING,
        f"no answer from the target for {silent:.0f} s",
        detail=f"Process {pid} of the target, for {who}, waits for {', '.join(holders) or 'a lock'}{lock}.",
        event="target.silent",
    )
