"""Repair of some rows of one or several tables, in one transaction of the target.

    session of the target     registered at the place REPAIR, with an origin and a progress record of its own
    pause the apply worker    at L, the position of a snapshot of the publisher
    read the rows             on the publisher in that snapshot, on the target as they are
    apply the differences     as changes of the stream are applied: roles, replica role, origin
    commit, and resume the worker

**Invariants.**

- A row that the publisher does not have is deleted only if it belongs to the subscription (ownership.py). Which
  subscriptions write to a table is read again in each batch.
- While the worker stands at L, the target has exactly the publisher's transactions before L, and the snapshot sees
  exactly these. So no older row replaces a newer one, and no later change is lost: it is applied after the repair, to
  the row that it was made for.

**Failure cases.**

- The command dies in the batch: the target rolls the transaction back. The apply worker notices that the session which
  has requested the pause is gone, and continues. The origin and the progress record remain until the next repair or
  DROP SUBSCRIPTION.
- The answer to COMMIT is lost: the batch is repeated, and finds no differences in the rows that were committed.
- ALTER SUBSCRIPTION during the batch: the progress record refuses the commit (targets/postgres/session/progress.py).
- A prepared or open transaction has locked a row: the statement waits for LOCK_TIMEOUT and fails. The apply worker is
  paused for no longer.
- The publisher's table is rewritten or emptied: its rows are missing in snapshots that are older. So each batch locks
  the table, and compares its file with that of the comparison. The target keeps its rows, and the table is compared
  again. So is a table that is dropped, altered or locked on one side. The lock ends when the rows are read: a batch
  that holds locks of several tables could be part of a deadlock.
- One table's rows cannot be read or repaired: the batch names the table, and changes nothing in the others either.
- Another session changes a row between the read and the commit: the row differs after the repair, as it would after
  any local write.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from time import time_ns
from typing import NamedTuple

from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.touched_ranges import TouchedRanges
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store.repairs import RECORD_REPAIR
from subscriber.catalog.store.table_writers import as_ownership, writers_query
from subscriber.catalog.worker_sessions import REPAIR
from subscriber.comparison.checksums import TableSide
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.consistent_snapshot import open_side, paused_worker
from subscriber.comparison.queries import as_table_change, rewritten
from subscriber.comparison.result import Key
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.errors import MappingError, ServerError, StaleCatalog, StaleMapping, SubscriberError, TableChanged
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation, ReplicaIdentity
from subscriber.publisher.answers import count, oid, parsing
from subscriber.publisher.partitions import heaps, whole
from subscriber.publisher.tables import as_relation
from subscriber.quoting import identifier, literal, qualified
from subscriber.repair.audit import RepairAudit
from subscriber.repair.changes import KeyedRows, RowChanges, as_messages, row_changes
from subscriber.retry import Reaction, reaction
from subscriber.settings import DEFAULTS
from subscriber.sqlstate import DEADLOCK_DETECTED, EXCLUSION_VIOLATION, LOCK_NOT_AVAILABLE, UNIQUE_VIOLATION
from subscriber.subscription import ConflictHistory, Subscription
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.roles import RoleSwitcher
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.worker_session import TargetConfig, claim, open_target
from subscriber.timestamps import from_unix

LOCK_TIMEOUT = "SET LOCAL lock_timeout = '1s'"
# A key is searched with its index, also in a table whose statistics are out of date.
_USE_INDEX = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off"


_FILENODES = """
SELECT pg_catalog.pg_relation_filenode(heap::pg_catalog.regclass)
  FROM (VALUES {names}) t (number, heap) ORDER BY number
