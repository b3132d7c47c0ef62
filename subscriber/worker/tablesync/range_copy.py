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

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.progress import ProgressClaim
from subscriber.apply.relation_map import LocalRelation, RelationMapping, map_relation
from subscriber.apply.table_states import TableState
from subscriber.catalog import copy_jobs, names, origins
from subscriber.catalog.commands.ownership import refuse_deletion
from subscriber.catalog.store import copied_ranges, progress_records
from subscriber.catalog.store.subscription_rel import load_relation_state, set_relation_state
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.catalog.store.workers import WorkerState
from subscriber.errors import ConnectionLost, ServerError, StaleCatalog, SubscriberError
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.publisher import ranges as queries
from subscriber.publisher.connection import Publisher
from subscriber.publisher.tables import as_relation
from subscriber.ranges.keys import KeyRangeError
from subscriber.ranges.table_ranges import TableRanges
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, PROGRESS_OUT_OF_STEP
from subscriber.subscription import CopyEngine, CopyIndexes, Subscription, TableCopy, TwoPhaseState
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql.owned_rows import owned_rows
from subscriber.worker.apply.range_changes import restore
from subscriber.worker.apply.worker import log_conflict
from subscriber.worker.context import LauncherContext
from subscriber.worker.exception_groups import root_cause
from subscriber.worker.limited_wait import LimitedWait
from subscriber.worker.published_definitions import read_definition
from subscriber.worker.session.apply_session import claim
from subscriber.worker.status import Report
from subscriber.worker.table_indexes import TableIndexes
from subscriber.worker.table_states import TableStates, building_indexes
from subscriber.worker.tablesync.places import SyncPlaces
from subscriber.worker.tablesync.range_conditions import check_target
from subscriber.worker.tablesync.range_session import DividedTable, RangeSession
from subscriber.worker.tablesync.sessions import SyncSessions

_PAUSE_POLL = 10.0  # seconds
_Definition = TypeVar("_Definition")
_TIME_OF_DAY = "SELECT EXTRACT(epoch FROM LOCALTIME)::float8"


