"""Fixtures of pytest with two real PostgreSQL servers, for tests of programs that use this package.

    async def test_my_shop(subscriber_pair):
        await subscriber_pair.source.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
        await subscriber_pair.target.execute("CREATE TABLE t (id int PRIMARY KEY)")
        async with subscriber.connect(subscriber_pair.target.dsn) as db:
            await db.create_subscription("s", source=subscriber_pair.source.dsn, publications=["p"])
            async with db.running():
                await db.wait_for_sync("s", timeout=60)

pytest loads the plugin by itself. The servers are those of the extra `demo`. They start at the first use, live until
the end of the run, and are removed with their files, even if the run is killed. Each test has databases of its own,
which are dropped with their slots. The tests may be run by pytest-asyncio or by anyio.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from subscriber.demo.servers import Server

# Waiting times of minutes would only make tests slow.
_SETTINGS = {
    "wal_level": "logical",
    "max_prepared_transactions": "10",
    "wal_sender_timeout": "10s",
    "wal_retrieve_retry_interval": "100ms",
    "autovacuum": "off",
}
_SESSIONS = "FROM pg_catalog.pg_stat_activity WHERE datname = $1 AND pid <> pg_catalog.pg_backend_pid()"
_SLOTS = "FROM pg_catalog.pg_replication_slots WHERE database = $1"
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PairDatabase:
    """A database of one test."""

    dsn: str  # for a superuser

    async def execute(self, *statements: str) -> None:
        """Run statements, each argument in a transaction of its own.

        Raises:
            SubscriberError: a statement failed.
        """
        from subscriber.catalog.connection import CatalogConnection

        async with CatalogConnection.open(self.dsn, "test") as catalog, catalog.use() as connection:
            await connection.execute("SET search_path = public")
            for statement in statements:
                await connection.execute(statement)

    async def fetch(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query, with values as by asyncpg.

        Raises:
            SubscriberError: the query failed.
        """
        from subscriber.catalog.connection import CatalogConnection

        async with CatalogConnection.open(self.dsn, "test") as catalog, catalog.use() as connection:
            await connection.execute("SET search_path = public")
            return [tuple(row) for row in await connection.fetch(query, *arguments)]


@dataclass(frozen=True, slots=True)
class Pair:
    """A publisher's database and a target's. Both are empty."""

    source: PairDatabase
    target: PairDatabase
    servers: PairServers = field(repr=False)

    async def restart_source(self) -> None:
        """Restart the publisher's server, which closes all its connections."""
        await _restart(self.servers.portal, self.servers.publisher)

    async def restart_target(self) -> None:
        """Restart the target's server, which closes all its connections."""
        await _restart(self.servers.portal, self.servers.target)


@dataclass(frozen=True, slots=True)
class PairServers:
    """The two servers of a run."""

    portal: BlockingPortal  # the event loop that starts and stops them
    publisher: Server
    target: Server


@pytest.fixture(scope="session")
def subscriber_servers() -> Iterator[PairServers]:
    """Start a publisher and a target for the whole run."""
    from anyio.from_thread import start_blocking_portal

    from subscriber.demo.servers import Servers, ServersError, temporary_servers

    async def start(servers: Servers, name: str) -> Server:
        server = await servers.create(name, _SETTINGS)
        await server.start()
        return server

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(temporary_servers()) as servers:
        try:
            pair = [portal.call(start, servers, name) for name in ("publisher", "target")]
        except ServersError as error:
            pytest.fail(str(error))
        yield PairServers(portal, *pair)


@pytest.fixture
def subscriber_pair(subscriber_servers: PairServers) -> Iterator[Pair]:
    """Create an empty database on each server, and drop both with their slots after the test."""
    name = f"pair_{next(_numbers)}"
    both = (subscriber_servers.publisher, subscriber_servers.target)
    call = subscriber_servers.portal.call
    for server in both:
        call(_create, server, name)
    try:
        source, target = (PairDatabase(server.dsn(name)) for server in both)
        yield Pair(source, target, subscriber_servers)
    finally:
        for server in reversed(both):
            call(_drop, server, name)


async def _restart(portal: BlockingPortal, server: Server) -> None:
    from anyio import to_thread

    async def restart() -> None:
        await server.restart()

    await to_thread.run_sync(portal.call, restart)


async def _create(server: Server, name: str) -> None:
    await PairDatabase(server.dsn()).execute(f"CREATE DATABASE {name} TEMPLATE template0")


async def _drop(server: Server, name: str) -> None:
    """Drop a database with its sessions, slots, prepared transactions and replication origins."""
    from subscriber.catalog import origins
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.schema import current_revision
    from subscriber.catalog.store.subscriptions import load_subscriptions
    from subscriber.quoting import literal

    async with CatalogConnection.open(server.dsn(name), "test") as catalog, catalog.use() as own:
        for (gid,) in await own.fetch("SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = $1", name):
            await own.execute(f"ROLLBACK PREPARED {literal(gid)}")
        if await current_revision(own) is not None:
            while await own.fetch(f"SELECT pg_catalog.pg_terminate_backend(pid) {_SESSIONS}", name):
                pass
            for subscription in await load_subscriptions(own):
                for origin in await origins.find_origins(own, subscription.oid):
                    await origins.drop_origin(own, origin, missing_ok=True)
    async with CatalogConnection.open(server.dsn(), "test") as catalog, catalog.use() as root:
        await root.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        while await root.fetchval(f"SELECT count(*) {_SLOTS}", name):
            await root.fetch(f"SELECT pg_catalog.pg_terminate_backend(active_pid) {_SLOTS} AND active", name)
            await root.fetch(f"SELECT pg_catalog.pg_drop_replication_slot(slot_name) {_SLOTS} AND NOT active", name)
        await root.execute(f"DROP DATABASE {name} WITH (FORCE)")
