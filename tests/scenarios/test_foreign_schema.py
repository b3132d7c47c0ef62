"""An application's own schema "subscriber": replicated, streamed, archived and mirrored, and never dropped."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from pathlib import Path

import pytest

import subscriber
from subscriber.catalog import schema
from subscriber.catalog.commands.uninstall import uninstall
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.migration.preflight.model import FixedOn
from subscriber.migration.preflight.preflight import run_preflight
from subscriber.publisher.own_schema import OWN_RELATIONS
from tests.plugins.fix_cluster import Database
from tests.scenarios.conftest import Pair

# Names of tables that the program has, too.
APPLICATION = (
    "CREATE SCHEMA subscriber",
    "CREATE TABLE subscriber.subscription (id int PRIMARY KEY, plan text)",
    "CREATE TABLE subscriber.worker (id int PRIMARY KEY)",
    "CREATE TABLE subscriber.phone (id serial PRIMARY KEY)",
    "COMMENT ON SCHEMA subscriber IS 'People who pay'",
)
WORK = (
    "INSERT INTO subscriber.subscription VALUES (1, 'monthly')",
    "UPDATE subscriber.subscription SET plan = 'yearly'",
    "INSERT INTO subscriber.worker VALUES (1)",
    "TRUNCATE subscriber.worker",
    "INSERT INTO subscriber.worker VALUES (2)",
    "INSERT INTO subscriber.phone VALUES (3)",
)


RELATIONS = "SELECT oid FROM pg_class WHERE relnamespace = 'subscriber'::regnamespace ORDER BY 1"


async def test_the_names_are_those_of_the_schema(with_schema: None, target_db: Database) -> None:
    rows_read = await target_db.rows(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'subscriber'::regnamespace"
        " AND relkind IN ('r', 'p', 'v', 'm', 'S')"
    )
    assert {name for (name,) in rows_read} - OWN_RELATIONS == set()


async def test_tables_of_an_applications_schema_subscriber_are_replicated(pair: Pair) -> None:
    """Into the schema of the program, where the target's table has a name that the program does not use."""
    await pair.source.execute(*APPLICATION, "DROP TABLE subscriber.subscription, subscriber.worker")
    await pair.target.execute("CREATE TABLE subscriber.phone (id serial PRIMARY KEY)")
    await pair.source.execute("INSERT INTO subscriber.phone VALUES (1)")
    await pair.subscribe("FOR ALL TABLES")
    await pair.change(WORK[-1])
    await pair.assert_same("SELECT * FROM subscriber.phone ORDER BY 1")
    assert await pair.rows("SELECT * FROM subscriber.phone ORDER BY 1") == [(1,), (3,)]


async def test_a_table_that_has_the_name_of_an_own_one_is_refused(pair: Pair) -> None:
    await pair.source.execute(*APPLICATION, "CREATE PUBLICATION p FOR TABLE subscriber.subscription")
    with pytest.raises(StatementError, match=r'cannot use relation "subscriber\.subscription" as logical replication'):
        await pair.subscriber.create(pair.source, "p")


async def test_tables_of_an_applications_schema_subscriber_are_streamed(source_db: Database) -> None:
    await source_db.execute(*APPLICATION, "CREATE PUBLICATION p FOR ALL TABLES")
    seen = []
    async with subscriber.stream(source_db.dsn(), publications=["p"]) as changes:
        await source_db.execute(*WORK)
        async for transaction in changes:
            seen += [type(change).__name__ async for change in transaction]
            if len(seen) == len(WORK):
                break
    assert seen == ["Insert", "Update", "Insert", "Truncate", "Insert", "Insert"]


