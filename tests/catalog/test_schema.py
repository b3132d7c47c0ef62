"""migrations/schema.sql on real servers: how it is created, upgraded and described, and the roles that may use it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pkgutil
import shutil
import sys
import textwrap
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from subscriber.catalog import locks, origins, schema, store, worker_sessions
from subscriber.catalog.commands import create, drop, execute, privileges, publisher_connection, refresh
from subscriber.errors import StatementError
from subscriber.subscription import STORED_OPTIONS
from tests.catalog.conftest import CREATE_SUBSCRIPTION
from tests.catalog.schema_objects import differences, read_comments, read_objects
from tests.plugins.fix_cluster import Database, fresh_database
from tools.docs import catalog as page

ROOT = Path(__file__).parent.parent.parent

COLUMNS = """
SELECT a.attname::text, a.atttypid::regtype::text
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relname = $2 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


# Rows: table, column and type, in the words of format_type().
TYPES = """
SELECT c.relname::text, a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod)
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
 WHERE c.relnamespace = 'subscriber'::regnamespace AND c.relkind = 'r' AND a.attnum > 0
   AND c.relname <> 'alembic_version'
"""
VERSION = "SELECT version_num FROM subscriber.alembic_version"
VIEWS = ("pg_subscription", "pg_subscription_rel", "pg_stat_subscription", "pg_stat_subscription_stats")


def write_migrations(folder: Path, text: str, **changes: str) -> Path:
    """Write a folder of migrations. `changes`: names of files of changes/, and their content."""
    (folder / "changes").mkdir(parents=True)
    (folder / "schema.sql").write_text(text)
    for name, content in changes.items():
        (folder / "changes" / f"{name.removeprefix('_')}.sql").write_text(content)
    return folder


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the present schema the first release, as migrations/README.md says."""
    text = schema.schema_text()
    folder = write_migrations(tmp_path / "first", text, _0001_first_release=text)
    monkeypatch.setattr(schema, "migrations", lambda: folder)
    return folder


def test_the_revision_is_the_newest_change_or_a_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revisions = []
    for number, (text, changes) in enumerate(
        [("a", {}), ("b", {}), ("b", {"_0001_first_release": "b"}), ("c", {"_0001_x": "b", "_0002_y": "c"})]
    ):
        folder = write_migrations(tmp_path / str(number), text, **changes)
        monkeypatch.setattr(schema, "migrations", lambda folder=folder: folder)
        revisions.append(schema.newest_revision())
    first, second, *released = revisions
    assert first != second
    assert first[:2] == second[:2] == "0_"
    assert released == ["0001", "0002"]


def test_the_migrations_are_found_in_a_wheel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "subscriber" / "catalog" / "schema.py"
    migrations = tmp_path / "subscriber" / "_migrations"
    migrations.mkdir(parents=True)
    (migrations / "schema.sql").touch()
    monkeypatch.setattr(schema, "__file__", str(module))
    assert schema.migrations() == migrations


def test_the_migrations_are_ascii() -> None:
    """A database can have an encoding that lacks any other character."""
    for file in (ROOT / "migrations").rglob("*.sql"):
        assert file.read_bytes().isascii(), file


async def read_after(
    database: Database, *scripts: str
) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], str | None]]:
    """Run each script in a transaction. Returns the definitions and the comments of all objects."""
    async with database.connection() as connection:
        for script in scripts:
            async with connection.transaction():
                await connection.execute(";\n".join((*schema.BEFORE, script, schema.AFTER, *schema.stamp())))
        return await read_objects(connection), await read_comments(connection)


async def test_the_first_release_and_its_changes_make_the_present_schema(target_db: Database) -> None:
    """Before the first release there are no changes, and the present schema is compared with itself."""
    changes = [file.read_text() for file in schema.changes().values()] or [schema.schema_text()]
    async with fresh_database(target_db.server) as changed:
        upgraded = await read_after(changed, *changes)
    created = await read_after(target_db, schema.schema_text())
    assert differences(upgraded[0], created[0]) == []
    assert upgraded[1] == created[1]


CHANGES = {
    "an object": "CREATE TABLE subscriber.more (id int)",
    "a definition": "ALTER TABLE subscriber.hold ALTER COLUMN stop_at SET DEFAULT '0/1'",
    "a privilege": "GRANT SELECT ON subscriber.hold TO PUBLIC",
    "a privilege of a column": "GRANT SELECT (stop_at) ON subscriber.hold TO PUBLIC",
    "an owner": "ALTER FUNCTION subscriber.keep OWNER TO pg_monitor",
    "a setting of a function": "ALTER FUNCTION subscriber.keep RESET search_path",
    "the caller's rights": "ALTER FUNCTION subscriber.keep SECURITY INVOKER",
    "a trigger that does not fire always": "ALTER TABLE subscriber.subscription ENABLE TRIGGER keep",
    "a policy": "ALTER POLICY follow ON subscriber.subscription_rel USING (true)",
    "a table that is published": "ALTER TABLE subscriber.own_session SET LOGGED",
}


@pytest.mark.parametrize("statement", CHANGES.values(), ids=CHANGES)
async def test_the_comparison_of_schemas_notices(target_db: Database, statement: str) -> None:
    created, _ = await read_after(target_db, schema.schema_text())
    async with target_db.connection() as connection:
        await connection.execute(statement)
        assert differences(created, await read_objects(connection))


async def test_a_schema_of_an_earlier_release_gets_the_changes(
    released: Path, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscription keeps its row, and a role that has a duty gets the privileges that the duty has now."""
    connection = await asyncpg.connect(dsn)
    await schema.ensure_schema(connection)
    assert await schema.current_revision(connection) == "0001"
    await connection.execute(CREATE_SUBSCRIPTION)

    text = schema.schema_text()
    change = """
        ALTER TABLE subscriber.hold ADD COLUMN reason text;
        COMMENT ON COLUMN subscriber.hold.reason IS 'the reason';
    """
    second = write_migrations(tmp_path / "second", text + change, _0001_first_release=text, _0002_reason=change)
    monkeypatch.setattr(schema, "migrations", lambda: second)
    await schema.ensure_schema(connection)
    assert await schema.current_revision(connection) == "0002"
    assert await connection.fetchval(VERSION) == "0002"
    assert await connection.fetchval("SELECT subname FROM subscriber.subscription") == "s"
    assert await connection.fetchval("SELECT count(reason) FROM subscriber.hold") == 0
    await connection.close()


