"""Comparison of a table in place of its copy: copy_data = 'compare', and REFRESH TABLE.

    slot of the table          exports the snapshot of its position P
    compare and repair         the rows of the target become those of the snapshot (repair/)
    state finishedcopy at P    then the table is caught up and handed over, as after a copy

**Invariant.** Nothing applies changes of the table between the lock and state finishedcopy. The apply worker skips
them, because the table is not ready. A transaction of an earlier worker is waited for: the lock conflicts with its
writes. Such a worker commits nothing after that, because the subscription has another generation. So the rows of the
target stand still, as during a copy, but for local writes.

**Failure cases.** The worker, a server, or a connection between them ends.

- Before state finishedcopy is stored: the next worker creates another slot and compares again. Rows that were repaired
  are equal by then, so only checksums are read again.
- A row is locked by another session for seconds: the worker fails with an error that names the table, and retries.
- The table is replaced, or gets hooks: the comparison has a note, which is the error of the worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from subscriber import formatting, telemetry
from subscriber.apply.progress import ProgressClaim
from subscriber.catalog.connection import KEEPALIVE, CatalogConnection
from subscriber.catalog.store import repairs
from subscriber.catalog.store.workers import WorkerState
from subscriber.comparison.comparison import PART_BYTES
from subscriber.comparison.consistent_snapshot import CommonSnapshot, begin_snapshot, open_side
from subscriber.comparison.progress import ComparisonProgress
from subscriber.comparison.queries import JOBS, QueryPool
from subscriber.connection.connect import open_session
from subscriber.connection.conninfo import conninfo_text
from subscriber.connection.session import Session
from subscriber.connection.settings import READ_NO_VIEW
from subscriber.errors import ServerError, SubscriberError
from subscriber.limited_wait import LimitedWait
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.partitions import TablePartition
from subscriber.publisher.table_access import read_access
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.repair.audit import RepairAudit
from subscriber.repair.batch import RepairSessions
from subscriber.repair.result import extra_rows_detail, extra_rows_remedy
from subscriber.repair.tables import RepairRun
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.worker_session import release_origin, resume_applier
from subscriber.worker.context import LauncherContext
from subscriber.worker.status import Report

ORIGIN_PATIENCE = 10.0  # seconds
POLL = 0.05  # seconds

Claim = Callable[[], Awaitable[ProgressClaim]]
_PHASES = (WorkerState.COMPARING, WorkerState.REPAIRING)


class SyncComparison:
    """The comparison of one table by its synchronization worker."""

    def __init__(self, subscription: Subscription, context: LauncherContext, report: Report) -> None:
        """Create a comparison.

        Args:
            subscription: the subscription.
            context: the launcher's context.
            report: the status of the worker.
        """
        self._subscription = subscription
        self._context = context
        self._report = report
        self._known_tables = KnownTables()
        self._rejected = False  # the last session has had an error

    async def has_rows(self, schema: str, name: str) -> bool:
        """Return True if a table of the target has rows.

        Raises:
            SubscriberError: no role that reads the table may read all its rows.
        """
        subscription = self._subscription
        async with AsyncExitStack() as stack:
            session = await open_side(stack, await conninfo_text(self._context.apply_target))
            acting = subscription.owner if subscription.run_as_owner else None
            table = TablePartition(schema, name, None)
            access = await read_access(session, "target", [table], switches=True, acting=acting)
            if access.problem is not None:
                raise _cannot_be_compared(f"{schema}.{name}", access.problem, access.remedy)
            await session.query(f"BEGIN READ ONLY; {READ_NO_VIEW}")
            if (role := access.roles.get(table.heap)) is not None:
                await session.query(f"SET LOCAL ROLE {identifier(role)}")
            return bool(await session.rows(f"SELECT FROM {table.heap} LIMIT 1"))

    async def run(
        self, name: str, origin: str, publisher: Publisher, slot: str, claim: Claim, *, delete_extra: bool
    ) -> tuple[Lsn, int]:
        """Make the rows of the table equal to those of the snapshot of a new slot.

        Args:
            name: the published table, with its schema.
            origin: the replication origin of the table's synchronization worker.
            publisher: a session with the publisher, which has no open transaction.
            slot: the name of the slot to create.
            claim: claims the progress record of the table, for a session that repairs rows.
            delete_extra: delete rows that the publisher does not have, unless they may belong to another subscription.

        Returns:
            The position of the snapshot, and the number of rows that were kept although the publisher lacks them.

        Raises:
            SubscriberError: the table cannot be compared, or rows of it are locked.

        Cancellation: the batch is rolled back. Earlier batches remain.
        """
        context, subscription = self._context, self._subscription
        self._report.enter(WorkerState.COMPARING)
        created = await publisher.create_slot(slot, snapshot="export", failover=subscription.failover)
        snapshot = SlotSnapshot(created.consistent_point, created.snapshot_name or "")
        async with context.catalog.use() as connection:
            role = await repairs.current_role(connection)

        sessions = RepairSessions(
            context.catalog,
            await conninfo_text(context.target),
            await conninfo_text(context.apply_target),
            subscription,
            RepairAudit("resync", role),
            lambda: self._open_rows(name, origin, claim),
            pause=snapshot.pause,
            delete_extra=delete_extra,
        )
        run = RepairRun(
            sessions,
            QueryPool(JOBS),
            PART_BYTES,
            on_progress=self._show,
            take_snapshot=snapshot.take,
            states=("d",),
            is_streaming=False,
        )
        (result,) = (await run.run([name])).tables
        if self._rejected:
            # The worker's own session binds the origin next, so wait until the backend has released it.
            async with self._open_rows(name, origin, claim):
                pass
        if result.error is not None:
            raise result.error
        if result.note is not None:
            raise _cannot_be_compared(name, result.note, result.remedy)
        if result.unrepaired:
            raise SubscriberError(
                f'rows of table "{name}" are locked by another transaction, and could not be repaired',
                hint="Find the transaction in pg_prepared_xacts and pg_stat_activity of the target.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        telemetry.log(
            telemetry.LOG,
            f'table "{name}" was compared with the publisher\'s: {result.inserted} rows inserted, {result.updated}'
            f" updated, {result.deleted} deleted",
            event="tablesync.compared",
        )
        if result.outside:
            telemetry.log(
                telemetry.WARNING,
                f'the publisher has {formatting.count(result.outside, "row")} of table "{name}" outside the rule of'
                " ownership",
                detail="They were not compared.",
                hint="Correct source_tag of the subscription.",
                event="tablesync.compared",
            )
        if result.extra:
            telemetry.log(
                telemetry.WARNING,
                f'table "{name}" has {formatting.count(result.extra, "row")} that the publisher does not have',
                detail=f"They were kept. {extra_rows_detail(result)}",
                hint=extra_rows_remedy(subscription.name, result),
                event="tablesync.compared",
            )
        return snapshot.lsn, result.extra

    @asynccontextmanager
    async def _open_rows(self, name: str, origin: str, claim: Claim) -> AsyncIterator[RowApplier]:
        """Open a session that applies the changes of batches. After a rejected batch it is not used again."""
        wait = LimitedWait("an earlier session to release the origin", ORIGIN_PATIENCE)
        while True:
            async with await open_session(
                self._context.apply_target,
                application_name=f"subscriber: {self._subscription.name} {name}",
                settings=KEEPALIVE,
            ) as session:
                subscription = self._subscription
                configured = await copy_transaction.copy_session(
                    session, subscription, subscription.synchronous_commit, origin, self._known_tables
                )
                try:
                    applier = await resume_applier(
                        configured, await claim(), lambda *_: None, ownership=subscription.ownership
                    )
                except ServerError as error:
                    # The backend of the earlier session has the origin until it notices the end of its connection.
                    if error.sqlstate != OBJECT_IN_USE or wait.is_over:
                        raise
                    await wait.pause(POLL)
                    continue
                yield applier
                self._rejected = configured.pipeline.error is not None
                if not self._rejected:
                    await release_origin(configured)
                return

    def _show(self, progress: ComparisonProgress) -> None:
        state = next((state for state in _PHASES if progress.phase.startswith(state)), WorkerState.COMPARING)
        self._report.enter(state, progress.phase.removeprefix(state))
        if progress.unit == "bytes":
            self._report.compared(progress.done, progress.total)


def _cannot_be_compared(name: str, reason: str, remedy: Remedy | None) -> SubscriberError:
    return SubscriberError(
        f'table "{name}" cannot be compared: {reason}', hint=remedy, sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE
    )


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """The snapshot that a new slot has exported, while the target stands at the slot's position."""

    lsn: Lsn
    name: str

    @asynccontextmanager
    async def take(
        self, _catalog: CatalogConnection, target: str, subscription: Subscription
    ) -> AsyncIterator[CommonSnapshot]:
        """Take the snapshot of both sides, see common_snapshot()."""
        async with AsyncExitStack() as stack:
            source = await open_side(stack, subscription.conninfo, must_use_password=subscription.must_use_password)
            local = await open_side(stack, target)
            exported = await begin_snapshot(source, self.name)
            yield CommonSnapshot(self.lsn, exported, await begin_snapshot(local), source, local)

    @asynccontextmanager
    async def pause(
        self, _catalog: CatalogConnection, _subscription: Subscription, session: Session
    ) -> AsyncIterator[tuple[Lsn, str]]:
        """Begin a transaction with the snapshot, see paused_worker(). There is no worker to pause."""
        yield self.lsn, await begin_snapshot(session, self.name)
