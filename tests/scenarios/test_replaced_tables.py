"""A table of the target that is renamed, swapped or dropped during replication: this is never ignored silently.

The name of a published table decides, as in PostgreSQL. A table that takes the name of another one that still exists
gets the changes. All other cases stop with an error.
"""

from __future__ import annotations

import json
from contextlib import suppress

import asyncpg
import pytest

from subscriber.cli.commands.status import status as show_status
from tests.plugins.fix_cluster import fresh_database
from tests.scenarios.conftest import Pair

SWAP = "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t"
REPLACE = f"CREATE TABLE t_new (LIKE t INCLUDING ALL); INSERT INTO t_new SELECT * FROM t; {SWAP}"
FOLLOWED = 'LOG:  table "public.t" of subscription "s" was replaced: changes go to the table that has the name now'
NO_TABLE = 'logical replication target relation "public.t" does not exist'
REPLACED = 'table "public.t" of subscription "s" was dropped and created again'


async def subscribed(pair: Pair, **options: object) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, note text)")
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.subscribe("FOR TABLE t", **options)
    await pair.change("INSERT INTO t VALUES (2)")
    await pair.subscriber.wait_for_ready(pair.source)


async def stored(pair: Pair) -> list[tuple[str, str, bool]]:
    """Names and states of the subscription's tables, and whether the number is that of the name."""
    return await pair.rows(
        "SELECT srrelname::text, srsubstate::text, srrelid = to_regclass(format('%I.%I', srnspname, srrelname))"
        " FROM subscriber.subscription_rel ORDER BY 1"
    )


@pytest.mark.parametrize("running", [True, False])
async def test_a_swapped_table_gets_the_changes(pair: Pair, running: bool) -> None:
    await subscribed(pair)
    if not running:
        await pair.subscriber.stop()
    await pair.target.execute(REPLACE)
    await pair.source.execute("INSERT INTO t VALUES (3)", "UPDATE t SET note = 'x' WHERE id = 1")
    if not running:
        pair.subscriber.start()
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY 1")
    assert await pair.rows("SELECT id FROM t_old ORDER BY 1") == [(1,), (2,)]
    assert await stored(pair) == [("t", "r", True)]
    assert FOLLOWED in pair.subscriber.log.text()


async def test_two_tables_that_exchange_their_names(pair: Pair) -> None:
    await pair.both("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE a, b")
    await pair.change("INSERT INTO a VALUES (1); INSERT INTO b VALUES (2)")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.target.execute("ALTER TABLE a RENAME TO c; ALTER TABLE b RENAME TO a; ALTER TABLE c RENAME TO b")
    await pair.change("INSERT INTO a VALUES (3); INSERT INTO b VALUES (4)")
    assert await pair.rows("SELECT id FROM a ORDER BY 1") == [(2,), (3,)]
    assert await pair.rows("SELECT id FROM b ORDER BY 1") == [(1,), (4,)]
    assert await stored(pair) == [("a", "r", True), ("b", "r", True)]


@pytest.mark.parametrize("options", [{"apply_sessions": 3}, {"binary": True}, {"run_as_owner": True}])
async def test_a_table_swapped_while_many_transactions_arrive_loses_no_change(
    pair: Pair, options: dict[str, object]
) -> None:
    await subscribed(pair, **options)
    await pair.source.execute("DO $$ BEGIN FOR i IN 10 .. 1500 LOOP INSERT INTO t VALUES (i); COMMIT; END LOOP; END $$")
    for number in range(3):
        await pair.target.execute(f"LOCK TABLE t; {REPLACE}", f"ALTER TABLE t_old RENAME TO t_old_{number}")
        await pair.source.execute("UPDATE t SET note = coalesce(note, '') || 'x' WHERE id % 7 = 0")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY 1")


