"""SyncSessions: the two sessions of a table synchronization worker, which the next table can use again.

Purpose. Opening a session costs a server more than copying a small table. Most of the cost is a new process, which has
to read the system catalog. So the session keeps everything that all tables share: its settings, prepared statements,
and the backend's caches. It releases the table's place, origin and name when the table is done.

Invariants.

- A session is used again only if it has had no error, and the subscription has not changed.
- A session on the target is closed after foreign code has run in it (targets/postgres/session/foreign_code.py).
- A walsender runs one stream only. So the session on the publisher is closed after a table has caught up by a stream.
- The session on the target has the table's place (catalog/worker_sessions.py) before the table's state is read, and
  until its slot can be dropped.

Failure cases.

- Worker ends in the middle of a table: its sessions are closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

from subscriber.apply.conflicts.rules import Resolver
from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import KEEPALIVE, CatalogConnection
from subscriber.connection.connect import open_session
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.publisher.connection import Publisher
from subscriber.publisher.subscriptions import connect_publisher
from subscriber.settings import Settings
from subscriber.subscription import Subscription
from subscriber.targets.postgres.session.capabilities import TargetCapabilities, detect_capabilities
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.worker_session import TargetConfig, WorkerSession, register_session

WORKER = "table synchronization worker"

_NAME = "SELECT pg_catalog.set_config('application_name', $1, false)"


class SyncSessions:
    """The sessions on publisher and target, for one table at a time. Each is opened when it is first needed."""

    def __init__(
        self,
        subscription: Subscription,
        target: Conninfo | str,
        catalog: CatalogConnection,
        resolvers: Mapping[str, Resolver],
        settings: Settings,
        changed_sessions: Collection[int] = (),
    ) -> None:
        """Create the sessions without connecting.

        Args:
            subscription: the subscription.
            target: the connection string of the role that applies changes.
            catalog: registers the session on the target.
            resolvers: the functions that a conflict_policy may call, by name.
            settings: limits and intervals.
            changed_sessions: see LauncherContext.
        """
        self.subscription = subscription
        self._changed_sessions = changed_sessions
        self._catalog = catalog
        self._conninfo = target
        self._resolvers = resolvers
        self._settings = settings
        self._publisher: Publisher | None = None
        self._session: Session | None = None  # on the target
        self._pipeline: Pipeline | None = None
        self._capabilities = TargetCapabilities()

    def fits(self, subscription: Subscription) -> bool:
        """Return True if the sessions have no error and `subscription` has not changed."""
        sessions = (self._session, self._publisher and self._publisher.session)
        return self.subscription == subscription and not any(session and session.error for session in sessions)

    async def publisher(self, slot: str) -> Publisher:
        """Return the session on the publisher, which has no open transaction. `slot` becomes its application name."""
        if self._publisher is None:
            self._publisher = await connect_publisher(self.subscription, slot, WORKER, self._catalog.encoding)
        else:
            await self._publisher.rename(slot)
        return self._publisher

    def give_away_publisher(self) -> None:
        """Forget the session on the publisher. The caller closes it."""
        self._publisher = None

    @asynccontextmanager
    async def target(self, name: str, relid: int, on_conflict: OnConflict) -> AsyncIterator[WorkerSession]:
        """Register and configure the session on the target for one table. Its origin is not bound.

        The origin must be released before the end of the block. At the end, the place is released, unless the block
        raises an error.

        Args:
            name: the name of the table, for application_name.
            relid: the place, which is the OID of the table.
            on_conflict: called with each conflict that does not stop the stream.

        Raises:
            StaleCatalog: the subscription has been altered, disabled or dropped.
            ConnectionLost: the target cannot be reached, or another worker has the place.
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
            code_changes_session=subscription.oid in self._changed_sessions,
        )
        application_name = f"subscriber: {config.name}"
        if self._pipeline is None:
            self._session = await open_session(self._conninfo, application_name=application_name, settings=KEEPALIVE)
            self._capabilities = await detect_capabilities(self._session)
            self._pipeline = Pipeline(self._session)
        else:
            await self._pipeline.rows(_NAME, application_name)
        pipeline = self._pipeline
        worker = await register_session(config, self._catalog, pipeline, self._capabilities)
        yield worker
        if worker.session.foreign_code.has_run:
            pipeline.session.abort()
            self._pipeline = self._session = None
            return
        async with self._catalog.use() as connection:
            await worker_sessions.release(connection, subscription.oid, relid, pipeline.session.pid)

    def close(self) -> None:
        """Close both sessions without waiting for the servers."""
        if self._publisher is not None:
            self._publisher.session.abort()
        if self._session is not None:
            self._session.abort()
