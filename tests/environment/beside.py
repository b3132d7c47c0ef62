"""PostgreSQL's own subscription and ours in parallel: one source, and two databases of the same target server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import UNFINISHED, Subscriber, running_subscriber

NATIVE, OURS = "native", "ours"  # the subscriptions, in the databases of these names


@dataclass
class Stage:
    """Publication p of the source is followed by both subscriptions."""

    source: Database
    native: Database
    ours: Database
    subscriber: Subscriber

    async def on_targets(self, *statements: str) -> None:
        for database in (self.native, self.ours):
            await database.execute(*statements)

    async def everywhere(self, *statements: str) -> None:
        await self.source.execute(*statements)
        await self.on_targets(*statements)

    def creation(self, name: str, options: str = "") -> str:
        """CREATE SUBSCRIPTION; `options` as the statement spells them."""
        given = f" WITH ({options})" if options else ""
        return f"CREATE SUBSCRIPTION {name} CONNECTION '{self.source.dsn()}' PUBLICATION p{given}"

    async def subscribe(self, options: str = "", *, ours: str = "") -> None:
        """Create both; `ours` are options that PostgreSQL does not have."""
        await self.native.execute(self.creation(NATIVE, options))
        await self.subscriber.execute(self.creation(OURS, ", ".join(filter(None, [options, ours]))))

    async def alter(self, change: str) -> None:
        """Execute ALTER SUBSCRIPTION for both."""
        await self.native.execute(f"ALTER SUBSCRIPTION {NATIVE} {change}")
        await self.subscriber.execute(f"ALTER SUBSCRIPTION {OURS} {change}")

    async def restart(self) -> None:
        """Restart both."""
        await self.alter("DISABLE")
        await self.alter("ENABLE")

    async def copied(self) -> None:
        """Wait until all tables are copied and handed over to the apply workers."""
        # The hand-over is finished at a position after the table's own; a transaction brings one.
        await self.source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        await asyncio.gather(
            self.native.wait_for("SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", 0),
            self.ours.wait_for(UNFINISHED.format(name=OURS, states="'r'"), 0, timeout=30),
        )
        await self.caught_up()

    async def caught_up(self) -> None:
        for name in (NATIVE, OURS):
            await self.source.wait_for_catchup(name)

    async def compare(self, *queries: str) -> None:
        """Wait for both. Then check that each query has the same rows in both."""
        await self.caught_up()
        for query in queries:
            assert await self.ours.rows(query) == await self.native.rows(query), query

    async def drop(self) -> None:
        """Drop both subscriptions, as far as they are there."""
        await self.subscriber.execute(f"DROP SUBSCRIPTION IF EXISTS {OURS}")
        await self.native.execute(f"DROP SUBSCRIPTION IF EXISTS {NATIVE}")


def contents(tables: Sequence[str]) -> list[str]:
    """Return the queries for all rows of the tables."""
    return [f"SELECT t::text FROM {table} t ORDER BY 1" for table in tables]


@asynccontextmanager
async def beside(
    publisher: Server, target: Server, here: str | None = None, there: str | None = None, *, start: bool = True
) -> AsyncIterator[Stage]:
    """Create three empty databases in these encodings, and our launcher. Subscriptions are dropped at the end."""
    async with (
        fresh_database(publisher, here) as source,
        fresh_database(target, there) as native,
        fresh_database(target, there) as ours,
        running_subscriber(ours, start=start) as subscriber,
    ):
        stage = Stage(source, native, ours, subscriber)
        try:
            yield stage
        finally:
            await stage.drop()
