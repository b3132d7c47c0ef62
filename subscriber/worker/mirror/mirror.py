"""Mirrors: keep a copy of the tables of publications in another database that SQLAlchemy supports.

Purpose. Table subscriber_mirror of the target has a row for each slot. The row decides the next step:

    no row                 store a row without a position
    row without position   drop an existing slot and create a new one; find or create the tables; copy them from the
                           slot's snapshot; commit the rows together with the slot's position
    row with a position    stream from the position; apply the publisher's waiting transactions in one transaction of
                           the target, which also moves the position; then acknowledge them

Invariants.

- The position is committed in the same transaction as the rows. Transactions are acknowledged after that.
- COPY and stream both deliver values as text, so that the same value is stored.
- Hooks are applied to copied rows and to streamed changes. The row records that the mirror has hooks, and a program
  without hooks cannot run it.

Failure cases.

- Process killed before the copy is committed: the tables have no rows. The next start creates a new slot and copies the
  tables again.
- Process killed after a commit, before the publisher has recorded the acknowledgement: the publisher sends the
  transactions again. The stream skips them, because they are before the position (`start` of `stream()`).
- Publisher has failed over to a server without all changes of the target, while the mirror ran or while it did not: the
  mirror stops. The target has the timelines of its position, which are stored with the first transaction after a change
  of them. Not noticed if the publisher was a standby, which can be promoted while it streams.
- Transaction rejected by the target after others in the same transaction of the target: all are rolled back. They are
  read again, and applied in a transaction each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from subscriber.apply.hooks.config import Hooks
from subscriber.apply.hooks.table_hook import TableHook, bind
from subscriber.change_stream.api import stream
from subscriber.change_stream.options import names
from subscriber.change_stream.stream import Stream
from subscriber.connection.dsn import Dsn, resolve_dsn
from subscriber.errors import PublisherError, SlotLost
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import split_line
from subscriber.publisher.connection import Publisher
from subscriber.publisher.replication_stream import check_publisher
from subscriber.publisher.tables import PublishedTable, as_relation, copy_statement, primary_key_query
from subscriber.publisher.timelines import read_history
from subscriber.quoting import literal
from subscriber.settings import Settings
from subscriber.sqlstate import DUPLICATE_OBJECT
from subscriber.targets.sqlalchemy.database import MirrorDatabase
from subscriber.targets.sqlalchemy.row_buffer import RowBuffer
from subscriber.targets.sqlalchemy.table import SourceColumn, SourceTable, TargetTable
from subscriber.timeline_history import TimelineHistory
from subscriber.worker.exception_groups import root_cause
from subscriber.worker.mirror.applier import BEGIN_ANEW, MirrorApply, Piece, RefusedTogether, check_timelines


async def mirror(
    source: Dsn,
    *,
    slot: str,
    publications: Sequence[str],
    target: str,
    hooks: Hooks | None = None,
    create_tables: bool = True,
    until: Lsn | None = None,
    on_position: Callable[[Lsn], None] | None = None,
    settings: Settings | None = None,
) -> None:
    """Copy the tables of `publications` to another database, and apply all later changes to the copy.

    Readers of the target see the publisher's transactions whole and in commit order. Several become visible together if
    they arrive faster than the target commits. After an error or the end of the process, call mirror() again with the
    same arguments. No change is lost, and none is applied twice.

    Args:
        source: the publisher's connection string, see `Dsn`. Its role needs REPLICATION.
        slot: the replication slot, which is created. It identifies the mirror: a call with the same slot resumes it.
        publications: the names of publications, which must exist.
        target: an SQLAlchemy URL with an asyncio driver, for example "sqlite+aiosqlite:///x.db".
        hooks: change rows before they are written. Each call needs the hooks of the first one. None: no hooks.
        create_tables: create tables that the target does not have. False: a missing table is an error.
        until: return when the target has all transactions that were committed before this position. None: no end.
        on_position: called with the position at the start, and with each later one that is committed on the target.
        settings: limits, intervals and time-outs. None: Settings.from_environment().

    Raises:
        TypeError: `publications` is a string.
        ValueError: a variable of the environment has a value that is not allowed.
        ConninfoError: the connection string or the URL is invalid, or the driver is not installed.
        ConnectionLost: the publisher cannot be reached, or the connection to the target was lost.
        ServerError: the publisher rejects the connection or a command.
        PublisherReplaced: the publisher has failed over to a server without all changes of the target.
        PublisherError: the slot exists without a mirror, or has been lost; or another publisher answers.
        MappingError: a table cannot be mirrored. It has no key, for example, or the target's table has other columns.
        HookError: the hooks do not fit the tables, or a mirror with hooks was called without them.
        ApplyError: the target rejects a change, or another process runs the same mirror.

    Cancellation: safe. The transaction that is open on the target is rolled back.
    """
    settings = Settings.from_environment() if settings is None else settings
    publications = names(publications)
    begin = partial(stream, source, slot=slot, publications=publications, until=until, settings=settings)
    async with MirrorDatabase.open(target, slot, hooks) as there:
        progress = await _progress(source, slot, publications, there, create_tables=create_tables)
        tell = on_position or (lambda _: None)
        tell(progress.position)
        apply = MirrorApply(there, progress.position, progress.history, settings)
        while True:
            try:
                async with (
                    begin(start=apply.position) as changes,
                    anyio.create_task_group() as tasks,
                ):
                    sent, received = anyio.create_memory_object_stream[Piece]()
                    tasks.start_soon(_read, changes, sent)
                    with received:
                        await _follow(received, changes, apply, tell)
                return
            except BaseExceptionGroup as group:
                cause = root_cause(group)
                if not isinstance(cause, RefusedTogether):
                    raise cause from None
                apply.single_until = cause.lsn


async def _read(changes: Stream, to: MemoryObjectSendStream[Piece]) -> None:
    """Read transactions from the publisher, one batch of changes ahead of the target."""
    # BrokenResourceError: the receiver has failed, and raises the reason.
    with to, suppress(anyio.BrokenResourceError):
        async for transaction in changes:
            async for batch in transaction.batches():
                await to.send((batch, None))
            await to.send(([], transaction))


async def _follow(
    received: MemoryObjectReceiveStream[Piece],
    changes: Stream,
    apply: MirrorApply,
    on_position: Callable[[Lsn], None],
) -> None:
    """Apply and acknowledge transactions until the stream ends. Waiting ones share a transaction of the target."""
    async for piece in received:
        for transaction in await apply.together(piece, received, changes):
            await transaction.ack()
        on_position(apply.position)


class _Progress(NamedTuple):
    """The position to stream from, and the publisher's timelines that it belongs to; None: they are not known."""

    position: Lsn
    history: TimelineHistory | None


