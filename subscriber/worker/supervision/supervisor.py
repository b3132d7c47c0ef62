"""Supervisor: runs the apply worker and the table synchronization workers of one subscription.

It restarts workers after errors, and after statements that change their options.

Source:

- restarts: launcher.c
- number of synchronization workers, and interval between attempts: process_syncing_tables_for_apply() in tablesync.c
- changed options: maybe_reread_subscription() in worker.c
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from time import monotonic

import anyio
from anyio.abc import TaskGroup

from subscriber import names, telemetry
from subscriber.apply.hooks.config import Hooks
from subscriber.apply.table_states import TableState
from subscriber.catalog import hooked_tables, origins, pause_requests, table_names
from subscriber.catalog.commands.privileges import check_manager
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscriptions import disable_subscription, load_subscription
from subscriber.catalog.store.workers import WorkerState
from subscriber.errors import (
    ConflictError,
    ConnectionLost,
    EndOfStream,
    SequenceSyncError,
    ServerError,
    SubscriberError,
    TextNeeded,
)
from subscriber.exception_groups import root_cause
from subscriber.lsn import Lsn
from subscriber.publisher.subscriptions import connect_publisher
from subscriber.retry import Reaction, reaction
from subscriber.sqlstate import INVALID_SQL_STATEMENT_NAME, QUERY_CANCELED
from subscriber.subscription import OPTIONS, Subscription
from subscriber.worker.apply.pause import PauseGate
from subscriber.worker.apply.worker import ApplyWorker, WorkerMemory
from subscriber.worker.context import LauncherContext
from subscriber.worker.error_hints import add_copy_remedy, add_hint, skip_remedy
from subscriber.worker.leftover_slots import drop_leftover_slots
from subscriber.worker.recovery import Recovery
from subscriber.worker.sequencesync.worker import SequenceSync
from subscriber.worker.status import TABLE_SYNC, Report
from subscriber.worker.table_states import TableStates
from subscriber.worker.tablesync.foreign_keys import ForeignKeyBuilder
from subscriber.worker.tablesync.places import SyncPlaces
from subscriber.worker.tablesync.range_copy import RangeCopy
from subscriber.worker.tablesync.sessions import SyncSessions
from subscriber.worker.tablesync.worker import TableSync

# A prepared statement does not exist, or a statement has lasted longer than statement_timeout.
_CHANGED_SESSION = (INVALID_SQL_STATEMENT_NAME, QUERY_CANCELED)

# A changed value restarts the apply worker (maybe_reread_subscription()). A worker that still has the earlier values
# cannot commit: trigger next_generation in migrations/schema.sql has the columns.
SETTINGS = (
    "name",
    "owner",
    "owner_is_superuser",
    "stored_conninfo",
    "server",
    "publications",
    *(name for name, option in OPTIONS.items() if option.restarts),
)


class Supervisor:
    """The supervisor of one subscription.

    Attributes:
        subscription: the subscription as last loaded.
        tables: the states of its tables.
    """

    def __init__(self, subscription: Subscription, context: LauncherContext, recovery: Recovery) -> None:
        """Create a supervisor.

        Args:
            subscription: the subscription.
            context: the launcher's context.
            recovery: the last error of the apply worker, which outlives a supervisor.
        """
        self.subscription = subscription
        self.tables = TableStates(context.settings.sync_hold_time)
        self._context = context
        self._settings = context.settings
        self._recovery = recovery
        self._report: Report | None = None  # None before run()
        self._leader = anyio.CancelScope()  # of the apply worker
        self._recoveries: dict[int, Recovery] = {}  # of synchronization workers, by relid
        self._syncing: dict[int, anyio.CancelScope] = {}  # running synchronization workers, by relid
        self._last_sync: dict[int, float] = {}  # monotonic time of the last start, by relid
        self._sessions: list[SyncSessions] = []  # of finished synchronization workers, for the next ones
        self._waiting: set[int] = set()  # tables whose next attempt is scheduled
        self._tidying = False
        self._memory = WorkerMemory()
        self._cleared_skip = Lsn(0)  # cleared by the running apply worker, perhaps in a transaction that has not ended
        self._pause = PauseGate(context.catalog, subscription.oid)
        self._sequences = SequenceSync(subscription, context, lambda: len(self._syncing) + self._places.taken)
        self._foreign_keys = ForeignKeyBuilder(subscription, context.of(subscription), self.tables)
        self._places = SyncPlaces(context.settings.max_sync_workers, self._needed_syncs)
        self._changed = anyio.Event()
        self._tasks: TaskGroup

    async def run(self) -> None:
        """Run the workers until canceled, or until an error disables the subscription."""
        try:
            with telemetry.bound(subscription=self.subscription.name):
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    await self.reload_tables()
                    tasks.start_soon(self._synchronize_sequences)
                    tasks.start_soon(self._foreign_keys.run)
                    await self._work()
                    tasks.cancel_scope.cancel()
        finally:
            for sessions in self._sessions:
                sessions.close()

    async def _work(self) -> None:
        report = self._context.board.add(self.subscription.oid, 0, "apply", self._recovery)
        self._report = report
        try:
            with telemetry.bound(worker="apply"):
                await self._run_with_restarts(report)
        finally:
            # The status of a disabled subscription remains, because it shows the error.
            if report.status.state != WorkerState.DISABLED:
                self._context.board.remove(report)

    async def _synchronize_sequences(self) -> None:
        with telemetry.bound(worker="sequencesync"):
            try:
                await self._sequences.run()
            except SequenceSyncError:  # with disable_on_error
                await self._disable()

    async def update(self, subscription: Subscription) -> None:
        """Take over a change of the catalog. Restarts the workers if an option requires it.

        Args:
            subscription: the subscription as it is now.
        """
        # The launcher may have loaded it before the transaction that clears the position was committed.
        if subscription.skip_lsn == self._cleared_skip:
            subscription = replace(subscription, skip_lsn=Lsn(0))
        else:
            self._cleared_skip = Lsn(0)
        # The launcher may have loaded it before a starting apply worker loaded a newer one.
        if subscription.generation >= self.subscription.generation and self._replace(subscription):
            self.restart()
        await self.reload_tables()

    def _replace(self, subscription: Subscription) -> bool:
        """Take over the stored subscription.

        A starting apply worker calls this method too, because it can load a change before the launcher is notified.

        Returns:
            True if a running apply worker has to restart.
        """
        before, self.subscription = self.subscription, subscription
        self._sequences.update(subscription)
        self._foreign_keys.update(subscription)
        if subscription == before:
            return False
        self._note_change()
        accepted = subscription.accepts_loss and not before.accepts_loss
        altered = any(getattr(before, field) != getattr(subscription, field) for field in SETTINGS)
        # REFRESH TABLE changes the generation, and no setting.
        if not accepted and not altered and before.generation == subscription.generation:
            return False
        revoked = before.owner == subscription.owner and before.owner_is_superuser > subscription.owner_is_superuser
        why = "of a parameter change"
        if revoked:
            why = "the subscription owner's superuser privileges have been revoked"
        telemetry.log(
            telemetry.LOG,
            f'logical replication worker for subscription "{subscription.name}" will restart because {why}',
            event="worker.restart",
        )
        for scope in self._syncing.values():
            scope.cancel()
        self._memory.forget_tables()
        return True

    def _note_change(self) -> None:
        """Wake a waiting apply worker. A reason to request text may have gone with the change."""
        self._memory.request_text(None)
        self._changed.set()

    def restart(self) -> None:
        """Restart the apply worker. Synchronization workers continue."""
        self._leader.cancel()

    async def reload_tables(self, ended: int | None = None) -> None:
        """Load the tables and requests of the subscription from the catalog.

        Args:
            ended: a table whose synchronization worker has ended, so that its state is loaded too. None: there is none.
        """
        async with self._context.catalog.use() as connection:
            await table_names.follow(connection, self.subscription, self.tables.replaced)
            rows = await load_relation_states(connection, self.subscription.oid)
            self._pause.load(await pause_requests.load(connection, self.subscription.oid))
            sources = await hooked_tables.record(connection, self.subscription.oid, rows, self._hooks)
            lost = await table_names.load_lost(connection, self.subscription.oid)
            before = self.tables.relids
            self.tables.load(rows, self._busy(ended), lost, sources)
            self.tables.replaced.clear()
        self._memory.quarantine.mark(stale=True)
        if self.tables.relids != before:
            self._note_change()
        for relid, scope in self._syncing.items():
            if self.tables.get(relid) is None:
                scope.cancel()
        self._close_sessions()

    @property
    def _hooks(self) -> Hooks | None:
        return self._context.hooks.get(self.subscription.name)

    async def _check_hooks(self) -> None:
        """Check that this program has the hooks of the subscription. Raises HookError if it has not."""
        subid = self.subscription.oid
        async with self._context.catalog.use() as connection:
            tables = await load_relation_states(connection, subid)
            sources = await hooked_tables.record(connection, subid, tables, self._hooks)
        self.tables.sources = sources
        hooked_tables.check(self.subscription, tables, sources, self._hooks)

    def _busy(self, ended: int | None = None) -> set[int]:
        """Return the tables whose synchronization worker runs, without `ended`."""
        return self._syncing.keys() - {ended}

    # --- the apply worker -----------------------------------------------------------------------

    async def _run_with_restarts(self, report: Report) -> None:
        while True:
            started = monotonic()
            with anyio.CancelScope() as self._leader:
                try:
                    await self._run_apply_worker(report)
                except Exception as error:
                    if not await self._failed(root_cause(error), report, started):
                        return
            report.connected(None)

    def interrupted(self, error: BaseException) -> None:
        """Record that the launcher has lost the target, which ends this supervisor.

        Args:
            error: the error of the launcher.
        """
        if self._report is not None:
            self._recovery.failed(error, self._report.position, reaction(error))

    async def _run_apply_worker(self, report: Report) -> None:
        context = self._context
        # An earlier attempt may have changed the copy in memory by a transaction that was not committed.
        self._cleared_skip = Lsn(0)
        async with context.catalog.use() as connection:
            stored = await load_subscription(connection, self.subscription.oid)
            await check_manager(connection, self.subscription)
        if stored is not None and stored != self.subscription:
            self._replace(stored)
        # Tables may have been replaced.
        await self.reload_tables()
        await self._check_hooks()
        subscription = self.subscription
        report.enter(WorkerState.CONNECTING)
        context.board.publish()

        def on_started() -> None:
            report.enter(WorkerState.STREAMING)
            context.board.publish()
            if worker.left_over and not self._tidying:
                self._tidying = True
                self._tasks.start_soon(self._retry_cleanup)

        telemetry.log(
            telemetry.LOG,
            f'logical replication apply worker for subscription "{subscription.name}" has started',
            event="worker.started",
        )
        worker = ApplyWorker(
            subscription,
            context.of(subscription),
            self.tables,
            report,
            self,
            self._pause,
            self._memory,
        )
        await worker.run(on_started)

    async def _failed(self, error: BaseException, report: Report, started: float) -> bool:
        """Report an error of the apply worker and wait for its next attempt. Returns False if there is none."""
        if not isinstance(error, ConnectionLost):
            self._memory.known_tables.forget()
        add_hint(error, self.subscription.name)
        position = report.position
        report.leave()
        how = reaction(error)
        if isinstance(error, SubscriberError) and error.finish_lsn and error.finish_lsn == self.skip_lsn:
            how = Reaction.IMMEDIATE  # the transaction began before the statement that skips it
        if self._notice_changed_session(error):
            how = Reaction.SHORT_DELAY
        how = report.recovery.failed(error, position, how)
        skip = skip_remedy(error, self.subscription.name)
        report.recovery.error_remedy = report.recovery.error_remedy or skip
        if isinstance(error, EndOfStream):
            telemetry.log(telemetry.LOG, error.message, event="worker.ended")
        else:
            if isinstance(error, TextNeeded):
                self._switch_to_text(error)
            if how in (Reaction.IMMEDIATE, Reaction.SHORT_DELAY):
                await anyio.sleep(report.recovery.wait(how))
                return True
            telemetry.log_error(error, remedy=skip)
            self._count(error, "apply_error_count", report)
            await self._call_program(error, how)
        if self._memory.quarantine.takes(error, how, self.subscription.on_error):
            return True
        report.connected(None)
        # Transient errors do not disable a subscription. In PostgreSQL, a lost connection disables it, too.
        if self.subscription.disable_on_error and how is Reaction.INTERVAL:
            report.enter(WorkerState.DISABLED)
            self._context.board.publish()
            if await self._disable():
                return False
        self._changed = anyio.Event()
        if how is Reaction.STOP:
            report.enter(WorkerState.STOPPED)
            self._context.board.publish()
            await self._changed.wait()
            return True
        delay = report.recovery.wait(how)
        if how is Reaction.INTERVAL:
            delay = max(0.0, delay - (monotonic() - started))
        report.wait(delay)
        self._context.board.publish()
        with anyio.move_on_after(delay):
            await self._changed.wait()
        return True

    async def _call_program(self, error: BaseException, how: Reaction) -> None:
        if how in (Reaction.INTERVAL, Reaction.STOP):
            await self._context.on_error(self.subscription.name, error)

    def _notice_changed_session(self, error: BaseException) -> bool:
        """Make the next workers set the session's state again after the code of tables (foreign_code.py).

        Returns:
            True if the error may come from a changed state, and the workers have not set it again so far.
        """
        changed, subid = self._context.changed_sessions, self.subscription.oid
        if not isinstance(error, ServerError) or error.sqlstate not in _CHANGED_SESSION or subid in changed:
            return False
        changed.add(subid)
        telemetry.log(
            telemetry.LOG,
            f'logical replication worker for subscription "{self.subscription.name}" will restart to set the state of'
            " its session again after code of the tables",
            detail=f"A trigger may have changed it: {telemetry.message_without_values(error)}.",
            event="worker.restart",
        )
        return True

    def _switch_to_text(self, error: TextNeeded) -> None:
        """Make the next apply workers request values as text."""
        self._memory.request_text(error.message)
        telemetry.log(
            telemetry.LOG,
            f'logical replication worker for subscription "{self.subscription.name}" will restart to receive values'
            " as text",
            detail=f"{error.message[0].upper()}{error.message[1:]}.",
            event="worker.restart",
        )

    @property
    def skip_lsn(self) -> Lsn:
        return self.subscription.skip_lsn

    def skip_cleared(self) -> None:
        self._cleared_skip = self.subscription.skip_lsn
        self.subscription = replace(self.subscription, skip_lsn=Lsn(0))

    async def _disable(self) -> bool:
        """Disable the subscription. Returns False if the launcher's role may not, so the worker is retried."""
        async with self._context.catalog.use() as connection:
            if not await disable_subscription(connection, self.subscription.oid):
                return False
        telemetry.log(
            telemetry.LOG,
            f'subscription "{self.subscription.name}" has been disabled because of an error',
            event="subscription.disabled",
        )
        return True

    def _count(self, error: BaseException, counter: str, report: Report) -> None:
        """Count an error for pg_stat_subscription_stats. The board writes the count."""
        report.counts[counter] += 1
        if isinstance(error, ConflictError):
            report.counts[f"confl_{error.conflict_type}"] += 1

    async def _retry_cleanup(self) -> None:
        """Drop leftover slots that were active at the start of the apply worker. Retries until none is left."""
        while self._tidying:
            await anyio.sleep(self._settings.retry_interval)
            subscription, context = self.subscription, self._context
            try:
                name, encoding = subscription.name, context.catalog.encoding
                async with await connect_publisher(subscription, name, "apply worker", encoding) as publisher:
                    self._tidying = not await drop_leftover_slots(
                        publisher, context.catalog, subscription.oid, context.sync_id, self.tables
                    )
            except SubscriberError as error:
                telemetry.log(telemetry.DEBUG, f"could not drop leftover replication slots yet: {error.message}")

    # --- table sync workers ---------------------------------------------------------------------

    def is_syncing(self, relid: int) -> bool:
        return relid in self._syncing

    def start_sync(self, relid: int) -> None:
        """Start the synchronization worker of a table, unless the limit is reached or its last start is too recent."""
        running = self._running_syncs() + self._places.taken
        if relid in self._syncing or running >= self._settings.max_sync_workers:
            # The end of a worker wakes the apply worker, which calls this method again.
            return
        interval = self._settings.retry_interval
        wait = self._last_sync.get(relid, -interval) + interval - monotonic()
        if wait > 0:
            # This method is called at each commit. One scheduled attempt is enough.
            if relid not in self._waiting:
                self._waiting.add(relid)
                self._tasks.start_soon(self._notify_later, relid, wait)
            return
        self._last_sync[relid] = monotonic()
        self._syncing[relid] = anyio.CancelScope()
        self._tasks.start_soon(self._sync, relid, self._syncing[relid])

    def _running_syncs(self) -> int:
        return len(self._syncing) + self._sequences.is_running

    def _needed_syncs(self) -> int:
        """Return the number of tables and sequences whose synchronization runs or waits for a place."""
        uncopied = sum(table.state is not TableState.SYNCDONE for table in self.tables.unready.values())
        return max(self._running_syncs(), uncopied + self._sequences.is_running)

    async def _notify_later(self, relid: int, seconds: float) -> None:
        await anyio.sleep(seconds)
        self._waiting.discard(relid)
        self.tables.notify()

    async def _sync(self, relid: int, scope: anyio.CancelScope) -> None:
        keys = telemetry.LogKeys(worker="tablesync")
        if name := self.tables.names.get(relid):
            keys["relation"] = ".".join(name)
        with telemetry.bound(**keys):
            await self._synchronize(relid, scope)

    async def _synchronize(self, relid: int, scope: anyio.CancelScope) -> None:
        context = self._context
        recovery = self._recoveries.setdefault(relid, Recovery(self._settings))
        report = context.board.add(self.subscription.oid, relid, TABLE_SYNC, recovery)
        sessions = self._reuse_sessions()
        finished = False
        try:
            with scope:
                sync = TableSync(self.subscription, relid, context.of(self.subscription), self.tables, report)
                sync.log("started")
                ranges = RangeCopy(
                    self.subscription, relid, context.of(self.subscription), self.tables, report, self._places
                )
                if not (ranges.is_wanted and await ranges.run(sessions)):
                    await sync.run(sessions)
                sync.log("finished")
                finished = True
            self._recoveries.pop(relid, None)
            context.board.remove(report)
        except Exception as error:
            sessions.close()
            await self._sync_failed(root_cause(error), report)
            await self._release_origin(relid)
        finally:
            if finished:
                self._sessions.append(sessions)
            else:
                sessions.close()
                # The next worker must not start from an outdated state.
                await self.reload_tables(ended=relid)
            self._syncing.pop(relid, None)
            self._close_sessions()
            self.tables.restore(relid)
        table = self.tables.get(relid)
        if (
            not finished
            and not context.board.has_ended(report)
            and table is not None
            and table.state in (TableState.SYNCDONE, TableState.READY)
        ):
            # The worker failed before its cleanup and will not be restarted. The next apply worker does the cleanup.
            self._recoveries.pop(relid, None)
            context.board.remove(report)
            self._leader.cancel()

    async def _release_origin(self, relid: int) -> None:
        """Drop the origin of a failed copy, which starts again without it. Servers allow few origins."""
        table = self.tables.get(relid)
        if table is not None and table.state in (TableState.INIT, TableState.DATASYNC):
            with suppress(SubscriberError):
                async with self._context.catalog.use() as connection:
                    name = names.table_sync_origin(self.subscription.oid, relid)
                    await origins.drop_origin(connection, name, missing_ok=True)

    def _reuse_sessions(self) -> SyncSessions:
        """Return sessions of an earlier synchronization worker if they can be used again, or new ones."""
        while self._sessions:
            sessions = self._sessions.pop()
            if sessions.fits(self.subscription):
                return sessions
            sessions.close()
        return SyncSessions(
            self.subscription,
            self._context.apply_target,
            self._context.catalog,
            self._context.resolvers,
            self._settings,
            self._context.changed_sessions,
        )

    def _close_sessions(self) -> None:
        """Close idle sessions that exceed the number of waiting tables."""
        waiting = sum(table.state is not TableState.SYNCDONE for table in self.tables.unready.values()) - len(
            self._syncing
        )
        while len(self._sessions) > max(0, waiting):
            self._sessions.pop().close()

    async def _sync_failed(self, error: BaseException, report: Report) -> None:
        add_hint(error)
        if (name := self.tables.names.get(report.status.relid)) is not None:
            add_copy_remedy(error, self.subscription.name, ".".join(name))
        how = Reaction.SHORT_DELAY if self._notice_changed_session(error) else reaction(error)
        if how not in (Reaction.IMMEDIATE, Reaction.SHORT_DELAY):
            telemetry.log_error(error)
            self._count(error, "sync_error_count", report)
            await self._call_program(error, how)
        else:
            self._last_sync.pop(report.status.relid, None)
        # The number of copied bytes varies between attempts that fail at the same row, so it shows no progress.
        position = None if how is Reaction.INTERVAL else report.position
        report.leave()
        report.recovery.failed(error, position, how)
        report.connected(None)
        report.enter(WorkerState.WAITING_TO_RETRY)
        self._context.board.publish()
        if self.subscription.disable_on_error and how is Reaction.INTERVAL:
            await self._disable()
