"""RangeCopy: copies one table by ranges of its key, each in a snapshot of its own.

Purpose. The table has no slot: the apply worker receives its changes in the main stream and decides them
(worker/apply/range_changes.py). subscriber/ranges/__init__.py has the rules. A table that cannot be divided is left to
TableSync (worker/tablesync/worker.py), which copies it in one snapshot.

Invariants.

- Rows and record of a range are one transaction of the target, which shows the fence of the progress record.
- The ranges in memory belong to one run. A run ends if others have replaced them.
- A range is being read before its transaction on the target begins. So a TRUNCATE that the apply worker executes
  does not wait for a copy that waits for the apply worker.

Failure cases. The worker, a server, or a connection between them ends.

- Before a range is committed: its rows roll back. The next run reads it again, and the others stay.
- The apply worker restarts: it claims the progress record, so the range rolls back, and the copy starts again.
- At the COMMIT of a range: the next run or the next apply worker claims the progress record, which waits for the
  transaction, and reads from the catalog whether it has committed.
- After the last range, before syncdone is stored: the next run finds all ranges copied, and builds the indexes that are
  missing (table_indexes.py). While an index is built, the apply worker waits with changes of the table.
- After syncdone is stored: the apply worker makes the table ready. The next apply worker drops origin and progress
  record (worker/leftover_slots.py).
- Failover of the publisher: the transactions of the snapshots may be lost. The table is emptied and copied again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from time import monotonic

import anyio

from subscriber import telemetry
from subscriber.apply.batch.binary_types import same_in_binary
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.progress import ProgressClaim
from subscriber.apply.relation_map import LocalRelation, RelationMapping, map_relation
from subscriber.apply.table_states import TableState
from subscriber.catalog import copy_jobs, names, origins
from subscriber.catalog.store import copied_ranges, progress_records
from subscriber.catalog.store.subscription_rel import load_relation_state, set_relation_state
from subscriber.connection.session import joined
from subscriber.errors import ServerError, StaleCatalog, SubscriberError
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.publisher import ranges as queries
from subscriber.publisher.tables import as_relation, copies_binary, copy_statement
from subscriber.quoting import qualified
from subscriber.ranges.key_types import ENUM
from subscriber.ranges.keys import KeyRangeError, RangeKey
from subscriber.ranges.table_ranges import KeyRange, RangeSnapshot, RangeState, TableRanges
from subscriber.sqlstate import PROGRESS_OUT_OF_STEP
from subscriber.subscription import CopyEngine, Subscription, TableCopy, TwoPhaseState
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.session.error_context import row_security
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql.row_statements import copy_from
from subscriber.worker.apply.range_changes import restore, stored_range
from subscriber.worker.apply.worker import log_conflict
from subscriber.worker.context import LauncherContext
from subscriber.worker.session.apply_session import claim, with_context, with_origin
from subscriber.worker.status import Report
from subscriber.worker.table_states import TableStates
from subscriber.worker.tablesync.sessions import SyncSessions
from subscriber.worker.tablesync.table_indexes import TableIndexes

_POLL = 0.02  # seconds
_PAUSE_POLL = 10.0  # seconds
_TIME_OF_DAY = "SELECT EXTRACT(epoch FROM LOCALTIME)::float8"
_LOG_DELAY = 10.0  # seconds after which a wait is logged
_WAIT_LIMIT = 600.0  # seconds after which a wait is an error
_MIN_ROWS, _MAX_ROWS = 1_000, 2_000_000


class RangeCopy:
    """One run of the copy of a table by ranges."""

    def __init__(
        self,
        subscription: Subscription,
        relid: int,
        context: LauncherContext,
        tables: TableStates,
        report: Report,
    ) -> None:
        """Create a copy.

        Args:
            subscription: the subscription.
            relid: OID of the table on the target.
            context: the launcher's context.
            tables: the states of the subscription's tables, shared with the apply worker.
            report: the status of this worker.
        """
        self.subscription = subscription
        self.relid = relid
        self._context = context
        self._catalog = context.catalog
        self._tables = tables
        self._report = report
        self._rows = context.settings.range_rows  # of the next range
        self._filenode: str | None = None  # of the published table, at the last range

    @property
    def is_wanted(self) -> bool:
        """True if the table is to be copied by ranges, if that is possible."""
        table = self._tables.get(self.relid)
        if self.relid == copy_jobs.COPY_JOB_RELID or table is None:
            return False
        if self._tables.copies.get(self.relid, TableCopy.COPY) is not TableCopy.COPY:
            return False
        uncopied = table.state in (TableState.INIT, TableState.DATASYNC)
        wanted = self.subscription.copy_engine is CopyEngine.RANGES or self.relid in self._tables.ranges
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
        async with sessions.target(self._name, self.relid, self._conflict) as target:
            self._target = target
            self._report.status.pid = target.rows.pipeline.session.pid
            try:
                if not await self._prepare():
                    return False
                await self._copy(origin)
            except SubscriberError as error:
                if error.sqlstate == PROGRESS_OUT_OF_STEP:
                    raise StaleCatalog("a new apply worker has claimed the progress of the copy") from error
                raise await with_context(error, target.rows, self._context.apply_target, self._catalog) from error
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
        is_stale = any(one.timeline != self._timeline for one in stored)
        copied = restore(stored, self._timeline)
        published = self._tables.sources.get(self.relid, (self._schema, self._name))
        self._table = await self._publisher.table(*published, self.subscription.publications)
        try:
            if self.relid in self._tables.sources or self._context.hooks.get(self.subscription.name) is not None:
                raise KeyRangeError("the program has hooks")
            if self.subscription.two_phase is TwoPhaseState.ENABLED:
                raise KeyRangeError("two-phase commit is enabled")
            self._key = await queries.range_key(self._publisher, self._table)
            await self._build_indexes(key_only=True)
            local = await copy_transaction.begin(self._target.rows, self._schema, self._name)
            await copy_transaction.roll_back(self._target.rows)
            # The last indexes are built when all ranges are copied.
            is_copied = copied is not None and copied.end is not None
            check_target(self._mapping(local), self._key, allow_unique=is_copied and not is_stale)
        except KeyRangeError as error:
            if is_stale:
                await self._empty()
            elif stored:
                raise SubscriberError(
                    f'the copy of table "{self._label}" by ranges cannot continue: {error}',
                    hint=f"Empty the table on the target. Drop it from the publication, run ALTER SUBSCRIPTION"
                    f" {self.subscription.name} REFRESH PUBLICATION, add it to the publication, and refresh again.",
                ) from error
            self._tables.ranges.pop(self.relid, None)
            telemetry.log(
                telemetry.LOG,
                f'table "{self._label}" is copied in one snapshot, because {error}',
                event="ranges.unsuitable",
                relation=self._label,
            )
            return False
        return True

    async def _build_indexes(self, *, key_only: bool = False) -> None:
        indexes = TableIndexes(self.subscription, self._context, self._report)
        published = (self._table.schema, self._table.name)
        await indexes.build(self._publisher, self.relid, (self._schema, self._name), published, key_only=key_only)

    def _mapping(self, local: LocalRelation) -> RelationMapping:
        return map_relation(as_relation(self._table), local, self._target.codec)

    async def _copy(self, origin: str) -> None:
        subid = self.subscription.oid
        async with self._catalog.use() as connection, connection.transaction():
            await origins.create_origin(connection, origin)
            await set_relation_state(connection, subid, self.relid, "d", None)
            await progress_records.save(connection, subid, self.relid, Lsn(0))
        reach(Point.DATASYNC_STORED)
        self._tables.move(self.relid, TableState.DATASYNC, Lsn(0))
        claimed = await claim(self._catalog, self.subscription, self.relid)
        if claimed is None:
            raise SubscriberError(f'progress of table "{self._label}" is missing in the catalog')
        async with with_origin(self._target.rows, claimed):
            await self._load(claimed)
            # Transactions that the apply worker has skipped before this point are not recorded.
            await self._wait_for_writers()
            self._report.status.copy_total_bytes = self._table.total_bytes
            self._set_state("copying")
            while (end := await self._wait_for_work()) is None:
                await self._wait_for_window()
                part = self._ranges.next_unread()
                if part is not None:
                    await self._copy_range(part, claimed)
            # All rows are those of one position of the stream, so unique constraints hold.
            await self._build_indexes()
            await self._store_done(end)

    async def _load(self, claimed: ProgressClaim) -> None:
        """Load the ranges that are copied, and let the apply worker decide changes by them."""
        async with self._catalog.use() as connection:
            rows = await copied_ranges.load(connection, self.subscription.oid, self.relid)
        if any(row.timeline != self._timeline for row in rows):
            await self._empty()
            rows = []
        ranges = restore(rows, self._timeline)
        if ranges is not None and ranges.key != self._key:
            raise SubscriberError(
                f'the replica identity of table "{self._label}" has changed on the publisher during its copy',
                hint="Give it the former replica identity until the table is copied.",
            )
        self._ranges = ranges or TableRanges(self._key, self._timeline)
        self._tables.ranges[self.relid] = self._ranges
        self._tables.notify()

    async def _empty(self) -> None:
        """Delete the rows of ranges whose transactions a failover of the publisher may have lost."""
        telemetry.log(
            telemetry.LOG,
            f'table "{self._label}" is emptied and copied again, because the publisher has another timeline',
            event="ranges.restarted",
            relation=self._label,
        )
        rows = self._target.rows
        local = await copy_transaction.begin(rows, self._schema, self._name)
        await copy_transaction.copy_as(rows, self._mapping(local))
        await rows.pipeline.session.query(f"DELETE FROM {qualified(self._schema, self._name)}")
        rows.pipeline.attach()
        await copy_transaction.commit(rows)
        async with self._catalog.use() as connection:
            await copied_ranges.remove(connection, self.subscription.oid, self.relid)

    async def _wait_for_writers(self) -> None:
        """Wait until snapshots see all transactions that have written to the table before now."""
        self._set_state("waiting for transactions that write to the table")
        waiting = await queries.writers(self._publisher, self._table)
        wait = _Wait(f'transactions that write to table "{self._label}" on the publisher')
        while waiting:
            await wait.poll()
            waiting &= await queries.writers(self._publisher, self._table)

    # --- ranges ---------------------------------------------------------------------------------

    async def _wait_for_window(self) -> None:
        """Wait until the time of the day allows to copy ranges (`range_window`)."""
        window, is_paused = self._context.settings.range_window, False
        while window is not None:
            async with self._catalog.use() as connection:
                wait = window.seconds_until_open(float(await connection.fetchval(_TIME_OF_DAY)))
            if not wait:
                return
            if not is_paused:
                is_paused = True
                self._set_state(f"paused outside of range_window {window}")
                telemetry.log(
                    telemetry.LOG,
                    f'the copy of table "{self._label}" pauses outside of range_window {window}',
                    event="ranges.paused",
                    relation=self._label,
                )
            # Otherwise the skipped transactions would be remembered until the next range.
            self._ranges.forget_seen(await queries.current_snapshot(self._publisher))
            await anyio.sleep(min(wait, _PAUSE_POLL))
            self._check_current()

    async def _wait_for_work(self) -> Lsn | None:
        """Wait until a range can be copied. Returns the end of the copy if all are copied and no change needs them."""
        ranges = self._ranges
        while True:
            self._check_current()
            end = ranges.end
            if not ranges.unsettled and (end is None or ranges.settled >= end):
                return end
            if not ranges.unsettled and ranges.next_unread() is not None:
                return None
            self._set_state("waiting for the apply worker")
            ranges.awaited = True
            self._tables.notify()
            await self._tables.wait_until(lambda: not ranges.awaited or not self._is_current)
            await anyio.sleep(_POLL)
            self._set_state("copying")

    @property
    def _is_current(self) -> bool:
        return self._tables.ranges.get(self.relid) is self._ranges

    def _check_current(self) -> None:
        if not self._is_current:
            raise StaleCatalog("the ranges of the table were loaded again")

    async def _copy_range(self, part: KeyRange, claimed: ProgressClaim) -> None:
        """Copy one range, or the first rows of it."""
        started = monotonic()
        if not part.single:
            condition = part.condition(self._key)
            at = await queries.boundary(self._publisher, self._table, self._key, condition, self._rows)
            if at is not None and part.state is RangeState.UNREAD:
                self._ranges.split(part, at)
        read_in = await self._begin(part)
        if read_in is None:
            return
        try:
            read_at = await self._publisher.now()
            await self._copy_rows(part, claimed, read_at)
        except BaseException:
            # The result of a COMMIT is unknown. The next run reads it from the catalog.
            if part.state is RangeState.READING:
                part.reset()
            self._tables.notify()
            raise
        factor = self._context.settings.range_duration / max(monotonic() - started, 0.001)
        least = min(_MIN_ROWS, self._context.settings.range_rows)
        self._rows = int(min(max(self._rows * min(max(factor, 0.5), 2.0), least), _MAX_ROWS))

    async def _begin(self, part: KeyRange) -> RangeSnapshot | None:
        """Take a snapshot that sees all transactions whose changes of the range were skipped.

        Returns:
            None if the apply worker has to apply transactions first.
        """
        wait = _Wait(f'skipped transactions of table "{self._label}" in snapshots of the publisher')
        while True:
            read_in = await queries.begin(self._publisher, self._table)
            self._check_current()
            if await self._is_truncated(read_in):
                continue
            if not self._ranges.unsettled and part.begin(read_in):
                reach(Point.SNAPSHOT_TAKEN)
                self._ranges.forget_seen(read_in.snapshot)
                return read_in
            await self._publisher.commit()
            if self._ranges.unsettled:
                return None
            await wait.poll()

    async def _is_truncated(self, read_in: RangeSnapshot) -> bool:
        """Return True after a TRUNCATE since the last range, when the apply worker has executed it.

        If only the publisher can compare keys, the target cannot delete the rows of single ranges. So no range is read
        that contains a TRUNCATE which others do not contain. A new run of the copy does not know the last file.
        """
        if not self._key.is_compared_by_publisher:
            return False
        before, self._filenode = self._filenode, await queries.filenode(self._publisher, self._table)
        if before == self._filenode or not any(one.state is RangeState.COPIED for one in self._ranges):
            return False
        await self._publisher.commit()
        ranges = self._ranges
        while ranges.settled < read_in.lsn:
            self._set_state("waiting for the apply worker")
            ranges.awaited = True
            self._tables.notify()
            await self._tables.wait_until(lambda: not ranges.awaited or not self._is_current)
            self._check_current()
            await anyio.sleep(_POLL)
        self._set_state("copying")
        return True

    async def _copy_rows(self, part: KeyRange, claimed: ProgressClaim, read_at: datetime) -> None:
        """Copy the rows of a range that is being read, and commit them with its record."""
        rows, status = self._target.rows, self._report.status
        local = await copy_transaction.begin(rows, self._schema, self._name)
        mapping = self._mapping(local)
        session = rows.pipeline.session
        binary = copies_binary(self.subscription.binary or False, self._publisher.server_version)
        binary = binary or same_in_binary(mapping)
        condition = part.condition(self._key)
        await copy_transaction.copy_as(rows, mapping)
        # The row of a single key may be there: its last changes were skipped.
        if part.single:
            there = part.condition(self._key, on_target=True)
            await session.query(f"DELETE FROM {qualified(self._schema, self._name)} WHERE {there}")
        copy_into = copy_from(local.schema, local.name, [column.name for column in mapping.attributes], binary)
        copied_before = status.copy_rows
        try:
            tag = await session.copy_in(
                copy_into, self._chunks(copy_statement(self._table, binary=binary, condition=condition))
            )
        except ServerError as error:
            raise row_security(error, mapping, rows.roles) from error
        status.copy_rows = copied_before + int(tag.split()[-1])
        await self._publisher.commit()
        assert part.read_in is not None
        await self._wait_for_flush(part.read_in.lsn)
        record = stored_range(part.row or 0, self.relid, self._ranges, part)
        progress = ProgressRecord(claimed, with_origin=False)
        await copy_transaction.end_range(rows, mapping, progress, record, read_at)
        reach(Point.COPIED)
        self._check_current()
        if not part.accept():
            raise StaleCatalog("a range is read again, because a change has not waited for it")
        await copy_transaction.commit(rows)
        reach(Point.COPY_COMMITTED)
        part.state = RangeState.COPIED
        self._tables.notify()

    async def _wait_for_flush(self, position: Lsn) -> None:
        """Wait until a crash of the publisher cannot undo transactions that a snapshot sees."""
        wait = _Wait(f"the flush of the publisher's WAL up to {position}")
        while not await queries.is_flushed(self._publisher, position):
            await wait.poll()

    async def _chunks(self, statement: str) -> AsyncIterator[bytes]:
        status = self._report.status
        async for payloads in self._publisher.session.copy_out(statement):
            status.copy_rows += len(payloads)
            size = sum(map(len, payloads))
            status.copy_bytes += size
            await self._context.copy_rate.spend(size)
            for chunk in joined(payloads):
                yield chunk
                # A large chunk must not stay in memory while the next one is received.
                del chunk

    # --- after the last range -------------------------------------------------------------------

    async def _store_done(self, end: Lsn) -> None:
        """Store syncdone. The apply worker has applied and committed all changes before `end`."""
        async with self._catalog.use() as connection:
            async with connection.transaction():
                if not await set_relation_state(connection, self.subscription.oid, self.relid, "s", end):
                    raise StaleCatalog("the table was refreshed meanwhile")
                await copied_ranges.remove(connection, self.subscription.oid, self.relid)
            reach(Point.SYNCDONE_STORED)
            self._tables.ranges.pop(self.relid, None)
            self._tables.move(self.relid, TableState.SYNCDONE, end)

    def _set_state(self, state: str) -> None:
        self._report.status.state = state

    def _conflict(self, found: Conflict, note: StatementContext) -> None:
        self._report.counts[f"confl_{found.type}"] += 1
        log_conflict(names.table_sync_origin(self.subscription.oid, self.relid), found, note)


def check_target(mapping: RelationMapping, key: RangeKey, *, allow_unique: bool = False) -> None:
    """Check that rows of different snapshots can be in the target's table together.

    Args:
        mapping: the table.
        key: the columns of the ranges.
        allow_unique: all ranges are copied, so other unique indexes are allowed.

    Raises:
        KeyRangeError: they cannot. The message is the reason.
    """
    local = mapping.local
    if local.partitioned:
        raise KeyRangeError("the table of the target is partitioned")
    if local.other_unique and not allow_unique:
        raise KeyRangeError("the table of the target has another unique index or an exclusion constraint")
    if mapping.unsearchable is not None or not local.identity:
        raise KeyRangeError("the table of the target has no index on the key")
    found = {column.name: column.batch_info for column in mapping.attributes}
    for column in key.columns:
        info = found[column.name]
        if info is None or (column.type is not ENUM and info.type_oid != column.type_oid):
            raise KeyRangeError(f'key column "{column.name}" has another type on the target')


class _Wait:
    """A wait with a log line and a limit."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = monotonic()
        self._logged = False

    async def poll(self) -> None:
        """Sleep for a moment. Raises SubscriberError at the limit."""
        waited = monotonic() - self._started
        if waited > _WAIT_LIMIT:
            raise SubscriberError(
                f"the copy of a table has waited {_WAIT_LIMIT:g} s for {self._what}",
                hint="Find long transactions in pg_stat_activity of the publisher by xact_start.",
            )
        if waited > _LOG_DELAY and not self._logged:
            self._logged = True
            telemetry.log(telemetry.LOG, f"waiting for {self._what}", event="ranges.waiting")
        await anyio.sleep(_POLL)