async def _progress(
    source: Dsn, slot: str, publications: Sequence[str], there: MirrorDatabase, *, create_tables: bool
) -> _Progress:
    """Return the progress of the mirror. Copies the tables first if that has not been done."""
    publisher = await Publisher.connect(await resolve_dsn(source), application_name=slot)
    try:
        identity = await publisher.identify_system()
        progress = await there.progress()
        if progress is not None and progress.lsn is not None:
            check_publisher(identity, progress.system_id, progress.lsn)
            if not identity.in_recovery:
                check_timelines(await read_history(publisher, identity), progress.history, progress.lsn)
            if await publisher.slot(slot) is None:
                raise SlotLost(
                    f'replication slot "{slot}" does not exist any more',
                    hint=BEGIN_ANEW,
                )
            await there.load()
            return _Progress(progress.lsn, progress.history)
        if progress is None:
            if await publisher.slot(slot) is not None:
                raise PublisherError(
                    f'replication slot "{slot}" exists, and the target has no mirror of that name',
                    hint="Choose another name, or drop the slot if nobody needs it.",
                    sqlstate=DUPLICATE_OBJECT,
                )
            await there.begin_mirror(identity.systemid)
        copied = await _copy(source, slot, publications, publisher, there, create_tables=create_tables)
        return _Progress(copied, None)
    finally:
        publisher.session.abort()


async def _copy(
    source: Dsn,
    slot: str,
    publications: Sequence[str],
    publisher: Publisher,
    there: MirrorDatabase,
    *,
    create_tables: bool,
) -> Lsn:
    """Create the slot, copy all tables from its snapshot, and return its position."""
    await publisher.drop_slot(slot, missing_ok=True, wait=True)
    async with stream(source, slot=slot, publications=publications, create="missing") as begun:
        info = await publisher.slot(slot)
        if begun.snapshot is None or info is None or info.confirmed_flush is None:
            raise PublisherError(
                f'replication slot "{slot}" was made by somebody else meanwhile', sqlstate=DUPLICATE_OBJECT
            )
        session = publisher.session
        await session.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await session.query(f"SET TRANSACTION SNAPSHOT {literal(begun.snapshot)}")
        tables = [await publisher.table(*name, publications) for name in await publisher.tables(publications)]
        there.require_published([(table.schema, table.name) for table in tables])
        bound = [None if there.hooks is None else bind(there.hooks, as_relation(table)) for table in tables]
        sources = [await _described(publisher, *pair) for pair in zip(tables, bound, strict=True)]
        await there.prepare(sources, create=create_tables)
        async with there.transaction(None) as writer:
            for table, hook in zip(tables, bound, strict=True):
                await _copy_table(publisher, table, hook, there.tables[table.schema, table.name], writer)
            writer.reached = info.confirmed_flush
        await publisher.commit()
        return info.confirmed_flush


async def _described(publisher: Publisher, table: PublishedTable, hook: TableHook | None) -> SourceTable:
    key = [column.name for column in table.columns if column.is_key]
    if not key:
        rows = await publisher.session.rows(primary_key_query(table.relid))
        names = {column.name for column in table.columns}
        key = [name for (name,) in rows if name is not None]
        key = key if names.issuperset(key) and table.replica_identity == "f" else []
    there = as_relation(table)
    if hook is not None:
        hook.found_by(key)
        there, key = hook.relation, [hook.names[name] for name in key]
    columns = tuple(SourceColumn(c.name, c.type_oid, c.type_modifier) for c in there.columns)
    return SourceTable(table.schema, table.name, columns, tuple(key), (there.schema, there.name))


async def _copy_table(
    publisher: Publisher, table: PublishedTable, hook: TableHook | None, to: TargetTable, writer: RowBuffer
) -> None:
    here = [column.name for column in table.columns]
    there = here if hook is None else [column.name for column in hook.relation.columns]
    async for lines in publisher.session.copy_out(copy_statement(table, binary=False)):
        for line in lines:
            row = split_line(line, len(here))
            values = row[1] if hook is None else await hook.copied(row)
            if values is not None:
                texts = [None if value is None else value.decode("utf-8", "surrogateescape") for value in values]
                await writer.upsert(to, dict(zip(there, texts, strict=True)))
