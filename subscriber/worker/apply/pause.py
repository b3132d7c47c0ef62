"""PauseGate: keeps the apply worker at a position while another session takes a snapshot of the target.

This is the apply worker's side of catalog/pause_requests.py. During a pause the other tasks of the worker continue:
keepalives are answered, and the stream is read until the queue is full.

Failure cases.

- Worker ends or is killed during a pause: the next worker finds the request in the catalog and pauses at the same
  position.
- Session that requested the pause ends without a release: the worker checks this every PATIENCE seconds. It removes the
  request and resumes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from subscriber.catalog import pause_requests
from subscriber.catalog.connection import CatalogConnection
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn

PATIENCE = 1.0  # seconds between two checks whether the session that requested the pause exists


class PauseGate:
    """The pause of one subscription's apply worker."""

    def __init__(self, catalog: CatalogConnection, subid: int) -> None:
        self._catalog = catalog
        self._subid = subid
        self._stop_at: Lsn | None = None
        self._changed = anyio.Event()

    def load(self, found: pause_requests.PauseRequest | None) -> None:
        """Take over the request that the catalog has. None: there is none."""
        stop_at = found.stop_at if found is not None else None
        if stop_at != self._stop_at:
            self._stop_at = stop_at
            event, self._changed = self._changed, anyio.Event()
            event.set()

    def is_due(self, position: Lsn) -> bool:
        """Return True if wait_if_paused() would wait at `position`."""
        return self._stop_at is not None and position >= self._stop_at

    async def wait_if_paused(self, position: Lsn, settle: Callable[[], Awaitable[None]]) -> None:
        """Wait until no request keeps the worker from advancing to `position`.

        Args:
            position: the end of the transaction that the worker is about to apply, or its position between two.
            settle: waits until all applied transactions are committed. Called before the request is acknowledged.
        """
        while (stop_at := self._stop_at) is not None and position >= stop_at:
            changed = self._changed
            await settle()
            await reached(Point.PAUSE_SETTLED)
            async with self._catalog.use() as connection:
                await pause_requests.acknowledge(connection, self._subid, stop_at, position)
            with anyio.move_on_after(PATIENCE):
                await changed.wait()
                continue
            async with self._catalog.use() as connection:
                if await pause_requests.requester_is_gone(connection, self._subid):
                    await pause_requests.release(connection, self._subid)
                    self.load(None)
