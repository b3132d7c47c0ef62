"""Activity: whether this process and the servers are idle, and a clock that skips the time until the next timer.

This process is idle if no callback of its event loop is ready, no socket has data, and no other thread runs. The
servers are idle if all their processes sleep. A process that has received a message runs, or waits for a processor,
until it has answered. So between two idle sides no message is on its way, and all tasks wait for a timer or for each
other. /proc has the state of a process. A query for it would itself be an activity.

The event loop has a clock of its own, which `skip()` moves to the next timer. So a task that sleeps before its next
attempt costs no time.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from subscriber.demo.servers import Server

_BUSY = (b"R", b"D")  # states of a process that runs, waits for a processor, or for a disk
_LONGEST = 1 << 16  # bytes of a file of /proc


class Activity:
    """The activity of the running event loop and of some servers of this machine."""

    def __init__(self, servers: Sequence[Server]) -> None:
        """Watch servers, and the event loop that is running."""
        self._servers = servers
        self._loop: Any = asyncio.get_running_loop()
        self._time = self._loop.time
        self._skipped = 0.0  # seconds
        # The files of /proc that are open, by path. A check reads about 40, and to open one takes most of its time.
        self._files: dict[str, int] = {}

    @classmethod
    @asynccontextmanager
    async def watch(cls, *servers: Server) -> AsyncIterator[Activity]:
        """Give the event loop a clock that skip() moves, for the length of the block."""
        activity = cls(servers)
        activity._loop.time = lambda: activity._time() + activity._skipped
        try:
            yield activity
        finally:
            # Timers that are set already must not wait for the time that was skipped.
            skipped, time = activity._skipped, activity._time
            activity._loop.time = lambda: time() + skipped
            for file in activity._files.values():
                os.close(file)

    def is_idle(self) -> bool:
        """Return True if nothing happens without a timer. The calling task has to be the only one that is ready."""
        # A server that sleeps has sent its answers, so the sockets are read behind the servers.
        return not self._is_ready() and not any(map(self._is_busy, self._processes())) and not self._is_ready()

    def _is_ready(self) -> bool:
        return bool(self._loop._ready or self._loop._selector.select(0))

    def skip(self, limit: float) -> float | None:
        """Fire the next timer now if it is due in at most `limit` seconds. Returns the seconds; None: it is not due."""
        times: list[float] = [timer.when() for timer in self._loop._scheduled if not timer.cancelled()]
        wait = max(0.0, min(times, default=math.inf) - anyio.current_time())
        if wait > limit:
            return None
        self._skipped += wait
        return wait

    def _processes(self) -> Iterator[str]:
        """Yield the status files of the servers' processes and of the other threads of this process."""
        for server in self._servers:
            yield f"/proc/{server.pid}/stat"
            children = self._read(f"/proc/{server.pid}/task/{server.pid}/children").decode().split()
            yield from (f"/proc/{pid}/stat" for pid in reversed(children))  # the last ones are ours
        own = str(os.getpid())  # the event loop runs in the main thread
        yield from (f"/proc/self/task/{thread}/stat" for thread in os.listdir("/proc/self/task") if thread != own)

    def _is_busy(self, stat: str) -> bool:
        return self._read(stat).rpartition(b")")[2].lstrip()[:1] in _BUSY

    def _read(self, path: str) -> bytes:
        """Return the content of a file of /proc; empty if its process has ended."""
        if (file := self._files.get(path)) is not None:
            try:
                return os.pread(file, _LONGEST, 0)
            except ProcessLookupError:  # another process may have its number now
                os.close(self._files.pop(path))
        try:
            file = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(file, _LONGEST, 0)
        except (FileNotFoundError, ProcessLookupError):
            return b""
