"""The apply worker's side of catalog/pause_requests.py: it stays at a position for a snapshot of the target.

Everything else goes on meanwhile: keepalives are answered, the stream is read until its queue is full. Nothing depends
on the worker being held. If it ends, or is killed, the next one finds the row and stops at the same place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from subscriber.catalog import pause_requests
from subscriber.catalog.connection import CatalogConnection
from subscriber.lsn import Lsn

PATIENCE = 1.0  # seconds between two looks whether whoever asked is still there


class PauseGate:
    def __init__(self, catalog: CatalogConnection, subid: int) -> None:
        self._catalog = catalog
        self._subid = subid
        self._stop_at: Lsn | None = None
        self._changed = anyio.Event()

    def load(self, found: pause_requests.PauseRequest | None) -> None:
        """Take over what the catalog says."""
        stop_at = found.stop_at if found is not None else None
        if stop_at != self._stop_at:
            self._stop_at = stop_at
            event, self._changed = self._changed, anyio.Event()
            event.set()

    def is_due(self, position: Lsn) -> bool:
        """Whether stay() would not return at once."""
        return self._stop_at is not None and position >= self._stop_at

    async def wait_if_paused(self, position: Lsn, settle: Callable[[], Awaitable[None]]) -> None:
        """Called where the worker may go on to `position`: return when nobody wants it to stay before that."""
        while (stop_at := self._stop_at) is not None and position >= stop_at:
            changed = self._changed
            await settle()
            async with self._catalog.use() as connection:
                await pause_requests.acknowledge(connection, self._subid, stop_at, position)
            with anyio.move_on_after(PATIENCE):
                await changed.wait()
                continue
            async with self._catalog.use() as connection:
                if await pause_requests.requester_is_gone(connection, self._subid):
                    await pause_requests.release(connection, self._subid)
                    self.load(None)
