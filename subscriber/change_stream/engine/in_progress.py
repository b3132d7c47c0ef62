"""Large in-progress transactions: each block is delivered on arrival, for consumers that can undo changes.

A consumer of blocks has to handle STREAM_ABORT of a transaction and of a subtransaction. After a lost connection it
receives STREAM_ABORT for each in-progress transaction, because the publisher sends these again from their first block.
"""

from __future__ import annotations

from collections import deque

from subscriber.change_stream.changes import LETTER, Change
from subscriber.change_stream.engine.core import StreamCore, TransactionCore
from subscriber.change_stream.kind import Kind
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput
from subscriber.protocol.stream_state import StreamState, next_state, out_of_order

_ORIGIN = 0x4F  # O


class InProgressReader:
    """Reads the blocks of one stream."""

    def __init__(self, core: StreamCore) -> None:
        self._core = core
        self._open: dict[int, None] = {}  # xids of in-progress transactions, in the order of their first blocks
        self._lost: deque[int] = deque()  # xids that get a STREAM_ABORT after a reconnect
        core.reconnected.append(self.discard_unfinished)

    async def block(self, message: pgoutput.StreamStart) -> TransactionCore | None:
        """Return the block as a transaction. None: the connection was lost, and the publisher sends the block again."""
        self._open[message.xid] = None
        core = self._core
        state = TransactionCore(core, Kind.STREAM_BLOCK, message.xid, 0, 0, self, first=message.first_segment)
        while (frame := core.frames.next(between=False)) is None:
            if await core.refill():
                return None
        if frame[LETTER] == _ORIGIN:
            origin = core.decoder.decode(frame, LETTER)
            assert isinstance(origin, pgoutput.Origin)
            next_state(StreamState.FIRST_BLOCK if message.first_segment else StreamState.BLOCK, origin, message.xid)
            state.origin = origin.name
        else:
            core.frames.back()
        return state

    def ready(self, state: TransactionCore) -> list[Change] | None:
        return None

    async def read(self, state: TransactionCore) -> list[Change]:
        core = self._core
        frames = core.frames
        while True:
            batch: list[Change] = []
            frame = frames.fill(batch, in_block=True)
            if frame is None:
                if batch:
                    return batch
                if await core.refill():
                    state.complete = True
                    return []
                continue
            if batch:
                frames.back()
                return batch
            message = core.decoder.decode(frame, LETTER)
            match message:
                case pgoutput.StreamStop():
                    state.complete = True
                    return []
                case pgoutput.Relation():
                    await frames.tables.describe(message)
                case pgoutput.Truncate() | pgoutput.LogicalMessage():
                    return [frames.tables.change(message)]
                case _:
                    raise out_of_order(message, StreamState.BLOCK, state.xid)

    async def skip(self, state: TransactionCore) -> None:
        while not state.complete:
            await self.read(state)

    async def abort(self, message: pgoutput.StreamAbort) -> TransactionCore | None:
        """Return the abort of a transaction or subtransaction. None: no block of the transaction was received."""
        if message.xid not in self._open:
            return None
        if message.subxid == message.xid:
            del self._open[message.xid]
        return self._aborted(message.xid, message.subxid, message.abort_lsn, message.abort_time)

    async def commit(self, message: pgoutput.StreamCommit) -> TransactionCore | None:
        """Return the commit of the received blocks. None: it was delivered before a reconnect."""
        self._open.pop(message.xid, None)
        finish_lsn, end_lsn, time = message.commit_lsn, message.end_lsn, message.commit_time
        return self._core.bare(Kind.STREAM_COMMIT, message.xid, finish_lsn, end_lsn, time)

    async def prepare(self, message: pgoutput.StreamPrepare) -> TransactionCore | None:
        """Return the PREPARE of the received blocks. None: it was delivered before a reconnect."""
        self._open.pop(message.xid, None)
        finish_lsn, end_lsn, time = message.prepare_lsn, message.end_lsn, message.prepare_time
        return self._core.bare(Kind.STREAM_PREPARE, message.xid, finish_lsn, end_lsn, time, message.gid)

    async def discard_unfinished(self) -> None:
        """Schedule a STREAM_ABORT for each in-progress transaction, after a reconnect."""
        self._lost.extend(self._open)
        self._open.clear()

    def next_lost(self) -> TransactionCore | None:
        """Return the next scheduled STREAM_ABORT. None: there is none."""
        if not self._lost:
            return None
        xid = self._lost.popleft()
        return self._aborted(xid, xid, None, None)

    def _aborted(self, xid: int, subxid: int, lsn: Lsn | None, time: int | None) -> TransactionCore:
        return TransactionCore(self._core, Kind.STREAM_ABORT, xid, lsn or 0, time or 0, exhausted=True, subxid=subxid)
