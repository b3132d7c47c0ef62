"""FakePublisher: a publisher without a server, for unit tests of consumers.

    publisher = FakePublisher()
    city = publisher.table("public.city", id="integer key", name="text")
    with publisher.transaction() as transaction:
        transaction.insert(city, id=1, name="Ulm")
        transaction.update(city, id=1, name="Pau")

    async with publisher.stream() as stream:        # the same Stream as from a server
        async for transaction in stream:
            ...
    await publisher.consume(MyConsumer())           # and the same callbacks
    assert publisher.confirmed == publisher.position

FakePublisher replaces the server and the socket. Changes are encoded as messages of pgoutput. The code of the package
decodes and acknowledges them, and reconnects. `play()` sends the recorded messages of a real publisher instead.
`disconnect()` closes the connection. The next connection starts at the requested position, or at the confirmed position
if that is greater.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import anyio

from subscriber.apply.hooks.config import Hooks
from subscriber.change_stream.consumer import Consumer, drive, takes_blocks
from subscriber.change_stream.options import ChangeStreamOptions, combine_settings
from subscriber.change_stream.rows import Missing
from subscriber.change_stream.stream import Stream
from subscriber.change_stream.types.registry import TypeRow, oid_of
from subscriber.errors import ConnectionLost
from subscriber.lsn import Lsn
from subscriber.protocol import copy_data, messages
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import OldPart, ReplicaIdentity
from subscriber.protocol.tuple_data import NULL, TEXT, UNCHANGED, TupleData
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import DEFAULTS, Settings
from subscriber.targets.base import Target
from subscriber.timeline_history import TimelineHistory
from subscriber.worker.apply.custom_target import ApplyUntil, apply_stream

FIRST = Lsn(0x1000000)
TIME = 800_000_000_000_000  # the time of each message, in microseconds since 2000-01-01 00:00 UTC

_BATCH = 100  # frames of one receive()

# Descriptions that were sent: the OID of a relation, and the transaction in whose block it was. None: in no block.
Described = set[tuple[int, int | None]]

_IDENTITIES = {
    "default": ReplicaIdentity.DEFAULT,
    "nothing": ReplicaIdentity.NOTHING,
    "full": ReplicaIdentity.FULL,
    "index": ReplicaIdentity.INDEX,
}

_INSIDE = (messages.Insert, messages.Update, messages.Delete, messages.Truncate, messages.LogicalMessage)
_PER_RELATION = (messages.Insert, messages.Update, messages.Delete)


@dataclass(frozen=True, slots=True)
class FakeTable:
    """A published table. FakePublisher.table() creates it."""

    relation: messages.Relation

    def row(self, values: dict[str, Any], *, keys_only: bool = False) -> TupleData:
        """Return a row of the table.

        Args:
            values: by column. Other columns are NULL.
            keys_only: columns outside of the replica identity are NULL.

        Raises:
            ValueError: the table does not have one of the columns.
        """
        columns = self.relation.columns
        if unknown := values.keys() - {column.name for column in columns}:
            raise ValueError(f"{self.relation.name} has no column {', '.join(sorted(unknown))}")
        status, sent = bytearray(), []
        for column in columns:
            value = None if keys_only and not column.is_key else values.get(column.name)
            kind, data = _as_sent(value)
            status.append(kind)
            sent.append(data)
        return TupleData.join(bytes(status), sent)


def _as_sent(value: Any) -> tuple[int, bytes | None]:
    match value:
        case None:
            return NULL, None
        case Missing():
            return UNCHANGED, None
        case bool():
            return TEXT, b"t" if value else b"f"
        case bytes():
            return TEXT, b"\\x" + value.hex().encode()
        case _:
            return TEXT, str(value).encode()


@dataclass(frozen=True, slots=True)
class _Frame:
    lsn: Lsn
    message: bytes
    until: Lsn  # the frame is sent on connections that start before this position
    in_block: bool


@dataclass
class FakeTransaction:
    """A transaction. FakePublisher.transaction() creates it.

    Values are sent as text: bool and bytes in PostgreSQL's format, None as NULL, others as str() returns them.
    """

    publisher: FakePublisher
    xid: int
    changes: list[messages.Message] = field(default_factory=list)

    def insert(self, table: FakeTable, **values: Any) -> None:
        """Insert a row. Columns without a value are NULL."""
        self._add(messages.Insert(None, table.relation.relid, table.row(values)))

    def update(self, table: FakeTable, old: dict[str, Any] | None = None, **values: Any) -> None:
        """Update a row.

        Args:
            table: the table.
            old: the old row, which REPLICA IDENTITY FULL needs. Otherwise the old key, if the key changes. None: the
                key does not change.
            values: the new row, by column. subscriber.UNCHANGED is a large value that did not change.
        """
        part = row = None
        if old is not None:
            whole = table.relation.replica_identity is ReplicaIdentity.FULL
            part, row = OldPart.ROW if whole else OldPart.KEY, table.row(old, keys_only=not whole)
        self._add(messages.Update(None, table.relation.relid, part, row, table.row(values)))

    def delete(self, table: FakeTable, **old: Any) -> None:
        """Delete a row. `old` has the columns of its key, or all columns under REPLICA IDENTITY FULL."""
        whole = table.relation.replica_identity is ReplicaIdentity.FULL
        part = OldPart.ROW if whole else OldPart.KEY
        self._add(messages.Delete(None, table.relation.relid, part, table.row(old, keys_only=not whole)))

    def truncate(self, *tables: FakeTable, cascade: bool = False, restart_identity: bool = False) -> None:
        """Truncate the tables."""
        relids = tuple(table.relation.relid for table in tables)
        self._add(messages.Truncate(None, cascade, restart_identity, relids))

    def message(self, prefix: str, content: bytes | str) -> None:
        """Send a transactional logical message."""
        content = content.encode() if isinstance(content, str) else content
        self._add(messages.LogicalMessage(None, True, self.publisher.position, prefix, content))

    def _add(self, message: messages.Message) -> None:
        self.changes.append(message)


class FakePublisher:
    """A publisher with one slot, in memory. It is also the source of the streams that it opens.

    Attributes:
        position: the position after the last written record.
        confirmed: the confirmed flush position of the slot.
        slot: the name of the slot.
        snapshot: None: there is no exported snapshot.
        can_reconnect: True: a stream reconnects after disconnect().
        history: None: it has no timelines.
        connections: the number of connections that were started.
        statuses: the number of status updates that were received.
    """

    def __init__(self, *, settings: Settings = DEFAULTS) -> None:
        """Create a publisher. `settings` are the settings of its streams."""
        self._settings = settings
        self.position = FIRST
        self.confirmed = FIRST
        self.slot = "fake"
        self.snapshot: str | None = None
        self.can_reconnect = True
        self.history: TimelineHistory | None = None
        self.connections = 0
        self.statuses = 0
        self._frames: list[_Frame] = []
        self._relations: dict[int, messages.Relation] = {}
        self._types: dict[str, int] = {}
        self._prepared: dict[str, int] = {}
        self._xid = 700
        self._connection: _Connection | None = None
        self._decoder = Decoder()

    # --- tables and changes -----------------------------------------------------------------------

    def table(
        self, name: str, /, *, identity: Literal["default", "nothing", "full", "index"] = "default", **columns: str
    ) -> FakeTable:
        """Create a table.

        Args:
            name: with its schema, "public.city".
            identity: the replica identity. With "full" all columns are part of it.
            columns: the type of each column, with the suffix " key" if the column is part of the replica identity.
                A name that is no built-in type is a type whose values are strings.
        """
        schema, _, bare = name.rpartition(".")
        relid = 20_000 + len(self._relations)
        described = []
        for column, type_name in columns.items():
            is_key = identity == "full" or type_name.endswith(" key")
            described.append(messages.RelationColumn(is_key, column, self._oid(type_name.removesuffix(" key")), -1))
        relation = messages.Relation(None, relid, schema, bare, _IDENTITIES[identity], tuple(described))
        self._relations[relid] = relation
        return FakeTable(relation)

    def _oid(self, type_name: str) -> int:
        return oid_of(type_name) or self._types.setdefault(type_name, 100_000 + len(self._types))

    @contextmanager
    def transaction(
        self, *, origin: str | None = None, prepare: str | None = None, streamed: bool = False
    ) -> Iterator[FakeTransaction]:
        """Write a transaction, which is committed or prepared at the end of the block. An error rolls it back.

        Args:
            origin: the replication origin of the transaction. None: it was made on this publisher.
            prepare: the identifier under which the transaction is prepared. None: it is committed.
            streamed: send the changes in a block of an in-progress transaction.
        """
        self._xid += 1
        transaction = FakeTransaction(self, self._xid)
        yield transaction
        xid, finish, end = self._xid, self._advance(), self._advance()
        ends: messages.Message
        if prepare is not None:
            self._prepared[prepare] = xid
        if streamed:
            begin: messages.Message = messages.StreamStart(xid, True)
            ends = (
                messages.StreamCommit(xid, finish, end, TIME)
                if prepare is None
                else messages.StreamPrepare(finish, end, TIME, xid, prepare)
            )
        elif prepare is not None:
            begin = messages.BeginPrepare(finish, end, TIME, xid, prepare)
            ends = messages.Prepare(finish, end, TIME, xid, prepare)
        else:
            begin, ends = messages.Begin(finish, TIME, xid), messages.Commit(finish, end, TIME)
        sent = [begin]
        sent += [messages.Origin(Lsn(0) if streamed else finish, origin)] if origin is not None else []
        sent += [_of(change, xid) if streamed else change for change in transaction.changes]
        sent += [messages.StreamStop()] if streamed else []
        self._write([(finish, message) for message in sent] + [(end, ends)], end)

    def commit_prepared(self, gid: str) -> None:
        """Commit the transaction that was prepared as `gid`."""
        finish, end = self._advance(), self._advance()
        self._write([(end, messages.CommitPrepared(finish, end, TIME, self._prepared.pop(gid), gid))], end)

    def rollback_prepared(self, gid: str) -> None:
        """Roll back the transaction that was prepared as `gid`."""
        end = self._advance()
        self._write([(end, messages.RollbackPrepared(end, end, TIME, TIME, self._prepared.pop(gid), gid))], end)

    def message(self, prefix: str, content: bytes | str) -> None:
        """Send a logical message that is not transactional."""
        lsn = self._advance()
        content = content.encode() if isinstance(content, str) else content
        self._write([(lsn, messages.LogicalMessage(None, False, lsn, prefix, content))], lsn)

    def play(self, recorded: Iterable[tuple[Lsn, bytes]], *, parallel: bool = False) -> None:
        """Send the recorded messages of a real publisher.

        Args:
            recorded: pgoutput messages with their positions, as pg_logical_slot_peek_binary_changes() returns them.
            parallel: the messages were recorded with streaming = parallel.
        """
        decoder = Decoder(parallel=parallel)
        known = [(lsn, data, decoder.in_block, decoder.decode(data)) for lsn, data in recorded]
        until = last = max([self.position, *(_end(message) for *_, message in known)])
        frames = []
        for lsn, data, in_block, message in reversed(known):
            # The end of a streamed transaction may follow much later. Sending a block too often does no harm.
            until = _end(message) or (last if in_block or _is_of_stream(message) else until)
            frames.append(_Frame(lsn, data, until, in_block))
        self._frames += reversed(frames)
        self.position = last
        self._notify()

    def disconnect(self) -> None:
        """Close the connection. A stream reconnects."""
        if self._connection is not None:
            self._connection.lose()

    def ask(self) -> None:
        """Send a keepalive that requests a reply, as a publisher does after a time without a status update."""
        if self._connection is not None:
            self._connection.ask()

    def advance(self) -> Lsn:
        """Advance the position without a change, as unpublished writes do. Returns the new position."""
        return self._advance()

    def _advance(self) -> Lsn:
        self.position = Lsn(self.position + 0x30)
        return self.position

    def _write(self, sent: list[tuple[Lsn, messages.Message]], until: Lsn) -> None:
        in_block = False
        for lsn, message in sent:
            self._frames.append(_Frame(lsn, encode(message), until, in_block))
            in_block = isinstance(message, messages.StreamStart) or (
                in_block and not isinstance(message, messages.StreamStop)
            )
        self._notify()

    def _notify(self) -> None:
        if self._connection is not None:
            self._connection.wake()

    # --- consumers --------------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(
        self,
        *,
        until: Lsn | None = None,
        follow: bool = False,
        start: Lsn = Lsn(0),
        in_progress: Literal["spool", "blocks"] = "spool",
        memory: int | None = None,
        parallel: bool = False,
    ) -> AsyncIterator[Stream]:
        """Open a stream, as subscriber.stream() does.

        Args:
            until: end the iteration after the transactions before this position. None: the current position, so that
                the stream delivers the transactions that have been written.
            follow: without `until`, do not end the iteration.
            start: as in subscriber.stream().
            in_progress: as in subscriber.stream().
            memory: as in subscriber.stream(), in bytes.
            parallel: decode streamed transactions as with streaming="parallel".
        """
        options = ChangeStreamOptions(
            start=start,
            until=until or (None if follow else self.position),
            streaming="parallel" if parallel else "on",
            in_progress=in_progress,
            spool_folder=_spool_folder(),
            settings=combine_settings(self._settings, memory, None),
        )
        async with Stream(self, options) as stream:
            yield stream

    async def consume(self, consumer: Consumer, *, until: Lsn | None = None, parallel: bool = False) -> None:
        """Call the callbacks of a consumer, as subscriber.consume() does, for the transactions before `until`.

        Args:
            consumer: the consumer.
            until: None: the current position.
            parallel: decode streamed transactions as with streaming="parallel".
        """
        options = ChangeStreamOptions(
            until=until or self.position,
            streaming="parallel" if parallel else "on",
            in_progress="blocks" if takes_blocks(consumer) else "spool",
            hold=consumer.filter_prepare,
            spool_folder=_spool_folder(),
            settings=self._settings,
        )
        async with Stream(self, options) as stream:
            await drive(consumer, stream)

    async def apply(self, target: Target, *, hooks: Hooks | None = None) -> None:
        """Apply the transactions that have been written to a target, as subscriber.apply_to() does."""
        connection, _ = await self.start(target.position)
        connection.ask()  # the keepalive after the last transaction ends the loop
        stream, rules = cast(ReplicationStream, connection), ApplyUntil(self.position, hooks)
        await apply_stream(stream, target, rules, _spool_folder(), self._settings)

    # --- the protocol Source of change_stream/engine/connection.py --------------------------------

    async def start(self, position: Lsn) -> tuple[_Connection, float]:
        """Return a connection that sends from `position`, and 0, because there is no wal_sender_timeout."""
        self.connections += 1
        self._connection = _Connection(self, max(position, self.confirmed))
        return self._connection, 0.0

    async def types(self, oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
        """Return the types that are not built in. Their values are strings."""
        names = {oid: name for name, oid in self._types.items()}
        return [TypeRow(oid, names[oid], "b", 0, ",", ()) for oid in oids if oid in names]

    def request_text(self) -> None:
        """Do nothing: values are sent in the format of the stream."""

    def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def frames(self, number: int, start: Lsn, described: Described) -> tuple[list[bytes], int]:
        """Return the next frames for a connection.

        Args:
            number: the number of frames that the connection has received or skipped.
            start: transactions that end at or before this position are skipped.
            described: the relations that were described on this connection. The method adds to it.

        Returns:
            The frames, which include descriptions of relations, and the new `number`.
        """
        frames: list[bytes] = []
        while number < len(self._frames) and len(frames) < _BATCH:
            frame = self._frames[number]
            number += 1
            message = self._decode(frame)
            if isinstance(message, messages.Relation):
                self._relations[message.relid] = message
            if frame.until <= start:
                continue
            # A publisher describes a table again in each transaction that it streams.
            xid = getattr(message, "xid", None)
            if isinstance(message, messages.Relation):
                described.add((message.relid, xid))
            for relid in _relids(message):
                if (relid, xid) not in described:
                    described.add((relid, xid))
                    frames.append(_envelope(Lsn(0), encode(replace(self._relations[relid], xid=xid))))
            frames.append(_envelope(frame.lsn, frame.message))
        return frames, number

    def _decode(self, frame: _Frame) -> messages.Message | None:
        if frame.message[:1] not in (b"R", b"I", b"U", b"D", b"T"):
            return None
        return Decoder(in_block=frame.in_block).decode(frame.message)


class _Connection:
    """A started stream, with the methods of protocol Connection in change_stream/engine/connection.py."""

    def __init__(self, publisher: FakePublisher, start: Lsn) -> None:
        self._publisher = publisher
        self._start = start
        self._sent = 0  # frames
        self._described: Described = set()
        self._asked = False
        self._asks = False
        self._lost = False
        self._news = anyio.Event()

    def wake(self) -> None:
        self._news.set()

    def ask(self) -> None:
        self._asks = True
        self.wake()

    def lose(self) -> None:
        self._lost = True
        self.wake()

    async def receive(self) -> list[bytes]:
        while True:
            if self._lost:
                raise ConnectionLost("server closed the connection unexpectedly")
            frames, self._sent = self._publisher.frames(self._sent, self._start, self._described)
            if frames:
                return frames
            if self._asked or self._asks:
                keepalive = copy_data.Keepalive(self._publisher.position, TIME, self._asks)
                self._asked = self._asks = False
                return [copy_data.encode(keepalive)]
            self._news = anyio.Event()
            await self._news.wait()

    def send_status(
        self, write: Lsn, flush: Lsn, apply: Lsn, *, reply_requested: bool = False, now: int | None = None
    ) -> None:
        if self._lost:
            raise ConnectionLost("server closed the connection unexpectedly")
        self._publisher.statuses += 1
        self._publisher.confirmed = max(self._publisher.confirmed, flush)
        if reply_requested:
            self._asked = True
            self.wake()

    async def stop(self, *, timeout: float = 0.0) -> bool:
        self.lose()
        return True


def _spool_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"subscriber-testing-{uuid.uuid4().hex[:12]}"


def _envelope(lsn: Lsn, message: bytes) -> bytes:
    return copy_data.encode(copy_data.XLogData(lsn, lsn, TIME, message))


def _of(change: messages.Message, xid: int) -> messages.Message:
    assert isinstance(change, _INSIDE)
    return replace(change, xid=xid)


def _relids(message: messages.Message | None) -> tuple[int, ...]:
    if isinstance(message, messages.Truncate):
        return message.relids
    return (message.relid,) if isinstance(message, _PER_RELATION) else ()


def _end(message: messages.Message) -> Lsn:
    """Return the position after the transaction that a message ends. 0: it does not end a transaction."""
    match message:
        case messages.RollbackPrepared():
            return message.rollback_end_lsn
        case messages.BeginPrepare():
            return Lsn(0)
        case messages.LogicalMessage(_, False, lsn, _, _):
            return lsn
    return getattr(message, "end_lsn", Lsn(0))


def _is_of_stream(message: messages.Message) -> bool:
    return isinstance(message, messages.StreamStart | messages.StreamStop | messages.StreamAbort)
