"""The plan of the copy of each table: parts, columns, the role that inserts, text or binary."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from subscriber.apply.relation_map import RelationMapping
from subscriber.catalog.connection import Connection
from subscriber.catalog.copy_jobs import BulkCopy
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Rows
from subscriber.connection.session import Session
from subscriber.errors import SubscriberError
from subscriber.publisher.connection import Publisher
from subscriber.publisher.partitions import TablePartition, partition_table, whole
from subscriber.publisher.tables import PublishedTable, as_relation, copies_binary
from subscriber.quoting import identifier, literal, qualified
from subscriber.spark.copy.executor import APPLICATION_NAME, SOURCE_SETTINGS, Failure, PartTask, first_error
from subscriber.subscription import Subscription
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.session.schema_check import TableGuard, guard
from subscriber.targets.postgres.session.target_session import TargetSession

BUNDLE_BYTES = 4 * 1024 * 1024  # total size of small tables in one task; they cost more to start than to copy
BUNDLE = 32  # maximum number of small tables in one task

# Built-in types. Their binary format is the same on all servers, with two exceptions: types that name an object, which
# has another OID elsewhere, and a type without binary format.
_BUILT_IN = 10000
_NOT_BINARY = frozenset(
    (
        *(24, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191),  # regproc … regcollation
        *(1008, 2207, 2208, 2209, 2210, 2211, 3735, 3770, 4090, 4097, 4192),  # and arrays of them
        *(1033, 1034),  # aclitem
    )
)
_COLUMN_TYPES = """
SELECT a.attname::text, a.atttypid::bigint FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
"""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The plan of one table. `parts` are in the order of their numbers."""

    relid: int  # on the target
    schema: str
    name: str
    parts: tuple[TablePartition, ...]
    columns: tuple[str, ...]  # the target's
    selected: str  # the publisher's, as SQL
    filters: tuple[str, ...]
    role: str
    guard: TableGuard | None
    runs_foreign_code: bool
    binary: bool
    total_bytes: int  # on the publisher's disk

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def as_complete(self) -> tuple[int, str, str]:
        """Return the arguments of complete_with_indexes()."""
        return self.relid, self.schema, self.name

    def tasks(
        self, subscription: Subscription, target: str, snapshot: str, copy: BulkCopy, done: set[int]
    ) -> list[PartTask]:
        """Return the tasks for executors, without the parts in `done`. `target` is a connection string."""
        return [
            PartTask(
                source=subscription.conninfo,
                must_use_password=subscription.must_use_password,
                target=target,
                snapshot=snapshot,
                copyid=copy.copyid,
                fence=copy.fence,
                relid=self.relid,
                number=number,
                part=part,
                select=part.select(self.selected, self.filters),
                schema=self.schema,
                name=self.name,
                columns=self.columns,
                role=self.role,
                guard=self.guard,
                runs_foreign_code=self.runs_foreign_code,
                binary=self.binary,
                size=self.total_bytes // len(self.parts),
                is_whole=len(self.parts) == 1,
            )
            for number, part in enumerate(self.parts)
            if number not in done
        ]


async def plan_tables(
    connection: Connection,
    subscription: Subscription,
    target: str,
    snapshot: str,
    tables: Sequence[SubscriptionRel],
    part_bytes: int,
) -> tuple[list[TablePlan], list[Failure]]:
    """Plan the copy of each of `tables`, under the publisher's `snapshot`.

    The publisher is queried ahead of the target, so that neither waits for the other.

    Args:
        connection: the catalog's connection.
        target: the connection string of the role that applies changes.

    Returns:
        The plans, and the failures of tables that cannot be copied.
    """
    plans, failures = list[TablePlan](), list[Failure]()
    async with AsyncExitStack() as stack:
        source = await open_session(
            subscription.conninfo,
            application_name=APPLICATION_NAME,
            settings=SOURCE_SETTINGS,
            must_use_password=subscription.must_use_password,
        )
        stack.callback(source.abort)
        session = await open_session(target, application_name=APPLICATION_NAME)
        stack.callback(session.abort)
        copying = await copy_transaction.copy_session(session, subscription, "off")
        planner = _Planner(subscription, source, copying, connection, part_bytes)
        found, answers = anyio.create_memory_object_stream[_Published | SubscriberError](len(tables))
        try:
            async with anyio.create_task_group() as tasks, answers:
                tasks.start_soon(planner.look_up, tables, snapshot, found)
                for table in tables:
                    try:
                        plans.append(await planner.plan(table, await answers.receive()))
                    except SubscriberError as error:
                        if source.error is not None or session.error is not None:
                            raise
                        failures.append(Failure(table.relid, error.message, error.hint, error.sqlstate))
        except BaseExceptionGroup as group:
            raise first_error(group) from None
    return plans, failures


@dataclass(frozen=True, slots=True)
class _Published:
    table: PublishedTable
    parts: list[TablePartition]


