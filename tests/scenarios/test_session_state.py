"""Triggers of the target that change the state of the session that applies changes. PostgreSQL's own worker goes on."""

from __future__ import annotations

import pytest

from tests.scenarios.conftest import Pair

STATEMENTS = {
    "prepared statements": "EXECUTE 'DEALLOCATE ALL'",
    "statement_timeout": "SET statement_timeout = '1ms'",
    "statement_timeout of the transaction": "SET LOCAL statement_timeout = '1ms'",
    "lock_timeout": "SET lock_timeout = '1ms'",
    "idle_in_transaction_session_timeout": "SET idle_in_transaction_session_timeout = '1ms'",
    "search_path": "SET search_path = nowhere",
    "plan_cache_mode": "SET plan_cache_mode = force_generic_plan",
    "datestyle": "SET datestyle = 'SQL, DMY'; SET intervalstyle = sql_standard; SET timezone = 'Asia/Kolkata'",
    "standard_conforming_strings": "SET standard_conforming_strings = off; SET bytea_output = escape",
}


@pytest.mark.parametrize("state", STATEMENTS)
@pytest.mark.parametrize("streaming", ["off", "parallel"])
async def test_a_trigger_that_changes_the_session(pair: Pair, state: str, streaming: str) -> None:
    await pair.both(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, v text)", "CREATE TABLE u (id int PRIMARY KEY)"
    )
    await pair.target.execute(
        "CREATE FUNCTION disturb() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {STATEMENTS[state]}; RETURN NULL; END $$",
        "CREATE TRIGGER disturb AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION disturb()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER disturb",
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(0.05); RETURN NULL; END $$",
        "CREATE TRIGGER slow AFTER INSERT ON u FOR EACH ROW EXECUTE FUNCTION slow()",
        "ALTER TABLE u ENABLE ALWAYS TRIGGER slow",
    )
    await pair.subscribe("FOR ALL TABLES", streaming=streaming)
    if streaming == "parallel":
        await pair.source.stream_everything()
    await pair.change(
        "INSERT INTO t VALUES (1, '2026-02-03 04:05', 'a\\b')",
        "INSERT INTO u VALUES (1)",
        "BEGIN; INSERT INTO t VALUES (2, '2026-03-04 05:06'); INSERT INTO u VALUES (2);"
        " UPDATE t SET v = 'it''s' WHERE id = 1; INSERT INTO u VALUES (3); COMMIT",
        "INSERT INTO t SELECT n, now() FROM generate_series(10, 20) n",
        "DELETE FROM t WHERE id = 20",
        "INSERT INTO u VALUES (4)",
    )
    for table in ("t", "u"):
        await pair.assert_same(f"SELECT * FROM {table} ORDER BY id")
    assert not pair.subscriber.log.has("ERROR")
