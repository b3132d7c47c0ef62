"""FrameReader turns received frames into changes, and RelationCache holds the described tables.

The hot loop of a consumer is in row_changes() of change_stream/changes.py, which fill() calls.
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
from subscriber.protocol.relation_sizes import RelationSizes
from subscriber.settings import Settings

_B, _C, _TYPE = b"BCY"

# Layout of whole frames: the letter of XLogData, the letter of the message, and the fields of BEGIN and COMMIT.
_begin = struct.Struct(">B24xBQqI").unpack
_COMMIT = struct.Struct(">B24xBBQQ8x")


class RelationCache:
    """The last description of each table of one publisher.

    Attributes:
        known: the tables, by OID.
    """

    def __init__(self, source: Source, settings: Settings) -> None:
        self._settings = settings
        self._sizes = RelationSizes(settings.relation_cache_size)
        self.known: dict[int, Relation] = {}
        self._types = Types()
        self._source = source

    async def describe(self, described: messages.Relation) -> None:
        """Store the description of a table. Reads unknown types from the publisher's catalog.

        Raises:
            SubscriberError: the catalog cannot be read, for a reason that is not transient.
            ProtocolError: the descriptions exceed `relation_cache_size`.
        """
        self._sizes.add(described)
        oids = {column.type_oid for column in described.columns}
        if described.relid in self.known:
            self._types.invalidate(oids)
        if unknown := self._types.unknown(oids):
            self._types.add(await self._look_up(unknown))
            self._types.mark_unresolvable(unknown)
        self.known[described.relid] = Relation(described, self._types)

    async def _look_up(self, oids: set[int]) -> list[TypeRow]:
        """Read types from the publisher's catalog. Retries while the publisher cannot be reached."""
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
        """Store the descriptions in encoded Relation messages, which have no xid of a block."""
        for data in described:
            message = Decoder().decode(data)
            assert isinstance(message, messages.Relation)
            await self.describe(message)

    def relation(self, relid: int) -> Relation:
        """Return the table with that OID.

        Raises:
            ProtocolError: the publisher has not described it.
        """
        try:
            return self.known[relid]
        except KeyError:
            raise ProtocolError(f"no relation with OID {relid} has been described") from None

    def change(self, message: messages.Message) -> Change:
        """Convert a TRUNCATE or a logical message.

        Raises:
            ProtocolError: the message is another one, or names a table that has not been described.
        """
        match message:
            case messages.Truncate(xid, cascade, restart_identity, relids):
                relations = tuple([self.relation(relid) for relid in relids])
                return Truncate(relations, cascade=cascade, restart_identity=restart_identity, subxid=xid)
            case messages.LogicalMessage(xid, transactional, lsn, prefix, content):
                return Message(prefix, content, lsn=lsn, transactional=transactional, subxid=xid)
            case _:
                raise ProtocolError(f"{message.message_type} message sent out of order")

    async def read(self, kept: list[bytes], batch: list[Change]) -> None:
        """Append to `batch` the changes in stored messages, which have neither header nor xid of a block."""
        at = 0
        while (at := row_changes(kept, at, self.known, batch, 0, in_block=False)) < len(kept):
            message = Decoder().decode(kept[at])
            at += 1
            if isinstance(message, messages.Relation):
                await self.describe(message)
            elif not isinstance(message, messages.Type):
                batch.append(self.change(message))


class FrameReader:
    """The frames that were taken from a ReconnectingStream, and the index of the next one to process."""

    def __init__(self, link: ReconnectingStream, acks: AcknowledgementTracker, tables: RelationCache) -> None:
        self.tables = tables
        self._epoch = link.epoch
        self._link = link
        self._acks = acks
        self._chunk: list[bytes] = []
        self._at = 0

    async def refill(self) -> bool:
        """Take more frames, or none after ReconnectingStream.wake().

        Returns:
            True if they are from another connection than the frames before.
        """
        self._chunk = await self._link.receive()
        self._at = 0
        renewed = self._epoch != self._link.epoch
        self._epoch = self._link.epoch
        return renewed

    async def more(self) -> bool:
        """Take more frames in the ordinary case: all frames are processed, and the connection is still the same.

        Returns:
            False, without any effect, in other cases. The caller needs refill() then.

        Cancellation: safe. A caller that is canceled in every call still makes progress.
        """
        link = self._link
        if self._at < len(self._chunk) or self._epoch != link.epoch:
            return False
        waited = await link.wait()
        if self._epoch != link.epoch or not (chunk := link.receive_nowait()):
            return False
        self._chunk, self._at = chunk, 0
        if not waited:
            # With a fast publisher wait() never waits, and other tasks would not run.
            await anyio.lowlevel.checkpoint()
        return True

    def _rest(self) -> list[bytes]:
        """Return the current frames, after discarding those of a lost connection."""
        if self._epoch != self._link.epoch:
            self._chunk, self._at = [], 0
        return self._chunk

    def next(self, *, between: bool) -> bytes | None:
        """Return the next frame that has a message. None: the caller has to refill().

        Args:
            between: no transaction is open. Everything before the position of a keepalive has been delivered then.
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
        """Read the start of an ordinary transaction: BEGIN, at least one row change, and COMMIT if it has arrived.

        Args:
            batch: the list to which the changes are appended.

        Returns:
            The position and the time of the commit record, the xid, and the end position if COMMIT has arrived. None if
            the frames start with anything else. Only keepalives are processed then, and the caller decodes the rest.
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
        except ProtocolError:  # fill() reads the damaged change again and raises the error
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
        """Step back, so that the last frame is returned again."""
        self._at -= 1

    def ended(self) -> None:
        """Record the end of a transaction, after its last frame was returned."""
        self._link.between = self._at == len(self._chunk)

    def fill(self, batch: list[Change], *, in_block: bool = False) -> bytes | None:
        """Append the row changes in the frames to `batch`.

        Args:
            batch: the list to append to.
            in_block: the messages have the xid of a streamed block.

        Returns:
            The first frame with another message, except Type. None: the caller has to refill().

        Raises:
            ProtocolError: a frame is damaged.
        """
        chunk, at = self._rest(), self._at
        while (at := row_changes(chunk, at, self.tables.known, batch, LETTER, in_block=in_block)) < len(chunk):
            frame = chunk[at]
            at += 1
            if len(frame) <= LETTER or frame[0] != XLOG_DATA:
                self._other(frame, between=False)
            elif frame[LETTER] != _TYPE:  # types are read from the catalog, which has more facts
                self._at = at
                return frame
        self._at = at
        return None

    def _other(self, frame: bytes, *, between: bool) -> None:
        message = decode_from_publisher(frame)  # None for an unknown frame; raises ProtocolError for a damaged one
        if between and isinstance(message, Keepalive):
            self._acks.note(message.end)
