"""A proxy that holds back a walsender's changes until all have arrived, and then forwards them together.

A walsender is slower than the programs that read from it here. They wait for small pieces, and a measurement would show
mostly this waiting. Behind the proxy they read at full speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

QUIET = 1.0  # seconds without data from the walsender: it has sent everything
CHUNK = 1024 * 1024  # bytes


@asynccontextmanager
async def dammed(port: int) -> AsyncIterator[int]:
    """Run a proxy in front of `port` of this machine. Returns its own port."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above_reader, above_writer = await asyncio.open_connection("127.0.0.1", port)
        started = asyncio.Event()

        async def up() -> None:
            while data := await reader.read(CHUNK):
                if b"START_REPLICATION" in data:
                    started.set()
                above_writer.write(data)
                await above_writer.drain()
            above_writer.close()

        async def down() -> None:
            kept: list[bytes] = []
            opened = False
            while True:
                try:
                    async with asyncio.timeout(QUIET if kept else None):
                        data = await above_reader.read(CHUNK)
                except TimeoutError:
                    opened = True
                    data = b"".join(kept)
                    kept.clear()
                if not data:
                    break
                if started.is_set() and not opened:
                    kept.append(data)
                else:
                    writer.write(data)
                    await writer.drain()
            writer.close()

        with suppress(OSError, ExceptionGroup):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(up)
                tasks.start_soon(down)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=CHUNK)
    async with server:
        yield server.sockets[0].getsockname()[1]
