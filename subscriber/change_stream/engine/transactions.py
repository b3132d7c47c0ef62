"""TransactionReader finds the transactions in the frames of a stream and gives each to its reader.

    between    BEGIN          a transaction; its changes are read from the frames as they arrive, until COMMIT
               BEGIN PREPARE  the same, until PREPARE
               STREAM START   a block: its changes are spooled, or delivered as they arrive (engine/in_progress.py)
               STREAM COMMIT, STREAM PREPARE   a transaction; its changes are read from the spool
               STREAM ABORT   its spooled changes are discarded
               COMMIT PREPARED, ROLLBACK PREPARED, MESSAGE   a transaction of that kind

Any other message raises ProtocolError. Transactions without changes are skipped. The exception is a prepared
transaction, because its COMMIT PREPARED or ROLLBACK PREPARED is delivered too.
"""

from __future__ import annotations

from subscriber.change_stream.changes import LETTER, Change
from subscriber.change_stream.engine.core import StreamCore, TransactionCore
from subscriber.change_stream.engine.in_order import InOrderReader, SingleChangeReader
from subscriber.change_stream.engine.in_progress import InProgressReader
from subscriber.change_stream.engine.spooled import SpooledReader
from subscriber.change_stream.kind import Kind
from subscriber.change_stream.options import ChangeStreamOptions
from subscriber.protocol import messages as pgoutput
from subscriber.protocol.stream_state import StreamState, next_state, out_of_order

_ORIGIN, _COMMIT = b"OC"
_PLAIN = Kind.COMMIT  # a global name is found faster than a member of an enum


