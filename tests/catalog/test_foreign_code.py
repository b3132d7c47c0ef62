"""Tables that run code of a role that the session must not trust, as the server reports them."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg
import pytest

from tests.plugins.fix_cluster import Database

SAFETY = "SELECT subscriber.table_safety($1::text::regclass, $2::name[], $3, $4)::text"

FUNCTION = """
CREATE FUNCTION app.{name} LANGUAGE plpgsql {kind} AS $$ BEGIN RETURN {value}; END $$
"""
TRIGGER = FUNCTION.format(name="fire() RETURNS trigger", kind="", value="NEW")
VALUE = FUNCTION.format(name="value() RETURNS integer", kind="", value="1")
SAME = FUNCTION.format(name="same(x integer) RETURNS integer", kind="IMMUTABLE", value="x")


@dataclass
class Owned:
    """A database with schema app, whose objects belong to one role."""

    connection: asyncpg.Connection
    role: str

    async def run(self, *statements: str) -> None:
        """Execute the statements as that role."""
        await self.connection.execute(f"SET ROLE {self.role}")
        for statement in statements:
            await self.connection.execute(statement)
        await self.connection.execute("RESET ROLE")

    async def safety(
        self, table: str = "app.t", trusted: tuple[str, ...] = (), acting: str | None = None, *, replica: bool = True
    ) -> tuple[list[str], bool]:
        """Return the foreign code, and whether the table is guarded."""
        document = json.loads(await self.connection.fetchval(SAFETY, table, trusted, replica, acting))
        return [what for _, what, *_ in document["foreign"] or []], document["guarded"]


@pytest.fixture
async def app(target_db: Database, database: asyncpg.Connection) -> AsyncIterator[Owned]:
    role = f"app_{secrets.token_hex(4)}"
    await database.execute(f"CREATE ROLE {role}")
    await database.execute(f"CREATE SCHEMA app AUTHORIZATION {role}")
    yield Owned(database, role)
    await database.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


@asynccontextmanager
async def undone(app: Owned) -> AsyncIterator[None]:
    """Open a transaction that is rolled back."""
    transaction = app.connection.transaction()
    await transaction.start()
    yield
    await transaction.rollback()


PLAIN = {
    "types of the server": "CREATE TABLE app.t (id int PRIMARY KEY, a text, b jsonb, c timestamptz[], d numrange)",
    "an enum": "CREATE TYPE app.mood AS ENUM ('x'); CREATE TABLE app.t (id int PRIMARY KEY, m app.mood, n app.mood[])",
    "defaults": "CREATE TABLE app.t (id bigserial, at timestamptz DEFAULT now(), u uuid DEFAULT gen_random_uuid(),"
    " d date DEFAULT current_date, n text DEFAULT ('x'::text || current_user), i int GENERATED ALWAYS AS IDENTITY)",
    "generated": "CREATE TABLE app.t (a int, b int GENERATED ALWAYS AS (a * 2 + abs(a)) STORED,"
    " c tsvector GENERATED ALWAYS AS (to_tsvector('english', 'x')) STORED)",
    "check": "CREATE TABLE app.t (a text CHECK (a ~ '^x' AND length(a) < 9 OR a IN ('b', 'c')), CHECK (a IS NOT NULL))",
    "index": "CREATE TABLE app.t (a text); CREATE INDEX ON app.t (lower(a) text_pattern_ops) WHERE a <> 'funcid 1'",
    "partitions": "CREATE TABLE app.t (a int, b text) PARTITION BY RANGE (a, lower(b));"
    " CREATE TABLE app.u PARTITION OF app.t DEFAULT",
    "foreign key": "CREATE TABLE app.p (a int PRIMARY KEY); CREATE TABLE app.t (a int REFERENCES app.p)",
    "ordinary trigger": f"{TRIGGER}; CREATE TABLE app.t (a int);"
    " CREATE TRIGGER x BEFORE INSERT ON app.t FOR EACH ROW EXECUTE FUNCTION app.fire()",
    "server's trigger function": "CREATE TABLE app.t (a int);"
    " CREATE TRIGGER x BEFORE UPDATE ON app.t FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();"
    " ALTER TABLE app.t ENABLE ALWAYS TRIGGER x",
}


async def test_plain_tables_run_no_code_of_other_roles(app: Owned) -> None:
    safety_by_case = {}
    for case, ddl in PLAIN.items():
        async with undone(app):
            await app.run(ddl)
            safety_by_case[case] = await app.safety()
    assert safety_by_case == dict.fromkeys(PLAIN, ([], True))


FOREIGN = {
    "trigger": (
        f"{TRIGGER}; CREATE TABLE app.t (a int);"
        " CREATE TRIGGER x BEFORE INSERT ON app.t FOR EACH ROW EXECUTE FUNCTION app.fire();"
        " ALTER TABLE app.t ENABLE ALWAYS TRIGGER x",
        "trigger x: function app.fire()",
    ),
    "condition of a trigger": (
        f"{SAME}; CREATE TABLE app.t (a int); CREATE TRIGGER x BEFORE UPDATE ON app.t FOR EACH ROW"
        " WHEN (app.same(NEW.a) > 1) EXECUTE FUNCTION suppress_redundant_updates_trigger();"
        " ALTER TABLE app.t ENABLE ALWAYS TRIGGER x",
        "trigger x: function app.same(integer)",
    ),
    "rule": (
        "CREATE TABLE app.t (a int); CREATE TABLE app.u (a int);"
        " CREATE RULE r AS ON INSERT TO app.t DO ALSO INSERT INTO app.u VALUES (NEW.a);"
        " ALTER TABLE app.t ENABLE ALWAYS RULE r",
        "rule r",
    ),
    "default": (f"{VALUE}; CREATE TABLE app.t (a int DEFAULT app.value())", "default of a: function app.value()"),
    "default that sets the role": (
        "CREATE TABLE app.t (a text DEFAULT set_config('role', 'none', false))",
        "default of a: a call of function set_config(text,text,boolean)",
    ),
    "default that runs a query": (
        "CREATE TABLE app.t (a xml DEFAULT query_to_xml('select 1', true, true, ''))",
        "default of a: a call of function query_to_xml(text,boolean,boolean,text)",
    ),
    "generated": (
        f"{SAME}; CREATE TABLE app.t (a int, b int GENERATED ALWAYS AS (app.same(a)) STORED)",
        "generated column of b: function app.same(integer)",
    ),
    "check": (
        f"{SAME}; CREATE TABLE app.t (a int CHECK (app.same(a) > 0))",
        "constraint t_a_check: function app.same(integer)",
    ),
    "operator": (
        "CREATE FUNCTION app.less(int, int) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT $1 < $2';"
        " CREATE OPERATOR app.<<< (LEFTARG = int, RIGHTARG = int, FUNCTION = app.less);"
        " CREATE TABLE app.t (a int CHECK (a OPERATOR(app.<<<) 4))",
        "constraint t_a_check: function app.less(integer,integer)",
    ),
    "index": (
        f"{SAME}; CREATE TABLE app.t (a int); CREATE INDEX i ON app.t (app.same(a))",
        "index i: function app.same(integer)",
    ),
    "predicate": (
        f"{SAME}; CREATE TABLE app.t (a int); CREATE INDEX i ON app.t (a) WHERE app.same(a) > 1",
        "index i: function app.same(integer)",
    ),
    "operator class": (
        "CREATE FUNCTION app.order(int, int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 - $2';"
        " CREATE TABLE app.t (a int); RESET ROLE; CREATE OPERATOR CLASS app.o FOR TYPE int USING btree AS OPERATOR 1 <,"
        " OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 app.order(int, int);"
        " CREATE INDEX i ON app.t (a app.o)",
        'index i: function app."order"(integer,integer)',
    ),
    "exclusion": (
        "CREATE FUNCTION app.same(int4range, int4range) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT $1 && $2';"
        " CREATE OPERATOR app.&&& (LEFTARG = int4range, RIGHTARG = int4range, FUNCTION = app.same,"
        " COMMUTATOR = OPERATOR(app.&&&)); CREATE TABLE app.t (a int4range); RESET ROLE;"
        " ALTER OPERATOR FAMILY pg_catalog.range_ops USING gist ADD OPERATOR 100 app.&&& (int4range, int4range);"
        " ALTER TABLE app.t ADD CONSTRAINT x EXCLUDE USING gist (a WITH app.&&&)",
        "constraint x: function app.same(int4range,int4range)",
    ),
    "domain": (
        "CREATE DOMAIN app.d AS int CHECK (VALUE > 0); CREATE TABLE app.t (a app.d)",
        "column a: type app.d",
    ),
    "domain in an array": (
        "CREATE DOMAIN app.d AS int CHECK (VALUE > 0); CREATE TABLE app.t (a app.d[])",
        "column a: type app.d",
    ),
    "composite": ("CREATE TYPE app.c AS (x int); CREATE TABLE app.t (a app.c)", "column a: type app.c"),
    "range": (
        "CREATE FUNCTION app.diff(int, int) RETURNS float8 LANGUAGE sql IMMUTABLE AS 'SELECT 1.0::float8';"
        " CREATE TYPE app.r AS RANGE (subtype = int4, subtype_diff = app.diff); CREATE TABLE app.t (a app.r)",
        "column a: type app.r",
    ),
    "partition key": (
        f"{SAME}; CREATE TABLE app.t (a int) PARTITION BY RANGE (app.same(a))",
        "partition key: function app.same(integer)",
    ),
    "trigger of a partition": (
        f"{TRIGGER}; CREATE TABLE app.t (a int) PARTITION BY RANGE (a); CREATE TABLE app.u PARTITION OF app.t DEFAULT;"
        " CREATE TRIGGER x BEFORE INSERT ON app.u FOR EACH ROW EXECUTE FUNCTION app.fire();"
        " ALTER TABLE app.u ENABLE REPLICA TRIGGER x",
        "trigger x: function app.fire()",
    ),
    "function that reads documents": (
        "CREATE TABLE app.t (a text COLLATE \"C\" CHECK (xpath_exists('/x', a::xml)))",
        "constraint t_a_check: a call of",
    ),
}


async def test_code_of_another_role_on_a_table_is_found(app: Owned) -> None:
    for case, (ddl, what) in FOREIGN.items():
        async with undone(app):
            await app.run(ddl)
            foreign, guarded = await app.safety()
            assert guarded, case
            assert any(each.startswith(what) for each in foreign), (case, foreign)
            assert await app.safety(trusted=(app.role,)) == ([], False), case


async def test_the_key_of_the_table_that_a_partition_belongs_to(app: Owned) -> None:
    await app.run(f"{SAME}; CREATE TABLE app.p (a int) PARTITION BY RANGE (app.same(a)); CREATE TABLE app.t (a int)")
    await app.connection.execute("ALTER TABLE app.t OWNER TO CURRENT_USER")
    assert await app.safety() == ([], False)
    await app.connection.execute("ALTER TABLE app.p ATTACH PARTITION app.t DEFAULT")
    assert await app.safety() == (["partition key: function app.same(integer)"], True)


async def test_a_domain_of_a_trusted_owner_with_a_function_of_another(app: Owned) -> None:
    await app.run(SAME)
    await app.connection.execute("CREATE DOMAIN public.d AS int CHECK (app.same(VALUE) > 0)")
    await app.connection.execute("CREATE TABLE public.t (a public.d)")
    assert await app.safety("public.t") == (["column a: function app.same(integer)"], False)


async def test_code_of_a_superuser_is_trusted(app: Owned) -> None:
    await app.run(SAME.replace("app.same", "app.other"))
    await app.connection.execute(f"{TRIGGER}; CREATE TABLE public.t (a int)")
    await app.connection.execute(
        "CREATE TRIGGER x BEFORE INSERT ON public.t FOR EACH ROW EXECUTE FUNCTION app.fire();"
        "ALTER TABLE public.t ENABLE ALWAYS TRIGGER x"
    )
    assert await app.safety("public.t") == ([], False)
    await app.connection.execute(f"ALTER FUNCTION app.fire() OWNER TO {app.role}")
    assert await app.safety("public.t") == (["trigger x: function app.fire()"], False)


async def test_ordinary_triggers_and_cascades_count_without_the_replica_role(app: Owned) -> None:
    await app.run(
        f"{TRIGGER}; CREATE TABLE app.t (a int PRIMARY KEY);"
        "CREATE TRIGGER x BEFORE INSERT ON app.t FOR EACH ROW EXECUTE FUNCTION app.fire();"
        "CREATE TABLE app.u (a int CONSTRAINT k REFERENCES app.t ON DELETE CASCADE)"
    )
    assert await app.safety(replica=False) == (["foreign key k", "trigger x: function app.fire()"], True)


@pytest.mark.parametrize("method", ["WITH FUNCTION app.number(app.mood)", "WITH INOUT"])
async def test_a_foreign_key_calls_casts_without_the_replica_role(app: Owned, method: str) -> None:
    """The owner of the type can replace the cast at any time."""
    await app.run(
        "CREATE TYPE app.mood AS ENUM ('1'); CREATE TABLE app.p (a int PRIMARY KEY);"
        " CREATE FUNCTION app.number(app.mood) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 1';"
        f" CREATE CAST (app.mood AS int) {method} AS IMPLICIT;"
        "CREATE TABLE app.t (a app.mood CONSTRAINT k REFERENCES app.p, b app.mood)"
    )
    for table in ("app.t", "app.p"):
        assert await app.safety(table) == ([], True)
        assert await app.safety(table, replica=False) == (["foreign key k: casts of type app.mood"], True)


# --- rights of a session beyond another role's --------------------------------------------------------


@pytest.fixture
async def other(app: Owned, target_db: Database) -> AsyncIterator[tuple[str, asyncpg.Connection]]:
    """Create a role that may act as the owner, and open its session."""
    name = f"apply_{secrets.token_hex(4)}"
    await app.connection.execute(f"CREATE ROLE {name} LOGIN")
    await app.connection.execute(f"GRANT {app.role} TO {name}")
    await app.connection.execute(f"SELECT subscriber.admit('{name}', 'apply')")
    await app.run(f"{VALUE}; CREATE TABLE app.t (a int DEFAULT app.value())")
    session = await asyncpg.connect(target_db.dsn(user=name))
    yield name, session
    await session.close()
    await app.connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


async def exceeds(app: Owned, session: asyncpg.Connection) -> bool:
    """Return True if the session has more rights than the owner of the table. All three queries must agree."""
    document = json.loads(await session.fetchval(SAFETY, "app.t", [], True, None))
    assert [exceeded for *_, exceeded in document["foreign"]] == [document["guarded"]]
    assert isinstance(document["guarded"], bool)
    return document["guarded"]


DATABASE = "DO $$ BEGIN EXECUTE format('{} ON DATABASE %I {} {{0}}', current_database()); END $$"
GRANTS = {
    "a table": ("CREATE TABLE public.x (); GRANT SELECT ON public.x TO {0}", "DROP TABLE public.x"),
    "a column": ("CREATE TABLE public.x (y int); GRANT SELECT (y) ON public.x TO {0}", "DROP TABLE public.x"),
    "a function": (
        "CREATE FUNCTION public.x() RETURNS int LANGUAGE sql AS 'SELECT 1';"
        " GRANT EXECUTE ON FUNCTION public.x() TO {0}",
        "DROP FUNCTION public.x()",
    ),
    "a table of its own": ("CREATE TABLE public.x (); ALTER TABLE public.x OWNER TO {0}", "DROP TABLE public.x"),
    "another owner": ("CREATE ROLE {0}_2; GRANT {0}_2 TO {0}", "DROP ROLE {0}_2"),
    "a role of the server": ("GRANT pg_monitor TO {0}", "REVOKE pg_monitor FROM {0}"),
    "an attribute": ("ALTER ROLE {0} CREATEROLE", "ALTER ROLE {0} NOCREATEROLE"),
    "the database": (DATABASE.format("GRANT CREATE", "TO"), DATABASE.format("REVOKE CREATE", "FROM")),
    "subscriptions": ("SELECT subscriber.admit('{0}', 'owner')", "SELECT subscriber.dismiss('{0}', 'owner')"),
    "the launcher": ("SELECT subscriber.admit('{0}', 'launcher')", "SELECT subscriber.dismiss('{0}', 'launcher')"),
}


async def test_rights_of_a_session_beyond_the_owner_are_found(
    app: Owned, other: tuple[str, asyncpg.Connection]
) -> None:
    name, session = other
    for case, (grant, revoke) in GRANTS.items():
        assert not await exceeds(app, session), f"before: {case}"
        await app.connection.execute(grant.format(name))
        assert await exceeds(app, session), case
        await app.connection.execute(f"{revoke.format(name)}; SELECT subscriber.admit('{name}', 'apply')")


async def test_a_member_of_the_owners_role_is_not_guarded_against_its_code(
    app: Owned, other: tuple[str, asyncpg.Connection]
) -> None:
    name, session = other
    await app.connection.execute(f"CREATE ROLE {name}_2; GRANT {name}_2 TO {name}")
    assert await exceeds(app, session)
    document = json.loads(await session.fetchval(SAFETY, "app.t", [], True, f"{name}_2"))
    assert document["guarded"]
    await app.connection.execute(f"GRANT {app.role} TO {name}_2")
    document = json.loads(await session.fetchval(SAFETY, "app.t", [], True, f"{name}_2"))
    assert not document["guarded"]
    assert not document["foreign"][0][-1]
    await app.connection.execute(f"DROP ROLE {name}_2")


async def test_a_shape_follows_all_that_safety_depends_on(app: Owned) -> None:
    await app.run(f"{TRIGGER}; CREATE TABLE app.t (a int, b int) PARTITION BY RANGE (a)")
    await app.run(
        "CREATE TABLE app.u PARTITION OF app.t FOR VALUES FROM (0) TO (9)", "CREATE TABLE app.w (a int, b int)"
    )
    seen = set()
    for change in (
        "SELECT 1",
        "ALTER TABLE app.u ALTER b SET DEFAULT 1",
        "ALTER TABLE app.u ADD CHECK (a > -1)",
        "CREATE INDEX ON app.u (a)",
        "CREATE TRIGGER x BEFORE INSERT ON app.u FOR EACH ROW EXECUTE FUNCTION app.fire()",
        "ALTER TABLE app.u ENABLE ALWAYS TRIGGER x",
        "CREATE RULE r AS ON INSERT TO app.u DO ALSO NOTHING",
        "ALTER TABLE app.t ATTACH PARTITION app.w DEFAULT",
        "RESET ROLE; ALTER TABLE app.w OWNER TO CURRENT_USER",
    ):
        await app.run(change)
        seen.add(await app.connection.fetchval("SELECT subscriber.guarded_shape('app.t'::regclass, '', '{}')"))
    assert len(seen) == 9
