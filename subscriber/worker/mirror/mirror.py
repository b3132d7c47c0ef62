"""Mirrors: keep a copy of the tables of publications in another database that SQLAlchemy supports.

Purpose. A mirror is an initial copy, and then apply_to() with a SqlTarget (targets/sqlalchemy/target.py). Table
subscriber_mirror of the target has a row for each slot. The row decides the next step:

    no row                 store a row without a position
    row without position   drop an existing slot and create a new one; find or create the tables; copy them from the
                           slot's snapshot; commit the rows together with the slot's position
    row with a position    stream from the position, and apply the changes

Invariants.

- The position is committed in the same transaction as the rows. It is confirmed to the publisher after that.
- COPY and stream both deliver values as text in the same session, so that the same value is stored.
- Hooks are applied to copied rows and to streamed changes. The row records that the mirror has hooks, and a program
  without hooks cannot run it.

Failure cases.

- Process killed before the copy is committed: the tables have no rows. The next start creates a new slot and copies the
  tables again.
- Process killed after a commit, before the publisher has recorded the confirmation: the publisher is asked to send from
  the position of the target.
- Connection to the publisher lost: the mirror connects again, and continues at the position that it has committed. It
  does not read the position again, so it notices another process that has moved it.
- Publisher has failed over to a server without all changes of the target, while the mirror ran or while it did not: the
  mirror stops. The target has the timelines of its position, which are stored with the first transaction after a change
  of them. Not noticed if the publisher was a standby, which can be promoted while it streams.
- Transaction rejected by the target after others in the same transaction of the target: all are rolled back. They are
  read again, and applied in a transaction each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from subscriber import telemetry
from subscriber.apply.hooks.config import Hooks
from subscriber.apply.hooks.table_hook import TableHook, bind
from subscriber.apply.table_states import NOWHERE
from subscriber.change_stream.engine.connection import is_transient
from subscriber.change_stream.options import names, stream_folder
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.dsn import Dsn, resolve_dsn
from subscriber.errors import ApplyError, PublisherError, SlotLost, SubscriberError, TargetLost
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import split_line
from subscriber.publisher.connection import Publisher
from subscriber.publisher.publications import check_publications
from subscriber.publisher.reconnect import Backoff
from subscriber.publisher.replication_stream import check_publisher
from subscriber.publisher.tables import PublishedTable, as_relation, copy_statement, primary_key_query
from subscriber.publisher.timelines import check_history, read_history
from subscriber.settings import Settings
from subscriber.sqlstate import DUPLICATE_OBJECT
from subscriber.targets.sqlalchemy.database import MirrorDatabase, MirrorProgress
from subscriber.targets.sqlalchemy.row_buffer import RowBuffer
from subscriber.targets.sqlalchemy.table import SourceColumn, SourceTable, TargetTable
from subscriber.targets.sqlalchemy.target import SqlTarget
from subscriber.timeline_history import TimelineHistory
from subscriber.worker.apply.custom_target import ApplyUntil, follow_slot

_BEGIN_ANEW = (
    "Empty the tables, delete the mirror's rows in subscriber_mirror, subscriber_mirror_table and"
    " subscriber_mirror_timeline, and start it again."
)


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
    conninfo = await resolve_dsn(source)
    folder = stream_folder(conninfo, slot, settings.spool_dir)
    rules, on_position = ApplyUntil(until, hooks), on_position or (lambda _: None)
    backoff, alone_until, has_begun = Backoff(settings), NOWHERE, False
    progress: MirrorProgress | None = None
    async with MirrorDatabase.open(target, slot, hooks) as there:
        while True:
            session: SqlTarget | None = None
            try:
                async with _connected(conninfo, slot) as publisher:
                    if not has_begun:
                        progress = await _load(publisher, slot, publications, there, create_tables=create_tables)
                        on_position(progress.position)
                    elif progress is None:
                        progress = await _stored_progress(there)
                    history = await _check(publisher, slot, progress)
                    opened = SqlTarget.open(
                        there, progress, history, alone_until=alone_until, on_position=on_position, settings=settings
                    )
                    async with opened as session:
                        has_begun = True
                        await follow_slot(
                            publisher, session, slot, publications, rules, folder, settings, backoff.reset
                        )
                        return
            except SubscriberError as error:
                if session is not None and isinstance(error, ApplyError) and session.is_batch_rejected:
                    progress, alone_until = session.progress, session.position
                    continue
                progress = None
                if not has_begun or isinstance(error, TargetLost) or not is_transient(error):
                    raise
                telemetry.log_error(error, telemetry.WARNING, event="stream.lost")
            await anyio.sleep(backoff.next())


@asynccontextmanager
async def _connected(conninfo: Conninfo, slot: str) -> AsyncIterator[Publisher]:
    async with await Publisher.connect(conninfo, application_name=slot, timezone="UTC") as publisher:
        yield publisher


async def _load(
    publisher: Publisher, slot: str, publications: Sequence[str], there: MirrorDatabase, *, create_tables: bool
) -> MirrorProgress:
    """Load the tables and the progress of the mirror. Copies the tables first if that has not been done."""
    progress = await there.progress()
    if progress is not None and progress.is_copied:
        await there.load()
        return progress
    if progress is None:
        if await publisher.slot(slot) is not None:
            raise PublisherError(
                f'replication slot "{slot}" exists, and the target has no mirror of that name',
                hint="Choose another name, or drop the slot if nobody needs it.",
                sqlstate=DUPLICATE_OBJECT,
            )
        identity = await publisher.identify_system()
        progress = await there.begin_mirror(identity.systemid)
    position = await _copy(publisher, slot, publications, there, create_tables=create_tables)
    return MirrorProgress(progress.system_id, position, is_copied=True)


async def _stored_progress(there: MirrorDatabase) -> MirrorProgress:
    """Return the progress that the target has. A transaction may be committed whose result was not received."""
    progress = await there.progress()
    if progress is None:
        raise ApplyError(f'mirror "{there.slot}" has been removed from the target')
    return progress


async def _check(publisher: Publisher, slot: str, progress: MirrorProgress) -> TimelineHistory | None:
    """Check that the publisher has all changes of the target, and the slot.

    Returns:
        The publisher's timelines. None: it is a standby, which may change them while it streams.
    """
    identity = await publisher.identify_system()
    check_publisher(identity, progress.system_id, progress.position)
    history = await read_history(publisher, identity)
    check_history(history, progress.history, progress.position, in_recovery=identity.in_recovery, hint=_BEGIN_ANEW)
    if await publisher.slot(slot) is None:
        raise SlotLost(f'replication slot "{slot}" does not exist any more', hint=_BEGIN_ANEW)
    return None if identity.in_recovery else history


async def _copy(
    publisher: Publisher, slot: str, publications: Sequence[str], there: MirrorDatabase, *, create_tables: bool
) -> Lsn:
    """Create the slot, copy all tables from its snapshot, and return its position."""
    await check_publications(publisher, publications)
    await publisher.drop_slot(slot, missing_ok=True, wait=True)
    await publisher.begin_snapshot()
    created = await publisher.create_slot(slot, snapshot="use")
    tables = [await publisher.table(*name, publications) for name in await publisher.tables(publications)]
    there.require_published([(table.schema, table.name) for table in tables])
    bound = [None if there.hooks is None else bind(there.hooks, as_relation(table)) for table in tables]
    sources = [await _described(publisher, *pair) for pair in zip(tables, bound, strict=True)]
    await there.prepare(sources, create=create_tables)
    async with there.copy(created.consistent_point) as rows:
        for table, hook in zip(tables, bound, strict=True):
            await _copy_table(publisher, table, hook, there.tables[table.schema, table.name], rows)
    await publisher.commit()
    return created.consistent_point


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
    publisher: Publisher, table: PublishedTable, hook: TableHook | None, to: TargetTable, rows: RowBuffer
) -> None:
    here = [column.name for column in table.columns]
    there = here if hook is None else [column.name for column in hook.relation.columns]
    async for lines in publisher.session.copy_out(copy_statement(table, binary=False)):
        for line in lines:
            row = split_line(line, len(here))
            values = row[1] if hook is None else await hook.copied(row)
            if values is not None:
                texts = [None if value is None else value.decode("utf-8", "surrogateescape") for value in values]
                await rows.upsert(to, dict(zip(there, texts, strict=True)))
