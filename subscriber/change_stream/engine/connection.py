"""The frames of one slot, received through a series of connections.

Purpose. Two tasks serve a connection. The reader puts frames into a queue, and pauses while the queue holds more than
`Settings.receive_queue_size` bytes. The status task sends the acknowledged position to the publisher: when the position
moves, when the publisher asks, and at least three times in each wal_sender_timeout. So a slow consumer, or one that
never requests the next transaction, does not break the connection.

Invariants.

- After a transient error the next connection starts at the position up to which everything was delivered. The queue is
  discarded, because the publisher sends its frames again.
- `epoch` is incremented for each connection. A reader of frames compares it, and discards the frames of the lost
  connection. The publisher sends the current transaction again from its first change.
- A keepalive says that the publisher has sent everything before its position. This position is recorded when the
  keepalive is taken from the queue, after the frames before it. The exception is a queue without other frames, between
  transactions. There the position is recorded on arrival. Otherwise a consumer that requests no transaction would
  retain WAL on the publisher without need.

Failure cases.

- The process ends: nothing here is needed after a restart.
- A status update is not sent, or the publisher loses it: the publisher sends acknowledged transactions again after a
  restart of the process. A reconnect within the process does not repeat them, because they lie before the requested
  start position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import Protocol

import anyio
import anyio.lowlevel

from subscriber import telemetry
from subscriber.change_stream.engine.acknowledgements import AcknowledgementTracker
from subscriber.change_stream.types.registry import TypeRow
from subscriber.errors import BinaryRefused, ConnectionLost, ServerError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import weigh
from subscriber.publisher.feedback import limit_status_interval
from subscriber.publisher.reconnect import Backoff
from subscriber.settings import Settings
from subscriber.sqlstate import CLASS_CONNECTION_EXCEPTION, CLASS_SERVER_SHUTDOWN, OBJECT_IN_USE, TOO_MANY_CONNECTIONS
from subscriber.timeline_history import TimelineHistory

CHUNK = 512  # frames of one receive(); other tasks run between two of these calls

# OBJECT_IN_USE: the walsender of the lost connection still uses the slot.
_PASSES = (CLASS_CONNECTION_EXCEPTION, CLASS_SERVER_SHUTDOWN, TOO_MANY_CONNECTIONS, OBJECT_IN_USE)


class Connection(Protocol):
    """A started replication stream, for example `publisher/replication_stream.py:ReplicationStream`."""

    async def receive(self) -> list[bytes]:
        """Wait for frames and return those that have arrived, in order, at least one.

        Raises:
            SubscriberError: the connection is lost, or the publisher has ended the stream.

        Cancellation: safe; no frame is lost.
        """
        ...

    def send_status(
        self, write: Lsn, flush: Lsn, apply: Lsn, *, reply_requested: bool = False, now: int | None = None
    ) -> None:
        """Send a status update without waiting for the network.

        Args:
            write: everything before this position was received.
            flush: everything before this position was acknowledged. The publisher may discard its WAL.
            apply: as `flush`.
            reply_requested: the publisher answers with a keepalive.
            now: microseconds since 2000-01-01 00:00 UTC. None: the current time.

        Raises:
            ConnectionLost: the connection is lost.
        """

    async def stop(self, *, timeout: float = ...) -> bool:
        """End the stream and close the connection.

        Args:
            timeout: seconds to wait for the publisher's agreement. 0: drop the connection.

        Returns:
            True if the publisher has agreed.
        """
        ...


class Source(Protocol):
    """A replication slot that can be streamed from.

    Attributes:
        slot: the name of the slot.
        snapshot: the exported snapshot of a slot that was created. None: the slot existed, or start() was called.
        can_reconnect: False if the slot ends with its connection.
        history: the publisher's timelines as of the last connection. None: not known.
    """

    slot: str
    snapshot: str | None
    can_reconnect: bool
    history: TimelineHistory | None

    async def start(self, position: Lsn) -> tuple[Connection, float]:
        """Start streaming, with a new connection if need be.

        Args:
            position: skip transactions that were committed before it. 0: start at the position of the slot.

        Returns:
            The connection, and the publisher's wal_sender_timeout in seconds; 0: it has none.

        Raises:
            SubscriberError: the publisher cannot be reached or cannot stream from this slot. ReconnectingStream retries
                if is_transient() is true.
        """
        ...

    async def types(self, oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
        """Read types from the publisher's catalog, together with the types that they contain.

        Args:
            oids: OIDs of types.
            known: OIDs of types that are not needed.

        Raises:
            SubscriberError: the publisher cannot be reached or rejects the query.
        """
        ...

    def request_text(self) -> None:
        """Request values as text from the next start() on, because a type has no binary format."""
        ...

    def close(self) -> None:
        """Drop a connection that start() has not used."""


class ReconnectingStream:
    """The queue of frames and the task that fills it, see the top of the file.

    run() is one task. One other task calls receive(), wait() and receive_nowait().
    """

    def __init__(self, source: Source, acks: AcknowledgementTracker, settings: Settings) -> None:
        self.epoch = 0
        # The receiver has no open transaction and no frames left. FrameReader sets it.
        self.between = True
        self._source = source
        self._acks = acks
        self._settings = settings
        self._limit = settings.receive_queue_size
        self._queue: deque[tuple[list[bytes], bool]] = deque()  # frames, and True if all are keepalives
        self._taken = 0  # frames that were taken from the first list of the queue
        self._queued = 0  # bytes
        self._connected = False
        self._error: Exception | None = None
        self._arrived = anyio.Event()
        self._room = anyio.Event()
        self._news = anyio.Event()
        self._notified = False  # `_news` is set for a position that has moved since the last status update
        self._heard = 0.0  # when the last frames arrived
        self._asked = False  # a reply was requested after half of receiver_timeout

    # --- for the task that receives ---------------------------------------------------------------

    async def receive(self) -> list[bytes]:
        """Wait for frames and return at most CHUNK. The list is empty after wake().

        Raises:
            Exception: the error that has ended run(), after the last frame was taken.

        Cancellation: safe; no frame is lost.
        """
        await anyio.lowlevel.checkpoint()
        await self.wait()
        if self._error is not None and not self._queue:
            raise self._error
        return self.receive_nowait()

    async def wait(self) -> bool:
        """Wait for frames, for a call of wake(), or for the end of the stream.

        Returns:
            False if there was no need to wait. Other tasks have not run then.

        Cancellation: safe; nothing has changed.
        """
        if self._queue or self._error is not None:
            return False
        await self._arrived.wait()
        self._arrived = anyio.Event()
        return True

    def receive_nowait(self) -> list[bytes]:
        """Return at most CHUNK frames of the queue. The list is empty if the queue is."""
        if not self._queue:
            return []
        self.between = False
        head, start = self._queue[0][0], self._taken
        chunk = head[start : start + CHUNK]
        self._taken += CHUNK
        if self._taken >= len(head):
            self._queue.popleft()
            self._taken = 0
        self._queued -= weigh(chunk)[0]
        if self._queued <= self._limit:
            self._room.set()
        return chunk

    def wake(self) -> None:
        """Make a waiting receive() return without frames."""
        self._arrived.set()

    def moved(self) -> None:
        """Schedule a status update, because the acknowledged position has moved."""
        if not self._notified:
            self._notified = True
            self._news.set()

    # --- the connection ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect and reconnect until canceled, or until a permanent error, which receive() then raises."""
        backoff = Backoff(self._settings)
        while True:
            try:
                await self._follow()
            except Exception as error:  # of any class: the consumer has to receive bugs, too
                if not self._source.can_reconnect or not is_transient(error):
                    self._error = error
                    self.wake()
                    return
                if isinstance(error, BinaryRefused):
                    self._source.request_text()
                if self._connected:
                    backoff.reset()
                telemetry.log_error(error, telemetry.WARNING, event="stream.lost")
            await anyio.sleep(backoff.next())

    async def _follow(self) -> None:
        """Serve one connection, from its start to the error that ends it."""
        self._drop_queue()
        # From here on the receiver discards frames of the previous connection, so `passed` does not move.
        self.epoch += 1
        self._connected = False
        self.wake()
        connection, sender_timeout = await self._source.start(self._acks.passed)
        self._connected = True
        self._heard, self._asked = monotonic(), False
        interval = limit_status_interval(self._settings, sender_timeout).status_interval
        polite = True
        lost: SubscriberError | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_statuses, connection, interval)
                try:
                    await self._read(connection)
                except SubscriberError as error:
                    lost = error
                tasks.cancel_scope.cancel()
            polite = False
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(SubscriberError):
                    self._send(connection)
                await connection.stop(timeout=self._settings.stream_stop_timeout if polite else 0.0)
        assert lost is not None
        raise lost

    async def _read(self, connection: Connection) -> None:
        half = self._settings.receiver_timeout / 2
        while True:
            # One timeout for many calls, because creating a timeout is slow.
            with anyio.move_on_after(self._heard + half - monotonic()):
                while True:
                    self._on_frames(await connection.receive())
                    self._heard = monotonic()
                    if self._queued > self._limit:
                        break
            while self._queued > self._limit:
                self._room = anyio.Event()
                await self._room.wait()
                self._heard = monotonic()  # this task did not read, so the publisher was not silent
            if monotonic() - self._heard >= half:
                self._heard = monotonic()
                self._silent()

    def _silent(self) -> None:
        """Request a reply after half of receiver_timeout without a message, and give up after the other half."""
        if self._asked:
            raise ConnectionLost("terminating logical replication stream due to timeout")
        self._asked = True
        self._news.set()

    def _on_frames(self, frames: list[bytes]) -> None:
        self._asked = False
        size, keepalives = weigh(frames)
        if keepalives:
            end = position_of(keepalives[-1])
            if any(keepalive[-1] for keepalive in keepalives):
                self._news.set()
            if len(keepalives) == len(frames) and self.between and all(only for _, only in self._queue):
                self._acks.note(end)
                self._drop_queue()
                frames = keepalives[-1:]
                size = len(frames[0])
        self._queued += size
        self._queue.append((frames, len(keepalives) == len(frames)))
        self._arrived.set()

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._taken, self._queued = 0, 0

    # --- status updates ---------------------------------------------------------------------------

    async def _send_statuses(self, connection: Connection, interval: float) -> None:
        # The first reply has the publisher's position even if there are no transactions to send.
        asking = True
        with suppress(ConnectionLost):  # the reader raises it
            while True:
                self._send(connection, reply_requested=asking)
                # One update is enough for all acknowledgements of this iteration of the event loop.
                await anyio.lowlevel.checkpoint()
                with anyio.move_on_after(interval):
                    await self._news.wait()
                self._news, self._notified = anyio.Event(), False
                asking = self._asked

    def _send(self, connection: Connection, *, reply_requested: bool = False) -> None:
        passed, flush = self._acks.passed, self._acks.flush
        connection.send_status(passed, flush, flush, reply_requested=reply_requested)


def is_transient(error: Exception) -> bool:
    """Return True if a new connection can succeed after this error."""
    return isinstance(error, ConnectionLost | BinaryRefused) or (
        isinstance(error, ServerError) and error.sqlstate.startswith(_PASSES)
    )


def position_of(keepalive: bytes) -> Lsn:
    """Return the position in a keepalive frame."""
    return Lsn.from_bytes(keepalive[1:9], "big")
