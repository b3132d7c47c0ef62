"""Definitions that are copied to another server."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest

from subscriber.catalog.connection import Connection
from subscriber.cli.commands.exec import execute_statements
from subscriber.connection.connect import connect
from subscriber.demo.servers import embedded_bin
from subscriber.errors import ConninfoError, ServerError, StatementError, SubscriberError
from subscriber.migration.diff.schema_diff import schema_diff
from subscriber.migration.preflight.comparison import compare_owners
from subscriber.migration.schema.archive import dump_schema
from subscriber.migration.schema.large_objects import (
    LargeObjectsCopied,
    copy_large_objects,
    count_large_objects,
)
from subscriber.migration.schema.programs import ClientPrograms, choose, find_programs
from subscriber.migration.schema.restore import Restored, RestoreProgress, restore_definitions, restore_rest
from subscriber.migration.schema.roles import create_roles
from subscriber.migration.schema.upkeep import analyze, refresh_materialized_views
from tests.migration.shop import drop_roles, shop
from tests.plugins.fix_cluster import Database, numbers


@pytest.fixture
async def suffix(source_db: Database, target_db: Database) -> AsyncIterator[str]:
    """A shop in the source, whose roles have this suffix."""
    suffix = f"_{next(numbers)}"
    async with shop(source_db, suffix, target_db.server):
        yield suffix


@pytest.fixture
async def programs() -> ClientPrograms:
    return await find_programs(18, 18, embedded_bin())


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    connection = await connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()


async def definitions(database: Database) -> list[str]:
    """Return the statements of pg_dump, without comments of its own."""
    options = ["--schema-only", "--no-subscriptions", "--exclude-schema=subscriber"]
    text = await database.server.program("pg_dump", *options, dbname=database.name)
    return [line for line in text.splitlines() if line and not re.match(r"--|\\(un)?restrict", line)]


async def test_all_definitions_arrive(
    source_db: Database, target_db: Database, suffix: str, programs: ClientPrograms
) -> None:
    source, target = await source_db.connect(), await target_db.connect()
    plan = await create_roles(source, target)
    assert not plan.left_out
    assert "SCRAM" not in repr(plan)
    created = []

    async def progress(found: RestoreProgress) -> None:
        created.append(found)

    async with dump_schema(source_db.dsn(), programs) as archive:
        assert await restore_definitions(archive, source, target, defer_keys=True)
        # Workers build primary keys, but not those of partitioned tables.
        assert await target.fetchval("SELECT to_regclass('shop.customer_pkey') IS NULL")
        assert await target.fetchval("SELECT to_regclass('shop.sale_2024_pkey') IS NOT NULL")
        assert not await restore_definitions(archive, source, target, defer_keys=True)
        assert await restore_definitions(archive, source, target)
        assert await target.fetchval(
            "SELECT indisreplident FROM pg_index WHERE indexrelid = 'shop.product_sku'::regclass"
        )
        assert await target.fetchval("SELECT indisvalid FROM pg_index WHERE indexrelid = 'shop.sale_pkey'::regclass")
        assert await target.fetchval("SELECT to_regclass('shop.customer_name') IS NULL")
        assert not await restore_definitions(archive, source, target)
        assert await restore_rest(archive, source, target_db.dsn(), progress=progress) == Restored(len(created), ())
        assert created[-1].done == created[-1].total
        assert await definitions(source_db) == await definitions(target_db)
        again = await restore_rest(archive, source, target_db.dsn())  # only statements about no object of their own
        assert 0 < again.done < len(created)
    assert await definitions(source_db) == await definitions(target_db)
    assert await refresh_materialized_views(source, target) == ['"shop"."turnover"', '"shop"."best"']
    assert await refresh_materialized_views(source, target) == []
    assert await target.fetchval("SELECT NOT relispopulated FROM pg_class WHERE oid = 'shop.later'::regclass")
    assert await analyze(target_db.dsn()) > 5
    assert await analyze(target_db.dsn()) == 0


async def test_a_failed_statement_keeps_the_others_and_is_repeated(
    source_db: Database, target_db: Database, programs: ClientPrograms
) -> None:
    await source_db.execute(
        "CREATE TABLE a (id int PRIMARY KEY, other int, text text)",
        "CREATE INDEX a_other ON a (other); CREATE UNIQUE INDEX a_text ON a (text)",
        "CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a)",
    )
    source, target = await source_db.connect(), await target_db.connect()
    async with dump_schema(source_db.dsn(), programs) as archive:
        await restore_definitions(archive, source, target)
        await target_db.execute("INSERT INTO a VALUES (1, 1, 'twice'), (2, 2, 'twice')")
        with pytest.raises(ServerError, match="could not create unique index") as failed:
            await restore_rest(archive, source, target_db.dsn(), jobs=1)
        assert failed.value.context[-1] == "creation of INDEX public a_text"
        await target_db.execute("DELETE FROM a WHERE id = 2", "CREATE INDEX IF NOT EXISTS a_other ON a (other)")
        await source_db.execute("CREATE TABLE added (id int)")
    async with dump_schema(source_db.dsn(), programs) as archive:
        with pytest.raises(StatementError, match="2 of 3 relations of the source already exist on the target"):
            await restore_definitions(archive, source, target)
        await restore_rest(archive, source, target_db.dsn())
    await source_db.execute("DROP TABLE added")
    assert await definitions(source_db) == await definitions(target_db)


async def test_definitions_are_created_together_or_not_at_all(
    source_db: Database, target_db: Database, programs: ClientPrograms
) -> None:
    await source_db.execute("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TYPE z AS ENUM ('one')")
    await target_db.execute("CREATE TYPE z AS ENUM ('two')")
    source, target = await source_db.connect(), await target_db.connect()
    async with dump_schema(source_db.dsn(), programs) as archive:
        with pytest.raises(ServerError, match='type "z" already exists'):
            await restore_definitions(archive, source, target)
        assert await target_db.value("SELECT to_regclass('a') IS NULL")
        await target_db.execute("DROP TYPE z")
        assert await restore_definitions(archive, source, target)


async def test_a_database_without_relations_is_copied_once(
    source_db: Database, target_db: Database, programs: ClientPrograms
) -> None:
    await source_db.execute(
        "CREATE SCHEMA a; CREATE TYPE a.z AS ENUM ('one')", "CREATE FUNCTION one() RETURNS int RETURN 1"
    )
    source, target = await source_db.connect(), await target_db.connect()
    async with dump_schema(source_db.dsn(), programs) as archive:
        assert await restore_definitions(archive, source, target)
        assert not await restore_definitions(archive, source, target)
        await target_db.execute("DROP TYPE a.z")
        with pytest.raises(StatementError, match="2 of 3 objects of the source already exist on the target"):
            await restore_definitions(archive, source, target)


async def test_triggers_of_schema_subscriber_stay_on_the_source(
    source_db: Database, target_db: Database, programs: ClientPrograms
) -> None:
    await source_db.execute(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE SCHEMA subscriber",
        "CREATE FUNCTION subscriber.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER own AFTER INSERT ON a EXECUTE FUNCTION subscriber.f()",
        "CREATE PUBLICATION move FOR TABLE a; CREATE PUBLICATION kept FOR TABLE a",
    )
    source, target = await source_db.connect(), await target_db.connect()
    async with dump_schema(source_db.dsn(), programs) as archive:
        await restore_definitions(archive, source, target)
        await restore_rest(archive, source, target_db.dsn(), without=["move"])
    assert await target_db.value("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal") == 0
    assert await target_db.rows("SELECT pubname FROM pg_publication_tables") == [("kept",)]


async def test_passwords_are_not_arguments(source_db: Database, programs: ClientPrograms, tmp_path: Path) -> None:
    spy = tmp_path / "pg_dump"
    spy.write_text(f'#!/bin/sh\necho "$@" "secret: $PGPASSWORD" > {tmp_path}/seen\nexec {programs.pg_dump} "$@"\n')
    spy.chmod(0o755)
    (tmp_path / "pg_restore").symlink_to(programs.pg_restore)
    dsn = source_db.dsn(password="it is secret", application_name="x y")
    async with dump_schema(dsn, await find_programs(13, 18, tmp_path)):
        pass
    arguments, _, password = (tmp_path / "seen").read_text().partition("secret: ")
    assert "it is" not in arguments
    assert password == "it is secret\n"
    with pytest.raises(ConninfoError, match='"sslpassword" cannot be passed to pg_dump'):
        async with dump_schema(source_db.dsn(sslpassword="secret"), programs):
            pass


def test_programs_are_chosen_by_version() -> None:
    path = [ClientPrograms(Path(f"/usr/lib/{major}"), major) for major in (14, 18, 16, 17)]
    assert choose(path, 14, 17).major == 17
    assert choose(path, 14, 15).major == 16
    assert choose(path, 14, 19).major == 18
    assert choose(path, 18, 16).major == 18
    with pytest.raises(SubscriberError, match="no pg_dump of PostgreSQL 19 or newer was found") as none:
        choose(path, 19, 18)
    assert "17 in /usr/lib/17" in str(none.value.detail)
    assert "apt-get install postgresql-client-19" in str(none.value.hint)


async def test_only_the_given_programs_are_used(tmp_path: Path) -> None:
    for name in ("pg_dump", "pg_restore"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) 14.1 (Debian)'\n")
        (tmp_path / name).chmod(0o755)
    assert await find_programs(13, 18, tmp_path) == ClientPrograms(tmp_path, 14)
    with pytest.raises(SubscriberError, match="no pg_dump of PostgreSQL 15"):
        await find_programs(15, 18, tmp_path)
    with pytest.raises(SubscriberError, match="no pg_dump of PostgreSQL 15"):
        await find_programs(15, 18, tmp_path / "missing")


async def test_large_objects_are_made_equal(source_db: Database, target_db: Database) -> None:
    source, target = await source_db.connect(), await target_db.connect()
    await source_db.execute(
        "SELECT lo_from_bytea(oid, content) FROM (VALUES (1, 'one'::bytea), (2, ''), (3, decode(repeat('ab', 3000000),"
        " 'hex'))) o (oid, content)",
        "COMMENT ON LARGE OBJECT 3 IS 'a photo'; GRANT SELECT ON LARGE OBJECT 3 TO PUBLIC",
    )
    await target_db.execute("SELECT lo_from_bytea(4, 'old')")
    assert await copy_large_objects(source, target) == LargeObjectsCopied(3, 3, 1, 3_000_003)
    assert await copy_large_objects(source, target) == LargeObjectsCopied(3, 0, 0, 0)
    await source_db.execute("SELECT lo_put(3, 2999999, 'x')", "SELECT lo_unlink(2)", "COMMENT ON LARGE OBJECT 1 IS 'c'")
    assert await copy_large_objects(source, target) == LargeObjectsCopied(2, 1, 1, 3_000_000)
    contents = """SELECT oid, md5(lo_get(oid)), obj_description(oid, 'pg_largeobject'),
        (SELECT array_agg(a::text) FROM aclexplode(lomacl) a WHERE grantee <> lomowner)
        FROM pg_largeobject_metadata ORDER BY oid"""
    assert await source_db.rows(contents) == await target_db.rows(contents)


async def test_large_objects_of_schema_subscriber_stay(source_db: Database, target_db: Database) -> None:
    """The progress of subscriptions is in large objects, which belong to one server."""
    create = "CREATE SUBSCRIPTION s CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false)"
    await execute_statements(target_db.dsn(), create, StringIO())
    records = "SELECT count(*) FROM pg_largeobject_metadata"
    before = await target_db.value(records)
    assert before > 0
    await source_db.execute("SELECT lo_from_bytea(1, 'one')")
    source, target = await source_db.connect(), await target_db.connect()
    assert await count_large_objects(target) == 0
    assert await copy_large_objects(source, target) == LargeObjectsCopied(1, 1, 0, 3)
    assert await target_db.value(records) == before + 1
    assert await copy_large_objects(target, source) == LargeObjectsCopied(1, 0, 0, 0)
    assert await source_db.value(records) == 1


@pytest.mark.parametrize("oid", [3_400_000_000, 3_500_000_007, 4_100_000_000, 4_250_000_000])
async def test_large_objects_of_users_may_have_any_number(source_db: Database, target_db: Database, oid: int) -> None:
    """Schema subscriber's own objects are known by their owner and content: a server's counter reaches all numbers."""
    create = "CREATE SUBSCRIPTION s CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false)"
    contents = ("photo", "prg1 of a user", '{"row": 1, "of": "a user"}', '{"a": "document"}')
    for database in (source_db, target_db):
        await execute_statements(database.dsn(), create, StringIO())
        await database.execute(f"SELECT lo_from_bytea({4_200_000_003}, 'del1' || '\\x00'::bytea)")
    for number, content in enumerate(contents):
        await source_db.execute(f"SELECT lo_from_bytea({oid + 10_000 * number}, '{content}')")
    await target_db.execute(f"SELECT lo_from_bytea({oid + 90_000}, 'old')")
    own = "SELECT count(*) FROM pg_largeobject_metadata"
    before = await source_db.value(own) - len(contents)
    source, target = await source_db.connect(), await target_db.connect()
    assert await count_large_objects(source) == len(contents)
    copied = await copy_large_objects(source, target)
    assert (copied.total, copied.copied, copied.removed) == (len(contents), len(contents), 1)
    assert await target_db.value(own) == before + len(contents)
    assert await copy_large_objects(source, target) == LargeObjectsCopied(len(contents), 0, 0, 0)


async def test_roles_without_a_superuser(source_db: Database, target_db: Database, suffix: str) -> None:
    """What neither role may read or set is listed with the statement that an administrator runs."""
    await source_db.execute(f'CREATE ROLE "reader{suffix}" LOGIN')
    await target_db.execute(f'CREATE ROLE "mover{suffix}" LOGIN CREATEROLE')
    try:
        async with (
            connected(source_db.dsn(user=f"reader{suffix}")) as source,
            connected(target_db.dsn(user=f"mover{suffix}")) as target,
        ):
            plan = await create_roles(source, target)
            again = await create_roles(source, target)
        left_out = {(grant.object, grant.statement) for grant in plan.left_out}
        assert (f"app{suffix}", f"ALTER ROLE \"app{suffix}\" PASSWORD '…';") in left_out
        assert (f"report{suffix}.CREATEDB", f'ALTER ROLE "report{suffix}" CREATEDB;') in left_out
        assert any(name == "database" and "SET" in statement for name, statement in left_out)
        assert not any(statement.sql.startswith("CREATE ROLE") for statement in again.statements)
        assert await target_db.value(f"SELECT pg_has_role('mover{suffix}', 'owner{suffix}', 'SET')")
        settings = await target_db.value(f"SELECT rolconfig::text FROM pg_roles WHERE rolname = 'app{suffix}'")
        assert settings == await source_db.value(f"SELECT rolconfig::text FROM pg_roles WHERE rolname = 'app{suffix}'")
        for grant in plan.left_out:  # an administrator runs the statements
            await target_db.execute(grant.statement.replace("…", "new"))
    finally:
        for server, name in ((source_db, "reader"), (target_db, "mover")):
            await server.execute(f'DROP OWNED BY "{name}{suffix}"')
        await drop_roles(suffix, target_db.server)
        await source_db.execute(f'DROP ROLE "reader{suffix}"')
        await target_db.execute(f'DROP ROLE "mover{suffix}", "reader{suffix}"')


@pytest.mark.parametrize("own", [(), ("postgres",)])
async def test_the_implicit_grant_of_a_role_that_creates_roles(
    source_db: Database, target_db: Database, own: tuple[str, ...]
) -> None:
    """On a service, "postgres" creates roles and gets ADMIN of them. Elsewhere it is the grantor of the move's role.

    Since PostgreSQL 16, ADMIN cannot be granted back to the own grantor.
    """
    await target_db.needs(16, "implicit grants")
    app, mover = (f"{name}_{secrets.token_hex(4)}" for name in ("app", "mover"))
    await source_db.execute(f"CREATE ROLE {app}", f"GRANT {app} TO postgres WITH ADMIN OPTION")
    await target_db.execute(f"CREATE ROLE {mover} LOGIN CREATEROLE")
    try:
        async with connected(source_db.dsn()) as source, connected(target_db.dsn(user=mover)) as target:
            plan = await create_roles(source, target, own)
        assert app in plan.created
        statements = [grant.statement for grant in plan.left_out if grant.object in ("postgres", f"postgres.{app}")]
        assert [text for text in statements if f'GRANT "{app}"' in text]
        for statement in statements:  # an administrator runs it
            await target_db.execute(statement)
        assert await target_db.value(f"SELECT pg_has_role('{mover}', '{app}', 'SET')")
    finally:
        await source_db.execute(f"DROP ROLE {app}")
        await target_db.execute(f"DROP ROLE {app}, {mover}")


async def test_a_shop_moves_without_a_superuser(
    source_db: Database, target_db: Database, suffix: str, programs: ClientPrograms
) -> None:
    """As with a managed service: an administrator executes the statements that are listed, and nothing is missing."""
    reader, mover = f"reader{suffix}", f"mover{suffix}"
    await source_db.execute(f'CREATE ROLE "{reader}" LOGIN IN ROLE pg_read_all_data')
    await target_db.execute(
        f'CREATE ROLE "{mover}" LOGIN CREATEROLE', f'ALTER DATABASE {target_db.name} OWNER TO "{mover}"'
    )
    try:
        async with (
            connected(source_db.dsn(user=reader)) as source,
            connected(target_db.dsn(user=mover)) as target,
            dump_schema(source_db.dsn(user=reader), programs) as archive,
        ):
            plan = await create_roles(source, target)
            (finding,) = await compare_owners(source, target)
            assert finding.name == "owner:postgres"
            with pytest.raises(ServerError, match='must be able to SET ROLE "postgres"'):
                await restore_definitions(archive, source, target)
            assert finding.fix is not None
            await target_db.execute(finding.fix)
            assert await compare_owners(source, target) == []
            await restore_definitions(archive, source, target)
            restored = await restore_rest(archive, source, target_db.dsn(user=mover))
            assert [left.object for left in restored.left_out] == [f"EVENT TRIGGER - shop_noticed{suffix}"]
            for left in (*plan.left_out, *restored.left_out):
                await target_db.execute(left.statement)
            assert await schema_diff(source, target) == []
    finally:
        await target_db.execute(f'REVOKE postgres FROM "{mover}"', f"ALTER DATABASE {target_db.name} OWNER TO postgres")
        await source_db.execute(f'DROP OWNED BY "{reader}"', f'DROP ROLE "{reader}"')
        await drop_roles(suffix, target_db.server)
        await target_db.execute(f'REASSIGN OWNED BY "{mover}" TO postgres', f'DROP OWNED BY "{mover}"')
        await target_db.execute(f'DROP ROLE "{mover}", "{reader}"')
