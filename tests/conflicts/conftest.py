"""A target that tracks commit timestamps, and apply sessions of subscriptions with a policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

import pytest
from anyio.from_thread import BlockingPortal

from subscriber.apply.conflicts.rules import Resolver
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.connection import CatalogConnection
from subscriber.demo.servers import Server, Servers
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Relation, Update
from subscriber.subscription import ConflictHistory, Subscription
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.worker_session import TargetConfig, WorkerSession, claim, open_target
from tests.plugins.fix_cluster import SETTINGS, Database, SessionPool
from tests.targets import shared_schema

SUBID = 3599999998
LONG_AGO, IN_FUTURE = 1_000_000, 4_000_000_000_000_000  # microseconds since 2000: before and after the writes of a test


def _start(portal: BlockingPortal, servers: Servers, name: str) -> Server:
    async def start() -> Server:
        server = await servers.create(name, {**SETTINGS, "track_commit_timestamp": "on"})
        await server.start()
        return server

    return portal.call(start)


@pytest.fixture(scope="session")
def tracking(portal: BlockingPortal, session_servers: Servers) -> Server:
    """Create a server with track_commit_timestamp."""
    return _start(portal, session_servers, "tracking")


@pytest.fixture(scope="session")
def tracking_too(portal: BlockingPortal, session_servers: Servers) -> Server:
    """Create a second server with track_commit_timestamp."""
    return _start(portal, session_servers, "tracking_too")


@pytest.fixture(scope="session")
def tracking_name(portal: BlockingPortal, tracking: Server) -> str:
    return shared_schema.make(portal, tracking, "tracking")


@pytest.fixture
async def db(tracking: Server, tracking_name: str) -> AsyncIterator[Database]:
    """Create a database of that server with a subscription and nothing else in it."""
    database = Database(tracking, tracking_name, _idle=SessionPool())
    await shared_schema.clean(database, SUBID)
    await database.execute("SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin")  # of others, too
    yield database
    await shared_schema.leave(database, SUBID)
    database.close_sessions()


class Deciding:
    """An apply session; each call of apply() is a transaction of the publisher."""

    def __init__(self, worker: WorkerSession, target: PostgresTarget, end: int) -> None:
        self.target = target
        self._worker = worker
        self.reported: list[Conflict] = []
        self._end = max(100, end)
        self._mappings: dict[int, RelationMapping] = {}

    async def apply(
        self, *changes: tuple[Relation, Insert | Update | Delete], at: int = LONG_AGO, again: bool = False
    ) -> None:
        """Committed on the publisher `at` that time; errors are raised as a worker does.

        `again`: the transaction has failed before, in another session.
        """
        if not again:
            self._end += 100
        transaction = RemoteTransaction(self._end, Lsn(self._end - 10), at)
        try:
            for relation, change in changes:
                if relation.relid not in self._mappings:
                    self._mappings[relation.relid] = await self.target.map_relation(relation)
                await self.target.change(transaction, self._mappings[relation.relid], change)
            await self.target.commit(transaction, Lsn(self._end), lambda: None)
            await self.target.sync()
        except SubscriberError as error:
            raise await self._worker.explain(error) from None


class Deciders:
    """Makes them, one at a time: the next ends the last, as a worker that starts again does."""

    def __init__(self, db: Database, stack: AsyncExitStack) -> None:
        self._db = db
        self._stack = stack

    async def open(
        self,
        policy: str = "",
        *,
        history: ConflictHistory = ConflictHistory.DECIDED,
        rows: bool = True,
        resolvers: Mapping[str, Resolver] | None = None,
        end: int = 0,
    ) -> Deciding:
        """Start a worker. `end`: the position to start from, instead of the last worker's."""
        subscription = Subscription(
            SUBID,
            "s",
            "postgres",
            "",
            ("p",),
            conflict_policy=policy,
            conflict_history=history,
            conflict_log_rows=rows,
        )
        await self._stack.aclose()
        reported: list[Conflict] = []
        catalog = await self._stack.enter_async_context(CatalogConnection.open(self._db.dsn(), "test"))
        worker = await self._stack.enter_async_context(
            open_target(
                TargetConfig(
                    self._db.dsn(), "s", subscription, 0, lambda found, _note: reported.append(found), resolvers or {}
                ),
                catalog,
            )
        )
        claimed = await claim(catalog, subscription, 0)
        assert claimed is not None
        target = await worker.resume(claimed)
        deciding = Deciding(worker, target, int(claimed.position))
        deciding.reported = reported
        return deciding


@pytest.fixture
async def deciders(db: Database) -> AsyncIterator[Deciders]:
    async with AsyncExitStack() as stack:
        yield Deciders(db, stack)