async def test_tables_of_an_applications_schema_subscriber_are_archived_and_mirrored(
    source_db: Database, tmp_path: Path
) -> None:
    await source_db.execute(*APPLICATION, "CREATE PUBLICATION p FOR ALL TABLES")
    log, target = tmp_path / "log", tmp_path / "mirror.db"
    command = ["archive", "--source", source_db.dsn(), "--publication", "p", "--directory", str(log), "--slot", "a"]
    await run_command(*command, "--until", "0/1")
    for statements in ((), WORK):
        await source_db.execute(*statements)
        end = await source_db.value("SELECT pg_current_wal_flush_lsn()::text")
        await subscriber.mirror(
            source_db.dsn(), slot="m", publications=["p"], target=f"sqlite+aiosqlite:///{target}", until=Lsn.parse(end)
        )
    await run_command(*command, "--until", end)
    stored = b"".join(file.read_bytes() for file in log.rglob("*") if file.is_file())
    assert stored.count(b"subscriber\0subscription\0") >= 1
    with sqlite3.connect(target) as mirrored:
        assert mirrored.execute("SELECT plan FROM subscriber_subscription").fetchall() == [("yearly",)]
        assert mirrored.execute("SELECT id FROM subscriber_worker").fetchall() == [(2,)]
    await source_db.execute("SELECT pg_drop_replication_slot(slot) FROM unnest(ARRAY['a', 'm']) slot")


async def test_a_target_with_an_applications_schema_subscriber_is_refused(
    source_db: Database, target_db: Database
) -> None:
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await target_db.execute(*APPLICATION, *WORK)
    before = await target_db.rows(RELATIONS)
    async with target_db.connection() as connection:
        with pytest.raises(StatementError, match='schema "subscriber" of this database belongs to another') as refused:
            await schema.ensure_schema(connection)
        assert await uninstall(connection, lambda *_: None) is None
    checked = await run_command(
        "check", "--source", source_db.dsn(), "--target", target_db.dsn(), "--publication", "p", "--json", status=1
    )
    assert [
        finding["level"] for finding in json.loads(checked) if "belongs to another program" in finding["message"]
    ] == ["error"]
    assert await target_db.rows(RELATIONS) == before
    command = refused.value.command
    assert command is not None
    preflight = await run_preflight(source_db.dsn(), target_db.dsn(), schema=False)
    assert [(error.fixed_on, error.fix) for error in preflight.errors if error.kind == "foreign_schema"] == [
        (FixedOn.TARGET, command)
    ]
    await target_db.execute(command)
    async with target_db.connection() as connection:
        await schema.ensure_schema(connection)
        await uninstall(connection, lambda *_: None)
    assert await target_db.rows("SELECT plan FROM subscriber_application.subscription") == [("yearly",)]


async def test_uninstall_drops_no_object_of_an_application(
    with_schema: None, source_db: Database, target_db: Database
) -> None:
    """An application may have put its objects into the schema of the program."""
    await target_db.execute(
        "CREATE TABLE subscriber.phone (id serial PRIMARY KEY)",
        "CREATE TYPE subscriber.plan AS ENUM ('monthly')",
        "CREATE FUNCTION subscriber.price() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    )
    async with target_db.connection() as connection:
        with pytest.raises(StatementError, match="because it has objects of an application") as refused:
            await uninstall(connection, lambda *_: None)
    assert refused.value.detail == (
        "They are: function subscriber.price(), sequence subscriber.phone_id_seq, table subscriber.phone,"
        " type subscriber.plan."
    )
    preflight = await run_preflight(target_db.dsn(), source_db.dsn(), schema=False)
    fixes = [str(error.fix) for error in preflight.errors if error.kind == "own_schema_table"]
    assert fixes == ['ALTER TABLE "subscriber"."phone" SET SCHEMA public;']
    await target_db.execute(
        *fixes, "ALTER TYPE subscriber.plan SET SCHEMA public", "ALTER FUNCTION subscriber.price() SET SCHEMA public"
    )
    async with target_db.connection() as connection:
        assert await uninstall(connection, lambda *_: None) is not None
    assert await target_db.value("SELECT count(*) FROM phone") == 0


async def run_command(*arguments: str, status: int | None = 0) -> str:
    """Run a command of this program. Returns its output. `status`: its exit status; None: any."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "subscriber", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await asyncio.wait_for(process.communicate(), 60)
    assert status is None or process.returncode == status, errors.decode()
    return printed.decode()
