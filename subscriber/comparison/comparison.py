"""Comparison of all tables of a subscription at one position, while writes continue.

    consistent_snapshot.py   one position, and a snapshot of each side there
    checksums.py             the queries: sums of buckets of rows, then the rows of buckets that differ
    queries.py               runs the queries in a few connections to each server
    result.py                the result
    here                     tables and columns, and the differences

Both servers compute hashes of their own rows, concurrently. A row that differs costs a second read of its bucket, of
about a thousand rows. The result names keys and columns, never values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from subscriber.apply.batch.eligibility import FIRST_NORMAL_OID
from subscriber.apply.relation_map import RelationMapping
from subscriber.catalog import identity
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.subscription_rel import relation_sources_query
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.comparison.checksums import (
    BYTES_OF_A_ROW,
    ROWS_IN_A_BUCKET,
    ROWS_IN_A_SMALL_RANGE,
    Answer,
    Sums,
    TableSide,
    add_up,
    buckets_for,
    differing,
    refined_parts,
)
from subscriber.comparison.columns import HASHED_VALUES, ComparedColumn, Conversion
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.consistent_snapshot import APPLICATION_NAME, CommonSnapshot, common_snapshot
from subscriber.comparison.key_selection import range_width
from subscriber.comparison.queries import JOBS, ChecksumTask, OnTaskDone, Outcome, QueryPool, ServerSnapshot
from subscriber.comparison.result import KEYS, Comparison, Key, TableComparison
from subscriber.comparison.state_file import ComparisonState
from subscriber.comparison.tracked import TrackedComparison, not_tracked
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.display import sql_identifier
from subscriber.errors import MappingError, StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import CODECS, decode
from subscriber.publisher.answers import parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.partitions import TablePartition, heaps, partition_table
from subscriber.publisher.tables import PublishedTable, as_relation
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, UNDEFINED_OBJECT
from subscriber.subscription import Subscription
from subscriber.targets.postgres.row_applier import RowApplier

GROUP_BYTES = 1024 * 1024 * 1024  # of tables with one snapshot, in a comparison that can be resumed
PART_BYTES = 32 * 1024 * 1024  # of a heap; one query, a second or less


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """The limits of what is read again, and kept in memory.

    Attributes:
        buckets: buckets of a table whose rows are read. If more differ, only their number is reported. For a complete
            list they are divided first.
        rows: rows of a table whose keys and hashes are in memory, for each side.
        keys: keys of a table in a complete list.
    """

    buckets: int = 256
    rows: int = 100_000
    keys: int = 500_000


LIMITS = ComparisonLimits()
MOST_PARTS = 16  # of a heap
# A table in syncdone has all changes before the common position, as one in ready.
COMPARED_STATES = ("s", "r")


_NAMES = """
SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid IN ({oids}) ORDER BY 1, 2
"""
# With the base type of a domain, whose text is the domain's.
_TYPES = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), pg_catalog.format_type(b.type, b.modifier)
  FROM pg_catalog.pg_attribute a CROSS JOIN LATERAL (
       WITH RECURSIVE bases(type, modifier, depth) AS (
         SELECT a.atttypid, a.atttypmod, 0
         UNION ALL
         SELECT t.typbasetype, CASE t.typtypmod WHEN -1 THEN b.modifier ELSE t.typtypmod END, b.depth + 1
           FROM bases b JOIN pg_catalog.pg_type t ON t.oid = b.type WHERE t.typtype = 'd')
       SELECT type, modifier FROM bases ORDER BY depth DESC LIMIT 1) b
 WHERE a.attrelid = {relid} AND a.attnum > 0 AND NOT a.attisdropped
"""


class PrintedType(NamedTuple):
    """The type of a column, and that of its values if it is a domain, as format_type() prints them."""

    name: str
    base: str


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """How far a comparison is.

    `done` and `total` are bytes of tables on both servers, or rows to repair, see `unit`; 0 and 0: not known yet.
    """

    phase: str
    done: int = 0
    total: int = 0
    unit: str = "bytes"


