"""The initial copy of a subscription's tables, in parts, by many executors.

    publisher ──▶ executors ──▶ target          COPY into COPY, a part at a time (executor.py)
        ╎ snapshot  ▲ parts        │ copy_done
        ╎           │              ▼
        keeper ──▶ driver       catalog ──▶ launcher: all tables caught up and handed over together

**Purpose.** This module is the keeper. It creates a slot with an exported snapshot, keeps the connection that holds the
snapshot, divides the tables into parts, has them copied, and records which tables are complete. It runs no Spark in its
own process, unless it is given a session. The death of a driver is therefore an ordinary event: the next driver copies
the missing parts, from the same snapshot.

**Invariants.** All tables of the group are as of one position P. The group has one slot, one origin and one progress
row, under the relid GROUP. The tables go from finishedcopy to syncdone together, by one stream from P
(worker/tablesync/copy_job.py). The invariant of one table in apply/table_states.py therefore holds for each: the copy
has the transactions with F < P, the group's stream those with P <= F < T, the apply worker the rest.

**Failure cases.**

- Executor or its connections lost: its transaction rolls back, and Spark retries the part. The retry waits until the
  other attempt's transaction has ended, and finds out whether it was committed.
- Driver dies: backends may still commit the parts that it was running. The claim of copy_done shows this to the next
  attempt. The keeper starts the next driver with the missing parts.
- Target crashes: commits that were not flushed may be lost, both parts and their rows of copy_done. The keeper loses
  its session, and ends.
- Keeper or publisher lost: the snapshot is gone. Complete tables stay complete, because the slot has everything after
  P. No part can be added to the others. They were empty when they were divided, so the next keeper empties them and
  copies them from another snapshot. A table that was not empty is one part, and does not need this. The complete tables
  are handed over first, because there is only one group at a time.
- Keeper killed between the creation of the slot and the catalog's row of the copy: the next keeper drops the slot by
  its name.
- Keeper killed while it builds indexes: see indexes.py.
- Keeper killed after the last table: the slot belongs to the launcher, and is dropped after the handover
  (worker/tablesync/copy_job.py, worker/leftover_slots.py).

A row of a part is visible on the target when the part is committed, before the rest of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import anyio

from subscriber import names
from subscriber.apply.table_states import TableState
from subscriber.catalog import copy_jobs, hooked_tables, identity, origins, table_names, worker_sessions
from subscriber.catalog.commands.privileges import does_not_exist
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.copy_jobs import COPY_JOB_RELID, BulkCopy, CopiedRows
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import copied_ranges, progress_records
from subscriber.catalog.store.subscription_rel import (
    SubscriptionRel,
    load_relation_state,
    load_relation_states,
    set_relation_state,
    set_relation_states,
)
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.catalog.store.workers import WorkerStatus, report_workers
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.partitions import PART_BYTES
from subscriber.spark.copy.driver_process import run_driver
from subscriber.spark.copy.executor import APPLICATION_NAME, Failure, PartTask, copy_parts
from subscriber.spark.copy.indexes import complete_with_indexes
from subscriber.spark.copy.plan import TablePlan, bundle, plan_tables, spread
from subscriber.spark.copy.row_removal import empty
from subscriber.spark.session import MASTER, spark_session
from subscriber.spark.tasks import parallelism, run_in_thread
from subscriber.sqlstate import OBJECT_IN_USE
from subscriber.subscription import Subscription, TableCopy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL = 0.5  # seconds between two queries of the progress
DRIVERS = 5  # consecutive drivers that may end without having copied anything


@dataclass(frozen=True, slots=True)
class TableProgress:
    """The progress of one table's copy. `seconds_left` is None if there is no estimate yet."""

    name: str
    rows: int
    bytes: int
    total_bytes: int  # estimate: COPY's size differs from the size on the publisher's disk
    parts_done: int
    parts: int
    seconds_left: float | None


OnProgress = Callable[[str, Sequence[TableProgress]], None]


