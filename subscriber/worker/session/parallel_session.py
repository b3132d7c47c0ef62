"""Additional sessions of an apply worker on the target, for parallel workers and for `apply_sessions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from subscriber.apply.touched_ranges import TouchedRanges
from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store.workers import WorkerState
from subscriber.errors import ConnectionLost
from subscriber.limited_wait import LimitedWait
from subscriber.subscription import Subscription
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.worker_session import TargetConfig, open_target
from subscriber.worker.context import LauncherContext

_POLL = 0.05  # seconds


def always() -> bool:
    """Return True."""
    return True


@asynccontextmanager
async def parallel_session(
    subscription: Subscription,
    context: LauncherContext,
    leader: PostgresTarget,
    number: int,
    on_conflict: OnConflict,
    touched: TouchedRanges | None,
) -> AsyncIterator[PostgresTarget]:
    """Open a session with its own origin, place and status row. Closed at the end of the block.

    Args:
        subscription: the subscription.
        context: the launcher's context.
        leader: the apply worker's target, which shares its definitions of tables and its progress.
        number: the place (catalog/worker_sessions.py), from 1 and below the OIDs of tables.
        on_conflict: called with each conflict that does not stop the stream.
        touched: the ranges that the worker has recorded. None: the subscription has no track_ranges.

    Raises:
        StaleCatalog: the subscription has been altered, disabled or dropped.
        ConnectionLost: the target cannot be reached, or another session has the place.
    """
    report = context.board.add(subscription.oid, number, "parallel apply")
    try:
        config = TargetConfig(
            context.apply_target,
            f"{subscription.name} parallel {number}",
            subscription,
            number,
            on_conflict,
            context.resolvers,
            batching=not context.settings.one_by_one,
            known_tables=leader.session.known_tables,
            settings=context.settings,
            touched=touched,
            code_changes_session=subscription.oid in context.changed_sessions,
            others_in_progress=always,
        )
        async with open_target(config, context.catalog) as worker:
            report.connected(worker.session.pipeline.session.pid)
            report.led_by(leader.session.pipeline.session.pid)
            report.enter(WorkerState.APPLYING)
            context.board.publish()
            claimed = replace(leader.row_applier.progress.claim, position=leader.position)
            yield await worker.resume(claimed, number=number)
    finally:
        context.board.remove(report)


async def end_earlier_workers(catalog: CatalogConnection, subid: int, timeout: float) -> None:
    """End the parallel sessions of an earlier apply worker, and wait until they have ended.

    Such a backend can still prepare a transaction or hold locks, although no worker reads its results. The caller has
    the apply worker's place (catalog/worker_sessions.py).

    Args:
        catalog: runs the statements.
        subid: OID of the subscription.
        timeout: seconds to wait.

    Raises:
        ConnectionLost: a session has not ended within `timeout` seconds.
    """
    wait = LimitedWait("parallel sessions of an earlier worker to end", timeout)
    while True:
        async with catalog.use() as connection:
            living = await worker_sessions.living(connection, subid)
            earlier = {
                number: pid for number, pid in living.items() if 0 < number < worker_sessions.FIRST_RANGE_SESSION
            }
            for number in earlier:
                await worker_sessions.terminate(connection, subid, number)
        if not earlier:
            return
        if wait.is_over:
            backends = ", ".join(map(str, earlier.values()))
            raise ConnectionLost(f"backends of an earlier worker of this subscription do not end: {backends}")
        await wait.pause(_POLL)
