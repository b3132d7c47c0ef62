"""The two sessions of a table synchronization worker, which go from one table to the next.

To open a session costs a server more than to copy a small table, most of it for a process and for reading the system
catalog again. So what is the same for every table stays: the settings, the prepared statements, what the backends
have cached. What belongs to one table is let go of when it is done: its place, its origin, its name.

Sessions that have seen an error are not used again, nor after the subscription has changed, nor after code of others
has run in them (targets/postgres/session/foreign_code.py). A walsender serves one
stream in its life; a table that had to catch up takes the session to the publisher with it.

Kill points considered: the session has the place of a table from before its state is read until its slot can be
dropped, as with a session for each table. A session that was left in the middle of a table ends and is not used again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import KEEPALIVE, CatalogConnection
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.publisher.connection import Publisher
from subscriber.settings import Settings
from subscriber.subscription import Subscription
from subscriber.targets.postgres.conflicts.resolution import Resolver
from subscriber.targets.postgres.session.capabilities import TargetCapabilities, detect_capabilities
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.apply.worker import connect_publisher
from subscriber.worker.session.apply_session import TargetConfig, backend_of, make_target

WORKER = "table synchronization worker"

_NAME = "SELECT pg_catalog.set_config('application_name', $1, false)"


class SyncSessions:
    """For one table at a time; connects when it is asked for something. close() when there is nothing left to do."""

    def __init__(
        self,
        subscription: Subscription,
        target: str,
        catalog: CatalogConnection,
        resolvers: Mapping[str, Resolver],
        settings: Settings,
    ) -> None:
        """`target` is its connection string."""
        self.subscription = subscription
        self._catalog = catalog
        self._conninfo = target
        self._resolvers = resolvers
        self._settings = settings
        self._publisher: Publisher | None = None
        self._session: Session | None = None  # on the target
        self._pipeline: Pipeline | None = None
        self._capabilities = TargetCapabilities()

    def fits(self, subscription: Subscription) -> bool:
        """Whether they may be used again, for `subscription` as it is now."""
        sessions = (self._session, self._publisher and self._publisher.session)
        return self.subscription == subscription and not any(session and session.error for session in sessions)

    async def publisher(self, slot: str) -> Publisher:
        """A session on the publisher, in no transaction."""
        if self._publisher is None:
            self._publisher = await connect_publisher(self.subscription, slot, WORKER, self._catalog.encoding)
        else:
            await self._publisher.rename(slot)
        return self._publisher

    def give_away_publisher(self) -> None:
        """Whoever has the publisher's session is going to end it."""
        self._publisher = None

    @asynccontextmanager
    async def target(self, name: str, relid: int, on_conflict: OnConflict) -> AsyncIterator[PostgresTarget]:
        """The target session, registered and configured for a table, bound to no origin yet.

        At the end of the block, where no origin is bound again, the place is given back, unless it ends with an error.
        """
        subscription = self.subscription
        config = TargetConfig(
            self._conninfo,
            f"{subscription.name} {name}",
            subscription,
            relid,
            on_conflict,
            self._resolvers,
            settings=self._settings,
        )
        application_name = f"subscriber: {config.name}"
        if self._pipeline is None:
            self._session = await open_session(self._conninfo, application_name=application_name, settings=KEEPALIVE)
            self._capabilities = await detect_capabilities(self._session)
            self._pipeline = Pipeline(self._session)
        else:
            await self._pipeline.rows(_NAME, application_name)
        pipeline = self._pipeline
        target = await make_target(config, self._catalog, pipeline, self._capabilities)
        yield target
        if target.rows.has_run_foreign_code:
            pipeline.session.abort()
            self._pipeline = self._session = None
            return
        backend = await backend_of(pipeline)
        async with self._catalog.use() as connection:
            await worker_sessions.release(connection, subscription.oid, relid, backend.pid)

    def close(self) -> None:
        """Drop both."""
        if self._publisher is not None:
            self._publisher.session.abort()
        if self._session is not None:
            self._session.abort()
