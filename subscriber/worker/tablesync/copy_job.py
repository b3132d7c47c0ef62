"""CopyJobCoordinator: decides which tables are copied together with Spark, and runs that copy as another process.

Purpose. The launcher starts the process (spark/copy/launched_copy.py) if `copy_engine` is spark, or if it is auto and
the tables are large. It restarts a copy that has failed. `subscriber copy` may also be started by a user on any
machine. Then it has the place COPY_JOB_RELID (catalog/worker_sessions.py), and the catalog lists its tables.

Failure cases.

- Launcher ends, even by kill -9: its copy ends, too. stdin of the process is a pipe whose other end only the launcher
  has. The next launcher starts the copy again, which continues with the missing parts.
- Copy fails: its error is logged and shown in the status of each table that is not copied. The copy is started again
  after `retry_interval`.
"""

from __future__ import annotations

import os
from enum import Enum, auto
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import anyio

from subscriber import telemetry
from subscriber.apply.table_states import TableState
from subscriber.catalog import worker_sessions
from subscriber.catalog.copy_jobs import COPY_JOB_RELID
from subscriber.catalog.store.workers import WorkerState
from subscriber.connection.conninfo import conninfo_text
from subscriber.errors import SubscriberError
from subscriber.publisher.subscriptions import connect_publisher
from subscriber.retry import Reaction
from subscriber.spark.copy import launched_copy
from subscriber.subscription import CopyEngine, Subscription, TableCopy
from subscriber.worker.context import LauncherContext
from subscriber.worker.recovery import Recovery
from subscriber.worker.status import TABLE_SYNC, Report
from subscriber.worker.table_states import TableStates

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

_UNCOPIED = (TableState.INIT, TableState.DATASYNC)


class Synchronizer(Enum):
    """The process or worker that synchronizes a table."""

    TO_SYNC = auto()  # the table's own synchronization worker
    TO_COPY = auto()  # subscriber copy
    TO_GROUP = auto()  # the synchronization worker of all tables that were copied together


class CopyJobOwner(Protocol):
    """The supervisor, as the coordinator uses it."""

    subscription: Subscription
    tables: TableStates


