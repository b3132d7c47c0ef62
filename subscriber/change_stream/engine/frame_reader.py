"""From frames to changes: where a stream stands in what has arrived, and which tables it knows.

The hot loop of a consumer is that of changes.row_changes(), which fill() calls.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import anyio
import anyio.lowlevel

from subscriber import telemetry
from subscriber.change_stream.changes import KINDS, LETTER, Change, Message, Truncate, row_changes, take_changes
from subscriber.change_stream.engine.acknowledgements import AcknowledgementTracker
from subscriber.change_stream.engine.connection import (
    ReconnectingStream,
    Source,
    is_transient,
)
from subscriber.change_stream.rows import Relation
from subscriber.change_stream.types.registry import TypeRow, Types
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol import messages
from subscriber.protocol.copy_data import KEEPALIVE, XLOG_DATA, Keepalive, decode_from_publisher
from subscriber.protocol.decode import Decoder
from subscriber.settings import Settings

_B, _C, _TYPE = b"BCY"

# Of whole frames: that it is one with a message, the letter, and what BEGIN and COMMIT have.
_begin = struct.Struct(">B24xBQqI").unpack
_COMMIT = struct.Struct(">B24xBBQQ8x")


class RelationCache:
    """The tables of one publisher, as last described."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self._settings = settings
        self.known: dict[int, Relation] = {}
        self._types = Types()
        self._source = source

    async def describe(self, described: messages.Relation) -> None:
        """Take a description in; asks the publisher's catalog about types that are not known."""
        oids = {column.type_oid for column in described.columns}
        if described.relid in self.known:
            self._types.invalidate(oids)
        if unknown := self._types.unknown(oids):
            self._types.add(await self._look_up(unknown))
            self._types.mark_unresolvable(unknown)
        self.known[described.relid] = Relation(described, self._types)

    async def _look_up(self, oids: set[int]) -> list[TypeRow]:
        """Ask the catalog, for as long as the publisher cannot be reached."""
        wait = self._settings.first_retry_delay
        while True:
            try:
                return await self._source.types(oids, self._types.known)
            except SubscriberError as error:
                if not self._source.can_reconnect or not is_transient(error):
                    raise
                telemetry.log_error(error, telemetry.WARNING, event="stream.types")
            await anyio.sleep(wait)
            wait = min(self._settings.retry_interval, wait * 2)

    async def describe_all(self, described: Iterable[bytes]) -> None:
        """Take in Relation messages as they are read from outside of a block."""
        for data in described:
            message = Decoder().decode(data)
            assert isinstance(message, messages.Relation)
            await self.describe(message)

    def relation(self, relid: int) -> Relation:
        try:
            return self.known[relid]
        except KeyError:
            raise ProtocolError(f"no relation with OID {relid} has been described") from None

    def change(self, message: messages.Message) -> Change:
        """The rare changes."""
        match message:
            case messages.Truncate(xid, cascade, restart_identity, relids):
                relations = tuple([self.relation(relid) for relid in relids])
                return Truncate(relations, cascade=cascade, restart_identity=restart_identity, subxid=xid)
            case messages.LogicalMessage(xid, transactional, lsn, prefix, content):
                return Message(prefix, content, lsn=lsn, transactional=transactional, subxid=xid)
            case _:
                raise ProtocolError(f"{message.message_type} message sent out of order")

    async def read(self, kept: list[bytes], batch: list[Change]) -> None:
        """Add the changes in messages that were kept without their envelopes, and without the xid of a block."""
        at = 0
        while (at := row_changes(kept, at, self.known, batch, 0, in_block=False)) < len(kept):
            message = Decoder().decode(kept[at])
            at += 1
            if isinstance(message, messages.Relation):
                await self.describe(message)
            elif not isinstance(message, messages.Type):
                batch.append(self.change(message))


