"""A publisher, and SQLite files as mirrors."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import MetaData, Table, select
from sqlalchemy.ext.asyncio import create_async_engine

import subscriber
from tests.plugins.fix_cluster import Database


class Mirror:
    """Database `source` with publication p, mirrored to a file of SQLite by slot m."""

    def __init__(self, source: Database, file: Path) -> None:
        self.source = source
        self.file = file
        self.url = f"sqlite+aiosqlite:///{file}"

    async def run(self, **options: Any) -> None:
        """Run the mirror until it has everything that is on the source now."""
        end = options.pop("until", None) or subscriber.Lsn.parse(
            await self.source.value("SELECT pg_current_wal_insert_lsn()::text")
        )
        dsn = self.source.dsn(options="-c logical_decoding_work_mem=64kB")
        with anyio.fail_after(30):
            await subscriber.mirror(
                dsn, slot="m", publications=["p"], target=options.pop("target", self.url), until=end, **options
            )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.file)) as connection:
            return connection.execute(query).fetchall()

    def execute(self, statements: str) -> None:
        with closing(sqlite3.connect(self.file)) as connection:
            connection.executescript(statements)

    def require_unlocked(self) -> None:
        """Check that no session holds a write lock."""
        with closing(sqlite3.connect(self.file, timeout=0)) as connection:
            connection.execute("BEGIN IMMEDIATE")


# type, value, and its text if that is the same in every database
AS_TEXT = [
    ("date", "0001-01-01", "0001-01-01"),
    ("time", "23:59:59.999999", "23:59:59.999999"),
    ("timestamp", "2000-01-02 03:04:05.000006", "2000-01-02 03:04:05.000006"),
    ("timestamptz", "2000-01-02 03:04:05.6+02", "2000-01-02 01:04:05.600000"),
    ("timetz", "03:04:05+02", "03:04:05+02"),
    ("interval", "1 mon 2 days", "1 mon 2 days"),
    ("uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("jsonb", '{"a": 1.10}', '{"a": 1.10}'),
    ("int[]", "{1,NULL,3}", "{1,NULL,3}"),
    ("int4range", "[1,3)", "[1,3)"),
    ("inet", "10.0.0.1", "10.0.0.1"),
    ("numeric", "NaN", "NaN"),
    ("char(3)", "a", "a  "),
]


async def rows_of_types(mirror: Mirror, types: list[tuple[str, str, Any]], url: str) -> None:
    """Table t with three rows: all the values, copied; NULLs, copied; the values again, from the stream."""
    columns = ", ".join(f"c{i} {name}" for i, (name, _, _) in enumerate(types))
    values = ", ".join(f"${i + 1}::text::{name}" for i, (name, _, _) in enumerate(types))
    texts = [text for _, text, _ in types]
    connection = await mirror.source.connect()
    await connection.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    await connection.execute(f"INSERT INTO t VALUES (1, {values})", *texts)
    await connection.execute("INSERT INTO t VALUES (2)")
    await mirror.run(target=url)
    await connection.execute(f"INSERT INTO t VALUES (3, {values})", *texts)
    await mirror.run(target=url)


async def changes_arrive(mirror: Mirror, url: str) -> None:
    """Insert, update and delete rows, and change keys, on any database."""
    await mirror.source.execute(
        "CREATE TABLE t (id text PRIMARY KEY, n numeric(12, 2), at timestamptz, b bytea)",
        "INSERT INTO t SELECT i, i / 3.0, '2000-01-01 00:00:00.5+00', '\\x00' FROM generate_series(1, 2000) i",
    )
    await mirror.run(target=url)
    await mirror.source.execute(
        "UPDATE t SET n = -1 WHERE id < '2'; UPDATE t SET n = -2 WHERE id < '15'; DELETE FROM t WHERE id > '5'",
        "UPDATE t SET id = 'a' WHERE id = '2'; INSERT INTO t VALUES ('A', 1, 'epoch', NULL)",
    )
    await mirror.run(target=url)
    expected = await mirror.source.rows('SELECT id, n, b FROM t ORDER BY id COLLATE "C"')
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        reflected = await connection.run_sync(lambda sync: Table("t", MetaData(), autoload_with=sync))
        rows = (await connection.execute(select(reflected))).all()
    await engine.dispose()
    assert sorted((r.id, str(r.n), r.b) for r in rows) == [(i, str(n), b) for i, n, b in expected]


@pytest.fixture
async def source(source_db: Database) -> Database:
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return source_db


@pytest.fixture
def mirror(source: Database, tmp_path: Path) -> Mirror:
    return Mirror(source, tmp_path / "mirror.db")
