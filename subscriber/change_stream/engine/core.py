"""The state that the readers of one change stream share, and the state of one of its transactions.

Stream and Transaction are facades for users: they hold a reader and a TransactionCore and have no state of their own.
Imports go one way: stream → transactions → in_order, in_progress, spooled → core → frame_reader → connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import anyio

from subscriber.change_stream.changes import Change
from subscriber.change_stream.engine.acknowledgements import AcknowledgementTracker
from subscriber.change_stream.engine.cancel_safe import CancelSafeCalls
from subscriber.change_stream.engine.connection import ReconnectingStream, Source
from subscriber.change_stream.engine.frame_reader import FrameReader, RelationCache
from subscriber.change_stream.kind import Kind
from subscriber.change_stream.options import ChangeStreamOptions
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput
from subscriber.protocol.decode import Decoder
from subscriber.protocol.stream_state import StreamState, next_state, out_of_order, require_finish_lsn
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

T = TypeVar("T")


class ChangeReader(Protocol):
    """Reads the changes of a transaction.

    read() and skip() run in a task of the stream, see engine/cancel_safe.py. A reader sets `complete` together with the
    last changes if it recognizes them. Otherwise read() returns an empty list after them.
    """

    def ready(self, state: TransactionCore) -> list[Change] | None:
        """Return the next changes that have arrived. None: the caller has to await read()."""

    async def read(self, state: TransactionCore) -> list[Change]:
        """Wait for the next changes. An empty list is the end of the transaction.

        Raises:
            SubscriberError: a permanent error of the connection, or a damaged message.
        """

    async def skip(self, state: TransactionCore) -> None:
        """Discard the remaining changes. Raises as read()."""


@dataclass(slots=True, eq=False, repr=False)
class TransactionCore:
    """The state of one transaction. The core and the readers write it. Transaction shows a part to the user."""

    core: StreamCore
    kind: Kind
    xid: int
    finish: int  # position of the commit (prepare, …) record
    time: int  # microseconds since 2000-01-01 00:00 UTC; 0: the publisher sends no time
    reader: ChangeReader | None = None  # None: there are no changes except those in `batch`
    end_lsn: Lsn | None = None  # None: the end has not arrived yet
    batch: list[Change] = field(default_factory=list)  # delivered to the user up to `at`
    ack_number: int = 0  # 0: it needs no acknowledgement, or has no number yet
    delivered: int = 0  # number of delivered changes, also from earlier connections
    exhausted: bool = False  # `batch` is the last one
    at: int = 0  # index in `batch` of the next change to deliver
    acked: bool = False
    complete: bool = False  # the reader has read the transaction to its end
    gid: str | None = None
    origin: str | None = None
    subxid: int | None = None
    first: bool = False
    held_ack_number: int = 0  # of its PREPARE, which is acknowledged together with this transaction

    @property
    def finish_lsn(self) -> Lsn:
        """The position of the commit (prepare, …) record."""
        return Lsn(self.finish)

    def __aiter__(self) -> TransactionCore:
        """Iterate over the batches of changes."""
        return self

    async def __anext__(self) -> list[Change]:
        batch, at = self.batch, self.at
        if at == len(batch):
            if self.exhausted or not await self.next_batch():
                raise StopAsyncIteration
            batch, at = self.batch, 0
        self.at = len(batch)
        return batch[at:] if at else batch

    async def next_batch(self) -> bool:
        """Replace `batch` with the next changes. Returns False at the end of the transaction."""
        self.batch, self.at = [], 0
        if self.exhausted or self.reader is None:
            return False
        batch = await self.core.read(self, self.reader)
        # Set after the await: a caller that is canceled during the await requests the last changes again.
        self.exhausted = self.complete or not batch
        if not batch:
            return False
        self.delivered += len(batch)
        self.batch = batch
        return True

    def put_back(self, changes: list[Change]) -> None:
        """Deliver these changes again, before those that have not been delivered yet."""
        self.batch, self.at = changes + self.batch[self.at :], 0

    async def skip_rest(self) -> None:
        """Discard the remaining changes, in a call from the user's task.

        Cancellation: safe; the next call continues.
        """
        if not self.exhausted and self.reader is not None:
            self.batch, self.at = [], 0
            await self.core.skip(self, self.reader)
            self.exhausted = True

    async def leave(self) -> None:
        """Discard the remaining changes, inside a cancel-safe call of the stream."""
        if not self.exhausted and self.reader is not None:
            self.batch, self.at = [], 0
            await self.reader.skip(self)
            self.exhausted = True


class StreamCore:
    """The connection, the frames and the acknowledgements of one stream."""

    def __init__(self, source: Source, options: ChangeStreamOptions) -> None:
        self.closed = False
        self.source = source
        self.acks = AcknowledgementTracker(options.start)
        self.connection = ReconnectingStream(source, self.acks, options.settings)
        self.frames = FrameReader(self.connection, self.acks, RelationCache(source, options.settings))
        self._parallel = options.streaming == "parallel"
        self.decoder = Decoder(parallel=self._parallel)
        self.reconnected: list[Callable[[], Awaitable[None]]] = []  # each reader discards its unfinished transactions
        self._hold = options.hold
        self._tasks = anyio.create_task_group()
        self.calls = CancelSafeCalls(self._tasks)

    async def open(self) -> None:
        """Start the task group. The first request for a transaction starts the connection."""
        await self._tasks.__aenter__()

    def start_connection(self) -> None:
        """Start the task that reads from the publisher."""
        self._tasks.start_soon(self.connection.run)

    async def close(self) -> None:
        """Cancel the tasks and release the source."""
        self.closed = True
        self._tasks.cancel_scope.cancel()
        try:
            # The caller's error is not passed on, because the group would wrap it. The tasks of the stream raise none.
            await self._tasks.__aexit__(None, None, None)
        finally:
            self.source.close()

    # --- for a transaction --------------------------------------------------------------------------

    async def read(self, state: TransactionCore, reader: ChangeReader) -> list[Change]:
        """Return the next changes of the transaction from its reader. An empty list is the end.

        Raises:
            SubscriberError: the stream is closed or has failed.

        Cancellation: safe; the next call returns the same changes.
        """
        while self.calls.current is None and not self.closed:
            if (batch := reader.ready(state)) is not None:
                return batch
            if not await self.frames.more():
                break
        return await self.call((reader, state), partial(reader.read, state)) or []

    async def skip(self, state: TransactionCore, reader: ChangeReader) -> None:
        """Discard the remaining changes of the transaction.

        Raises:
            SubscriberError: as read().

        Cancellation: safe; the next call continues.
        """
        while self.calls.current is None and not self.closed and reader.ready(state) is not None:
            if state.complete:
                return
        await self.call((reader, state, "skip"), partial(reader.skip, state))

    async def call(self, owner: object, call: Callable[[], Awaitable[T]]) -> T | None:
        """Await `call` in a task of the stream, see CancelSafeCalls.call().

        Raises:
            SubscriberError: the stream is closed.
        """
        if self.closed:
            raise SubscriberError(
                "the stream is closed", hint="Open it again to go on.", sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE
            )
        return await self.calls.call(owner, call)

    def acknowledge(self, state: TransactionCore) -> None:
        """Acknowledge the transaction, and its PREPARE if it was held."""
        if state.ack_number and self.acks.ack(state.ack_number):
            self.connection.moved()
        if state.held_ack_number:
            self.confirm(state.held_ack_number)

    # --- for the readers ----------------------------------------------------------------------------

    def confirm(self, number: int) -> None:
        """Acknowledge the transaction with that number."""
        if self.acks.ack(number):
            self.connection.moved()

    async def refill(self) -> bool:
        """Take more frames.

        Returns:
            True if they are from a new connection, which repeats unfinished transactions. The readers have discarded
            theirs then.
        """
        renewed = await self.frames.refill()
        if renewed:
            self.decoder = Decoder(parallel=self._parallel)
            for reconnected in self.reconnected:
                await reconnected()
        return renewed

    def is_held(self, xid: int, gid: str) -> bool:
        """Return True if a prepared transaction is delivered at its COMMIT PREPARED and not before."""
        return self._hold is not None and self._hold(xid, gid)

    def bare(
        self, kind: Kind, xid: int, finish_lsn: Lsn, end_lsn: Lsn, time: int, gid: str | None = None
    ) -> TransactionCore | None:
        """Create a transaction without changes. Returns None if it was delivered before a reconnect."""
        if end_lsn <= self.acks.passed:
            return None
        return TransactionCore(self, kind, xid, finish_lsn, time, end_lsn=end_lsn, exhausted=True, gid=gid)

    def end(self, state: TransactionCore, message: pgoutput.Message) -> None:
        """End a transaction that is read from the frames with its COMMIT or PREPARE.

        Raises:
            ProtocolError: the message is another one, or ends another transaction.
        """
        order = StreamState.PREPARING if state.kind is Kind.PREPARE else StreamState.TRANSACTION
        if not isinstance(message, pgoutput.Commit | pgoutput.Prepare):
            raise out_of_order(message, order, state.xid)
        next_state(order, message, state.xid)
        require_finish_lsn(message, state.finish)
        state.end_lsn = message.end_lsn
        self.acks.note(message.end_lsn)
        self.frames.ended()
