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

The values are texts on both ways, from COPY and from the stream, so they become the same. What a program's hooks make
of a row is made of it on either way; that a mirror has hooks is stored, so it does not run without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from subscriber.apply.hooks.config import Hooks
from subscriber.apply.hooks.table_hook import TableHook, bind
from subscriber.change_stream.api import stream
from subscriber.change_stream.options import names
from subscriber.change_stream.stream import Stream
from subscriber.errors import PublisherError, SlotLost
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import split_line
from subscriber.publisher.connection import Publisher
from subscriber.publisher.replication_stream import check_publisher
from subscriber.publisher.tables import PublishedTable, as_relation, copy_statement, primary_key_query
from subscriber.quoting import literal
from subscriber.settings import Settings
from subscriber.sqlstate import DUPLICATE_OBJECT
from subscriber.targets.sqlalchemy.table import SourceColumn, SourceTable, TargetTable
from subscriber.targets.sqlalchemy.target import MirrorWriter, SqlTarget
from subscriber.worker.exception_groups import root_cause
from subscriber.worker.mirror.applier import MirrorApply, Piece, RefusedTogether


async def mirror(
    source: str,
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
    """Copy the tables of `publications` to another database, and keep them as the publisher's.

    `source` is a URI or libpq `key=value` string of a role that may replicate. `target` is a URL of SQLAlchemy for
    asyncio, as "sqlite+aiosqlite:///x.db". The `slot` is made, and names the mirror: started again with the same one,
    it goes on from where it was. Tables that are not on the target are made, unless `create_tables` is false. `hooks`
    change rows on their way; give those of the beginning each time.

    Runs until cancelled; or until everything committed before `until` is there. `on_position` is called with each
    position that is durable on the target. Transactions of the publisher are seen there whole and in their order,
    several at once if they come quicker than the target commits. `settings` are limits, intervals and time-outs; None:
    those of the environment, Settings.from_environment().

    Raises ConninfoError, ConnectionLost, ServerError, PublisherError; MappingError for tables that cannot be mirrored,
    HookError for hooks that do not fit, ApplyError for what the target refuses. Start it again when that is mended:
    nothing is lost, nothing comes twice.
    """
    settings = Settings.from_environment() if settings is None else settings
    publications = names(publications)
    begin = partial(stream, source, slot=slot, publications=publications, until=until, settings=settings)
    async with SqlTarget.open(target, slot, hooks) as there:
        position = await _position(source, slot, publications, there, create_tables=create_tables)
        tell = on_position or (lambda _: None)
        tell(position)
        apply = MirrorApply(there, position, settings)
        while True:
            try:
                async with (
                    begin(start=apply.position) as changes,
                    anyio.create_task_group() as tasks,
                ):
                    sent, received = anyio.create_memory_object_stream[Piece]()
                    tasks.start_soon(_read, changes, sent)
                    with received:
                        await _follow(received, apply, tell)
                return
            except BaseExceptionGroup as group:
                cause = root_cause(group)
                if not isinstance(cause, RefusedTogether):
                    raise cause from None
                apply.one_by_one_until = cause.lsn


async def _read(changes: Stream, to: MemoryObjectSendStream[Piece]) -> None:
    """What comes from the publisher, one batch of changes ahead of the target."""
    with to, suppress(anyio.BrokenResourceError):  # the other side has failed, and tells
        async for transaction in changes:
            async for batch in transaction.batches():
                await to.send((batch, None))
            await to.send(([], transaction))


async def _follow(
    received: MemoryObjectReceiveStream[Piece], apply: MirrorApply, on_position: Callable[[Lsn], None]
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
                    sqlstate=DUPLICATE_OBJECT,
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
    publisher: Publisher, table: PublishedTable, hook: TableHook | None, to: TargetTable, writer: MirrorWriter
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
