"""The migrations on real servers: the resulting schema, and the roles that may use it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import shutil
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, StaticPool
from sqlalchemy.ext.asyncio import create_async_engine

from subscriber.catalog import locks, origins, schema, store, worker_sessions
from subscriber.catalog.commands import create, drop, execute, privileges, publisher_connection, refresh
from subscriber.catalog.tables import SCHEMA, metadata
from subscriber.errors import StatementError
from tests.catalog.conftest import CREATE_SUBSCRIPTION
from tools.docs.catalog import VIEWS

COLUMNS = """
SELECT a.attname::text, a.atttypid::regtype::text
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relname = $2 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


def test_head_is_the_newest_script() -> None:
    assert ScriptDirectory(str(schema.scripts())).get_current_head() == schema.HEAD


def test_the_scripts_are_found_in_a_wheel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "subscriber" / "catalog" / "schema.py"
    migrations = tmp_path / "subscriber" / "_migrations"
    migrations.mkdir(parents=True)
    (migrations / "env.py").touch()
    monkeypatch.setattr(schema, "__file__", str(module))
    assert schema.scripts() == migrations


async def test_two_starters_at_once_make_one_schema(dsn: str) -> None:
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await asyncio.gather(schema.ensure_schema(first), schema.ensure_schema(second))
    assert await schema.current_revision(first) == schema.HEAD
    system = "SELECT i.sync_id = p.system_identifier::text FROM subscriber.identity i, pg_control_system() p"
    assert await first.fetchval(system)  # as in the names of PostgreSQL's own slots
    assert await locks.try_lock(first, locks.SCHEMA_UPGRADE)
    await locks.unlock(first, locks.SCHEMA_UPGRADE)
    await first.close()
    await second.close()


async def test_a_starter_sees_the_whole_of_anothers_commit(dsn: str) -> None:
    """A commit makes rows visible before it invalidates the catalog caches of other sessions."""
    if not (gdb := shutil.which("gdb")):
        pytest.skip("gdb, which stops a process in its commit, is not installed (Debian: apt-get install gdb)")
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    assert await schema.current_revision(second) is None
    upgrade = first.transaction()
    await upgrade.start()
    await first.execute(schema.upgrade_script(None))
    debugger = await asyncio.create_subprocess_exec(
        *(gdb, "-q", "-nx", "-p", str(first.get_server_pid())), stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    assert debugger.stdin is not None
    assert debugger.stdout is not None
    try:
        async with asyncio.timeout(60):
            debugger.stdin.write(b"set confirm off\nbreak AtEOXact_Inval\ncontinue\n")
            await debugger.stdout.readuntil(b"Breakpoint 1 at")
            await debugger.stdout.readuntil(b"Continuing.")
            commit = asyncio.create_task(upgrade.commit())
            await debugger.stdout.readuntil(b"Breakpoint 1, ")
            other = asyncio.create_task(schema.ensure_schema(second))
            await asyncio.wait({commit, other}, timeout=0.5)  # the other waits for locks that the commit still holds
            assert not commit.done()
            debugger.stdin.write(b"delete\ndetach\nquit\n")
            await asyncio.gather(commit, other)
    except asyncio.IncompleteReadError as end:
        pytest.skip(f"gdb cannot stop a process here: {end.partial.decode()[-200:]}")
    finally:
        debugger.stdin.close()
        await debugger.stdout.read()
        await debugger.wait()
    assert await schema.current_revision(second) == schema.HEAD
    await first.close()
    await second.close()


async def test_alembic_sees_no_difference_to_the_tables(database: asyncpg.Connection) -> None:
    def compare(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table_schema": SCHEMA,
                "include_schemas": True,
                "include_name": lambda name, kind, _: kind != "schema" or name == SCHEMA,
                "compare_server_default": True,
            },
        )
        differences: list[Any] = compare_metadata(context, metadata)
        return differences

    async def given() -> asyncpg.Connection:
        return database

    engine = create_async_engine("postgresql+asyncpg://", async_creator=given, poolclass=StaticPool)
    async with engine.connect() as connection:
        assert await connection.run_sync(compare) == []


