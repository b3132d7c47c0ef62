"""The time of the first changes on a server with JIT, compared with PostgreSQL's own subscription."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import monotonic

import anyio
import pytest

from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import Subscriber

FIRST_ROWS = 5  # tables that get their first row, for each of the two
BARE = ("CREATE TABLE bare_{0} (a int, b text)", "ALTER TABLE bare_{0} REPLICA IDENTITY FULL")

UPDATES = 3
# With JIT each first row took 2 to 9 s and each update 12 to 20 s; without 0.02 s, PostgreSQL's own 0.01 s.
TIMES = 20  # as long as PostgreSQL's own


class Race:
    """One source; the same tables for ours and PostgreSQL's own, so that each applies only its share."""

    def __init__(self, source: Database, targets: dict[str, Database]) -> None:
        self.source = source
        self.targets = targets

    async def seconds(self, who: str, change: str, seen: str) -> float:
        """Return the seconds from the answer to `change` until `seen` is true on the target of `who`."""
        watching = await self.targets[who].connect()
        await self.source.execute(change)
        began = monotonic()
        with anyio.fail_after(60):
            while not await watching.fetchval(seen):
                await anyio.sleep(0.001)
        return monotonic() - began


@pytest.fixture
async def race(source_db: Database, target_db: Database, subscriber: Subscriber) -> AsyncIterator[Race]:
    source = source_db
    async with fresh_database(target_db.server) as native:
        if not await native.value("SELECT pg_jit_available() AND current_setting('jit')::bool"):
            pytest.skip("this server has no JIT")
        for who, database in (("ours", target_db), ("native", native)):
            tables = [f"CREATE TABLE first_{who}_{n} (id int PRIMARY KEY, t text)" for n in range(FIRST_ROWS)]
            tables += [statement.format(who) for statement in BARE]
            await source.execute(*tables, f"INSERT INTO bare_{who} SELECT i, 'x' FROM generate_series(1, 100) i")
            await database.execute(*tables)
            names = ", ".join([*(f"first_{who}_{n}" for n in range(FIRST_ROWS)), f"bare_{who}"])
            await source.execute(f"CREATE PUBLICATION {who} FOR TABLE {names}")
        await subscriber.create(source, "ours", "ours")
        await native.execute(f"CREATE SUBSCRIPTION native CONNECTION '{source.dsn()}' PUBLICATION native")
        await subscriber.wait_for_ready(source, "ours")
        await native.wait_for("SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel")
        yield Race(source, {"ours": target_db, "native": native})
        await native.execute("DROP SUBSCRIPTION native")


def assert_alike(found: dict[str, list[float]]) -> None:
    """Compare our fastest change with PostgreSQL's slowest: another process may take the processor at any time."""
    assert min(found["ours"]) < TIMES * max(found["native"]), found


async def test_first_rows_and_updates_without_a_key_take_about_as_long_as_postgresqls_own(race: Race) -> None:
    durations: dict[str, list[float]] = {"ours": [], "native": []}
    for number in range(FIRST_ROWS):
        for who, seconds in durations.items():
            table = f"first_{who}_{number}"
            seen = f"SELECT EXISTS (SELECT FROM {table})"
            seconds.append(await race.seconds(who, f"INSERT INTO {table} VALUES (1, 'x')", seen))
    assert_alike(durations)

    updated: dict[str, list[float]] = {"ours": [], "native": []}
    for number in range(UPDATES):
        for who, seconds in updated.items():
            seen = f"SELECT bool_and(b = 'y{number}') FROM bare_{who}"
            seconds.append(await race.seconds(who, f"UPDATE bare_{who} SET b = 'y{number}'", seen))
    assert_alike(updated)