@pytest.mark.parametrize("streaming", ["on", "parallel"])
async def test_a_table_swapped_during_a_streamed_transaction_loses_no_change(pair: Pair, streaming: str) -> None:
    await pair.source.stream_everything()
    await subscribed(pair, streaming=streaming)
    async with pair.source.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("INSERT INTO t SELECT generate_series(10, 20)")
        await pair.source.flush_wal()
        await pair.target.wait_for("SELECT jsonb_array_length(streamed) FROM subscriber.worker WHERE relid = 0", 1)
        with suppress(asyncpg.LockNotAvailableError):  # a parallel worker has the table locked until the end
            await pair.target.execute(f"SET lock_timeout = '200ms'; {REPLACE}")
        await connection.execute("INSERT INTO t SELECT generate_series(21, 30)")
        await transaction.commit()
    await pair.caught_up()
    await pair.target.execute("DROP TABLE IF EXISTS t_old", REPLACE)
    await pair.change("DELETE FROM t WHERE id = 25")
    await pair.assert_same("SELECT * FROM t ORDER BY 1")


async def test_a_table_swapped_before_commit_prepared_loses_no_change(pair: Pair) -> None:
    await subscribed(pair, two_phase=True)
    await pair.target.wait_for("SELECT subtwophasestate::text FROM subscriber.subscription", "e")
    await pair.target.execute(REPLACE)
    await pair.source.execute("BEGIN; INSERT INTO t VALUES (3); PREPARE TRANSACTION 'x'")
    await pair.target.wait_for("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()", 1)
    await pair.change("COMMIT PREPARED 'x'")
    await pair.assert_same("SELECT * FROM t ORDER BY 1")


async def test_a_renamed_table_stops_the_stream(pair: Pair) -> None:
    await subscribed(pair)
    await pair.target.execute("ALTER TABLE t RENAME TO elsewhere")
    await pair.source.execute("INSERT INTO t VALUES (3)")
    await pair.fails(NO_TABLE)
    await pair.target.execute("ALTER TABLE elsewhere RENAME TO t")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY 1")


async def test_a_dropped_table_stops_the_stream(pair: Pair) -> None:
    await subscribed(pair)
    await pair.target.execute("DROP TABLE t")
    await pair.source.execute("INSERT INTO t VALUES (3)")
    await pair.fails(NO_TABLE)


async def test_a_table_whose_former_one_was_dropped_goes_on_without_a_copy(pair: Pair) -> None:
    await subscribed(pair)
    await pair.target.execute(f"{REPLACE}; DROP TABLE t_old")
    await pair.source.execute("INSERT INTO t VALUES (3)")
    await pair.fails(REPLACED)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = false)")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY 1")


@pytest.mark.parametrize("running", [True, False])
async def test_a_dropped_table_that_is_created_again_needs_a_copy(pair: Pair, running: bool) -> None:
    await subscribed(pair)
    if not running:
        await pair.subscriber.stop()
    await pair.target.execute("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, note text)")
    if not running:
        pair.subscriber.start()
    await pair.source.execute("INSERT INTO t VALUES (3)")
    await pair.fails(REPLACED)
    assert await pair.rows("SELECT * FROM t") == []
    status = await pair.subscriber.wait_for_state("waiting to retry")
    remedy = json.loads(status["error_remedy"])
    copy, keep = remedy["command"], remedy["alternative"]["command"]
    assert keep == f"{copy.rstrip(';')} WITH (copy_data = false);"
    await pair.subscriber.execute(copy)
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY 1")
    assert await stored(pair) == [("t", "r", True)] or await stored(pair) == [("t", "s", True)]


async def test_refresh_does_not_copy_a_table_that_has_taken_over_a_name(pair: Pair) -> None:
    """The table's rows are there already: a copy would be refused."""
    await subscribed(pair)
    await pair.target.execute(REPLACE)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.change("INSERT INTO t VALUES (3)")
    await pair.assert_same("SELECT * FROM t ORDER BY 1")


