"""Databases other than SQLite: their statements, the way without an upsert, and MariaDB where Docker runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from sqlalchemy import Column, MetaData, Table, select
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.schema import CreateTable

from subscriber.target.sql_table import TargetTable
from subscriber.target.sql_types import column_type
from subscriber.target.sqlalchemy import SqlTarget
from tests.mirror.conftest import Mirror
from tests.source.test_containers import without_docker


def table(*types: int) -> Table:
    """Columns a, b, c … of these types of the publisher; the first is the key."""
    names = "abcdefgh"[: len(types)]
    columns = [
        Column(n, column_type(t, -1, in_key=n == "a"), primary_key=n == "a") for n, t in zip(names, types, strict=True)
    ]
    return Table("t", MetaData(), *columns)


def test_types_of_mysql() -> None:
    created = str(CreateTable(table(25, 25, 17, 1114, 1700)).compile(dialect=mysql.dialect()))
    for expected in (
        "a VARCHAR(255) COLLATE utf8mb4_bin NOT NULL",
        "b LONGTEXT",
        "c LONGBLOB",
        "d DATETIME(6)",
        "e LONGTEXT",
    ):
        assert expected in created


def test_numbers_with_a_precision_are_decimals() -> None:
    modifier = (12 << 16 | 2) + 4
    assert str(column_type(1700, modifier, in_key=False).compile(dialect=mysql.dialect())) == "NUMERIC(12, 2)"


def test_upserts() -> None:
    found = TargetTable("public.t", table(23, 25), ("a",), "mariadb").upsert(("a", "b"))
    assert [str(statement.compile(dialect=mysql.dialect())) for statement in found] == [
        "INSERT INTO t (a, b) VALUES (%s, %s) ON DUPLICATE KEY UPDATE b = VALUES(b)"
    ]
    found = TargetTable("public.t", table(23, 25), ("a",), "other").upsert(("a", "b"))
    assert [str(statement.compile(dialect=sqlite.dialect())) for statement in found] == [
        "DELETE FROM t WHERE t.a = ?",
        "INSERT INTO t (a, b) VALUES (?, ?)",
    ]


async def test_without_an_upsert_rows_are_deleted_before(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqlTarget, "_table", lambda _, label, table, key: TargetTable(label, table, key, "other"))
    await changes_arrive(mirror, mirror.url)


async def changes_arrive(mirror: Mirror, url: str) -> None:
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


@pytest.fixture(scope="module", params=["mariadb:11"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a database in a container."""
    if reason := without_docker():
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about decorators of its own
        from testcontainers.mysql import MySqlContainer

        server = MySqlContainer(request.param, username="test", password="test", dbname="test")
        with server as started:
            yield started.get_connection_url().replace("mysql://", "mysql+aiomysql://")


@pytest.mark.timeout(300)
async def test_in_a_container(mirror: Mirror, url: str) -> None:
    await changes_arrive(mirror, url)