async def test_a_schema_between_two_releases_is_left_alone(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await asyncpg.connect(dsn)
    await schema.ensure_schema(connection)
    folder = write_migrations(tmp_path / "other", schema.schema_text() + "-- changed")
    monkeypatch.setattr(schema, "migrations", lambda: folder)
    with pytest.raises(StatementError, match=r"is at revision 0_\w{8}, but this program knows only 0_") as caught:
        await schema.ensure_schema(connection)
    assert "uninstall" in str(caught.value.hint)
    await connection.close()


async def test_roles_with_a_duty_get_its_new_privileges(database: asyncpg.Connection, role: str) -> None:
    """A change that adds a function to privileges_of() ends with admit_again()."""
    for duty, function in (("owner", "new_id()"), ("launcher", "resign(text, integer)"), ("apply", "become_replica()")):
        granted = f"SELECT has_function_privilege('{role}', 'subscriber.{function}', 'EXECUTE')"
        await database.execute("SELECT subscriber.admit($1, $2)", role, duty)
        await database.execute(f"REVOKE EXECUTE ON FUNCTION subscriber.{function} FROM {role}")
        assert not await database.fetchval(granted)
        await database.execute("SELECT subscriber.admit_again()")
        assert await database.fetchval(granted)
        await database.execute("SELECT subscriber.dismiss($1, $2)", role, duty)
        assert not await database.fetchval(granted)


async def test_alembic_makes_the_same_schema(target_db: Database) -> None:
    """Also in a database that has it. The table of Alembic has the revision."""
    created, _ = await read_after(target_db, schema.schema_text())
    program = """
        import sys
        from alembic import command
        from alembic.config import Config
        config = Config()
        config.set_main_option("script_location", sys.argv[1])
        command.upgrade(config, "head")
    """
    async with fresh_database(target_db.server) as other:
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", textwrap.dedent(program), str(ROOT / "migrations")),
                env=os.environ | {"SUBSCRIBER_TARGET_DSN": other.dsn()},
                stdout=PIPE,
                stderr=STDOUT,
            )
            printed, _ = await process.communicate()
            assert process.returncode == 0, printed.decode()
        async with other.connection() as connection:
            assert differences(created, await read_objects(connection)) == []
            assert await schema.current_revision(connection) == schema.newest_revision()
            assert [tuple(row) for row in await connection.fetch(VERSION)] == [(schema.newest_revision(),)]


