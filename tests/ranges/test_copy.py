"""The initial copy by ranges, with a writer: every row arrives once, and no change is lost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, Program, Subscriber, Subscriptions

COLLISIONS = asyncpg.DeadlockDetectedError, asyncpg.UniqueViolationError  # of the writers
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
            with suppress(*COLLISIONS):
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


async def delay_commits(source: Database, stop: anyio.Event, longest: float) -> None:
    """Let commits wait for a synchronous standby, again and again, for up to `longest` seconds."""
    chance = random.Random(5)
    async with source.connection() as connection:
        try:
            while not stop.is_set():
                await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
                await connection.execute("SELECT pg_reload_conf()")
                await anyio.sleep(chance.uniform(0.1, longest))
                await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await connection.execute("SELECT pg_reload_conf()")
                await anyio.sleep(chance.uniform(0.05, 0.3))
        finally:
            with anyio.CancelScope(shield=True):
                await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await connection.execute("SELECT pg_reload_conf()")


async def prepare_transactions(source: Database, table: str, stop: anyio.Event) -> None:
    """Keep transactions prepared for a while. Some change a large value's row, some move keys, some roll back."""
    chance, number = random.Random(6), 0
    async with source.connection() as connection:
        while not stop.is_set():
            number += 1
            gid = f"{table}_{number}"
            one = chance.randrange(1, 1600)
            await connection.execute("BEGIN")
            try:
                await connection.execute(f"UPDATE {table} SET n = n + 1 WHERE id BETWEEN {one} AND {one + 3}")
            except COLLISIONS:
                await connection.execute("ROLLBACK")
                continue
            await connection.execute(f"PREPARE TRANSACTION '{gid}'")
            await anyio.sleep(chance.uniform(0.05, 0.4))
            await connection.execute(f"{'COMMIT' if number % 3 else 'ROLLBACK'} PREPARED '{gid}'")


async def truncate(source: Database, table: str, stop: anyio.Event) -> None:
    """Replace all rows of a table, in one transaction and in two."""
    chance = random.Random(7)
    async with source.connection() as connection:
        while not stop.is_set():
            await anyio.sleep(chance.uniform(0.3, 0.8))
            if chance.random() < 0.5:
                await connection.execute(f"TRUNCATE {table}")
                await connection.execute(FILL.format(table, 700) + " ON CONFLICT DO NOTHING")
            else:
                with suppress(*COLLISIONS):
                    async with connection.transaction():
                        await connection.execute(f"TRUNCATE {table}")
                        await connection.execute(FILL.format(table, 700))


@asynccontextmanager
async def hostile_writing(source: Database, longest: float) -> AsyncIterator[None]:
    """Everything that can go wrong with tables t, u and v, for the length of the block."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for seed, table in enumerate(("t", "u", "v")):
            tasks.start_soon(write, source, table, seed, stop)
        tasks.start_soon(prepare_transactions, source, "t", stop)
        tasks.start_soon(prepare_transactions, source, "u", stop)
        tasks.start_soon(truncate, source, "v", stop)
        tasks.start_soon(delay_commits, source, stop, longest)
        await anyio.sleep(0.2)
        try:
            yield
        finally:
            stop.set()


@contextmanager
def closing_program(program: Program) -> Iterator[None]:
    """Kill the program at the end of the block."""
    try:
        yield
    finally:
        program.kill()


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
async def test_kills_with_a_slow_standby(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions, kills: int
) -> None:
    settings = ("range_rows=20", "range_duration=0.02s", "retry_interval=0.2s")
    options = [option for setting in settings for option in ("--setting", setting)]
    program = Program(target_db.dsn(), processes / "run.log", options=options)
    chance = random.Random(kills)
    rows = 2000 if kills < 10 else 20_000
    await prepare(source_db, target_db, "t", "u", "v", rows=rows)
    await subscriptions.create(source_db, "p", "s", copy_engine="ranges")
    copied = "SELECT relid, count(*) FROM subscriber.copied_range GROUP BY relid"
    cut_off = 0
    with closing_program(program):
        async with hostile_writing(source_db, 0.4 if kills < 10 else 3.0):
            before: dict[int, int] = {}
            for _ in range(kills):
                await program.start("launcher started")
                await anyio.sleep(chance.uniform(0.8, 2.5))
                program.kill()
                states = dict(await target_db.rows("SELECT srrelid, srsubstate::text FROM subscriber.subscription_rel"))
                cut_off += "d" in states.values()
                after = dict(await target_db.rows(copied))
                for relid, state in states.items():
                    assert state in "sr" or after.get(relid, 0) >= before.get(relid, 0), "ranges that were copied stay"
                before = after
            await program.start("launcher started")
        await subscriptions.wait_for_ready(source_db, timeout=120)
        await source_db.wait_for_catchup("s", timeout=60)
        await same(source_db, target_db, "t", "u", "v")
    assert cut_off >= min(1, kills // 3)
    assert "copied in one snapshot" not in program.text
    assert "ERROR" not in program.text


async def test_tables_that_cannot_be_divided(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    await source_db.execute(
        "CREATE TABLE texts (k text PRIMARY KEY)",
        "CREATE TABLE wholes (a int)",
        "ALTER TABLE wholes REPLICA IDENTITY FULL",
        "CREATE TABLE others (id int PRIMARY KEY, u int UNIQUE)",
        "CREATE TABLE keys (a int, b uuid, PRIMARY KEY (b, a))",
        "INSERT INTO texts SELECT i FROM generate_series(1, 300) i",
        "INSERT INTO wholes SELECT i FROM generate_series(1, 300) i",
        "INSERT INTO others SELECT i, i FROM generate_series(1, 300) i",
        "INSERT INTO keys SELECT i, md5((i / 3)::text)::uuid FROM generate_series(1, 300) i",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    await target_db.execute(
        "CREATE TABLE texts (k text PRIMARY KEY)",
        "CREATE TABLE wholes (a int)",
        "CREATE TABLE others (id int PRIMARY KEY, u int UNIQUE)",
        "CREATE TABLE keys (a int, b uuid, PRIMARY KEY (b, a))",
    )
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await subscriber.wait_for_ready(source_db)
    for table in ("texts", "wholes", "others", "keys"):
        rows = f"SELECT * FROM {table} t ORDER BY t"
        assert await target_db.rows(rows) == await source_db.rows(rows)
    reasons = {
        "texts": 'the type of key column "k" is not an integer or uuid',
        "wholes": "the replica identity is not an index",
        "others": "the table of the target has another unique index or an exclusion constraint",
    }
    for table, reason in reasons.items():
        assert subscriber.log.has(f'table "public.{table}" is copied in one snapshot, because {reason}')
    assert not subscriber.log.has('"public.keys" is copied in one snapshot')
