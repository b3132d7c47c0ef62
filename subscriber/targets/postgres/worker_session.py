"""WorkerSession: the target session of a worker, which registers its place, and binds the origin of a progress record.

Invariants. The order of the steps matters.

1. The session is registered for its place (catalog/worker_sessions.py). The backend of an earlier session may still
   prepare a transaction. So the worker ends it and waits for its end.
2. The progress record is claimed. After that, no other session can move it.
3. The origin is set to the position of the record, and bound.

The catalog session registers and claims. The session that applies changes needs no privilege for these steps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import asyncpg

from subscriber import names, telemetry
from subscriber.apply.conflicts.rules import Resolver, conflict_rules
from subscriber.apply.progress import ProgressClaim
from subscriber.apply.touched_ranges import TouchedRanges
from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import KEEPALIVE, CatalogConnection
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscriptions import load_subscription
from subscriber.catalog.worker_sessions import Backend
from subscriber.connection.connect import open_session
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ConnectionLost, StaleCatalog, SubscriberError
from subscriber.limited_wait import LimitedWait
from subscriber.ownership import OwnershipRules
from subscriber.settings import DEFAULTS, Settings
from subscriber.subscription import Subscription
from subscriber.targets.postgres import stopping_conflict
from subscriber.targets.postgres.conflicts import unique_violation
from subscriber.targets.postgres.conflicts.deleted_rows import DeletedRows
from subscriber.targets.postgres.conflicts.detection import ConflictDetector
from subscriber.targets.postgres.conflicts.resolution import ConflictResolution, ReadPublished
from subscriber.targets.postgres.row_applier import NO_OWNERSHIP, RowApplier, never
from subscriber.targets.postgres.session.capabilities import TargetCapabilities, detect_capabilities
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.session.target_session import TargetSession, configure_session
from subscriber.targets.postgres.target import PostgresTarget

POLL = 0.05  # seconds

_BIND_ORIGIN = "SELECT subscriber.bind_origin($1, $2, $3)"
# Microseconds: the text of a float8, or of a time, depends on settings.
_REGISTER_OWN = """
SELECT a.pid, (extract(epoch FROM a.backend_start) * 1000000)::pg_catalog.int8,
       subscriber.register_own_session($1, a.backend_start)
  FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
"""


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The configuration of one worker's session on the target.

    Attributes:
        conninfo: the connection string of the role that applies changes.
        name: the worker's name, for application_name.
        subscription: the subscription.
        number: the place (catalog/worker_sessions.py). 0: the apply worker.
        on_conflict: called with each conflict that does not stop the stream.
        resolvers: the functions that a conflict_policy may call, by name.
        batching: allow batches.
        known_tables: definitions of tables that earlier sessions have read.
        settings: limits and intervals.
        touched: the ranges that the session records. None: the subscription has no track_ranges.
        code_changes_session: set the session's state again after the code of tables (foreign_code.py).
        others_in_progress: see RowApplier.
        read_published: reads values from the publisher for conflict policies. None: the publisher is not asked.
    """

    conninfo: Conninfo | str = field(repr=False)
    name: str
    subscription: Subscription
    number: int
    on_conflict: OnConflict
    resolvers: Mapping[str, Resolver] = field(default_factory=dict)
    batching: bool = False
    known_tables: KnownTables = field(default_factory=KnownTables)
    settings: Settings = DEFAULTS
    touched: TouchedRanges | None = None
    code_changes_session: bool = False
    others_in_progress: Callable[[], bool] = never
    read_published: ReadPublished | None = None

    @property
    def origin(self) -> str:
        """The name of the session's replication origin."""
        subid = self.subscription.oid
        if not self.number:
            return names.apply_origin(subid)
        return names.table_sync_origin(subid, self.number)


