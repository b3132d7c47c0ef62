"""ApplyWorker: connects to both servers and applies the stream of one subscription."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from subscriber import telemetry
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.progress import Progress, ProgressClaim
from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.apply.table_states import TableState
from subscriber.apply.touched_ranges import TouchedRanges
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.store import verifications
from subscriber.catalog.store.subscription_rel import set_relation_state
from subscriber.catalog.store.subscriptions import enable_two_phase
from subscriber.errors import (
    BinaryRefused,
    PublisherError,
    ServerError,
    StaleCatalog,
    SubscriberError,
    TextNeeded,
)
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.names import apply_origin
from subscriber.protocol.messages import Delete, Insert, Relation, Update
from subscriber.publisher.answers import parsing
from subscriber.publisher.commands import negotiated_streaming
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import limit_status_interval, read_sender_timeout
from subscriber.publisher.published_rows import read_values
from subscriber.publisher.replication_stream import ReplicationStream, check_primary
from subscriber.publisher.subscriptions import connect_publisher, stream_options
from subscriber.ranges.table_ranges import Truncation
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import CopyIndexes, Subscription, TwoPhaseState
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.session.statement_context import OnConflict, StatementContext
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.two_phase import TwoPhase
from subscriber.targets.postgres.worker_session import TargetConfig, WorkerSession, open_target
from subscriber.transaction_times import receiver_for
from subscriber.worker.apply.confirmed_position import resume_confirming
from subscriber.worker.apply.lock_waits import LockWaitMonitor
from subscriber.worker.apply.look_ahead import look_ahead, wait_for_pause
from subscriber.worker.apply.loop import ApplyLoop, Durability
from subscriber.worker.apply.parallel_commit import ParallelCommit
from subscriber.worker.apply.pause import PauseGate
from subscriber.worker.apply.progress_claim import claim_progress
from subscriber.worker.apply.quarantine import Quarantine, QuarantineMemory
from subscriber.worker.apply.range_changes import RangeChanges
from subscriber.worker.apply.retention import Retention
from subscriber.worker.apply.skip import TransactionSkipper
from subscriber.worker.apply.transactions import TransactionKinds
from subscriber.worker.apply.value_format import choose_format
from subscriber.worker.apply_hooks import ApplyHooks, Undecided
from subscriber.worker.conflict_log import log_conflict
from subscriber.worker.context import LauncherContext, open_spool
from subscriber.worker.leftover_slots import drop_leftover_slots
from subscriber.worker.session.apply_sessions import ApplySessions
from subscriber.worker.session.parallel_session import end_earlier_workers, parallel_session
from subscriber.worker.status import Report
from subscriber.worker.streaming.parallel_rules import ParallelAdmission, ParallelRules, read_pool_size
from subscriber.worker.streaming.parallel_worker import Pool
from subscriber.worker.streaming.spooled_transactions import SpooledTransactions
from subscriber.worker.table_indexes import TableIndexes
from subscriber.worker.table_states import TableStates
from subscriber.worker.transaction_timer import TransactionTimer
from subscriber.worker.wal_flush import flush_for

# The protocol has xids of 32 bits. The expression finds the newest 64-bit xid with these lower bits.
_XACT_STATUS = """
SELECT pg_catalog.pg_xact_status((next - ((next - {xid}) & 4294967295))::text::xid8)
  FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next) s
