"""The owner of a subscription calls functions of the schema in sessions of others, to manage another subscription.

PostgreSQL runs functions of an index as the owner of the table, for example in ANALYZE, which autovacuum runs as a
superuser. Within a function of a superuser, session_user is that superuser.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.plugins.fix_cluster import Database
from tests.privileges.conftest import OTHER, OWNER, Attacked

VICTIM = 3500000001
SUBSCRIPTION = f"""
INSERT INTO subscriber.subscription (subid, subname, subowner, subenabled, subconninfo, subslotname, subsynccommit,
       subpublications, subbinary, substream, subtwophasestate, subdisableonerr, subpasswordrequired, subrunasowner,
       suborigin, subfailover)
VALUES ({VICTIM}, 'victims', '{OTHER}'::regrole, false, 'host=h', 's', 'off', '{{p}}', false, 'p', 'd', false, true,
        false, 'any', false)
"""
# The functions that act for their caller, each with NULL for the arguments behind the first one.
FUNCTIONS = """
SELECT p.proname::text, pg_get_function_identity_arguments(p.oid),
       ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes[:p.pronargs - 1]::oid[]) t)
  FROM pg_proc p WHERE p.pronamespace = 'subscriber'::regnamespace AND p.prosecdef
   AND 'subscriber.caller'::regtype = ANY (p.proargtypes::oid[]) ORDER BY 1
"""
TRAP = (
    "CREATE TABLE app.tried (statement text, result text)",
    "CREATE TABLE app.statements (statement text)",
    "CREATE TABLE app.trap (i int)",
    """
    CREATE FUNCTION app.try_all() RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
        one record;
        result text;
    BEGIN
        FOR one IN SELECT statement FROM app.statements LOOP
            BEGIN
                EXECUTE one.statement INTO result;
                result := concat('done: ', result);
            EXCEPTION WHEN OTHERS THEN
                result := SQLERRM;
            END;
            INSERT INTO app.tried VALUES (one.statement, result);
        END LOOP;
    END $$
    """,
    """
    CREATE FUNCTION app.spring(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE
    AS $$ BEGIN PERFORM app.try_all(); RETURN i; END $$
    """,
    "CREATE INDEX ON app.trap (app.spring(i))",
    "INSERT INTO app.trap VALUES (1)",
)


@pytest.fixture
async def owners(attacked: Attacked) -> AsyncIterator[Attacked]:
    """Two roles that own subscriptions. The first one attacks that of the other."""
    await attacked.target.execute(
        f"SELECT subscriber.admit('{OWNER}', 'owner'), subscriber.admit('{OTHER}', 'owner')", SUBSCRIPTION
    )
    try:
        yield attacked
    finally:
        await attacked.target.execute(f"DELETE FROM subscriber.subscription WHERE subid = {VICTIM}")


async def statements(database: Database) -> list[str]:
    calls = []
    for name, _, types in await database.rows(FUNCTIONS):
        if not types:  # prepared_transactions()
            continue
        first = f"'pg_{VICTIM}'" if types[0] == "text" else "'victims'" if types[0] == "name" else str(VICTIM)
        if name == "connection_of_server":
            first = f"'{OTHER}'::regrole::oid"
        arguments = [f"{first}::{types[0]}", *(f"NULL::{type_name}" for type_name in types[1:])]
        if name == "set_owner":
            arguments[1] = f"'{OWNER}'::regrole::oid"
        nobody = "(SELECT current_user::name::subscriber.caller WHERE false)"
        callers: tuple[list[str], ...] = ([], [nobody], ["NULL"], ["session_user"], [f"'{OTHER}'"])
        calls += [f"SELECT subscriber.{name}({', '.join([*arguments, *caller])})" for caller in callers]
    return [
        *calls,
        "SELECT count(*) FROM subscriber.prepared_transactions()",
        "SELECT subconninfo FROM subscriber.subscription",
        "SELECT subconninfo FROM subscriber.pg_subscription",
    ]


async def test_no_function_takes_the_session_for_its_caller(owners: Attacked) -> None:
    target = owners.target
    every = await statements(target)
    assert len(every) > 100
    await owners.as_owner(*TRAP)
    for number in range(0, len(every), 20):  # one after another would take long
        values = ", ".join(f"($_${statement}$_$)" for statement in every[number : number + 20])
        await target.execute(
            "TRUNCATE app.statements", f"INSERT INTO app.statements VALUES {values}", "ANALYZE app.trap"
        )
    tried = dict(await target.rows("SELECT * FROM app.tried WHERE statement <> ''"))
    assert tried.keys() == {*every}
    done = {statement: result for statement, result in tried.items() if result.startswith("done: ")}
    # Functions with STRICT return nothing for an argument that is NULL, and the problem otherwise.
    harmless = (
        "done: ",
        "done: (,)",
        "done: 0",
        "done: denied",
        f'done: (,"permission denied for user mappings of role ""{OTHER}""")',
    )
    assert {statement: result for statement, result in done.items() if result not in harmless} == {}
    assert {statement.split("(")[0] for statement in done} <= {
        "SELECT count",
        "SELECT subscriber.connection_of_server",
        "SELECT subscriber.end_action",
        "SELECT subscriber.set_delete_triggers",
        "SELECT subscriber.server_conninfo",
        "SELECT subscriber.set_sequence",
        "SELECT subconninfo FROM subscriber.subscription",
        "SELECT subconninfo FROM subscriber.pg_subscription",
    }
    assert await target.value("SELECT subowner::regrole::text FROM subscriber.subscription") == OTHER


