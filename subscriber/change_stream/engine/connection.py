"""The frames of one slot, over as many connections as it takes.

Two tasks belong to a connection: one reads frames into a queue and stops while `limit` bytes wait there;
one tells the publisher how far the consumer has acknowledged, at once when that moves or the publisher asks,
and unasked three times in each wal_sender_timeout, so that a consumer that takes its time, or waits for ever,
does not cost the connection.

When a connection is lost for a reason that passes, the next one starts at the position up to which
everything was handed out. What waits in the queue is dropped: it comes again. `epoch` counts connections, so
that whoever takes frames sees that what was begun starts anew, and leaves the rest of what he had.

A keepalive says that everything before its position has been sent. It is noted where it stands among the
frames, never when it arrives; except while nothing else waits and no transaction is open, when both are the
same, and when a consumer that does not ask for the next transaction would keep WAL on the publisher for nothing.

Kill points considered: nothing here is needed after a restart. A status update that was not sent, or that the
publisher has forgotten, only means that transactions come again which were acknowledged, and a consumer that
goes on in the same process does not see those either, because they lie before the position asked for.
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
from subscriber.errors import ConnectionLost, ServerError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import weigh
from subscriber.publisher.feedback import limit_status_interval
from subscriber.publisher.reconnect import Backoff
from subscriber.settings import Settings
from subscriber.sqlstate import CLASS_CONNECTION_EXCEPTION, CLASS_SERVER_SHUTDOWN, OBJECT_IN_USE, TOO_MANY_CONNECTIONS

CHUNK = 512  # frames handed out at once; other tasks get a turn in between

# Connections, shutdowns, too many connections, a slot that is still in use by our predecessor.
_PASSES = (CLASS_CONNECTION_EXCEPTION, CLASS_SERVER_SHUTDOWN, TOO_MANY_CONNECTIONS, OBJECT_IN_USE)


class Connection(Protocol):
    """A started stream, as source.walsender.ReplicationStream is one."""

    async def receive(self) -> list[bytes]: ...

    def send_status(
        self, write: Lsn, flush: Lsn, apply: Lsn, *, reply_requested: bool = False, now: int | None = None
    ) -> None: ...

    async def stop(self, *, timeout: float = ...) -> bool: ...


class Source(Protocol):
    """Where connections come from."""

    slot: str
    snapshot: str | None
    can_reconnect: bool

    async def start(self, position: Lsn) -> tuple[Connection, float]:
        """Stream from `position` (0: where the slot stands); and the publisher's timeout in seconds, 0 for none."""

    async def types(self, oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
        """What the publisher's catalog says of types and of what they are made of, except `known`."""

    def close(self) -> None:
        """Let go of what start() would have used."""


class ReconnectingStream:
    """See the top of the file. One task takes frames while run() runs in another."""

    def __init__(self, source: Source, acks: AcknowledgementTracker, settings: Settings) -> None:
        self.epoch = 0
        self.between = True  # whoever takes frames has no transaction open and no frames left; kept by them
        self._source = source
        self._acks = acks
        self._settings = settings
        self._limit = settings.receive_queue_size
        self._queue: deque[tuple[list[bytes], bool]] = deque()  # frames, and whether keepalives are all they are
        self._taken = 0  # frames of the first list in it
        self._queued = 0  # bytes
        self._connected = False
        self._error: Exception | None = None
        self._arrived = anyio.Event()
        self._room = anyio.Event()
        self._news = anyio.Event()
        self._told = False  # of something that has moved since statuses were sent last
        self._heard = 0.0
        self._asked = False

    # --- for whoever takes frames -----------------------------------------------------------------

    async def receive(self) -> list[bytes]:
        """The next frames, at most CHUNK; none when wake() was called. Raises what ended the stream for good."""
        await anyio.lowlevel.checkpoint()
        await self.wait()
        if self._error is not None and not self._queue:
            raise self._error
        return self.receive_nowait()

    async def wait(self) -> bool:
        """Until there are frames, wake() was called or the stream has ended; nothing changes when that is cancelled.

        False when that is so already: then other tasks have had no turn.
        """
        if self._queue or self._error is not None:
            return False
        await self._arrived.wait()
        self._arrived = anyio.Event()
        return True

    def receive_nowait(self) -> list[bytes]:
        """receive() as far as they are there."""
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
        """Let receive() return without frames, if it is waiting."""
        self._arrived.set()

    def moved(self) -> None:
        """What is acknowledged has moved: tell the publisher soon."""
        if not self._told:
            self._told = True
            self._news.set()

    # --- the connection ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled, or an error that does not pass; that is what receive() raises then."""
        backoff = Backoff(self._settings)
        while True:
            try:
                await self._follow()
            except Exception as error:  # a bug, too, is for the consumer to hear of
                if not self._source.can_reconnect or not is_transient(error):
                    self._error = error
                    self.wake()
                    return
                if self._connected:
                    backoff.reset()
                telemetry.log_error(error, telemetry.WARNING, event="stream.lost")
            await anyio.sleep(backoff.next())

    async def _follow(self) -> None:
        """One connection, from its beginning to the error that ends it."""
        self._drop_queue()
        self.epoch += 1  # from here on nobody takes frames of the connection before, and so nothing passes
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
            with anyio.move_on_after(self._heard + half - monotonic()):  # one for many, a timeout is not cheap
                while True:
                    self._on_frames(await connection.receive())
                    self._heard = monotonic()
                    if self._queued > self._limit:
                        break
            while self._queued > self._limit:
                self._room = anyio.Event()
                await self._room.wait()
                self._heard = monotonic()  # the silence was ours
            if monotonic() - self._heard >= half:
                self._heard = monotonic()
                self._silent()

    def _silent(self) -> None:
        """Nothing has come for half of the timeout."""
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

    # --- what the publisher is told ---------------------------------------------------------------

    async def _send_statuses(self, connection: Connection, interval: float) -> None:
        asking = True  # at first: where the publisher stands, when there is nothing to send
        with suppress(ConnectionLost):  # the reader hears of it, too
            while True:
                self._send(connection, reply_requested=asking)
                await anyio.lowlevel.checkpoint()  # one update for all that moves in this turn of the event loop
                with anyio.move_on_after(interval):
                    await self._news.wait()
                self._news, self._told = anyio.Event(), False
                asking = self._asked

    def _send(self, connection: Connection, *, reply_requested: bool = False) -> None:
        passed, flush = self._acks.passed, self._acks.flush
        connection.send_status(passed, flush, flush, reply_requested=reply_requested)


def is_transient(error: Exception) -> bool:
    """Whether it is worth to try again."""
    return isinstance(error, ConnectionLost) or (isinstance(error, ServerError) and error.sqlstate.startswith(_PASSES))


def position_of(keepalive: bytes) -> Lsn:
    return Lsn.from_bytes(keepalive[1:9], "big")
