"""A table's owner gives code to the statements that build indexes and foreign keys, to gain the session's rights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from subscriber.catalog.connection import Connection
from subscriber.connection.connect import connect
from subscriber.errors import StatementError
from subscriber.targets.postgres.restricted_operation import run_restricted
from tests.privileges.conftest import APPLY, NEWEST_MAJOR, OTHER, OWNER, Attacked

# On the target the owner's cast of an enum, and the owner's check of a domain, call app.attack().
CAST = (
    "CREATE TYPE app.mood AS ENUM ('a', 'b')",
    """
    CREATE FUNCTION app.number(app.mood) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
    BEGIN {attack} RETURN 1; END $$
    """,
    "CREATE CAST (app.mood AS int) WITH FUNCTION app.number(app.mood) AS IMPLICIT",
)
LITERAL = (
    "CREATE FUNCTION app.ok(i int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN {attack} RETURN true; END $$",
    "CREATE DOMAIN app.checked AS int CHECK (app.ok(VALUE))",
    "CREATE TYPE app.pair AS (one app.checked, two int)",
)
TABLES = (
    "CREATE TABLE app.parents (id int)",
    "CREATE TABLE app.kids (id int PRIMARY KEY, parent app.mood)",
    "CREATE TABLE app.plain (id int)",
)
PUBLISHED = (
    "INSERT INTO app.parents VALUES (1)",
    "INSERT INTO app.kids VALUES (1, 'a'), (2, 'a')",
    "INSERT INTO app.plain VALUES (1)",
    "ALTER TABLE app.parents ADD PRIMARY KEY (id)",
    "ALTER TABLE app.kids ADD CONSTRAINT one FOREIGN KEY (parent) REFERENCES app.parents",
    "ALTER TABLE app.plain ADD PRIMARY KEY (id)",
    "CREATE INDEX of_a_literal ON app.plain ((id + CASE WHEN '(1,1)'::app.pair IS NULL THEN 1 ELSE 2 END))",
)
BUILT = """
SELECT count(*) = 2 FROM (SELECT FROM pg_constraint WHERE conname = 'one' AND convalidated
                          UNION ALL SELECT FROM pg_class WHERE relname = 'of_a_literal') b
"""


@pytest.mark.parametrize("target", NEWEST_MAJOR, indirect=True)
@pytest.mark.parametrize("role", ["superuser", APPLY])
async def test_indexes_and_foreign_keys_of_a_subscription(attacked: Attacked, role: str) -> None:
    """With copy_indexes = after, as a superuser and as a role that may act as several owners."""
    code = [text.replace("{attack}", "") for text in (*CAST, *LITERAL)]
    await attacked.source.execute(
        "CREATE SCHEMA app", *code, *TABLES, *PUBLISHED, "CREATE PUBLICATION p FOR ALL TABLES"
    )
    await attacked.as_owner(*(text.replace("{attack}", "PERFORM app.attack();") for text in (*CAST, *LITERAL)), *TABLES)
    if role == APPLY:
        await attacked.target.execute(f"GRANT {OTHER} TO {APPLY}")
        await attacked.apply_as(APPLY)
    await attacked.subscriber.create(attacked.source, "p", copy_indexes="after")
    await attacked.target.wait_for(BUILT, True)
    await attacked.target.wait_for("SELECT count(*) FROM subscriber.subscription_rel WHERE srforeignkeys", 0)
    assert await attacked.loot() == {(OWNER, "off")}


@asynccontextmanager
async def session(attacked: Attacked, user: str | None) -> AsyncIterator[Connection]:
    """Open a session of a role. None: of a superuser."""
    connection = await connect(attacked.target.dsn() if user is None else attacked.target.dsn(user=user))
    try:
        yield connection
    finally:
        await connection.close()


# Attempts to leave the role of the operation, or to leave something behind for a later statement of the session.
ESCAPES = (
    "RESET ROLE",
    "SET ROLE none",
    "SET ROLE {me}",
    "SET SESSION AUTHORIZATION {me}",
    "RESET SESSION AUTHORIZATION",
    "SELECT set_config('role', 'none', false)",
    "SELECT set_config('session_authorization', '{me}', false)",
    "INSERT INTO app.late VALUES (1)",
    "SET CONSTRAINTS ALL DEFERRED",
    "INSERT INTO app.late VALUES (2)",
    "DECLARE left_open CURSOR WITH HOLD FOR SELECT app.attack()",
    "PREPARE left_behind AS SELECT app.attack()",
    "DEALLOCATE ALL",
    "DISCARD ALL",
    "DISCARD TEMP",
    "LISTEN left_behind",
    "CREATE TEMP TABLE left_behind (i int)",
    "CREATE TABLE pg_temp.left_behind (i int)",
    "CREATE VIEW pg_temp.left_behind AS SELECT app.attack()",
    "CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (app.attack() > 0)",
    "CREATE DOMAIN pg_temp.int4 AS pg_catalog.int4 CHECK (app.attack() > 0)",
    "CREATE FUNCTION pg_temp.left_behind() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "SET search_path = app, pg_catalog",
    "SET work_mem = '77kB'",
    "SET statement_timeout = 1",
    "SET session_replication_role = replica",
    "ALTER ROLE {owner} SUPERUSER",
    "ALTER ROLE {owner} CREATEROLE",
    "GRANT {me} TO {owner}",
    "COPY app.loot TO PROGRAM 'true'",
    "CREATE EXTENSION file_fdw",
    "COMMIT",
)
TRY = """
CREATE FUNCTION app.try() RETURNS void LANGUAGE plpgsql AS $$
DECLARE statement text;
BEGIN
    PERFORM app.attack();
    FOREACH statement IN ARRAY {attempts} LOOP
        BEGIN
            EXECUTE statement;
        EXCEPTION WHEN OTHERS THEN NULL;
        END;
        PERFORM app.attack();
    END LOOP;
