"""TransactionTimer: measures when each transaction of a stream reaches the stages of TransactionTimes.

Purpose. The timer reads payloads as they arrive, and positions as they advance. So the apply loop, which passes most
transactions to the target without decoding them, works as without a timer.

Invariants.

- A transaction has reached a stage when the position of the stage has reached its end. Transactions end in the order of
  the stream, so each stage is a queue.
- A transaction that is interrupted by an error is reported only if it is the transaction of the error. The publisher
  sends the others again, and then they are reported.
- The number of transactions that are measured at a time is limited. Later ones are not measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import time_ns

from subscriber.apply.progress import Positions
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Message,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from subscriber.transaction_times import TimesReceiver, TransactionTimes

MAX_OPEN = 10_000

_BODY = XLOG_DATA_HEADER.size
_CHANGES = frozenset(b"IUDT")
_CONTROL = frozenset(b"BCbPKrSEcAp")


class TransactionTimer:
    """Measures the transactions of one run of an apply loop."""

    def __init__(
        self,
        receiver: TimesReceiver,
        *,
        parallel: bool = False,
        clock: Callable[[], int] = time_ns,
        limit: int = MAX_OPEN,
    ) -> None:
        """Create a timer.

        Args:
            receiver: receives each transaction when it is confirmed, or has failed.
            parallel: the stream has the messages of parallel streaming.
            clock: returns nanoseconds since 1970.
            limit: the number of transactions that are measured at a time.
        """
        self._receiver = receiver
        self._clock = clock
        self._limit = limit
        self._decoder = Decoder(parallel=parallel)
        self._open: TransactionTimes | None = None  # receives the changes of the stream
        self._streamed: dict[int, TransactionTimes] = {}  # by xid, between stream blocks too
        self._received: deque[TransactionTimes] = deque()
        self._applied: deque[TransactionTimes] = deque()
        self._flushed: deque[TransactionTimes] = deque()

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Read payloads of the stream that have arrived. Damaged ones are left to the loop."""
        now = self._clock()
        for payload in payloads:
            if len(payload) <= _BODY or payload[0] != XLOG_DATA:
                continue
            letter, open_transaction = payload[_BODY], self._open
            if letter in _CONTROL:
                try:
                    self._control(self._decoder.decode(payload, _BODY), now)
                except ProtocolError:
                    return
            open_transaction = open_transaction or self._open
            if open_transaction is not None:
                open_transaction.bytes += len(payload)
                open_transaction.changes += letter in _CHANGES

    def advance(self, positions: Positions) -> None:
        """Move transactions that are applied, and those that are durable."""
        if not self._received and not self._applied:
            return
        now = self._clock()
        while self._received and self._received[0].end_lsn <= positions.apply:
            times = self._received.popleft()
            times.applied = now
            self._applied.append(times)
        while self._applied and self._applied[0].end_lsn <= positions.flush:
            times = self._applied.popleft()
            times.flushed = now
            self._flushed.append(times)

    def confirm(self, positions: Positions) -> None:
        """Report the transactions that a status update has confirmed."""
        if not self._flushed:
            return
        now = self._clock()
        while self._flushed and self._flushed[0].end_lsn <= positions.flush:
            times = self._flushed.popleft()
            times.confirmed = now
            self._receiver(times)

    def fail(self, error: SubscriberError) -> None:
        """Report the transaction of an error that ends the loop."""
        if error.xid is None:
            return
        unfinished = [*self._received, *self._streamed.values(), *([self._open] if self._open is not None else ())]
        for times in unfinished:
            if times.xid == error.xid:
                times.fail(error, self._clock())
                self._receiver(times)
                return

    def close(self) -> None:
        """Report the durable transactions that the publisher does not know yet. It does not send them again."""
        while self._flushed:
            self._receiver(self._flushed.popleft())

    def _control(self, message: Message, now: int) -> None:
        match message:
            case Begin() | BeginPrepare():
                self._open = self._begin(message.xid, now)
            case Commit():
                self._end(self._open, "COMMIT", message.commit_lsn, message.end_lsn, message.commit_time, now)
            case Prepare():
                self._end(self._open, "PREPARE", message.prepare_lsn, message.end_lsn, message.prepare_time, now)
            case CommitPrepared():
                times = self._begin(message.xid, now)
                self._end(times, "COMMIT PREPARED", message.commit_lsn, message.end_lsn, message.commit_time, now)
            case RollbackPrepared():
                times, end = self._begin(message.xid, now), message.rollback_end_lsn
                self._end(times, "ROLLBACK PREPARED", end, end, message.rollback_time, now)
            case StreamStart():
                if message.first_segment or message.xid not in self._streamed:
                    self._streamed[message.xid] = self._begin(message.xid, now)
                self._open = self._streamed[message.xid]
            case StreamCommit():
                streamed = self._streamed.pop(message.xid, None)
                self._end(streamed, "STREAM COMMIT", message.commit_lsn, message.end_lsn, message.commit_time, now)
            case StreamPrepare():
                streamed = self._streamed.pop(message.xid, None)
                self._end(streamed, "STREAM PREPARE", message.prepare_lsn, message.end_lsn, message.prepare_time, now)
            case StreamStop():
                self._open = None
            case StreamAbort():
                if message.xid == message.subxid:
                    self._streamed.pop(message.xid, None)
            case _:
                pass

    def _begin(self, xid: int, now: int) -> TransactionTimes:
        return TransactionTimes("COMMIT", xid, now)

    def _end(
        self, times: TransactionTimes | None, kind: str, finish_lsn: Lsn, end_lsn: Lsn, committed: int, now: int
    ) -> None:
        self._open = None
        if times is None or len(self._received) + len(self._applied) + len(self._flushed) >= self._limit:
            return
        times.end(kind, finish_lsn, end_lsn, committed, now)
        self._received.append(times)
