"""What a walsender has sent and nobody has looked at yet: read ahead, up to a bound.

Keepalives that want an answer are passed on at once, however much lies before them; where in the stream they
stand is known when it is their turn.

A walsender that is slower than we are sends change after change, and each would wake two tasks, which takes ten times
as long as what they do about it. In the middle of a large transaction, where nobody waits for them, we wait for more.
"""

from __future__ import annotations

import asyncio
from collections import deque

import anyio

from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER, weigh
from subscriber.publisher.feedback import Feedback
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import DEFAULTS

LITTLE = 32 * 1024  # bytes received at once
MOMENT = 0.001  # seconds

FEW = 16  # messages

_BODY = XLOG_DATA_HEADER.size
_XLOG_DATA, _COMMIT = bytes([XLOG_DATA]), b"C"
_ORDINARY = (b"B", b"I", b"U", b"D", _COMMIT, b"R", b"Y", b"O", b"T", b"M")  # what messages of transactions begin with


class ReceiveQueue:
    """One task fills it, another takes from `waiting`, from the front, and says with release() how much."""

    def __init__(self, stream: ReplicationStream, limit: int = DEFAULTS.receive_queue_size) -> None:
        """`limit`: bytes that may wait before reading stops."""
        self.payloads: deque[bytes] = deque()
        self.in_large = False  # a large transaction is being received
        self._stream = stream
        self._limit = limit
        self._size = 0
        self._arrived = asyncio.Event()  # can be cleared, which for one row at a time is quicker than a new one
        self._taken: anyio.Event | None = None  # somebody waits for room

    @property
    def has_small_backlog(self) -> bool:
        """Whether what waits is little, and nothing but ordinary transactions that have come to their end."""
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
        """Whether reading goes on."""
        return self._size <= self._limit

    async def read_loop(self, feedback: Feedback) -> None:
        """Read until cancelled; raises what the stream raises."""
        while True:
            payloads = await self._stream.receive()
            feedback.data_received()
            size, keepalives = weigh(payloads)
            self._size += size
            for keepalive in keepalives:
                if keepalive[-1]:
                    feedback.request_now()
            self.payloads.extend(payloads)
            del payloads  # whoever takes a large one may have no other use for it than to copy it
            self._arrived.set()
            while not self.has_room():
                self._taken = anyio.Event()
                await self._taken.wait()
                feedback.data_received()  # the silence was ours
            if self.in_large and size < LITTLE:
                await anyio.sleep(MOMENT)

    def release(self, size: int) -> None:
        """So many bytes have been taken off `waiting`."""
        self._size -= size
        if self._taken is not None and self.has_room():
            self._taken.set()
            self._taken = None

    def wake(self) -> None:
        """Have wait() return though nothing has arrived."""
        self._arrived.set()

    async def wait(self) -> None:
        """Return as soon as a message arrives, or has arrived since the last call."""
        await self._arrived.wait()
        self._arrived.clear()
