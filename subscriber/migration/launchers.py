"""MoveLaunchers: the launchers of both servers in the process of a move.

A launcher is a standby while another one leads on its server. A move without a leading launcher fails by its limits.
"""

from __future__ import annotations

from dataclasses import replace

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.errors import SubscriberError
from subscriber.migration.plan import Side
from subscriber.settings import Settings
from subscriber.worker.supervision.launcher import Launcher

EMPTY_POLL = 0.5  # seconds after which a launcher looks again for the subscription that the move creates


class MoveLaunchers:
    """Runs a launcher for each server in a task group, until that is canceled."""

    def __init__(self, tasks: TaskGroup, settings: Settings) -> None:
        """Create the launchers without starting them. `settings` are those of each launcher."""
        self._tasks = tasks
        self._settings = replace(settings, empty_database_poll_interval=EMPTY_POLL)
        self._running: dict[Side, tuple[str, Settings, anyio.CancelScope, anyio.Event]] = {}
        self.leading: set[Side] = set()  # servers on which a launcher of this process leads, or has led

    def start(self, side: Side, dsn: str) -> None:
        """Start the launcher of a server."""
        self._start(side, dsn, self._settings)

    async def set_jobs(self, side: Side, jobs: int) -> None:
        """Have the launcher of a server copy and index `jobs` tables at the same time. Its workers are restarted."""
        if side not in self._running:  # the server cannot be reached
            return
        dsn, settings, scope, ended = self._running[side]
        changed = replace(settings, max_sync_workers=jobs, index_sessions=jobs)
        if changed != settings:
            scope.cancel()
            await ended.wait()
            self._start(side, dsn, changed)

    def _start(self, side: Side, dsn: str, settings: Settings) -> None:
        scope, ended = anyio.CancelScope(), anyio.Event()
        self._running[side] = dsn, settings, scope, ended
        self._tasks.start_soon(self._run, side, dsn, settings, scope, ended)

    async def _run(
        self, side: Side, dsn: str, settings: Settings, scope: anyio.CancelScope, ended: anyio.Event
    ) -> None:
        try:
            with scope:
                await Launcher(dsn, settings=settings).run(lambda: self.leading.add(side))
        except SubscriberError as error:
            telemetry.log_error(error, telemetry.WARNING, worker="launcher", event="launcher.lost")
        finally:
            ended.set()
