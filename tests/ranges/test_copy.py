"""The initial copy by ranges, with a writer: every row arrives once, and no change is lost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, Subscriber

TABLE = "CREATE TABLE {} (id int PRIMARY KEY, n int NOT NULL DEFAULT 0, note text)"
LARGE = "(SELECT string_agg(md5(({} * 100 + j)::text), '') FROM generate_series(1, 100) j)"
FILL = f"INSERT INTO {{}} SELECT i, 0, {LARGE.format('i')} FROM generate_series(1, {{}}) i"
CONTENT = "SELECT count(*), coalesce(md5(string_agg(t::text, ',' ORDER BY id)), '') FROM {} t"


@pytest.fixture
def settings() -> Settings:
    """Ranges of few rows."""
    return Settings(
        retry_interval=QUICK.retry_interval,
        empty_database_poll_interval=QUICK.empty_database_poll_interval,
        range_rows=50,
        range_duration=0.05,
    )


async def prepare(source: Database, target: Database, *tables: str, rows: int = 1500) -> None:
    """Create tables on both sides, with rows on the publisher, and a publication."""
    for table in tables:
        await source.execute(TABLE.format(table), FILL.format(table, rows))
        await source.execute(f"ALTER TABLE {table} ALTER note SET STORAGE EXTERNAL")
        await target.execute(TABLE.format(table))
    await source.execute("CREATE PUBLICATION p FOR ALL TABLES")


async def write(source: Database, table: str, seed: int, stop: anyio.Event) -> int:
    """Change random rows until `stop`. Returns the number of transactions."""
    chance, done = random.Random(seed), 0
    async with source.connection() as connection:
        while not stop.is_set():
            async with connection.transaction():
                for _ in range(chance.randrange(1, 4)):
                    one, other = chance.randrange(1, 1600), chance.randrange(1, 1600)
                    statement = chance.choice(
                        [
                            f"UPDATE {table} SET n = n + 1 WHERE id = {one}",
                            f"DELETE FROM {table} WHERE id = {one}",
                            f"INSERT INTO {table} VALUES ({one}, 1, 'new') ON CONFLICT DO NOTHING",
                            # A key that moves to another range, with a large value that does not change.
                            f"UPDATE {table} SET id = {one} WHERE id = {other}"
                            f" AND NOT EXISTS (SELECT FROM {table} WHERE id = {one})",
                        ]
                    )
                    await connection.execute(statement)
            done += 1
            await anyio.lowlevel.checkpoint()
    return done


@asynccontextmanager
async def writing(source: Database, *tables: str) -> AsyncIterator[None]:
    """Write to the tables for the length of the block."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for seed, table in enumerate(tables):
            tasks.start_soon(write, source, table, seed, stop)
        await anyio.sleep(0.1)
        try:
            yield
        finally:
            stop.set()


async def same(source: Database, target: Database, *tables: str) -> None:
    """Assert that the tables have the same rows on both sides."""
    for table in tables:
        rows = [await database.rows(CONTENT.format(table)) for database in (source, target)]
        assert rows[0] == rows[1], table


async def test_rows_that_change_during_the_copy(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, "t", "u")
    async with writing(source_db, "t", "u"):
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        await subscriber.wait_for_ready(source_db, timeout=60)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u")
    assert not subscriber.log.has("copied in one snapshot")
    assert not subscriber.log.has("ERROR")
    assert await target_db.value("SELECT count(*) FROM subscriber.copied_range") == 0
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert await source_db.value(slots) == 1
