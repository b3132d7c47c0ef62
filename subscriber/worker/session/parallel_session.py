"""Open an additional session of an apply worker on the target, for a parallel worker or for `apply_sessions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from subscriber.subscription import Subscription
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.context import LauncherContext
from subscriber.worker.session.apply_session import TargetConfig, open_target, resume_progress


@asynccontextmanager
async def parallel_session(
    subscription: Subscription, context: LauncherContext, leader: PostgresTarget, number: int, on_conflict: OnConflict
) -> AsyncIterator[PostgresTarget]:
    """Open a session with its own origin, place and status row. Closed at the end of the block.

    Args:
        subscription: the subscription.
        context: the launcher's context.
        leader: the apply worker's target, which shares its definitions of tables and its progress.
        number: the place (catalog/worker_sessions.py), from 1 and below the OIDs of tables.
        on_conflict: called with each conflict that does not stop the stream.

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
            known_tables=leader.rows.known_tables,
            settings=context.settings,
            touched=leader.rows.touched,
            code_changes_session=subscription.oid in context.changed_sessions,
        )
        async with open_target(config, context.catalog) as target:
            report.status.pid = target.rows.pipeline.session.pid
            report.status.leader_pid = leader.rows.pipeline.session.pid
            report.status.state = "applying"
            context.board.publish()
            claimed = replace(leader.rows.progress.claim, position=leader.position)
            target.rows.others_in_progress = lambda: True
            await resume_progress(target.rows, claimed, number=number)
            yield target
    finally:
        context.board.remove(report)
