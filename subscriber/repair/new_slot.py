"""Reseed: give a subscription a new slot, and bring its tables to the publisher's rows without a copy.

    disable the subscription   its workers end
    drop the old slot, and create the new one with the same name, at position L
    one transaction            progress record at L; the tables are to be compared: state init
    enable the subscription    the launcher's table synchronization workers compare, and the stream begins at L

**Purpose.** A subscription whose slot is lost has missed changes, and its tables are nearly the publisher's. So only
checksums and rows that differ are read. The same takes over tables that were copied by other means.

**Invariant.** Each table has its own state in subscription_rel, and is streamed only when its rows have been repaired
at the position of a slot of its own (worker/tablesync/comparison.py). So a table that is ready remains so after a kill.

**Failure cases.**

- The command dies before the transaction: the subscription is disabled, and its progress record has the old position,
  which the new slot does not have. A worker that is started by hand stops with an error. The next reseed makes another
  slot.
- The command dies between the transaction and ENABLE: the next reseed repeats both, or ALTER SUBSCRIPTION ... ENABLE
  continues.
- The command dies later: the launcher continues. The next reseed finds tables that are being compared, and waits.
- The launcher, a server or a connection dies: the worker of a table that is not ready compares it again. Rows that were
  repaired are equal by then.
- A transaction of the subscription is prepared on the target: refused. Its end on the publisher is unknown, and it
  locks rows.
- A row is locked by another session: the worker of its table fails with an error that names it, and retries.
- A transaction is open on the publisher: the slot waits for it, up to SLOT_PATIENCE seconds.
- A table was being copied: its snapshot belongs to a slot that is gone, and changes since then are lost. Its copy is
  forgotten. The table is compared, or copied if it has no rows.
- Two-phase commit is enabled again when all tables are ready, as for a new subscription: a transaction that is prepared
  meanwhile is replicated at its COMMIT PREPARED.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AsyncExitStack
from datetime import datetime

import anyio

from subscriber.apply.table_states import TableState
from subscriber.catalog.commands import publisher_connection, worker_shutdown
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.store import progress_records, repairs, verifications
from subscriber.catalog.store.prepared_transactions import delete_prepared, load_prepared_names
from subscriber.catalog.store.subscription_rel import (
    SubscriptionRel,
    finish_relations,
    load_mapped_relations,
    load_relation_states,
    synchronize_again,
)
from subscriber.catalog.store.subscriptions import forget_publisher, set_two_phase_state
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.comparison.comparison import load_compared
from subscriber.comparison.consistent_snapshot import APPLICATION_NAME, open_side
from subscriber.comparison.progress import ComparisonProgress, OnProgress
from subscriber.display import sql_identifier, sql_literal
from subscriber.errors import StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher, SlotInfo
from subscriber.publisher.open_transactions import open_transactions
from subscriber.remedy import Remedy
from subscriber.repair.conditions import check_is_free
from subscriber.repair.result import Repair, TableRepair
from subscriber.repair.table_wait import SYNCHRONIZED, wait_until_synchronized
from subscriber.settings import DEFAULTS
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription, TableCopy, TwoPhaseState

COMPARED = (TableCopy.COMPARE, TableCopy.DELETE_EXTRA)
SLOT_PATIENCE = 300.0  # seconds to wait for transactions that run on the publisher


async def reseed(
    target: str,
    name: str,
    *,
    delete_extra: bool = False,
    grace: float = DEFAULTS.worker_shutdown_grace,
    on_notice: Notice = lambda *_: None,
    on_progress: OnProgress = lambda _: None,
) -> Repair:
    """Create a new slot for a subscription, and have its tables compared with the publisher's and repaired.

    A launcher must be running. The subscription is disabled for moments, and its tables stream again one after the
    other. The publisher may be written to. If an earlier call has begun and its tables are not ready, this one waits.

    Args:
        target: the connection string of the subscription's database. Its role owns the subscription or is a superuser.
        name: the subscription.
        delete_extra: delete rows that the publisher does not have. False: they are counted and kept, unless a rule of
            ownership proves that they belong to the subscription. Rows that may belong to another one are kept always.
        grace: seconds for the workers to stop before their sessions are ended.
        on_notice: called with severity, message, detail and hint of messages about the slot.
        on_progress: called at the beginning of each phase, and with each new state of a table.

    Returns:
        The number of rows of each table that were repaired during this call. Tables with a note were not repaired.

    Raises:
        StatementError: there is no such subscription, it has no slot, one of its transactions is prepared, or no
            launcher is running.
        PublisherError: the publisher cannot serve the subscription.
        SubscriberError: the slot cannot be created in time, or a table cannot be repaired now. The launcher retries it.
        ConnectionLost: a server cannot be reached, or the connection is lost. Run the command again.

    Cancellation: before the new slot is complete the subscription remains disabled. Run the command again. Later the
        launcher continues.
    """
    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog:
        subscription = await load_compared(catalog, name)
        slot = subscription.slot_name
        if slot is None:
            raise StatementError(
                f'subscription "{name}" has no replication slot',
                hint=Remedy(
                    command=f"ALTER SUBSCRIPTION {sql_identifier(name)} SET (slot_name = {sql_literal(name)});",
                    then=Remedy("reseed again."),
                ),
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await check_is_free(catalog, subscription)
        async with (
            catalog.use() as connection,
            publisher_connection.connect_to_publisher(
                connection, name, subscription.conninfo, password=subscription.must_use_password
            ) as publisher,
        ):
            since = await repairs.now(connection)
            listed = await publisher.tables(subscription.publications)
            tables = await _tables(connection, subscription, listed)
            lsn = await _position(connection, subscription, await publisher.slot(slot))
            waiting = [table for table in tables if table.copy in COMPARED and table.state not in SYNCHRONIZED]
            if lsn is None or not waiting:
                waiting = tables
                await _stop(connection, subscription, grace, on_notice, on_progress)
                lsn = await _replace_slot(publisher, slot, subscription, on_notice, on_progress)
                async with connection.transaction():
                    how = TableCopy.DELETE_EXTRA if delete_extra else TableCopy.COMPARE
                    await _begin(connection, subscription, lsn, tables, how)
                await execute(connection, f"ALTER SUBSCRIPTION {sql_identifier(name)} ENABLE", notice=on_notice)
        async with catalog.use() as connection:
            error = await wait_until_synchronized(
                connection, subscription, waiting, lambda *state: on_progress(ComparisonProgress(": ".join(state)))
            )
            if error is not None:
                raise error
            return await _result(connection, subscription, lsn, listed, since)


async def _tables(
    connection: Connection, subscription: Subscription, listed: Collection[tuple[str, str]]
) -> list[SubscriptionRel]:
    """Return the tables to compare: all but those whose copy has not begun, that have hooks, or are not published."""
    mapped = await load_mapped_relations(connection, subscription.oid)
    return [
        table
        for table in await load_relation_states(connection, subscription.oid)
        if (table.namespace, table.name) in listed
        and table.relid not in mapped
        and (table.state is not TableState.INIT or table.copy in COMPARED)
    ]


async def _position(connection: Connection, subscription: Subscription, slot: SlotInfo | None) -> Lsn | None:
    """Return the position of the subscription. None: it cannot stream from the slot."""
    position = await progress_records.load(connection, subscription.oid)
    if not subscription.enabled or slot is None or slot.is_lost or position is None:
        return None
    position = max(position, await progress_records.load_confirmed(connection, subscription.oid) or Lsn(0))
    return position if position >= (slot.confirmed_flush or Lsn(0)) else None


async def _stop(
    connection: Connection, subscription: Subscription, grace: float, notice: Notice, on_progress: OnProgress
) -> None:
    """Disable the subscription, and let no worker stream from a new slot before the tables are to be compared."""
    on_progress(ComparisonProgress("waiting for the workers to end"))
    await execute(connection, f"ALTER SUBSCRIPTION {sql_identifier(subscription.name)} DISABLE", notice=notice)
    await worker_shutdown.wait_until_gone(connection, subscription.oid, grace=grace)
    gids = await load_prepared_names(connection, subscription.oid)
    if gids:
        raise StatementError(
            f'transactions of subscription "{subscription.name}" are prepared on the target',
            detail="Their end on the publisher is unknown. The reseed brings their rows if they were committed.",
            hint=Remedy(
                "on the target",
                " ".join(f"ROLLBACK PREPARED {sql_literal(gid)};" for gid in gids),
                then=Remedy("reseed again."),
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if await progress_records.load_confirmed(connection, subscription.oid) is None:
        # A worker that is started by hand compares it with the new slot.
        await progress_records.save_confirmed(connection, subscription.oid, Lsn(1))


async def _replace_slot(
    publisher: Publisher, name: str, subscription: Subscription, notice: Notice, on_progress: OnProgress
) -> Lsn:
    """Drop the old slot if it exists, and create the new one. Returns its position."""
    on_progress(ComparisonProgress("waiting for transactions that run on the publisher"))
    with anyio.move_on_after(SLOT_PATIENCE):
        await publisher_connection.drop_slot(publisher, name, notice, missing_ok=True)
        created = await publisher.create_slot(name, snapshot="nothing", failover=subscription.failover)
        notice("NOTICE", f'created replication slot "{name}" on publisher', None, None)
        return created.consistent_point
    async with AsyncExitStack() as stack:
        session = await open_side(stack, subscription.conninfo, must_use_password=subscription.must_use_password)
        problem = await open_transactions(session, "reseed again")
    raise SubscriberError(
        f'replication slot "{name}" could not be created within {SLOT_PATIENCE:.0f} seconds',
        detail=problem.detail,
        hint=problem.hint,
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


async def _begin(
    connection: Connection, subscription: Subscription, lsn: Lsn, tables: Collection[SubscriptionRel], how: TableCopy
) -> None:
    """Let the subscription stream from `lsn`, and its tables be compared first."""
    subid = subscription.oid
    await forget_publisher(connection, subid)
    await delete_prepared(connection, subid)
    await progress_records.save(connection, subid, APPLY_WORKER, lsn)
    await progress_records.save_confirmed(connection, subid, None)
    await verifications.forget(connection, subid)
    await finish_relations(connection, subid, lsn)
    if subscription.two_phase is TwoPhaseState.ENABLED:
        await set_two_phase_state(connection, subid, TwoPhaseState.PENDING)
    for table in tables:
        await synchronize_again(connection, subid, table.relid, how)


async def _result(
    connection: Connection,
    subscription: Subscription,
    lsn: Lsn,
    listed: Collection[tuple[str, str]],
    since: datetime,
) -> Repair:
    """Return the rows that were repaired since then, and the tables that cannot be compared."""
    mapped = await load_mapped_relations(connection, subscription.oid)
    ownership = await load_ownership(connection, subscription)
    result = Repair(lsn, subscription=subscription.name)
    by_name: dict[str, TableRepair] = {}
    for table in await load_relation_states(connection, subscription.oid):
        repair = TableRepair(f"{table.namespace}.{table.name}")
        if table.relid in mapped:
            repair.leave_out("hooks change its rows on their way")
        elif (table.namespace, table.name) not in listed:
            repair.leave_out("it is part of the subscription, but the publications lack it")
        elif table.state not in SYNCHRONIZED:
            repair.leave_out("it is still being copied")
        else:
            doubtful = ownership.of(table.relid, (table.namespace, table.name)).doubtful
            repair.keep(table.extra, tuple(writer.name for writer in doubtful))
        result.tables.append(repair)
        by_name[repair.name] = repair
    async for row in repairs.load(connection, subscription.oid, since=since):
        if row.relation in by_name:
            by_name[row.relation].count(row.action)
    return result
