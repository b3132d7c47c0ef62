"""Databases other than SQLite: their statements, and the path without an upsert."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, MetaData, Table
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.schema import CreateTable

from subscriber.targets.sqlalchemy.database import MirrorDatabase
from subscriber.targets.sqlalchemy.table import TargetTable
from subscriber.targets.sqlalchemy.types import column_type
from tests.mirror.conftest import Mirror, changes_arrive


def table(*types: int) -> Table:
    """Return a table with columns a, b, c … of the publisher's types; the first is the key."""
    names = "abcdefgh"[: len(types)]
    columns = [
        Column(n, column_type(t, -1, in_key=n == "a"), primary_key=n == "a") for n, t in zip(names, types, strict=True)
    ]
    return Table("t", MetaData(), *columns)


def test_types_of_mysql_are_created_for_types_of_postgresql() -> None:
    created = str(CreateTable(table(25, 25, 17, 1114, 1700)).compile(dialect=mysql.dialect()))
    for expected in (
        "a VARCHAR(255) NOT NULL",
        "b LONGTEXT",
        "c LONGBLOB",
        "d DATETIME(6)",
        "e LONGTEXT",
    ):
        assert expected in created


def test_numbers_with_a_precision_are_decimals() -> None:
    modifier = (12 << 16 | 2) + 4
    assert str(column_type(1700, modifier, in_key=False).compile(dialect=mysql.dialect())) == "NUMERIC(12, 2)"


def test_each_database_has_its_upsert() -> None:
    statements = TargetTable("public.t", table(23, 25), ("a",), "mariadb").upsert(("a", "b"))
    assert [str(statement.compile(dialect=mysql.dialect())) for statement in statements] == [
        "INSERT INTO t (a, b) VALUES (%s, %s) ON DUPLICATE KEY UPDATE b = VALUES(b)"
    ]
    statements = TargetTable("public.t", table(23, 25), ("a",), "other").upsert(("a", "b"))
    assert [str(statement.compile(dialect=sqlite.dialect())) for statement in statements] == [
        "DELETE FROM t WHERE t.a = ?",
        "INSERT INTO t (a, b) VALUES (?, ?)",
    ]


async def test_rows_are_deleted_before_the_insert_where_no_upsert_exists(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MirrorDatabase, "_table", lambda _, label, table, key: TargetTable(label, table, key, "other"))
    await changes_arrive(mirror, mirror.url)
