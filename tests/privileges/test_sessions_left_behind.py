"""Code of a table's owner changes all session state that SQL can change. It must not affect later changes.

The trigger of app.hostile executes the column `code` of each row, as the owner and as the session's own role. Rows with
`code = 'report'` store the state of the session.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.privileges.conftest import APPLY, NEWEST_MAJOR, OWNER, Attacked

FUNCTIONS = (
    "CREATE TABLE app.report (id int, place text, state jsonb)",
    # Temporary objects that shadow those of the catalog are left behind as well, so everything is qualified.
    """
    CREATE FUNCTION app.state() RETURNS jsonb LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
        SELECT pg_catalog.jsonb_build_object(
            'user', session_user,
            'temporary', (SELECT pg_catalog.count(*) FROM pg_catalog.pg_class c
                           WHERE c.relnamespace = pg_catalog.pg_my_temp_schema()),
            'prepared', (SELECT pg_catalog.count(*) FROM pg_catalog.pg_prepared_statements WHERE from_sql),
            'cursors', (SELECT pg_catalog.count(*) FROM pg_catalog.pg_cursors WHERE is_holdable),
            'channels', (SELECT pg_catalog.count(*) FROM pg_catalog.pg_listening_channels()),
            'advisory', (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks l
                          WHERE l.locktype = 'advisory' AND l.pid = pg_catalog.pg_backend_pid()))
    $$
    """,
    """
    CREATE FUNCTION app.settings() RETURNS jsonb LANGUAGE sql AS $$
        SELECT pg_catalog.jsonb_object_agg(name, setting) FROM pg_catalog.pg_settings
         WHERE context IN ('user', 'superuser') AND name NOT IN ('role', 'session_authorization')
    $$
    """,
    """
    CREATE FUNCTION app.run() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.code = 'report' THEN
            INSERT INTO app.report SELECT NEW.id, NEW.place, app.state() || app.settings();
        ELSIF NEW.code IS NOT NULL THEN
            IF NEW.place = 'session' THEN
                PERFORM pg_catalog.set_config('role', 'none', false);
            END IF;
            EXECUTE NEW.code;
        END IF;
        RETURN NEW;
    END $$
    """,
    "CREATE TABLE app.hostile (id int PRIMARY KEY, place text, code text)",
    "CREATE TRIGGER run BEFORE INSERT ON app.hostile FOR EACH ROW EXECUTE FUNCTION app.run()",
    "ALTER TABLE app.hostile ENABLE ALWAYS TRIGGER run",
    "CREATE TABLE app.plain (id int PRIMARY KEY, v text, t timestamptz)",
    # Waits for the end of the transaction, and again when it runs.
    "CREATE TABLE app.again (n int)",
    """
    CREATE FUNCTION app.wait() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        SET CONSTRAINTS ALL DEFERRED;
        BEGIN
            PERFORM pg_catalog.set_config('role', 'none', false);
        EXCEPTION WHEN OTHERS THEN NULL;  -- in a deferred trigger, since 18
        END;
        PERFORM pg_catalog.set_config('datestyle', 'German', false);
        IF NEW.n > 0 THEN
            INSERT INTO app.again VALUES (NEW.n - 1);
        END IF;
        RETURN NULL;
    END $$
    """,
    """
    CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON app.again DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION app.wait()
    """,
    "ALTER TABLE app.again ENABLE ALWAYS TRIGGER wait",
    "GRANT ALL ON ALL TABLES IN SCHEMA app TO PUBLIC",
)

EVERY_SETTING = """
DO $do$
DECLARE s record; other text;
BEGIN
    FOR s IN SELECT * FROM pg_catalog.pg_settings WHERE context = 'user'
                AND name NOT IN ('transaction_read_only', 'transaction_isolation', 'role', 'exit_on_error')
    LOOP
        other := CASE
            WHEN s.vartype = 'bool' THEN CASE s.setting WHEN 'on' THEN 'off' ELSE 'on' END
            WHEN s.vartype = 'enum' THEN s.enumvals[1 + (s.setting = s.enumvals[1])::int]
            WHEN s.name = 'client_encoding' THEN 'LATIN1'
            WHEN s.name = 'DateStyle' THEN 'German'
            WHEN s.name = 'TimeZone' THEN 'Asia/Tokyo'
            WHEN s.name LIKE 'lc_%' THEN 'C'
            WHEN s.vartype = 'string' THEN 'app'
            ELSE CASE s.setting WHEN s.min_val THEN s.max_val ELSE s.min_val END END;
        BEGIN
            PERFORM pg_catalog.set_config(s.name, other, false);
        EXCEPTION WHEN OTHERS THEN NULL;
        END;
    END LOOP;
