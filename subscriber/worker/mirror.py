"""A mirror: the tables of publications kept in another database, whatever SQLAlchemy speaks to.

    no row for the slot      the row is stored without a position; tables are found or made
    a row, no position       a slot is made, what is left of an earlier one is dropped; the tables are copied from its
                             snapshot, and stored with its position, in one transaction of the target
    a row with a position    the stream goes on from there: what waits of the publisher's transactions becomes one of
                             the target, which moves the position; then they are acknowledged

Kill points considered: before the copy is committed nothing is in the tables, and the next start makes slot and copy
anew. Later the position is committed with the data: what the publisher sends again, because it was not told or has
forgotten, lies before the position and is passed over (stream(start=…)). The acknowledgement comes last. A transaction
that the target refuses takes those it was put together with along: they are read again, and applied one by one.

The values are texts on both ways, from COPY and from the stream, so they become the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from subscriber import telemetry
from subscriber.apply.missing import Missing
from subscriber.apply.subrel import NOWHERE
from subscriber.consumer.changes import Change, Delete, Insert, Truncate, Update
from subscriber.consumer.opening import stream
from subscriber.consumer.rows import Relation, Row
from subscriber.consumer.stream import Stream
from subscriber.consumer.transaction import Transaction
from subscriber.errors import ApplyError, MappingError, PublisherError, SlotLost
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import split_line
from subscriber.source.publisher import Publisher
from subscriber.source.quoting import literal
from subscriber.source.tables import PublishedTable, copy_statement, primary_key_query
from subscriber.source.walsender import check_publisher
from subscriber.target.sql_table import SourceColumn, SourceTable, TargetTable, Texts
from subscriber.target.sqlalchemy import SqlTarget, Writer
from subscriber.worker.causes import root_cause

TURNS = 20  # of the event loop, in which another transaction may be read before what there is is committed
TOGETHER = 5000  # changes of small transactions that become one of the target

_Piece = tuple[list[Change], Transaction | None]  # changes; the transaction, when it ends with them


async def mirror(
    source: str,
    *,
    slot: str,
    publications: Sequence[str],
    target: str,
    create_tables: bool = True,
    until: Lsn | None = None,
    on_position: Callable[[Lsn], None] = lambda _: None,
) -> None:
    """Copy the tables of `publications` to another database, and keep them as the publisher's.

    `source` is a URI or libpq `key=value` string of a role that may replicate. `target` is a URL of SQLAlchemy for
    asyncio, as "sqlite+aiosqlite:///x.db". The `slot` is made, and names the mirror: started again with the same one,
    it goes on from where it was. Tables that are not on the target are made, unless `create_tables` is false.

    Runs until cancelled; or until everything committed before `until` is there. `on_position` is called with each
    position that is durable on the target. Transactions of the publisher are seen there whole and in their order,
    several at once if they come quicker than the target commits.

    Raises ConninfoError, ConnectionLost, ServerError, PublisherError; MappingError for tables that cannot be mirrored,
    ApplyError for what the target refuses. Start it again when that is mended: nothing is lost, nothing comes twice.
    """
    async with SqlTarget.open(target, slot) as there:
        position = await _position(source, slot, publications, there, create_tables=create_tables)
        on_position(position)
        apply = _Apply(there, position)
        while True:
            try:
                async with (
                    stream(source, slot=slot, publications=publications, start=apply.position, until=until) as changes,
                    anyio.create_task_group() as tasks,
                ):
                    sent, received = anyio.create_memory_object_stream[_Piece]()
                    tasks.start_soon(_read, changes, sent)
                    with received:
                        await _follow(received, apply, on_position)
                return
            except BaseExceptionGroup as group:
                cause = root_cause(group)
                if not isinstance(cause, _RefusedTogether):
                    raise cause from None
                apply.one_by_one_until = cause.lsn


class _RefusedTogether(Exception):
    """A transaction was refused after others had been applied in the same one of the target, up to `lsn`."""

    def __init__(self, lsn: Lsn) -> None:
        self.lsn = lsn


async def _read(changes: Stream, to: MemoryObjectSendStream[_Piece]) -> None:
    """What comes from the publisher, one batch of changes ahead of the target."""
    with to, suppress(anyio.BrokenResourceError):  # the other side has failed, and tells
        async for transaction in changes:
            async for batch in transaction.batches():
                await to.send((batch, None))
            await to.send(([], transaction))


async def _follow(
    received: MemoryObjectReceiveStream[_Piece], apply: _Apply, on_position: Callable[[Lsn], None]
) -> None:
    """Until nothing more comes: as many transactions as are waiting become one of the target."""
    async for piece in received:
        for transaction in await apply.together(piece, received):
            await transaction.ack()
        on_position(apply.position)


async def _position(
    source: str, slot: str, publications: Sequence[str], there: SqlTarget, *, create_tables: bool
) -> Lsn:
    """Where to go on from; what is not copied yet is."""
    publisher = await Publisher.connect(source, application_name=slot)
    try:
        identity = await publisher.identify_system()
        progress = await there.progress()
        if progress is not None and progress.lsn is not None:
            check_publisher(identity, progress.system_id, progress.lsn)
            if await publisher.slot(slot) is None:
                raise SlotLost(
                    f'replication slot "{slot}" does not exist any more',
                    hint="Empty the tables, delete the mirror's rows in subscriber_mirror and subscriber_mirror_table,"
                    " and start it again.",
                )
            await there.load()
            return progress.lsn
        if progress is None:
            if await publisher.slot(slot) is not None:
                raise PublisherError(
                    f'replication slot "{slot}" exists, and the target has no mirror of that name',
                    hint="Choose another name, or drop the slot if nobody needs it.",
                    sqlstate="42710",
                )
            await there.begin_mirror(identity.systemid)
        return await _copy(source, slot, publications, publisher, there, create_tables=create_tables)
    finally:
        publisher.session.abort()


async def _copy(
    source: str,
    slot: str,
    publications: Sequence[str],
    publisher: Publisher,
    there: SqlTarget,
    *,
    create_tables: bool,
) -> Lsn:
    """Copy all tables as of the beginning of a new slot; its position."""
    await publisher.drop_slot(slot, missing_ok=True, wait=True)
    async with stream(source, slot=slot, publications=publications, create="missing") as begun:
        info = await publisher.slot(slot)
        if begun.snapshot is None or info is None or info.confirmed_flush is None:
            raise PublisherError(f'replication slot "{slot}" was made by somebody else meanwhile', sqlstate="42710")
        session = publisher.session
        await session.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await session.query(f"SET TRANSACTION SNAPSHOT {literal(begun.snapshot)}")
        tables = [await publisher.table(*name, publications) for name in await publisher.tables(publications)]
        await there.prepare([await _described(publisher, table) for table in tables], create=create_tables)
        async with there.transaction(None) as writer:
            for table in tables:
                await _copy_table(publisher, table, there.tables[table.schema, table.name], writer)
            writer.reached = info.confirmed_flush
        await publisher.commit()
        return info.confirmed_flush


async def _described(publisher: Publisher, table: PublishedTable) -> SourceTable:
    key = [column.name for column in table.columns if column.is_key]
    if not key:
        rows = await publisher.session.rows(primary_key_query(table.relid))
        names = {column.name for column in table.columns}
        key = [name for (name,) in rows if name is not None]
        key = key if names.issuperset(key) and table.replica_identity == "f" else []
    columns = tuple(SourceColumn(c.name, c.type_oid, c.type_modifier) for c in table.columns)
    return SourceTable(table.schema, table.name, columns, tuple(key))


async def _copy_table(publisher: Publisher, table: PublishedTable, to: TargetTable, writer: Writer) -> None:
    names = [column.name for column in table.columns]
    statement = copy_statement(table, binary=False)
    async for lines in publisher.session.copy_out(statement):
        for line in lines:
            _, values = split_line(line, len(names))
            texts = [None if value is None else value.decode("utf-8", "surrogateescape") for value in values]
            await writer.upsert(to, dict(zip(names, texts, strict=True)))


class _Apply:
    """Changes of the stream, written to the tables of the mirror."""

    def __init__(self, there: SqlTarget, position: Lsn) -> None:
        self._there = there
        self.position = position  # durable on the target
        self.one_by_one_until = NOWHERE  # transactions of the publisher before this stay transactions on the target
        self._known: dict[int, tuple[Relation, TargetTable | None]] = {}
        self._ignored: set[str] = set()

    async def together(self, piece: _Piece, received: MemoryObjectReceiveStream[_Piece]) -> list[Transaction]:
        """The transaction that begins with `piece`, and those that wait behind it: all of them, or nothing."""
        ended: list[Transaction] = []
        most = TOGETHER if self.position >= self.one_by_one_until else 0
        changes = 0
        try:
            async with self._there.transaction(self.position) as writer:
                while True:
                    batch, transaction = piece
                    for change in batch:
                        await self._change(writer, change)
                    changes += len(batch)
                    if transaction is None:
                        piece = await received.receive()
                        continue
                    ended.append(transaction)
                    assert transaction.end_lsn is not None
                    writer.reached = transaction.end_lsn
                    following = await _waiting(received) if changes < most else None
                    if following is None:
                        break
                    piece = following
        except ApplyError as error:
            if most and ended and ended[-1].end_lsn is not None:
                raise _RefusedTogether(ended[-1].end_lsn) from error
            raise
        self.position = writer.reached
        return ended

    async def _change(self, writer: Writer, change: Change) -> None:
        match change:
            case Truncate(relations):
                for relation in relations:
                    if (table := self._table(relation)) is not None:
                        await writer.truncate(table)
            case Insert(relation, new):
                if (table := self._table(relation)) is not None:
                    await writer.upsert(table, _sent(new))
            case Update(relation):
                if (table := self._table(relation)) is not None:
                    await _update(writer, table, change)
            case Delete(relation, old):
                if (table := self._table(relation)) is not None:
                    await writer.delete(table, _key(table, old))

    def _table(self, relation: Relation) -> TargetTable | None:
        """The table of the target; None: the mirror began without it."""
        known = self._known.get(relation.relid)
        if known is None or known[0] is not relation:
            table = self._there.tables.get((relation.schema, relation.name))
            if table is not None:
                table.require(list(relation.by_name))
                _require_key(table, relation)
            elif str(relation) not in self._ignored:
                self._ignored.add(str(relation))
                telemetry.log(
                    telemetry.WARNING,
                    f'changes of table "{relation}" are passed over: the mirror began without it',
                    event="mirror.table",
                    relation=str(relation),
                )
            known = self._known[relation.relid] = relation, table
        return known[1]


async def _waiting(received: MemoryObjectReceiveStream[_Piece]) -> _Piece | None:
    """What the next transaction begins with, if it is there already."""
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()
        try:
            return received.receive_nowait()
        except anyio.WouldBlock:
            continue
        except anyio.EndOfStream:
            break
    return None


async def _update(writer: Writer, table: TargetTable, change: Update) -> None:
    """A row that is whole, with the key that it had, is written over; others need what is there."""
    row = _sent(change.new)
    key = _key(table, change.old if change.old is not None else change.new)
    if len(row) == len(change.relation.columns) and table.key_of(row) == table.key_of(key):
        await writer.upsert(table, row)
    elif not await writer.update(table, key, row):
        raise ApplyError(
            f'a row of table "{table.table.name}" that is to be changed is not there',
            detail="Somebody else has written to the target.",
        )


def _sent(row: Row) -> Texts:
    """What has a value, or is NULL."""
    return {name: text for name, text in row.texts().items() if not isinstance(text, Missing)}


def _key(table: TargetTable, row: Row) -> Texts:
    found: dict[str, Any] = {name: row.text(name) for name in table.key}
    return found


def _require_key(table: TargetTable, relation: Relation) -> None:
    if not set(table.key) <= set(relation.key):
        raise MappingError(
            f'the key of table "{relation}" is not the one that the mirror began with',
            detail=f"It was {', '.join(table.key)}.",
            hint="Give it that replica identity again, or begin the mirror anew.",
        )