@pytest.mark.parametrize("view", VIEWS)
async def test_views_have_the_columns_of_postgresql_18(database: asyncpg.Connection, view: str) -> None:
    """The documentation lists the same columns."""
    if database.get_server_version().major != 18:
        pytest.skip("the server has another major's columns")
    ours = [tuple(row) for row in await database.fetch(COLUMNS, SCHEMA, view)]
    theirs = [tuple(row) for row in await database.fetch(COLUMNS, "pg_catalog", view)]
    assert ours == theirs
    assert [name for name, _ in ours] == list(VIEWS[view])


async def test_every_statement_of_the_store_can_be_prepared(database: asyncpg.Connection) -> None:
    modules = (
        execute,
        publisher_connection,
        create,
        drop,
        locks,
        origins,
        privileges,
        refresh,
        schema,
        worker_sessions,
        *(
            importlib.import_module(f"subscriber.catalog.store.{name}")
            for _, name, _ in pkgutil.iter_modules(store.__path__)
        ),
    )
    statements = {
        value
        for module in modules
        for name, value in inspect.getmembers(module)
        if name.isupper() and isinstance(value, str) and " " in value
    }
    assert len(statements) > 40
    for statement in statements - {schema.COMMENT, worker_sessions.LAUNCHER_NAME, store.audit.COMMAND_LINE}:
        await database.prepare(statement)


async def test_without_a_superuser_there_is_a_clear_error(dsn: str, role: str) -> None:
    connection = await asyncpg.connect(dsn, server_settings={"role": role})
    with pytest.raises(StatementError, match="permission denied to create or upgrade schema") as caught:
        await schema.ensure_schema(connection)
    assert caught.value.sqlstate == "42501"
    await connection.close()


async def test_the_owner_of_the_schema_keeps_its_privileges(dsn: str, role: str) -> None:
    """With its last subscription, a role loses the privileges of that duty, and not those of the owner."""
    superuser = await asyncpg.connect(dsn)
    await superuser.execute(
        f"GRANT CREATE ON DATABASE {await superuser.fetchval('SELECT current_database()')} TO {role}"
    )
    owner = await asyncpg.connect(dsn, server_settings={"role": role})
    try:
        await schema.ensure_schema(owner)
        for _ in range(2):
            await owner.execute(CREATE_SUBSCRIPTION)
            await owner.execute("DELETE FROM subscriber.subscription")
    finally:
        await owner.close()
        await superuser.execute(f"DROP OWNED BY {role} CASCADE")
        await superuser.close()


async def test_a_newer_schema_is_left_alone(database: asyncpg.Connection) -> None:
    await database.execute(f"COMMENT ON SCHEMA subscriber IS '{schema.COMMENT}9999'")
    with pytest.raises(StatementError, match="is at revision 9999"):
        await schema.ensure_schema(database)


async def test_a_change_of_the_catalog_notifies_the_launcher(database: asyncpg.Connection, dsn: str) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    listener = await asyncpg.connect(dsn)
    await listener.add_listener("subscriber", lambda *arguments: heard.put_nowait(arguments[-1]))
    await database.execute("UPDATE subscriber.subscription SET subenabled = true")
    assert await asyncio.wait_for(heard.get(), 5) == "subscription"
    await database.execute("SET session_replication_role = replica")
    await database.execute("UPDATE subscriber.subscription_rel SET srsubstate = 'r'")
    await database.execute("SELECT pg_notify('subscriber', 'after')")
    assert await asyncio.wait_for(heard.get(), 5) == "after"
    await listener.close()


async def test_raise_error_raises_what_it_is_told(database: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="no such row"):
        await database.execute("SELECT subscriber.raise_error('23514', 'no such row')")
