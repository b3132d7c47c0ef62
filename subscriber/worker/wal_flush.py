"""Flusher: flushes the target's WAL for all workers, so that their commits need not wait for the disk.

Apply sessions commit with synchronous_commit = off. One connection of the launcher commits a logical message
synchronously. Then all earlier WAL is on disk, too, and on synchronous standbys of the target. Requests that arrive
during a flush share the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from subscriber.catalog.connection import CatalogConnection
from subscriber.publisher.own_schema import MESSAGE_PREFIX
from subscriber.settings import DEFAULTS
from subscriber.subscription import Subscription

FLUSH = f"SELECT pg_catalog.pg_logical_emit_message(true, '{MESSAGE_PREFIX}', '')"


class Flusher:
    """Flushes the WAL of one target."""

    def __init__(self, catalog: CatalogConnection, interval: float = DEFAULTS.flush_interval) -> None:
        """Create a flusher.

        Args:
            catalog: a session that is used for flushes only, because a flush may wait for the disk.
            interval: seconds between two flushes, at least.
        """
        self._catalog = catalog
        self._interval = interval
        self._wanted = anyio.Event()
        self._done = anyio.Event()

    async def flush(self) -> None:
        """Wait until everything that was committed on the target before this call is durable."""
        done = self._done
        self._wanted.set()
        await done.wait()

    async def run(self) -> None:
        """Run requested flushes until canceled."""
        while True:
            await self._wanted.wait()
            self._wanted, waiting, self._done = anyio.Event(), self._done, anyio.Event()
            async with self._catalog.use() as connection:
                await connection.execute(FLUSH)
            waiting.set()
            await anyio.sleep(self._interval)


def flush_for(subscription: Subscription, flusher: Flusher) -> Callable[[], Awaitable[None]] | None:
    """Return the function that makes commits durable. None: they are durable when the target acknowledges them."""
    return flusher.flush if subscription.synchronous_commit == "off" else None
