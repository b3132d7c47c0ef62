"""Comparison of all tables of a subscription at one position, while writes continue.

    consistent_snapshot.py   one position, and a snapshot of each side there
    checksums.py             the queries: sums of buckets of rows, then the rows of buckets that differ
    here                     tables and columns; tasks for executors, and the report

Both servers work concurrently, each with as many connections as Spark has processors. A row that differs costs a second
read of its bucket, of about a thousand rows. The result names keys and columns, never values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import anyio.to_thread

from subscriber.apply.relation_map import RelationMapping
from subscriber.catalog import identity
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.subscription_rel import relation_sources_query
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.errors import MappingError, StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import CODECS, decode
from subscriber.publisher.answers import parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.partitions import TablePartition, partition_table
from subscriber.publisher.tables import PublishedTable, as_relation
from subscriber.spark.copy.plan import PART_BYTES
from subscriber.spark.session import MASTER, QUICK, spark_session
from subscriber.spark.tasks import run_in_thread
from subscriber.spark.verification.checksums import (
    Answer,
    ChecksumTask,
    ComparedColumn,
    Sums,
    TableSide,
    add_up,
    ask,
    buckets_for,
    differing,
)
from subscriber.spark.verification.consistent_snapshot import APPLICATION_NAME, CommonSnapshot, common_snapshot
from subscriber.sqlstate import UNDEFINED_OBJECT
from subscriber.subscription import Subscription
from subscriber.targets.postgres.row_applier import RowApplier

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Maximum number of a table's buckets whose rows are read. Above it, only the number of different buckets is reported.
READ_AGAIN = 256
KEYS = 1000  # rows listed for each table and kind of difference

Key = tuple[str | None, ...]  # the key's columns as text; without a key all columns


@dataclass(slots=True)
class TableComparison:
    """The result of comparing one table.

    Lists have the keys of rows, at most KEYS of each kind. The counts include all rows.
    """

    name: str
    rows: int = 0  # on the publisher
    target_rows: int = 0
    key: tuple[str, ...] = ()  # names of the key's columns; empty: rows are compared as a whole
    missing: list[Key] = field(default_factory=list)  # on the target
    extra: list[Key] = field(default_factory=list)  # only there
    changed: dict[Key, tuple[str, ...]] = field(default_factory=dict)  # key -> names of columns
    missing_count: int = 0
    extra_count: int = 0
    changed_count: int = 0
    differing_buckets: int = 0  # different buckets whose rows were not read or counted
    note: str | None = None  # reason why it was not compared

    @property
    def is_same(self) -> bool:
        return self.note is None and not (
            self.missing_count or self.extra_count or self.changed_count or self.differing_buckets
        )


@dataclass(slots=True)
class Comparison:
    """The result of comparing all tables of a subscription as of position `lsn` of the publisher."""

    lsn: Lsn
    tables: list[TableComparison]

    @property
    def is_same(self) -> bool:
        return all(table.is_same for table in self.tables)


@dataclass(slots=True)
class _Plan:
    """The plan of a table that can be compared."""

    found: TableComparison
    sides: tuple[TableSide, TableSide]  # the publisher's, the target's
    parts: tuple[list[TablePartition], list[TablePartition]]
    local_names: tuple[str, ...]
    buckets: int = 1
    wanted: list[int] = field(default_factory=list)  # buckets to read again


OnProgress = Callable[[str], None]


async def verify(
    target: str,
    name: str,
    *,
    spark: SparkSession | None = None,
    master: str = MASTER,
    part_bytes: int = PART_BYTES,
    on_progress: OnProgress = lambda _phase: None,
) -> Comparison:
    """Compare every table of a subscription with the publisher's.

    The launcher must be running. Writes may continue.

    Args:
        target: the connection string of the subscription's database.
        name: the subscription.
        spark: the session in which to compare; None: a new session on `master`.
        master: Spark's master URL, used without `spark`.
        part_bytes: the size of a part of a table in bytes.
        on_progress: called with the name of each phase.

    Returns:
        The differences of each table, as of one position of the publisher.

    Raises:
        StatementError: there is no such subscription.
        SubscriberError: the apply worker cannot be paused, or a server cannot be queried.
        PublisherError: the publisher cannot serve the subscription.
        ServerError: a server refuses a query.
        ConnectionLost: a server cannot be reached, or the connection is lost.

    Cancellation: the apply worker is resumed, and running queries are interrupted.
    """
    async with AsyncExitStack() as stack:
        on_progress("starting Spark")
        opening = spark_session(spark, master=master, java_options=QUICK)
        session = await anyio.to_thread.run_sync(stack.enter_context, opening)
        catalog = await stack.enter_async_context(CatalogConnection.open(target, APPLICATION_NAME))
        async with catalog.use() as connection:
            await ensure_schema(connection)
            await identity.check(connection)
            subscription = await find_subscription(connection, name)
        if subscription is None:
            raise StatementError(f'subscription "{name}" does not exist', sqlstate=UNDEFINED_OBJECT)
        on_progress("waiting for a common position")
        snapshot = await stack.enter_async_context(common_snapshot(catalog, target, subscription))
        on_progress(f"comparing at {snapshot.lsn}")
        compare = _Compare(session, subscription, target, snapshot)
        tables, plans = await compare.plan(part_bytes)
        await compare.sums(plans)
        again = [plan for plan in plans if plan.wanted]
        if again:
            on_progress(f"reading rows of {len(again)} tables")
            await compare.rows(again)
        return Comparison(snapshot.lsn, tables)


class _Compare:
    def __init__(
        self, session: SparkSession, subscription: Subscription, target: str, snapshot: CommonSnapshot
    ) -> None:
        self._session = session
        self._subscription = subscription
        self._servers = (
            (subscription.conninfo, subscription.must_use_password, snapshot.source),
            (target, False, snapshot.target),
        )
        self._target = target
        self._snapshot = snapshot
        self._sessions = (snapshot.source_session, snapshot.target_session)
        self._publisher = Publisher(snapshot.source_session)
        self._local = RowApplier(Pipeline(snapshot.target_session), "", lambda *_: None)

    # --- what to compare --------------------------------------------------------------------------

    async def plan(self, part_bytes: int) -> tuple[list[TableComparison], list[_Plan]]:
        """Return a comparison for each table, and the plans of the tables that can be compared."""
        subscription = self._subscription
        tables, plans = [], []
        states, with_hooks = await self._states()
        for schema, name in await self._publisher.tables(subscription.publications):
            found = TableComparison(f"{schema}.{name}")
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
            if state != "r":
                found.note = "it is not part of the subscription yet" if state is None else "it is still being copied"
                continue
            plans.append(await self._plan_table(found, published, mapping, part_bytes))
        return tables, plans

    async def _states(self) -> tuple[dict[int, str], set[tuple[str | None, str | None]]]:
        """Return, in the target's snapshot, the state by OID, and the published tables that have hooks."""
        session = self._snapshot.target_session
        await session.query("SET LOCAL row_security = on")  # a role without superuser sees its own subscriptions
        found = await session.rows(relation_sources_query(self._subscription.oid))
        await session.query("SET LOCAL row_security = off")
        with_hooks: set[tuple[str | None, str | None]] = {
            (schema, name) for _, _, schema, name in found if name is not None
        }
        rows = [(relid, state) for relid, state, _, _ in found]
        # A table in syncdone has all changes before the common position, as one in ready.
        states = {int(relid or 0): "r" if state == "s" else state or "" for relid, state in rows}
        return states, with_hooks

    async def _plan_table(
        self, found: TableComparison, published: PublishedTable, mapping: RelationMapping, part_bytes: int
    ) -> _Plan:
        relids = (published.relid, mapping.local.oid)
        names = [await self._type_names(session, relid) for session, relid in zip(self._sessions, relids, strict=True)]
        source, target = [], []
        for column, local in zip(published.columns, mapping.attributes, strict=True):
            local_type = names[1][local.name]
            # A type that belongs to the target, written with its schema, is not the publisher's.
            same = names[0].get(column.name) == local_type or "." in local_type
            source.append(ComparedColumn(column.name, None if same else local_type))
            target.append(ComparedColumn(local.name, None))
        encodings = [session.parameters["server_encoding"] for session in self._sessions]
        converts = encodings[0] != encodings[1]
        key = mapping.search or ()
        found.key = tuple(mapping.attributes[index].name for index in key)
        parts = (
            await partition_table(self._snapshot.source_session, published.relid, part_bytes),
            await partition_table(self._snapshot.target_session, mapping.local.oid, part_bytes),
        )
        return _Plan(
            found,
            (
                TableSide(tuple(source), key, published.row_filters, encodings[1], converts),
                TableSide(tuple(target), key, (), encodings[1], converts),
            ),
            parts,
            tuple(column.name for column in mapping.attributes),
            buckets_for(published.total_bytes // 100),
        )

    async def _type_names(self, session: Session, relid: int) -> dict[str, str]:
        rows = await session.rows(
            "SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_attribute a"
            f" WHERE a.attrelid = {relid} AND a.attnum > 0 AND NOT a.attisdropped"
        )
        with parsing("types"):
            return {name or "": type_name or "" for name, type_name in rows}

    # --- comparing --------------------------------------------------------------------------------

    async def _ask(self, questions: Sequence[ChecksumTask]) -> list[Answer]:
        """Run all queries. Returns the results in order. Raises the first error."""
        answers = await run_in_thread(self._session, ask, questions)
        found = []
        for answer in answers:
            if isinstance(answer, SubscriberError):
                raise answer
            found.append(answer)
        return found

    async def _ask_all(
        self, plans: Sequence[_Plan], sql: Callable[[_Plan, int, TablePartition], str]
    ) -> list[tuple[list[Answer], list[Answer]]]:
        """Run the same query for all parts of both sides. Returns both sides' results for each plan."""
        places, questions = [], []
        for number, plan in enumerate(plans):
            for side, server in enumerate(self._servers):
                for part in plan.parts[side]:
                    places.append((number, side))
                    questions.append(ChecksumTask(*server, part, sql(plan, side, part)))
        found: list[tuple[list[Answer], list[Answer]]] = [([], []) for _ in plans]
        for (number, side), answer in zip(places, await self._ask(questions), strict=True):
            found[number][side].append(answer)
        return found

    async def sums(self, plans: Sequence[_Plan]) -> None:
        """Find the buckets that differ."""
        answers = await self._ask_all(plans, lambda plan, side, part: plan.sides[side].sums(part, plan.buckets))
        for plan, (source, target) in zip(plans, answers, strict=True):
            _note_buckets(plan, add_up(source), add_up(target))

    async def rows(self, plans: Sequence[_Plan]) -> None:
        """Find the rows of these buckets that differ, and their columns."""
        answers = await self._ask_all(
            plans, lambda plan, side, part: plan.sides[side].rows(part, plan.buckets, plan.wanted)
        )
        for plan, (source, target) in zip(plans, answers, strict=True):
            _note_rows(plan, source, target)


def _note_buckets(plan: _Plan, source: Sums, target: Sums) -> None:
    found = plan.found
    found.rows = sum(rows for rows, _ in source.values())
    found.target_rows = sum(rows for rows, _ in target.values())
    wanted = differing(source, target)
    if len(wanted) > READ_AGAIN:
        # A table that is empty on one side is reported immediately, and large differences are not listed row by row.
        found.differing_buckets = len(wanted)
        found.missing_count = max(0, found.rows - found.target_rows)
        found.extra_count = max(0, found.target_rows - found.rows)
    else:
        plan.wanted = wanted


def _note_rows(plan: _Plan, source: Sequence[Answer], target: Sequence[Answer]) -> None:
    """Record the rows that differ. Rows with a key are matched by the key, rows without as a multiset."""
    found = plan.found
    codec = CODECS[plan.sides[0].encoding]
    here, there = _collect(source, codec), _collect(target, codec)
    for key in here.keys() | there.keys():
        left, right = here.get(key, Counter()), there.get(key, Counter())
        if left == right:
            continue
        if plan.found.key and left and right:
            found.changed_count += 1
            if len(found.changed) < KEYS:
                found.changed[key] = _columns(
                    plan.local_names, next(iter(left - right or left)), next(iter(right - left or right))
                )
            continue
        found.missing_count += (left - right).total()
        found.extra_count += (right - left).total()
        if left - right and len(found.missing) < KEYS:
            found.missing.append(key)
        if right - left and len(found.extra) < KEYS:
            found.extra.append(key)


def _collect(answers: Sequence[Answer], codec: str) -> dict[Key, Counter[tuple[object, ...]]]:
    found: dict[Key, Counter[tuple[object, ...]]] = {}
    with parsing("rows"):
        for answer in answers:
            for row in answer:
                key, hashes = cast("tuple[list[object], list[object]]", row)
                found.setdefault(tuple(_text(value, codec) for value in key), Counter())[tuple(hashes)] += 1
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