OnProgress = Callable[[ComparisonProgress], None]


class RunQueries(Protocol):
    """Runs queries on the servers, and returns the outcome of each in order. Raises an error that is not a value's."""

    def __call__(self, tasks: Sequence[ChecksumTask], on_done: OnTaskDone, /) -> Awaitable[list[Outcome]]: ...


async def verify(
    target: str,
    name: str,
    *,
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
    pool = QueryPool(jobs, max_rate=max_rate)
    return await compare(
        target,
        name,
        pool.run,
        part_bytes=part_bytes,
        since_last=since_last,
        resume=resume,
        group_bytes=group_bytes,
        on_progress=on_progress,
    )


async def compare(
    target: str,
    name: str,
    run: RunQueries,
    *,
    part_bytes: int,
    since_last: bool = False,
    resume: Path | None = None,
    group_bytes: int = GROUP_BYTES,
    on_progress: OnProgress = lambda _: None,
) -> Comparison:
    """Compare every table with queries that `run` runs. The other arguments and errors are those of verify()."""
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(CatalogConnection.open(target, APPLICATION_NAME))
        subscription = await load_compared(catalog, name)
        if since_last and not subscription.track_ranges:
            raise not_tracked(subscription)
        if resume is not None:
            if since_last:
                raise StatementError(
                    "a comparison since the last one cannot be resumed",
                    hint="Repeat it. It reads little, and a killed one has no effect.",
                    sqlstate=INVALID_PARAMETER_VALUE,
                )
            state = ComparisonState.load(resume, subscription)
            return await _compare_groups(
                catalog, target, subscription, run, part_bytes, state, group_bytes, on_progress
            )
        tracked = TrackedComparison(target, subscription, since_last=since_last) if subscription.track_ranges else None
        lsn, tables, _ = await compare_tables(
            catalog, target, subscription, run, part_bytes, tracked=tracked, on_progress=on_progress
        )
        return Comparison(lsn, tables)


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
    lsn, listed, plans = await compare_tables(
        catalog, target, subscription, run, part_bytes, only_plan=True, on_progress=on_progress
    )
    done = {table.name for table in state.tables}
    for names in _groups([plan for plan in plans if plan.found.name not in done], group_bytes):
        lsn, tables, _ = await compare_tables(
            catalog, target, subscription, run, part_bytes, names=names, on_progress=on_progress
        )
        state.add(tables)
    found = {table.name: table for table in state.tables}
    state.remove()
    return Comparison(lsn, [found.get(table.name, table) for table in listed])


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
        StatementError: there is no such subscription.
        CatalogMoved: the subscriptions belong to another database.
    """
    async with catalog.use() as connection:
        await ensure_schema(connection)
        await identity.check(connection)
        subscription = await find_subscription(connection, name)
    if subscription is None:
        raise StatementError(f'subscription "{name}" does not exist', sqlstate=UNDEFINED_OBJECT)
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
    on_progress: OnProgress = lambda _: None,
) -> tuple[Lsn, list[TableComparison], list[ComparedTable]]:
    """Compare tables of a subscription.

    Args:
        catalog: a connection to the target.
        target: the connection string of the target.
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
        comparing = _Compare(run, subscription, target, snapshot, on_progress, limits, complete=complete)
        tables, plans = await comparing.plan(part_bytes, names, states)
        for table in tables:
            table.lsn = snapshot.lsn
        if only_plan:
            return snapshot.lsn, tables, plans
        read = plans if tracked is None else tracked.divide(plans)
        await comparing.divide([plan for plan in read if plan.has_integer_key and plan.sides[0].selection is None])
        await comparing.sums(read)
        await comparing.ranges([plan for plan in read if plan.range_width is not None and plan.wanted])
        if complete:
            await comparing.refine([plan for plan in read if len(plan.wanted) > limits.buckets])
        await comparing.rows([plan for plan in read if plan.wanted])
        if tracked is not None:
            await tracked.end(snapshot.lsn, plans)
        return snapshot.lsn, tables, plans


class _Compare:
    def __init__(
        self,
        run: RunQueries,
        subscription: Subscription,
        target: str,
        snapshot: CommonSnapshot,
        on_progress: OnProgress,
        limits: ComparisonLimits,
        *,
        complete: bool,
    ) -> None:
        self._limits = limits
        self._run = run
        self._complete = complete
        self._on_progress = on_progress
        self._subscription = subscription
        self._servers = (
            ServerSnapshot(subscription.conninfo, subscription.must_use_password, snapshot.source),
            ServerSnapshot(target, False, snapshot.target),
        )
        self._snapshot = snapshot
        self._sessions = (snapshot.source_session, snapshot.target_session)
        self._publisher = Publisher(snapshot.source_session)
        self._local = RowApplier(Pipeline(snapshot.target_session), "", lambda *_: None)

    # --- what to compare --------------------------------------------------------------------------

    async def plan(
        self, part_bytes: int, names: Collection[str] | None, compared_states: Collection[str]
    ) -> tuple[list[TableComparison], list[ComparedTable]]:
        """Return a comparison for each table of `names`, and the plans of the tables that can be compared."""
        subscription = self._subscription
        tables, plans = [], []
        states, with_hooks = await self._states()
        listed = await self._publisher.tables(subscription.publications)
        if names is None:
            tables += await self._unpublished(states, listed)
        for schema, name in listed:
            found = TableComparison(f"{schema}.{name}")
            if names is not None and found.name not in names:
                continue
            tables.append(found)
            if (schema, name) in with_hooks:
                found.note = "hooks change its rows on their way"
                continue
            published = await self._publisher.table(schema, name, subscription.publications)
            self._local.pipeline.attach()  # the session is used for queries as well
            try:
                mapping = await self._local.map_relation(as_relation(published))
            except MappingError as error:
                found.note = error.message
                continue
            state = states.get(mapping.local.oid)
            if state is None or state[0] not in compared_states:
                found.note = "it is not part of the subscription yet" if state is None else "it is still being copied"
                continue
            plans.append(await self._plan_table(found, published, mapping, state, part_bytes))
        return tables, plans

    async def _states(self) -> tuple[dict[int, tuple[str, str]], set[tuple[str | None, str | None]]]:
        """Return, in the target's snapshot, the states of tables without hooks by OID, and names of the others."""
        session = self._snapshot.target_session
        await session.query("SET LOCAL row_security = on")  # a role without superuser sees its own subscriptions
        found = await session.rows(relation_sources_query(self._subscription.oid))
        await session.query("SET LOCAL row_security = off")
        with_hooks: set[tuple[str | None, str | None]] = {
            (schema, name) for _, _, _, schema, name in found if name is not None
        }
        states = {int(relid or 0): (state or "", lsn or "") for relid, state, lsn, _, name in found if name is None}
        return states, with_hooks

    async def _unpublished(
        self, states: Collection[int], listed: Collection[tuple[str | None, str | None]]
    ) -> list[TableComparison]:
        """Return a comparison for each table of the subscription that the publications do not have."""
        oids = ", ".join(map(str, states)) or "0"
        rows = await self._snapshot.target_session.rows(_NAMES.format(oids=oids))
        return [
            TableComparison(f"{schema}.{name}", note="it is part of the subscription, but the publications lack it")
            for schema, name in rows
            if (schema, name) not in listed
        ]

    async def _plan_table(
        self,
        found: TableComparison,
        published: PublishedTable,
        mapping: RelationMapping,
        state: tuple[str, str],
        part_bytes: int,
    ) -> ComparedTable:
        relids = (published.relid, mapping.local.oid)
        types = [await self._types(session, relid) for session, relid in zip(self._sessions, relids, strict=True)]
        checks_input = self._sessions[0].server_version >= 160000
        source, target = [], []
        for column, local in zip(published.columns, mapping.attributes, strict=True):
            ours, theirs = types[0].get(column.name), types[1][local.name]
            conversion, source_type = None, "" if ours is None else ours.base
            # A type that belongs to the target, written with its schema, is not the publisher's.
            if ours is not None and ours.base != theirs.base and "." not in theirs.base:
                conversion = Conversion(ours.base, theirs.base, checks_input)
            built_in = ours == theirs and column.type_oid < FIRST_NORMAL_OID
            equal_type = theirs.name if built_in else None
            hashed = HASHED_VALUES.get(column.type_oid) if built_in else None
            source.append(ComparedColumn(column.name, source_type, conversion, equal_type, hashed))
            target.append(ComparedColumn(local.name, theirs.base, None, equal_type, hashed))
        encodings = [session.parameters["server_encoding"] for session in self._sessions]
        converts = encodings[0] != encodings[1]
        hashes_records = not converts and min(session.server_version for session in self._sessions) >= 140000
        key = mapping.search or ()
        found.key = tuple(mapping.attributes[index].name for index in key)
        part_bytes = max(part_bytes, published.total_bytes // MOST_PARTS)  # each part has sums of nearly all buckets
        parts = (
            await partition_table(self._snapshot.source_session, published.relid, part_bytes),
            await partition_table(self._snapshot.target_session, mapping.local.oid, part_bytes),
        )
        return ComparedTable(
            found,
            (
                TableSide(tuple(source), key, published.row_filters, encodings[1], converts, hashes_records),
                TableSide(tuple(target), key, (), encodings[1], converts, hashes_records),
            ),
            parts,
            tuple(column.name for column in mapping.attributes),
            published,
            (mapping.local.schema, mapping.local.name),
            mapping.local.oid,
            *state,
            buckets_for(published.total_bytes // BYTES_OF_A_ROW),
        )

    async def _types(self, session: Session, relid: int) -> dict[str, PrintedType]:
        rows = await session.rows(_TYPES.format(relid=relid))
        with parsing("types"):
            return {name or "": PrintedType(type_name or "", base or "") for name, type_name, base in rows}

    # --- comparing --------------------------------------------------------------------------------

    async def _run_all(
        self,
        plans: Sequence[ComparedTable],
        phase: str,
        sql: Callable[[ComparedTable, int, TablePartition], str],
        *,
        whole_heaps: bool = False,
    ) -> list[tuple[list[Answer], list[Answer]]]:
        """Run the same query for all parts of both sides, or for whole heaps.

        Returns both sides' results for each plan, and notes each table whose query has failed.
        """
        places, tasks = [], []
        for number, plan in enumerate(plans):
            for side, server in enumerate(self._servers):
                for part in heaps(plan.parts[side]) if whole_heaps else plan.parts[side]:
                    places.append((number, side))
                    by_key = plan.sides[side].selection is not None
                    tasks.append(ChecksumTask(server, part, sql(plan, side, part), by_key))
        total, done = sum(task.part.size for task in tasks), 0

        def on_done(task: ChecksumTask) -> None:
            nonlocal done
            done += task.part.size
            self._on_progress(ComparisonProgress(phase, done, total))

        self._on_progress(ComparisonProgress(phase, 0, total))
        found: list[tuple[list[Answer], list[Answer]]] = [([], []) for _ in plans]
        for (number, side), outcome in zip(places, await self._run(tasks, on_done), strict=True):
            if isinstance(outcome, SubscriberError):
                plans[number].found.note = _cannot_be_read(plans[number], side, outcome)
            else:
                found[number][side].append(outcome)
        return found

    async def divide(self, plans: Sequence[ComparedTable]) -> None:
        """Divide tables into ranges of their integer keys, unless the keys are too sparse."""
        rows_in_range = ROWS_IN_A_SMALL_RANGE if self._complete else ROWS_IN_A_BUCKET
        found = await self._run_all(
            [plan.select(None) for plan in plans],
            "reading keys",
            lambda plan, side, part: plan.sides[side].bounds(part),
        )
        for plan, (source, target) in _readable(plans, found):
            with parsing("keys"):
                bounds = [value for answer in (*source, *target) for row in answer for value in row]
                keys = [value for value in bounds if isinstance(value, int)]
                if keys:
                    rows = plan.published.total_bytes // BYTES_OF_A_ROW
                    width = range_width(min(keys), max(keys), rows, rows_in_range)
                    if width is not None:
                        plan.divide(width)

    async def sums(self, plans: Sequence[ComparedTable]) -> None:
        """Find the buckets that differ."""
        phase = f"comparing at {self._snapshot.lsn}"
        answers = await self._run_all(plans, phase, lambda plan, side, part: plan.sides[side].sums(part, plan.buckets))
        for plan, (source, target) in _readable(plans, answers):
            _note_buckets(plan, add_up(source), add_up(target), None if self._complete else self._limits.buckets)

    async def ranges(self, plans: Sequence[ComparedTable]) -> None:
        """Find the keys and then the rows that differ in the ranges that differ. The servers use an index."""
        for plan in plans:
            width = plan.range_width or 0
            ranges, plan.wanted = plan.wanted, []
            at_once = max(1, self._limits.rows >> width)
            while ranges and plan.found.note is None:
                if self._complete and plan.found.listed >= self._limits.keys:
                    plan.found.differing_buckets = len(ranges)
                    break
                parts = plan.select_ranges(ranges[:at_once], width, buckets=0)
                answers = await self._run_all(
                    parts,
                    f"comparing ranges of {plan.found.name}",
                    lambda part, side, heap: part.sides[side].sums(heap, part.buckets),
                )
                keys = [
                    key
                    for _, (source, target) in _readable(parts, answers)
                    for key in differing(add_up(source), add_up(target))
                ]
                plan.found.unexplained_buckets += not keys
                await self.rows([replace(part, buckets=1, wanted=[0]) for part in plan.select_ranges(keys, 0)])
                ranges = ranges[at_once:]

    async def refine(self, plans: Sequence[ComparedTable]) -> None:
        """Divide the buckets that differ, and find the parts that differ."""
        if not plans:
            return
        coarse = [(plan.buckets, plan.wanted) for plan in plans]
        for plan in plans:
            plan.buckets *= refined_parts(max(plan.found.rows, plan.found.target_rows), plan.buckets)
        within = {id(plan): before for plan, before in zip(plans, coarse, strict=True)}
        answers = await self._run_all(
            plans,
            f"comparing parts of {len(plans)} tables",
            lambda plan, side, part: plan.sides[side].sums(
                part, plan.buckets, within[id(plan)][1], within[id(plan)][0]
            ),
            whole_heaps=True,  # a bucket has few rows, which are in many parts
        )
        for plan, (source, target) in _readable(plans, answers):
            plan.wanted = differing(add_up(source), add_up(target))

    async def rows(self, plans: Sequence[ComparedTable]) -> None:
        """Find the rows of these buckets that differ, and their columns. Memory: ComparisonLimits.rows."""
        limit = self._limits.keys if self._complete else KEYS
        left = {id(plan): list(plan.wanted) for plan in plans}
        while plans:
            for plan in plans:
                rows = max(plan.found.rows, plan.found.target_rows, 1)
                at_once = max(1, self._limits.rows * plan.buckets // rows)
                plan.wanted, left[id(plan)] = left[id(plan)][:at_once], left[id(plan)][at_once:]
            answers = await self._run_all(
                plans,
                f"reading rows of {len({plan.found.name for plan in plans})} tables",
                lambda plan, side, part: plan.sides[side].rows(
                    part, plan.buckets, plan.wanted, columns=not self._complete
                ),
            )
            for plan, (source, target) in _readable(plans, answers):
                _note_rows(plan, source, target, limit, columns=not self._complete)
                if self._complete and plan.found.listed >= limit:
                    plan.found.differing_buckets, left[id(plan)] = len(left[id(plan)]), []
            plans = [plan for plan in plans if left[id(plan)] and plan.found.note is None]


def _readable(
    plans: Sequence[ComparedTable], answers: Sequence[tuple[list[Answer], list[Answer]]]
) -> Iterator[tuple[ComparedTable, tuple[list[Answer], list[Answer]]]]:
    """Yield each plan with the results of both sides, apart from tables whose query has failed."""
    for plan, found in zip(plans, answers, strict=True):
        if plan.found.note is None:
            yield plan, found
        else:
            plan.wanted = []


def _cannot_be_read(plan: ComparedTable, side: int, error: SubscriberError) -> str:
    """Return the reason why a table is not compared. It has no value, but the names of columns."""
    converted = [column.name for column in plan.sides[side].columns if column.conversion is not None]
    server = ("publisher", "target")[side]
    if not converted:
        return f"the {server} cannot read its rows (SQLSTATE {error.sqlstate})"
    names = ", ".join(map(sql_identifier, converted))
    return (
        f"a value on the {server} cannot be converted to the target's type (SQLSTATE {error.sqlstate}), in one of the"
        f" columns: {names}"
    )


def _note_buckets(plan: ComparedTable, source: Sums, target: Sums, most: int | None) -> None:
    found = plan.found
    found.rows = sum(rows for rows, _ in source.values())
    found.target_rows = sum(rows for rows, _ in target.values())
    wanted = differing(source, target)
    if most is not None and len(wanted) > most:
        # A table that is empty on one side is reported immediately, and large differences are not listed row by row.
        found.differing_buckets = len(wanted)
        found.missing_count = max(0, found.rows - found.target_rows)
        found.extra_count = max(0, found.target_rows - found.rows)
    else:
        plan.wanted = wanted


def _note_rows(
    plan: ComparedTable, source: Sequence[Answer], target: Sequence[Answer], limit: int, *, columns: bool
) -> None:
    """Record the rows that differ, at most `limit` of each kind.

    Rows with a key are matched by the key, rows without as a multiset.
    """
    found = plan.found
    codec = CODECS[plan.sides[0].encoding]
    here, there = _collect(source, codec), _collect(target, codec)
    explained = set()
    for place in here.keys() | there.keys():
        left, right = here.get(place, Counter()), there.get(place, Counter())
        if left == right:
            continue
        bucket, key = place
        explained.add(bucket)
        only_left, only_right = left - right, right - left
        if plan.found.key and only_left and only_right:
            found.changed_count += 1
            if len(found.changed) < limit:
                one, other = next(iter(only_left)), next(iter(only_right))
                found.changed[key] = _columns(plan.local_names, one, other) if columns else ()
            continue
        found.missing_count += only_left.total()
        found.extra_count += only_right.total()
        if only_left and len(found.missing) < limit:
            found.missing.append(key)
        if only_right and len(found.extra) < limit:
            found.extra.append(key)
    found.unexplained_buckets += len(set(plan.wanted) - explained)


def _collect(answers: Sequence[Answer], codec: str) -> dict[tuple[object, Key], Counter[tuple[object, ...]]]:
    """Return the hashes of rows by bucket and key."""
    found: dict[tuple[object, Key], Counter[tuple[object, ...]]] = {}
    with parsing("rows"):
        for answer in answers:
            for row in answer:
                bucket, key, hashes = cast("tuple[object, list[object], list[object]]", row)
                place = bucket, tuple(_text(value, codec) for value in key)
                found.setdefault(place, Counter())[tuple(hashes)] += 1
    return found


def _text(value: object, codec: str) -> str | None:
    """Decode a column of a key. Raises TypeError or ValueError if it is not text in hexadecimal."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError
    return decode(bytes.fromhex(value), codec)


def _columns(names: Sequence[str], left: tuple[object, ...], right: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(name for name, a, b in zip(names, left, right, strict=True) if a != b)