"""

OpenApplier = Callable[[], AbstractAsyncContextManager[RowApplier]]
Pause = Callable[[CatalogConnection, Subscription, Session], AbstractAsyncContextManager[tuple[Lsn, str]]]


class TableRows(NamedTuple):
    """Rows of a table that may differ, by their keys."""

    table: ComparedTable
    keys: Sequence[Key]


class Outcome(Enum):
    """The end of a batch. Nothing was changed, except with DONE."""

    DONE = auto()
    LOCKED = auto()  # a row is locked by another transaction
    NOT_UNIQUE = auto()  # a row that is not in the batch has one of the unique values
    REFUSED = auto()  # a server refuses a statement for another reason, which the error has
    TABLE_CHANGED = auto()  # a table was dropped, rewritten, altered or locked on one side


@dataclass(slots=True)
class RepairedBatch:
    """The result of a batch.

    Attributes:
        outcome: the end of the batch.
        changes: the changes of each table, and how it is mapped. They were applied if the outcome is DONE.
        bytes_read: bytes of rows that the publisher has sent.
        failed: the place of the table that is the reason of another outcome. None: unknown, for example at COMMIT.
        note: the message of `error`.
        error: the error of REFUSED or TABLE_CHANGED.
    """

    outcome: Outcome = Outcome.DONE
    changes: list[tuple[RowChanges, RelationMapping]] = field(default_factory=list)
    bytes_read: int = 0
    failed: int | None = None
    note: str = ""
    error: SubscriberError | None = None

    def fail(self, outcome: Outcome, failed: int | None, error: SubscriberError | None = None) -> None:
        """End the batch without a change. `error`: of REFUSED and TABLE_CHANGED."""
        self.outcome, self.failed, self.error = outcome, failed, error
        self.note = "" if error is None else error.message


def own_applier(catalog: CatalogConnection, apply_target: str, subscription: Subscription) -> OpenApplier:
    """Return a function that opens a session at the place REPAIR, which applies the changes of batches.

    Args:
        catalog: a connection to the target.
        apply_target: the target's connection string for the role that applies changes.
        subscription: the subscription.
    """
    # Policies decide between two writers. A repair has one answer: the publisher's row.
    subscription = replace(subscription, conflict_policy="", conflict_history=ConflictHistory.NONE)
    config = TargetConfig(
        apply_target,
        f"{subscription.name} repair",
        subscription,
        REPAIR,
        lambda *_: None,
        touched=TouchedRanges(DEFAULTS.touched_ranges) if subscription.track_ranges else None,
    )

    @asynccontextmanager
    async def open_applier() -> AsyncIterator[RowApplier]:
        async with open_target(config, catalog) as worker:
            claimed = await claim(catalog, subscription, REPAIR)
            if claimed is None:
                raise StaleCatalog("the progress record of the repair is gone")
            yield (await worker.resume(claimed)).row_applier

    return open_applier


@dataclass(slots=True)
class RepairSessions:
    """The sessions of all batches, opened when the first batch needs them.

    Attributes:
        catalog: a connection to the target, which no other task uses during a batch.
        target: the target's connection string for the role of the catalog.
        reading: the target's connection string for the role that reads rows: it applies changes.
        subscription: the subscription.
        audit: records the rows.
        open_applier: opens a session that applies the changes of batches, see own_applier().
        pause: keeps the target at a position, see paused_worker().
        delete_extra: delete rows that the publisher does not have, unless they may belong to another subscription.
    """

    catalog: CatalogConnection
    target: str = field(repr=False)
    reading: str = field(repr=False)
    subscription: Subscription
    audit: RepairAudit
    open_applier: OpenApplier
    pause: Pause = paused_worker
    delete_extra: bool = False
    _stack: AsyncExitStack | None = None
    _sides: tuple[Session, Session] | None = None
    _ownership: Session | None = None  # reads the catalog
    _row_applier: RowApplier | None = None
    _reader: TargetSession | None = None  # reads definitions, if no batch applies changes

    async def read(self, parts: Sequence[TableRows]) -> RepairedBatch:
        """Read the rows of a batch, and change nothing. Returns the changes that repair() would apply.

        Raises:
            SubscriberError: the apply worker cannot be paused, or a server refuses a query.
            ConnectionLost: a connection is lost.
        """
        return await self._run(parts, None)

    async def repair(self, parts: Sequence[TableRows], *, replaced: Collection[int] = ()) -> RepairedBatch:
        """Repair the rows of some keys in one transaction.

        Args:
            parts: the rows of each table. No table is there twice.
            replaced: places of tables whose rows are deleted and inserted if they differ, instead of updated.

        Raises:
            StaleCatalog: the subscription was altered.
            SubscriberError: the apply worker cannot be paused, or a server refuses a query.
            ConnectionLost: a connection is lost.

        Cancellation: the transaction is rolled back, and the apply worker is resumed.
        """
        return await self._run(parts, replaced)

    async def _run(self, parts: Sequence[TableRows], replaced: Collection[int] | None) -> RepairedBatch:
        """Read the rows of a batch, and repair them unless `replaced` is None."""
        batch = RepairedBatch()
        number = 0
        try:
            async with self._opened() as sides:
                applier = None if replaced is None else await self._applier()
                session = self._definitions(sides[1]) if applier is None else applier.session
                mappings: list[RelationMapping] = []
                for part in parts:
                    number = len(mappings)
                    mappings.append(await _map(session, part.table))
                async with self.pause(self.catalog, self.subscription, sides[0]) as (lsn, _):
                    await reached(Point.REPAIR_PAUSED)
                    deletes = await self._may_delete(parts)
                    for number, part in enumerate(parts):
                        changes, size = await _differences(part, sides, deletes=part.table.relid in deletes)
                        batch.changes.append((changes, mappings[number]))
                        batch.bytes_read += size
                    await reached(Point.REPAIR_READ)
                    if applier is not None and replaced is not None and any(changes for changes, _ in batch.changes):
                        await self._apply(applier, batch, replaced, lsn)
                        await reached(Point.REPAIR_COMMITTED)
        except TableChanged as error:
            batch.fail(Outcome.TABLE_CHANGED, number, error)
        except _RowsRefused as refused:
            batch.fail(Outcome.REFUSED, number, refused.error)
        return batch

    async def _may_delete(self, parts: Sequence[TableRows]) -> set[int]:
        """Return the tables whose extra rows are deleted, by OID. A subscription may have been created meanwhile.

        The commit is refused if the rules of this subscription were altered.
        """
        assert self._ownership is not None
        rows = await self._ownership.rows(writers_query(self.subscription))
        ownership = as_ownership(self.subscription, rows)
        return {
            part.table.relid
            for part in parts
            if ownership.of(part.table.relid, part.table.local_table).may_delete(delete_extra=self.delete_extra)
        }

    def _definitions(self, session: Session) -> TargetSession:
        """Return a session that reads definitions of tables."""
        if self._reader is None:
            pipeline = Pipeline(session)
            self._reader = TargetSession(pipeline, RoleSwitcher(pipeline))
        self._reader.pipeline.attach()  # the session is used for queries as well
        return self._reader

    async def _apply(self, applier: RowApplier, batch: RepairedBatch, replaced: Collection[int], lsn: Lsn) -> None:
        """Apply the changes and record them, in one transaction. Sets the outcome.

        Raises:
            SubscriberError: an error that no table causes: a lost connection, a shutdown, an altered subscription.
        """
        transaction = RemoteTransaction(0, lsn, from_unix(time_ns() // 1000))
        pipeline = applier.session.pipeline
        try:
            applier.begin(transaction)
            pipeline.execute(LOCK_TIMEOUT, note=StatementContext("SET", transaction))
            for number, (changes, mapping) in enumerate(batch.changes):
                applied = changes.without_updates() if number in replaced else changes
                for message in as_messages(applied, mapping):
                    await applier.change(transaction, mapping, message)
            for changes, mapping in batch.changes:
                for record in self.audit.records(changes, mapping, lsn):
                    applier.execute_at_end(transaction, RECORD_REPAIR, record)
                    await pipeline.drain()
            applier.queue_commit(transaction, lsn, lambda: None)
            await pipeline.sync()
        except ServerError as error:
            failed = _failed_table(pipeline, [mapping for _, mapping in batch.changes])
            if error.sqlstate in (LOCK_NOT_AVAILABLE, DEADLOCK_DETECTED):
                batch.fail(Outcome.LOCKED, failed)
            elif error.sqlstate in (UNIQUE_VIOLATION, EXCLUSION_VIOLATION):
                batch.fail(Outcome.NOT_UNIQUE, failed)
            else:
                explained = applier.session.explain(error)
                if isinstance(explained, StaleMapping):
                    batch.fail(Outcome.TABLE_CHANGED, failed, explained)
                elif _is_of_table(explained):
                    batch.fail(Outcome.REFUSED, failed, explained)
                else:
                    raise explained from error

    async def close(self) -> None:
        """Close the sessions. The next batch opens others."""
        stack, self._stack = self._stack, None
        self._sides = self._ownership = self._row_applier = self._reader = None
        if stack is not None:
            await stack.aclose()

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[Session, Session]]:
        """Yield the sessions that read rows. The next batch uses all sessions again, unless one has an error."""
        if self._stack is None:
            self._stack = AsyncExitStack()
        try:
            if self._sides is None:
                self._sides = await self._open_sides(self._stack)
            yield self._sides
            await self._sides[0].query("COMMIT")
        except BaseException:
            await self.close()
            raise
        if self._row_applier is not None and self._row_applier.session.pipeline.error is not None:
            await self.close()

    async def _applier(self) -> RowApplier:
        assert self._stack is not None
        if self._row_applier is None:
            self._row_applier = await self._stack.enter_async_context(self.open_applier())
        return self._row_applier

    async def _open_sides(self, stack: AsyncExitStack) -> tuple[Session, Session]:
        """Open a session with the publisher and with the target, that send texts in the target's encoding."""
        target = await open_side(stack, self.reading)
        self._ownership = target if self.reading == self.target else await open_side(stack, self.target)
        source = await open_side(
            stack,
            self.subscription.conninfo,
            must_use_password=self.subscription.must_use_password,
            encoding=target.parameters["server_encoding"],
        )
        for session in (source, target):
            await session.query(_USE_INDEX)
        return source, target


