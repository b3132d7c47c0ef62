"""Any database that SQLAlchemy has an asyncio dialect for, as the target of a mirror (worker/mirror/mirror.py).

Rows are written by key: an inserted or changed row exists afterwards, whether it existed before or not. Consecutive
rows that need the same statement are sent together. The position is a row of the same database,
changed in the same transaction as the data, so after a crash it matches the data. It is changed only from the value
that was read, so a second mirror of the same slot cannot commit.

    subscriber_mirror           a row for each slot: its owner, whether it has hooks, and its position;
                                no position: the copy is not complete
    subscriber_mirror_timeline  the publisher's timelines that the position belongs to; no row: they are not known
    subscriber_mirror_table     the published tables that the mirror began with, and their keys
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    delete,
    insert,
    inspect,
    literal,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from subscriber.apply.hooks.config import Hooks, Name
from subscriber.errors import (
    ApplyError,
    ConnectionLost,
    ConninfoError,
    HookError,
    HooksMissing,
    MappingError,
    SubscriberError,
)
from subscriber.lsn import Lsn
from subscriber.sqlstate import CHARACTER_NOT_IN_REPERTOIRE, EXTERNAL_ROUTINE_EXCEPTION
from subscriber.targets.sqlalchemy.dialects.mysql import (
    exact_collation,
    lost_hint,
    prepare_sessions,
    refused_hint,
    require_exact,
    table_options,
)
from subscriber.targets.sqlalchemy.row_buffer import RowBuffer
from subscriber.targets.sqlalchemy.table import SourceTable, TargetTable, flat
from subscriber.targets.sqlalchemy.transaction import SqlTransaction, begin
from subscriber.targets.sqlalchemy.types import column_type
from subscriber.timeline_history import TimelineHistory

_HINT = "The exception that this one was raised from has the driver's text."

_own = MetaData()
_mirrors = Table(
    "subscriber_mirror",
    _own,
    Column("slot", String(63), primary_key=True),
    Column("system_id", String(20), nullable=False),  # of the publisher's cluster
    Column("lsn", String(20)),  # NULL: the copy has not been committed
    Column("hooked", Boolean, nullable=False),  # it is not to be run by a program without hooks
    **table_options(),
)
_timelines = Table(
    "subscriber_mirror_timeline",
    _own,
    Column("slot", String(63), primary_key=True),
    Column("timeline", Integer, nullable=False),
    Column("ancestors", Text, nullable=False),  # number and end of each, as TimelineHistory has them
    **table_options(),
)
_tables = Table(
    "subscriber_mirror_table",
    _own,
    Column("slot", String(63), primary_key=True),
    Column("schema_name", String(63), primary_key=True),
    Column("table_name", String(63), primary_key=True),
    Column("target", String(127), nullable=False),
    Column("key_columns", Text, nullable=False),  # names, as JSON
    **table_options(),
)


@dataclass(frozen=True, slots=True)
class MirrorProgress:
    """Progress of a mirror. `lsn` None: its copy has begun and is not committed. `history` None: it is not known."""

    system_id: int
    lsn: Lsn | None
    history: TimelineHistory | None


class MirrorDatabase:
    """One mirror's database. Made by open()."""

    def __init__(self, engine: AsyncEngine, slot: str, hooks: Hooks | None) -> None:
        self.hooks = hooks  # for the producer of the rows; None: there are none
        self.tables: dict[tuple[str, str], TargetTable] = {}  # by schema and name on the publisher
        self._engine = engine
        self._slot = slot

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, slot: str, hooks: Hooks | None = None) -> AsyncIterator[MirrorDatabase]:
        """Connect and make our own tables. Raises ConninfoError, ConnectionLost, ApplyError."""
        try:
            # A server ends sessions that wait for long; SQLite has none.
            parsed = make_url(url)
            if "@" in (parsed.host or ""):
                raise ValueError("the host is part of a password")
            asks = parsed.get_backend_name() != "sqlite"
            engine = create_async_engine(parsed, hide_parameters=True, pool_pre_ping=asks)
        except (NoSuchModuleError, ImportError, SQLAlchemyError, ValueError) as error:
            # The others quote parts of the URL.
            cause = error if isinstance(error, NoSuchModuleError | ImportError) else None
            raise ConninfoError(
                "the target's URL cannot be used",
                detail=f"{type(error).__name__}: no such dialect, no driver for it, or none for asyncio.",
                hint="Write it like sqlite+aiosqlite:///file.db or mysql+aiomysql://user@host/database, and"
                " percent-encode the special characters of a password.",
            ) from cause
        prepare_sessions(engine)
        target = cls(engine, slot, hooks)
        try:
            try:
                async with begin(engine):
                    pass
            except (SQLAlchemyError, OSError) as error:
                what = type(error.orig if isinstance(error, DBAPIError) else error).__name__
                raise ConnectionLost(f"could not connect to the target: {what}", hint=_HINT) from error
            async with target._begin() as transaction:
                await transaction.run_sync(_own.create_all)
            yield target
        finally:
            with anyio.CancelScope(shield=True):
                await engine.dispose()

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[SqlTransaction]:
        """A transaction; what the driver raises is raised as ours."""
        try:
            async with begin(self._engine) as transaction:
                yield transaction
        except SQLAlchemyError as error:
            raise _translated(error, self._engine.dialect.name) from error
        except UnicodeEncodeError:  # which has the value
            raise ApplyError(
                "a text cannot be written in the encoding of the target", sqlstate=CHARACTER_NOT_IN_REPERTOIRE
            ) from None

    # --- where it stands ------------------------------------------------------------------------

    async def progress(self) -> MirrorProgress | None:
        """None: there is no mirror of the slot here. Raises HooksMissing if it has hooks, and this program none."""
        async with self._begin() as transaction:
            mine = _mirrors.c.slot == self._slot
            row = (await transaction.execute(select(_mirrors).where(mine))).one_or_none()
            if row is None:
                return None
            if row.hooked and self.hooks is None:
                raise HooksMissing(
                    f'mirror "{self._slot}" has hooks, and this program has none for it',
                    hint="Run it in the program that has them, or give Hooks() to do without from now on.",
                )
            if row.hooked != self._is_hooked:
                await transaction.execute(update(_mirrors).where(mine).values(hooked=self._is_hooked))
            known = (await transaction.execute(select(_timelines).where(_timelines.c.slot == self._slot))).one_or_none()
        history = None if known is None else TimelineHistory.parse(known.timeline, known.ancestors)
        return MirrorProgress(int(row.system_id), Lsn.parse(row.lsn) if row.lsn else None, history)

    async def begin_mirror(self, system_id: int) -> None:
        """Store that a slot is going to be made, and the copy: both are thrown away if that does not end well."""
        row = {"slot": self._slot, "system_id": str(system_id), "hooked": self._is_hooked}
        async with self._begin() as transaction:
            await transaction.execute(insert(_mirrors).values(row))

    @property
    def _is_hooked(self) -> bool:
        return self.hooks is not None and bool(self.hooks.tables or self.hooks.schemas)

    async def load(self) -> None:
        """The tables of a mirror that was copied. Raises HookError if the hooks are not for these."""
        async with self._begin() as transaction:
            rows = (await transaction.execute(select(_tables).where(_tables.c.slot == self._slot))).all()
            found = await transaction.run_sync(_reflect, [row.target for row in rows])
        self.require_published([(row.schema_name, row.table_name) for row in rows])
        for row in rows:
            name = (row.schema_name, row.table_name)
            label = ".".join(name)
            if self.hooks is not None and (to := flat(self.hooks.target(*name))) != row.target:
                raise HookError(
                    f'table "{row.target}" takes the rows of "{label}", which the hooks send to "{to}"',
                    detail="Which table takes them is decided when the mirror begins.",
                    hint="Begin it anew, with the hooks that it is to have.",
                )
            if row.target not in found:
                raise MappingError(
                    f'table "{row.target}" of the target, which "{label}" is mirrored to, does not exist'
                )
            self.tables[name] = self._table(label, found[row.target], tuple(json.loads(row.key_columns)))

    def require_published(self, tables: Collection[Name]) -> None:
        """Raises HookError for a hook of any other table."""
        named = set() if self.hooks is None else set(self.hooks.tables)
        if unknown := sorted(named.difference(tables)):
            raise HookError(
                f'hooks of mirror "{self._slot}" name a table that is not part of it: "{".".join(unknown[0])}"',
                hint="Correct the name, or begin the mirror anew if the table came into the publication later.",
            )

    async def prepare(self, sources: Sequence[SourceTable], *, create: bool) -> None:
        """Find the tables for a copy, or make them. Raises MappingError for what cannot be."""
        _require_keys(sources)
        async with self._begin() as transaction:
            names = [source.target for source in sources]
            found = await transaction.run_sync(_reflect, names)
            missing = [source for source in sources if source.target not in found]
            if missing and not create:
                raise MappingError(
                    f'table "{missing[0].target}" of the target does not exist',
                    hint="Create it, or give create_tables=True.",
                )
            await transaction.run_sync(_create, missing)
            found = await transaction.run_sync(_reflect, names)
            for source in sources:
                table = self._table(source.label, found[source.target], source.key)
                columns = [column.name for column in source.columns]
                table.require(columns)
                await transaction.run_sync(require_exact, source.target, columns, source.key)
                if (
                    await transaction.execute(select(literal(1)).select_from(table.table).limit(1))
                ).first() is not None:
                    raise MappingError(f'table "{source.target}" of the target is not empty')
                self.tables[source.schema, source.name] = table

    def _table(self, label: str, table: Table, key: tuple[str, ...]) -> TargetTable:
        return TargetTable(label, table, key, self._engine.dialect.name)

    # --- writing --------------------------------------------------------------------------------

    @asynccontextmanager
    async def transaction(self, before: Lsn | None) -> AsyncIterator[RowBuffer]:
        """One of the target; `before` is the position that it must find. The caller says `writer.reached`."""
        async with self._begin() as transaction:
            writer = RowBuffer(transaction)
            yield writer
            await writer.flush()
            if before is None:
                rows = [
                    {"slot": self._slot, "schema_name": schema, "table_name": name, "target": table.table.name}
                    | {"key_columns": json.dumps(table.key)}
                    for (schema, name), table in self.tables.items()
                ]
                if rows:
                    await transaction.execute(insert(_tables), rows)
            old = _mirrors.c.lsn.is_(None) if before is None else _mirrors.c.lsn == str(before)
            advance = update(_mirrors).where(_mirrors.c.slot == self._slot, old).values(lsn=str(writer.reached))
            if (await transaction.execute(advance)).rowcount != 1:
                raise ApplyError(
                    f'the progress of mirror "{self._slot}" is not where it was',
                    hint="Another process mirrors the same slot to this database.",
                )

    async def record_timeline(self, writer: RowBuffer, history: TimelineHistory | None) -> None:
        """Store the publisher's timelines that the position belongs to. None: they are not known."""
        await writer.transaction.execute(delete(_timelines).where(_timelines.c.slot == self._slot))
        if history is not None:
            row = {"slot": self._slot, "timeline": history.timeline, "ancestors": str(history)}
            await writer.transaction.execute(insert(_timelines).values(row))


