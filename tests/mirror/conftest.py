"""A publisher, and files of SQLite to mirror it to."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

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
        end = subscriber.Lsn.parse(await self.source.value("SELECT pg_current_wal_insert_lsn()::text"))
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


@pytest.fixture
async def source(source_db: Database) -> Database:
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return source_db


@pytest.fixture
def mirror(source: Database, tmp_path: Path) -> Mirror:
    return Mirror(source, tmp_path / "mirror.db")
