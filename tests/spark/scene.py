"""A source with writes and an archive, for readers of the log: tables with keys, TOAST and without a key."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import asyncpg

from subscriber.archive.worker import Archiver
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.writer import log_writer
from subscriber.lsn import Lsn
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database

TABLES = """
CREATE TABLE item (id int PRIMARY KEY, number numeric(12,2), note text, big text, at timestamptz, ok bool, raw bytea);
ALTER TABLE item ALTER big SET STORAGE EXTERNAL;
CREATE TABLE log (writer int, text text);
CREATE TABLE pair (a int, b text, value bigint UNIQUE, PRIMARY KEY (a, b));
CREATE TABLE bag (a int, b text);
ALTER TABLE bag REPLICA IDENTITY FULL;
"""
NAMES = ("item", "log", "pair", "bag")
ROWS = """
INSERT INTO item SELECT i, i / 3.0, E'tab\\t back\\\\ line\\n' || i, repeat('big' || i, 1500), now(),
       i % 2 = 0, '\\x00ff' FROM generate_series(1, 100) i;
INSERT INTO pair SELECT i, 'b' || i, i FROM generate_series(1, 50) i;
INSERT INTO bag SELECT i % 10, 'x' FROM generate_series(1, 30) i;
"""

# Of a lake: files of any size get the positions of deleted rows, if their format has them.
POSITIONS = Settings(lake_rewrite_size=0, lake_deleted_percent=50)


def statement(chance: random.Random) -> str:
    """Return one transaction of a busy application."""
    k, m = chance.randint(1, 100), chance.randint(1, 50)
    return chance.choice(
        [
            f"UPDATE item SET number = number + 1, ok = NOT ok WHERE id = {k}",
            f"UPDATE item SET id = id + 1000 WHERE id = {k}; UPDATE item SET note = 'moved' WHERE id = {k + 1000}",
            f"UPDATE item SET id = {k} WHERE id = {k + 1000} AND NOT EXISTS (SELECT FROM item WHERE id = {k})",
            f"UPDATE item SET big = repeat(md5('{chance.random()}'), 200) WHERE id = {k}",
            f"DELETE FROM item WHERE id = {k}",
            f"INSERT INTO item VALUES ({k}, {k}.5, NULL, repeat('q', 9000), now()) ON CONFLICT DO NOTHING",
            f"INSERT INTO log SELECT {k}, 'text' || i FROM generate_series(1, {m}) i",
            f"UPDATE pair SET value = -value WHERE a IN ({m}, {m + 1}); "
            f"UPDATE pair SET value = 100000 + a WHERE a = {m}",
            f"DELETE FROM pair WHERE a = {m}; INSERT INTO pair VALUES ({m}, 'b{m}', {m + 10**6}),"
            f" ({m}, 'c', {k + 10**7}) ON CONFLICT DO NOTHING",
            f"DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = {k % 10})",
            f"INSERT INTO bag VALUES ({k % 10}, 'x'), ({k % 10}, 'x'); UPDATE bag SET b = 'y' WHERE a = {m % 10}",
            "TRUNCATE log" if m == 1 else "SELECT 1",
        ]
    )


@dataclass
class Scene:
    """The publication is `p`, the archiver's slot `a`."""

    source: Database
    directory: Path
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def log(self) -> ChangeLog:
        return ChangeLog(self.directory / "log")

    async def write(self, transactions: int) -> None:
        async with self.source.connection() as connection:
            for _ in range(transactions):
                with suppress(asyncpg.UniqueViolationError):  # rolled back, as applications' transactions are
                    async with connection.transaction():
                        await connection.execute(statement(self.chance))

    async def position(self) -> Lsn:
        return Lsn.parse(await self.source.value("SELECT pg_current_wal_insert_lsn()::text"))

    async def archive(self) -> Lsn:
        """Have everything that is committed in the log; the position."""
        await self.source.execute("SELECT pg_logical_emit_message(true, 'scene', '')")
        now = await self.position()
        writer = log_writer(self.directory / "log", segment_size=1 << 20)
        writer.open()
        try:
            with anyio.fail_after(60):
                await Archiver(self.source.dsn(), "a", ["p"], writer, now).run()
        finally:
            writer.close()
        return now

    async def rows(self, database: Database, table: str) -> list[str]:
        """Return all rows of a table as text, sorted."""
        return [row for (row,) in await database.rows(f"SELECT t::text FROM {table} t ORDER BY 1")]


@asynccontextmanager
async def archived(source: Database, directory: Path) -> AsyncIterator[Scene]:
    """Create, fill and publish the tables, then start the log."""
    await source.execute(TABLES, ROWS, f"CREATE PUBLICATION p FOR TABLE {', '.join(NAMES)}")
    scene = Scene(source, directory)
    await scene.archive()
    yield scene
