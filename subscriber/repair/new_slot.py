"""Reseed: give a subscription a new slot, and bring the target to the position at which the slot begins.

    disable the subscription   its workers end
    drop the old slot, and create the new one with the same name; it exports the snapshot of its position L
    compare and repair         in that snapshot; the target stands still
    progress record at L       together with the states of tables
    enable the subscription    it streams from L

**Purpose.** A subscription whose slot is lost has missed changes, and its tables are nearly the publisher's. So only
checksums and rows that differ are read. The same takes over tables that were copied by other means.

**Invariant.** The subscription is enabled only when each of its tables has the rows of L. Until then its progress
record has the old position, which the new slot does not have. A worker that is started by hand stops with an error.

**Failure cases.**

- The command dies: the subscription is disabled. The next reseed makes another slot, and compares again. Rows that were
  repaired are equal by then.
- The connection that has exported the snapshot is lost: the same.
- The command dies between the progress record and ENABLE: the next reseed repeats all, or ALTER SUBSCRIPTION ... ENABLE
  continues, because the slot and the progress record are at L.
- A transaction of the subscription is prepared on the target: refused. Its end on the publisher is unknown, and it
  locks rows.
- A row is locked by another session: the command stops before the progress record, and names the table.
- A transaction is open on the publisher: the slot waits for it, up to SLOT_PATIENCE seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio

from subscriber.catalog.commands import publisher_connection, worker_shutdown
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.store import progress_records, repairs, verifications
from subscriber.catalog.store.prepared_transactions import delete_prepared, load_prepared_names
from subscriber.catalog.store.subscription_rel import finish_relations
from subscriber.catalog.store.subscriptions import forget_publisher
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.comparison.comparison import PART_BYTES, load_compared
from subscriber.comparison.consistent_snapshot import APPLICATION_NAME, CommonSnapshot, begin_snapshot, open_side
from subscriber.comparison.progress import ComparisonProgress, OnProgress
from subscriber.comparison.queries import JOBS, QueryPool
from subscriber.connection.session import Session
from subscriber.display import sql_identifier, sql_literal
from subscriber.errors import StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.repair.audit import RepairAudit
from subscriber.repair.batch import RepairSessions, own_rows
from subscriber.repair.result import Repair
from subscriber.repair.tables import RepairRun, check_is_free, own_progress
from subscriber.settings import DEFAULTS
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription, TwoPhaseState

SLOT_PATIENCE = 300.0  # seconds to wait for transactions that run on the publisher


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


async def reseed(
    target: str,
    name: str,
    *,
    apply_target: str | None = None,
    record_rows: bool = False,
    jobs: int = JOBS,
    max_rate: int | None = None,
    part_bytes: int = PART_BYTES,
    grace: float = DEFAULTS.worker_shutdown_grace,
    on_notice: Notice = lambda *_: None,
    on_progress: OnProgress = lambda _: None,
) -> Repair:
    """Create a new slot for a subscription, and make its tables equal to the publisher's at the slot's position.

    The subscription is disabled at the start, and enabled at the end. The publisher may be written to.

    Args:
        target: the connection string of the subscription's database. Its role owns the subscription or is a superuser.
        name: the subscription.
        apply_target: the connection string of the role that applies changes. None: `target`.
        record_rows: see repair().
        jobs: the number of connections to each server during the comparison.
        max_rate: the number of bytes of tables to read from each server in a second; None: no limit.
        part_bytes: the size of a part of a table in bytes, which one query reads.
        grace: seconds for the workers to stop before their sessions are ended.
        on_notice: called with severity, message, detail and hint of messages about the slot.
        on_progress: called at the beginning of each phase, after each query and after each batch.

    Returns:
        The number of repaired rows of each table. Tables with a note were not repaired.

    Raises:
        StatementError: there is no such subscription, it has no slot, or one of its transactions is prepared.
        PublisherError: the publisher cannot serve the subscription.
        SubscriberError: the slot cannot be created in time, or rows of the target are locked.
        ApplyError: the target refuses a change.
        ConnectionLost: a server cannot be reached, or the connection is lost. Run the command again.

    Cancellation: the subscription remains disabled. Run the command again.
    """
    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog:
        subscription = await load_compared(catalog, name)
        slot = subscription.slot_name
        if slot is None:
            raise StatementError(
                f'subscription "{name}" has no replication slot',
                hint=f"Run ALTER SUBSCRIPTION {sql_identifier(name)} SET (slot_name = {sql_literal(name)}), then reseed"
                " again.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await check_is_free(catalog, subscription)
        async with catalog.use() as connection:
            on_progress(ComparisonProgress("waiting for the workers to end"))
            await execute(connection, f"ALTER SUBSCRIPTION {sql_identifier(name)} DISABLE", notice=on_notice)
            await worker_shutdown.wait_until_gone(connection, subscription.oid, grace=grace)
            await _check_prepared(connection, subscription)
            if await progress_records.load_confirmed(connection, subscription.oid) is None:
                # A worker that is started by hand compares it with the new slot.
                await progress_records.save_confirmed(connection, subscription.oid, Lsn(1))
        subscription = await load_compared(catalog, name)
        async with AsyncExitStack() as stack:
            async with catalog.use() as connection:
                role = await repairs.current_role(connection)
                publisher = await stack.enter_async_context(
                    publisher_connection.connect_to_publisher(
                        connection, name, subscription.conninfo, password=subscription.must_use_password
                    )
                )
            snapshot = await _replace_slot(publisher, slot, subscription, on_notice, on_progress)
            sessions = RepairSessions(
                catalog,
                target,
                subscription,
                RepairAudit("reseed", role, record_rows),
                own_rows(catalog, apply_target or target, subscription, while_disabled=True),
                pause=snapshot.pause,
            )
            run = RepairRun(
                sessions,
                QueryPool(jobs, max_rate=max_rate),
                part_bytes,
                on_progress=on_progress,
                take_snapshot=snapshot.take,
                is_streaming=False,
            )
            async with own_progress(catalog, subscription):
                result = await run.run()
        _check_locked(result)
        async with catalog.use() as connection:
            async with connection.transaction():
                await _finish(connection, subscription, snapshot.lsn)
            await execute(connection, f"ALTER SUBSCRIPTION {sql_identifier(name)} ENABLE", notice=on_notice)
        return result


async def _check_prepared(connection: Connection, subscription: Subscription) -> None:
    gids = await load_prepared_names(connection, subscription.oid)
    if gids:
        raise StatementError(
            f'transactions of subscription "{subscription.name}" are prepared on the target',
            detail="Their end on the publisher is unknown. The reseed brings their rows if they were committed.",
            hint=f"{' '.join(f'ROLLBACK PREPARED {sql_literal(gid)};' for gid in gids)} Then reseed again.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def _replace_slot(
    publisher: Publisher, name: str, subscription: Subscription, notice: Notice, on_progress: OnProgress
) -> SlotSnapshot:
    """Drop the old slot if it exists, and create the new one. The snapshot ends with the publisher's session."""
    on_progress(ComparisonProgress("waiting for transactions that run on the publisher"))
    with anyio.move_on_after(SLOT_PATIENCE):
        await publisher_connection.drop_slot(publisher, name, notice, missing_ok=True)
        created = await publisher.create_slot(
            name,
            snapshot="export",
            two_phase=subscription.two_phase is TwoPhaseState.ENABLED,
            failover=subscription.failover,
        )
        notice("NOTICE", f'created replication slot "{name}" on publisher', None, None)
        return SlotSnapshot(created.consistent_point, created.snapshot_name or "")
    raise SubscriberError(
        f'replication slot "{name}" could not be created within {SLOT_PATIENCE:.0f} seconds',
        detail="The publisher waits for transactions that were running before.",
        hint="Find them on the publisher in pg_stat_activity by xact_start, then reseed again.",
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


def _check_locked(result: Repair) -> None:
    locked = [table.name for table in result.tables if table.unrepaired]
    if locked:
        raise SubscriberError(
            f'rows of table "{locked[0]}" are locked by another transaction, and could not be repaired',
            detail="The subscription remains disabled.",
            hint="Find the transaction in pg_prepared_xacts and pg_stat_activity of the target, then reseed again.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def _finish(connection: Connection, subscription: Subscription, lsn: Lsn) -> None:
    """Let the subscription stream from `lsn`."""
    subid = subscription.oid
    await forget_publisher(connection, subid)
    await delete_prepared(connection, subid)
    await progress_records.save(connection, subid, APPLY_WORKER, lsn)
    await progress_records.save_confirmed(connection, subid, None)
    await verifications.forget(connection, subid)
    await finish_relations(connection, subid, lsn)
