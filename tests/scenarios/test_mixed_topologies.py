"""Servers that publish all tables and subscribe to each other, natively and with subscriber, in every combination.

Subscriptions are created and dropped while rows are inserted everywhere. All rows arrive everywhere once, no row of
schema "subscriber" is replicated, and no subscription stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import Subscriber, running_subscriber

OURS, NATIVE = "ours", "native"

# Tables of schema subscriber that a subscription of the server has.
ARRIVED = """
SELECT count(*) FROM pg_subscription_rel r JOIN pg_class c ON c.oid = r.srrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'subscriber'
"""
OFFLINE = "WITH (connect = false, slot_name = NONE)"
NATIVE_ERRORS = """
SELECT coalesce(sum(apply_error_count + sync_error_count), 0)::int FROM pg_stat_subscription_stats
 WHERE subid IN (SELECT oid FROM pg_subscription
                  WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


@dataclass
class Node:
    """A database that publishes all its tables; `number` counts from 1. Its writer inserts rows until stopped.

    Schema subscriber is created when its launcher starts, for its first subscription of ours.
    """

    number: int
    database: Database
    subscriber: Subscriber
    written: int = 0
    _stopped: bool = False
    native: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start the launcher unless it runs."""
        if self.subscriber.launcher is None:
            self.subscriber.start()

    async def write(self) -> None:
        """Insert one row after another."""
        async with self.database.connection() as connection:
            while not self._stopped:
                await connection.execute("INSERT INTO t VALUES ($1, $2)", self.number, self.written)
                self.written += 1
                await asyncio.sleep(0.005)

    def stop_writing(self) -> None:
        self._stopped = True

    async def subscribe(self, upstream: Node, kind: str, **options: str) -> str:
        """Create a subscription of either kind to all tables of `upstream`, with its copy; its name."""
        name = f"from_{upstream.number}_to_{self.number}_{kind}"
        if kind == OURS:
            self.start()
            await self.subscriber.create(upstream.database, "everything", name, **options)
        else:
            given = ", ".join(f"{option} = {value}" for option, value in options.items())
            await self.database.execute(
                f"CREATE SUBSCRIPTION {name} CONNECTION '{upstream.database.dsn()}' PUBLICATION everything"
                + (f" WITH ({given})" if given else "")
            )
            self.native.append(name)
        return name

    async def drop(self, name: str) -> None:
        if name in self.native:
            await self.database.execute(f"DROP SUBSCRIPTION {name}")
            self.native.remove(name)
        else:
            await self.subscriber.execute(f"DROP SUBSCRIPTION {name}")

    async def wait_for_rows(self, writers: Sequence[Node]) -> None:
        """Wait until all rows of `writers`, which have stopped, are here. Fails if a row is here twice."""
        for writer in writers:
            await self.database.wait_for(
                f"SELECT count(*) || ' of ' || count(DISTINCT n) FROM t WHERE node = {writer.number}",
                f"{writer.written} of {writer.written}",
                timeout=60,
            )

    async def assert_healthy(self) -> None:
        assert await self.database.value(ARRIVED) == 0
        assert await self.database.value(NATIVE_ERRORS) == 0
        assert not self.subscriber.log.has("ERROR|WARNING|conflict")


@asynccontextmanager
async def nodes(servers: Sequence[Server]) -> AsyncIterator[list[Node]]:
    """Create a node on each server."""
    async with AsyncExitStack() as stack:
        opened = []
        for number, server in enumerate(servers, 1):
            database = await stack.enter_async_context(fresh_database(server))
            # No key: a row that returns in a circle would be there twice.
            await database.execute("CREATE TABLE t (node int, n int)", "CREATE PUBLICATION everything FOR ALL TABLES")
            opened.append(
                Node(number, database, await stack.enter_async_context(running_subscriber(database, start=False)))
            )
        try:
            yield opened
        finally:
            for node in opened:
                for name in node.native:
                    await node.database.execute(
                        f"ALTER SUBSCRIPTION {name} DISABLE",
                        f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)",
                        f"DROP SUBSCRIPTION {name}",
                    )


@asynccontextmanager
async def writing(found: Sequence[Node]) -> AsyncIterator[None]:
    """Run writers on all nodes during the block, and stop them at its end."""
    async with anyio.create_task_group() as tasks:
        for node in found:
            tasks.start_soon(node.write)
        try:
            yield
        finally:
            for node in found:
                node.stop_writing()


async def wait_for_copy(node: Node, name: str) -> None:
    """Wait until the subscription has copied all its tables."""
    states = "SELECT count(*) FILTER (WHERE srsubstate NOT IN ('r', 's')) = 0 AND count(*) > 0 FROM {} r JOIN {} s"
    states += " ON s.oid = r.srsubid WHERE s.subname = '{}'"
    schema = "pg_catalog" if name in node.native else "subscriber"
    await node.database.wait_for(
        states.format(f"{schema}.pg_subscription_rel", f"{schema}.pg_subscription", name), timeout=60
    )


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (OURS, NATIVE),
        *(pytest.param(*ways, marks=pytest.mark.soak) for ways in ((OURS, OURS), (NATIVE, OURS), (NATIVE, NATIVE))),
    ],
)
async def test_two_servers_that_replicate_to_each_other_feed_a_third(
    publisher: Server, target: Server, there: str, back: str
) -> None:
    """The third, behind the second, subscribes with a copy by either kind, one after the other, while rows arrive."""
    async with nodes([publisher, target, publisher]) as (first, second, third):
        for node in (first, second):
            await node.database.needs(16, "a publisher knows origins")
        names = [
            await second.subscribe(first, there, origin="none", copy_data="false"),
            await first.subscribe(second, back, origin="none", copy_data="false"),
        ]
        async with writing([first, second]):
            for kind in (back, OURS if back == NATIVE else NATIVE):
                name = await third.subscribe(second, kind)
                await wait_for_copy(third, name)
                for node in (first, second, third):
                    node.start()  # schema subscriber is created while others replicate
                    await node.subscriber.execute(f"CREATE SUBSCRIPTION unused CONNECTION '' PUBLICATION p {OFFLINE}")
                    await node.subscriber.execute("DROP SUBSCRIPTION unused")
                await asyncio.sleep(0.2)
                if kind == back:
                    await third.drop(name)
                    await third.database.execute("TRUNCATE t")
        for node in (first, second, third):
            await node.wait_for_rows([first, second])
            await node.assert_healthy()
        await third.drop(name)
        await second.drop(names[0])
        await first.drop(names[1])