class RangeCopy:
    """One run of the copy of a table by ranges."""

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
        self._catalog = context.catalog
        self._tables = tables
        self._report = report
        self._places = places
        self._can_share = True
        self._indexes = TableIndexes(subscription, context, report)

    @property
    def is_wanted(self) -> bool:
        """True if the table is to be copied by ranges, if that is possible."""
        table = self._tables.get(self.relid)
        if self.relid == copy_jobs.COPY_JOB_RELID or table is None:
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
        subid = self.subscription.oid
        self._schema, self._name = self._tables.names[self.relid]
        self._label = f"{self._schema}.{self._name}"
        origin = names.table_sync_origin(subid, self.relid)
        self._publisher = await sessions.publisher(f"{self.subscription.name} {self._name}")
        async with sessions.target(self._name, self.relid, self._conflict) as worker:
            self._worker = worker
            self._report.connected(worker.session.pipeline.session.pid)
            try:
                if not await self._prepare():
                    return False
                await self._copy(origin)
            except SubscriberError as error:
                explained = await worker.explain(error)
                if explained.sqlstate == PROGRESS_OUT_OF_STEP:
                    raise StaleCatalog("a new apply worker has claimed the progress of the copy") from error
                raise explained from error
        async with self._catalog.use() as connection, connection.transaction():
            await origins.drop_origin(connection, origin, missing_ok=True)
            await progress_records.remove(connection, subid, self.relid)
        return True

    # --- before the first range -----------------------------------------------------------------

    async def _prepare(self) -> bool:
        """Read the table's definition on both sides. Returns False if it cannot be copied by ranges."""
        async with self._catalog.use() as connection:
            row = await load_relation_state(connection, self.subscription.oid, self.relid)
            if row is not None:
                self._tables.correct(row)
            copy = await copy_jobs.load(connection, self.subscription.oid)
            # The table was removed from the subscription and added again.
            if row is not None and row.state == TableState.INIT.value:
                await copied_ranges.remove(connection, self.subscription.oid, self.relid)
            stored = await copied_ranges.load(connection, self.subscription.oid, self.relid)
        table = self._tables.get(self.relid)
        if table is None or table.state not in (TableState.INIT, TableState.DATASYNC):
            raise StaleCatalog("the table has been synchronized meanwhile")
        if copy is not None and self.relid in copy.parts:
            raise StaleCatalog("the table is being copied with others")
        await self._publisher.restrict_views()
        self._timeline = (await self._publisher.identify_system()).timeline
        self._tables.timeline.found = self._timeline
        # The apply worker may have sent changes of ranges whose transactions the failover has lost.
        if self._tables.timeline.has_changed:
            self._tables.notify()
            raise ConnectionLost(
                f"the publisher has timeline {self._timeline}, and the apply worker's stream began on timeline"
                f" {self._tables.timeline.started}",
                detail="The copy continues when the apply worker has started again.",
            )
        is_stale = any(one.timeline != self._timeline for one in stored)
        copied = restore(stored, self._timeline)
        published = self._tables.sources.get(self.relid, (self._schema, self._name))
        self._published = await self._read(lambda: self._publisher.table(*published, self.subscription.publications))
        try:
            if self.relid in self._tables.sources or self._context.hooks.get(self.subscription.name) is not None:
                raise KeyRangeError("the program has hooks")
            if self.subscription.two_phase is TwoPhaseState.ENABLED:
                raise KeyRangeError("two-phase commit is enabled")
            if self.subscription.origin != "any":
                # The rows of a range have all origins, and its later changes only some.
                raise KeyRangeError(f"the subscription has origin = {self.subscription.origin}")
            self._key = await self._read(
                lambda: queries.range_key(self._publisher, self._published, self.subscription.publications)
            )
            # The apply worker may be about to add the same constraint.
            async with building_indexes(self._tables, self.relid):
                builds_key = await self._indexes.prepare_key(*self._index_arguments)
            # The last indexes are built when all ranges are copied.
            is_copied = copied is not None and copied.end is not None and not is_stale
            await self._check_target(is_first=not stored, allow_unique=is_copied, builds_key=builds_key)
        except KeyRangeError as error:
            if is_stale:
                await self._empty()
            elif stored:
                raise SubscriberError(
                    f'the copy of table "{self._label}" by ranges cannot continue: {error}',
                    hint="Delete the subscription's rows of the table on the target. Drop it from the publication, run"
                    f" ALTER SUBSCRIPTION"
                    f" {self.subscription.name} REFRESH PUBLICATION, add it to the publication, and refresh again.",
                ) from error
            await self._leave()
            telemetry.log(
                telemetry.LOG,
                f'table "{self._label}" is copied in one snapshot, because {error}',
                event="ranges.unsuitable",
                relation=self._label,
            )
            return False
        return True

    async def _check_target(self, *, is_first: bool, allow_unique: bool, builds_key: bool) -> None:
        """Check the conditions of check_target().

        Args:
            is_first: no range is copied, so the table has to be empty. A copy in one snapshot adds all rows, or none
                if one of them is a duplicate. After a failover, ranges have to be emptied without the table's own rows.
            allow_unique: see check_target().
            builds_key: see check_target().

        Raises:
            KeyRangeError: the table cannot be copied by ranges.
        """
        session = self._worker.session
        local = await copy_transaction.begin(session, self._schema, self._name)
        self._tables.find(local)  # raises an error if another table has the name
        mapping, checks = self._mapping(local), await copy_transaction.read_checks(session, local)
        reason = ""
        if is_first:
            try:
                if await copy_transaction.has_rows(session, mapping):
                    reason = "the table of the target has rows"
            except ServerError as error:
                if error.sqlstate != INSUFFICIENT_PRIVILEGE:
                    raise
                reason = "the role may not read the table of the target"
            session.pipeline.attach()
        await copy_transaction.roll_back(session)
        if reason:
            raise KeyRangeError(reason)
        check_target(mapping, self._key, checks, allow_unique=allow_unique, builds_key=builds_key)

    async def _read(self, query: Callable[[], Awaitable[_Definition]]) -> _Definition:
        return await read_definition(self._publisher, self._label, query)

    @property
    def _index_arguments(self) -> tuple[Publisher, int, tuple[str, str], tuple[str, str]]:
        published = (self._published.schema, self._published.name)
        return self._publisher, self.relid, (self._schema, self._name), published

    def _mapping(self, local: LocalRelation) -> RelationMapping:
        return map_relation(as_relation(self._published), local, self._worker.session.pipeline.codec)

    async def _copy(self, origin: str) -> None:
        async with AsyncExitStack() as stack:
            async with self._tables.claiming:
                claimed = await self._claim(origin)
                await stack.enter_async_context(self._worker.with_origin(claimed))
                ranges = await self._load()
            self._table = DividedTable(
                self.subscription,
                self.relid,
                self._schema,
                self._name,
                self._published,
                ranges,
                claimed,
                self._context,
                self._tables,
                self._report,
                self._context.settings.range_rows,
            )
            # Transactions that the apply worker has skipped before this point are not recorded.
            await self._wait_for_writers()
            self._report.status.copy_total_bytes = self._published.total_bytes
            self._report.enter(WorkerState.COPYING)
            try:
                async with anyio.create_task_group() as tasks:
                    end = await self._copy_ranges(tasks)
            except ExceptionGroup as group:
                raise root_cause(group) from group
            # All rows are those of one position of the stream, so unique constraints hold.
            async with building_indexes(self._tables, self.relid):
                await self._indexes.build(*self._index_arguments)
            await reached(Point.LAST_INDEX_BUILT)
            await self._store_done(end)

    async def _claim(self, origin: str) -> ProgressClaim:
        """Store that the table is being copied, and claim its progress record."""
        subid = self.subscription.oid
        async with self._catalog.use() as connection, connection.transaction():
            await origins.create_origin(connection, origin)
            await set_relation_state(connection, subid, self.relid, TableState.DATASYNC, None)
            await progress_records.save(connection, subid, self.relid, Lsn(0))
        await reached(Point.DATASYNC_STORED)
        self._tables.move(self.relid, TableState.DATASYNC, Lsn(0))
        claimed = await claim(self._catalog, self.subscription, self.relid)
        if claimed is None:
            raise SubscriberError(f'progress of table "{self._label}" is missing in the catalog')
        return claimed

    async def _load(self) -> TableRanges:
        """Load the ranges that are copied, and let the apply worker decide changes by them."""
        async with self._catalog.use() as connection:
            rows = await copied_ranges.load(connection, self.subscription.oid, self.relid)
        await reached(Point.RANGES_READ)
        if any(row.timeline != self._timeline for row in rows):
            await self._empty()
            rows = []
        ranges = restore(rows, self._timeline)
        if ranges is not None and ranges.key != self._key:
            raise SubscriberError(
                f'the replica identity of table "{self._label}" has changed on the publisher during its copy',
                hint="Give it the former replica identity until the table is copied.",
            )
        ranges = ranges or TableRanges(self._key, self._timeline)
        table = self._tables.get(self.relid)
        if table is None:
            raise StaleCatalog("the table was removed meanwhile")
        if table.ranges is not None:
            ranges.succeed(table.ranges)
        table.ranges = ranges
        self._tables.notify()
        return ranges

    async def _leave(self) -> None:
        """Leave the table to a copy in one snapshot, when the apply worker has executed its statements for the table.

        Otherwise a TRUNCATE that the snapshot contains would empty the table after the copy.
        """
        table = self._tables.get(self.relid)
        if table is not None and table.ranges is not None and table.ranges.unsettled:
            self._report.enter(WorkerState.WAITING_FOR_APPLY_WORKER)
            await self._tables.wait_until(lambda: table.ranges is None or not table.ranges.unsettled)
        if table is not None:
            table.ranges = None

    async def _empty(self) -> None:
        """Delete the rows of ranges whose transactions a failover of the publisher may have lost.

        Raises:
            StatementError: rows of the table may belong to another subscription.
        """
        async with self._catalog.use() as connection:
            ownership = await load_ownership(connection, self.subscription)
        found = ownership.of(self.relid, (self._schema, self._name))
        refuse_deletion(self.subscription.name, (self._schema, self._name), found)
        telemetry.log(
            telemetry.LOG,
            f'table "{self._label}" is emptied and copied again, because the publisher has another timeline',
            event="ranges.restarted",
            relation=self._label,
        )
        session = self._worker.session
        local = await copy_transaction.begin(session, self._schema, self._name)
        await copy_transaction.copy_as(session, self._mapping(local))
        owned = owned_rows(ownership.rules, local) or "true"
        await session.pipeline.session.query(f"DELETE FROM {local.only} WHERE {owned}")
        session.pipeline.attach()
        await copy_transaction.commit(session)
        async with self._catalog.use() as connection:
            await copied_ranges.remove(connection, self.subscription.oid, self.relid)

    async def _wait_for_writers(self) -> None:
        """Wait until snapshots see all transactions that have written to the table before now."""
        self._report.enter(WorkerState.WAITING_FOR_WRITERS)
        waiting = await queries.writers(self._publisher, self._published)
        wait = LimitedWait(f'transactions that write to table "{self._label}" on the publisher')
        while waiting:
            await wait.poll()
            waiting &= await queries.writers(self._publisher, self._published)

    # --- ranges ---------------------------------------------------------------------------------

    async def _copy_ranges(self, tasks: TaskGroup) -> Lsn:
        """Copy all ranges, with more sessions while synchronization workers have free places. Returns the end."""
        session = RangeSession(self._table, self._publisher, self._worker.session)
        # If only the publisher compares keys, ranges can be restored only if all ranges before them are copied.
        self._can_share = not self._key.is_compared_by_publisher
        while (end := await self._wait_for_work()) is None:
            await self._wait_for_window()
            while self._can_share and (number := self._places.take()) is not None:
                tasks.start_soon(self._share, number)
            await session.copy_next()
        return end

    async def _share(self, number: int) -> None:
        """Copy ranges with other sessions, until none is left or another table needs the place `number`."""
        context = self._context
        sessions = SyncSessions(
            self.subscription,
            context.apply_target,
            self._catalog,
            context.resolvers,
            context.settings,
            context.changed_sessions,
        )
        try:
            await self._copy_with(sessions, number)
        finally:
            sessions.close()
            self._places.give_back(number)
            self._tables.notify()

    async def _copy_with(self, sessions: SyncSessions, number: int) -> None:
        table, is_open = self._table, False
        try:
            async with AsyncExitStack() as stack:
                publisher = await sessions.publisher(f"{self.subscription.name} {self._name}")
                await publisher.restrict_views()
                worker = await stack.enter_async_context(sessions.target(self._name, number, self._conflict))
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
                f'table "{self._label}" is copied in fewer sessions than max_sync_workers allows',
                detail=error.message,
                hint="Sessions need max_connections on both servers, max_wal_senders on the publisher, and for"
                " their origins max_active_replication_origins on the target.",
                event="ranges.fewer_sessions",
                relation=self._label,
            )
            return
        async with self._catalog.use() as connection:
            origin = names.table_sync_origin(self.subscription.oid, number)
            await origins.drop_origin(connection, origin, missing_ok=True)

    async def _seconds_until_open(self) -> float:
        """Return the seconds until `range_window` allows to copy ranges."""
        window = self._context.settings.range_window
        if window is None:
            return 0.0
        async with self._catalog.use() as connection:
            return window.seconds_until_open(float(await connection.fetchval(_TIME_OF_DAY)))

    async def _wait_for_window(self) -> None:
        """Wait until the time of the day allows to copy ranges (`range_window`)."""
        is_paused = False
        while wait := await self._seconds_until_open():
            if not is_paused:
                is_paused = True
                window = self._context.settings.range_window
                self._report.enter(WorkerState.PAUSED, f" {window}")
                telemetry.log(
                    telemetry.LOG,
                    f'the copy of table "{self._label}" pauses outside of range_window {window}',
                    event="ranges.paused",
                    relation=self._label,
                )
            # Otherwise the skipped transactions would be remembered until the next range.
            self._table.ranges.forget_seen(await queries.current_snapshot(self._publisher))
            await anyio.sleep(min(wait, _PAUSE_POLL))
            self._table.check_current()

    async def _wait_for_work(self) -> Lsn | None:
        """Wait until a range can be copied. Returns the end of the copy if all are copied and no change needs them."""
        table, ranges = self._table, self._table.ranges
        while True:
            await self._tables.wait_until(lambda: not table.is_indexed or not table.is_current)
            table.check_current()
            if not ranges.unsettled:
                if ranges.next_unread() is not None:
                    return None
                end = ranges.end
                if end is not None and ranges.settled >= end:
                    return end
                if ranges.is_taken:
                    await self._tables.wait_until(
                        lambda: not ranges.is_taken or ranges.next_unread() is not None or not table.is_current
                    )
                    continue
            self._report.enter(WorkerState.WAITING_FOR_APPLY_WORKER)
            await table.wait_for_apply_worker()
            self._report.enter(WorkerState.COPYING)

    # --- after the last range -------------------------------------------------------------------

    async def _store_done(self, end: Lsn) -> None:
        """Store syncdone. The apply worker has applied and committed all changes before `end`."""
        marks = self.subscription.copy_indexes is CopyIndexes.AFTER  # foreign keys follow (foreign_keys.py)
        async with self._catalog.use() as connection:
            async with connection.transaction():
                if not await set_relation_state(
                    connection, self.subscription.oid, self.relid, TableState.SYNCDONE, end, lacks_foreign_keys=marks
                ):
                    raise StaleCatalog("the table was refreshed meanwhile")
                await copied_ranges.remove(connection, self.subscription.oid, self.relid)
            await reached(Point.SYNCDONE_STORED)
            if marks:
                self._tables.without_foreign_keys.add(self.relid)
            self._tables.move(self.relid, TableState.SYNCDONE, end)

    def _conflict(self, found: Conflict, note: StatementContext) -> None:
        self._report.counts[f"confl_{found.type}"] += 1
        log_conflict(names.table_sync_origin(self.subscription.oid, self.relid), found, note)
