"""From the change stream to the target: the loop that apply workers and table sync workers share.

The tasks of one connection pair, beside those of the worker that runs the loop (ApplyHooks.background_tasks):

    reader     takes what the walsender sent, answers keepalives at once through the feedback task,
               and queues the rest; stops reading while `receive_queue_size` bytes wait
    loop       decodes, asks the dispatcher what to do, and has the target do it
    feedback   tells the publisher how far we are (publisher/feedback.py)
    flushing   makes committed transactions durable, so that they can be confirmed (worker/wal_flush.py)

A position is noted where it stands in the stream, never when it arrives: a keepalive that was received
while transactions before it wait in the queue must not be confirmed before they are.

Kill points considered: between any two of reading, sending, committing, flushing and confirming, the
process may end. Nothing here is needed after a restart: the target's progress row and the slot are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from subscriber.apply.progress import Positions, Progress
from subscriber.apply.table_states import NOWHERE
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import XLOG_DATA_HEADER, XLogData, decode_from_publisher
from subscriber.publisher.feedback import Feedback
from subscriber.publisher.receive_queue import ReceiveQueue
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import DEFAULTS, Settings
from subscriber.targets.base import Target
from subscriber.worker.apply.confirmed_position import ConfirmedPositionGuard
from subscriber.worker.apply.transactions import TransactionKinds, Transactions
from subscriber.worker.apply_hooks import ApplyHooks
from subscriber.worker.exception_groups import root_cause
from subscriber.worker.session.applier import Counters

MANY = (b"I", b"U", b"D", b"B", b"C")  # the first bytes of messages that come in great number


@dataclass(frozen=True, slots=True)
class Durability:
    """What has to happen before a commit is confirmed to the publisher."""

    flush: Callable[[], Awaitable[None]] | None = None  # makes commits durable; None: they are when they are answered
    guard: ConfirmedPositionGuard | None = None  # keeps a record of confirmed positions; None: the target needs none


_DURABLE, _ORDINARY = Durability(), TransactionKinds()


class ApplyLoop:
    """One connection pair, from where the stream begins to its end."""

    def __init__(
        self,
        stream: ReplicationStream,
        target: Target,
        start: Lsn,
        *,
        hooks: ApplyHooks,
        durability: Durability = _DURABLE,
        kinds: TransactionKinds = _ORDINARY,
        settings: Settings = DEFAULTS,
    ) -> None:
        """Prepare a loop for `run()`.

        Args:
            stream: it has begun at `start`, or before.
            target: is called by this loop only.
            start: everything before it is applied.
            hooks: of the worker.
            durability: when a commit may be confirmed.
            kinds: what was asked for of the stream.
            settings: with a `status_interval` that suits the publisher, see `limit_status_interval()`.
        """
        self.progress = Progress(start)
        self.counters = Counters()
        self.streamed = kinds.streamed
        self.position = start  # end of what has been processed between transactions
        self._stream = stream
        self._target = target
        self._hooks = hooks
        self._messages_per_turn = settings.messages_per_turn
        self._large_transaction = settings.large_transaction_messages
        self._flush = durability.flush
        self._guard = durability.guard
        self._applied = NOWHERE  # as reported
        self._transactions = Transactions(target, hooks, kinds, self.progress, self.counters, self._commit_done)
        self._queue = ReceiveQueue(stream, settings.receive_queue_size)
        self._committed = anyio.Event()
        target.on_progress = self.wake
        self._feedback = Feedback(
            stream,
            self._positions,
            reading=self._queue.has_room,
            patient=self._flush is not None,
            settings=settings,
        )

    def _positions(self) -> Positions:
        positions = self.progress.positions
        if self._guard is not None:
            between = self._transactions.idle
            flush = self._guard.clamp(positions.flush, recorded=self.progress.recorded, between=between)
            positions = positions._replace(flush=flush)
        if self._hooks.hides_apply_position():
            return positions._replace(apply=self._applied)
        self._applied = positions.apply
        return positions

    @property
    def needed(self) -> Lsn:
        """The position at which everything received so far is applied: of an open transaction its end."""
        transaction = self._transactions.open
        return self.position if transaction is None else max(self.position, Lsn(transaction.finish_lsn + 1))

    @property
    def one_by_one(self) -> Mapping[str, int]:
        """Changes that were not applied set-based, by the reason why."""
        return self._target.row_by_row_reasons

    def wake(self) -> None:
        """Make the loop look at its boundary again, if it is waiting."""
        self._queue.wake()

    async def run(self) -> None:
        """Run until on_boundary() says so, the stream ends, or an error. At a regular end everything is committed."""
        try:
            async with anyio.create_task_group() as tasks:
                for task in self._hooks.background_tasks:
                    tasks.start_soon(task)
                if self.streamed is not None:
                    await self.streamed.open(tasks, self.progress)
                tasks.start_soon(self._queue.read_loop, self._feedback)
                tasks.start_soon(self._feedback.run)
                tasks.start_soon(self._target.watch)
                if self._flush is not None:
                    tasks.start_soon(self._flushing, self._flush)
                if self._guard is not None:
                    tasks.start_soon(self._guard.write_records, self._feedback.positions_changed)
                await self._loop()
                await self._target.sync()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise root_cause(group) from None
        finally:
            if self.streamed is not None:
                await self.streamed.close()

    # --- applying -------------------------------------------------------------------------------

    async def _loop(self) -> None:
        if await self._hooks.on_boundary(self.position):
            return
        inside = sent = 0  # messages since the end of a transaction; how many had ended then
        while True:
            left = min(self._messages_per_turn, len(self._queue.payloads))
            inside += left
            few = self._target.set_small_backlog(self._transactions.idle and self._queue.has_small_backlog)
            while left > 0:
                taken, size = (0, 0) if few else self._append_raw(left)
                if taken:
                    await self._transactions.flush_if_full()
                    self._queue.release(size)  # not before, see _take()
                elif await self._handle_next():
                    return
                left -= taken or 1
            if self._transactions.idle or self.progress.sent != sent:
                inside, sent = 0, self.progress.sent
            self._queue.in_large = inside > self._large_transaction
            if not self._queue.payloads:
                await self._target.on_idle()
            self._target.flush()
            self.progress.note(self.position)
            self._request_feedback()
            if self._transactions.idle and await self._hooks.on_boundary(self.position):
                return
            if self._queue.payloads:
                await anyio.lowlevel.checkpoint()
            else:
                await self._queue.wait()

    def _append_raw(self, limit: int) -> tuple[int, int]:
        """Take what can be taken without decoding it, up to `limit` payloads; their number and bytes."""
        waiting = self._queue.payloads
        first, before = waiting[0], len(waiting)
        if first[XLOG_DATA_HEADER.size : XLOG_DATA_HEADER.size + 1] not in MANY:
            return 0, 0
        size = self._transactions.append_raw(waiting, limit)
        if size:
            self.counters.bytes += size
            _, start, _, self.counters.last_send_time = XLOG_DATA_HEADER.unpack_from(first)
            self.position = max(self.position, Lsn(start), self._transactions.ended)
        return before - len(waiting), size

    async def _handle_next(self) -> bool:
        """Handle the next payload of the queue; true when the loop is to end."""
        payload = self._queue.payloads.popleft()
        size = len(payload)
        self.counters.bytes += size
        envelope = decode_from_publisher(payload)
        del payload  # of a large one the envelope has a copy
        is_end = False
        if isinstance(envelope, XLogData):
            is_end = await self._message(envelope)
        elif envelope is not None:
            self.counters.last_send_time = envelope.send_time
            self.counters.latest_end = max(self.counters.latest_end, envelope.end)
            self._received(envelope.end)
        self._queue.release(size)  # not before: with a large one in hand no other is to be received
        return is_end

    def _received(self, position: Lsn) -> None:
        if position > self.position:
            self.position = position

    async def _message(self, envelope: XLogData) -> bool:
        """Handle one pgoutput message; true when the loop is to end."""
        self.counters.last_send_time = envelope.send_time
        end_lsn = await self._transactions.receive(envelope.payload)
        if end_lsn is not None:
            self._received(end_lsn)
            if await self._hooks.on_boundary(self.position):
                return True
        self._received(max(envelope.start, envelope.end))
        return False

    # --- confirming -----------------------------------------------------------------------------

    def _commit_done(self, number: int) -> None:
        reach(Point.COMMITTED)
        self.progress.commit_done(number)
        if self.streamed is not None:
            self.streamed.committed()
        if self._flush is None:
            self.progress.made_durable(number)
        else:
            self._committed.set()
        self._request_feedback()

    def _request_feedback(self) -> None:
        """Have the publisher told how far we are, unless there is more to do and a flush is going to say more."""
        if self._flush is None or not self._queue.payloads:
            self._feedback.positions_changed()

    async def _flushing(self, flush: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._committed.wait()
            self._committed = anyio.Event()
            number = self.progress.committed
            await flush()
            reach(Point.FLUSHED)
            self.progress.made_durable(number)
            self._feedback.positions_changed()
