"""A publisher, and files of SQLite to mirror it to."""

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
        """Until everything is there that is on the source now."""
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


async def changes_arrive(mirror: Mirror, url: str) -> None:
    """Rows inserted, updated, deleted and with a new key, on any database."""
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
        found = await connection.run_sync(lambda sync: Table("t", MetaData(), autoload_with=sync))
        rows = (await connection.execute(select(found))).all()
    await engine.dispose()
    assert sorted((r.id, str(r.n), r.b) for r in rows) == [(i, str(n), b) for i, n, b in expected]


@pytest.fixture
async def source(source_db: Database) -> Database:
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return source_db


@pytest.fixture
def mirror(source: Database, tmp_path: Path) -> Mirror:
    return Mirror(source, tmp_path / "mirror.db")
