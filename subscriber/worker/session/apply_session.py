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
from dataclasses import dataclass, field
from datetime import datetime

import anyio
import asyncpg

from subscriber import telemetry
from subscriber.apply.progress import ProgressClaim
from subscriber.catalog import names, worker_sessions
from subscriber.catalog.connection import KEEPALIVE, CatalogConnection
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscriptions import load_subscription
from subscriber.catalog.worker_sessions import Backend
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ConnectionLost, StaleCatalog, SubscriberError
from subscriber.settings import DEFAULTS, Settings
from subscriber.subscription import Subscription
from subscriber.targets.postgres.conflicts import unique_violation
from subscriber.targets.postgres.conflicts.resolution import Resolver
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.capabilities import TargetCapabilities, detect_capabilities
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.session import conflicts

POLL = 0.05  # seconds

_BACKEND = """
SELECT a.pid, pg_catalog.date_part('epoch', a.backend_start), a.usesysid
  FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid()
"""


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """What makes one worker's session on the target."""

    conninfo: str = field(repr=False)
    name: str  # of the worker, in application_name
    subscription: Subscription
    number: int  # its place, see catalog/worker_sessions.py; 0 is the apply worker
    on_conflict: OnConflict
    resolvers: Mapping[str, Resolver] = field(default_factory=dict)  # functions for the subscription's conflict_policy
    batching: bool = False  # allows batches, where the target can have them
    known_tables: KnownTables = field(default_factory=KnownTables)
    settings: Settings = DEFAULTS

    @property
    def origin(self) -> str:
        """The name of its replication origin."""
        subid = self.subscription.oid
        if not self.number:
            return names.apply_origin(subid)
        return names.table_sync_origin(subid, self.number)


@asynccontextmanager
async def open_target(config: TargetConfig, catalog: CatalogConnection) -> AsyncIterator[PostgresTarget]:
    """Open one worker's target: connected, registered for its place, and configured. Closed at the end of the block.

    The session is bound to no origin yet: see resume_progress().

    Raises:
        StaleCatalog: the subscription has been altered, disabled or dropped.
        ConnectionLost: the target is away, or another worker has the place.
    """
    name = f"subscriber: {config.name}"
    session = await open_session(config.conninfo, application_name=name, settings=KEEPALIVE)
    try:
        capabilities = await detect_capabilities(session)
        yield await make_target(config, catalog, Pipeline(session), capabilities)
    finally:
        session.abort()


async def make_target(
    config: TargetConfig, catalog: CatalogConnection, pipeline: Pipeline, capabilities: TargetCapabilities
) -> PostgresTarget:
    """Make the target of a session that is connected; one that has been used before is configured already."""
    rows = RowApplier(pipeline, config.origin, config.on_conflict)
    rows.capabilities = capabilities
    rows.known_tables = config.known_tables
    # Ordinary triggers, which run without the replica role, are not looked for.
    batching = config.batching and capabilities.replica_role
    await _acquire_lock_and_role(rows, config, catalog)
    await rows.configure(config.subscription.synchronous_commit)
    return PostgresTarget(rows, batching=batching, settings=config.settings)


async def _acquire_lock_and_role(rows: RowApplier, config: TargetConfig, catalog: CatalogConnection) -> None:
    """Give the session its place, and have it act as the subscription says."""
    subscription, subid = config.subscription, config.subscription.oid
    await _register(rows.pipeline, catalog, subid, config.number, config.settings)
    async with catalog.use() as connection:
        found = await load_subscription(connection, subid)
    if found is None or not found.enabled:
        raise StaleCatalog("the subscription was disabled or dropped meanwhile")
    if found.generation != subscription.generation:
        raise StaleCatalog("the subscription was altered meanwhile")
    await rows.roles.subscribe(subscription, replica_role=rows.capabilities.replica_role)
    conflicts.configure_conflict_policy(rows, subscription, config.resolvers, config.on_conflict)


async def backend_of(pipeline: Pipeline) -> Backend:
    """The backend behind `pipeline`."""
    ((pid, started, role),) = await pipeline.rows(_BACKEND)
    return Backend(int(pid or 0), datetime.fromtimestamp(float(started or 0)).astimezone(), int(role or 0))


async def _register(pipeline: Pipeline, catalog: CatalogConnection, subid: int, relid: int, settings: Settings) -> None:
    backend, waited = await backend_of(pipeline), 0.0
    pipeline.session.pid = backend.pid  # a connection pooler makes up the one that it announces
    while (holder := await _try_register(catalog, subid, relid, backend)) is not None:
        if waited >= settings.earlier_session_timeout:
            raise ConnectionLost(
                "another worker of this subscription is still connected to the target",
                detail=f"Its backend is {holder}, which does not end.",
            )
        if waited >= settings.earlier_session_grace:
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


async def resume_progress(rows: RowApplier, claimed: ProgressClaim, *, number: int = 0) -> None:
    """Bind the origin, if there are any, repaired to where the record is, and continue from `claimed`.

    `number` is that of a further session of an apply worker, 0 the worker's own.
    """
    pipeline = rows.pipeline
    with_origin = rows.capabilities.origins
    origin_id: str | None = None
    progress = ProgressRecord(claimed, with_origin=with_origin)
    if with_origin:
        ((origin_id,),) = await pipeline.rows("SELECT subscriber.bind_origin($1, $2, $3)", *progress.shown, str(number))
    tracked = await unique_violation.tracks_commit_times(pipeline)
    conflicts.require_commit_times(rows, tracked=tracked, with_origin=with_origin)
    rows.resume(progress, int(origin_id) if tracked and origin_id is not None else None)


@asynccontextmanager
async def with_origin(rows: RowApplier, claimed: ProgressClaim) -> AsyncIterator[None]:
    """Within the block the session's writes carry its origin, before there is a position to resume() from."""
    if not rows.capabilities.origins:
        yield
        return
    shown = ProgressRecord(claimed, with_origin=True).shown
    await rows.pipeline.rows("SELECT subscriber.bind_origin($1, $2, 0)", *shown)
    yield  # after an error the session is dropped, and its origin free
    await release_origin(rows)


async def release_origin(rows: RowApplier) -> None:
    """Let go of the origin that resume() has bound, if there are any; nothing is in flight."""
    if rows.capabilities.origins:
        await rows.pipeline.rows("SELECT subscriber.release_origin()")


async def with_context(
    error: SubscriberError, rows: RowApplier, conninfo: str, catalog: CatalogConnection
) -> SubscriberError:
    """The error of an apply loop with its CONTEXT; of a unique violation, the conflict that it is."""
    return await conflicts.conflict_from_error(rows.explain(error), rows, conninfo, catalog)