def _require_keys(sources: Sequence[SourceTable]) -> None:
    labels: dict[str, str] = {}
    for source in sources:
        if source.target.lower() in _own.tables:
            raise MappingError(
                f'table "{source.label}" has the name of a table of ours on the target: "{source.target}"',
                hint="Rename it on the publisher, or send its rows to another table with a hook.",
            )
        if not source.key:
            raise MappingError(
                f'table "{source.label}" has no key',
                detail="Rows of a mirror are known by the replica identity's index, or the primary key.",
                hint="Give it a primary key on the publisher, or take it out of the publication.",
            )
        names = [column.name.lower() for column in source.columns]
        if twice := [name for name in names if names.count(name) > 1]:
            raise MappingError(f'columns "{twice[0]}" of table "{source.label}" differ in case only')
        if labels.setdefault(source.target.lower(), source.label) != source.label:
            raise MappingError(
                f'tables "{labels[source.target.lower()]}" and "{source.label}" would be one on the target',
                detail="Letters of different case are the same in names there.",
            )


def _reflect(connection: Connection, names: Sequence[str]) -> dict[str, Table]:
    """The tables that are there; whether letters of different case are the same, the database knows."""
    inspector, metadata = inspect(connection), MetaData()
    return {
        name: Table(name, metadata, autoload_with=connection, resolve_fks=False)
        for name in names
        if inspector.has_table(name)
    }


def _create(connection: Connection, sources: Sequence[SourceTable]) -> None:
    metadata, options = MetaData(), table_options(exact_collation(connection))
    for source in sources:
        columns = [
            Column(
                column.name,
                column_type(column.type_oid, column.type_modifier, in_key=column.name in source.key),
                autoincrement=False,
            )
            for column in source.columns
        ]
        Table(source.target, metadata, *columns, PrimaryKeyConstraint(*source.key), **options)
    metadata.create_all(connection)


def _translated(error: SQLAlchemyError, dialect: str) -> SubscriberError:
    """Without the driver's text, which may have values."""
    if not isinstance(error, DBAPIError):
        return ApplyError(f"the target could not be used: {type(error).__name__}")
    what = type(error.orig).__name__
    if error.connection_invalidated:
        return ConnectionLost(f"lost connection to the target: {what}", hint=lost_hint(dialect))
    return ApplyError(
        f"the target refused a statement: {what}",
        hint=refused_hint(dialect, error.orig) or _HINT,
        sqlstate=EXTERNAL_ROUTINE_EXCEPTION,
    )
