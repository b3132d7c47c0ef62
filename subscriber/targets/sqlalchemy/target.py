"""SqlTarget: applies the changes of the stream to a mirror, several transactions in one transaction of the database.

Purpose. SqlTarget writes rows and the position with them. A commit of the database takes longer than most
transactions of a publisher. So transactions share one until they have `mirror_batch_changes` changes, or until no
further change arrives.

Invariants.

- Rows are found and written by key: an inserted or changed row exists afterwards, whether it existed before or not.
- The position is committed in the same transaction as the rows, and so are the publisher's timelines.

Failure cases.

- Transaction rejected by the database after others in the same transaction: all are rolled back. `position` is then
  ahead of `progress`. The caller opens another target, which commits each of them separately (`alone_until`). So those
  before the rejected one are kept.
- Connection lost during a commit: the database has committed or not. The next target reads the position.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from subscriber import telemetry
from subscriber.apply.relation_map import map_same_columns
from subscriber.apply.table_states import NOWHERE
from subscriber.errors import ApplyError, MappingError
from subscriber.protocol.tuple_data import TupleData
from subscriber.settings import DEFAULTS, Settings
from subscriber.targets.base import (
    UNCHANGED_VALUE,
    Delete,
    Insert,
    Lsn,
    Relation,
    RelationMapping,
    RemoteTransaction,
    Target,
    Truncate,
    Update,
)
from subscriber.targets.sqlalchemy.database import MirrorDatabase, MirrorProgress
from subscriber.targets.sqlalchemy.row_buffer import RowBuffer
from subscriber.targets.sqlalchemy.table import TargetTable, Texts, flat
from subscriber.targets.sqlalchemy.transaction import SqlTransaction
from subscriber.timeline_history import TimelineHistory


@dataclass(slots=True)
class SqlMapping(RelationMapping):
    """A mapping with the table of the mirror, and the names of its columns in the publisher's order."""

    table: TargetTable = field(kw_only=True)
    names: tuple[str, ...] = field(kw_only=True)


