"""ApplySessions: opens the additional sessions of an apply worker for `apply_sessions` above 1.

targets/postgres/in_flight_batches.py distributes batches among them.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio

from subscriber import names, telemetry
from subscriber.apply.touched_ranges import TouchedRanges
from subscriber.catalog import origins
from subscriber.errors import SubscriberError
from subscriber.subscription import MAX_APPLY_SESSIONS, Subscription
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.context import LauncherContext
from subscriber.worker.session.parallel_session import parallel_session

# Number of the first additional session. Sessions of parallel workers have numbers from 1 to 1024.
FIRST = 8193


class ApplySessions:
    """The additional sessions of one apply worker. `leader` has the worker's own session."""

    def __init__(
        self,
        subscription: Subscription,
        context: LauncherContext,
        leader: PostgresTarget,
        on_conflict: OnConflict,
        touched: TouchedRanges | None,
    ) -> None:
        self._subscription = subscription
        self._context = context
        self._leader = leader
        self._on_conflict = on_conflict
        self._touched = touched

    async def run(self) -> None:
        """Open the sessions and keep them open until canceled.

        A session that cannot be opened is logged, and the worker continues with fewer sessions. None is opened if the
        target does not support batches, or conflicts are decided in commit order.

        Raises:
            SubscriberError: an open session has failed.
        """
        subscription = self._subscription
        further = subscription.apply_sessions - 1
        await self._drop_origins(further)
        if not further or not self._leader.batching or subscription.decides_conflicts:
            return  # the worker applies no batches
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            for number in range(FIRST, FIRST + further):
                session = parallel_session(
                    subscription, self._context, self._leader, number, self._on_conflict, self._touched
                )
                try:
                    target = await stack.enter_async_context(session)
                except SubscriberError as error:
                    telemetry.log(
                        telemetry.WARNING,
                        f"transactions are applied in {number - FIRST + 1} sessions instead of {further + 1}",
                        detail=error.message,
                        hint="Sessions need max_connections, and their origins max_active_replication_origins, which is"
                        " max_replication_slots before PostgreSQL 18.",
                        event="apply_sessions.fewer",
                    )
                    return
                tasks.start_soon(target.watch)
                self._leader.join(target)
            await anyio.sleep_forever()

    async def _drop_origins(self, further: int) -> None:
        """Drop the origins of sessions beyond `further`, which an earlier setting had. Servers allow few origins."""
        subid = self._subscription.oid
        numbers = range(FIRST + further, FIRST + MAX_APPLY_SESSIONS - 1)
        gone = {names.table_sync_origin(subid, number) for number in numbers}
        async with self._context.catalog.use() as connection:
            for name in gone.intersection(await origins.find_origins(connection, subid)):
                await origins.drop_origin(connection, name, missing_ok=True)