async def test_two_starters_at_once_make_one_schema(dsn: str) -> None:
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await asyncio.gather(schema.ensure_schema(first), schema.ensure_schema(second))
    assert await schema.current_revision(first) == schema.newest_revision()
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
    assert await schema.current_revision(second) == schema.newest_revision()
    await first.close()
    await second.close()


async def test_every_object_has_a_comment(database: asyncpg.Connection) -> None:
    comments = await read_comments(database)
    assert len(comments) > 300
    assert [name for name, comment in comments.items() if not comment] == []


CALLERS = {
    frozenset(("owner", "launcher")): "duty owner.",
    frozenset(("apply", "launcher")): "duty apply.",
    frozenset(("launcher",)): "duty launcher.",
    frozenset(("owner", "apply", "launcher")): "duties owner and apply.",
}
MAY_CALL = """
SELECT regexp_replace(p.oid::regprocedure::text, '^subscriber[.]', '') FROM pg_proc p
 WHERE p.pronamespace = 'subscriber'::regnamespace AND has_function_privilege($1, p.oid, 'EXECUTE')
"""


async def test_the_comment_of_a_function_names_its_callers(database: asyncpg.Connection, role: str) -> None:
    """A launcher may call what the other duties may."""
    duties: dict[str, set[str]] = {}
    for duty in ("owner", "launcher", "apply"):
        await database.execute("SELECT subscriber.admit($1, $2)", role, duty)
        for (name,) in await database.fetch(MAY_CALL, role):
            duties.setdefault(name, set()).add(duty)
        await database.execute("SELECT subscriber.dismiss($1, $2)", role, duty)
    for (kind, name), comment in (await read_comments(database)).items():
        if kind == "function":
            _, _, callers = (comment or "").rpartition(" Callers: ")
            if name in duties:
                assert callers == CALLERS[frozenset(duties[name])], name
            else:
                assert callers.startswith(("other functions.", "the schema's owner.", "the trigger", "triggers.")), name


async def test_the_page_of_the_catalog_has_the_schema(database: asyncpg.Connection) -> None:
    """tools/docs/catalog.py reads schema.sql without a server. Views of PostgreSQL 19 have more columns."""
    comments = await read_comments(database)
    names = [name.partition("(")[0] for kind, name in comments if kind == "function"]
    comments = {
        (kind, name if names.count(name.partition("(")[0]) > 1 else name.partition("(")[0]): comment
        for (kind, name), comment in comments.items()
    }
    described: dict[tuple[str, str], str | None] = {("schema", "subscriber"): schema.COMMENT + schema.newest_revision()}
    types = []
    for section in page.read(schema.schema_text()):
        for relation in section.relations.values():
            described["type" if relation.kind == "domain" else "relation", relation.name] = relation.about
            described |= {("column", f"{relation.name}.{name}"): about for name, about in relation.columns.items()}
            types += [(relation.name, name, type_) for name, type_ in relation.types.items()]
        described |= {("function", name.replace(", ", ",")): about for name, about in section.functions.items()}
    others = {name for name in described if name not in comments and "PostgreSQL 19" in str(described[name])}
    assert {name: about for name, about in described.items() if name not in others} == comments
    written = {}
    for type_ in {type_ for _, _, type_ in types}:
        written[type_] = await database.fetchval("SELECT pg_catalog.format_type(to_regtype($1)::oid, NULL)", type_)
    columns = sorted((table, column, written[type_]) for table, column, type_ in types)
    assert columns == sorted(tuple(row) for row in await database.fetch(TYPES))


async def test_options_are_columns_of_the_subscription(database: asyncpg.Connection) -> None:
    types = {column: type_ for table, column, type_ in await database.fetch(TYPES) if table == "subscription"}
    assert {column.name: column.type for column in STORED_OPTIONS.values()}.items() <= types.items()