class WorkerSession:
    """A session of a worker that has its place. It reads and copies tables. resume() makes it apply changes.

    Attributes:
        session: the session on the target.
    """

    def __init__(self, session: TargetSession, config: TargetConfig, catalog: CatalogConnection) -> None:
        """Create the object for a session that is registered and configured."""
        self.session: Final = session
        self._config = config
        self._catalog = catalog
        self._row_applier: RowApplier | None = None

    async def resume(self, claimed: ProgressClaim, *, number: int = 0) -> PostgresTarget:
        """Bind the session's origin, and return a target that continues from the progress record.

        The origin is set to the position of the record first. Without privileges for origins, the session has none.

        Args:
            claimed: the progress record.
            number: the place of an additional session of an apply worker. 0: the worker's own session.

        Raises:
            StatementError: a conflict policy needs commit times or origins that the target does not have.
        """
        config = self._config
        self._row_applier = await resume_applier(
            self.session,
            claimed,
            config.on_conflict,
            number=number,
            touched=config.touched,
            ownership=config.subscription.ownership,
            others_in_progress=config.others_in_progress,
            read_published=config.read_published,
        )
        return PostgresTarget(self._row_applier, batching=config.batching, settings=config.settings)

    @asynccontextmanager
    async def with_origin(self, claimed: ProgressClaim, *, number: int = 0) -> AsyncIterator[None]:
        """Bind the session's origin within the block, so that its writes have the origin without a resumed position.

        Args:
            claimed: the progress record.
            number: the place of an additional session of a synchronization worker. 0: the worker's own session.
        """
        session = self.session
        if not session.capabilities.origins:
            yield
            return
        shown = ProgressRecord(claimed, with_origin=True).shown
        await session.pipeline.rows(_BIND_ORIGIN, *shown, str(number))
        # After an error the session is closed, which releases the origin.
        yield
        await release_origin(session)

    async def explain(self, error: SubscriberError) -> SubscriberError:
        """Return an error of the worker with its CONTEXT. A unique violation becomes its conflict."""
        explained = self.session.explain(error)
        if self._row_applier is None:
            return explained
        return await stopping_conflict.conflict_from_error(
            explained, self._row_applier, self._config.conninfo, self._catalog
        )


@asynccontextmanager
async def open_target(config: TargetConfig, catalog: CatalogConnection) -> AsyncIterator[WorkerSession]:
    """Connect a worker's session to the target, register and configure it. Closed at the end of the block.

    Raises:
        StaleCatalog: the subscription has been altered, disabled or dropped.
        ConnectionLost: the target cannot be reached, or another worker has the place.
        ApplyError: a conflict policy names a function that is not registered.
    """
    name = f"subscriber: {config.name}"
    async with await open_session(config.conninfo, application_name=name, settings=KEEPALIVE) as session:
        capabilities = await detect_capabilities(session)
        yield await register_session(config, catalog, Pipeline(session), capabilities)


async def register_session(
    config: TargetConfig, catalog: CatalogConnection, pipeline: Pipeline, capabilities: TargetCapabilities
) -> WorkerSession:
    """Register a connected session for its place, and configure it.

    Raises:
        StaleCatalog: the subscription has been altered, disabled or dropped.
        ConnectionLost: another worker has the place.
        ApplyError: a conflict policy names a function that is not registered.
    """
    subscription = config.subscription
    await _register(pipeline, catalog, subscription.oid, config.number, config.settings)
    async with catalog.use() as connection:
        stored = await load_subscription(connection, subscription.oid)
    if stored is None or not stored.enabled:
        raise StaleCatalog("the subscription was disabled or dropped meanwhile")
    if stored.generation != subscription.generation:
        raise StaleCatalog("the subscription was altered meanwhile")
    session = await configure_session(
        pipeline,
        subscription,
        capabilities,
        origin=config.origin,
        known_tables=config.known_tables,
        rules=conflict_rules(subscription, config.resolvers),
        code_changes_session=config.code_changes_session,
    )
    return WorkerSession(session, config, catalog)


async def _register_own(pipeline: Pipeline, subid: int) -> Backend:
    """Register a session for a subscription, whose launcher can then give it a place. Returns its backend."""
    ((pid, started, _),) = await pipeline.rows(_REGISTER_OWN, str(subid))
    return Backend(int(pid or 0), datetime.fromtimestamp(0, UTC) + timedelta(microseconds=int(started or 0)))


