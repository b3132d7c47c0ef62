"""Roles of the old server, which are no superusers there, attack the new one while definitions are copied to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from subscriber.demo.servers import Server, embedded_bin
from subscriber.errors import ServerError, StatementError
from subscriber.migration.diff.catalog import read_catalog
from subscriber.migration.diff.difference import compare
from subscriber.migration.diff.schema_diff import print_alike
from subscriber.migration.preflight.comparison import compare_definitions
from subscriber.migration.preflight.preflight import run_preflight
from subscriber.migration.schema.archive import dump_schema
from subscriber.migration.schema.programs import find_programs
from subscriber.migration.schema.restore import restore_definitions, restore_rest
from subscriber.migration.schema.upkeep import analyze, refresh_materialized_views
from tests.plugins.fix_cluster import Database

OWNER = "old_owner"

# app.ok() is called by the check of a domain, app.number() by a cast, app.pure() by expressions.
ATTACK = """
    BEGIN
        PERFORM set_config('role', 'none', false);
    EXCEPTION WHEN OTHERS THEN NULL;
    END;
    PERFORM set_config('app.looted_as', current_user, false);
    IF current_user = 'postgres' AND to_regclass('app.escapes') IS NOT NULL THEN
        PERFORM nextval('app.escapes');  -- which no rollback undoes
    END IF;
    IF to_regprocedure('app.note(text)') IS NOT NULL THEN
        PERFORM app.note('%s');
    END IF;
"""
CODE = f"""
CREATE SCHEMA app AUTHORIZATION {OWNER};
SET SESSION AUTHORIZATION {OWNER};
CREATE TABLE app.loot (who name, place text);
CREATE SEQUENCE app.escapes;
CREATE FUNCTION app.note(place text) RETURNS void LANGUAGE plpgsql
    AS $$ BEGIN
        IF to_regclass('app.loot') IS NOT NULL THEN INSERT INTO app.loot VALUES (current_user, place); END IF;
    END $$;
