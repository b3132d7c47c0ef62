"""MirrorApply: applies the changes of the stream to a mirror, several transactions in one transaction of the target.

Rows are found and written by key. If the program has a hook for the table, the hook replaces the change or discards it
(apply/hooks/table_hook.py). A replaced change has the target's names of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream

from subscriber import telemetry
from subscriber.apply.hooks import table_hook
from subscriber.apply.hooks.table_hook import TableHook, bind
from subscriber.apply.sentinels import UNCHANGED, Missing
from subscriber.apply.table_states import NOWHERE
from subscriber.change_stream.changes import Change, Delete, Insert, Truncate, Update
from subscriber.change_stream.rows import Relation, Row
from subscriber.change_stream.stream import Stream
from subscriber.change_stream.transaction import Transaction
from subscriber.errors import ApplyError, MappingError
from subscriber.lsn import Lsn
from subscriber.protocol import messages, tuple_data
from subscriber.protocol.messages import OldPart, ReplicaIdentity
from subscriber.protocol.tuple_data import TupleData
from subscriber.publisher.timelines import check_history
from subscriber.settings import Settings
from subscriber.targets.sqlalchemy.database import MirrorDatabase
from subscriber.targets.sqlalchemy.row_buffer import RowBuffer
from subscriber.targets.sqlalchemy.table import TargetTable, Texts
from subscriber.timeline_history import TimelineHistory

Piece = tuple[list[Change], Transaction | None]  # a batch of changes; the transaction if it ends after them


BEGIN_ANEW = (
    "Empty the tables, delete the mirror's rows in subscriber_mirror, subscriber_mirror_table and"
    " subscriber_mirror_timeline, and start it again."
)


def check_timelines(history: TimelineHistory | None, known: TimelineHistory | None, position: Lsn) -> None:
    """Raise PublisherReplaced if the publisher has lost changes of the target, which is at `position`."""
    if history is not None:
        check_history(history, known, position, in_recovery=False, hint=BEGIN_ANEW)


class RefusedTogether(Exception):
    """The target has rejected transactions that were applied together.

    Those that end at or before `lsn` have to be applied separately.
    """

    def __init__(self, lsn: Lsn) -> None:
        self.lsn = lsn


@dataclass(frozen=True, slots=True)
class _Known:
    """A table as the publisher has described it. `table` is None if the mirror does not have the table."""

    relation: Relation
    table: TargetTable | None
    hook: TableHook | None


class MirrorApply:
    """Writes the changes of the stream to the tables of one mirror.

    Attributes:
        position: the position that is committed on the target.
        known: the publisher's timelines that are committed with it. None: not known.
        single_until: transactions that end at or before this position are committed separately.
    """

    def __init__(self, there: MirrorDatabase, position: Lsn, known: TimelineHistory | None, settings: Settings) -> None:
        self._there = there
        self._batch_changes = settings.mirror_batch_changes
        self._wait_turns = settings.mirror_wait_turns
        self.position = position
        self.known = known
        self.single_until = NOWHERE
        self._known: dict[int, _Known] = {}
        self._ignored: set[str] = set()

    async def together(
        self, piece: Piece, received: MemoryObjectReceiveStream[Piece], stream: Stream
    ) -> list[Transaction]:
        """Apply the transaction that starts with `piece` and those that wait after it, and commit them together.

        Args:
            piece: the first batch of a transaction.
            received: delivers the next batches.
            stream: where the batches come from.

        Returns:
            The transactions, to be acknowledged.

        Raises:
            RefusedTogether: the target rejects the transactions, and may accept them separately.
            ApplyError: the target rejects a single transaction.
            MappingError: a table has changed in a way that the mirror cannot follow.
            HookError: a hook has failed.
        PublisherReplaced: the publisher has failed over to a server without all changes of the target.

        Cancellation: nothing is committed.
        """
        ended: list[Transaction] = []
        most = self._batch_changes if self.position >= self.single_until else 0
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
                    following = await _waiting(received, self._wait_turns) if changes < most else None
                    if following is None:
                        break
                    piece = following
                # A timeline that is newer than these transactions has them, too: the stream has compared it.
                if (history := stream.history) != self.known:
                    check_timelines(history, self.known, self.position)
                    await self._there.record_timeline(writer, history)
        except ApplyError as error:
            if most and ended and ended[-1].end_lsn is not None:
                raise RefusedTogether(ended[-1].end_lsn) from error
            raise
        self.position, self.known = writer.reached, history
        return ended

    async def _change(self, writer: RowBuffer, change: Change) -> None:
        match change:
            case Truncate(relations):
                for relation in relations:
                    if (table := self._find(relation).table) is not None:
                        await writer.truncate(table)
            case Insert(relation) | Update(relation) | Delete(relation):
                known = self._find(relation)
                if known.table is None:
                    return
                if known.hook is None:
                    await _plain(writer, known.table, change)
                elif (hooked := await known.hook.change(_as_message(change))) is not None:
                    await _hooked(writer, known.table, known.hook, hooked)

    def _find(self, relation: Relation) -> _Known:
        known = self._known.get(relation.relid)
        if known is None or known.relation is not relation:
            known = self._known[relation.relid] = self._described(relation)
        return known

    def _described(self, relation: Relation) -> _Known:
        table = self._there.tables.get((relation.schema, relation.name))
        if table is None:
            self._log_ignored(relation)
            return _Known(relation, None, None)
        names, key = set(relation.by_name), set(relation.key)
        hook = None if self._there.hooks is None else bind(self._there.hooks, _as_relation(relation))
        if hook is not None:
            names = set(hook.sources)
            key = {name for name, source in hook.sources.items() if source in key}
            hook.found_by([hook.sources[name] for name in table.key if name in names])
        table.require(sorted(names))
        if not set(table.key) <= key:
            raise MappingError(
                f'the key of table "{relation}" is not the one that the mirror began with',
                detail=f"It was {', '.join(table.key)}.",
                hint="Give it that replica identity again, or begin the mirror anew.",
            )
        return _Known(relation, table, hook)

    def _log_ignored(self, relation: Relation) -> None:
        """Log once for each table that its changes are ignored."""
        if str(relation) not in self._ignored:
            self._ignored.add(str(relation))
            telemetry.log(
                telemetry.WARNING,
                f'changes of table "{relation}" are passed over: the mirror began without it',
                event="mirror.table",
                relation=str(relation),
            )


async def _waiting(received: MemoryObjectReceiveStream[Piece], turns: int) -> Piece | None:
    """Return the first batch of the next transaction if it arrives within `turns` turns of the event loop."""
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
        try:
            return received.receive_nowait()
        except anyio.WouldBlock:
            continue
        except anyio.EndOfStream:
            break
    return None


# --- rows ---------------------------------------------------------------------------------------


async def _plain(writer: RowBuffer, table: TargetTable, change: Insert | Update | Delete) -> None:
    """Write a change of a table without a hook."""
    match change:
        case Insert(_, new):
            await writer.upsert(table, _sent(new))
        case Update(relation, old, new):
            row = _sent(new)
            await _update(writer, table, row if old is None else _key(table, old), row, len(relation.columns))
        case Delete(_, old):
            await writer.delete(table, _key(table, old))


async def _hooked(writer: RowBuffer, table: TargetTable, hook: TableHook, change: table_hook.Change) -> None:
    """Write a change that a hook has returned."""
    names = [column.name for column in hook.relation.columns]
    match change:
        case messages.Insert(new=new):
            await writer.upsert(table, _texts(names, new))
        case messages.Update(old=old, new=new):
            row = _texts(names, new)
            await _update(writer, table, row if old is None else _texts(names, old), row, len(names))
        case messages.Delete(old=old):
            await writer.delete(table, _texts(names, old))


async def _update(writer: RowBuffer, table: TargetTable, key: Texts, row: Texts, columns: int) -> None:
    """Write the new values of a row.

    A row with all columns and an unchanged key replaces the target's row. Any other row needs an UPDATE of the existing
    row, because its key has changed or values are missing.
    """
    if len(row) == columns and table.key_of(row) == table.key_of(key):
        await writer.upsert(table, row)
    elif not await writer.update(table, key, row):
        raise ApplyError(
            f'a row of table "{table.table.name}" that is to be changed is not there',
            detail="Somebody else has written to the target.",
        )


def _sent(row: Row) -> Texts:
    """Return the columns of a row that were sent, NULLs included."""
    return {name: text for name, text in row.texts().items() if not isinstance(text, Missing)}


def _key(table: TargetTable, row: Row) -> Texts:
    found: dict[str, Any] = {name: row.text(name) for name in table.key}
    return found


def _texts(names: list[str], row: TupleData) -> Texts:
    """Return the columns of a hook's row that have a value or are NULL."""
    return {
        name: None if value is None else value.decode("utf-8", "surrogateescape")
        for name, status, value in zip(names, *row.split(), strict=True)
        if status != tuple_data.UNCHANGED
    }