async def test_every_function_with_the_rights_of_the_schema_knows_its_caller(owners: Attacked) -> None:
    compared = await owners.target.rows(
        "SELECT p.proname::text FROM pg_proc p WHERE p.pronamespace = 'subscriber'::regnamespace AND p.prosecdef"
        " AND p.prosrc ~* 'session_user'"
    )
    assert compared == []
    assert not await owners.target.value("SELECT has_type_privilege($1, 'subscriber.caller', 'USAGE')", OWNER)


@pytest.mark.parametrize("duty", ["owner", "launcher"])
async def test_user_mappings_of_others(owners: Attacked, duty: str) -> None:
    """A launcher reads the mappings of roles that it inherits from, and that of PUBLIC for a server that it may use."""
    target = owners.target
    await target.execute(
        f"SELECT subscriber.admit('{OWNER}', '{duty}')",
        "CREATE EXTENSION postgres_fdw",
        "CREATE SERVER shop FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host 'h')",
        f"GRANT USAGE ON FOREIGN SERVER shop TO {OTHER}",
        f"CREATE USER MAPPING FOR {OTHER} SERVER shop OPTIONS (user 'u', password 'hidden')",
        "UPDATE subscriber.subscription SET subconninfo = NULL,"
        " subserver = (SELECT oid FROM pg_foreign_server WHERE srvname = 'shop')",
    )
    of_server = (
        f"SELECT subscriber.connection_of_server('{OTHER}'::regrole::oid, oid)::text FROM pg_foreign_server"
        f" UNION ALL SELECT subscriber.server_conninfo({VICTIM})::text"
    )
    try:
        for granted in (False, True):
            async with target.connection() as connection:
                await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}")
                rows_read = [text for (text,) in await connection.fetch(of_server)]
            assert len(rows_read) == 2
            for text in rows_read:
                assert ("hidden" in text) is granted
                assert ("permission denied" in text) is not granted
            await target.execute(f"GRANT {OTHER} TO {OWNER}")
    finally:
        await target.execute(f"REVOKE {OTHER} FROM {OWNER}", f"SELECT subscriber.dismiss('{OWNER}', '{duty}')")
        await target.execute("UPDATE subscriber.subscription SET subserver = 0, subconninfo = 'host=h'")
        await target.execute("DROP EXTENSION postgres_fdw CASCADE")