async def copy_tables(
    target: str,
    name: str,
    *,
    apply_target: str | None = None,
    spark: SparkSession | None = None,
    master: str = MASTER,
    part_bytes: int = PART_BYTES,
    indexes: bool = False,
    on_progress: OnProgress = lambda _phase, _tables: None,
) -> list[TableProgress]:
    """Copy the tables of a subscription that wait for their initial copy.

    The launcher then catches up the copied tables and hands them over.

    Args:
        target: the connection string of the subscription's database.
        name: the subscription.
        apply_target: the connection string of the role that applies changes there; None: `target`.
        spark: the session in which to copy; None: a driver on `master`, in another process.
        master: Spark's master URL, used without `spark`.
        part_bytes: the size of a part in bytes of the publisher's heap.
        indexes: after the copy, build the indexes that the publisher's tables have and the target's tables lack
            (indexes.py).
        on_progress: called with the phase and the tables about twice a second.

    Returns:
        The progress of each copied table; empty if no table waits.

    Raises:
        StatementError: there is no such subscription.
        MappingError: a table does not match the publisher's.
        PublisherError: the publisher cannot serve the subscription.
        ServerError: the target refuses a statement.
        ConnectionLost: a server cannot be reached, or the connection is lost.
        SubscriberError: a table cannot be copied. The other tables have been copied then.

    Cancellation: the copy ends. The next call copies the tables that are not complete.
    """
    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog:
        async with catalog.use() as connection:
            await ensure_schema(connection)
            await identity.check(connection)
            subscription = await find_subscription(connection, name)
            if subscription is None:
                raise await does_not_exist(connection, name)
            await table_names.require_all(connection, subscription)
            if not await worker_sessions.register_own(connection, subscription.oid, COPY_JOB_RELID):
                await _wait_for_handover(connection, subscription, on_progress)
        keeper = _Keeper(catalog, subscription, apply_target or target, spark, master, part_bytes, indexes, on_progress)
        return await keeper.run()


async def _wait_for_handover(connection: Connection, subscription: Subscription, on_progress: OnProgress) -> None:
    """Wait until this session holds the advisory lock of the copy.

    The launcher holds it while it hands tables over, and another keeper for as long as it copies. Raises
    SubscriberError for another keeper.
    """
    while not await worker_sessions.register_own(connection, subscription.oid, COPY_JOB_RELID):
        states = await load_relation_states(connection, subscription.oid)
        if any(state.state == TableState.DATASYNC for state in states):
            raise SubscriberError(
                f'the tables of subscription "{subscription.name}" are being copied by another process',
                sqlstate=OBJECT_IN_USE,
            )
        on_progress("waiting for the launcher to hand tables over", ())
        await anyio.sleep(POLL)