def _whole_rows(table: ComparedTable) -> Relation:
    """Return the table as if it had REPLICA IDENTITY FULL, because the command has read whole rows."""
    relation = as_relation(table.published)
    columns = tuple(replace(column, is_key=True) for column in relation.columns)
    return replace(relation, replica_identity=ReplicaIdentity.FULL, columns=columns)


async def _map(session: TargetSession, table: ComparedTable) -> RelationMapping:
    try:
        return await session.map_relation(_whole_rows(table))
    except MappingError as error:
        raise TableChanged(error.message, hint=error.hint) from error


async def _lock(session: Session, table: ComparedTable) -> None:
    """Lock the heaps of the publisher's table, and check that they have the files that were compared."""
    all_heaps = heaps(table.parts[0])
    if lockable := [part.heap for part in all_heaps if part.can_be_locked]:
        await session.query(f"LOCK TABLE {', '.join(lockable)} IN ACCESS SHARE MODE")
    names = ", ".join(f"({number}, {literal(part.heap)})" for number, part in enumerate(all_heaps))
    rows = await session.rows(_FILENODES.format(names=names))
    with parsing("the files of a table"):
        for part, (filenode,) in zip(all_heaps, rows, strict=True):
            if (None if filenode is None else oid(filenode)) != part.filenode:
                raise rewritten(part.schema, part.name)


