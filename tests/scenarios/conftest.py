"""A source, a target and a launcher, with the operations that the scenarios use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from subscriber.demo.servers import Server, Servers
from subscriber.settings import Settings
from tests.plugins.fix_cluster import SETTINGS, Database, as_root
from tests.plugins.fix_subscriber import Subscriber, running_subscriber


@dataclass
class Pair:
    """`source` and `target` databases, and the `subscriber` whose launcher runs on the target."""

    source: Database
    target: Database
    subscriber: Subscriber

    async def both(self, *statements: str) -> None:
        """Run statements on both sides, each in a transaction of its own."""
        await self.source.execute(*statements)
        await self.target.execute(*statements)

    async def subscribe(self, publication: str, **options: object) -> None:
        """Publication p with that definition and subscription s to it; until everything is copied."""
        await self.source.execute(f"CREATE PUBLICATION p {publication}")
        await self.subscriber.create(self.source, "p", "s", **options)
        await self.caught_up()

    async def caught_up(self) -> None:
        """Wait until the tables are copied, and the source's position is applied and confirmed."""
        await self.subscriber.wait_for_sync(self.source)

    async def change(self, *statements: str) -> None:
        """Run statements on the source and wait until they are applied."""
        await self.source.execute(*statements)
        await self.source.wait_for_catchup("s")

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        return await self.target.rows(query)

    async def assert_same(self, query: str) -> None:
        """Check that the query has the same rows on both sides, and at least one."""
        expected = await self.source.rows(query)
        rows_read = await self.target.rows(query)
        assert expected
        for row, wanted in zip(rows_read, expected, strict=False):
            # not compared by pytest, which would take minutes over values of some size
            if row != wanted:
                pytest.fail(f"{query!r} gives {row!r:.1000}, not {wanted!r:.1000}")
        assert len(rows_read) == len(expected)

    async def fails(self, pattern: str) -> str:
        """Wait for an error in the log that matches the regular expression. Returns the match."""
        return (await self.subscriber.log.wait_for(pattern)).group(0)


@pytest.fixture(autouse=True)
async def _nothing_left(publisher: Server, target: Server) -> AsyncIterator[None]:
    """Check that a test leaves nothing in a server outside its databases, where the next test would find it."""
    before = [await _origins_and_slots(server) for server in (publisher, target)]
    yield
    assert [await _origins_and_slots(server) for server in (publisher, target)] == before


async def _origins_and_slots(server: Server) -> list[str]:
    query = "SELECT roname FROM pg_replication_origin UNION ALL SELECT slot_name FROM pg_replication_slots ORDER BY 1"
    return [name for (name,) in await as_root(server, lambda root: root.fetch(query))]


@pytest.fixture
def pair(source_db: Database, target_db: Database, subscriber: Subscriber) -> Pair:
    return Pair(source_db, target_db, subscriber)


@pytest.fixture
async def target_of_its_own(servers: Servers, source_db: Database, settings: Settings) -> AsyncIterator[Pair]:
    """Create a pair with a separate target that the test may damage."""
    server = await servers.create("target", SETTINGS)
    await server.start()
    target = Database(server, "postgres")
    async with running_subscriber(target, settings=settings) as subscriber:
        yield Pair(source_db, target, subscriber)
