"""Opening the target session of a worker: its place, its progress record, and its origin.

The order matters. The session is registered for its place first: while a session that was believed dead still has the
place, that session's backend may still prepare a transaction, so it is ended and waited for. Only then is the
progress record claimed, which no other session can move after that. Last, the origin is put where the record is,
and bound.

The catalog session registers and claims; the session that applies changes needs no privilege for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from types import MappingProxyType

import anyio
import asyncpg

from subscriber import telemetry
from subscriber.apply.progress import ProgressClaim
from subscriber.catalog import progress_records, replication_names, store, worker_sessions
from subscriber.catalog.connection import KEEPALIVE, CatalogConnection
from subscriber.catalog.worker_sessions import Backend
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ConnectionLost, StaleCatalog, SubscriberError
from subscriber.failpoints import Point, reach
from subscriber.subscription import Subscription
from subscriber.targets.postgres.batch_applier import BatchingTarget
from subscriber.targets.postgres.conflicts import unique_violation
from subscriber.targets.postgres.conflicts.resolution import Resolver
from subscriber.targets.postgres.row_applier import PostgresTarget
from subscriber.targets.postgres.session.capabilities import detect_capabilities
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.worker.session import conflicts

PLACE_PATIENCE = 2.0  # seconds to wait for a dead worker's backend before ending it
PLACE_TIMEOUT = 30.0  # seconds after which the attempt is given up
POLL = 0.05  # seconds

_BACKEND = """
SELECT a.pid, pg_catalog.date_part('epoch', a.backend_start), a.usesysid
  FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid()
"""


@asynccontextmanager
async def open_target(
    conninfo: str,
    catalog: CatalogConnection,
    name: str,
    subid: int,
    relid: int,
    on_conflict: OnConflict,
    subscription: Subscription,
    resolvers: Mapping[str, Resolver] = MappingProxyType({}),
    *,
    batching: bool = False,
) -> AsyncIterator[BatchingTarget]:
    """The target session of one worker, registered and configured; dropped at the end of the block.

    Args:
        relid: the place, see catalog/worker_sessions.py; 0 is the apply worker.
        resolvers: functions for the subscription's conflict_policy.
        batching: allows the set-based path.

    The session is not bound to an origin yet: see resume().
    """
    session = await open_session(conninfo, application_name=f"subscriber: {name}", settings=KEEPALIVE)
    try:
        means = await detect_capabilities(session)
        origin = replication_names.table_sync_origin(subid, relid) if relid else replication_names.apply_origin(subid)
        target = BatchingTarget(session, origin, on_conflict)
        target.capabilities = means
        # Ordinary triggers, which run without the replica role, are not looked for.
        target.passing = lambda where: reach(Point[where], target.pipeline.flush)
        target.batching = batching and means.replica_role
        await acquire_lock_and_role(target, catalog, relid, subscription, resolvers, on_conflict)
        await target.configure(subscription.synchronous_commit)
        yield target
    finally:
        session.abort()


async def acquire_lock_and_role(
    target: PostgresTarget,
    catalog: CatalogConnection,
    relid: int,
    subscription: Subscription,
    resolvers: Mapping[str, Resolver],
    on_conflict: OnConflict,
) -> None:
    """Give the session its place, and have it act as the subscription says.

    Raises StaleCatalog if the subscription has been altered, disabled or dropped.
    """
    subid = subscription.oid
    await _register(target.pipeline, catalog, subid, relid)
    async with catalog.use() as connection:
        found = await store.load_subscription(connection, subid)
    if found is None or not found.enabled:
        raise StaleCatalog("the subscription was disabled or dropped meanwhile")
    if found.generation != subscription.generation:
        raise StaleCatalog("the subscription was altered meanwhile")
    await target.roles.subscribe(subscription, replica_role=target.capabilities.replica_role)
    conflicts.configure_conflict_policy(target, subscription, resolvers, on_conflict)


async def backend_of(pipeline: Pipeline) -> Backend:
    """The backend behind `pipeline`."""
    ((pid, started, role),) = await pipeline.rows(_BACKEND)
    return Backend(int(pid or 0), datetime.fromtimestamp(float(started or 0)).astimezone(), int(role or 0))


async def _register(pipeline: Pipeline, catalog: CatalogConnection, subid: int, relid: int) -> None:
    backend, waited = await backend_of(pipeline), 0.0
    pipeline.session.pid = backend.pid  # a connection pooler makes up the one that it announces
    while (holder := await _try_register(catalog, subid, relid, backend)) is not None:
        if waited >= PLACE_TIMEOUT:
            raise ConnectionLost(
                "another worker of this subscription is still connected to the target",
                detail=f"Its backend is {holder}, which does not end.",
            )
        if waited >= PLACE_PATIENCE:
            async with catalog.use() as connection:
                if await worker_sessions.terminate(connection, subid, relid):
                    what = f"ended backend {holder} of an earlier worker that was still connected"
                    telemetry.log(telemetry.WARNING, what)
        await anyio.sleep(POLL)
        waited += POLL


async def _try_register(catalog: CatalogConnection, subid: int, relid: int, backend: Backend) -> int | None:
    """The process ID of the session that has the place; None once it is the backend's."""
    async with catalog.use() as connection:
        try:
            return await worker_sessions.register(connection, subid, relid, backend)
        except (asyncpg.UndefinedObjectError, asyncpg.LockNotAvailableError) as error:
            raise StaleCatalog("a statement is changing the subscription", detail=str(error)) from error


async def claim(catalog: CatalogConnection, subscription: Subscription, relid: int) -> ProgressClaim | None:
    """Take over the progress record of a worker; None if there is none."""
    async with catalog.use() as connection:
        return await progress_records.claim(connection, subscription.oid, relid, generation=subscription.generation)


async def resume_progress(target: PostgresTarget, claimed: ProgressClaim, *, number: int = 0) -> None:
    """Bind the origin, if there are any, repaired to where the record is, and continue from `claimed`.

    `number` is that of a further session of an apply worker, 0 the worker's own.
    """
    pipeline = target.pipeline
    with_origin = target.capabilities.origins
    origin_id: str | None = None
    progress = ProgressRecord(claimed, with_origin=with_origin)
    if with_origin:
        ((origin_id,),) = await pipeline.rows("SELECT subscriber.bind_origin($1, $2, $3)", *progress.shown, str(number))
    tracked = await unique_violation.tracks_commit_times(pipeline)
    conflicts.require_commit_times(target, tracked=tracked, with_origin=with_origin)
    target.resume(progress, int(origin_id) if tracked and origin_id is not None else None)


@asynccontextmanager
async def with_origin(target: PostgresTarget, claimed: ProgressClaim) -> AsyncIterator[None]:
    """Within the block the session's writes carry its origin, before there is a position to resume() from."""
    if not target.capabilities.origins:
        yield
        return
    shown = ProgressRecord(claimed, with_origin=True).shown
    await target.pipeline.rows("SELECT subscriber.bind_origin($1, $2, 0)", *shown)
    yield  # after an error the session is dropped, and its origin free
    await release_origin(target)


async def release_origin(target: PostgresTarget) -> None:
    """Let go of the origin that resume() has bound, if there are any; nothing is in flight."""
    if target.capabilities.origins:
        await target.pipeline.rows("SELECT subscriber.release_origin()")


async def with_context(
    error: SubscriberError, target: PostgresTarget, conninfo: str, catalog: CatalogConnection
) -> SubscriberError:
    """The error of an apply loop with its CONTEXT; of a unique violation, the conflict that it is."""
    return await conflicts.conflict_from_error(target.explain(error), target, conninfo, catalog)
