"""Repair: make the rows of a subscription's tables equal to the publisher's, while replication continues.

    comparison/    finds the keys of the rows that differ, at one position
    row_repair.py  repairs the rows that are listed, in batches
    batch.py       repairs the rows of some keys in one transaction, while the apply worker is paused for a moment
    changes.py     the changes of a batch (pure)
    audit.py       the record of repaired rows (pure)
    conditions.py  what must hold before a repair
    result.py      the result
    here           tables, repetitions

The rows that differ at the first position may be the same later, or differ in another way. So each batch reads its rows
again. Rows that are equal then are left alone.

**Keys that change.** A row is missing on the target, and its key changes after the comparison: the apply worker does
not find the row, and no list has its new key. So a table with differences is compared again, until there are none.

**Extra rows.** A row that the publisher does not have may belong to another subscription, or an application may have
written it. It is counted and kept, unless it belongs to the subscription (ownership.py) or `delete_extra` is set.

**Tables that are refused.** A row that a server refuses, or the whole table, is part of the result with its reason. It
does not end the repair of the others.

**Tables that change.** A table that is dropped, rewritten, altered or locked on one side is compared again as well. The
others are repaired meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

import anyio

from subscriber import names, telemetry
from subscriber.catalog import origins
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import progress_records, repairs
from subscriber.catalog.store.subscription_rel import load_relation_states, set_extra
from subscriber.catalog.worker_sessions import REPAIR
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.comparison import (
    COMPARED_STATES,
    PART_BYTES,
    TakeSnapshot,
    compare_tables,
    load_compared,
    wait_to_repeat,
)
from subscriber.comparison.consistent_snapshot import common_snapshot
from subscriber.comparison.differences import LIMITS, ComparisonLimits
from subscriber.comparison.progress import OnProgress
from subscriber.comparison.queries import JOBS, QueryPool
from subscriber.comparison.result import Key
from subscriber.errors import StatementError, SubscriberError
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.quoting import literal
from subscriber.repair.audit import RepairAudit
from subscriber.repair.batch import RepairSessions, TableRows, own_applier
from subscriber.repair.changes import STATEMENT_SETTINGS
from subscriber.repair.conditions import check_is_enabled, check_is_free, check_names
from subscriber.repair.result import Repair, TableRepair
from subscriber.repair.row_repair import ATTEMPTS, RowRepair
from subscriber.sqlstate import UNDEFINED_TABLE
from subscriber.subscription import Subscription

APPLICATION_NAME = "subscriber repair"
PASSES = 10  # comparisons of a table after the first one
CLEANUP_TIMEOUT = 10.0  # seconds


async def repair(
    target: str,
    name: str,
    *,
    tables: Collection[str] | None = None,
    keys: Mapping[str, Sequence[Key]] | None = None,
    apply_target: str | None = None,
    delete_extra: bool = False,
    dry_run: bool = False,
    record_rows: bool = False,
    jobs: int = JOBS,
    max_rate: int | None = None,
    part_bytes: int = PART_BYTES,
    limits: ComparisonLimits = LIMITS,
    attempts: int = ATTEMPTS,
    on_progress: OnProgress = lambda _: None,
) -> Repair:
    """Make the rows of a subscription's tables equal to the publisher's.

    The launcher must be running. Writes may continue on the publisher. The apply worker is paused for moments.

    Args:
        target: the connection string of the subscription's database.
        name: the subscription.
        tables: the published tables to repair, as schema.table. None: all.
        keys: the keys that an earlier comparison has found, by table. Only the rows of these keys are
            read. None: all tables are compared.
        apply_target: the connection string of the role that applies changes, which also reads the tables. None:
            `target`.
        delete_extra: delete rows that the publisher does not have. False: they are counted and kept, unless a rule of
            ownership proves that they belong to the subscription. Rows that may belong to another one are kept always.
        dry_run: return the statements, and change nothing.
        record_rows: record the rows before and after the repair in `subscriber.repairs`, in addition to their keys.
        jobs: the number of connections to each server during the comparison.
        max_rate: the number of bytes of tables to read from each server in a second; None: no limit.
        part_bytes: the size of a part of a table in bytes, which one query reads.
        limits: the limits of the lists of keys. Tables with more differences are compared again after a repair.
        attempts: attempts for a row that is locked.
        on_progress: called at the beginning of each phase, after each query and after each batch.

    Returns:
        The number of repaired rows of each table.

    Raises:
        StatementError: there is no such subscription, it is disabled, or a table is not published.
        SubscriberError: another repair is running, the apply worker cannot be paused, or a server cannot be queried.
        ServerError: a server refuses a query.
        ConnectionLost: a server cannot be reached, or the connection was lost in each of ATTEMPTS attempts.

    Cancellation: the batch is rolled back, and the apply worker is resumed. Earlier batches remain.
    """
    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog:
        subscription = await load_compared(catalog, name)
        await check_names(catalog, subscription, [*(tables or ()), *(keys or ())])
        await check_is_enabled(catalog, subscription)
        await check_is_free(catalog, subscription)
        async with catalog.use() as connection:
            audit = RepairAudit("repair", await repairs.current_role(connection), record_rows)
        open_applier = own_applier(catalog, apply_target or target, subscription)
        reading = apply_target or target
        sessions = RepairSessions(
            catalog, target, reading, subscription, audit, open_applier, delete_extra=delete_extra
        )
        repairing = RepairRun(sessions, QueryPool(jobs, max_rate=max_rate), part_bytes, limits, attempts, on_progress)
        if dry_run or keys is not None:
            result = await repairing.run_once(tables, keys, dry_run=dry_run)
            _check_published(tables, result.tables)
            return result
        async with own_progress(catalog, subscription):
            result = await repairing.run(tables)
        await _record_extra(catalog, subscription, result)
        return result


async def _record_extra(catalog: CatalogConnection, subscription: Subscription, result: Repair) -> None:
    """Record the numbers of extra rows, which `subscriber status` shows."""
    by_name = {table.name: table for table in result.tables}
    async with catalog.use() as connection:
        for relation in await load_relation_states(connection, subscription.oid):
            table = by_name.get(f"{relation.namespace}.{relation.name}")
            if table is not None and table.note is None and table.extra != relation.extra:
                await set_extra(connection, subscription.oid, relation.relid, table.extra)


@dataclass(slots=True)
class RepairRun:
    """One repair of a subscription's tables.

    Attributes:
        sessions: read and repair the rows of a batch.
        pool: runs the queries of the comparison.
        part_bytes: the size of a part of a table in bytes, which one query reads.
        limits: the limits of the lists of keys.
        attempts: attempts for a row that is locked.
        on_progress: called at the beginning of each phase, after each query and after each batch.
        take_snapshot: takes the snapshot of both sides.
        states: the states of tables that are compared.
        is_streaming: changes are applied between the comparison and the repair.
    """

    sessions: RepairSessions
    pool: QueryPool
    part_bytes: int = PART_BYTES
    limits: ComparisonLimits = LIMITS
    attempts: int = ATTEMPTS
    on_progress: OnProgress = lambda _: None
    take_snapshot: TakeSnapshot = common_snapshot
    states: Collection[str] = COMPARED_STATES
    is_streaming: bool = True

    async def run(self, tables: Collection[str] | None = None) -> Repair:
        """Repair `tables`, or all tables. A table with differences is compared again, until there are none."""
        result = await self.run_once(tables)
        _check_published(tables, result.tables)
        by_name = {table.name: table for table in result.tables}
        left = self._unfinished(result)
        for number in range(1, PASSES + 1):
            if not left:
                break
            changed = {name: note for name in sorted(left) if (note := by_name[name].note) is not None}
            if changed:
                await wait_to_repeat(changed, f"repetition {number} of {PASSES}")
            again = await self.run_once(left)
            result.read(again.bytes_read)
            for name in left - {table.name for table in again.tables}:
                by_name[name].leave_out("it is published no longer")
            for table in again.tables:
                by_name[table.name].add(table)
            left = self._unfinished(again)
        result.repeat(left)
        return result

    def _unfinished(self, result: Repair) -> set[str]:
        """Return the tables to compare again, without those in which another attempt would change nothing."""
        stuck = {t.name for t in result.tables if not t.repaired and (t.unrepaired or not self.is_streaming)}
        stuck |= {t.name for t in result.tables if t.refused}
        if not self.is_streaming:  # the snapshot is the same
            stuck |= {t.name for t in result.tables if t.note is not None}
        return result.compare_again - stuck

    async def run_once(
        self,
        tables: Collection[str] | None,
        keys: Mapping[str, Sequence[Key]] | None = None,
        *,
        dry_run: bool = False,
    ) -> Repair:
        """Compare `tables`, or all tables, and repair the rows that are listed.

        Args:
            tables: the tables, as schema.table. None: all.
            keys: the rows to repair, by table. None: the rows that differ.
            dry_run: change nothing.
        """
        sessions = self.sessions
        lsn, compared, plans = await compare_tables(
            sessions.catalog,
            sessions.reading,
            sessions.subscription,
            self.pool.run,
            self.part_bytes,
            names=tables if keys is None else {*keys} & {*(tables or keys)},
            complete=True,
            only_plan=keys is not None,
            states=self.states,
            limits=self.limits,
            take_snapshot=self.take_snapshot,
            delete_extra=sessions.delete_extra,
            on_progress=self.on_progress,
        )
        await reached(Point.ROWS_COMPARED)
        tables_found = [TableRepair(table.name, note=table.note, remedy=table.remedy) for table in compared]
        result = Repair(lsn, tables_found, subscription=sessions.subscription.name)
        by_name = {table.name: table for table in result.tables}
        for plan in plans:
            table = by_name[plan.found.name]
            table.keep(
                0 if plan.lists_extra else plan.found.extra_count,
                tuple(writer.name for writer in plan.ownership.doubtful),
                plan.found.foreign_count,
            )
        own = own_progress(sessions.catalog, sessions.subscription) if keys and not dry_run else nullcontext()
        rows = RowRepair(sessions, result, self.on_progress, self.attempts, dry_run=dry_run)
        try:
            async with own:
                await rows.repair(
                    [
                        TableRows(
                            compared_plan,
                            keys[compared_plan.found.name] if keys is not None else _listed(compared_plan),
                        )
                        for compared_plan in plans
                    ]
                )
        finally:
            await sessions.close()
        if result.statements:
            settings = (f"SET {name} = {literal(value)};" for name, value in STATEMENT_SETTINGS.items())
            result.statements[:0] = settings
        comparisons = [plan.found for plan in plans]
        moving = self.is_streaming and keys is None and not dry_run
        differing = {
            comparison.name
            for comparison in comparisons
            if comparison.differing_buckets or (moving and comparison.listed)
        }
        result.repeat(differing | {comparison.name for comparison in compared if comparison.is_changed})
        return result


def _listed(table: ComparedTable) -> list[Key]:
    """Return the keys to read again. Rows to delete are first: another row may have their unique values."""
    differing = table.found
    return [*dict.fromkeys([*differing.extra, *differing.changed, *differing.missing])]


def _check_published(tables: Collection[str] | None, compared: Sequence[TableRepair]) -> None:
    for missing in sorted({*(tables or ())} - {table.name for table in compared}):
        raise StatementError(
            f'table "{missing}" is not published to the subscription',
            hint="Tables are named as on the publisher, with their schema: public.accounts.",
            sqlstate=UNDEFINED_TABLE,
        )


@asynccontextmanager
async def own_progress(catalog: CatalogConnection, subscription: Subscription) -> AsyncIterator[None]:
    """Make the origin and the progress record of the repair, for the length of the block.

    Rows that are written with this origin are the subscription's own, for conflict detection and `origin = none`.
    """
    origin = names.table_sync_origin(subscription.oid, REPAIR)
    async with catalog.use() as connection, connection.transaction():
        await origins.create_origin(connection, origin)
        await progress_records.save(connection, subscription.oid, REPAIR, Lsn(0))
    try:
        yield
    finally:
        with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True):
            try:
                async with catalog.use() as connection, connection.transaction():
                    await origins.drop_origin(connection, origin, missing_ok=True)
                    await progress_records.remove(connection, subscription.oid, REPAIR)
            except SubscriberError as error:
                telemetry.log(
                    telemetry.WARNING,
                    f'replication origin "{origin}" was not dropped',
                    detail=error.message,
                    hint="The next repair or DROP SUBSCRIPTION drops it.",
                    event="repair.origin_remains",
                )