class _Planner:
    """Plans with three sessions: one on the publisher, a raw one on the target, and the catalog's."""

    def __init__(
        self,
        subscription: Subscription,
        source: Session,
        target: TargetSession,
        connection: Connection,
        part_bytes: int,
    ) -> None:
        self._subscription = subscription
        self._publisher = Publisher(source)
        self._target = target
        self._connection = connection
        self._part_bytes = part_bytes

    async def look_up(
        self,
        tables: Sequence[SubscriptionRel],
        snapshot: str,
        found: MemoryObjectSendStream[_Published | SubscriberError],
    ) -> None:
        """Send the publisher's description of each table to `found`, in order, under its `snapshot`."""
        source, publications = self._publisher.session, self._subscription.publications
        begun = False
        async with found:
            for table in tables:
                try:
                    if not begun:
                        await source.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                        await source.query(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
                        begun = True
                        await self._publisher.restrict_views()
                    published = await self._publisher.table(table.namespace, table.name, publications)
                    parts = await partition_table(source, published.relid, self._part_bytes)
                    await found.send(_Published(published, parts))
                except SubscriberError as error:
                    await found.send(error)
                    if source.error is not None:
                        return
                    await source.query("ROLLBACK")
                    begun = False

    async def plan(self, table: SubscriptionRel, found: _Published | SubscriberError) -> TablePlan:
        """Plan one table. Raises PublisherError and MappingError as table synchronization does."""
        if isinstance(found, SubscriberError):
            raise found
        published, parts = found.table, found.parts
        mapping = await self._target.map_relation(as_relation(published))
        role = self._target.roles.role([mapping.local]).name
        if len(parts) > 1 and await self._has_rows(mapping):
            # Existing rows are kept, so the copy must be able to roll back: one transaction.
            parts = [whole(table.namespace, table.name, parts)]
        return TablePlan(
            relid=table.relid,
            schema=table.namespace,
            name=table.name,
            parts=tuple(parts),
            columns=tuple(column.name for column in mapping.attributes),
            selected=", ".join(identifier(column.name) for column in published.columns),
            filters=published.row_filters,
            role=role,
            guard=guard(mapping.local, role, self._target.roles.owner),
            runs_foreign_code=mapping.runs_foreign_code,
            binary=await self._in_binary(table.relid, published),
            total_bytes=published.total_bytes,
        )

    async def _has_rows(self, mapping: RelationMapping) -> bool:
        rows: Rows = []
        query = f"SELECT FROM {qualified(mapping.local.schema, mapping.local.name)} LIMIT 1"
        with self._target.asking(mapping, None):
            pipeline = self._target.pipeline
            pipeline.execute(query, expect=b"SELECT 0\0", on_result=lambda _note, _tag, found: rows.extend(found))
        await pipeline.sync()
        return bool(rows)

    async def _in_binary(self, relid: int, published: PublishedTable) -> bool:
        """Return True for binary: if the subscription sets it, or if it makes no difference for any column."""
        if copies_binary(self._subscription.binary or False, self._publisher.server_version):
            return True
        types = {row[0]: row[1] for row in await self._connection.fetch(_COLUMN_TYPES, relid)}
        return all(
            column.type_oid < _BUILT_IN
            and column.type_oid not in _NOT_BINARY
            and types.get(column.name) == column.type_oid
            for column in published.columns
        )


def bundle(parts: Sequence[PartTask]) -> list[tuple[PartTask, ...]]:
    """Group parts into tasks: a part of a divided table, or several whole tables with the size of a small part."""
    bundles: list[tuple[PartTask, ...]] = [(part,) for part in parts if not part.is_whole]
    together: list[PartTask] = []
    size = 0
    for part in [part for part in parts if part.is_whole]:
        if together and (size + part.size > BUNDLE_BYTES or len(together) == BUNDLE):
            bundles.append(tuple(together))
            together, size = [], 0
        together.append(part)
        size += part.size
    return [*bundles, tuple(together)] if together else bundles


def spread(bundles: Sequence[tuple[PartTask, ...]], slots: int) -> list[tuple[PartTask, ...]]:
    """Return the tasks in execution order, for `slots` concurrent tasks.

    The parts of `slots` tables alternate; whole tables follow at the end. Parts of one table that are copied
    concurrently fill its indexes at several places, which takes longer and makes the indexes larger. More tables than
    `slots` do not alternate, because a complete table survives the loss of the snapshot.
    """
    cut = [together for together in bundles if not together[0].is_whole]
    tables = deque(deque(group) for _, group in itertools.groupby(cut, lambda together: together[0].relid))
    turns, order = deque[deque[tuple[PartTask, ...]]](), list[tuple[PartTask, ...]]()
    while turns or tables:
        while tables and len(turns) < slots:
            turns.append(tables.popleft())
        turn = turns.popleft()
        order.append(turn.popleft())
        if turn:
            turns.append(turn)
    return [*order, *(together for together in bundles if together[0].is_whole)]