@pytest.mark.parametrize("view", VIEWS)
async def test_views_have_the_columns_of_the_server(database: asyncpg.Connection, view: str) -> None:
    if database.get_server_version().major < 18:
        pytest.skip("the server has another major's columns")
    ours = [tuple(row) for row in await database.fetch(COLUMNS, "subscriber", view)]
    theirs = [tuple(row) for row in await database.fetch(COLUMNS, "pg_catalog", view)]
    assert ours == theirs


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


async def test_a_schema_without_a_superuser_is_an_error_with_a_hint(dsn: str, role: str) -> None:
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


async def test_raise_error_raises_the_error_of_its_arguments(database: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="no such row"):
        await database.execute("SELECT subscriber.raise_error('23514', 'no such row')")


@pytest.fixture
async def managers(target_db: Database) -> AsyncIterator[tuple[str, str]]:
    """A role that creates the schema and has default privileges for another one. No name is that of an identifier."""
    owner, other = "Schema owner", "Other role"
    await target_db.execute(
        f'CREATE ROLE "{owner}" LOGIN',
        f'CREATE ROLE "{other}" LOGIN',
        f'GRANT CREATE ON DATABASE {target_db.name} TO "{owner}"',
        *(
            f'ALTER DEFAULT PRIVILEGES FOR ROLE "{owner}" GRANT ALL ON {kind} TO "{other}"'
            for kind in ("TABLES", "SEQUENCES", "FUNCTIONS", "SCHEMAS")
        ),
    )
    async with target_db.connection() as connection:
        await connection.execute(f'SET SESSION AUTHORIZATION "{owner}"')
        await schema.ensure_schema(connection)
    yield owner, other
    await target_db.execute(
        *(f'DROP OWNED BY "{role}" CASCADE' for role in (owner, other)), f'DROP ROLE "{owner}", "{other}"'
    )


async def test_default_privileges_give_nobody_a_part_of_the_schema(
    target_db: Database, managers: tuple[str, str]
) -> None:
    _, other = managers
    granted = """
    SELECT c.oid::regclass::text FROM pg_class c, aclexplode(c.relacl) a
     WHERE c.relnamespace = 'subscriber'::regnamespace AND a.grantee = $1::text::regrole
    UNION ALL
    SELECT p.oid::regprocedure::text FROM pg_proc p, aclexplode(p.proacl) a
     WHERE p.pronamespace = 'subscriber'::regnamespace AND a.grantee = $1::text::regrole
    UNION ALL
    SELECT n.nspname FROM pg_namespace n, aclexplode(n.nspacl) a
     WHERE n.nspname = 'subscriber' AND a.grantee = $1::text::regrole
    """
    assert await target_db.rows(granted, f'"{other}"') == []


async def test_a_crash_loses_no_row_whatever_the_name_of_the_owner(
    target_db: Database, managers: tuple[str, str]
) -> None:
    owner, _ = managers
    async with target_db.connection() as connection:
        await connection.execute(f'SET SESSION AUTHORIZATION "{owner}"')
        await connection.execute(CREATE_SUBSCRIPTION.replace("current_user", "quote_ident(current_user)"))
        await connection.execute(
            "ALTER TABLE subscriber.subscription DISABLE TRIGGER keep; DELETE FROM subscriber.subscription;"
            "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER keep; DELETE FROM subscriber.complete;"
        )
        await schema.restore(connection)
        assert await connection.fetchval("SELECT count(*) FROM subscriber.subscription") == 1


async def test_after_a_crash_deleted_rows_count_as_expired_until_a_worker_is_past_it(
    target_db: Database, with_schema: None
) -> None:
    subid = await target_db.value(CREATE_SUBSCRIPTION)
    retains = f"SELECT subscriber.retains({subid})"
    await target_db.execute(
        "UPDATE subscriber.subscription SET subretaindeadtuples = true, submaxretention = 1000",
        "DELETE FROM subscriber.complete",
        "SELECT subscriber.restore()",
    )
    assert not await target_db.value(retains)
    await target_db.execute("CREATE TABLE t ()", f"SELECT subscriber.set_retention({subid}, pg_current_xact_id())")
    assert await target_db.value(retains)
