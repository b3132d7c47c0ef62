"""A cancelled launcher ends, whatever it is doing: the task is cancelled once, as asyncio does."""

from __future__ import annotations

import anyio

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions, running_subscriber
from tests.scenarios.conftest import Pair


async def test_a_launcher_ends_when_cancelled_while_it_creates_the_schema(target_db: Database) -> None:
    for number in range(8):
        async with running_subscriber(target_db):  # fails if it does not end
            await anyio.sleep(number * 0.02)
        await target_db.execute("DROP SCHEMA IF EXISTS subscriber CASCADE")


async def test_a_launcher_ends_when_cancelled_while_workers_start(
    source_db: Database, target_db: Database, subscriptions: Subscriptions
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await source_db.execute("INSERT INTO t SELECT generate_series(1, 1000)", "CREATE PUBLICATION p FOR TABLE t, u")
    await subscriptions.create(source_db, "p")
    for number in range(12):
        async with running_subscriber(target_db):
            await source_db.execute(f"INSERT INTO u VALUES ({number})")
            await anyio.sleep(number * 0.01)
    async with running_subscriber(target_db) as subscriber:
        pair = Pair(source_db, target_db, subscriber)
        await pair.caught_up()
        await pair.assert_same("SELECT count(*), sum(id) FROM t")
        await pair.assert_same("SELECT count(*), sum(id) FROM u")