async def test_changes_passed_over_during_a_copy_reach_the_table_that_is_there_then(pair: Pair) -> None:
    """The mapping of a table that is not ready yet outlives neither a swap nor a refresh."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, note text)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.target.execute("INSERT INTO t VALUES (1)")
    await pair.source.execute("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t, u")
    await pair.subscriber.create(pair.source, "p")
    await pair.fails("duplicate key value")
    await pair.change("INSERT INTO t VALUES (2); INSERT INTO u VALUES (2)")
    await pair.target.execute("CREATE TABLE t_new (LIKE t INCLUDING ALL)", SWAP)
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.change("INSERT INTO t VALUES (3); INSERT INTO u VALUES (3)")
    await pair.assert_same("SELECT * FROM t ORDER BY 1")
    await pair.assert_same("SELECT * FROM u ORDER BY 1")


async def test_a_table_that_is_published_later_and_swapped(pair: Pair) -> None:
    await subscribed(pair)
    await pair.both("CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE u")
    await pair.change("INSERT INTO u VALUES (1)")  # not part of the subscription: ignored, as in PostgreSQL
    await pair.target.execute("ALTER TABLE u RENAME TO u_old; CREATE TABLE u (LIKE u_old INCLUDING ALL)")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.change("INSERT INTO u VALUES (2)")
    await pair.assert_same("SELECT * FROM u ORDER BY 1")


async def test_postgresqls_own_worker_goes_into_the_new_table(pair: Pair) -> None:
    """The built-in worker behaves as test_a_swapped_table_gets_the_changes requires of ours."""
    async with fresh_database(pair.target.server) as native:
        await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
        await native.execute(
            "CREATE TABLE t (id int PRIMARY KEY)",
            f"CREATE SUBSCRIPTION s CONNECTION '{pair.source.dsn()}' PUBLICATION p",
        )
        try:
            await pair.source.execute("INSERT INTO t VALUES (1)")
            await native.wait_for("SELECT count(*) FROM t", 1)
            await native.wait_for("SELECT srsubstate::text FROM pg_subscription_rel", "r")
            # Before its first change in state r, the built-in worker would pass over the new table's changes.
            await pair.source.execute("INSERT INTO t VALUES (2)")
            await native.wait_for("SELECT count(*) FROM t", 2)
            await native.execute(REPLACE)
            await pair.source.execute("INSERT INTO t VALUES (3)")
            await native.wait_for("SELECT count(*) FROM t", 3)
            await native.execute("ALTER TABLE t RENAME TO elsewhere")
            await pair.source.execute("INSERT INTO t VALUES (4)")
            await native.wait_for("SELECT apply_error_count > 0 FROM pg_stat_subscription_stats", True)
        finally:
            await native.execute("DROP SUBSCRIPTION s")


async def test_status_names_tables_that_are_lost_or_not_subscribed(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    await subscribed(pair)
    assert await show_status(pair.target.dsn()) == 0
    assert "not subscribed" not in capsys.readouterr().out
    await pair.source.execute("CREATE TABLE later (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE later")
    assert await show_status(pair.target.dsn()) == 0
    assert "  not subscribed public.later\n" in capsys.readouterr().out
    for statements, what in [
        ("ALTER TABLE t RENAME TO elsewhere", "renamed"),
        ("DROP TABLE elsewhere", "dropped"),
        ("CREATE TABLE t (id int PRIMARY KEY, note text)", "dropped and created again"),
    ]:
        await pair.target.execute(statements)
        assert await show_status(pair.target.dsn()) == 1
        shown = capsys.readouterr().out
        assert f'  lost table    table "public.t" of subscription "s" was {what}\n' in shown
        assert f"  tables        1 {what}\n" in shown
    await pair.source.execute("ALTER PUBLICATION p DROP TABLE t")
    assert await show_status(pair.target.dsn()) == 1
    shown = capsys.readouterr().out
    assert "lost table" not in shown
    assert "table public.t is not published" in shown
