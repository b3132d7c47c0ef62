"""TableSync: the table synchronization worker. It copies one table, catches up, and hands it to the apply worker.

Invariants.

- apply/table_states.py describes the states, and explains why no change is lost.
- A table needs no stream to catch up if the apply worker has skipped no change of the table since the snapshot
  (worker/table_states.py).
- A table that has rows already may be compared instead (comparison.py). The steps before and after are the same.
- A table whose types are all built in and the same on both sides is copied in binary, which servers read and write
  faster.

Failure cases. The worker, a server, or a connection between them ends.

- Before datasync is stored: nothing has changed. The next worker starts from the beginning.
- In datasync, before or after the slot is created: the transaction of the copy rolls back. The slot and the origin may
  remain. The next worker drops the slot. The transaction of its copy sets origin and progress record.
- At the commit of the copy: rows, progress record (the snapshot's position) and state finishedcopy are in one
  transaction. If it was not committed, the next worker copies again. It reads the state after it has its place, because
  the backend of the earlier worker can still commit until then.
- In finishedcopy, while indexes are built: worker/table_indexes.py.
- In finishedcopy, syncwait, catchup: progress is committed with the changes. The slot has all later changes, because a
  position is confirmed only when it is durable.
- In catchup without a change to catch up with: the state returns to finishedcopy. A new apply worker has not seen the
  changes since the snapshot. In this case the next synchronization worker streams them.
- After syncdone is stored, before the slot is dropped: the state was committed synchronously, so all applied changes
  are durable. The next apply worker drops slot, origin and progress record (worker/leftover_slots.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from subscriber import names, telemetry
from subscriber.apply.batch.binary_types import same_in_binary
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.hooks.table_hook import TableHook, bind
from subscriber.apply.progress import Progress, ProgressClaim
from subscriber.apply.relation_map import LocalRelation, map_relation
from subscriber.apply.table_states import NOWHERE, TableState
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog import origins
from subscriber.catalog.commands.ownership import refuse_deletion
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_rel import load_relation_state, set_extra, set_relation_state
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.catalog.store.workers import WorkerState
from subscriber.connection.session import joined_chunks
from subscriber.errors import ServerError, StaleCatalog, SubscriberError
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import join_line, split_line
from subscriber.protocol.messages import Relation, ReplicaIdentity, Truncate
from subscriber.publisher.commands import negotiated_streaming
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import limit_status_interval, read_sender_timeout
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.publisher.subscriptions import stream_options
from subscriber.publisher.tables import as_relation, copies_binary, copy_statement
from subscriber.subscription import CopyIndexes, Subscription, TableCopy
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.session.error_context import row_security
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.sql.row_statements import copy_from
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.worker_session import WorkerSession, claim, release_origin
from subscriber.worker.apply.loop import ApplyLoop, Durability
from subscriber.worker.apply.transactions import TransactionKinds
from subscriber.worker.apply_hooks import ApplyHooks
from subscriber.worker.conflict_log import log_conflict
from subscriber.worker.context import LauncherContext, open_spool
from subscriber.worker.status import Report
from subscriber.worker.streaming.spooled_transactions import SpooledTransactions
from subscriber.worker.table_indexes import TableIndexes
from subscriber.worker.table_states import TableStates
from subscriber.worker.tablesync.copied_rows import CopyReader
from subscriber.worker.tablesync.sessions import SyncSessions
from subscriber.worker.wal_flush import flush_for

if TYPE_CHECKING:
    from subscriber.worker.tablesync.comparison import SyncComparison


class TableSync(ApplyHooks):
    """One run of a table synchronization worker."""

    def __init__(
        self,
        subscription: Subscription,
        relid: int,
        context: LauncherContext,
        tables: TableStates,
        report: Report,
    ) -> None:
        """Create a worker.

        Args:
            subscription: the subscription.
            relid: OID of the table on the target.
            context: the launcher's context.
            tables: the states of the subscription's tables, shared with the apply worker.
            report: the status of this worker.
        """
        sync_id = context.sync_id
        self.table_hooks = context.hooks.get(subscription.name)
        self.subscription = subscription
        self.relid = relid
        self.schema, self.table = tables.names[relid]
        self.slot = names.table_sync_slot(subscription.oid, relid, sync_id)
        self._context = context
        self._catalog = context.catalog
        self._flusher = context.flusher
        self._tables = tables
        self._report = report
        self._settings = context.settings
        self._spool = open_spool(context.settings, sync_id, subscription.oid, relid)
        self._catchup: Lsn | None = None
        self._marks = subscription.copy_indexes is CopyIndexes.AFTER  # foreign keys follow (foreign_keys.py)

    async def run(self, sessions: SyncSessions) -> None:
        """Synchronize the table, up to the removal of its slot.

        Args:
            sessions: the sessions to use. Afterwards another table can use them, unless this method raises an error.

        Raises:
            StaleCatalog: the table was synchronized by another worker.
            SubscriberError: any other error, with its CONTEXT.

        Cancellation: the copy or the open transaction rolls back. `sessions` must be closed.
        """
        origin = names.table_sync_origin(self.subscription.oid, self.relid)
        publisher = await sessions.publisher(self.slot)
        async with sessions.target(self.table, self.relid, self._conflict) as worker:
            self._report.connected(worker.session.pipeline.session.pid)
            try:
                await self._copy_if_needed(worker, publisher, origin)
                await self._build_indexes(publisher)
                await self._catch_up(worker, sessions)
            except SubscriberError as error:
                raise await worker.explain(error) from error
        await self._finish(origin, await sessions.publisher(self.slot))

    # --- the copy -------------------------------------------------------------------------------

    async def _copy_if_needed(self, worker: WorkerSession, publisher: Publisher, origin: str) -> None:
        """Copy the table, unless an earlier worker has done so."""
        state = await self._stored_state()
        if state in (TableState.SYNCDONE, TableState.READY):
            raise StaleCatalog("the table has been synchronized meanwhile")
        if state not in (TableState.INIT, TableState.DATASYNC):
            return
        how = self._tables.copies.get(self.relid, TableCopy.COPY)
        if state is TableState.DATASYNC or how is not TableCopy.COPY:
            await publisher.drop_slot(self.slot, missing_ok=True)
        async with self._catalog.use() as connection, connection.transaction():
            await origins.create_origin(connection, origin)
            await set_relation_state(connection, self.subscription.oid, self.relid, TableState.DATASYNC, None)
            await progress_records.save(connection, self.subscription.oid, self.relid, Lsn(0))
        await reached(Point.DATASYNC_STORED)
        self._tables.move(self.relid, TableState.DATASYNC, Lsn(0))
        if how is TableCopy.TRUNCATE:
            await self._empty(worker)
        if how in (TableCopy.COMPARE, TableCopy.DELETE_EXTRA) and await self._has_rows(worker):
            deletes = how is TableCopy.DELETE_EXTRA
            position = await self._compare(worker, publisher, origin, delete_extra=deletes)
        else:
            claimed = await self._claim()
            # Copied rows have the origin, as applied changes have, so that a downstream `origin = none` excludes them.
            async with worker.with_origin(claimed):
                position = await self._copy(worker.session, publisher, claimed)
        self._tables.move(self.relid, TableState.FINISHEDCOPY, position)

    async def _stored_state(self) -> TableState:
        """Read the table's state from the catalog, after this worker has claimed the table.

        An earlier worker may have committed its copy after the tables were loaded, without receiving the result.
        """
        async with self._catalog.use() as connection:
            row = await load_relation_state(connection, self.subscription.oid, self.relid)
            if row is not None:
                self._tables.correct(row)
        return self._state()

    async def _claim(self) -> ProgressClaim:
        claimed = await claim(self._catalog, self.subscription, self.relid)
        if claimed is None:
            raise SubscriberError(f'progress of table "{self.schema}.{self.table}" is missing in the catalog')
        return claimed

    async def _copy(self, session: TargetSession, publisher: Publisher, claimed: ProgressClaim) -> Lsn:
        """Create the slot, copy the table from its snapshot, and return the snapshot's position."""
        self._report.enter(WorkerState.COPYING)
        local = await copy_transaction.begin(session, self.schema, self.table)
        self._tables.find(local)
        await publisher.restrict_views()
        await publisher.begin_snapshot()
        slot = await publisher.create_slot(self.slot, snapshot="use", failover=self.subscription.failover)
        await reached(Point.SLOT_CREATED)
        read_at = await publisher.now()
        source = self._tables.sources.get(self.relid, (self.schema, self.table))
        table = await publisher.table(*source, self.subscription.publications)
        codec = session.pipeline.codec
        hook = bind(self.table_hooks, as_relation(table), codec) if self.table_hooks is not None else None
        mapping = map_relation(as_relation(table) if hook is None else hook.relation, local, codec)
        if hook is not None:
            hook.fit(mapping)
            if not hook.reads_values:
                table = replace(table, columns=tuple(table.columns[i] for i in hook.kept))
        self._report.copies(table.total_bytes)
        binary = copies_binary(self.subscription.binary or False, publisher.server_version) or same_in_binary(mapping)
        binary = binary and not (hook is not None and hook.reads_values)
        copy_into = copy_from(local.schema, local.name, [column.name for column in mapping.attributes], binary)
        copy_out = copy_statement(table, binary=binary)
        copied = CopyReader(self._report, self._context.copy_rate)
        payloads = copied.read(publisher.session, copy_out, table, self.subscription)
        if hook is not None and hook.reads_values:
            payloads = _hooked(hook, len(table.columns), payloads)
        await copy_transaction.copy_as(session, mapping)
        try:
            tag = await session.pipeline.session.copy_in(copy_into, joined_chunks(payloads))
        except ServerError as error:
            raise row_security(error, mapping, session.roles) from error
        copied.finish(tag)
        await publisher.commit()
        progress = ProgressRecord(claimed, with_origin=False)
        await copy_transaction.end(session, mapping, progress, slot.consistent_point, read_at)
        await reached(Point.COPIED)
        await copy_transaction.commit(session)
        await reached(Point.COPY_COMMITTED)
        return slot.consistent_point

    async def _empty(self, worker: WorkerSession) -> None:
        """Delete the subscription's rows of the table as a replicated TRUNCATE does, and record that.

        Raises:
            StatementError: a subscription that was created meanwhile may own rows of the table.
        """
        async with self._catalog.use() as connection:
            ownership = await load_ownership(connection, self.subscription)
        table = self.schema, self.table
        refuse_deletion(self.subscription.name, table, ownership.of(self.relid, table))
        self._report.enter(WorkerState.WAITING_FOR_USERS)
        rows = (await worker.resume(await self._claim())).row_applier
        # The names on the target are sufficient: no column matters.
        relation = Relation(None, self.relid, self.schema, self.table, ReplicaIdentity.NOTHING, ())
        mapping = await rows.session.map_relation(relation)
        transaction = RemoteTransaction(0, NOWHERE, 0)
        rows.begin(transaction)
        copy_transaction.limit_lock_wait(rows.session)
        await rows.truncate(transaction, [mapping], Truncate(None, False, False, (self.relid,)))
        rows.execute_at_end(transaction, progress_records.NOTE_EMPTIED)
        # The record must move, and no position is known before the slot is there.
        rows.queue_commit(transaction, Lsn(1), lambda: None)
        await rows.session.pipeline.sync()
        await release_origin(rows.session)

    async def _has_rows(self, worker: WorkerSession) -> bool:
        """Wait for transactions that have written to the table, and return True if it has rows."""
        self._report.enter(WorkerState.WAITING_FOR_WRITERS)
        await copy_transaction.wait_for_writers(worker.session, self.schema, self.table)
        return await self._comparison().has_rows(self.schema, self.table)

    async def _compare(self, worker: WorkerSession, publisher: Publisher, origin: str, *, delete_extra: bool) -> Lsn:
        """Repair the rows that differ from those in the snapshot of the slot, and return the snapshot's position."""
        if self.relid in self._tables.sources:
            raise SubscriberError(
                f'table "{self.schema}.{self.table}" cannot be compared, because hooks change its rows on their way',
                hint="Copy it: ALTER SUBSCRIPTION ... REFRESH TABLE ... WITH (truncate).",
            )
        name = f"{self.schema}.{self.table}"
        position, extra = await self._comparison().run(
            name, origin, publisher, self.slot, self._claim, delete_extra=delete_extra
        )
        async with self._catalog.use() as connection:
            await set_extra(connection, self.subscription.oid, self.relid, extra)
        await reached(Point.COPIED)
        await copy_transaction.finish(worker.session, ProgressRecord(await self._claim(), with_origin=False), position)
        await reached(Point.COPY_COMMITTED)
        return position

    def _comparison(self) -> SyncComparison:
        # Its 30 modules take a tenth of a launcher's start, and most launchers compare no table.
        from subscriber.worker.tablesync.comparison import SyncComparison

        return SyncComparison(self.subscription, self._context, self._report)

    async def _build_indexes(self, publisher: Publisher) -> None:
        """Build indexes that the table lacks. Nothing else has the table before it catches up."""
        indexes = TableIndexes(self.subscription, self._context, self._report)
        table = self._tables.names[self.relid]
        await indexes.build(publisher, self.relid, table, self._tables.sources.get(self.relid, table))

    # --- catching up ----------------------------------------------------------------------------

    async def _catch_up(self, worker: WorkerSession, sessions: SyncSessions) -> None:
        """Apply the changes between the progress record and the position at which the apply worker takes over."""
        claimed = await self._claim()
        start = claimed.position
        self._report.enter(WorkerState.WAITING_FOR_APPLY_WORKER)
        await reached(Point.SYNCWAIT)
        self._move(TableState.SYNCWAIT, start)
        await self._tables.wait_until(self._may_catch_up)
        position = self._catchup or start
        self._move(TableState.CATCHUP, position)
        await reached(Point.CATCHUP)
        if self._tables.is_quiet(self.relid):
            await self._store_done(max(start, position))
            return
        self._report.enter(WorkerState.CATCHING_UP)
        target = await worker.resume(claimed)
        publisher = await sessions.publisher(self.slot)
        sessions.give_away_publisher()
        try:
            await self._stream(target, publisher, start)
        finally:
            publisher.session.abort()
        await release_origin(worker.session)

    async def _stream(self, target: PostgresTarget, publisher: Publisher, start: Lsn) -> None:
        """Apply the table's changes from `start` to the catch-up position."""
        subscription = self.subscription
        settings = limit_status_interval(self._settings, await read_sender_timeout(publisher))
        # Most such streams are short, so binary is not tried as in the apply worker (value_format.py).
        options = stream_options(subscription, binary=subscription.binary or False)
        streaming = negotiated_streaming(options, publisher.server_version)
        on_notice = self._context.notice_log(subscription.oid)
        stream = await ReplicationStream.start(publisher, self.slot, start, options, on_notice=on_notice)
        progress = Progress(start)
        loop = ApplyLoop(
            stream,
            target,
            progress,
            hooks=self,
            durability=Durability(flush_for(subscription, self._flusher)),
            kinds=TransactionKinds(
                SpooledTransactions(self._spool, subscription.oid, settings=settings) if streaming != "off" else None,
                streaming == "parallel",
            ),
            settings=settings,
        )
        self._report.follow(loop)
        await loop.run()
        await self._store_done(progress.position)
        await stream.stop()

    def should_apply(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        """Return True for a table of this worker.

        Raises:
            StaleCatalog, MappingError: the table was replaced, see TableStates.find().
        """
        return self._tables.relid(table) == self.relid and self._tables.find(table) is not None

    def _may_catch_up(self) -> bool:
        """Return True if the apply worker has set the catch-up position."""
        self._state()
        table = self._tables.get(self.relid)
        self._catchup = table.lsn if table is not None and table.state is TableState.CATCHUP else None
        return self._catchup is not None

    def _move(self, state: TableState, lsn: Lsn) -> None:
        table = self._tables.get(self.relid)
        if table is not None and table.state is not state:
            self._tables.move(self.relid, state, lsn)

    async def _store_done(self, position: Lsn) -> None:
        """Store syncdone. The commit is synchronous, so that all copied rows and applied changes are durable, too."""
        await reached(Point.CAUGHT_UP)
        async with self._catalog.use() as connection:
            if not await set_relation_state(
                connection,
                self.subscription.oid,
                self.relid,
                TableState.SYNCDONE,
                position,
                lacks_foreign_keys=self._marks,
            ):
                raise StaleCatalog("the table was refreshed meanwhile")
            await reached(Point.SYNCDONE_STORED)
            if self._marks:
                self._tables.without_foreign_keys.add(self.relid)
            self._move(TableState.SYNCDONE, position)

    async def on_boundary(self, position: Lsn) -> bool:
        """Return True when the stream has reached the catch-up position."""
        assert self._catchup is not None
        return position >= self._catchup

    async def _finish(self, origin: str, publisher: Publisher) -> None:
        """Drop slot, origin and progress record, as far as they exist."""
        await publisher.drop_slot(self.slot, missing_ok=True, wait=True)
        await reached(Point.SLOT_DROPPED)
        async with self._catalog.use() as connection, connection.transaction():
            await origins.drop_origin(connection, origin, missing_ok=True)
            await progress_records.remove(connection, self.subscription.oid, self.relid)

    def _state(self) -> TableState:
        table = self._tables.get(self.relid)
        if table is None:
            raise SubscriberError(f'table "{self.schema}.{self.table}" is not part of the subscription any more')
        return table.state

    def _conflict(self, found: Conflict, note: StatementContext) -> None:
        self._report.counts[f"confl_{found.type}"] += 1
        log_conflict(names.table_sync_origin(self.subscription.oid, self.relid), found, note)

    def log(self, what: str) -> None:
        """Log that the worker has `what`: "started" or "finished"."""
        telemetry.log(
            telemetry.LOG,
            f'logical replication table synchronization worker for subscription "{self.subscription.name}", '
            f'table "{self.table}" has {what}',
            event=f"tablesync.{what}",
            relation=f"{self.schema}.{self.table}",
        )


async def _hooked(hook: TableHook, ncols: int, lists: AsyncIterator[list[bytes]]) -> AsyncIterator[list[bytes]]:
    """Yield the rows that the table's hook returns, in lists as they were read from the publisher."""
    async for payloads in lists:
        rows = [await hook.copied(split_line(line, ncols)) for line in payloads]
        if kept := [join_line(row) for row in rows if row is not None]:
            yield kept
