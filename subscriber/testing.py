"""For unit tests of consumers: a publisher without a server.

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

Everything behind the socket is the real thing: what is written becomes pgoutput's bytes, and goes through the same
decoding, acknowledging, waiting and reconnecting. `play()` takes the bytes a real publisher sent instead.
disconnect() loses the connection, and what is not confirmed, or before the position asked for, is sent again.
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
from subscriber.worker.apply.custom_target import ApplyUntil
from subscriber.worker.apply.loop import ApplyLoop

FIRST = Lsn(0x1000000)
TIME = 800_000_000_000_000  # microseconds since 2000-01-01 UTC: of everything that happens here

_BATCH = 100  # frames that arrive at once

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
    """Made by FakePublisher.table()."""

    relation: messages.Relation

    def row(self, values: dict[str, Any], *, keys_only: bool = False) -> TupleData:
        """The columns in their order; those that `values` has not are NULL."""
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
    until: Lsn  # sent to those who ask for everything from this position on, or from one before it
    in_block: bool


@dataclass
class FakeTransaction:
    """What a transaction does; made by FakePublisher.transaction(). Values are what str() of them is as text."""

    publisher: FakePublisher
    xid: int
    changes: list[messages.Message] = field(default_factory=list)

    def insert(self, table: FakeTable, **values: Any) -> None:
        """A new row. Columns that are not named are NULL."""
        self._add(messages.Insert(None, table.relation.relid, table.row(values)))

    def update(self, table: FakeTable, old: dict[str, Any] | None = None, **values: Any) -> None:
        """A row as it is afterwards; subscriber.UNCHANGED for a large value that was not touched.

        `old` is what it was, and needed under REPLICA IDENTITY FULL; without FULL it means that the key changed.
        """
        part = row = None
        if old is not None:
            whole = table.relation.replica_identity is ReplicaIdentity.FULL
            part, row = OldPart.ROW if whole else OldPart.KEY, table.row(old, keys_only=not whole)
        self._add(messages.Update(None, table.relation.relid, part, row, table.row(values)))

    def delete(self, table: FakeTable, **old: Any) -> None:
        """A row that is gone: its key, or all of it under REPLICA IDENTITY FULL."""
        whole = table.relation.replica_identity is ReplicaIdentity.FULL
        part = OldPart.ROW if whole else OldPart.KEY
        self._add(messages.Delete(None, table.relation.relid, part, table.row(old, keys_only=not whole)))

    def truncate(self, *tables: FakeTable, cascade: bool = False, restart_identity: bool = False) -> None:
        """Truncate the tables."""
        relids = tuple(table.relation.relid for table in tables)
        self._add(messages.Truncate(None, cascade, restart_identity, relids))

    def message(self, prefix: str, content: bytes | str) -> None:
        """A logical message that belongs to the transaction."""
        content = content.encode() if isinstance(content, str) else content
        self._add(messages.LogicalMessage(None, True, self.publisher.position, prefix, content))

    def _add(self, message: messages.Message) -> None:
        self.changes.append(message)


class FakePublisher:
    """See the top of the file. `position` is behind the last thing written, `confirmed` what may be forgotten."""

    def __init__(self, *, settings: Settings = DEFAULTS) -> None:
        """`settings` are those of its streams."""
        self._settings = settings
        self.position = FIRST
        self.confirmed = FIRST
        self.slot = "fake"
        self.snapshot: str | None = None
        self.can_reconnect = True
        self.connections = 0  # so far
        self.statuses = 0  # that came
        self._frames: list[_Frame] = []
        self._relations: dict[int, messages.Relation] = {}
        self._types: dict[str, int] = {}
        self._prepared: dict[str, int] = {}
        self._xid = 700
        self._connection: _Connection | None = None
        self._decoder = Decoder()

    # --- what is written --------------------------------------------------------------------------

    def table(
        self, name: str, /, *, identity: Literal["default", "nothing", "full", "index"] = "default", **columns: str
    ) -> FakeTable:
        """A table: `name` with its schema; for each column its type, and ` key` behind it in the replica identity.

        Types of a server that are not built in have any name; their values are strings.
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
        """What is done in the block is committed at its end, or prepared under the identifier `prepare`.

        `streamed` sends it in a block while it is in progress. An error in the block rolls it back.
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
        """COMMIT PREPARED of a transaction that was prepared."""
        finish, end = self._advance(), self._advance()
        self._write([(end, messages.CommitPrepared(finish, end, TIME, self._prepared.pop(gid), gid))], end)

    def rollback_prepared(self, gid: str) -> None:
        """ROLLBACK PREPARED of a transaction that was prepared."""
        end = self._advance()
        self._write([(end, messages.RollbackPrepared(end, end, TIME, TIME, self._prepared.pop(gid), gid))], end)

    def message(self, prefix: str, content: bytes | str) -> None:
        """A logical message that belongs to no transaction."""
        lsn = self._advance()
        content = content.encode() if isinstance(content, str) else content
        self._write([(lsn, messages.LogicalMessage(None, False, lsn, prefix, content))], lsn)

    def play(self, recorded: Iterable[tuple[Lsn, bytes]], *, parallel: bool = False) -> None:
        """What a publisher sent: pgoutput messages with their positions.

        pg_logical_slot_peek_binary_changes() gives them. `parallel` if streaming was that.
        """
        decoder = Decoder(parallel=parallel)
        known = [(lsn, data, decoder.in_block, decoder.decode(data)) for lsn, data in recorded]
        until = last = max([self.position, *(_end(message) for *_, message in known)])
        frames = []
        for lsn, data, in_block, message in reversed(known):
            # Blocks belong to a transaction that ends later, perhaps much later; to send them too often does no harm.
            until = _end(message) or (last if in_block or _is_of_stream(message) else until)
            frames.append(_Frame(lsn, data, until, in_block))
        self._frames += reversed(frames)
        self.position = last
        self._tell()

    def disconnect(self) -> None:
        """The connection is lost; a stream connects again."""
        if self._connection is not None:
            self._connection.lose()

    def ask(self) -> None:
        """Have the publisher ask for an answer, as it does when it has not heard anything for a while."""
        if self._connection is not None:
            self._connection.ask()

    def advance(self) -> Lsn:
        """Something is written that is not published: only the position moves."""
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
        self._tell()

    def _tell(self) -> None:
        if self._connection is not None:
            self._connection.wake()

    # --- who reads it -----------------------------------------------------------------------------

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
        """Like subscriber.stream(). It ends when what is written by now was handed out, unless it is to `follow`."""
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
        """Like subscriber.consume(), of what is written by now."""
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

    async def apply(self, target: Target) -> None:
        """Like subscriber.apply_to(), of what is written by now."""
        connection, _ = await self.start(target.position)
        connection.ask()  # the answer says that there is nothing more
        stream, hooks = cast(ReplicationStream, connection), ApplyUntil(self.position)
        await ApplyLoop(stream, target, target.position, hooks=hooks).run()
        connection.send_status(target.position, target.position, target.position)

    # --- what a Source is -------------------------------------------------------------------------

    async def start(self, position: Lsn) -> tuple[_Connection, float]:
        """Return a connection that sends from `position`, and a wal_sender_timeout of 0: none."""
        self.connections += 1
        self._connection = _Connection(self, max(position, self.confirmed))
        return self._connection, 0.0

    async def types(self, oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
        """Names of those that are not built in; they are strings."""
        names = {oid: name for name, oid in self._types.items()}
        return [TypeRow(oid, names[oid], "b", 0, ",", ()) for oid in oids if oid in names]

    def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def frames(self, number: int, start: Lsn, described: set[int]) -> tuple[list[bytes], int]:
        """The next frames for a connection that has got `number` of them, and how many that makes then."""
        found: list[bytes] = []
        while number < len(self._frames) and len(found) < _BATCH:
            frame = self._frames[number]
            number += 1
            message = self._decode(frame)
            if isinstance(message, messages.Relation):
                self._relations[message.relid] = message
            if frame.until <= start:
                continue
            if isinstance(message, messages.Relation):
                described.add(message.relid)
            for relid in _relids(message):
                if relid not in described:
                    described.add(relid)
                    xid = getattr(message, "xid", None)
                    found.append(_envelope(Lsn(0), encode(replace(self._relations[relid], xid=xid))))
            found.append(_envelope(frame.lsn, frame.message))
        return found, number

    def _decode(self, frame: _Frame) -> messages.Message | None:
        if frame.message[:1] not in (b"R", b"I", b"U", b"D", b"T"):
            return None
        return Decoder(in_block=frame.in_block).decode(frame.message)


class _Connection:
    """What a started stream is to those who use it."""

    def __init__(self, publisher: FakePublisher, start: Lsn) -> None:
        self._publisher = publisher
        self._start = start
        self._sent = 0  # frames
        self._described: set[int] = set()
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
    """The position behind what the message ends; 0 if it ends nothing."""
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
