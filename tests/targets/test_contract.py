"""The contract of targets, passed by those of the package and by the example."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from examples.list_target import ListTarget, Storage
from subscriber.catalog.connection import CatalogConnection
from subscriber.lsn import Lsn
from subscriber.target_contract import DDL, TargetContract, Values
from subscriber.targets.base import Target
from subscriber.targets.postgres.worker_session import TargetConfig, claim, open_target
from subscriber.targets.sqlalchemy.database import MirrorDatabase
from subscriber.targets.sqlalchemy.table import SourceColumn, SourceTable
from subscriber.targets.sqlalchemy.target import SqlTarget
from tests.architecture.source import FILES, nodes
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import subscription


class TestListTarget(TargetContract):
    def setup_method(self) -> None:
        self.storage = Storage()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Target]:
        yield ListTarget(self.storage)

    async def rows(self, table: str) -> list[Values]:
        stored = self.storage.tables.get(f"public.{table}", [])
        return [tuple(None if value is None else value.decode() for value in row) for row in stored]


def test_the_example_is_short() -> None:
    lines = (Path(__file__).parents[2] / "examples" / "list_target.py").read_text().splitlines()
    assert len(lines) < 100


def test_each_target_of_the_package_passes_the_contract() -> None:
    """A class of subscriber.targets with a name that ends in Target is one, and a new one gets a test class here."""
    classes = [node for name, file in FILES.items() if name.startswith("targets/") for node in nodes(file)]
    targets = [node for node in classes if isinstance(node, ast.ClassDef) and node.name.endswith("Target")]
    assert {node.name for node in targets} == {"Target", "PostgresTarget", "SqlTarget"}
    assert all(ast.unparse(base) in ("Target", "ABC") for node in targets for base in node.bases)


class SqlContract(TargetContract):
    """The target of mirrors, in the database of `url`."""

    has_tables_without_key = False
    writes_missing_rows = True
    url: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Target]:
        async with MirrorDatabase.open(self.url, "m") as there:
            if await there.progress() is None:
                await there.begin_mirror(1)
                await there.prepare(SOURCES, create=True)
                async with there.copy(Lsn(0)):
                    pass
            else:
                await there.load()
            progress = await there.progress()
            assert progress is not None
            async with SqlTarget.open(there, progress, None) as target:
                yield target

    async def rows(self, table: str) -> list[Values]:
        engine = create_async_engine(self.url)
        async with engine.connect() as connection:
            rows = (await connection.execute(text(f"SELECT * FROM {table}"))).all()
        await engine.dispose()
        return [tuple(None if value is None else str(value) for value in row) for row in rows]


def _source(table: str, key: tuple[str, ...], **types: int) -> SourceTable:
    columns = tuple(SourceColumn(name, oid, -1) for name, oid in types.items())
    return SourceTable("public", table, columns, key, ("public", table))


INTEGER, TEXT = 23, 25
SOURCES = (
    _source("item", ("id",), id=INTEGER, name=TEXT, note=TEXT),
    _source("line", ("item", "number"), item=INTEGER, number=INTEGER, quantity=INTEGER),
)


class TestSqlite(SqlContract):
    @pytest.fixture(autouse=True)
    def _database(self, tmp_path: Path) -> None:
        self.url = f"sqlite+aiosqlite:///{tmp_path / 'target.db'}"


class PostgresContract(TargetContract):
    batching: bool

    @pytest.fixture(autouse=True)
    async def _database(self, db: Database) -> None:
        self.db = db
        await db.execute(*DDL, "ALTER TABLE entry REPLICA IDENTITY FULL")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Target]:
        async with AsyncExitStack() as stack:
            catalog = await stack.enter_async_context(CatalogConnection.open(self.db.dsn(), "test"))
            config = TargetConfig(self.db.dsn(), "s", subscription(), 0, lambda *_: None, batching=self.batching)
            worker = await stack.enter_async_context(open_target(config, catalog))
            claimed = await claim(catalog, subscription(), 0)
            assert claimed is not None
            target = await worker.resume(claimed)
            yield target

    async def rows(self, table: str) -> list[Values]:
        rows = await self.db.rows(f"SELECT * FROM {table}")
        return [tuple(None if value is None else str(value) for value in row) for row in rows]


class TestRowByRow(PostgresContract):
    batching = False


class TestBatches(PostgresContract):
    batching = True
