"""Making commits durable without making each one wait for the disk.

Apply sessions commit with synchronous_commit = off. What they have committed becomes durable at the next
flush of the target's WAL, which one connection of the launcher forces for all workers: it commits a
record of its own synchronously, and everything written before it is on disk then too (and on the
target's synchronous standbys, if it has some). Requests that come while a flush is under way share the next one.
"""

from __future__ import annotations

import anyio

from subscriber.catalog.connection import CatalogConnection
from subscriber.publisher.own_schema import MESSAGE_PREFIX
from subscriber.settings import DEFAULTS

FLUSH = f"SELECT pg_catalog.pg_logical_emit_message(true, '{MESSAGE_PREFIX}', '')"


class Flusher:
    def __init__(self, catalog: CatalogConnection, interval: float = DEFAULTS.flush_interval) -> None:
        """`interval`: the shortest time between two flushes, in seconds."""
        self._catalog = catalog
        self._interval = interval
        self._wanted = anyio.Event()
        self._done = anyio.Event()

    async def flush(self) -> None:
        """Return when everything committed on the target before this call is durable."""
        done = self._done
        self._wanted.set()
        await done.wait()

    async def run(self) -> None:
        """The task behind flush()."""
        while True:
            await self._wanted.wait()
            self._wanted, waiting, self._done = anyio.Event(), self._done, anyio.Event()
            async with self._catalog.use() as connection:
                await connection.execute(FLUSH)
            waiting.set()
            await anyio.sleep(self._interval)
