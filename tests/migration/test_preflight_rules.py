"""Rules of the preflight about the servers, each with an obstacle that it finds and the fix that it names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from subscriber.check.collect import read_publisher
from subscriber.check.rules import publisher_findings
from subscriber.connection.connect import open_session
from subscriber.demo.servers import Server, embedded_bin
from subscriber.migration.preflight.comparison import compare_code, compare_extensions
from subscriber.migration.preflight.model import PreflightFinding, Severity
from subscriber.migration.preflight.preflight import from_check, run_preflight, run_rules
from subscriber.migration.preflight.rules import SOURCE_RULES
from tests.plugins.fix_cluster import Database, fresh_database, numbers

E, W, INFORMATION = Severity.ERROR, Severity.WARNING, Severity.INFORMATION
# By the name of the finding: severity, and parts of its message and its fix.
EXPECTED: Mapping[str, tuple[Severity, str, str]] = {
    "locale:database": (E, "UTF8 libc LC_COLLATE C", "TEMPLATE template0 ENCODING 'UTF8'"),
    "extension:nowhere": (E, "the target has no such extension", "apt-get install postgresql-18-nowhere"),
    "extension:hstore": (W, "it is version 99 on the source", 'ALTER EXTENSION "hstore" UPDATE TO'),
    "tablespace:fast{n}": (W, "no tablespace of this name", 'CREATE TABLESPACE "fast{n}" LOCATION'),
    "max_replication_slots:source": (E, "0 of ", "ALTER SYSTEM SET max_replication_slots = "),
    "max_replication_slots:target": (W, "1 of ", "ALTER SYSTEM SET max_replication_slots = "),
    "max_active_replication_origins:target": (E, "0 of ", "ALTER SYSTEM SET max_active_replication_origins = "),
    "wal_keep:max_slot_wal_keep_size": (W, "is 512 MB", "ALTER SYSTEM SET max_slot_wal_keep_size = -1"),
    "job:pgagent.nightly": (W, "pgAgent runs it", "UPDATE pgagent.pga_job SET jobenabled = false WHERE jobid = 3"),
    "job:pg_cron.7": (W, "pg_cron runs it at 5 0 * * *", "SELECT cron.unschedule(7)"),
    "code:public.priced": (W, "function public.with_tax(integer)", "--with \"trusted_owners = 'owner{n}'\""),
    "code:public.limited": (W, "type public.small", "--with \"trusted_owners = 'owner{n}'\""),
    "code:public.watched": (W, "function public.notice()", "--with \"trusted_owners = 'owner{n}'\""),
}
SOURCE = """
SET allow_in_place_tablespaces = on;
CREATE TABLESPACE fast{n} LOCATION '';
---
CREATE TABLE placed (id int PRIMARY KEY) TABLESPACE fast{n};
CREATE EXTENSION hstore;
CREATE EXTENSION citext;
SET allow_system_table_mods = on;
UPDATE pg_extension SET extversion = '99' WHERE extname = 'hstore';
UPDATE pg_extension SET extname = 'nowhere' WHERE extname = 'citext';
CREATE SCHEMA pgagent;
CREATE TABLE pgagent.pga_job (jobid int PRIMARY KEY, jobname text, jobenabled bool);
INSERT INTO pgagent.pga_job VALUES (3, 'nightly', true), (4, 'never', false);
CREATE SCHEMA cron;
CREATE TABLE cron.job (jobid bigint PRIMARY KEY, schedule text, command text, database text, active bool);
INSERT INTO cron.job VALUES (7, '5 0 * * *', 'VACUUM', current_database(), true), (8, '', '', 'other', true);
CREATE ROLE owner{n};
CREATE FUNCTION with_tax(price int) RETURNS int IMMUTABLE LANGUAGE sql RETURN price * 2;
CREATE FUNCTION notice() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE DOMAIN small AS int CHECK (VALUE < 9);
ALTER FUNCTION with_tax(int) OWNER TO owner{n};
ALTER FUNCTION notice() OWNER TO owner{n};
ALTER DOMAIN small OWNER TO owner{n};
CREATE TABLE priced (id int PRIMARY KEY, price int, gross int GENERATED ALWAYS AS (with_tax(price)) STORED);
CREATE TABLE limited (id small PRIMARY KEY);
CREATE TABLE watched (id int PRIMARY KEY);
CREATE TABLE harmless (id int PRIMARY KEY DEFAULT with_tax(1));
CREATE TRIGGER notice BEFORE INSERT ON watched EXECUTE FUNCTION notice();
CREATE TRIGGER notice BEFORE INSERT ON harmless EXECUTE FUNCTION notice();
ALTER TABLE watched ENABLE ALWAYS TRIGGER notice;
"""
FREE = "SELECT current_setting('max_replication_slots')::int - count(*) FROM pg_replication_slots"
FREE_ORIGINS = "SELECT current_setting('max_active_replication_origins')::int - count(*) FROM pg_replication_origin"


@asynccontextmanager
async def crowded(database: Database, free: int) -> AsyncIterator[None]:
    """Leave that many replication slots free during the block. Temporary slots end with their session."""
    async with database.connection() as connection:
        await connection.execute(
            f"SELECT pg_create_physical_replication_slot('crowd_' || i, false, true)"
            f" FROM generate_series(1, {await connection.fetchval(FREE) - free}) i"
        )
        yield


@asynccontextmanager
async def short_of_wal(database: Database) -> AsyncIterator[None]:
    await database.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '512MB'", "SELECT pg_reload_conf()")
    try:
        await database.wait_for("SELECT current_setting('max_slot_wal_keep_size')", "512MB")
        yield
    finally:
        await database.execute("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")


async def test_each_obstacle_is_named_with_its_fix(source_db: Database, target: Server) -> None:
    await source_db.needs(18, "setting max_active_replication_origins")
    suffix = f"_{next(numbers)}"
    async with AsyncExitStack() as stack:
        target_db = await stack.enter_async_context(fresh_database(target, "LATIN1"))
        await source_db.execute(*SOURCE.format(n=suffix).replace("---", "").split(";\n", 2)[:2])
        try:
            await source_db.execute(SOURCE.format(n=suffix).partition("---")[2])
            await target_db.execute(
                f"SELECT pg_replication_origin_create('crowd_' || i)"
                f" FROM generate_series(1, {await target_db.value(FREE_ORIGINS)}) i"
            )
            for obstacle in (crowded(source_db, 0), crowded(target_db, 1), short_of_wal(source_db)):
                await stack.enter_async_context(obstacle)
            result = await run_preflight(source_db.dsn(), target_db.dsn(), programs=embedded_bin())
            by_name = {finding.name: finding for finding in result.findings}
            for name, (severity, message, fix) in EXPECTED.items():
                finding = by_name[name.format(n=suffix)]
                assert finding.severity is severity, name
                assert message in finding.message, name
                assert fix.format(n=suffix) in str(finding.fix), name
            kinds = {name.partition(":")[0] for name in EXPECTED}
            assert {name for name, item in by_name.items() if item.kind in kinds} == {
                name.format(n=suffix) for name in EXPECTED
            }
        finally:
            await target_db.execute(
                "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin WHERE roname LIKE 'crowd_%'"
            )
            await source_db.execute("DROP TABLE IF EXISTS placed", f"DROP TABLESPACE fast{suffix}")
            await source_db.execute(f"DROP OWNED BY owner{suffix} CASCADE", f"DROP ROLE owner{suffix}")


async def test_obstacles_that_take_long_or_another_role(source_db: Database, target_db: Database) -> None:
    suffix = f"_{next(numbers)}"
    role = f"mover{suffix}"
    await source_db.execute(
        f"CREATE ROLE {role} LOGIN",
        "CREATE EXTENSION postgres_fdw; CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw;"
        " CREATE USER MAPPING FOR postgres SERVER far OPTIONS (password 'secret');"
        f" GRANT USAGE ON FOREIGN SERVER far TO {role}",
    )
    if role not in [name for (name,) in await target_db.rows("SELECT rolname FROM pg_roles")]:
        await target_db.execute(f"CREATE ROLE {role} LOGIN")
    try:
        writer = await source_db.connect()
        await writer.execute("BEGIN; SELECT txid_current()")
        pid = await writer.fetchval("SELECT pg_backend_pid()")
        rules = [
            replace(rule, query=rule.query.replace("1 minute", "0 seconds"))
            for rule in SOURCE_RULES
            if rule.kind in ("long_transaction", "user_mapping")
        ]
        async with source_db.connection() as source, target_db.connection() as target:
            await source.execute(f"SET SESSION AUTHORIZATION {role}")
            mapping = {finding.name: finding for finding in await run_rules(source, rules, ())}
            await source.execute("RESET SESSION AUTHORIZATION")
            waiting = {finding.name: finding for finding in await run_rules(source, rules, ())}
            await target.execute(f"SET SESSION AUTHORIZATION {role}")
            (extension,) = await compare_extensions(source, target)
            assert await compare_code(source, target) == []
        by_name: Mapping[str, PreflightFinding] = mapping | waiting | {extension.name: extension}
        assert str(by_name["user_mapping:far.postgres"].fix).startswith(
            'ALTER USER MAPPING FOR "postgres" SERVER "far" OPTIONS (ADD password'
        )
        assert by_name[f"long_transaction:{pid}"].fix == f"SELECT pg_terminate_backend({pid});"
        assert (extension.name, extension.severity) == ("extension:postgres_fdw", Severity.ERROR)
        assert extension.fix == 'CREATE EXTENSION "postgres_fdw"; -- as a superuser'
        await writer.execute("ROLLBACK")
    finally:
        await source_db.execute("DROP EXTENSION postgres_fdw CASCADE", f"DROP ROLE {role}")
        await target_db.execute(f"DROP ROLE IF EXISTS {role}")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"in_recovery": True, "version": 150000}, "standby:source"),
        ({"senders": 10, "max_senders": 10}, "max_wal_senders:source"),
        ({"wal_level": "replica", "effective_wal_level": None}, "wal_level:source"),
    ],
)
async def test_a_server_that_cannot_publish_is_an_obstacle(
    source_db: Database, change: dict[str, object], name: str
) -> None:
    session = await open_session(source_db.dsn())
    try:
        facts = replace(await read_publisher(session), **change)  # type: ignore[arg-type]
    finally:
        session.abort()
    findings = {finding.name: finding for finding in from_check(publisher_findings(facts, True), "source", "why")}
    assert findings[name].severity is Severity.ERROR
    assert not findings[name].is_waivable
    assert findings[name].fix