class TransactionReader:
    """Reads the transactions of one stream, one after another."""

    def __init__(self, core: StreamCore, options: ChangeStreamOptions) -> None:
        assert options.spool_folder is not None
        self.core = core
        self._until = options.until
        self._in_order = InOrderReader(core, self._boundary)
        self._spooled = SpooledReader(core, options.spool_folder, options.spool_limit)
        self._in_progress = InProgressReader(core) if options.in_progress == "blocks" else None
        self._streamed = self._in_progress or self._spooled
        self._current: TransactionCore | None = None
        self._finishing = False
        self._started = False

    def finish(self) -> None:
        """End the iteration after the current transaction."""
        self._finishing = True
        self.core.connection.wake()

    async def close(self) -> None:
        """Remove the spooled transactions."""
        await self._spooled.close()

    def ready(self) -> TransactionCore | None:
        """Return the next transaction if it is an ordinary one and a change of it has arrived.

        None means that the caller has to await next().
        """
        core, current = self.core, self._current
        if (  # the properties below, written out: this is most of the work for a small transaction
            (current is not None and not current.exhausted)
            or self._finishing
            or self._in_progress is not None
            or core.closed
            or core.calls.current is not None
            or (self._until is not None and core.acks.passed >= self._until)
        ):
            return None
        batch: list[Change] = []
        if (begun := core.frames.begin(batch)) is None:
            return None
        finish, time, xid, end = begun
        if end is not None:  # the transaction has arrived to its end
            self._current = None
            return TransactionCore(core, _PLAIN, xid, finish, time, None, end, batch, core.acks.whole(end), 0, True)
        number = core.acks.handed_out()
        state = TransactionCore(core, _PLAIN, xid, finish, time, self._in_order, None, batch, number, len(batch))
        self._current = state
        return state

    async def next(self) -> TransactionCore | None:
        """Wait for the next transaction; None at the end of the stream. To be called when ready() is None.

        Cancellation: safe; the next call returns the same transaction.
        """
        if not self._started and not self.core.closed:
            self._started = True
            self.core.start_connection()
        if self._is_between:
            self._current = None
            while not self.core.closed and not self._is_ended and await self.core.frames.more():
                if (state := self.ready()) is not None:
                    return state
        return await self.core.call(self, self._find)

    @property
    def _is_between(self) -> bool:
        """True if the current transaction was read to its end, and no canceled call has a result to deliver."""
        return self.core.calls.current is None and (self._current is None or self._current.exhausted)

    @property
    def _is_ended(self) -> bool:
        return self._finishing or (self._until is not None and self.core.acks.passed >= self._until)

    async def _find(self) -> TransactionCore | None:
        if self._current is not None:
            await self._current.leave()
            self._current = None
        while not self._is_ended:
            state = None if self._in_progress is None else self._in_progress.next_lost()
            if state is None:
                frame = self.core.frames.next(between=True)
                if frame is None:
                    await self.core.refill()
                    continue
                state = await self._boundary(frame)
            if state is not None:
                # Here, not in the caller: a reconnect must start behind a transaction whose frames are consumed.
                return self._deliver(state)
        return None

    def _deliver(self, state: TransactionCore) -> TransactionCore:
        if state.kind is not Kind.STREAM_BLOCK and state.kind is not Kind.STREAM_ABORT:
            state.ack_number = self.core.acks.handed_out()
            if state.end_lsn is not None:  # none of its changes are left in the frames
                self.core.acks.note(state.end_lsn)
                self.core.frames.ended()
        self._current = state
        return state

    async def _boundary(self, frame: bytes) -> TransactionCore | None:
        """Process a frame between transactions. Returns the transaction to deliver, or None."""
        core = self.core
        message = core.decoder.decode(frame, LETTER)
        match message:
            case pgoutput.Begin(finish_lsn, time, xid):
                return await self._begin(TransactionCore(core, Kind.COMMIT, xid, finish_lsn, time, self._in_order))
            case pgoutput.BeginPrepare(_, _, _, xid, gid) if core.is_held(xid, gid):
                await self._spooled.hold(message)
                return None
            case pgoutput.BeginPrepare(finish_lsn, _, time, xid, gid):
                state = TransactionCore(core, Kind.PREPARE, xid, finish_lsn, time, self._in_order, gid=gid)
                return await self._begin(state)
            case pgoutput.CommitPrepared() if self._spooled.holds(message.xid):
                return await self._spooled.commit_prepared(message)
            case pgoutput.RollbackPrepared() if self._spooled.holds(message.xid):
                await self._spooled.rollback_prepared(message)
                return None
            case pgoutput.CommitPrepared(finish_lsn, end_lsn, time, xid, gid):
                return core.bare(Kind.COMMIT_PREPARED, xid, finish_lsn, end_lsn, time, gid)
            case pgoutput.RollbackPrepared(_, end_lsn, _, time, xid, gid):
                return core.bare(Kind.ROLLBACK_PREPARED, xid, end_lsn, end_lsn, time, gid)
            case pgoutput.LogicalMessage(_, False, lsn, _, _) if lsn > core.acks.passed:
                reader = SingleChangeReader(core.frames.tables.change(message))
                return TransactionCore(core, Kind.MESSAGE, 0, lsn, 0, reader, lsn)
            case pgoutput.LogicalMessage(_, False, _, _, _):
                return None
            case pgoutput.StreamStart():
                return await self._streamed.block(message)
            case pgoutput.StreamAbort():
                return await self._streamed.abort(message)
            case pgoutput.StreamCommit():
                return await self._streamed.commit(message)
            case pgoutput.StreamPrepare():
                return await self._streamed.prepare(message)
            case _:
                raise out_of_order(message, StreamState.IDLE)

    async def _begin(self, state: TransactionCore) -> TransactionCore | None:
        """Read the origin of a transaction. Returns None if it has no changes, or a reconnect will repeat it."""
        core, order = self.core, StreamState.BEGUN
        while True:
            frame = core.frames.next(between=False)
            if frame is None:
                if await core.refill():
                    return None
                continue
            letter = frame[LETTER]
            if letter == _ORIGIN:
                origin = core.decoder.decode(frame, LETTER)
                assert isinstance(origin, pgoutput.Origin)
                order = next_state(order, origin, state.xid)
                state.origin = origin.name
            elif letter == _COMMIT:
                core.end(state, core.decoder.decode(frame, LETTER))
                return None
            else:
                core.frames.back()
                return state