CREATE FUNCTION app.ok(i int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE
    AS $$ BEGIN {{domain}} RETURN true; END $$;
CREATE FUNCTION app.pure(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE
    AS $$ BEGIN {{pure}} RETURN i; END $$;
CREATE DOMAIN app.checked AS int CHECK (app.ok(VALUE));
CREATE TYPE app.pair AS (one app.checked, two int);
CREATE TYPE app.mood AS ENUM ('a', 'b');
CREATE FUNCTION app.number(app.mood) RETURNS int LANGUAGE plpgsql IMMUTABLE
    AS $$ BEGIN {{cast}} RETURN 1; END $$;
CREATE CAST (app.mood AS int) WITH FUNCTION app.number(app.mood) AS IMPLICIT;
"""
# Behind the initial copy.
REST = """
CREATE TABLE app.parents (id int PRIMARY KEY);
CREATE TABLE app.kids (id int PRIMARY KEY, parent app.mood, v int, CHECK (v > 0 AND app.pure(1) > 0));
ALTER TABLE app.kids ADD CONSTRAINT one FOREIGN KEY (parent) REFERENCES app.parents;
ALTER TABLE app.kids ADD CONSTRAINT late CHECK (v <> 77 AND '(1,1)'::app.pair IS NOT NULL) NOT VALID;
CREATE INDEX of_a_literal ON app.kids ((v + CASE WHEN '(1,1)'::app.pair IS NULL THEN 1 ELSE 2 END));
CREATE INDEX of_a_constant ON app.kids ((v + app.pure(1)));
CREATE STATISTICS app.of_kids ON (v + CASE WHEN '(1,1)'::app.pair IS NULL THEN 1 ELSE 2 END), id FROM app.kids;
CREATE FUNCTION app.fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER fire AFTER UPDATE ON app.kids FOR EACH ROW WHEN ('(1,1)'::app.pair IS NULL)
    EXECUTE FUNCTION app.fire();
CREATE POLICY own ON app.kids USING ('(1,1)'::app.pair IS NOT NULL);
CREATE RULE unused AS ON UPDATE TO app.kids WHERE '(1,1)'::app.pair IS NULL DO INSTEAD NOTHING;
CREATE TABLE app.parts (id int, v int) PARTITION BY RANGE (id);
CREATE TABLE app.part PARTITION OF app.parts DEFAULT;
CREATE INDEX of_parts ON app.parts ((v + app.pure(1)));
CREATE MATERIALIZED VIEW app.seen AS SELECT v + app.pure(1) AS v FROM app.kids;
"""
ROWS = (
    "INSERT INTO app.parents VALUES (1)",
    "INSERT INTO app.kids VALUES (1, 'a', 1), (2, 'b', 2)",
    "INSERT INTO app.parts VALUES (1, 1)",
)
DEFINED = """
SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'app'::regnamespace AND contype IN ('f', 'c')
UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'app'
UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid::regclass::text ~ '^app' AND NOT tgisinternal
UNION ALL SELECT polname FROM pg_policy UNION ALL SELECT stxname FROM pg_statistic_ext
UNION ALL SELECT definition FROM pg_rules WHERE schemaname = 'app' ORDER BY 1
"""


@pytest.fixture(params=[18])
def target(publisher: Server) -> Server:
    """The server of the source has room for both databases."""
    return publisher


@pytest.fixture
async def old(source_db: Database, target_db: Database) -> AsyncIterator[Database]:
    """The source, in which a role without rights owns schema app."""
    await source_db.execute(f"CREATE ROLE {OWNER}")
    try:
        code = CODE
        for place in ("domain", "pure", "cast"):
            code = code.replace(f"{{{place}}}", ATTACK % place)
        await source_db.execute(code)
        yield source_db
    finally:
        for database in (source_db, target_db):
            await database.execute(f"DROP OWNED BY {OWNER} CASCADE")
        await source_db.execute(f"DROP ROLE {OWNER}")


async def test_definitions_behind_the_copy(old: Database, target_db: Database) -> None:
    await old.execute(f"SET SESSION AUTHORIZATION {OWNER};{REST}")
    source, target = await old.connect(), await target_db.connect()
    async with dump_schema(old.dsn(), await find_programs(18, 18, embedded_bin())) as archive:
        await restore_definitions(archive, source, target)
        await target_db.execute(f"SET SESSION AUTHORIZATION {OWNER}", *ROWS, "TRUNCATE app.loot")
        restored = await restore_rest(archive, source, target_db.dsn())
    assert restored.left_out == ()
    assert await target_db.rows(DEFINED) == await old.rows(DEFINED)
    await refresh_materialized_views(source, target)
    await analyze(target_db.dsn())
    assert await target_db.rows("SELECT DISTINCT who FROM app.loot") == [(OWNER,)]
    assert {"cast", "domain", "pure"} == {place for (place,) in await target_db.rows("SELECT place FROM app.loot")}


@pytest.mark.parametrize("end_of_line", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
async def test_a_name_is_no_further_entry(old: Database, target_db: Database, end_of_line: str) -> None:
    """A name with an end of line, of those that Python knows, makes the foreign key an index without code."""
    await old.execute(f"SET SESSION AUTHORIZATION {OWNER};{REST}CREATE INDEX forged ON app.kids (v)")
    source, target = await old.connect(), await target_db.connect()
    programs = await find_programs(18, 18, embedded_bin())
    async with dump_schema(old.dsn(), programs) as archive:
        (number,) = [entry.line.partition(";")[0] for entry in archive.post_data if " kids one " in entry.text]
        assert number.isdigit()
    oid = await source.fetchval("SELECT 'app.forged'::regclass::oid::bigint")
    await old.execute(f'ALTER INDEX app.forged RENAME TO "x{end_of_line}{number}; 1259 {oid} INDEX - x"')
    async with dump_schema(old.dsn(), programs) as archive:
        await restore_definitions(archive, source, target)
        await target_db.execute(f"SET SESSION AUTHORIZATION {OWNER}", *ROWS, "TRUNCATE app.loot")
        with suppress(ServerError):
            await restore_rest(archive, source, target_db.dsn())
    assert await target_db.rows("SELECT DISTINCT who FROM app.loot") == [(OWNER,)]
    assert await target_db.rows(DEFINED) == await old.rows(DEFINED)


# Definitions that run code of their owner when a superuser creates them.
WAYS = {
    "bound": "CREATE TABLE app.t (i app.checked) PARTITION BY LIST (i);"
    " CREATE TABLE app.p PARTITION OF app.t FOR VALUES IN (1)",
    "key": "CREATE TABLE app.t (i int) PARTITION BY RANGE ((i + app.pure(1)))",
    "attached": "CREATE TABLE app.t (i int) PARTITION BY RANGE (i);"
    " CREATE TABLE app.p PARTITION OF app.t (CHECK (i > 0 AND app.pure(1) > 0)) FOR VALUES FROM (1) TO (9)",
    "generated": "CREATE TABLE app.t (i int, g int GENERATED ALWAYS AS (i + app.pure(1)) STORED)",
    "body": "CREATE FUNCTION app.body(i int) RETURNS int IMMUTABLE LANGUAGE sql AS $$ SELECT $1 + app.pure(1) $$;"
    " CREATE TABLE app.t (i int, g int GENERATED ALWAYS AS (app.body(i)) STORED)",
    "operator": "CREATE FUNCTION app.plus(int, int) RETURNS int IMMUTABLE LANGUAGE plpgsql"
    " AS $$ BEGIN RETURN app.pure(1); END $$;"
    " CREATE OPERATOR app.+ (LEFTARG = int, RIGHTARG = int, FUNCTION = app.plus);"
    " CREATE TABLE app.t (i int, g int GENERATED ALWAYS AS (i + (1 OPERATOR(app.+) 2)) STORED)",
    "view": "CREATE VIEW app.v AS SELECT '(1,1)'::app.pair AS p",
    "array": "CREATE VIEW app.v AS SELECT '{1}'::app.checked[] AS p",
    "range": "CREATE TYPE app.span AS RANGE (subtype = app.checked);"
    " CREATE VIEW app.v AS SELECT '[1,2]'::app.span AS s",
    "row": "CREATE TABLE app.t (i app.checked); CREATE VIEW app.v AS SELECT '(1)'::app.t AS p",
    "default": "CREATE TABLE app.t (p app.pair DEFAULT '(1,1)')",
    "check": "CREATE TABLE app.t (i int CHECK ('(1,1)'::app.pair IS NOT NULL))",
    "argument": "CREATE FUNCTION app.f(p app.pair DEFAULT '(1,1)') RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "atomic": "CREATE FUNCTION app.f() RETURNS app.pair LANGUAGE sql RETURN '(1,1)'::app.pair",
    "aggregate": "CREATE FUNCTION app.step(app.checked, int) RETURNS app.checked LANGUAGE sql AS 'SELECT $1';"
    " CREATE AGGREGATE app.a(int) (SFUNC = app.step, STYPE = app.checked, INITCOND = '1')",
    "domain": "CREATE DOMAIN app.d AS int CHECK ('(1,1)'::app.pair IS NOT NULL)",
    "domain_default": "CREATE DOMAIN app.d AS app.pair DEFAULT '(1,1)'",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
async def test_definitions_that_run_code(old: Database, target_db: Database, way: str) -> None:
    """The way exists, and the move refuses it unless its owner is trusted."""
    await old.execute(f"SET SESSION AUTHORIZATION {OWNER};{WAYS[way]}")
    source, target = await old.connect(), await target_db.connect()
    looted = "SELECT current_setting('app.looted_as', true)"
    async with dump_schema(old.dsn(), await find_programs(18, 18, embedded_bin())) as archive:
        with pytest.raises(StatementError, match=f'runs code of role "{OWNER}"'):
            await restore_definitions(archive, source, target)
        assert await compare_definitions(source, target) != []
        assert not await target.fetchval(looted)
        assert await restore_definitions(archive, source, target, trusted_owners=[OWNER])
        assert await target.fetchval(looted) == "postgres"


async def test_definitions_that_run_no_code(old: Database, target_db: Database) -> None:
    """Functions are called for rows only, and literals have no domain that calls a function."""
    await old.execute(f"""
        SET SESSION AUTHORIZATION {OWNER};
        CREATE DOMAIN app.positive AS int CHECK (VALUE > 0);
        CREATE TYPE app.plain AS (one app.positive, mood app.mood);
        CREATE FUNCTION app.lower(t text) RETURNS text IMMUTABLE LANGUAGE sql AS $$ SELECT pg_catalog.lower($1) $$;
        CREATE FUNCTION app.takes(app.pair, p app.plain DEFAULT '(1,a)') RETURNS int LANGUAGE sql AS 'SELECT 1';
        CREATE TABLE app.t (i int CHECK (app.pure(i) > 0), m app.mood DEFAULT 'a', p app.plain DEFAULT '(1,a)',
            c app.checked, g int GENERATED ALWAYS AS (app.pure(i)) STORED, t text,
            l text GENERATED ALWAYS AS (app.lower(t)) STORED);
        CREATE TABLE app.n (i int) PARTITION BY RANGE (app.pure(i));
        CREATE TABLE app.n1 PARTITION OF app.n FOR VALUES FROM (1) TO (9);
        CREATE VIEW app.v AS SELECT app.pure(1) AS one, '(1,a)'::app.plain AS p, i::app.checked FROM app.t;
    """)
    source, target = await old.connect(), await target_db.connect()
    assert await compare_definitions(source, target) == []
    async with dump_schema(old.dsn(), await find_programs(18, 18, embedded_bin())) as archive:
        await restore_definitions(archive, source, target)
    assert not await target.fetchval("SELECT current_setting('app.looted_as', true)")


async def test_expressions_that_are_compared(old: Database, target_db: Database) -> None:
    """As between two versions, which print some expressions differently."""
    await old.execute(f"SET SESSION AUTHORIZATION {OWNER}; {WAYS['view']}; CREATE VIEW app.w AS SELECT 1 AS one")
    source, target = await old.connect(), await target_db.connect()
    async with dump_schema(old.dsn(), await find_programs(18, 18, embedded_bin())) as archive:
        await restore_definitions(archive, source, target, trusted_owners=[OWNER])
    await target.execute("CREATE OR REPLACE VIEW app.v AS SELECT '(1,2)'::app.pair AS p")
    await target.execute("CREATE VIEW public.x AS SELECT '(1,2)'::app.pair AS p")
    await source.execute("CREATE VIEW public.x AS SELECT '(1,1)'::app.pair AS p")
    await target.execute("CREATE OR REPLACE VIEW app.w AS SELECT 2 AS one")
    before = await target.fetchval("SELECT last_value FROM app.escapes")
    assert before > 1
    there, here = await read_catalog(source, 17), await read_catalog(target, 17)
    await print_alike(there, here, target)
    assert {difference.name for difference in compare(there, here)} >= {"app.v", "app.w", "public.x"}
    assert await target.fetchval("SELECT last_value FROM app.escapes") == before


@pytest.mark.parametrize("table", ["cron.job", "pgagent.pga_job"])
@pytest.mark.parametrize("kind", ["view", "table"])
async def test_jobs_that_are_no_jobs(old: Database, target_db: Database, table: str, kind: str) -> None:
    """The preflight reads the jobs of an extension. Any role that may create a schema can make relations like these."""
    mine = "SELECT app.job() AS jobid, current_database()::text AS database, true AS active, true AS jobenabled,"
    mine += " 'x'::text AS jobname, 'x'::text AS schedule, 'x'::text AS command"
    await old.execute(
        f"GRANT CREATE ON DATABASE {old.name} TO {OWNER}; SET SESSION AUTHORIZATION {OWNER}",
        f"CREATE SCHEMA {table.partition('.')[0]}",
        "CREATE TYPE app.id AS (i int)",
        f"CREATE FUNCTION app.bigint(app.id) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN {ATTACK % 'job'}"
        " RAISE EXCEPTION 'runs as %', current_user; END $$",
        "CREATE CAST (app.id AS bigint) WITH FUNCTION app.bigint(app.id)",
        "CREATE FUNCTION app.job() RETURNS app.id LANGUAGE sql AS 'SELECT ROW(1)::app.id'",
        f"CREATE {kind} {table} AS {mine}",
    )
    result = await run_preflight(old.dsn(), target_db.dsn(), programs=embedded_bin())
    assert "job" not in {finding.kind for finding in result.findings}
