"""A database with schema "subscriber" for each test, and an apply session that gets changes from the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal

from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.connection import CatalogConnection
from subscriber.demo.servers import Server
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import (
    Delete,
    Insert,
    OldPart,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    Update,
)
from subscriber.protocol.tuple_data import TupleData
from subscriber.subscription import Subscription
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.worker_session import TargetConfig, claim, open_target
from tests.apply.build import row
from tests.plugins.fix_cluster import Database
from tests.targets import shared_schema

SUBID = 3599999999
Values = tuple[object, ...]
Change = tuple[Relation, Insert | Update | Delete] | tuple[list[Relation], Truncate]


@pytest.fixture(scope="session")
def database_name(portal: BlockingPortal, target: Server) -> str:
    return shared_schema.make(portal, target, "target")


@pytest.fixture
async def db(target: Server, database_name: str) -> AsyncIterator[Database]:
    """Create a database with a subscription and nothing else in it."""
    database = Database(target, database_name)
    await shared_schema.clean(database, SUBID)
    yield database
    await shared_schema.leave(database, SUBID)


class Applier:
    """An apply session; transactions are written as lists of changes."""

    def __init__(self, target: PostgresTarget) -> None:
        self.target = target
        self.end = 100  # of the last transaction
        self.committed: list[int] = []  # the ends of acknowledged transactions
        self.missing: list[str] = []  # reported conflicts: message type and table
        self._mappings: dict[int, RelationMapping] = {}

    async def mapping(self, relation: Relation) -> RelationMapping:
        if relation.relid not in self._mappings:
            self._mappings[relation.relid] = await self.target.map_relation(relation)
        return self._mappings[relation.relid]

    async def send(self, *changes: Change) -> None:
        """Send one transaction, without waiting for the results."""
        self.end += 100
        transaction = RemoteTransaction(self.end, Lsn(self.end - 10), 1_000_000)
        for relation, change in changes:
            if isinstance(relation, list):
                assert isinstance(change, Truncate)
                await self.target.truncate(transaction, [await self.mapping(r) for r in relation], change)
            else:
                assert not isinstance(change, Truncate)
                await self.target.change(transaction, await self.mapping(relation), change)
        end = self.end
        await self.target.commit(transaction, Lsn(end), lambda: self.committed.append(end))

    async def apply(self, *changes: Change) -> None:
        """Apply one transaction. Returns after its commit. Errors are raised with their CONTEXT."""
        try:
            await self.send(*changes)
            await self.target.sync()
        except SubscriberError as error:
            raise self.target.session.explain(error) from None


def subscription(**options: Any) -> Subscription:
    """Return the subscription that tests/targets/shared_schema.py leaves in the database."""
    return Subscription(SUBID, "s", "postgres", "", ("p",), **options)


class Sessions:
    """Makes appliers on a database; all are dropped at the end."""

    def __init__(self, db: Database, stack: AsyncExitStack) -> None:
        self._db = db
        self._stack = stack

    async def open(self, *, synchronous_commit: str = "off", batching: bool = False, **parameters: str) -> Applier:
        """Start a worker: it takes its lock, claims its progress and continues from there."""
        missing: list[str] = []
        catalog = await self._stack.enter_async_context(CatalogConnection.open(self._db.dsn(), "test"))
        worker = await self._stack.enter_async_context(
            open_target(
                TargetConfig(
                    self._db.dsn(**parameters),
                    "s",
                    subscription(synchronous_commit=synchronous_commit),
                    0,
                    lambda found, note: missing.append(f"{note.message} {found.relation}"),
                    batching=batching,
                ),
                catalog,
            )
        )
        claimed = await claim(catalog, subscription(), 0)
        assert claimed is not None
        target = await worker.resume(claimed)
        applier = Applier(target)
        applier.missing = missing
        applier.end = max(100, int(claimed.position))
        return applier


@pytest.fixture
async def sessions(db: Database) -> AsyncIterator[Sessions]:
    async with AsyncExitStack() as stack:
        yield Sessions(db, stack)


@pytest.fixture
async def applier(sessions: Sessions) -> Applier:
    return await sessions.open()


# --- changes, written short -----------------------------------------------------------------------


class Table:
    """A published table and its changes. Column names with a star form its key."""

    _oids = iter(range(16384, 1 << 31))

    def __init__(
        self, name: str, *columns: str, identity: ReplicaIdentity = ReplicaIdentity.DEFAULT, schema: str = "public"
    ) -> None:
        full = identity is ReplicaIdentity.FULL
        described = tuple(RelationColumn(full or c.endswith("*"), c.rstrip("*"), 25, -1) for c in columns)
        self.relation = Relation(None, next(self._oids), schema, name, identity, described)

    @property
    def _part(self) -> OldPart:
        return OldPart.ROW if self.relation.replica_identity is ReplicaIdentity.FULL else OldPart.KEY

    def insert(self, *values: object) -> tuple[Relation, Insert]:
        return self.relation, Insert(None, self.relation.relid, row(*values))

    def update(self, *values: object, old: Values | None = None) -> tuple[Relation, Update]:
        """Return an update. `old`: the old key or row, if it was sent."""
        before: TupleData | None = None if old is None else row(*old)
        return self.relation, Update(None, self.relation.relid, self._part if old else None, before, row(*values))

    def delete(self, *values: object) -> tuple[Relation, Delete]:
        return self.relation, Delete(None, self.relation.relid, self._part, row(*values))


def truncate(*tables: Table, cascade: bool = False, restart_identity: bool = False) -> tuple[list[Relation], Truncate]:
    relids = tuple(t.relation.relid for t in tables)
    return [t.relation for t in tables], Truncate(None, cascade, restart_identity, relids)