END $$
"""
LATE = (
    "CREATE TABLE app.late (i int)",
    "CREATE FUNCTION app.fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM app.attack(); RETURN NULL; END $$",
    "CREATE CONSTRAINT TRIGGER x AFTER INSERT ON app.late DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION app.fire()",
    "ALTER TABLE app.late ENABLE ALWAYS TRIGGER x",
)
SESSION = """
SELECT current_user, session_user, current_setting('search_path'), current_setting('work_mem'),
       current_setting('statement_timeout'), (SELECT count(*) FROM pg_cursors WHERE is_holdable),
       (SELECT count(*) FROM pg_listening_channels()),
       (SELECT count(*) FROM pg_prepared_statements WHERE name !~ '^__asyncpg'),
       (SELECT count(*) FROM pg_type WHERE typnamespace = pg_my_temp_schema()),
       (SELECT count(*) FROM pg_proc WHERE pronamespace = pg_my_temp_schema()),
       'x'::text, 1::int4
"""


@pytest.mark.parametrize("role", ["superuser", APPLY])
async def test_nothing_leaves_a_restricted_operation(attacked: Attacked, role: str) -> None:
    me = "postgres" if role == "superuser" else APPLY
    attempts = ", ".join(f"'{attempt.format(me=me, owner=OWNER).replace(chr(39), chr(39) * 2)}'" for attempt in ESCAPES)
    await attacked.as_owner(*LATE, TRY.format(attempts=f"ARRAY[{attempts}]"))
    async with session(attacked, None if role == "superuser" else APPLY) as connection:
        before = await connection.fetchrow(SESSION)
        for _ in range(2):  # nothing of the first one is in the way of the second
            async with connection.transaction():
                await run_restricted(connection, OWNER, "SELECT app.try(); CREATE TABLE app.made (i int)")
                assert await connection.fetchval("SELECT 'y'::text") == "y"
            assert await connection.fetchrow(SESSION) == before
            assert (
                await attacked.target.value("SELECT relowner::regrole::text FROM pg_class WHERE relname = 'made'")
                == OWNER
            )
            await attacked.as_owner("DROP TABLE app.made")
    assert await attacked.loot() == {(OWNER, "off")}


async def test_a_missing_privilege_for_temporary_tables_has_its_grant(attacked: Attacked) -> None:
    name = attacked.target.name
    await attacked.target.execute(f"REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC")
    async with session(attacked, None) as connection, connection.transaction():
        await run_restricted(connection, OWNER, "CREATE TABLE app.made (i int)")
    async with session(attacked, APPLY) as connection:
        with pytest.raises(StatementError) as caught:
            async with connection.transaction():
                await run_restricted(connection, OWNER, "CREATE TABLE app.more (i int)")
        assert caught.value.remedy is not None
        command = caught.value.remedy.next_command
        assert command is not None
        await attacked.target.execute(command)
        async with connection.transaction():
            await run_restricted(connection, OWNER, "CREATE TABLE app.more (i int)")
