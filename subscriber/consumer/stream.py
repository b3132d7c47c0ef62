"""The change stream of a publisher, for a program: an iterator of transactions.

    async with subscriber.stream(dsn, slot="s", publications=["p"]) as stream:
        async for transaction in stream:
            async for change in transaction:
                …
            await transaction.ack()

What comes when:

    between    BEGIN          a Transaction; its changes are read from the frames as they come, until COMMIT
               BEGIN PREPARE  the same, until PREPARE
               STREAM START   a block: its changes are spooled (spooled.py), or handed over as they come (blocks.py)
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

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal

import anyio

from subscriber.consumer.acks import Acks
from subscriber.consumer.blocks import Blocks
from subscriber.consumer.frames import LETTER, Frames, Tables
from subscriber.consumer.link import Link, Source
from subscriber.consumer.live import Live, Single
from subscriber.consumer.source import Create, SlotSource
from subscriber.consumer.spooled import Spooled
from subscriber.consumer.transaction import Kind, Transaction
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput
from subscriber.protocol.decode import Decoder
from subscriber.source.commands import StreamOptions

MEMORY = 8 * 1024 * 1024  # bytes received and not yet looked at, before reading stops
SPOOL_LIMIT = None  # bytes on disk
STOP_TIMEOUT = 5.0  # seconds for the publisher to take the last acknowledgements when the stream is left

_ORIGIN, _COMMIT = b"OC"


@asynccontextmanager
async def stream(
    source: str,
    *,
    publications: Sequence[str],
    slot: str | None = None,
    create: Literal["never", "missing", "replace"] = "never",
    start: Lsn = Lsn(0),
    until: Lsn | None = None,
    binary: bool = False,
    messages: bool = False,
    two_phase: bool = False,
    origin: Literal["any", "none"] = "any",
    streaming: Literal["off", "on", "parallel"] = "on",
    in_progress: Literal["spool", "blocks"] = "spool",
    memory: int = MEMORY,
    spool_folder: Path | None = None,
    spool_limit: int | None = SPOOL_LIMIT,
    failover: bool = False,
    application_name: str | None = None,
    stop_timeout: float = STOP_TIMEOUT,
) -> AsyncIterator[Stream]:
    """Stream the changes of `publications` from a publisher, without any target.

    `source` is a URI or libpq `key=value` string of a role that may replicate. A `slot` has to be there unless
    `create` says what to do: "missing" makes it, "replace" makes it anew. Without a name a temporary slot is made
    that begins now and is gone at the end. A slot that was made has an exported `snapshot` of the moment at
    which it begins, good until the first transaction is asked for.

    `start` skips transactions that were committed before that position, for consumers that store theirs; 0 starts
    where the slot stands. `until` ends the iteration when everything committed before that position was handed out.

    `binary` has values sent in binary where types have that: less work for the publisher, and no row.text().
    `messages` brings logical messages, `two_phase` prepared transactions when they are prepared, `origin="none"`
    leaves out what the publisher itself replicated from elsewhere.

    Transactions too large for the publisher's memory come while they are in progress: `in_progress="spool"` keeps
    them on disk in `spool_folder` (None: in the system's temporary folder), at most `spool_limit` bytes (None: as
    much as there is), until they commit; "blocks" hands the blocks over as they come; `streaming="off"` leaves
    it to the publisher to keep them. `memory` is how many bytes may wait for the consumer before reading stops.

    `failover` has a slot that is made kept on the publisher's standbys, too (17 and later). `application_name` is what
    the publisher shows of the connection; None: the slot's name.

    Leaving the block tells the publisher what was acknowledged and waits `stop_timeout` seconds for it to agree; 0
    drops the connection at once.

    Raises ConninfoError, ConnectionLost, ServerError, and PublisherError for what is not there or too old. Later
    losses of the connection are got over; what cannot be is raised where the next transaction or change is awaited.
    """
    options = StreamOptions(
        tuple(publications),
        binary=binary,
        streaming=streaming,
        two_phase=two_phase,
        origin=origin if origin == "none" else None,
        messages=messages,
    )
    async with open_stream(
        source,
        options,
        slot=slot,
        create="temporary" if slot is None else create,
        failover=failover,
        start=start,
        until=until,
        blocks=in_progress == "blocks",
        hold=None,
        memory=memory,
        spool_folder=spool_folder,
        spool_limit=spool_limit,
        application_name=application_name or slot or "subscriber stream",
        stop_timeout=stop_timeout,
    ) as opened:
        yield opened


@asynccontextmanager
async def open_stream(
    source: str,
    options: StreamOptions,
    *,
    slot: str | None,
    create: Create,
    failover: bool,
    start: Lsn,
    until: Lsn | None,
    blocks: bool,
    hold: Callable[[int, str], bool] | None,
    memory: int,
    spool_folder: Path | None,
    spool_limit: int | None,
    application_name: str,
    stop_timeout: float,
) -> AsyncIterator[Stream]:
    """What stream() and consume() share. `hold`: see Stream."""
    found = await SlotSource.open(
        source,
        slot,
        options,
        create=create,
        failover=failover,
        start=start,
        application_name=application_name,
    )
    async with Stream(
        found,
        Spooled(spool_folder or found.spool_folder, spool_limit),
        blocks=blocks,
        hold=hold,
        start=found.position,
        until=until,
        parallel=found.parallel,
        memory=memory,
        stop_timeout=stop_timeout,
    ) as opened:
        yield opened


class Stream:
    """Made by stream(). An asynchronous iterator of transactions, for one task."""

    def __init__(
        self,
        source: Source,
        spooled: Spooled,
        *,
        blocks: bool = False,
        hold: Callable[[int, str], bool] | None = None,
        start: Lsn = Lsn(0),
        until: Lsn | None = None,
        parallel: bool = False,
        memory: int = MEMORY,
        stop_timeout: float = STOP_TIMEOUT,
    ) -> None:
        """`hold(xid, gid)` says of a prepared transaction that nobody wants it before COMMIT PREPARED."""
        self.closed = False
        self.slot = source.slot
        self._source = source
        self._until = until
        self.acks = Acks(start)
        self._link = Link(source, self.acks, limit=memory, stop_timeout=stop_timeout)
        self.frames = Frames(self._link, self.acks, Tables(source))
        self.decoder = Decoder(parallel=parallel)
        self._parallel = parallel
        self._spooled = spooled
        self._blocks = Blocks() if blocks else None
        self._hold = hold
        self._live = Live(self)
        self._current: Transaction | None = None
        self._finishing = False
        self._running = False
        self._tasks = anyio.create_task_group()

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
        if transaction.number:
            self.confirm(transaction.number)
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
        if self._current is not None:
            await self._current.pass_over()
            self._current = None
        while not self._finishing and (self._until is None or self.acks.passed < self._until):
            transaction = None if self._blocks is None else self._blocks.lost(self)
            if transaction is None:
                frame = self.frames.next(between=True)
                if frame is None:
                    await self.refill()
                    continue
                transaction = await self.boundary(frame)
            if transaction is not None:
                return self._hand_out(transaction)
        raise StopAsyncIteration

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
        if self.closed:
            raise SubscriberError("the stream is closed", hint="Open it again to go on.", sqlstate="55000")
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
                transaction = Transaction(self, Kind.PREPARE, xid, finish_lsn, time, changes=self._live, gid=gid)
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
                changes = Single(self.frames.tables.change(message))
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
        return Transaction(self, kind, xid, finish_lsn, time, end_lsn=end_lsn, gid=gid)

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
