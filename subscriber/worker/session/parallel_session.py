"""A further session of an apply worker on the target: of a parallel worker, or one of its apply_sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from subscriber.subscription import Subscription
from subscriber.targets.postgres.batch_applier import BatchingTarget
from subscriber.targets.postgres.row_applier import PostgresTarget
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.worker.context import LauncherContext
from subscriber.worker.session.apply_session import open_target, resume_progress


@asynccontextmanager
async def parallel_session(
    subscription: Subscription, context: LauncherContext, leader: PostgresTarget, number: int, on_conflict: OnConflict
) -> AsyncIterator[BatchingTarget]:
    """With an origin and a place of its own, by `number` (from 1, below any OID), and its row for the views."""
    report = context.board.add(subscription.oid, number, "parallel apply")
    try:
        async with open_target(
            context.apply_target,
            context.catalog,
            f"{subscription.name} parallel {number}",
            subscription.oid,
            number,
            on_conflict,
            subscription,
            context.resolvers,
            batching=not context.settings.one_by_one,
        ) as target:
            target.known_tables = leader.known_tables
            report.status.pid = target.pipeline.session.pid
            report.status.leader_pid = leader.pipeline.session.pid
            report.status.state = "applying"
            context.board.publish()
            claimed = replace(leader.progress.claim, position=leader.position)
            await resume_progress(target, claimed, number=number)
            yield target
    finally:
        context.board.remove(report)
