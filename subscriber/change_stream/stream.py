"""The change stream of a publisher, as an iterator of transactions. What comes when:

    between    BEGIN          a Transaction; its changes are read from the frames as they come, until COMMIT
               BEGIN PREPARE  the same, until PREPARE
               STREAM START   a block: its changes are spooled, or handed over at once (engine/in_progress.py)
               STREAM COMMIT, STREAM PREPARE   a Transaction; its changes are read from the spool
               STREAM ABORT   what was spooled of it is dropped
               COMMIT PREPARED, ROLLBACK PREPARED, MESSAGE   a Transaction of that kind

Anything else is a ProtocolError. Transactions without a change are passed over, except for prepared ones, because
their end will be told, too.

A connection that is lost in the middle of a transaction is not noticed by whoever reads it: the publisher sends
the transaction again, with the same changes in the same order, and those that were handed out before are passed
over. Transactions that were handed out before do not come again as long as the stream is not left, whether
they are acknowledged or not: they can be acknowledged later.

Kill points considered: a process may end anywhere between reading, handing out, acting on a change, acknowledging
and telling the publisher. The next one gets everything from the lowest position that was not confirmed: what was
acknowledged and not yet told comes again in that case only, so a consumer's effects have to bear repetition, or
be stored with the transaction's `end_lsn` to start from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

import anyio

from subscriber.change_stream.changes import Change
from subscriber.change_stream.engine.acknowledgements import AcknowledgementTracker
from subscriber.change_stream.engine.cancel_safe import CancelSafeCalls
from subscriber.change_stream.engine.connection import ReconnectingStream, Source
from subscriber.change_stream.engine.frame_reader import LETTER, FrameReader, RelationCache
from subscriber.change_stream.engine.in_order import InOrderReader, SingleChange
from subscriber.change_stream.engine.in_progress import InProgressReader
from subscriber.change_stream.engine.spooled import SpooledReader
from subscriber.change_stream.transaction import Changes, Kind, Transaction
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput
from subscriber.protocol.decode import Decoder
from subscriber.settings import DEFAULTS, Settings

_ORIGIN, _COMMIT = b"OC"
_PLAIN = Kind.COMMIT  # found sooner here

T = TypeVar("T")


class Stream:
    """Made by stream(). An asynchronous iterator of transactions, for one task."""

    def __init__(
        self,
        source: Source,
        spooled: SpooledReader,
        *,
        blocks: bool = False,
        hold: Callable[[int, str], bool] | None = None,
        start: Lsn = Lsn(0),
        until: Lsn | None = None,
        parallel: bool = False,
        settings: Settings = DEFAULTS,
    ) -> None:
        """`hold(xid, gid)` says of a prepared transaction that nobody wants it before COMMIT PREPARED."""
        self.closed = False
        self.slot = source.slot
        self._source = source
        self._until = until
        self.acks = AcknowledgementTracker(start)
        self._link = ReconnectingStream(source, self.acks, settings)
        self.frames = FrameReader(self._link, self.acks, RelationCache(source, settings))
        self.decoder = Decoder(parallel=parallel)
        self._parallel = parallel
        self._spooled = spooled
        self._blocks = InProgressReader() if blocks else None
        self._hold = hold
        self._live = InOrderReader(self)
        self._current: Transaction | None = None
        self._finishing = False
        self._running = False
        self._tasks = anyio.create_task_group()
        self._errands = CancelSafeCalls(self._tasks)

    @property
    def snapshot(self) -> str | None:
        """Of a slot that was made: for SET TRANSACTION SNAPSHOT, until the first transaction is asked for."""
        return self._source.snapshot

    @property
    def position(self) -> Lsn:
        """Everything the publisher committed before this was handed out."""
        return self.acks.passed

    @property
    def confirmed(self) -> Lsn:
        """Everything before this was acknowledged: what the publisher may forget, as it is told soon."""
        return self.acks.flush

    @property
    def unacknowledged(self) -> int:
        """How many transactions were handed out and not acknowledged."""
        return self.acks.open

    def finish(self) -> None:
        """Hand out no further transaction: the iteration ends after the one that is being read. From any task."""
        self._finishing = True
        self._link.wake()

    def acknowledge(self, transaction: Transaction) -> None:
        """What Transaction.ack() does when it may."""
        if transaction.number and self.acks.ack(transaction.number):
            self._link.moved()
        if transaction.held_number:
            self.confirm(transaction.held_number)

    async def __aenter__(self) -> Stream:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True
        self._tasks.cancel_scope.cancel()
        try:
            # Without the caller's error: a group would only wrap it, and no task of ours raises any.
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._source.close()
            await self._spooled.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Transaction:
        if not self._running and not self.closed:
            self._running = True
            self._tasks.start_soon(self._link.run)
        if self._errands.current is None and (self._current is None or self._current.over):
            self._current = None
            while not self.closed and not self._ends:
                if (transaction := self._at_once()) is not None:
                    return transaction
                if not await self.frames.more():
                    break
        found = await self._undisturbed(self, self._find)
        if found is None:
            raise StopAsyncIteration
        return found

    @property
    def _ends(self) -> bool:
        return self._finishing or (self._until is not None and self.acks.passed >= self._until)

    def _at_once(self) -> Transaction | None:
        """Hand out the next transaction if it is an ordinary one, and there are changes of it, as many as there are."""
        batch: list[Change] = []
        if self._blocks is not None or (begun := self.frames.begin(batch)) is None:
            return None
        finish, time, xid, end = begun
        if end is not None:  # all of it is here
            found = Transaction(self, _PLAIN, xid, finish, time, None, end, batch, self.acks.whole(end))
        else:
            found = Transaction(self, _PLAIN, xid, finish, time, self._live, None, batch, self.acks.handed_out())
            found.handed_out = len(batch)
        self._current = found
        return found

    async def _find(self) -> Transaction | None:
        """The next transaction, however long it takes; None at the end."""
        if self._current is not None:
            await self._current.leave()
            self._current = None
        while not self._ends:
            transaction = None if self._blocks is None else self._blocks.lost(self)
            if transaction is None:
                frame = self.frames.next(between=True)
                if frame is None:
                    await self.refill()
                    continue
                transaction = await self.boundary(frame)
            if transaction is not None:
                # Here, not where it is awaited: a new connection has to start behind what has no frames any more.
                return self._hand_out(transaction)
        return None

    async def pull(self, transaction: Transaction, source: Changes) -> list[Change]:
        """The next changes of `transaction`, which has them from `source`."""
        while self._errands.current is None and not self.closed:
            if (batch := source.at_once(transaction)) is not None:
                return batch
            if not await self.frames.more():
                break
        return await self._undisturbed((source, transaction), partial(source.pull, transaction)) or []

    async def drop(self, transaction: Transaction, source: Changes) -> None:
        """Leave out what is left of `transaction`."""
        while self._errands.current is None and not self.closed and source.at_once(transaction) is not None:
            if transaction.complete:
                return
        await self._undisturbed((source, transaction, "drop"), partial(source.drop, transaction))

    async def _undisturbed(self, owner: object, call: Callable[[], Awaitable[T]]) -> T | None:
        if self.closed:
            raise SubscriberError("the stream is closed", hint="Open it again to go on.", sqlstate="55000")
        return await self._errands.call(owner, call)

    def _hand_out(self, transaction: Transaction) -> Transaction:
        if transaction.kind is not Kind.STREAM_BLOCK and transaction.kind is not Kind.STREAM_ABORT:
            transaction.number = self.acks.handed_out()
            if transaction.end_lsn is not None:  # nothing of it is still among the frames
                self.acks.note(transaction.end_lsn)
                self.frames.ended()
        self._current = transaction
        return transaction

    # --- for Live, Spooled and Blocks ---------------------------------------------------------------

    async def refill(self) -> bool:
        """Take more frames; whether they are of a new connection, on which what was begun comes again."""
        renewed = await self.frames.refill()
        if renewed:
            self.decoder = Decoder(parallel=self._parallel)
            await self._spooled.begin_again()
            if self._blocks is not None:
                await self._blocks.begin_again()
        return renewed

    async def boundary(self, frame: bytes) -> Transaction | None:
        """What begins, or is told, with this frame between transactions; None for nothing to hand out."""
        message = self.decoder.decode(frame, LETTER)
        large = self._blocks or self._spooled
        match message:
            case pgoutput.Begin(finish_lsn, time, xid):
                transaction = Transaction(self, Kind.COMMIT, xid, finish_lsn, time, changes=self._live)
                return await self._begin(transaction)
            case pgoutput.BeginPrepare(_, _, _, xid, gid) if self.hold(xid, gid):
                await self._spooled.hold(self, message)
                return None
            case pgoutput.BeginPrepare(finish_lsn, _, time, xid, gid):
                transaction = Transaction(self, Kind.PREPARE, xid, finish_lsn, time, changes=self._live)
                transaction.gid = gid
                return await self._begin(transaction)
            case pgoutput.CommitPrepared() if self._spooled.holds(message.xid):
                return await self._spooled.commit_prepared(self, message)
            case pgoutput.RollbackPrepared() if self._spooled.holds(message.xid):
                await self._spooled.rollback_prepared(self, message)
                return None
            case pgoutput.CommitPrepared(finish_lsn, end_lsn, time, xid, gid):
                return self.bare(Kind.COMMIT_PREPARED, xid, finish_lsn, end_lsn, time, gid)
            case pgoutput.RollbackPrepared(_, end_lsn, _, time, xid, gid):
                return self.bare(Kind.ROLLBACK_PREPARED, xid, end_lsn, end_lsn, time, gid)
            case pgoutput.LogicalMessage(_, False, lsn, _, _) if lsn > self.acks.passed:
                changes = SingleChange(self.frames.tables.change(message))
                return Transaction(self, Kind.MESSAGE, 0, lsn, 0, changes=changes, end_lsn=lsn)
            case pgoutput.LogicalMessage(_, False, _, _, _):
                return None
            case pgoutput.StreamStart():
                return await large.block(self, message)
            case pgoutput.StreamAbort():
                return await large.abort(self, message)
            case pgoutput.StreamCommit():
                return await large.commit(self, message)
            case pgoutput.StreamPrepare():
                return await large.prepare(self, message)
            case _:
                raise ProtocolError(
                    f"{message.message_type} message sent out of order", detail="It came outside a transaction."
                )

    def hold(self, xid: int, gid: str) -> bool:
        """Whether a prepared transaction is held until COMMIT PREPARED."""
        return self._hold is not None and self._hold(xid, gid)

    def confirm(self, number: int) -> None:
        """The transaction with that number is acknowledged."""
        if self.acks.ack(number):
            self._link.moved()

    def bare(
        self, kind: Kind, xid: int, finish_lsn: Lsn, end_lsn: Lsn, time: int, gid: str | None = None
    ) -> Transaction | None:
        """One without changes; None if it was handed out on an earlier connection."""
        if end_lsn <= self.acks.passed:
            return None
        transaction = Transaction(self, kind, xid, finish_lsn, time, end_lsn=end_lsn)
        transaction.gid = gid
        return transaction

    async def _begin(self, transaction: Transaction) -> Transaction | None:
        """Look at what follows: the origin, the end of a transaction without changes, or changes to hand out."""
        while True:
            frame = self.frames.next(between=False)
            if frame is None:
                if await self.refill():
                    return None  # it comes again
                continue
            letter = frame[LETTER]
            if letter == _ORIGIN:
                origin = self.decoder.decode(frame, LETTER)
                assert isinstance(origin, pgoutput.Origin)
                transaction.origin = origin.name
            elif letter == _COMMIT:
                self.ended(transaction, self.decoder.decode(frame, LETTER))
                return None
            else:
                self.frames.back()
                return transaction

    def ended(self, transaction: Transaction, message: pgoutput.Message) -> None:
        """COMMIT or PREPARE has come for a transaction that is read from the frames."""
        match message:
            case pgoutput.Commit(finish_lsn, end_lsn) if transaction.kind is Kind.COMMIT:
                pass
            case pgoutput.Prepare(finish_lsn, end_lsn) if transaction.kind is Kind.PREPARE:
                pass
            case _:
                raise ProtocolError(
                    f"{message.message_type} message sent out of order",
                    detail=f"It came in transaction {transaction.xid}.",
                )
        if finish_lsn != transaction.finish_lsn:
            raise ProtocolError(
                f"incorrect {message.message_type.lower()} LSN {finish_lsn} (expected {transaction.finish_lsn})"
            )
        transaction.end_lsn = end_lsn
        self.acks.note(end_lsn)
        self.frames.ended()