async def _differences(part: TableRows, sessions: tuple[Session, Session], *, deletes: bool) -> tuple[RowChanges, int]:
    """Return the changes for the rows of a table, and the bytes that the publisher has sent.

    `deletes`: delete rows that the publisher does not have. False: they are extra.
    """
    table, keys = part
    sides: list[KeyedRows] = []
    size = 0
    for number, session in enumerate(sessions):
        side: TableSide = table.sides[number]
        schema, name = (table.published.schema, table.published.name) if number == 0 else table.local_table
        query = side.rows_of_keys(whole(schema, name, table.parts[number]), keys)
        try:
            if number == 0:
                await session.query("SAVEPOINT lock")
                await _lock(session, table)
            role = None if number == 0 else table.readers.get(qualified(schema, name))
            answers = await session.rows(query) if role is None else await _rows_as(session, role, query)
            if number == 0:
                await session.query("ROLLBACK TO SAVEPOINT lock")
        except ServerError as error:
            found_error = as_table_change(error)
            if not isinstance(found_error, TableChanged) and _is_of_table(found_error):
                raise _RowsRefused(found_error) from error
            raise found_error from error
        with parsing("rows"):
            rows = [(count(place, len(keys) - 1), tuple(row)) for place, *row in answers]
            if any(len(row) != len(side.columns) for _, row in rows):
                raise ValueError
        if number == 0:
            size = sum(len(value) for _, row in rows for value in row if value is not None)
        sides.append(KeyedRows.of(rows, keys, side.key))
    source, target = sides
    return row_changes(source, target, table.sides[0].key, deletes=deletes), size


async def _rows_as(session: Session, role: str, query: str) -> list[tuple[str | None, ...]]:
    """Return the rows of a query that runs as another role, in a transaction of its own."""
    await session.query(f"BEGIN READ ONLY; SET LOCAL ROLE {identifier(role)}")
    try:
        return await session.rows(query)
    finally:
        if session.error is None:
            await session.query("ROLLBACK")


class _RowsRefused(Exception):
    """A server refuses to send rows of a table."""

    def __init__(self, error: SubscriberError) -> None:
        super().__init__(error.message)
        self.error = error


def _is_of_table(error: SubscriberError) -> bool:
    """Return True if a change or a table causes the error, so that other tables may be repaired."""
    return reaction(error) is Reaction.INTERVAL


def _failed_table(pipeline: Pipeline, mappings: Sequence[RelationMapping]) -> int | None:
    """Return the place of the table whose statement has failed. None: it is not a statement of one table."""
    note = pipeline.failed_note
    mapping = note.mapping if isinstance(note, StatementContext) else None
    return next((number for number, candidate in enumerate(mappings) if candidate is mapping), None)