# --- what a hook sees ---------------------------------------------------------------------------


def _as_relation(relation: Relation) -> messages.Relation:
    columns = [messages.RelationColumn(c.is_key, c.name, c.type_oid, c.type_modifier) for c in relation.columns]
    identity = relation.replica_identity
    return messages.Relation(None, relation.relid, relation.schema, relation.name, identity, tuple(columns))


def _as_message(change: Insert | Update | Delete) -> table_hook.Change:
    relid, whole = change.relation.relid, change.relation.replica_identity is ReplicaIdentity.FULL
    part = OldPart.ROW if whole else OldPart.KEY
    match change:
        case Insert(_, new):
            return messages.Insert(None, relid, _data(new))
        case Update(_, old, new) if old is not None:
            return messages.Update(None, relid, part, _data(old), _data(new))
        case Update(_, _, new):
            return messages.Update(None, relid, None, None, _data(new))
        case Delete(_, old):
            return messages.Delete(None, relid, part, _data(old))


def _data(row: Row) -> TupleData:
    values = [row.raw(name) for name in row]
    status = bytes(
        tuple_data.TEXT if isinstance(value, bytes) else tuple_data.UNCHANGED if value is UNCHANGED else tuple_data.NULL
        for value in values
    )
    return TupleData.join(status, [value if isinstance(value, bytes) else None for value in values])
