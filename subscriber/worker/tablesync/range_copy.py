"""RangeCopy: copies one table by ranges of its key, each in a snapshot of its own.

Purpose. The table has no slot: the apply worker receives its changes in the main stream and decides them
(worker/apply/range_changes.py). subscriber/ranges/__init__.py has the rules. A table that cannot be divided is left to
TableSync (worker/tablesync/worker.py), which copies it in one snapshot.

Invariants.

- Rows and record of a range are one transaction of the target, which shows the fence of the progress record.
- The ranges in memory belong to one run. A run ends if others have replaced them.
- While no other table needs them, the copy uses the places of further synchronization workers (places.py) to copy
  several ranges at a time (range_session.py). Each session has an origin of its own, because an origin has one session.

Failure cases. The worker, a server, or a connection between them ends.

- Before a range is committed: its rows roll back. The next run reads it again, and the others stay. Each session loses
  one range at most.
- The apply worker restarts: it claims the progress record, so the range rolls back, and the copy starts again.
- At the COMMIT of a range: the next run or the next apply worker claims the progress record, which waits for the
  transaction, and reads from the catalog whether it has committed.
- After the last range, before syncdone is stored: the next run finds all ranges copied, and builds the indexes that are
  missing (worker/table_indexes.py). While an index is built, the apply worker waits with changes of the table.
- After syncdone is stored: the apply worker makes the table ready. The next apply worker drops origin and progress
  record (worker/leftover_slots.py).
- One of several sessions fails: the run ends, and the ranges that the others were copying roll back. If a session
  cannot be opened, the copy continues with fewer.
- Failover of the publisher: the transactions of the snapshots may be lost. The table is emptied and copied again, when
  the apply worker has started on the same timeline. Until then it may have sent changes of the ranges.
- The copy starts again while the apply worker has sent a TRUNCATE: no range is read before the TRUNCATE has ended
  (TableRanges.succeed()), also if the table is copied in one snapshot now.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
from anyio.abc import TaskGroup

from subscriber import names, telemetry
from subscriber.apply.progress import ProgressClaim
from subscriber.apply.table_states import TableState
from subscriber.catalog import origins
from subscriber.catalog.store import copied_ranges, progress_records
from subscriber.catalog.store.subscription_rel import set_relation_state
from subscriber.catalog.store.workers import WorkerState
from subscriber.errors import StaleCatalog, SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.failpoints import Point, reached
from subscriber.limited_wait import LimitedWait
from subscriber.lsn import Lsn
from subscriber.publisher import ranges as queries
from subscriber.publisher.connection import Publisher
from subscriber.ranges.table_ranges import TableRanges
from subscriber.sqlstate import PROGRESS_OUT_OF_STEP
from subscriber.subscription import CopyEngine, CopyIndexes, Subscription, TableCopy
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.worker_session import WorkerSession, claim
from subscriber.worker.apply.range_changes import restore
from subscriber.worker.context import LauncherContext
from subscriber.worker.status import Report
from subscriber.worker.table_indexes import TableIndexes
from subscriber.worker.table_states import TableStates
from subscriber.worker.tablesync.places import SyncPlaces
from subscriber.worker.tablesync.range_preparation import RangePlan, RangePreparation
from subscriber.worker.tablesync.range_session import CopiedTable, DividedTable, RangeSession
from subscriber.worker.tablesync.sessions import SyncSessions

_PAUSE_POLL = 10.0  # seconds
_TIME_OF_DAY = "SELECT EXTRACT(epoch FROM LOCALTIME)::float8"


class RangeCopy:
    """The copy of one table by ranges."""

    def __init__(
        self,
        subscription: Subscription,
        relid: int,
        context: LauncherContext,
        tables: TableStates,
        report: Report,
        places: SyncPlaces,
    ) -> None:
        """Create a copy.

        Args:
            subscription: the subscription.
            relid: OID of the table on the target.
            context: the launcher's context.
            tables: the states of the subscription's tables, shared with the apply worker.
            report: the status of this worker.
            places: has places for more sessions.
        """
        self.subscription = subscription
        self.relid = relid
        self._context = context
        self._tables = tables
        self._report = report
        self._places = places

    @property
    def is_wanted(self) -> bool:
        """True if the table is to be copied by ranges, if that is possible."""
        table = self._tables.get(self.relid)
        if table is None:
            return False
        if self._tables.copies.get(self.relid, TableCopy.COPY) is not TableCopy.COPY:
            return False
        uncopied = table.state in (TableState.INIT, TableState.DATASYNC)
        wanted = self.subscription.copy_engine is CopyEngine.RANGES or table.ranges is not None
        return uncopied and wanted

    async def run(self, sessions: SyncSessions) -> bool:
        """Copy the table.

        Args:
            sessions: the sessions to use. Afterwards another table can use them, unless this method raises an error.

        Returns:
            False if the table cannot be copied by ranges. Nothing has changed then.

        Raises:
            StaleCatalog: the table was copied by another worker, or the copy has to start again.
            SubscriberError: any other error, with its CONTEXT.

        Cancellation: the range that is being copied rolls back. `sessions` must be closed.
        """
        table = CopiedTable(
            self.subscription, self.relid, *self._tables.names[self.relid], self._context, self._tables, self._report
        )
        origin = names.table_sync_origin(self.subscription.oid, self.relid)
        publisher = await sessions.publisher(f"{self.subscription.name} {table.name}")
        async with sessions.target(table.name, self.relid, table.report_conflict) as worker:
            self._report.connected(worker.session.pipeline.session.pid)
            try:
                indexes = TableIndexes(self.subscription, self._context, self._report)
                preparation = RangePreparation(table, publisher, worker.session, indexes)
                plan = await preparation.prepare()
                if plan is None:
                    return False
                await self._copy(table, plan, preparation, publisher, worker)
            except SubscriberError as error:
                explained = await worker.explain(error)
                if explained.sqlstate == PROGRESS_OUT_OF_STEP:
                    raise StaleCatalog("a new apply worker has claimed the progress of the copy") from error
                raise explained from error
        async with self._context.catalog.use() as connection, connection.transaction():
            await origins.drop_origin(connection, origin, missing_ok=True)
            await progress_records.remove(connection, self.subscription.oid, self.relid)
        return True

    async def _copy(
        self,
        table: CopiedTable,
        plan: RangePlan,
        preparation: RangePreparation,
        publisher: Publisher,
        worker: WorkerSession,
    ) -> None:
        """Copy all ranges, build the last indexes, and store that the table is synchronized."""
        async with AsyncExitStack() as stack:
            async with self._tables.claiming:
                claimed = await _claim(table)
                await stack.enter_async_context(worker.with_origin(claimed))
                ranges = await _load(table, plan, preparation)
            rows = self._context.settings.range_rows
            divided = DividedTable(table, plan.published, ranges, claimed, rows)
            # Transactions that the apply worker has skipped before this point are not recorded.
            await _wait_for_writers(divided, publisher)
            self._report.copies(plan.published.total_bytes)
            self._report.enter(WorkerState.COPYING)
            end = await _CopyRun(divided, publisher, worker.session, self._places).copy()
            # All rows are those of one position of the stream, so unique constraints hold.
            await preparation.build_indexes()
            await reached(Point.LAST_INDEX_BUILT)
            await _store_done(table, end)


class _CopyRun:
    """One run of a copy, with all its sessions."""

    def __init__(self, divided: DividedTable, publisher: Publisher, session: TargetSession, places: SyncPlaces) -> None:
        self._divided = divided
        self._table = divided.table
        self._publisher = publisher
        self._session = session
        self._places = places
        # If only the publisher compares keys, ranges can be restored only if all ranges before them are copied.
        self._can_share = not divided.ranges.key.is_compared_by_publisher

    async def copy(self) -> Lsn:
        """Copy all ranges, with more sessions while synchronization workers have free places. Returns the end."""
        try:
            async with anyio.create_task_group() as tasks:
                end = await self._copy_ranges(tasks)
        except ExceptionGroup as group:
            raise root_cause(group) from group
        return end

    async def _copy_ranges(self, tasks: TaskGroup) -> Lsn:
        session = RangeSession(self._divided, self._publisher, self._session)
        while (end := await self._wait_for_work()) is None:
            await self._wait_for_window()
            while self._can_share and (number := self._places.take()) is not None:
                tasks.start_soon(self._share, number)
            await session.copy_next()
        return end

    async def _share(self, number: int) -> None:
        """Copy ranges with other sessions, until none is left or another table needs the place `number`."""
        context = self._table.context
        sessions = SyncSessions(
            self._table.subscription,
            context.apply_target,
            self._table.context.catalog,
            context.resolvers,
            context.settings,
            context.changed_sessions,
        )
        try:
            await self._copy_with(sessions, number)
        finally:
            sessions.close()
            self._places.give_back(number)
            self._table.tables.notify()

    async def _copy_with(self, sessions: SyncSessions, number: int) -> None:
        table, is_open = self._divided, False
        try:
            async with AsyncExitStack() as stack:
                publisher = await sessions.publisher(f"{self._table.subscription.name} {self._table.name}")
                await publisher.restrict_views()
                worker = await stack.enter_async_context(
                    sessions.target(self._table.name, number, self._table.report_conflict)
                )
                await stack.enter_async_context(worker.with_origin(table.claimed, number=number))
                is_open = True
                session = RangeSession(table, publisher, worker.session)
                try:
                    while table.ranges.next_unread() is not None and table.can_read:
                        if not self._places.suffice() or await self._seconds_until_open():
                            break
                        await session.copy_next()
                except SubscriberError as error:
                    raise await worker.explain(error) from error
        except SubscriberError as error:
            if is_open or isinstance(error, StaleCatalog):
                raise
            self._can_share = False
            telemetry.log(
                telemetry.WARNING,
                f'table "{self._table.label}" is copied in fewer sessions than max_sync_workers allows',
                detail=telemetry.message_without_values(error),
                hint="Sessions need max_connections on both servers, max_wal_senders on the publisher, and for"
                " their origins max_active_replication_origins on the target, which is max_replication_slots before"
                " PostgreSQL 18.",
                event="ranges.fewer_sessions",
                relation=self._table.label,
            )
            return
        async with self._table.context.catalog.use() as connection:
            origin = names.table_sync_origin(self._table.subscription.oid, number)
            await origins.drop_origin(connection, origin, missing_ok=True)

    async def _seconds_until_open(self) -> float:
        """Return the seconds until `range_window` allows to copy ranges."""
        window = self._table.context.settings.range_window
        if window is None:
            return 0.0
        async with self._table.context.catalog.use() as connection:
            return window.seconds_until_open(float(await connection.fetchval(_TIME_OF_DAY)))

    async def _wait_for_window(self) -> None:
        """Wait until the time of the day allows to copy ranges (`range_window`)."""
        is_paused = False
        while wait := await self._seconds_until_open():
            if not is_paused:
                is_paused = True
                window = self._table.context.settings.range_window
                self._table.report.enter(WorkerState.PAUSED, f" {window}")
                telemetry.log(
                    telemetry.LOG,
                    f'the copy of table "{self._table.label}" pauses outside of range_window {window}',
                    event="ranges.paused",
                    relation=self._table.label,
                )
            # Otherwise the skipped transactions would be remembered until the next range.
            self._divided.ranges.forget_seen(await queries.current_snapshot(self._publisher))
            await anyio.sleep(min(wait, _PAUSE_POLL))
            self._divided.check_current()

    async def _wait_for_work(self) -> Lsn | None:
        """Wait until a range can be copied. Returns the end of the copy if all are copied and no change needs them."""
        table, ranges = self._divided, self._divided.ranges
        while True:
            await self._table.tables.wait_until(lambda: not table.is_indexed or not table.is_current)
            table.check_current()
            if not ranges.unsettled:
                if ranges.next_unread() is not None:
                    return None
                end = ranges.end
                if end is not None and ranges.settled >= end:
                    return end
                if ranges.is_taken:
                    await self._table.tables.wait_until(
                        lambda: not ranges.is_taken or ranges.next_unread() is not None or not table.is_current
                    )
                    continue
            self._table.report.enter(WorkerState.WAITING_FOR_APPLY_WORKER)
            await table.wait_for_apply_worker()
            self._table.report.enter(WorkerState.COPYING)


async def _claim(table: CopiedTable) -> ProgressClaim:
    """Store that the table is being copied, and claim its progress record."""
    subid = table.subscription.oid
    async with table.context.catalog.use() as connection, connection.transaction():
        await origins.create_origin(connection, names.table_sync_origin(subid, table.relid))
        await set_relation_state(connection, subid, table.relid, TableState.DATASYNC, None)
        await progress_records.save(connection, subid, table.relid, Lsn(0))
    await reached(Point.DATASYNC_STORED)
    table.tables.move(table.relid, TableState.DATASYNC, Lsn(0))
    claimed = await claim(table.context.catalog, table.subscription, table.relid)
    if claimed is None:
        raise SubscriberError(f'progress of table "{table.label}" is missing in the catalog')
    return claimed


async def _load(table: CopiedTable, plan: RangePlan, preparation: RangePreparation) -> TableRanges:
    """Load the ranges that are copied, and let the apply worker decide changes by them."""
    async with table.context.catalog.use() as connection:
        rows = await copied_ranges.load(connection, table.subscription.oid, table.relid)
    await reached(Point.RANGES_READ)
    if any(row.timeline != plan.timeline for row in rows):
        await preparation.empty(plan.published)
        rows = []
    ranges = restore(rows, plan.timeline)
    if ranges is not None and ranges.key != plan.key:
        raise SubscriberError(
            f'the replica identity of table "{table.label}" has changed on the publisher during its copy',
            hint="Give it the former replica identity until the table is copied.",
        )
    ranges = ranges or TableRanges(plan.key, plan.timeline)
    state = table.tables.get(table.relid)
    if state is None:
        raise StaleCatalog("the table was removed meanwhile")
    if state.ranges is not None:
        ranges.succeed(state.ranges)
    state.ranges = ranges
    table.tables.notify()
    return ranges


async def _wait_for_writers(divided: DividedTable, publisher: Publisher) -> None:
    """Wait until snapshots see all transactions that have written to the table before now."""
    divided.table.report.enter(WorkerState.WAITING_FOR_WRITERS)
    waiting = await queries.writers(publisher, divided.published)
    wait = LimitedWait(f'transactions that write to table "{divided.table.label}" on the publisher')
    while waiting:
        await wait.poll()
        waiting &= await queries.writers(publisher, divided.published)


async def _store_done(table: CopiedTable, end: Lsn) -> None:
    """Store syncdone. The apply worker has applied and committed all changes before `end`."""
    marks = table.subscription.copy_indexes is CopyIndexes.AFTER  # foreign keys follow (foreign_keys.py)
    async with table.context.catalog.use() as connection:
        async with connection.transaction():
            if not await set_relation_state(
                connection, table.subscription.oid, table.relid, TableState.SYNCDONE, end, lacks_foreign_keys=marks
            ):
                raise StaleCatalog("the table was refreshed meanwhile")
            await copied_ranges.remove(connection, table.subscription.oid, table.relid)
        await reached(Point.SYNCDONE_STORED)
        if marks:
            table.tables.without_foreign_keys.add(table.relid)
        table.tables.move(table.relid, TableState.SYNCDONE, end)
