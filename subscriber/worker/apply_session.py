"""Opening the target session of a worker: its lock, its origin, and the position to go on from.

The order matters. The advisory lock comes first: while a session that was believed dead still holds it,
that session's backend may still commit, so it is ended and waited for. Only then is the progress row
read; and before that, everything committed is flushed, because the publisher is going to be told that
it is durable. Last, the origin is put where the row is, and bound.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import anyio

from subscriber import telemetry
from subscriber.catalog import locks, origins
from subscriber.catalog.session import KEEPALIVE
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ConnectionLost, StaleCatalog, SubscriberError
from subscriber.lsn import Lsn
from subscriber.subscription import Subscription
from subscriber.target import unique_conflicts
from subscriber.target.batch import BatchingTarget
from subscriber.target.means import find_means
from subscriber.target.note import OnConflict
from subscriber.target.postgres import PostgresTarget
from subscriber.target.progress import ProgressRow
from subscriber.target.resolving import Resolver
from subscriber.worker import conflicts
from subscriber.worker.failpoints import Point, reach
from subscriber.worker.flush import FLUSH

ONE_BY_ONE = "SUBSCRIBER_ONE_BY_ONE"  # in the environment, not empty: nothing is applied set-based

LOCK_PATIENCE = 2.0  # seconds to wait for a dead worker's backend before ending it
LOCK_TIMEOUT = 30.0  # seconds after which the attempt is given up
POLL = 0.05  # seconds

# Only workers are ended: a statement that holds the lock, to drop the subscription, is waited for.
_END_HOLDER = """
SELECT l.pid, pg_catalog.pg_terminate_backend(l.pid)
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND a.datname = pg_catalog.current_database()
   AND l.database = a.datid AND a.application_name LIKE 'subscriber: %'
   AND l.classid::bigint = $1::text::bigint & 4294967295 AND l.objid::bigint = $2::text::bigint & 4294967295
