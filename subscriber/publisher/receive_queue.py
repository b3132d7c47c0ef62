"""Bounded receive queue between the replication connection and the reader of changes.

Keepalives that request a reply are answered without waiting for the frames before them. Their position in the stream
is evaluated in its turn.

A walsender that is slower than the reader sends one change at a time. Each would wake two tasks, which takes ten times
as long as applying it. In the middle of a large transaction no task waits for single changes, so the queue waits until
more have arrived.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import anyio

from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER, weigh
from subscriber.publisher.feedback import Feedback
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import DEFAULTS

LITTLE = 32 * 1024  # bytes of one receive()
MOMENT = 0.001  # seconds

FEW = 16  # messages

_BODY = XLOG_DATA_HEADER.size
_XLOG_DATA, _COMMIT = bytes([XLOG_DATA]), b"C"
_ORDINARY = (b"B", b"I", b"U", b"D", _COMMIT, b"R", b"Y", b"O", b"T", b"M")  # what messages of transactions begin with


class ReceiveQueue:
    """One task appends to `payloads`. Another takes from its front, and reports the taken bytes with release()."""

    def __init__(
        self,
        stream: ReplicationStream,
        limit: int = DEFAULTS.receive_queue_size,
        on_received: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        """Create an empty queue.

        Args:
            stream: the stream that is read.
            limit: bytes in the queue at which reading stops.
            on_received: called with payloads as they arrive.
        """
        self.payloads: deque[bytes] = deque()
        self.in_large = False  # a large transaction is being received
        self._stream = stream
        self._limit = limit
        self._on_received = on_received
        self._size = 0
        self._arrived = asyncio.Event()  # can be cleared, which for one row at a time is quicker than a new one
        self._taken: anyio.Event | None = None  # set while the queue waits for room

    @property
    def has_small_backlog(self) -> bool:
        """True if the queue is short and contains only complete ordinary transactions."""
        if len(self.payloads) >= FEW:
            return False
        last = b""
        for payload in self.payloads:
            if payload[:1] == _XLOG_DATA:
                last = payload[_BODY : _BODY + 1]
                if last not in _ORDINARY:
                    return False
        return last == _COMMIT

    def has_room(self) -> bool:
        """True if the queue has room, so the connection is read."""
        return self._size <= self._limit

    async def read_loop(self, feedback: Feedback) -> None:
        """Read until cancelled. Raises the errors of the stream."""
        while True:
            payloads = await self._stream.receive()
            feedback.data_received()
            size, keepalives = weigh(payloads)
            self._size += size
            for keepalive in keepalives:
                if keepalive[-1]:
                    feedback.request_now()
            if self._on_received is not None:
                self._on_received(payloads)
            self.payloads.extend(payloads)
            del payloads  # a reader of a large payload can then use its memory without a copy
            self._arrived.set()
            while not self.has_room():
                self._taken = anyio.Event()
                await self._taken.wait()
                feedback.data_received()  # this side caused the silence
            if self.in_large and size < LITTLE:
                await anyio.sleep(MOMENT)

    def release(self, size: int) -> None:
        """Record that `size` bytes have been taken from `payloads`."""
        self._size -= size
        if self._taken is not None and self.has_room():
            self._taken.set()
            self._taken = None

    def wake(self) -> None:
        """Make wait() return without a new message."""
        self._arrived.set()

    async def wait(self) -> None:
        """Return as soon as a message arrives, or has arrived since the last call."""
        await self._arrived.wait()
        self._arrived.clear()