class FrameReader:
    """The frames that have been taken from the link, up to where they have been dealt with."""

    def __init__(self, link: ReconnectingStream, acks: AcknowledgementTracker, tables: RelationCache) -> None:
        self.tables = tables
        self._epoch = link.epoch
        self._link = link
        self._acks = acks
        self._chunk: list[bytes] = []
        self._at = 0

    async def refill(self) -> bool:
        """Take more frames, perhaps none; whether they are from another connection than those before."""
        self._chunk = await self._link.receive()
        self._at = 0
        renewed = self._epoch != self._link.epoch
        self._epoch = self._link.epoch
        return renewed

    async def more(self) -> bool:
        """refill() in the plain case. False, and nothing has happened: it is not, or some are still to be dealt with.

        Whoever is cancelled in it may ask again, and comes forward even if that is so every time.
        """
        link = self._link
        if self._at < len(self._chunk) or self._epoch != link.epoch:
            return False
        waited = await link.wait()
        if self._epoch != link.epoch or not (chunk := link.receive_nowait()):
            return False
        self._chunk, self._at = chunk, 0
        if not waited:
            await anyio.lowlevel.checkpoint()  # it may be that nothing ever has to be waited for
        return True

    def _rest(self) -> list[bytes]:
        """The frames that are left, none of them when they are of a connection that is lost."""
        if self._epoch != self._link.epoch:
            self._chunk, self._at = [], 0
        return self._chunk

    def next(self, *, between: bool) -> bytes | None:
        """The next frame with a message, None when more have to be taken.

        `between` transactions the position of a keepalive is one up to which everything has been handed out.
        """
        chunk = self._rest()
        while self._at < len(chunk):
            frame = chunk[self._at]
            self._at += 1
            if len(frame) > LETTER and frame[0] == XLOG_DATA:
                self._link.between = False
                return frame
            self._other(frame, between=between)
        self._link.between = between
        return None

    def begin(self, batch: list[Change]) -> tuple[int, int, int, Lsn | None] | None:
        """The beginning of an ordinary transaction, with changes of it added to `batch`.

        Where and when it was committed, its xid, and where it ends if that is here, too. None, and nothing has
        happened but that keepalives are dealt with, for all that is not plainly that; whoever decodes it tells.
        """
        chunk, at = self._rest(), self._at
        try:
            while chunk[at][0] == KEEPALIVE:
                self._at = at + 1
                self._other(chunk[at], between=True)
                at += 1
            start, letter, finish, time, xid = _begin(chunk[at])
        except (IndexError, struct.error):
            self._link.between = at == len(chunk)
            return None
        if start != XLOG_DATA or letter != _B or not finish or not xid:
            return None
        first = at + 1
        try:
            at = take_changes(chunk, first, self.tables.known, batch, LETTER, False, KINDS)
        except ProtocolError:  # whoever asks for more hears of it
            at = first + len(batch)
        if at == first:
            return None
        end: Lsn | None = None
        if at < len(chunk) and len(chunk[at]) == _COMMIT.size:
            start, letter, flags, commit, position = _COMMIT.unpack(chunk[at])
            if start == XLOG_DATA and letter == _C and not flags and commit == finish:
                at += 1
                end = Lsn(position)
        self._at = at
        self._link.between = end is not None and at == len(chunk)
        return finish, time, xid, end

    def back(self) -> None:
        """Let the last frame come again."""
        self._at -= 1

    def ended(self) -> None:
        """A transaction has ended."""
        self._link.between = self._at == len(self._chunk)

    def fill(self, batch: list[Change], *, in_block: bool = False) -> bytes | None:
        """Turn frames into changes; the first frame that is none, or None when more have to be taken."""
        chunk, at = self._rest(), self._at
        while (at := row_changes(chunk, at, self.tables.known, batch, LETTER, in_block=in_block)) < len(chunk):
            frame = chunk[at]
            at += 1
            if len(frame) <= LETTER or frame[0] != XLOG_DATA:
                self._other(frame, between=False)
            elif frame[LETTER] != _TYPE:  # of which the catalog tells more
                self._at = at
                return frame
        self._at = at
        return None

    def _other(self, frame: bytes, *, between: bool) -> None:
        message = decode_from_publisher(frame)  # ignores what it does not know, raises for what is damaged
        if between and isinstance(message, Keepalive):
            self._acks.note(message.end)