class SqlTarget(Target):
    """One session of a mirror with its database. open() creates it, see the top of the file.

    Attributes:
        progress: the progress that is committed.
    """

    def __init__(
        self,
        there: MirrorDatabase,
        progress: MirrorProgress,
        history: TimelineHistory | None,
        alone_until: Lsn,
        on_position: Callable[[Lsn], None],
        settings: Settings,
    ) -> None:
        self.origin = there.slot
        self.progress = progress
        self._there = there
        self._tables = {table.table.name: table for table in there.tables.values()}
        self._position = progress.position
        self._history = history
        self._alone_until = alone_until
        self._on_position = on_position
        self._batch_changes = settings.mirror_batch_changes
        self._transaction: SqlTransaction | None = None
        self._rows: RowBuffer
        self._changes = 0  # in the transaction
        self._is_open = False  # a transaction of the publisher has changes, and no commit() yet
        self._on_committed: Callable[[], None]  # of the last one that was given to commit()
        self._ignored: set[str] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        there: MirrorDatabase,
        progress: MirrorProgress,
        history: TimelineHistory | None,
        *,
        alone_until: Lsn = NOWHERE,
        on_position: Callable[[Lsn], None] = lambda _: None,
        settings: Settings = DEFAULTS,
    ) -> AsyncIterator[SqlTarget]:
        """Open a session. The end of the block rolls back the transactions that are not committed.

        Args:
            there: the database, with the tables of the mirror.
            progress: the progress of the mirror.
            history: the publisher's timelines, which are stored with the next position. None: they are not known.
            alone_until: transactions that end at or before this position are committed separately.
            on_position: called with each position that is committed.
            settings: the size of a batch.
        """
        target = cls(there, progress, history, alone_until, on_position, settings)
        try:
            yield target
        finally:
            if target._transaction is not None:
                await target._transaction.close()

    @property
    def position(self) -> Lsn:
        return self._position

    @property
    def is_batch_rejected(self) -> bool:
        """True if an error has rolled back transactions that may be accepted separately, up to `position`."""
        return self._position > self.progress.position >= self._alone_until

    # --- tables ---------------------------------------------------------------------------------

    def accepts(self, published: Relation) -> bool:
        """Return False for a table that the mirror began without. Logs once that its changes are ignored."""
        if (published.schema, published.name) in self._there.tables:
            return True
        label = f"{published.schema}.{published.name}"
        if label not in self._ignored:
            self._ignored.add(label)
            telemetry.log(
                telemetry.WARNING,
                f'changes of table "{label}" are passed over: the mirror began without it',
                event="mirror.table",
                relation=label,
            )
        return False

    async def map_relation(self, remote: Relation) -> SqlMapping:
        table = self._tables[flat((remote.schema, remote.name))]
        names = tuple(column.name for column in remote.columns)
        table.require(sorted(names))
        if not {column.name for column in remote.columns if column.is_key}.issuperset(table.key):
            raise MappingError(
                f'the key of table "{table.label}" is not the one that the mirror began with',
                detail=f"It was {', '.join(table.key)}.",
                hint="Give it that replica identity again, or begin the mirror anew.",
            )
        same = map_same_columns(remote)
        return SqlMapping(
            remote=remote,
            local=replace(same.local, identity=table.key),
            attributes=same.attributes,
            search=tuple(names.index(name) for name in table.key),
            unsearchable=None,
            local_only=(),
            table=table,
            names=names,
        )

    # --- changes --------------------------------------------------------------------------------

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        assert isinstance(mapping, SqlMapping)
        table, names = mapping.table, mapping.names
        rows = self._rows if self._is_open else await self._begin(transaction)
        self._changes += 1
        if isinstance(change, Insert):
            await rows.upsert(table, _texts(names, change.new))
        elif isinstance(change, Delete):
            await rows.delete(table, _texts(names, change.old))
        else:
            row = _texts(names, change.new)
            key = row if change.old is None else _texts(names, change.old)
            # A row with all columns and an unchanged key replaces the row of the database.
            if len(row) == len(names) and table.key_of(row) == table.key_of(key):
                await rows.upsert(table, row)
            elif not await rows.update(table, key, row):
                raise ApplyError(
                    f'a row of table "{table.table.name}" that is to be changed is not there',
                    detail="Somebody else has written to the target.",
                )

    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        rows = await self._begin(transaction)
        self._changes += 1
        for mapping in mappings:
            assert isinstance(mapping, SqlMapping)
            await rows.truncate(mapping.table)

    async def _begin(self, transaction: RemoteTransaction) -> RowBuffer:
        """Begin the publisher's transaction in that of the database, which is opened if there is none."""
        transaction.is_open_on_target = self._is_open = True
        if self._transaction is None:
            self._transaction = self._there.transaction()
            await self._transaction.begin()
            self._rows = RowBuffer(self._transaction)
        return self._rows

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        self._position, self._on_committed, self._is_open = end_lsn, on_committed, False
        if self._changes >= self._batch_changes or end_lsn <= self._alone_until:
            await self.sync()

    async def on_idle(self) -> None:
        await self.sync()

    async def sync(self) -> None:
        transaction = self._transaction
        if transaction is None or self._is_open:
            return
        await self._rows.flush()
        if self._history != self.progress.history:
            await self._there.record_timeline(transaction, self._history)
        await self._there.advance(transaction, self.progress.position, self._position)
        await transaction.commit()
        self._transaction, self._changes = None, 0
        await transaction.close()
        self.progress = replace(self.progress, position=self._position, history=self._history)
        self._on_committed()
        self._on_position(self._position)


def _texts(names: tuple[str, ...], row: TupleData) -> Texts:
    """Return the columns of a row that were sent, NULLs included."""
    return {
        name: None if value is None else value.decode("utf-8", "surrogateescape")
        for name, status, value in zip(names, *row.split(), strict=True)
        if status != UNCHANGED_VALUE
    }