END $do$
"""
# Statements that only the session's own role, or no role, may execute are attempted as well.
TRY = "DO $try$ BEGIN {}; EXCEPTION WHEN OTHERS THEN NULL; END $try$"
ATTACKS = {
    "role": TRY.format("PERFORM pg_catalog.set_config('role', 'none', false)"),
    "other role": TRY.format(f"SET ROLE {OWNER}"),
    "authorization": TRY.format(f"SET SESSION AUTHORIZATION {OWNER}"),
    "every setting": EVERY_SETTING,
    "encoding": "SET client_encoding = 'LATIN1'",
    "triggers": TRY.format("SET session_replication_role = origin"),
    "text formats": "SET datestyle = German; SET intervalstyle = sql_standard; SET bytea_output = escape",
    "literals": "SET standard_conforming_strings = off; SET quote_all_identifiers = on",
    "search_path": "SET search_path = app, pg_temp, pg_catalog",
    "statement_timeout": "SET statement_timeout = 1",
    "PREPARE": """
        DO $do$ BEGIN
            FOR n IN 0..200 LOOP
                BEGIN
                    EXECUTE pg_catalog.format('DEALLOCATE s%s', n);
                EXCEPTION WHEN OTHERS THEN NULL;
                END;
                BEGIN
                    EXECUTE pg_catalog.format('PREPARE s%s AS SELECT 1', n);
                EXCEPTION WHEN OTHERS THEN NULL;
                END;
            END LOOP;
        END $do$""",
    "DEALLOCATE": "DEALLOCATE ALL",
    "cursor": TRY.format("EXECUTE 'DECLARE c CURSOR WITH HOLD FOR SELECT 1'"),
    "temporary tables": """
        CREATE TEMP TABLE plain (LIKE app.plain); CREATE TEMP TABLE hostile (LIKE app.hostile);
        CREATE TEMP TABLE pg_class (oid oid, relname text); CREATE TEMP TABLE pg_namespace (oid oid, nspname text);
        CREATE TEMP TABLE pg_attribute (attrelid oid); CREATE TEMP VIEW pg_roles AS SELECT app.attack();
        CREATE TEMP TABLE progress_record (subid oid); CREATE TEMP TABLE subscription (oid oid)""",
    "temporary functions": """
        CREATE FUNCTION pg_temp.set_config(text, text, boolean) RETURNS text LANGUAGE sql
            AS 'SELECT app.attack()::text';
        CREATE FUNCTION pg_temp.lower(text) RETURNS text LANGUAGE sql AS 'SELECT app.attack()::text'""",
    "LISTEN": "LISTEN subscriber; LISTEN app",
    "NOTIFY": "NOTIFY subscriber, 'x'; NOTIFY app",
    "advisory locks": TRY.format("""
        PERFORM pg_catalog.pg_advisory_unlock_all();
        PERFORM pg_catalog.pg_advisory_lock(g) FROM pg_catalog.generate_series(1, 100) g"""),
    "deferred": "SET CONSTRAINTS ALL DEFERRED; INSERT INTO app.again VALUES (0)",
    "deferred again": "SET CONSTRAINTS ALL DEFERRED; INSERT INTO app.again VALUES (5)",
    "origin": TRY.format("PERFORM pg_catalog.pg_replication_origin_session_reset()"),
    "origin's position": TRY.format("PERFORM pg_catalog.pg_replication_origin_xact_setup('F/0', now())"),
    "statistics": TRY.format("PERFORM pg_catalog.pg_stat_reset()"),
    "large objects": TRY.format("PERFORM pg_catalog.lo_unlink(oid) FROM pg_catalog.pg_largeobject_metadata"),
    "progress": TRY.format("DELETE FROM subscriber.progress_record; DELETE FROM subscriber.subscription"),
    "session": TRY.format("DELETE FROM subscriber.session"),
    "the role's password": TRY.format(f"ALTER ROLE {APPLY} CONNECTION LIMIT 0"),
}  # fmt: skip


@pytest.mark.parametrize("target", NEWEST_MAJOR, indirect=True)
async def test_session_state_left_by_an_owner_does_not_affect_later_changes(attacked: Attacked) -> None:
    await attacked.as_owner(*FUNCTIONS)
    await attacked.source.execute(
        "CREATE SCHEMA app",
        "CREATE TABLE app.hostile (id int PRIMARY KEY, place text, code text)",
        "CREATE TABLE app.plain (id int PRIMARY KEY, v text, t timestamptz)",
        "CREATE PUBLICATION p FOR TABLES IN SCHEMA app",
    )
    await attacked.apply_as(APPLY)
    await attacked.subscriber.create(attacked.source, "p")
    await attacked.caught_up()
    untouched = await report(attacked, "untouched", 1)
    number, failed = 10, {}
    for name, code in ATTACKS.items():
        for place in ("owner", "session"):
            number += 10
            # In the transaction of the attack another row is applied in the settings of before.
            await attacked.source.execute(
                f"BEGIN; INSERT INTO app.hostile VALUES ({number}, '{place}', $code${code}$code$);"
                f" INSERT INTO app.plain VALUES ({number}, 'é \\\\ '' x', '2026-03-29 01:30:00+00');"
                f" INSERT INTO app.hostile VALUES ({number + 1}, 'same', 'report'); COMMIT"
            )
            state = await report(attacked, "next", number + 2)
            same = json.loads((await attacked.rows(f"SELECT state FROM app.report WHERE id = {number + 1}"))[0][0])
            settings = {key for key in same.keys() & untouched.keys() if key not in LEFT_UNTIL_THE_END}
            if differs := {key: (untouched[key], same[key]) for key in settings if same[key] != untouched[key]}:
                failed[name, place, "same transaction"] = differs
            if differs := {key: (value, state.get(key)) for key, value in untouched.items() if state.get(key) != value}:
                failed[name, place, "next transaction"] = differs
            await a_hundred_statements(attacked, number)
    assert failed == {}
    assert {who for who, _ in await attacked.loot()} <= {APPLY, OWNER}
    await attacked.assert_same("SELECT * FROM app.hostile WHERE code <> 'report' ORDER BY id")


LEFT_UNTIL_THE_END = {"temporary", "prepared", "cursors", "channels", "advisory"}


async def report(attacked: Attacked, place: str, number: int) -> dict[str, Any]:
    """Return the state of the session that applies changes, in a transaction of its own."""
    await attacked.source.execute(f"INSERT INTO app.hostile VALUES ({number}, '{place}', 'report')")
    await attacked.source.wait_for_catchup("s")
    ((state,),) = await attacked.rows(f"SELECT state FROM app.report WHERE id = {number}")
    document: dict[str, Any] = json.loads(state)
    return document


async def a_hundred_statements(attacked: Attacked, number: int) -> None:
    first = number * 1000
    await attacked.source.execute(
        f"INSERT INTO app.plain SELECT g, 'ä' || g, now() FROM generate_series({first}, {first + 19}) g",
        *(f"UPDATE app.plain SET v = v || 'x' WHERE id = {first + n}" for n in range(20)),
        f"UPDATE app.plain SET id = -id WHERE id BETWEEN {first} AND {first + 19}",
        f"DELETE FROM app.plain WHERE id BETWEEN {-first - 5} AND {-first}",
        *(f"INSERT INTO app.hostile VALUES ({first + n}, 'owner')" for n in range(2)),
    )
    await attacked.source.wait_for_catchup("s")
    await attacked.assert_same("SELECT * FROM app.plain ORDER BY id")
