"""ApplyLoop: applies a change stream to a target. Apply workers and table synchronization workers share it.

Purpose. ApplyLoop.run() starts these tasks for a stream and a target, and `ApplyHooks.background_tasks`:

    reader     reads messages into the queue; requests a reply from the feedback task for a keepalive that wants one;
               stops reading while `receive_queue_size` bytes are queued
    loop       passes payloads to the target, or decodes and dispatches them
    feedback   sends status updates to the publisher (publisher/feedback.py)
    flushing   makes commits durable, so that they can be confirmed (worker/wal_flush.py)
    guard      records confirmed positions (confirmed_position.py)
    watch      raises an error of the target

Some tasks are missing if `Durability` does not need them. A parallel apply worker has a task of its own.

Invariants.

- A position is noted in the order of the stream, not on arrival. A keepalive can arrive while earlier transactions are
  queued. Its position must not be confirmed before they are durable.
- A keepalive says that all transactions were sent that finish before its position. A table that is copied meanwhile is
  handed over there, and its earlier changes are skipped. So a later transaction that finishes before the position is an
  error.

Failure cases.

- Process killed between any two steps of reading, sending, committing, flushing and confirming: a restart needs only
  the target's progress record and the slot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from struct import Struct

import anyio
import anyio.lowlevel

from subscriber.apply.progress import Positions, Progress
from subscriber.apply.table_states import NOWHERE
from subscriber.errors import PublisherReplaced
from subscriber.exception_groups import root_cause
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
from subscriber.worker.session.applier import Counters

BEGIN = b"B"
# COMMIT, STREAM COMMIT, COMMIT PREPARED, ROLLBACK PREPARED. A publisher sends a transaction that was prepared before
# two_phase was enabled with its COMMIT PREPARED, so PREPARE may be behind a keepalive.
ENDS = (b"C", b"c", b"K", b"r")
FINISH_OF_BEGIN = Struct(">Q")  # the first field of BEGIN
MANY = (b"I", b"U", b"D", b"B", b"C")  # first bytes of the frequent messages


@dataclass(frozen=True, slots=True)
class Durability:
    """The steps between a commit and its confirmation to the publisher.

    Attributes:
        flush: makes all earlier commits durable. None: a commit is durable when the target acknowledges it.
        guard: records positions before they are confirmed. None: the target needs no such record.
    """

    flush: Callable[[], Awaitable[None]] | None = None
    guard: ConfirmedPositionGuard | None = None


_DURABLE, _ORDINARY = Durability(), TransactionKinds()


class ApplyLoop:
    """Applies one replication stream to one target.

    Attributes:
        progress: the positions that are received, applied and durable.
        counters: transactions, changes and bytes since the start.
        streamed: the streamed transactions. None: streaming is off.
    """

    def __init__(
        self,
        stream: ReplicationStream,
        target: Target,
        progress: Progress,
        *,
        hooks: ApplyHooks,
        durability: Durability = _DURABLE,
        kinds: TransactionKinds = _ORDINARY,
        settings: Settings = DEFAULTS,
    ) -> None:
        """Prepare a loop for `run()`.

        Args:
            stream: the stream, which starts at the position of `progress` or before.
            target: the target. Only this loop may call it.
            progress: all transactions that were committed before its position are on the target.
            hooks: the rules and boundaries of the worker.
            durability: the steps before a commit is confirmed.
            kinds: the kinds of transactions that were requested.
            settings: limits and intervals. `status_interval` must suit the publisher, see `limit_status_interval()`.
        """
        self.progress = progress
        self.counters = Counters()
        self.streamed = kinds.streamed
        self._stream = stream
        self._target = target
        self._hooks = hooks
        self._messages_per_turn = settings.messages_per_turn
        self._large_transaction = settings.large_transaction_messages
        self._flush = durability.flush
        self._guard = durability.guard
        self._applied = NOWHERE  # the last reported apply position
        self._all_sent = NOWHERE  # the highest position of a keepalive
        self._transactions = Transactions(
            target, hooks, kinds, self.progress, self.counters, self._commit_done, settings.relation_cache_size
        )
        timer = hooks.timer
        self._queue = ReceiveQueue(stream, settings.receive_queue_size, None if timer is None else timer.receive)
        self._committed = anyio.Event()
        target.listen(self.wake)
        self._feedback = Feedback(
            stream,
            self._positions,
            reading=self._queue.has_room,
            patient=self._flush is not None,
            settings=settings,
            on_sent=None if timer is None else timer.confirm,
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
        """The position at which everything received so far is applied. For an open transaction, this is its end."""
        transaction = self._transactions.open
        position = self.progress.position
        return position if transaction is None else max(position, Lsn(transaction.finish_lsn + 1))

    @property
    def one_by_one(self) -> Mapping[str, int]:
        """The number of changes that were not applied in batches, by reason."""
        return self._target.row_by_row_reasons

    def wake(self) -> None:
        """End the loop's wait for messages, so that it calls `on_idle()` and `on_boundary()` again."""
        self._queue.wake()

    async def run(self) -> None:
        """Apply the stream until `ApplyHooks.on_boundary()` returns True, then wait until everything is committed.

        Raises:
            EndOfStream: the publisher has ended the stream.
            SubscriberError: the connection, the target, the spool or a hook has failed.

        Cancellation: the open transaction is not committed. The publisher sends unconfirmed transactions again.
        """
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
        if await self._hooks.on_boundary(self.progress.position):
            return
        await self._transactions.retry_quarantined()
        inside = sent = 0  # messages since the last end of a transaction, and the number of commits at that time
        while True:
            left = min(self._messages_per_turn, len(self._queue.payloads))
            inside += left
            few = self._target.set_small_backlog(self._transactions.idle and self._queue.has_small_backlog)
            while left > 0:
                taken, size = (0, 0) if few or not self._transactions.takes_payloads else self._append_raw(left)
                if taken:
                    await self._transactions.flush_if_full()
                    # Released after the flush, see _handle_next().
                    self._queue.release(size)
                elif await self._handle_next():
                    return
                left -= taken or 1
            if self._transactions.idle or self.progress.sent != sent:
                inside, sent = 0, self.progress.sent
            self._queue.in_large = inside > self._large_transaction
            if not self._queue.payloads:
                await self._target.on_idle()
            self._target.flush()
            self.progress.note(self.progress.position)
            self._request_feedback()
            if self._transactions.idle:
                await self._transactions.retry_quarantined()
                if await self._hooks.on_boundary(self.progress.position):
                    return
            if self._queue.payloads:
                await anyio.lowlevel.checkpoint()
            else:
                await self._queue.wait()

    def _append_raw(self, limit: int) -> tuple[int, int]:
        """Process up to `limit` payloads that need no decoding. Returns the number of payloads and their bytes."""
        waiting = self._queue.payloads
        first, before = waiting[0], len(waiting)
        kind = first[XLOG_DATA_HEADER.size : XLOG_DATA_HEADER.size + 1]
        if kind not in MANY:
            return 0, 0
        if kind == BEGIN:
            # Later transactions of the queue finish behind this one.
            self._check_not_before(Lsn(FINISH_OF_BEGIN.unpack_from(first, XLOG_DATA_HEADER.size + 1)[0]))
        size = self._transactions.append_raw(waiting, limit)
        if size:
            self.counters.bytes += size
            _, start, _, self.counters.last_send_time = XLOG_DATA_HEADER.unpack_from(first)
            self.progress.move_on(max(Lsn(start), self._transactions.ended))
        return before - len(waiting), size

    async def _handle_next(self) -> bool:
        """Process the next payload of the queue. Returns True to end the loop."""
        payload = self._queue.payloads.popleft()
        size = len(payload)
        self.counters.bytes += size
        envelope = decode_from_publisher(payload)
        # The envelope has a copy. A large payload must not be in memory twice.
        del payload
        is_end = False
        if isinstance(envelope, XLogData):
            is_end = await self._message(envelope)
        elif envelope is not None:
            self.counters.last_send_time = envelope.send_time
            self.counters.latest_end = max(self.counters.latest_end, envelope.end)
            self._all_sent = max(self._all_sent, envelope.end)
            self.progress.move_on(envelope.end)
        # Released at the end, so that no other payload is received while a large one is being processed.
        self._queue.release(size)
        return is_end

    async def _message(self, envelope: XLogData) -> bool:
        """Process one pgoutput message. Returns True to end the loop."""
        self.counters.last_send_time = envelope.send_time
        end_lsn = await self._transactions.receive(envelope.payload)
        if end_lsn is not None:
            if envelope.payload[:1] in ENDS:
                self._check_not_before(end_lsn)
            self.progress.move_on(end_lsn)
            if await self._hooks.on_boundary(self.progress.position):
                return True
        self.progress.move_on(max(envelope.start, envelope.end))
        return False

    def _check_not_before(self, finish: Lsn) -> None:
        """Check that the publisher had not reported to have sent all transactions that finish at this position."""
        if finish < self._all_sent:
            raise PublisherReplaced(
                f"the publisher has sent a transaction that finishes at {finish}, after it had reported that all"
                f" before {self._all_sent} were sent",
                detail="Changes of tables that were copied meanwhile may have been skipped.",
            )

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
        """Request a status update, unless more payloads wait and a flush is going to advance the positions."""
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