"""


class Supervision(Protocol):
    """The supervisor of an apply worker, as the worker uses it."""

    @property
    def skip_lsn(self) -> Lsn:
        """The position of ALTER SUBSCRIPTION … SKIP. 0: no transaction is to be skipped."""

    def skip_cleared(self) -> None:
        """Discard the position, because its transaction has been skipped or another one was applied."""

    def start_sync(self, relid: int) -> None:
        """Start the synchronization worker of a table.

        Does nothing while the limit of such workers is reached, or while a restart is delayed.
        """

    def is_syncing(self, relid: int) -> bool:
        """Return True while the table has a synchronization worker."""


@dataclass(slots=True)
class WorkerMemory:
    """The knowledge that an apply worker leaves to the next one of the subscription.

    Attributes:
        known_tables: definitions of tables of the target.
        text_reason: the reason why the next worker has to request text (value_format.py). None: there is none.
        quarantine: a transaction that the next worker has to park, and requests of statements.
    """

    known_tables: KnownTables = field(default_factory=KnownTables)
    text_reason: str | None = None
    quarantine: QuarantineMemory = field(default_factory=QuarantineMemory)

    def forget_tables(self) -> None:
        """The next worker reads the definitions of tables again."""
        self.known_tables = KnownTables()

    def request_text(self, reason: str | None) -> None:
        """The next worker requests text for this reason. None: there is none any more."""
        self.text_reason = reason


class ApplyWorker(ApplyHooks):
    """One run of an apply worker. After an error, the supervisor creates another one.

    Attributes:
        subscription: the subscription. `two_phase` becomes ENABLED when a pending one is enabled.
        left_over: some slots of earlier table synchronization workers could not be dropped.
    """

    def __init__(
        self,
        subscription: Subscription,
        context: LauncherContext,
        tables: TableStates,
        report: Report,
        supervision: Supervision,
        pause: PauseGate,
        memory: WorkerMemory,
    ) -> None:
        self.subscription = subscription
        self.left_over = False
        self.table_hooks = context.hooks.get(subscription.name)
        self._context = context
        self._catalog = context.catalog
        self._tables = tables
        self._report = report
        self._supervision = supervision
        self._pause = pause
        self._memory = memory
        self._timeline = 0  # the publisher's
        self._ranges: RangeChanges
        self._quarantine: Quarantine | None = None
        self._pool: Pool | None = None  # the parallel workers of the stream. None: there are none
        self._touched = TouchedRanges(context.settings.touched_ranges) if subscription.track_ranges else None
        self._sync: Callable[[], Awaitable[None]]  # PostgresTarget.sync() of the running loop

    async def run(self, on_started: Callable[[], None]) -> None:
        """Apply the stream until an error or a cancellation.

        Args:
            on_started: called when the stream has started.

        Raises:
            EndOfStream: the publisher has ended the stream.
            SubscriberError: any other error, with its CONTEXT.

        Cancellation: the target rolls back the open transaction.
        """
        subscription = self.subscription
        slot = subscription.slot_name
        if slot is None:
            raise PublisherError("subscription has no replication slot set", sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
        config = TargetConfig(
            self._context.apply_target,
            subscription.name,
            subscription,
            0,
            self._conflict,
            self._context.resolvers,
            batching=not self._context.settings.one_by_one,
            known_tables=self._memory.known_tables,
            settings=self._context.settings,
            touched=self._touched,
            code_changes_session=subscription.oid in self._context.changed_sessions,
            others_in_progress=self._parallel_workers_are_busy,
            read_published=self._read_published if self.table_hooks is None else None,
        )
        async with open_target(config, self._catalog) as worker:
            self._report.connected(worker.session.pipeline.session.pid)
            self._log_limits(worker.session.capabilities.warnings)
            publisher = await self._connect()
            try:
                await self._stream(worker, publisher, slot, on_started)
            except SubscriberError as error:
                if isinstance(error, BinaryRefused) and self.verify_binary_types:
                    raise TextNeeded(f"the publisher cannot send a value in binary: {error.reason}") from error
                explained = await worker.explain(error)
                if self.timer is not None:
                    self.timer.fail(explained)
                raise explained from error
            finally:
                publisher.session.abort()
                if self.timer is not None:
                    self.timer.close()

    async def _stream(
        self, worker: WorkerSession, publisher: Publisher, slot: str, on_started: Callable[[], None]
    ) -> None:
        subscription = self.subscription
        await end_earlier_workers(self._catalog, subscription.oid, self._context.settings.earlier_session_timeout)
        claimed = await self._claim(publisher)
        start = claimed.position
        sync_id = self._context.sync_id
        self.left_over = not await drop_leftover_slots(
            publisher, self._catalog, subscription.oid, sync_id, self._tables
        )
        target = await worker.resume(claimed)
        await self._load_touched()
        self._quarantine = await Quarantine.open(
            subscription, self._catalog, target, self, self._memory.quarantine, self._context.settings
        )
        info = await publisher.slot(slot)
        confirming = await resume_confirming(
            self._catalog, subscription.oid, info, claimed, self._context.settings.confirm_interval
        )
        # Changes of tables that are not ready are skipped, and confirmed without a commit. So the slot may be ahead of
        # the progress record. A table must not be handed over at a lower position than the slot's.
        position = confirming.resumed_at
        settings = limit_status_interval(self._context.settings, await read_sender_timeout(publisher))
        two_phase = await self._two_phase(target)
        binary = await self._in_binary(publisher)
        options = stream_options(subscription, binary=binary, two_phase=two_phase is not None)
        streaming = negotiated_streaming(options, publisher.server_version)
        if (receiver := receiver_for(subscription.name)) is not None:
            self.timer = TransactionTimer(receiver, parallel=streaming == "parallel")
        progress = Progress(position, None if self.timer is None else self.timer.advance)
        if streaming == "parallel":
            size = await read_pool_size(self._catalog, settings)
            self._pool = Pool(size, partial(self._open_parallel_session, target), self._conflict)
        stream = await ReplicationStream.start(
            publisher,
            slot,
            start,
            options,
            on_notice=self._context.notice_log(subscription.oid),
            failover=subscription.failover,
        )
        self._sync = target.sync
        indexes = TableIndexes(subscription, self._context, self._report)
        self._ranges = RangeChanges(
            subscription, self._catalog, self._tables, target, settings, partial(self._connect, " keys"), indexes
        )
        await self._ranges.load(self._timeline, set(filter(self._supervision.is_syncing, self._tables.unready)))
        waits = LockWaitMonitor(
            target,
            subscription.oid,
            self._catalog,
            self._report,
            self._pool,
            two_phase,
            self._rolled_back,
        )
        self.background_tasks = [
            partial(waits.run, settings),
            ApplySessions(subscription, self._context, target, self._conflict, self._touched).run,
            partial(self._look_ahead, target, progress),
        ]
        if subscription.retain_dead_tuples:
            retention = Retention(subscription, self._catalog, self._published, lambda: progress.positions.flush)
            self.background_tasks.append(partial(retention.run, self._context.settings.retention_interval))
        skipper = TransactionSkipper(target, subscription.name, self._skip_lsn, self._supervision.skip_cleared)
        loop = ApplyLoop(
            stream,
            target,
            progress,
            hooks=self,
            durability=Durability(flush_for(subscription, self._context.flusher), confirming),
            kinds=TransactionKinds(
                self._streamed_transactions(progress, two_phase) if streaming != "off" else None,
                streaming == "parallel",
                ParallelCommit(target, two_phase, skipper),
                two_phase,
                skipper,
                self._quarantine,
            ),
            settings=settings,
        )
        # With two_phase, the changes of a transaction may precede `position`, and only its COMMIT PREPARED follow.
        self._tables.watch(position if two_phase is None else None)
        self._report.follow(loop)
        on_started()
        self._tables.listeners.append(loop.wake)
        try:
            await loop.run()
        finally:
            self._tables.listeners.remove(loop.wake)
            self._ranges.close()

    def _open_parallel_session(
        self, leader: PostgresTarget, number: int, on_conflict: OnConflict
    ) -> AbstractAsyncContextManager[PostgresTarget]:
        return parallel_session(self.subscription, self._context, leader, number, on_conflict, self._touched)

    def _streamed_transactions(self, progress: Progress, two_phase: TwoPhase | None) -> SpooledTransactions:
        """Return the store of streamed transactions, which gives some to the parallel workers."""
        context, subscription, tables = self._context, self.subscription, self._tables
        admission = ParallelAdmission(subscription, self._catalog, tables, two_phase, self._skip_lsn)
        rules = ParallelRules(self, subscription.name, tables, progress)
        spool = open_spool(context.settings, context.sync_id, subscription.oid, 0)
        return SpooledTransactions(spool, subscription.oid, self._pool, admission.admits, rules, context.settings)

    def _parallel_workers_are_busy(self) -> bool:
        return self._pool is not None and self._pool.is_busy()

    async def _look_ahead(self, target: PostgresTarget, progress: Progress) -> None:
        """Read the definitions of all tables, unless an earlier worker of the subscription has done so.

        Waits for a pause of the stream first, because applying a backlog is more important.
        """
        settings = self._context.settings
        await wait_for_pause(progress, settings.look_ahead_pause, settings.look_ahead_timeout)
        terms = target.session.roles.terms
        known = self._memory.known_tables
        if not known.complete:
            known.complete = True
            names, unready = self._tables.names, self._tables.unready
            # The indexes that a table gets after its copy would change its definition again.
            skipped = unready if self.subscription.copy_indexes is CopyIndexes.AFTER else ()
            tables = [name for relid, name in names.items() if relid not in skipped]
            await look_ahead(self._context.apply_target, self.subscription.name, tables, terms, known)
        target.session.check_ahead(known.all(terms))
        target.on_progress()

    async def _connect(self, suffix: str = "") -> Publisher:
        """Connect to the publisher. `suffix` ends the name of the connection."""
        name = f"{self.subscription.name}{suffix}"
        return await connect_publisher(self.subscription, name, "apply worker", self._catalog.encoding)

    async def _in_binary(self, publisher: Publisher) -> bool:
        """Return True if the worker requests values in binary. Stores the format and its reason in the status."""
        subscription = self.subscription
        form = choose_format(subscription, self.table_hooks, publisher.server_version, self._memory.text_reason)
        if form.binary and subscription.binary is None:
            lacking = await publisher.column_without_binary(subscription.publications)
            form = choose_format(subscription, self.table_hooks, publisher.server_version, lacking)
        self.verify_binary_types = form.binary and subscription.binary is None
        self._report.receives(form.name, form.reason)
        return form.binary

    # --- rules and boundaries of the apply loop (ApplyHooks) --------------------------------------------

    def _skip_lsn(self) -> Lsn:
        return self._supervision.skip_lsn

    def should_apply(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        return self._tables.applies(table, finish_lsn)

    def change_during_copy(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> Insert | Update | Delete | Undecided | None:
        return self._ranges.change(transaction, mapping, change)

    def truncate_during_copy(
        self, transaction: RemoteTransaction, mappings: Sequence[RelationMapping]
    ) -> Sequence[Truncation] | Undecided:
        return self._ranges.truncate(transaction, mappings)

    async def delete_during_copy(
        self, transaction: RemoteTransaction, mapping: RelationMapping, conditions: Sequence[str]
    ) -> None:
        await self._ranges.delete(transaction, mapping, conditions)

    def hides_apply_position(self) -> bool:
        return self._tables.incomplete()

    def needs_boundary(self, position: Lsn) -> bool:
        pending = self.subscription.two_phase is TwoPhaseState.PENDING
        return bool(
            pending
            or self._tables.unready
            or self._supervision.skip_lsn
            or self._pause.is_due(position)
            or (self._quarantine is not None and self._quarantine.is_stale)
        )

    async def before_transaction(self, finish_lsn: Lsn) -> None:
        await self._wait_if_paused(finish_lsn)
        if finish_lsn == self._supervision.skip_lsn:
            self._tables.watch(None)

    async def _wait_if_paused(self, position: Lsn) -> None:
        if self._pause.is_due(position):
            await self._pause.wait_if_paused(position, self._sync)
            await self._load_touched()

    async def _load_touched(self) -> None:
        """Load the recorded ranges. A comparison may have taken some during a pause. No transaction is in flight."""
        if self._touched is not None:
            async with self._catalog.use() as connection:
                self._touched.load(await verifications.load(connection, self.subscription.oid))

    async def _rolled_back(self, xid: int) -> bool:
        """Return True if the publisher has rolled back its transaction `xid`. Queried in a separate session."""
        async with await self._connect() as publisher:
            rows = await publisher.session.rows(_XACT_STATUS.format(xid=xid))
            with parsing(f"transaction {xid}"):
                return rows[0][0] == "aborted"

    async def _published(self) -> Lsn:
        """Return the publisher's present WAL position. Queried in a separate session."""
        async with await self._connect() as publisher:
            return (await publisher.identify_system()).position

    async def _read_published(
        self, relation: Relation, key: dict[str, str], columns: list[str]
    ) -> dict[str, str | None] | None:
        """Read columns of a published row, in a separate session. None: there is no row, or it may not be read."""
        publisher = await self._connect()
        try:
            async with publisher:
                return await read_values(publisher, relation, key, columns)
        except ServerError as error:
            telemetry.log(
                telemetry.WARNING,
                f'a conflict in table "{relation.schema}.{relation.name}" is decided without large values that did not'
                " change",
                detail=str(error),
                hint="On the publisher, grant SELECT on the table, or give it REPLICA IDENTITY FULL.",
                event="conflict.incomplete",
            )
            return None

    async def _two_phase(self, target: PostgresTarget) -> TwoPhase | None:
        """Return the prepared transactions. None: two-phase commit is off, or pending because tables are not ready.

        A pending subscription whose tables are all ready is enabled first.
        """
        subscription = self.subscription
        if subscription.two_phase is TwoPhaseState.DISABLED:
            return None
        if subscription.two_phase is TwoPhaseState.PENDING:
            async with self._catalog.use() as connection:
                if not await enable_two_phase(connection, subscription.oid):
                    return None
            self.subscription = replace(subscription, two_phase=TwoPhaseState.ENABLED)
        two_phase = TwoPhase(target, subscription.oid)
        await two_phase.load()
        return two_phase

    async def _claim(self, publisher: Publisher) -> ProgressClaim:
        """Claim the progress record, after checking that it belongs to this publisher and its timeline."""
        identity = await publisher.identify_system()
        check_primary(identity, failover=self.subscription.failover)
        self._timeline = identity.timeline
        self._report.recovery.resumed(identity.position)
        return await claim_progress(self._catalog, self.subscription, publisher, identity)

    def _log_limits(self, limits: tuple[str, ...]) -> None:
        """Log missing capabilities of the target. A later worker does not repeat a warning."""
        for limit in limits:
            if limit not in self._report.status.limits:
                telemetry.log(telemetry.WARNING, limit, event="target.limit")
        self._report.limited(limits)

    def _conflict(self, conflict: Conflict, note: StatementContext) -> None:
        self._report.counts[f"confl_{conflict.type}"] += 1
        log_conflict(apply_origin(self.subscription.oid), conflict, note)

    # --- the apply worker's part in table synchronization (apply/table_states.py) -----------------------

    async def on_boundary(self, position: Lsn) -> bool:
        """Advance the states of tables that are not ready, and request their synchronization workers.

        Raises:
            StaleCatalog: all tables are ready, so a pending two-phase commit can be enabled by a restart.
        """
        await self._wait_if_paused(position)
        if self._tables.timeline.has_changed:
            raise StaleCatalog("the publisher has another timeline than at the start of the stream")
        if self._tables.divided:
            await self._ranges.settle(position)
        for table in list(self._tables.unready.values()):
            if table.state is TableState.SYNCDONE:
                if position >= table.lsn:
                    await self._make_ready(table.relid, table.lsn)
            elif self._supervision.is_syncing(table.relid):
                if table.state is TableState.SYNCWAIT:
                    self._tables.hand_over(table.relid, position)
                # An earlier apply worker may have moved the table to CATCHUP.
                if table.state is TableState.CATCHUP:
                    await self._wait_for_sync(table.relid)
            else:
                self._supervision.start_sync(table.relid)
        if self.subscription.two_phase is TwoPhaseState.PENDING and self._tables.all_ready:
            name = self.subscription.name
            telemetry.log(
                telemetry.LOG,
                f'logical replication apply worker for subscription "{name}" will restart'
                " so that two_phase can be enabled",
                event="worker.restart",
            )
            raise StaleCatalog("two_phase can be enabled")
        return False

    async def _wait_for_sync(self, relid: int) -> None:
        """Wait until the synchronization worker has caught up, because this position must not pass the catch-up one."""
        table = self._tables.get(relid)
        assert table is not None

        def handed_over() -> bool:
            gone = self._tables.get(relid) is not table or not self._supervision.is_syncing(relid)
            return gone or table.state is not TableState.CATCHUP

        await self._tables.wait_until(handed_over)

    async def _make_ready(self, relid: int, lsn: Lsn) -> None:
        # The other tables reach this table's position only when the commits that were sent are done.
        await self._sync()
        async with self._catalog.use() as connection:
            if not await set_relation_state(connection, self.subscription.oid, relid, TableState.READY, lsn):
                raise StaleCatalog("the table was refreshed meanwhile")
            await reached(Point.READY_STORED)
            self._tables.move(relid, TableState.READY, lsn)
