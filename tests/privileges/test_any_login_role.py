"""The rights on schema subscriber of a role that may only connect and create temporary tables."""

from __future__ import annotations

import asyncpg
import pytest

from tests.privileges.conftest import OTHER, Attacked

PUBLIC_MAY = """
SELECT c.relname, a.privilege_type FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
 WHERE c.relnamespace = 'subscriber'::regnamespace AND a.grantee = 0 AND c.relkind <> 'i'
"""
PUBLIC_MAY_EXECUTE = """
SELECT p.oid::regprocedure::text
  FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
 WHERE p.pronamespace = 'subscriber'::regnamespace AND a.grantee = 0 AND p.prorettype <> 'trigger'::regtype
"""
# pg_temp is searched first for relations and types unless it is named.
UNSAFE_PATHS = """
SELECT p.oid::regprocedure::text FROM pg_proc p
 WHERE p.pronamespace = 'subscriber'::regnamespace
   AND (p.prosecdef OR p.prolang = (SELECT oid FROM pg_language WHERE lanname = 'plpgsql'))
   AND NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)
"""
FUNCTIONS = """
SELECT format('subscriber.%I(%s)', p.proname, (
           SELECT string_agg(format('NULL::%s', format_type(t, NULL)), ', ') FROM unnest(p.proargtypes) t))
  FROM pg_proc p
 WHERE p.pronamespace = 'subscriber'::regnamespace AND p.prorettype <> 'trigger'::regtype ORDER BY 1
"""
SHADOWS = """
DO $$
DECLARE name name;
BEGIN
    FOR name IN SELECT DISTINCT relname FROM pg_catalog.pg_class WHERE relkind IN ('r', 'v')
                   AND relnamespace IN ('pg_catalog'::regnamespace, 'subscriber'::regnamespace)
    LOOP
        EXECUTE pg_catalog.format('CREATE TEMP VIEW %I AS SELECT app.caught() AS oid', name);
    END LOOP;
    FOR name IN SELECT DISTINCT proname FROM pg_catalog.pg_proc
                 WHERE pronamespace = 'pg_catalog'::regnamespace AND pronargs = 1 AND prokind = 'f'
                   AND proname ~ '^(pg|has|set|current|format|quote|lo|upper|lower|string|to)_' LIMIT 300
    LOOP
        EXECUTE pg_catalog.format(
            'CREATE FUNCTION pg_temp.%I(text) RETURNS text LANGUAGE sql AS ''SELECT app.caught()::text''', name);
    END LOOP;
END $$
"""


async def test_public_may_read_and_no_more(attacked: Attacked) -> None:
    await attacked.source.execute("CREATE PUBLICATION p")
    await attacked.subscriber.create(attacked.source, "p")
    granted = await attacked.rows(PUBLIC_MAY)
    assert granted
    assert {privilege for _, privilege in granted} == {"SELECT"}
    assert await attacked.rows(PUBLIC_MAY_EXECUTE) == []
    assert await attacked.rows(UNSAFE_PATHS) == []
    async with attacked.target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {OTHER}")
        await connection.execute("SET search_path = subscriber, pg_catalog")
        names = await connection.fetch("SELECT subname FROM pg_stat_subscription")
        assert [tuple(row) for row in names] == [("s",)]  # as monitoring does
        shown = await connection.fetch("SELECT subname, subconninfo FROM pg_subscription")
        assert [tuple(row) for row in shown] == [("s", None)]
        for statement in (
            "SELECT subconninfo FROM subscriber.subscription",
            "DELETE FROM subscriber.worker",
            "CREATE TABLE subscriber.mine ()",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied"):
                await connection.execute(statement)


async def test_temporary_objects_shadow_nothing(attacked: Attacked) -> None:
    """A role that may call all functions, which no role should, cannot make them run its own code."""
    await attacked.target.execute(
        "CREATE FUNCTION app.caught() RETURNS oid LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'code of another role runs as %', current_user; END $$",
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA subscriber TO {OTHER}",
    )
    calls = [call for (call,) in await attacked.rows(FUNCTIONS)]
    assert len(calls) > 40
    async with attacked.target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {OTHER}")
        before = [await outcome(connection, call) for call in calls]
        await connection.execute(SHADOWS)
        await connection.execute("SET search_path = pg_temp, pg_catalog")
        after = [await outcome(connection, call) for call in calls]
    assert dict(zip(calls, after, strict=True)) == dict(zip(calls, before, strict=True))


async def outcome(connection: asyncpg.Connection, call: str) -> str:
    """Return the error of a call, or its absence. The call is rolled back."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.fetch(f"SELECT * FROM {call}")
        return "no error"
    except asyncpg.PostgresError as error:
        return f"{error.sqlstate} {error.message}"
    finally:
        await transaction.rollback()


async def test_advisory_locks_of_others_stop_nothing(attacked: Attacked) -> None:
    """The keys that follow from a subscription, and that of the schema upgrade."""
    for database in (attacked.source, attacked.target):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await attacked.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    await attacked.subscriber.create(attacked.source, "p", enabled=False)
    ((subid, relid),) = await attacked.rows("SELECT srsubid::bigint, srrelid::bigint FROM subscriber.subscription_rel")
    signed = subid - (1 << 32)
    keys = [(1937072755, key) for key in (0, -1, signed)] + [(signed, key) for key in (relid, *range(1, 20))]
    async with attacked.target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {OTHER}")
        for key in keys:
            await connection.execute("SELECT pg_advisory_lock($1::int, $2::int)", *key)
        await attacked.subscriber.restart()
        await attacked.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await attacked.caught_up()
        await attacked.change("INSERT INTO t VALUES (2)")
        await attacked.assert_same("SELECT * FROM t ORDER BY 1")
