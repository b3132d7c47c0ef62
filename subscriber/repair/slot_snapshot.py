"""SlotSnapshot: both sides of a table at the position of a new slot, while nothing applies its changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from subscriber.catalog.connection import CatalogConnection
from subscriber.comparison.consistent_snapshot import CommonSnapshot, begin_snapshot, open_side
from subscriber.connection.session import Session
from subscriber.lsn import Lsn
from subscriber.subscription import Subscription


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """The snapshot that a new slot has exported, while the target stands at the slot's position."""

    lsn: Lsn
    name: str

    @asynccontextmanager
    async def take(
        self, _catalog: CatalogConnection, target: str, subscription: Subscription
    ) -> AsyncIterator[CommonSnapshot]:
        """Take the snapshot of both sides, see common_snapshot()."""
        async with AsyncExitStack() as stack:
            source = await open_side(stack, subscription.conninfo, must_use_password=subscription.must_use_password)
            local = await open_side(stack, target)
            exported = await begin_snapshot(source, self.name)
            yield CommonSnapshot(self.lsn, exported, await begin_snapshot(local), source, local)

    @asynccontextmanager
    async def pause(
        self, _catalog: CatalogConnection, _subscription: Subscription, session: Session
    ) -> AsyncIterator[tuple[Lsn, str]]:
        """Begin a transaction with the snapshot, see paused_worker(). There is no worker to pause."""
        yield self.lsn, await begin_snapshot(session, self.name)
