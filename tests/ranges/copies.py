"""Tables that are copied by ranges, and sessions that write to them: what tests of such copies share."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from time import monotonic
from typing import Any

import anyio
import asyncpg

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program

COLLISIONS = asyncpg.DeadlockDetectedError, asyncpg.UniqueViolationError  # of the writers
TABLE = "CREATE TABLE {} (id int PRIMARY KEY, n int NOT NULL DEFAULT 0, note text)"
# The values have 3,200 bytes. The publisher stores them out of line, because they are not compressed.
FILL = "INSERT INTO {} SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, {}) i"
CONTENT = "SELECT count(*), coalesce(md5(string_agg(t::text, ',' ORDER BY id)), '') FROM {} t"

# Ranges of one key are deleted when the table is ready.
NOTE_SINGLES = (
    "CREATE TABLE singles (key text)",
    "CREATE FUNCTION note_single() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS"
    " 'BEGIN INSERT INTO public.singles VALUES (NEW.low[1]); RETURN NULL; END'",
    "CREATE TRIGGER note_single AFTER INSERT ON subscriber.copied_range"
    " FOR EACH ROW WHEN (NEW.single) EXECUTE FUNCTION note_single()",
    "ALTER TABLE subscriber.copied_range ENABLE ALWAYS TRIGGER note_single",
)


async def prepare(source: Database, target: Database, *tables: str, rows: int = 900) -> None:
    """Create tables on both sides, with rows on the publisher, and a publication."""
    for table in tables:
        await prepare_table(source, target, table, rows)
    await source.execute("CREATE PUBLICATION p FOR ALL TABLES")


async def prepare_table(source: Database, target: Database, table: str, rows: int = 100) -> None:
    """Create a table on both sides, with rows on the publisher."""
    large = f"ALTER TABLE {table} ALTER note SET STORAGE EXTERNAL"
    await source.execute(TABLE.format(table), large, FILL.format(table, rows))
    await target.execute(TABLE.format(table))


async def write(source: Database, table: str, seed: int, stop: anyio.Event, pause: float = 0.02) -> int:
    """Change random rows until `stop`, with a pause in seconds after each transaction. Returns their number.

    Writers without a pause take the processors from the copy, which then takes longer.
    """
    chance, done = random.Random(seed), 0
    async with source.connection() as connection:
        while not stop.is_set():
            with suppress(*COLLISIONS):
                async with connection.transaction():
                    for _ in range(chance.randrange(1, 4)):
                        one, other = chance.randrange(1, 1000), chance.randrange(1, 1000)
                        statement = chance.choice(
                            [
                                f"UPDATE {table} SET n = n + 1 WHERE id = {one}",
                                f"DELETE FROM {table} WHERE id = {one}",
                                f"INSERT INTO {table} VALUES ({one}, 1, 'new') ON CONFLICT (id) DO NOTHING",
                                # A key that moves to another range, with a large value that does not change.
                                f"UPDATE {table} SET id = {one} WHERE id = {other}"
                                f" AND NOT EXISTS (SELECT FROM {table} WHERE id = {one})",
                            ]
                        )
                        await connection.execute(statement)
            done += 1
            await anyio.sleep(pause)
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


@contextmanager
def closing_program(program: Program) -> Iterator[None]:
    """Kill the program at the end of the block. After an error, show the end of its log."""
    try:
        yield
    except BaseException:
        print(program.text[-20_000:])
        raise
    finally:
        program.kill()


async def watch_snapshots(source: Database, stop: anyio.Event, ages: list[float]) -> None:
    """Add the ages of the snapshots of copies, in seconds, again and again.

    A walsender shows no start of its transaction. The lock of its virtual transaction identifies it: xmin
    stays the same while commits wait for a standby.
    """
    snapshots = (
        "SELECT a.pid, l.virtualxid FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid"
        " WHERE a.datname = current_database() AND a.application_name LIKE 's _' AND a.backend_xmin IS NOT NULL"
        " AND l.locktype = 'virtualxid' AND l.granted"
    )
    since: dict[tuple[int, str], float] = {}
    async with source.connection() as connection:
        while not stop.is_set():
            rows_read = {tuple(row) for row in await connection.fetch(snapshots)}
            since = {snapshot: since.get(snapshot, monotonic()) for snapshot in rows_read}
            ages.extend(monotonic() - start for start in since.values())
            await anyio.sleep(0.01)


@asynccontextmanager
async def between_ranges(source: Database, target: Database) -> AsyncIterator[asyncpg.Connection[Any]]:
    """Yield a transaction of the publisher while some ranges of table t are copied, and the next one cannot be read."""
    async with source.connection() as connection, target.connection() as watching:
        with anyio.fail_after(20):  # without pauses: the ranges become larger, and the last one is soon copied
            while not await watching.fetchval("SELECT count(*) > 2 FROM subscriber.copied_range"):
                pass
        async with connection.transaction():
            await connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            copied = "SELECT bool_or(high IS NULL) FROM subscriber.copied_range WHERE relid = 't'::regclass"
            assert not await target.value(copied), "the last range is not copied"
            yield connection
