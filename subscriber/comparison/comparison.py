"""Comparison of all tables of a subscription at one position, while writes continue.

    consistent_snapshot.py   one position, and a snapshot of each side there
    table_plans.py           the tables that can be compared, and their columns
    differences.py           the differences
    checksums.py             the queries: sums of buckets of rows, then the rows of buckets that differ
    queries.py               runs the queries in a few connections to each server
    result.py                the result
    here                     the comparison of a subscription, as a whole or in groups of tables

Both servers compute hashes of their own rows, concurrently. A row that differs costs a second read of its bucket, of
about a thousand rows. The result names keys and columns, never values.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio

from subscriber import telemetry
from subscriber.catalog import identity
from subscriber.catalog.commands.privileges import check_manager, does_not_exist
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.memberships import ComparisonResult, record_comparison
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.consistent_snapshot import APPLICATION_NAME, CommonSnapshot, common_snapshot
from subscriber.comparison.differences import LIMITS, ComparisonLimits, Differences, RunQueries
from subscriber.comparison.progress import ComparisonProgress, OnProgress
from subscriber.comparison.queries import JOBS, QueryPool, ServerSnapshot
from subscriber.comparison.result import ComparedRows, Comparison, TableComparison
from subscriber.comparison.state_file import ComparisonState
from subscriber.comparison.table_plans import TablePlans
from subscriber.comparison.tracked import TrackedComparison, not_tracked
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.sqlstate import INVALID_PARAMETER_VALUE
from subscriber.subscription import Subscription

GROUP_BYTES = 1024 * 1024 * 1024  # of tables with one snapshot, in a comparison that can be resumed
PART_BYTES = 32 * 1024 * 1024  # of a heap; one query, a second or less
ATTEMPTS = 5  # of the comparison of a table that is rewritten, altered or locked meanwhile
RETRY_DELAY = 1.0  # seconds
# A table in syncdone has all changes before the common position, as one in ready.
COMPARED_STATES = ("s", "r")


async def verify(
    target: str,
    name: str,
    *,
    apply_target: str | None = None,
    jobs: int = JOBS,
    max_rate: int | None = None,
    part_bytes: int = PART_BYTES,
    since_last: bool = False,
    resume: Path | None = None,
    group_bytes: int = GROUP_BYTES,
    on_progress: OnProgress = lambda _: None,
) -> Comparison:
    """Compare every table of a subscription with the publisher's.

    The launcher must be running. Writes may continue.

    Args:
        target: the connection string of the subscription's database.
        name: the subscription, which needs `track_ranges` for `since_last`.
        apply_target: the connection string of the role that applies changes, which also reads the tables. None:
            `target`.
        jobs: the number of connections to each server.
        max_rate: the number of bytes of tables to read from each server in a second; None: no limit.
        part_bytes: the size of a part of a table in bytes, which one query reads.
        since_last: read only rows in ranges of keys that the stream has changed since the last comparison. A table with
            a difference in the last comparison is read as a whole. See `Comparison.is_complete`.
        resume: a file for the results of tables that are compared. If it exists, these tables are not compared again.
            Tables are compared in groups, each at a position of its own. The file is removed at the end.
        group_bytes: the size of such a group in bytes. A larger table is a group of its own.
        on_progress: called at the beginning of each phase, and after each query.

    Returns:
        The differences of each table, as of one position of the publisher.

    Raises:
        StatementError: there is no such subscription, or no last comparison.
        SubscriberError: the apply worker cannot be paused, or a server cannot be queried.
        PublisherError: the publisher cannot serve the subscription.
        ServerError: a server refuses a query.
        ConnectionLost: a server cannot be reached, or the connection is lost.

    Cancellation: the apply worker is resumed, and running queries are interrupted.
    """
    run = QueryPool(jobs, max_rate=max_rate).run
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(CatalogConnection.open(target, APPLICATION_NAME))
        subscription = await load_compared(catalog, name)
        if since_last and not subscription.track_ranges:
            raise not_tracked(subscription)
        reading = apply_target or target
        if resume is not None:
            if since_last:
                raise StatementError(
                    "a comparison since the last one cannot be resumed",
                    hint="Repeat it. It reads little, and a killed one has no effect.",
                    sqlstate=INVALID_PARAMETER_VALUE,
                )
            state = ComparisonState.load(resume, subscription)
            return await _compare_groups(
                catalog, reading, subscription, run, part_bytes, state, group_bytes, on_progress
            )
        tracked = TrackedComparison(target, subscription, since_last=since_last) if subscription.track_ranges else None
        compare_once = partial(compare_tables, catalog, reading, subscription, run, part_bytes, on_progress=on_progress)
        lsn, tables, _ = await compare_once(tracked=tracked)
        return Comparison.of(await compare_changed_again(tables, compare_once), lsn)


async def _compare_groups(
    catalog: CatalogConnection,
    target: str,
    subscription: Subscription,
    run: RunQueries,
    part_bytes: int,
    state: ComparisonState,
    group_bytes: int,
    on_progress: OnProgress,
) -> Comparison:
    """Compare the tables that `state` does not have, each group at a position of its own.

    A snapshot lasts as long as the comparison of its group, so VACUUM is not held back for the whole time.
    """
    compare_once = partial(compare_tables, catalog, target, subscription, run, part_bytes, on_progress=on_progress)
    lsn, listed, plans = await compare_once(only_plan=True)
    done = {table.name for table in state.tables}
    for names in _groups([plan for plan in plans if plan.found.name not in done], group_bytes):
        _, tables, _ = await compare_once(names=names)
        state.add(await compare_changed_again(tables, compare_once))
    results = {table.name: table for table in state.tables}
    state.remove()
    return Comparison.of([results.get(table.name, table) for table in listed], lsn)


async def wait_to_repeat(notes: Mapping[str, str | None], number: str) -> None:
    """Log that tables are compared again, and wait until the cause may have passed.

    Args:
        notes: the reason for each table, by its name.
        number: the number of the attempt, as in "attempt 2 of 5".
    """
    for name, note in notes.items():
        telemetry.log(
            telemetry.LOG,
            f'table "{name}" is compared again: {note}',
            detail=f"This is {number}. The other tables are not affected.",
            event="comparison.again",
        )
    await anyio.sleep(RETRY_DELAY)


class CompareOnce(Protocol):
    """Compares some tables at one position, see compare_tables()."""

    def __call__(
        self, *, names: Collection[str]
    ) -> Awaitable[tuple[Lsn, list[TableComparison], list[ComparedTable]]]: ...


async def compare_changed_again(tables: Sequence[TableComparison], compare_once: CompareOnce) -> list[TableComparison]:
    """Compare those tables again that were rewritten, altered or locked meanwhile, each time at another position.

    Args:
        tables: the results of the first attempt.
        compare_once: compares some tables.

    Returns:
        The last result of each table. A table that was changed in each of ATTEMPTS attempts is not compared.

    Raises:
        The errors of verify().
    """
    results = {table.name: table for table in tables}
    for attempt in range(2, ATTEMPTS + 1):
        changed = [table for table in results.values() if table.is_changed]
        if not changed:
            break
        await wait_to_repeat({table.name: table.note for table in changed}, f"attempt {attempt} of {ATTEMPTS}")
        _, again, _ = await compare_once(names=[table.name for table in changed])
        by_name = {table.name: table for table in again}
        for table in changed:
            results[table.name] = by_name.get(table.name) or TableComparison(
                table.name, note="it is published no longer"
            )
    for table in results.values():
        if table.is_changed:
            table.leave_out(f"{table.note}, in the last of {ATTEMPTS} attempts", is_changed=True)
    return list(results.values())


def _groups(plans: Sequence[ComparedTable], group_bytes: int) -> Iterator[list[str]]:
    """Yield the names of tables in groups of `group_bytes`. A larger table is a group of its own."""
    group: list[str] = []
    size = 0
    for plan in plans:
        if group and size + plan.published.total_bytes > group_bytes:
            yield group
            group, size = [], 0
        group.append(plan.found.name)
        size += plan.published.total_bytes
    if group:
        yield group


async def load_compared(catalog: CatalogConnection, name: str) -> Subscription:
    """Return the subscription to compare.

    Raises:
        StatementError: there is no such subscription, or the role may not manage it.
        CatalogMoved: the subscriptions belong to another database.
    """
    async with catalog.use() as connection:
        await ensure_schema(connection)
        await identity.check(connection)
        subscription = await find_subscription(connection, name)
        if subscription is None:
            raise await does_not_exist(connection, name)
        await check_manager(connection, subscription)
    return subscription


TakeSnapshot = Callable[[CatalogConnection, str, Subscription], AbstractAsyncContextManager[CommonSnapshot]]


async def compare_tables(
    catalog: CatalogConnection,
    target: str,
    subscription: Subscription,
    run: RunQueries,
    part_bytes: int,
    *,
    names: Collection[str] | None = None,
    complete: bool = False,
    only_plan: bool = False,
    states: Collection[str] = COMPARED_STATES,
    limits: ComparisonLimits = LIMITS,
    take_snapshot: TakeSnapshot = common_snapshot,
    tracked: TrackedComparison | None = None,
    delete_extra: bool | None = None,
    on_progress: OnProgress = lambda _: None,
) -> tuple[Lsn, list[TableComparison], list[ComparedTable]]:
    """Compare tables of a subscription.

    Args:
        catalog: a connection to the target.
        target: the connection string of the target for the role that reads rows: it applies changes.
        subscription: the subscription.
        run: runs the queries.
        part_bytes: the size of a part of a table in bytes, which one query reads.
        names: the tables, as schema.table. None: all.
        complete: list up to limits.keys keys of each table, instead of KEYS of each kind of difference. Buckets that
            differ are divided first, so that the servers send the rows of small ones only.
        only_plan: compare nothing, and return only how the tables would be compared.
        states: the states of tables that are compared.
        limits: the limits of the lists.
        take_snapshot: takes the snapshot of both sides.
        delete_extra: list rows that only the target has if a repair may delete them, see TableOwnership.may_delete().
            None: list them always.
        tracked: knows which ranges were touched. None: all rows are read, and nothing is stored.
        on_progress: see verify().

    Returns:
        The position, the comparison of each table, and the tables that could be compared.

    Raises:
        The errors of verify().
    """
    async with AsyncExitStack() as stack:
        on_progress(ComparisonProgress("waiting for a common position"))
        if tracked is not None:
            take_snapshot = partial(common_snapshot, at_rest=tracked.begin)
        snapshot = await stack.enter_async_context(take_snapshot(catalog, target, subscription))
        async with catalog.use() as connection:
            ownership = await load_ownership(connection, subscription)
        tables, plans = await TablePlans(catalog, subscription, snapshot, ownership).read(part_bytes, names, states)
        for table in tables:
            table.lsn = snapshot.lsn
        for plan in plans:
            plan.lists_extra = delete_extra is None or plan.ownership.may_delete(delete_extra=delete_extra)
        if only_plan:
            return snapshot.lsn, tables, plans
        read = plans if tracked is None else tracked.divide(plans)
        servers = (
            ServerSnapshot(subscription.conninfo, subscription.must_use_password, snapshot.source),
            ServerSnapshot(target, False, snapshot.target),
        )
        differences = Differences(run, servers, snapshot.lsn, on_progress, limits, complete=complete)
        await differences.divide(
            [plan for plan in read if plan.range_key is not None and plan.sides[0].selection is None]
        )
        await differences.foreign_rows([plan for plan in read if plan.sides[0].owned is not None])
        await differences.sums(read)
        await differences.ranges([plan for plan in read if plan.range_width is not None and plan.wanted])
        await differences.refine([plan for plan in read if plan.is_worth_refining(limits.buckets)])
        await differences.rows([plan for plan in read if plan.wanted])
        if tracked is not None:
            await tracked.end(snapshot.lsn, plans)
        kept = {plan.found.name for plan in plans if not plan.lists_extra}
        results = {
            compared.name: ComparisonResult(
                compared.is_same, compared.differs, 0 if compared.name in kept else compared.extra_count
            )
            for compared in tables
            if compared.note is None and (compared.compared is ComparedRows.ALL or not compared.is_same)
        }
        async with catalog.use() as connection:
            await record_comparison(connection, subscription.oid, results, snapshot.lsn)
        return snapshot.lsn, tables, plans