class _Keeper:
    def __init__(
        self,
        catalog: CatalogConnection,
        subscription: Subscription,
        target: str,
        spark: SparkSession | None,
        master: str,
        part_bytes: int,
        indexes: bool,
        on_progress: OnProgress,
    ) -> None:
        self._catalog = catalog
        self._subscription = subscription
        self._subid = subscription.oid
        self._target = target  # connection string of the role that applies changes
        self._spark = spark
        self._master = master
        self._part_bytes = part_bytes
        self._indexes = indexes
        self._unbuilt: list[Failure] = []  # indexes of tables that an earlier keeper has copied
        self._on_progress = on_progress
        self._started = monotonic()
        self._complete: set[int] = set()
        self._driving = anyio.CancelScope()
        self._reported: dict[int, TableProgress] = {}

    async def run(self) -> list[TableProgress]:
        """Copy until all waiting tables are complete."""
        subscription = self._subscription
        async with AsyncExitStack() as stack:
            publisher = await Publisher.connect(
                subscription.conninfo,
                application_name=APPLICATION_NAME,
                client_encoding=self._catalog.encoding,
                must_use_password=subscription.must_use_password,
            )
            stack.callback(publisher.session.abort)
            async with self._catalog.use() as connection:
                sync_id = await identity.sync_id(connection)
            slot = names.table_sync_slot(self._subid, COPY_JOB_RELID, sync_id)
            tables = []
            if await self._clear_up(publisher, slot) and not (tables := await self._claim_tables(publisher, sync_id)):
                await self._withdraw()
            if not tables:
                if self._unbuilt:
                    raise self._failed([], self._unbuilt)
                return []
            created = await publisher.create_slot(slot, snapshot="export", failover=subscription.failover)
            snapshot = created.snapshot_name or ""
            plans, failures = await self._plan(tables, snapshot)
            failures += self._unbuilt
            if plans:
                copy = await self._begin(created.consistent_point, {p.relid: len(p.parts) for p in plans})
                failures += await self._copy(plans, snapshot, copy)
            else:
                await publisher.drop_slot(slot)
                await self._withdraw()
            if failures:
                raise self._failed(plans, failures)
            return await self._progress(plans, copy.copyid)

    # --- leftovers of an earlier copy -----------------------------------------------------------------

    async def _clear_up(self, publisher: Publisher, slot: str) -> bool:
        """Hand over the complete tables, reset the incomplete ones, and drop a leftover slot.

        Returns:
            False if all tables are complete. The slot then belongs to the launcher, and there is nothing to wait for.
        """
        async with self._catalog.use() as connection:
            copy = await copy_jobs.load(connection, self._subid)
            if copy is not None:
                await self._put_back(connection, copy, has_slot=await publisher.slot(slot) is not None)
            while (copy := await copy_jobs.load(connection, self._subid)) is not None and copy.parts:
                if not await self._waiting(connection):
                    return False
                self._on_progress("waiting for the launcher to hand tables over", ())
                # The launcher needs the lock.
                await worker_sessions.release_own(connection, self._subid, COPY_JOB_RELID)
                await anyio.sleep(POLL)
                while not await worker_sessions.register_own(connection, self._subid, COPY_JOB_RELID):
                    await anyio.sleep(POLL)
            await copy_jobs.announce(connection, self._subid)
        await publisher.drop_slot(slot, missing_ok=True, wait=True)
        return True

    async def _put_back(self, connection: Connection, copy: BulkCopy, *, has_slot: bool) -> None:
        """Remove tables from `copy` that are not complete, or cannot be caught up because the slot is gone."""
        states = {state.relid: state for state in await load_relation_states(connection, self._subid)}
        left, complete = 0, list[tuple[int, str, str]]()
        for relid, parts in copy.parts.items():
            state = states.get(relid)
            done = (await copy_jobs.copied(connection, copy.copyid)).get(relid, CopiedRows())
            if state is not None and len(done.parts) == parts and has_slot:
                left += 1
                if state.state == TableState.DATASYNC:
                    complete.append((relid, state.namespace, state.name))
                continue
            begun = state is not None and state.state in (TableState.DATASYNC, TableState.FINISHEDCOPY)
            await copy_jobs.spoil(connection, copy.copyid, relid)
            if state is not None and begun and (parts > 1 or done.parts):
                ownership = await load_ownership(connection, self._subscription)
                found = ownership.of(relid, (state.namespace, state.name))
                await empty(self._target, self._subscription, state, found)
            async with connection.transaction():
                await copy_jobs.remove_table(connection, copy.copyid, relid)
                if begun:
                    await set_relation_state(connection, self._subid, relid, TableState.INIT, None)
        self._unbuilt += await self._store_complete(connection, complete)
        if not left:
            async with connection.transaction():
                await progress_records.remove(connection, self._subid, COPY_JOB_RELID)
                origin = names.table_sync_origin(self._subid, COPY_JOB_RELID)
                await origins.drop_origin(connection, origin, missing_ok=True)

    async def _withdraw(self) -> None:
        """Remove the announced copy, because there is nothing to copy."""
        async with self._catalog.use() as connection:
            copy = await copy_jobs.load(connection, self._subid)
            if copy is not None:
                await copy_jobs.remove(connection, copy.copyid)

    # --- start ------------------------------------------------------------------------------------------

    async def _waiting(self, connection: Connection) -> list[SubscriptionRel]:
        """Return the tables that are not complete.

        The launcher's table sync workers copy tables with hooks, because executors do not have the program's functions,
        tables of which some ranges are copied, and tables that are compared or emptied.
        """
        launchers = {*await hooked_tables.sources(connection, self._subid)}
        launchers |= {one.relid for one in await copied_ranges.load(connection, self._subid)}
        return [
            table
            for table in await load_relation_states(connection, self._subid, not_ready=True)
            if table.relid not in launchers
            and table.copy is TableCopy.COPY
            and table.state in (TableState.INIT, TableState.DATASYNC)
        ]

    async def _claim_tables(self, publisher: Publisher, sync_id: str) -> list[SubscriptionRel]:
        """Return the tables that no worker has copied or is copying, and take their advisory locks."""
        claimed = []
        async with self._catalog.use() as connection:
            for table in await self._waiting(connection):
                if not await worker_sessions.register_own(connection, self._subid, table.relid):
                    continue
                now = await load_relation_state(connection, self._subid, table.relid)
                if now is not None and now.state in (TableState.INIT, TableState.DATASYNC):
                    claimed.append(now)
                else:
                    await worker_sessions.release_own(connection, self._subid, table.relid)
        for table in claimed:
            if table.state == TableState.DATASYNC:  # the worker that left the table in this state has also left a slot
                leftover = names.table_sync_slot(self._subid, table.relid, sync_id)
                await publisher.drop_slot(leftover, missing_ok=True, wait=True)
        return claimed

    async def _plan(self, tables: Sequence[SubscriptionRel], snapshot: str) -> tuple[list[TablePlan], list[Failure]]:
        self._on_progress("planning", ())
        async with self._catalog.use() as connection:
            return await plan_tables(connection, self._subscription, self._target, snapshot, tables, self._part_bytes)

    async def _begin(self, lsn: Lsn, parts: dict[int, int]) -> BulkCopy:
        """Record that a copy starts at `lsn`."""
        async with self._catalog.use() as connection, connection.transaction():
            copy = await copy_jobs.add(connection, self._subid, lsn, parts)
            await origins.create_origin(connection, names.table_sync_origin(self._subid, COPY_JOB_RELID))
            await progress_records.save(connection, self._subid, COPY_JOB_RELID, lsn)
            await set_relation_states(connection, self._subid, list(parts), TableState.DATASYNC)
        return copy

    # --- copying ------------------------------------------------------------------------------------

    async def _copy(self, plans: Sequence[TablePlan], snapshot: str, copy: BulkCopy) -> list[Failure]:
        """Copy all missing parts, with one driver after another."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, plans, copy.copyid)
            failures: list[Failure] = []
            attempts = 0
            while missing := await self._missing(plans, snapshot, copy, {f.relid for f in failures}):
                attempts += 1
                try:
                    with anyio.CancelScope() as self._driving:
                        failures += await self._drive(missing)
                except SubscriberError:
                    left = await self._missing(plans, snapshot, copy, {f.relid for f in failures})
                    if len(left) < len(missing):
                        attempts = 0
                    if attempts == DRIVERS:
                        raise
            tasks.cancel_scope.cancel()
        await self._record_progress(plans, copy.copyid)
        if self._indexes:
            self._on_progress("building indexes", ())
            complete = [plan.as_complete for plan in plans if plan.relid in self._complete]
            async with self._catalog.use() as connection:
                failures += await self._store_complete(connection, complete)
        return failures

    async def _missing(
        self, plans: Sequence[TablePlan], snapshot: str, copy: BulkCopy, failed: set[int]
    ) -> list[PartTask]:
        """Return the missing parts, those of the largest tables first."""
        async with self._catalog.use() as connection:
            done = await copy_jobs.copied(connection, copy.copyid)
        return [
            task
            for plan in sorted(plans, key=lambda plan: -plan.total_bytes)
            if plan.relid not in failed
            for task in plan.tasks(
                self._subscription, self._target, snapshot, copy, done.get(plan.relid, CopiedRows()).parts
            )
        ]

    async def _drive(self, missing: Sequence[PartTask]) -> list[Failure]:
        """Copy `missing`. Raises SubscriberError if the driver ended early."""
        tasks = bundle(missing)
        if self._spark is None:
            results = await run_driver(self._master, tasks)
        else:
            with spark_session(self._spark) as spark:
                tasks = spread(tasks, parallelism(spark))
                results = await run_in_thread(spark, copy_parts, tasks)
        return [failure for failures in results for failure in failures]

    async def _watch(self, plans: Sequence[TablePlan], copyid: int) -> None:
        while True:
            await self._record_progress(plans, copyid)
            await anyio.sleep(POLL)

    async def _record_progress(self, plans: Sequence[TablePlan], copyid: int) -> None:
        """Record the complete tables, and report the progress of the others."""
        progress = await self._progress(plans, copyid)
        async with self._catalog.use() as connection:
            pid = connection.get_server_pid()
            news, complete = [], []
            for plan, table in zip(plans, progress, strict=True):
                if table.parts_done == table.parts and plan.relid not in self._complete:
                    complete.append(plan.as_complete)
                if self._reported.get(plan.relid) != table:
                    self._reported[plan.relid] = table
                    news.append((plan.relid, table))
            if not self._indexes:
                await self._store_complete(connection, complete)
            self._complete.update(relid for relid, _, _ in complete)
            await report_workers(connection, [self._status(relid, table, pid) for relid, table in news])
        self._on_progress("copying", progress)
        if self._spark is None and len(self._complete) == len(plans):
            self._driving.cancel()  # the driver would take seconds to end, and its result is not needed

    async def _store_complete(self, connection: Connection, tables: Sequence[tuple[int, str, str]]) -> list[Failure]:
        """Record tables as complete. Returns the indexes that could not be built.

        The commit is synchronous, so that all parts are durable when the state is.
        """
        if self._indexes:
            return await complete_with_indexes(self._subscription, connection, tables)
        await set_relation_states(connection, self._subid, [relid for relid, _, _ in tables], TableState.FINISHEDCOPY)
        return []

    def _status(self, relid: int, table: TableProgress, pid: int) -> WorkerStatus:
        return WorkerStatus(
            self._subid,
            relid,
            "table synchronization",
            "copied" if relid in self._complete else "copying",
            pid,
            copy_rows=table.rows,
            copy_bytes=table.bytes,
            copy_total_bytes=table.total_bytes,
        )

    async def _progress(self, plans: Sequence[TablePlan], copyid: int) -> list[TableProgress]:
        async with self._catalog.use() as connection:
            done = await copy_jobs.copied(connection, copyid)
        passed = monotonic() - self._started
        return [_table_progress(plan, done.get(plan.relid, CopiedRows()), passed) for plan in plans]

    def _failed(self, plans: Sequence[TablePlan], failures: Sequence[Failure]) -> SubscriberError:
        first = failures[0]
        names = {plan.relid: plan.label for plan in plans}
        tables = sorted({names.get(failure.relid, "") for failure in failures} - {""})
        return SubscriberError(
            f'could not copy table "{names[first.relid]}": {first.message}' if first.relid in names else first.message,
            detail=f"Tables that could not be copied: {', '.join(tables)}." if len(tables) > 1 else None,
            hint=first.hint,
            sqlstate=first.sqlstate,
        )


def _table_progress(plan: TablePlan, copied: CopiedRows, passed: float) -> TableProgress:
    done, parts = len(copied.parts), len(plan.parts)
    return TableProgress(
        name=plan.label,
        rows=copied.rows,
        bytes=copied.bytes,
        total_bytes=plan.total_bytes,
        parts_done=done,
        parts=parts,
        seconds_left=round(passed / done * (parts - done)) if done else None,
    )