class CopyJobCoordinator:
    """Assigns the tables of one subscription to synchronization workers and to the copy with Spark.

    Attributes:
        tasks: the supervisor's task group. Must be set before leaves() is called.
    """

    def __init__(self, owner: CopyJobOwner, context: LauncherContext) -> None:
        self.tasks: TaskGroup
        self._owner = owner
        self._context = context
        self._catalog = context.catalog
        self._board = context.board
        self._running = False
        self._deciding = False
        self._large: frozenset[int] = frozenset()  # tables that together reach `large_copy_size`
        self._small: frozenset[int] = frozenset()  # tables that do not
        self._reports: list[Report] = []

    def leaves(self, relid: int) -> Synchronizer:
        """Return the synchronizer of a table. Starts the copy with Spark if the table needs it.

        TO_COPY also means that the decision is pending, because the publisher has not reported the sizes yet.
        """
        tables = self._owner.tables
        group = tables.group
        table = tables.get(relid)
        assert table is not None
        # Executors have no hooks, and compare no tables.
        own = relid in tables.sources or tables.copies.get(relid, TableCopy.COPY) is not TableCopy.COPY
        if own and relid not in group:
            return Synchronizer.TO_SYNC
        states = {state.state for state in map(tables.get, group) if state is not None}
        # An announced copy has no list of tables yet, so it may include this one.
        copying = tables.bulk is not None and (not group or bool(states & set(_UNCOPIED)))
        if relid in group and table.state not in _UNCOPIED:
            return Synchronizer.TO_COPY if copying else Synchronizer.TO_GROUP
        if table.state in _UNCOPIED and (copying or self._is_for_spark(relid)):
            self._start()
            return Synchronizer.TO_COPY
        return Synchronizer.TO_COPY if self._deciding else Synchronizer.TO_SYNC

    def _is_for_spark(self, relid: int) -> bool:
        engine = self._owner.subscription.copy_engine
        if engine is not CopyEngine.AUTO or not _has_spark():
            return engine is CopyEngine.SPARK
        if relid not in self._large | self._small and not self._deciding:
            self._deciding = True
            self.tasks.start_soon(self._decide)
        return relid in self._large

    async def _decide(self) -> None:
        """Decide from the size of all uncopied tables on the publisher whether they are copied with Spark."""
        tables = self._owner.tables
        uncopied = {relid for relid, table in tables.unready.items() if table.state in _UNCOPIED}
        waiting = frozenset(uncopied - tables.sources.keys())
        names = [tables.names[relid] for relid in waiting]
        try:
            async with await connect_publisher(
                self._owner.subscription, "subscriber copy", "apply worker", self._catalog.encoding
            ) as publisher:
                large = await publisher.total_bytes(names) >= self._context.settings.large_copy_size
        except SubscriberError:
            large = False  # a worker that copies them reports the error
        if large:
            self._large |= waiting
        else:
            self._small |= waiting
        self._deciding = False
        tables.notify()

    # --- subscriber copy ----------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._running:
            self._running = True
            self.tasks.start_soon(self._run)

    async def _run(self) -> None:
        try:
            await self._wait_for_others()
            for report in self._reports:
                self._board.remove(report)
            self._reports.clear()
            complaint = await self._copy()
            if complaint is not None:
                self._complain(complaint)
                await anyio.sleep(self._context.settings.retry_interval)
        finally:
            self._running = False
            self._owner.tables.notify()

    async def _wait_for_others(self) -> None:
        """Wait while another copy runs, or a synchronization worker hands over the group."""
        while True:
            async with self._catalog.use() as connection:
                if await worker_sessions.holder(connection, self._owner.subscription.oid, COPY_JOB_RELID) is None:
                    return
            await anyio.sleep(self._context.settings.retry_interval)

    async def _copy(self) -> str | None:
        """Run the copy. Returns its error message, or None if it has succeeded."""
        subscription = self._owner.subscription
        telemetry.log(
            telemetry.LOG, f'subscriber copy for subscription "{subscription.name}" has started', event="copy.started"
        )
        command = launched_copy.command(subscription.name)
        target, apply_target = self._context.target, self._context.apply_target
        environment = launched_copy.environment(await conninfo_text(target), await conninfo_text(apply_target))
        reader, writer = os.pipe()
        try:
            done = await anyio.run_process(command, check=False, env=environment, start_new_session=True, stdin=reader)
        finally:
            os.close(reader)
            os.close(writer)
        if done.returncode == 0:
            telemetry.log(
                telemetry.LOG,
                f'subscriber copy for subscription "{subscription.name}" has finished',
                event="copy.finished",
            )
            return None
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        error = launched_copy.ERROR
        errors = [line.removeprefix(error).strip() for line in lines if line.startswith(error)]
        return errors[0] if errors else f"subscriber copy has ended with status {done.returncode}"

    def _complain(self, complaint: str) -> None:
        """Log the error, and show it in the status of all uncopied tables, as an error of their workers."""
        tables = self._owner.tables
        error = SubscriberError(complaint)
        telemetry.log_error(error, event="copy.failed")
        for relid, table in tables.unready.items():
            if table.state in _UNCOPIED:
                recovery = Recovery(self._context.settings)
                recovery.failed(error, None, Reaction.INTERVAL)
                report = self._board.add(self._owner.subscription.oid, relid, TABLE_SYNC, recovery)
                report.enter(WorkerState.WAITING_TO_RETRY)
                self._reports.append(report)


@cache
def _has_spark() -> bool:
    """Return True if PySpark is installed. Cached, because it is called for each table at each commit."""
    return find_spec("pyspark") is not None
