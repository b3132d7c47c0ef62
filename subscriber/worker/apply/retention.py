"""Forgets deleted rows that the target remembers for retain_dead_tuples.

Purpose. A deleted row matters as long as the publisher may send a change that was made without knowledge of the
deletion. Each worker of such a subscription finds out up to which transaction of the target it needs no deletions. The
deletions that no subscription needs are removed.

Invariants. The worker takes four steps, and repeats them in each round:

1. It takes a snapshot of the target: a transaction before which all have ended, and a WAL position after their commits.
2. It waits until all logical slots of the target's database have confirmed that position. If the publisher subscribes
   to the target, it has applied the deletions then, and its later changes know of them.
3. It reads the publisher's WAL position. All changes without that knowledge are before it.
4. It waits until everything up to that position is durable on the target.

Failure cases.

- Worker killed at any step: the next one begins with the first step. Deletions are removed later.
- Slot of the target that does not advance: deletions are kept, as the slot keeps WAL. With max_retention_duration, they
  are removed when they are too old. The worker logs that, and pg_subscription.subretentionactive is false until its
  steps have passed the removed deletions.
- Target crashed: the limits are lost and found again. The deletions are restored from their large objects.

Source: the phases in maybe_advance_nonremovable_xid() in worker.c of PostgreSQL 19, which asks the publisher for its
transactions, and does not wait for subscribers of the target.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from subscriber import telemetry
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import retention
from subscriber.catalog.store.retention import Forgotten, Snapshot
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.subscription import Subscription


class Retention:
    """The deleted rows that one subscription needs."""

    def __init__(
        self,
        subscription: Subscription,
        catalog: CatalogConnection,
        published: Callable[[], Awaitable[Lsn]],
        durable: Callable[[], Lsn],
    ) -> None:
        """Create the task.

        Args:
            subscription: has retain_dead_tuples.
            catalog: runs the statements.
            published: reads the publisher's WAL position.
            durable: returns the position up to which everything is durable on the target.
        """
        self._subscription = subscription
        self._catalog = catalog
        self._published = published
        self._durable = durable
        self._snapshot: Snapshot | None = None  # None: the next step is the first
        self._end: Lsn | None = None  # the publisher's position of step 3; None: it is not read
        self._active = True
        self._reported: set[str] = set()  # problems that have been logged

    async def run(self, interval: float) -> None:
        """Take the steps once in each `interval`, in seconds, until canceled."""
        async with self._catalog.use() as connection:
            await retention.restore_deletes(connection)
        while True:
            await self._set_triggers()
            await self._step()
            await anyio.sleep(interval)

    async def _set_triggers(self) -> None:
        """Repair the triggers: a table may have a new key, a new partition, or another subscription."""
        async with self._catalog.use() as connection:
            problems = await retention.set_delete_triggers(connection)
        for problem, hint in problems:
            if problem not in self._reported:
                telemetry.log(telemetry.WARNING, problem, hint=hint, event="retention.failed")
        self._reported = {problem for problem, _ in problems}

    async def _step(self) -> None:
        """Take the steps that are possible now."""
        subid = self._subscription.oid
        async with self._catalog.use() as connection:
            snapshot = self._snapshot = self._snapshot or await retention.take_snapshot(connection)
            confirmed = self._end is not None or await retention.is_confirmed(connection, snapshot.position)
        if confirmed and self._end is None:
            try:
                self._end = await self._published()
            except SubscriberError as error:
                telemetry.log(
                    telemetry.WARNING,
                    f'deleted rows of subscription "{self._subscription.name}" cannot be forgotten now',
                    detail=str(error),
                    event="retention.failed",
                )
        reached = self._end is not None and self._durable() >= self._end
        removed = None
        while removed is None or removed.unneeded or removed.expired:
            async with self._catalog.use() as connection:
                if reached:
                    await retention.set_retention(connection, subid, snapshot.horizon)
                removed = await retention.forget_deletes(connection, subid)
            self._report(removed)
        if reached:
            self._snapshot = self._end = None

    def _report(self, removed: Forgotten) -> None:
        if removed.unneeded or removed.expired:
            total = removed.unneeded + removed.expired
            telemetry.log(telemetry.DEBUG, f"forgot {total} deleted rows", event="retention.forgot")
        if removed.active == self._active:
            return
        self._active = removed.active
        worker = f'logical replication worker for subscription "{self._subscription.name}"'
        if removed.active:
            telemetry.log(
                telemetry.LOG,
                f"{worker} will resume retaining the information for detecting conflicts",
                detail="Retention is re-enabled because the apply process has caught up with the publisher within the"
                " configured max_retention_duration.",
                event="retention.resumed",
            )
        else:
            telemetry.log(
                telemetry.LOG,
                f"{worker} has stopped retaining the information for detecting conflicts",
                detail="Retention is stopped because the apply process has not caught up with the publisher within the"
                " configured max_retention_duration.",
                event="retention.stopped",
            )