"""
_TRY_LOCK = "SELECT pg_catalog.pg_try_advisory_lock($1::text::int4, $2::text::int4)"
_IS_ENABLED = "SELECT subenabled FROM subscriber.subscription WHERE subid = $1::text::oid"
_READ_PROGRESS = """
SELECT remote_lsn, system_id FROM subscriber.progress WHERE subid = $1::text::oid AND relid = $2::text::oid
"""


@asynccontextmanager
async def open_target(
    conninfo: str,
    name: str,
    subid: int,
    relid: int,
    on_conflict: OnConflict,
    synchronous_commit: str,
    subscription: Subscription | None = None,
    resolvers: Mapping[str, Resolver] = MappingProxyType({}),
    *,
    batching: bool = False,
) -> AsyncIterator[BatchingTarget]:
    """The target session of one worker, locked and configured; dropped at the end of the block.

    `relid` 0 is the apply worker. Without a `subscription` everything is done as the session's own role. The
    session is not bound to an origin yet: see resume(). `resolvers` are functions for its conflict_policy;
    `batching` allows the set-based path.
    """
    session = await open_session(conninfo, application_name=f"subscriber: {name}", settings=KEEPALIVE)
    try:
        means = await find_means(session)
        origin = origins.table_sync_origin(subid, relid) if relid else origins.apply_origin(subid)
        target = BatchingTarget(session, origin, on_conflict)
        target.means = means
        # Ordinary triggers, which run without the replica role, are not looked for.
        target.passing = lambda where: reach(Point[where], target.pipeline.flush)
        target.batching = batching and means.replica_role and not os.environ.get(ONE_BY_ONE)
        key = locks.table_sync_key(subid, relid) if relid else locks.apply_worker_key(subid)
        await take_up(target, key, subid, subscription, resolvers, on_conflict)
        await target.configure(synchronous_commit)
        yield target
    finally:
        session.abort()


async def take_up(
    target: PostgresTarget,
    key: tuple[int, int],
    subid: int,
    subscription: Subscription | None,
    resolvers: Mapping[str, Resolver],
    on_conflict: OnConflict,
) -> None:
    """Lock what the session is to work on, by its `key`, and have it act as the subscription says, if there is one.

    Raises StaleCatalog if the subscription has been disabled.
    """
    await _lock(target.pipeline, key)
    if await target.pipeline.rows(_IS_ENABLED, str(subid)) != [("t",)]:
        raise StaleCatalog("the subscription was disabled or dropped meanwhile")
    if subscription is not None:
        await target.acting.subscribe(subscription.owner, run_as_owner=subscription.run_as_owner)
        conflicts.obey(target, subscription, resolvers, on_conflict)


async def _lock(pipeline: Pipeline, key: tuple[int, int]) -> None:
    values = (str(key[0]), str(key[1]))
    waited = 0.0
    while (await pipeline.rows(_TRY_LOCK, *values))[0][0] != "t":
        if waited >= LOCK_TIMEOUT:
            raise ConnectionLost("another worker of this subscription is still connected to the target")
        if waited >= LOCK_PATIENCE:
            for pid, _ in await pipeline.rows(_END_HOLDER, *values):
                telemetry.log(telemetry.WARNING, f"ended backend {pid} of an earlier worker that was still connected")
        await anyio.sleep(POLL)
        waited += POLL


async def read_progress(pipeline: Pipeline, subid: int, relid: int) -> tuple[Lsn, str | None] | None:
    """(position, the publisher's system identifier) as durable on the target; None: there is no row."""
    await pipeline.rows("SELECT pg_catalog.set_config('synchronous_commit', 'on', false)")
    await pipeline.rows(FLUSH)
    rows = await pipeline.rows(_READ_PROGRESS, str(subid), str(relid))
    if not rows:
        return None
    return Lsn.parse(rows[0][0] or "0/0"), rows[0][1]


async def resume(target: PostgresTarget, subid: int, relid: int, position: Lsn, synchronous_commit: str) -> None:
    """Bind the origin, if there are any, repaired to what the progress row says, and go on from `position`."""
    pipeline = target.pipeline
    with_origin = target.means.origins
    origin_id: str | None = None
    if with_origin:
        ((origin_id,),) = await pipeline.rows(origins.CREATE, target.origin)
        await _bind_origin(pipeline, target.origin, position)
    await pipeline.rows("SELECT pg_catalog.set_config('synchronous_commit', $1, false)", synchronous_commit)
    tracked = await unique_conflicts.tracks_commit_times(pipeline)
    conflicts.require_commit_times(target, tracked=tracked, with_origin=with_origin)
    progress = ProgressRow(subid, relid, position, with_origin=with_origin)
    target.resume(progress, int(origin_id) if tracked and origin_id is not None else None)


@asynccontextmanager
async def tagged(target: PostgresTarget) -> AsyncIterator[None]:
    """Within the block what the session writes carries its origin, before there is a position to resume() from."""
    if not target.means.origins:
        yield
        return
    await target.pipeline.rows("SELECT pg_catalog.pg_replication_origin_session_setup($1)", target.origin)
    yield  # after an error the session is dropped, and its origin free
    await unbind(target)


async def unbind(target: PostgresTarget) -> None:
    """Let go of the origin that resume() has bound, if there are any; nothing is under way."""
    if target.means.origins:
        await target.pipeline.rows("SELECT pg_catalog.pg_replication_origin_session_reset()")


async def _bind_origin(pipeline: Pipeline, name: str, position: Lsn) -> None:
    rows = await pipeline.rows("SELECT pg_catalog.pg_replication_origin_progress($1, false)", name)
    if Lsn.parse(rows[0][0] or "0/0") != position:
        await pipeline.rows(
            "SELECT pg_catalog.pg_replication_origin_advance($1, $2::text::pg_lsn)", name, str(position)
        )
    await pipeline.rows("SELECT pg_catalog.pg_replication_origin_session_setup($1)", name)


async def explained(error: SubscriberError, target: PostgresTarget, conninfo: str) -> SubscriberError:
    """The error of an apply loop with its CONTEXT; of a unique violation, the conflict that it is."""
    return await conflicts.refused(target.explain(error), target, conninfo)
