"""A network that can fail: TCP proxies on 127.0.0.1, in the test's own event loop.

proxies                 await proxies.to(port) gives a Proxy in front of that port; all end with the test

await proxy.cut()       resets connections and refuses new ones, until restore()
proxy.stall()           keeps connections without forwarding data, new ones as well, until restore()
proxy.lose()            never forwards data of the current connections again; new ones work
proxy.reset()           resets the current connections; new ones work
proxy.delay = 0.01      seconds before each chunk is forwarded
proxy.split = 1         maximum bytes of a chunk
proxy.truncate(1000)    resets the connection after that number of further bytes from the server
await proxy.restore()   restores normal operation, and forwards stalled data
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import pytest

CHUNK = 64 * 1024  # bytes
_LINGER_NOT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


@dataclass(eq=False)
class _Connection:
    """Both halves of one connection through the proxy."""

    writers: list[asyncio.StreamWriter]
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self) -> None:
        for writer in self.writers:
            with suppress(OSError, AttributeError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            writer.transport.abort()


class Proxy:
    def __init__(self, port: int) -> None:
        self.server_port = port
        self.port = 0  # until start()
        self.delay = 0.0
        self.split = CHUNK
        self.accepted = 0  # connections so far
        self.transform: Callable[[bytes], bytes] = lambda piece: piece  # changes bytes of the server
        self._until_reset: int | None = None
        self._stalled = False
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; on the same port again after cut()."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    def dsn(self, dsn: str) -> str:
        """Return the URI with this proxy's address."""
        parts = urlsplit(dsn)
        user = f"{parts.username}@" if parts.username else ""
        return urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{self.port}"))

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()

    def reset(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    def stall(self) -> None:
        self._stalled = True
        self.lose()

    def lose(self) -> None:
        for connection in self._connections:
            connection.flowing.clear()

    def truncate(self, after: int) -> None:
        self._until_reset = after

    async def restore(self) -> None:
        self.delay, self.split, self._until_reset, self._stalled = 0.0, CHUNK, None, False
        for connection in self._connections:
            connection.flowing.set()
        if self._server is None:
            await self.start()

    async def close(self) -> None:
        await self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- carrying -------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        connection = _Connection([writer])
        if not self._stalled:
            connection.flowing.set()
        self._connections.add(connection)
        with suppress(asyncio.CancelledError):  # the end of the test
            try:
                await self._connect(connection, reader, writer)
            except* OSError:  # one side has closed the connection, or the server does not listen
                pass
        connection.reset()
        self._connections.discard(connection)
        self._tasks.discard(task)

    async def _connect(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await connection.flowing.wait()
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.server_port, limit=CHUNK)
        connection.writers.append(to_server)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._carry(connection, reader, to_server, from_the_server=False))
            both.create_task(self._carry(connection, from_server, writer, from_the_server=True))
        for each in connection.writers:
            each.close()
            await each.wait_closed()

    async def _carry(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        from_the_server: bool,
    ) -> None:
        while chunk := await self._read(connection, reader):
            for start in range(0, len(chunk), self.split):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await connection.flowing.wait()
                piece = chunk[start : start + self.split]
                if from_the_server:
                    piece = self.transform(piece)
                if from_the_server and self._until_reset is not None:
                    piece = piece[: self._until_reset]
                    self._until_reset -= len(piece)
                writer.write(piece)
                await writer.drain()
                if from_the_server and self._until_reset == 0:
                    self._until_reset = None
                    raise ConnectionResetError
        await connection.flowing.wait()
        with suppress(OSError):
            writer.write_eof()

    async def _read(self, connection: _Connection, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(CHUNK)
        except OSError:
            await connection.flowing.wait()  # a reset gets lost, too
            raise


class Proxies:
    """All proxies of one test."""

    def __init__(self) -> None:
        self._proxies: list[Proxy] = []

    async def to(self, port: int) -> Proxy:
        """Create a proxy in front of a port of 127.0.0.1."""
        proxy = Proxy(port)
        await proxy.start()
        self._proxies.append(proxy)
        return proxy

    async def close(self) -> None:
        for proxy in self._proxies:
            await proxy.close()


@pytest.fixture
async def proxies() -> AsyncIterator[Proxies]:
    opened = Proxies()
    yield opened
    await opened.close()
