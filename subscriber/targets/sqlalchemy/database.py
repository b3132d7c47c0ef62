"""The database of a mirror: any that SQLAlchemy has an asyncio dialect for. SqlTarget (target.py) writes the changes.

The position is a row of the same database, changed in the same transaction as the data, so after a crash it matches the
data. It is changed only from the value that was read, so a second mirror of the same slot cannot commit.

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
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from subscriber.apply.hooks.config import Hooks, Name
from subscriber.apply.table_states import NOWHERE
from subscriber.errors import (
    ApplyError,
    ConninfoError,
    HookError,
    HooksMissing,
    MappingError,
)
from subscriber.lsn import Lsn
from subscriber.targets.sqlalchemy.dialects.mysql import (
    exact_collation,
    prepare_sessions,
    require_exact,
    table_options,
)
from subscriber.targets.sqlalchemy.row_buffer import RowBuffer
from subscriber.targets.sqlalchemy.table import SourceTable, TargetTable, flat
from subscriber.targets.sqlalchemy.transaction import SqlTransaction
from subscriber.targets.sqlalchemy.types import column_type
from subscriber.timeline_history import TimelineHistory

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
    """The progress of a mirror.

    Attributes:
        system_id: identifies the publisher's cluster.
        position: the position of the rows. 0: the copy is not committed.
        history: the publisher's timelines that the position belongs to. None: they are not known.
        is_copied: the initial copy is committed.
    """

    system_id: int
    position: Lsn = NOWHERE
    history: TimelineHistory | None = None
    is_copied: bool = False


class MirrorDatabase:
    """The database of one mirror. open() creates it.

    Attributes:
        slot: the replication slot of the mirror.
        hooks: the hooks that change its rows. None: it has no hooks.
        tables: the tables by their schemas and names on the publisher. Empty before load() or prepare().
    """

    def __init__(self, engine: AsyncEngine, slot: str, hooks: Hooks | None) -> None:
        self.slot = slot
        self.hooks = hooks
        self.tables: dict[tuple[str, str], TargetTable] = {}
        self._engine = engine

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, slot: str, hooks: Hooks | None = None) -> AsyncIterator[MirrorDatabase]:
        """Connect and make our own tables. Raises ConninfoError, TargetLost, ApplyError."""
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
            async with target.begin() as transaction:
                await transaction.run_sync(_own.create_all)
            yield target
        finally:
            with anyio.CancelScope(shield=True):
                await engine.dispose()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[SqlTransaction]:
        """Open a transaction, which is committed at the end of the block. It is rolled back if the block raises.

        Raises:
            TargetLost: the connection to the database is lost.
            ApplyError: the database rejects a statement.
        """
        transaction = self.transaction()
        try:
            await transaction.begin()
            yield transaction
            await transaction.commit()
        finally:
            await transaction.close()

    def transaction(self) -> SqlTransaction:
        """Return a transaction that is not open yet, for callers that open and end it themselves."""
        return SqlTransaction(self._engine)

    # --- where it stands ------------------------------------------------------------------------

    async def progress(self) -> MirrorProgress | None:
        """None: there is no mirror of the slot here. Raises HooksMissing if it has hooks, and this program none."""
        async with self.begin() as transaction:
            mine = _mirrors.c.slot == self.slot
            row = (await transaction.execute(select(_mirrors).where(mine))).one_or_none()
            if row is None:
                return None
            if row.hooked and self.hooks is None:
                raise HooksMissing(
                    f'mirror "{self.slot}" has hooks, and this program has none for it',
                    hint="Run it in the program that has them, or give Hooks() to do without from now on.",
                )
            if row.hooked != self._is_hooked:
                await transaction.execute(update(_mirrors).where(mine).values(hooked=self._is_hooked))
            known = (await transaction.execute(select(_timelines).where(_timelines.c.slot == self.slot))).one_or_none()
        history = None if known is None else TimelineHistory.parse(known.timeline, known.ancestors)
        position = Lsn.parse(row.lsn) if row.lsn else NOWHERE
        return MirrorProgress(int(row.system_id), position, history, is_copied=bool(row.lsn))

    async def begin_mirror(self, system_id: int) -> MirrorProgress:
        """Store that a slot is going to be made, and the copy: both are thrown away if that does not end well."""
        row = {"slot": self.slot, "system_id": str(system_id), "hooked": self._is_hooked}
        async with self.begin() as transaction:
            await transaction.execute(insert(_mirrors).values(row))
        return MirrorProgress(system_id)

    @property
    def _is_hooked(self) -> bool:
        return self.hooks is not None and bool(self.hooks.tables or self.hooks.schemas)

    async def load(self) -> None:
        """The tables of a mirror that was copied. Raises HookError if the hooks are not for these."""
        async with self.begin() as transaction:
            rows = (await transaction.execute(select(_tables).where(_tables.c.slot == self.slot))).all()
            reflected = await transaction.run_sync(_reflect, [row.target for row in rows])
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
            if row.target not in reflected:
                raise MappingError(
                    f'table "{row.target}" of the target, which "{label}" is mirrored to, does not exist'
                )
            self.tables[name] = self._table(label, reflected[row.target], tuple(json.loads(row.key_columns)))

    def require_published(self, tables: Collection[Name]) -> None:
        """Raises HookError for a hook of any other table."""
        named = set() if self.hooks is None else set(self.hooks.tables)
        if unknown := sorted(named.difference(tables)):
            raise HookError(
                f'hooks of mirror "{self.slot}" name a table that is not part of it: "{".".join(unknown[0])}"',
                hint="Correct the name, or begin the mirror anew if the table came into the publication later.",
            )

    async def prepare(self, sources: Sequence[SourceTable], *, create: bool) -> None:
        """Find the tables for a copy, or make them. Raises MappingError for what cannot be."""
        _require_keys(sources)
        async with self.begin() as transaction:
            names = [source.target for source in sources]
            reflected = await transaction.run_sync(_reflect, names)
            missing = [source for source in sources if source.target not in reflected]
            if missing and not create:
                raise MappingError(
                    f'table "{missing[0].target}" of the target does not exist',
                    hint="Create it, or give create_tables=True.",
                )
            await transaction.run_sync(_create, missing)
            reflected = await transaction.run_sync(_reflect, names)
            for source in sources:
                table = self._table(source.label, reflected[source.target], source.key)
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
    async def copy(self, position: Lsn) -> AsyncIterator[RowBuffer]:
        """Open the transaction of the initial copy, for the rows of the block. It stores the tables and the position.

        Raises:
            TargetLost: the connection to the database is lost.
            ApplyError: the database rejects a row, or another process has copied the tables.
        """
        async with self.begin() as transaction:
            rows = RowBuffer(transaction)
            yield rows
            await rows.flush()
            tables = [
                {"slot": self.slot, "schema_name": schema, "table_name": name, "target": table.table.name}
                | {"key_columns": json.dumps(table.key)}
                for (schema, name), table in self.tables.items()
            ]
            if tables:
                await transaction.execute(insert(_tables), tables)
            await self.advance(transaction, None, position)

    async def advance(self, transaction: SqlTransaction, before: Lsn | None, position: Lsn) -> None:
        """Move the position of the mirror.

        Args:
            transaction: the transaction that writes the rows.
            before: the present position. None: there is none.
            position: the new one.

        Raises:
            ApplyError: the position is not `before`, because another process mirrors the same slot.
        """
        old = _mirrors.c.lsn.is_(None) if before is None else _mirrors.c.lsn == str(before)
        move = update(_mirrors).where(_mirrors.c.slot == self.slot, old).values(lsn=str(position))
        if (await transaction.execute(move)).rowcount != 1:
            raise ApplyError(
                f'the progress of mirror "{self.slot}" is not where it was',
                hint="Another process mirrors the same slot to this database.",
            )

    async def record_timeline(self, transaction: SqlTransaction, history: TimelineHistory | None) -> None:
        """Store the publisher's timelines that the position belongs to. None: they are not known."""
        await transaction.execute(delete(_timelines).where(_timelines.c.slot == self.slot))
        if history is not None:
            row = {"slot": self.slot, "timeline": history.timeline, "ancestors": str(history)}
            await transaction.execute(insert(_timelines).values(row))


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