async def _register(pipeline: Pipeline, catalog: CatalogConnection, subid: int, relid: int, settings: Settings) -> None:
    backend = await _register_own(pipeline, subid)
    # A connection pooler invents the process ID that it sends at the start of a session.
    pipeline.session.pid = backend.pid
    wait = LimitedWait("an earlier worker to end", settings.earlier_session_timeout)
    while (holder := await _try_register(catalog, subid, relid, backend)) is not None:
        if wait.is_over:
            raise ConnectionLost(
                "another worker of this subscription is still connected to the target",
                detail=f"Its backend is {holder}, which does not end.",
            )
        if wait.seconds >= settings.earlier_session_grace:
            async with catalog.use() as connection:
                if await worker_sessions.terminate(connection, subid, relid):
                    what = f"ended backend {holder} of an earlier worker that was still connected"
                    telemetry.log(telemetry.WARNING, what)
        await wait.pause(POLL)


async def _try_register(catalog: CatalogConnection, subid: int, relid: int, backend: Backend) -> int | None:
    """Try to register a backend. Returns the process ID of another session that has the place; None on success."""
    async with catalog.use() as connection:
        try:
            return await worker_sessions.register(connection, subid, relid, backend)
        except (asyncpg.UndefinedObjectError, asyncpg.LockNotAvailableError) as error:
            raise StaleCatalog("a statement is changing the subscription", detail=str(error)) from error


async def claim(catalog: CatalogConnection, subscription: Subscription, relid: int) -> ProgressClaim | None:
    """Claim the progress record of a worker, so that no other session can move it.

    Args:
        catalog: runs the statement.
        subscription: the subscription. Its generation becomes part of the claim.
        relid: the place of the worker. 0: the apply worker.

    Returns:
        None if there is no record.
    """
    async with catalog.use() as connection:
        return await progress_records.claim(connection, subscription.oid, relid, generation=subscription.generation)


async def resume_applier(
    session: TargetSession,
    claimed: ProgressClaim,
    on_conflict: OnConflict,
    *,
    number: int = 0,
    touched: TouchedRanges | None = None,
    ownership: OwnershipRules = NO_OWNERSHIP,
    others_in_progress: Callable[[], bool] = never,
    read_published: ReadPublished | None = None,
) -> RowApplier:
    """Bind the session's origin, and return an applier that continues from the progress record.

    Args:
        session: the session.
        claimed: the progress record.
        on_conflict: called with each conflict that does not stop the stream.
        number: see WorkerSession.resume().
        touched: see RowApplier.
        ownership: see RowApplier.
        others_in_progress: see RowApplier.
        read_published: see ConflictResolution.

    Raises:
        StatementError: a conflict policy needs commit times or origins that the target does not have.
    """
    pipeline, rules = session.pipeline, session.rules
    with_origin = session.capabilities.origins
    progress = ProgressRecord(claimed, with_origin=with_origin)
    bound: str | None = None
    if with_origin:
        ((bound,),) = await pipeline.rows(_BIND_ORIGIN, *progress.shown, str(number))
    tracked = await unique_violation.tracks_commit_times(pipeline)
    stopping_conflict.require_commit_times(rules.policies, tracked=tracked, with_origin=with_origin)
    origin_id = int(bound) if tracked and bound is not None else None
    deleted = DeletedRows(progress, session.origin) if rules.retain_dead_tuples else None
    detector = ConflictDetector(session, on_conflict, origin_id=origin_id, deleted=deleted)
    resolution = None
    if rules.decide:
        resolution = ConflictResolution(
            session,
            progress,
            deleted,
            on_conflict,
            timed=origin_id is not None,
            read_published=read_published,
        )
    return RowApplier(
        session,
        progress,
        detector,
        resolution,
        touched=touched,
        ownership=ownership,
        others_in_progress=others_in_progress,
    )


async def release_origin(session: TargetSession) -> None:
    """Release the session's origin, if the target has origins. No statement may be in flight."""
    if session.capabilities.origins:
        await session.pipeline.rows("SELECT subscriber.release_origin()")
