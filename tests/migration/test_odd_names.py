"""Statements that a move prints are piped into psql, with names that have syntax of psql and of a shell in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from subscriber.connection.connect import connect
from subscriber.demo.servers import embedded_bin
from subscriber.migration.diff.schema_diff import schema_diff
from subscriber.quoting import identifier, literal
from tests.migration.test_schema_command import migrate
from tests.plugins.fix_cluster import Database
from tests.test_display import unseen
from tests.test_sql_text import NAMES, SYNTAX


def objects(name: str, number: int) -> list[str]:
    """Return statements that create an object of each kind with a name, below a schema with the name."""
    quoted, text = identifier(name), literal(name)
    table = f"{quoted}.{quoted}"
    return [
        f"CREATE SCHEMA {quoted}",
        f"COMMENT ON SCHEMA {quoted} IS {text}",
        f"CREATE TYPE {quoted}.{identifier(f'm{name}')} AS ENUM ({text}, 'other')",
        f"CREATE DOMAIN {quoted}.{identifier(f'd{name}')} AS text CHECK (VALUE <> {text})",
        f"CREATE TABLE {table} (id int, {quoted} text DEFAULT {text})",
        f"ALTER TABLE {table} ADD CONSTRAINT {quoted} CHECK ({quoted} <> {text})",
        f"CREATE INDEX {identifier(f'i{name}')} ON {table} ({quoted}) WHERE {quoted} <> {text}",
        f"CREATE VIEW {quoted}.{identifier(f'v{name}')} AS SELECT {text} AS {quoted}",
        f"CREATE FUNCTION {quoted}.{quoted}({quoted} text DEFAULT {text}) RETURNS text LANGUAGE sql"
        f" AS $_$ SELECT {text}\n\t\t::text -- {number} $_$",
        f"COMMENT ON COLUMN {table}.{quoted} IS {text}",
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY {quoted} ON {table} USING ({quoted} <> {text})",
        f"CREATE RULE {quoted} AS ON DELETE TO {table} DO INSTEAD NOTHING",
    ]


async def psql(script: str, database: Database, directory: Path) -> tuple[int, str]:
    """Pipe a script into psql. Returns the exit status and the errors."""
    process = await asyncio.create_subprocess_exec(
        *("psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", database.dsn()), stdin=-1, stdout=-1, stderr=-1, cwd=directory
    )
    _, errors = await process.communicate(script.encode())
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def left(source: Database, target: Database) -> list[str]:
    there, here = await connect(source.dsn()), await connect(target.dsn())
    try:
        return [difference.describe() for difference in await schema_diff(there, here)]
    finally:
        there.terminate()
        here.terminate()


async def test_definitions_are_printed_for_psql(source_db: Database, target_db: Database, tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        await source_db.execute(*objects(name, number))
    status, script, errors = await migrate(
        source_db, target_db, "schema", "--dry-run", "--programs", str(embedded_bin())
    )
    assert status == 0, errors
    assert await psql(script, target_db, tmp_path) == (0, "")
    assert {*unseen(script)} <= {"\n", "\t"}
    for _ in range(3):  # some statements need the objects of others
        status, script, errors = await migrate(source_db, target_db, "diff", "--sql")
        assert errors == ""
        assert {*unseen(script)} <= {"\n", "\t"}
        await psql(f"\\unset ON_ERROR_STOP\n{script}", target_db, tmp_path)
    assert await left(source_db, target_db) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["additional", "missing"])
async def test_differences_are_printed_for_psql(
    source_db: Database, target_db: Database, tmp_path: Path, kind: str
) -> None:
    """Additional objects of the target are comments, which have names, too."""
    database = target_db if kind == "additional" else source_db
    for number, name in enumerate(NAMES):
        await database.execute(*objects(name, number))
    before = await left(source_db, target_db)
    status, script, errors = await migrate(source_db, target_db, "diff", "--sql")
    assert (status, errors) == (1, "")
    if kind == "additional":
        assert all(line.startswith("--") for line in script.splitlines())
        assert await psql(script, target_db, tmp_path) == (0, "")
        assert await left(source_db, target_db) == before
    else:
        await psql(f"\\unset ON_ERROR_STOP\n{script}", target_db, tmp_path)
    for command in ("diff", "preflight"):
        _, output, errors = await migrate(source_db, target_db, command)
        assert {*unseen(output + errors)} <= {"\n", "\t"}
    assert list(tmp_path.iterdir()) == []


async def test_roles_are_printed_for_psql(source_db: Database, target_db: Database, tmp_path: Path) -> None:
    """The statements for roles, in which a name has several places."""
    roles = [f"{target_db.name} {part}"[:60] for part in SYNTAX]
    made = [f"CREATE ROLE {identifier(role)} IN ROLE {identifier(roles[0])}" for role in roles[1:]]
    settings = [f"ALTER ROLE {identifier(role)} SET search_path = {identifier(role)}" for role in roles]
    comments = [f"COMMENT ON ROLE {identifier(role)} IS {literal(role)}" for role in roles]
    try:
        await source_db.execute(f"CREATE ROLE {identifier(roles[0])}", *made, *settings, *comments)
        status, script, errors = await migrate(
            source_db, target_db, "schema", "--dry-run", "--programs", str(embedded_bin())
        )
        assert status == 0, errors
        assert {*unseen(script)} <= {"\n", "\t"}
        assert await psql(script, target_db, tmp_path) == (0, "")
        query = (
            "SELECT rolname::text, rolconfig, shobj_description(oid, 'pg_authid') FROM pg_roles"
            f" WHERE starts_with(rolname, {literal(target_db.name)}) ORDER BY 1"
        )
        assert await target_db.rows(query) == await source_db.rows(query)
    finally:
        for database in (source_db, target_db):
            for role in roles:
                await database.execute(f"DROP ROLE IF EXISTS {identifier(role)}")
    assert list(tmp_path.iterdir()) == []
