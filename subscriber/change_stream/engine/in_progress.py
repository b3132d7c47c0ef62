"""Large transactions in progress: each block handed out as it comes, for consumers that undo by themselves.

Whoever takes blocks has to be ready for STREAM_ABORT: of a transaction, of a subtransaction, and of every
transaction in progress when the connection is lost, because all of them begin again with their first block.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from subscriber.change_stream.changes import Change
from subscriber.change_stream.engine.frame_reader import LETTER
from subscriber.change_stream.transaction import Kind, Transaction
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput

if TYPE_CHECKING:
    from subscriber.change_stream.stream import Stream

_ORIGIN = 0x4F  # O


class InProgressReader:
    """All of one stream."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}  # xids in progress, in the order they began
        self._lost: deque[int] = deque()
        self._stream: Stream | None = None

    async def block(self, stream: Stream, message: pgoutput.StreamStart) -> Transaction | None:
        self._open[message.xid] = None
        self._stream = stream
        transaction = Transaction(stream, Kind.STREAM_BLOCK, message.xid, Lsn(0), 0, changes=self)
        transaction.first = message.first_segment
        while (frame := stream.frames.next(between=False)) is None:
            if await stream.refill():
                return None
        if frame[LETTER] == _ORIGIN:
            origin = stream.decoder.decode(frame, LETTER)
            assert isinstance(origin, pgoutput.Origin)
            transaction.origin = origin.name
        else:
            stream.frames.back()
        return transaction

    def at_once(self, transaction: Transaction) -> list[Change] | None:
        return None

    async def pull(self, transaction: Transaction) -> list[Change]:
        stream = self._stream
        assert stream is not None
        frames = stream.frames
        while True:
            batch: list[Change] = []
            frame = frames.fill(batch, in_block=True)
            if frame is None:
                if batch:
                    return batch
                if await stream.refill():
                    transaction.complete = True
                    return []
                continue
            if batch:
                frames.back()
                return batch
            message = stream.decoder.decode(frame, LETTER)
            match message:
                case pgoutput.StreamStop():
                    transaction.complete = True
                    return []
                case pgoutput.Relation():
                    await frames.tables.describe(message)
                case pgoutput.Truncate() | pgoutput.LogicalMessage():
                    return [frames.tables.change(message)]
                case _:
                    raise ProtocolError(f"{message.message_type} message sent inside a stream block")

    async def drop(self, transaction: Transaction) -> None:
        while not transaction.complete:
            await self.pull(transaction)

    async def abort(self, stream: Stream, message: pgoutput.StreamAbort) -> Transaction | None:
        if message.xid not in self._open:
            return None
        if message.subxid == message.xid:
            del self._open[message.xid]
        return _aborted(stream, message.xid, message.subxid, message.abort_lsn, message.abort_time)

    async def commit(self, stream: Stream, message: pgoutput.StreamCommit) -> Transaction | None:
        self._open.pop(message.xid, None)
        finish_lsn, end_lsn, time = message.commit_lsn, message.end_lsn, message.commit_time
        return stream.bare(Kind.STREAM_COMMIT, message.xid, finish_lsn, end_lsn, time)

    async def prepare(self, stream: Stream, message: pgoutput.StreamPrepare) -> Transaction | None:
        self._open.pop(message.xid, None)
        finish_lsn, end_lsn, time = message.prepare_lsn, message.end_lsn, message.prepare_time
        return stream.bare(Kind.STREAM_PREPARE, message.xid, finish_lsn, end_lsn, time, message.gid)

    async def begin_again(self) -> None:
        self._lost.extend(self._open)
        self._open.clear()

    def lost(self, stream: Stream) -> Transaction | None:
        if not self._lost:
            return None
        xid = self._lost.popleft()
        return _aborted(stream, xid, xid, None, None)


def _aborted(stream: Stream, xid: int, subxid: int, lsn: Lsn | None, time: int | None) -> Transaction:
    transaction = Transaction(stream, Kind.STREAM_ABORT, xid, lsn or Lsn(0), time or 0)
    transaction.subxid = subxid
    return transaction
