"""Inserts, updates, deletes and truncations arrive, for each kind of replica identity; publications change."""

from __future__ import annotations

import pytest

from tests.scenarios.conftest import Pair


async def test_a_table_is_copied_and_then_followed(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.source.execute("INSERT INTO t SELECT g, 'copied' FROM generate_series(1, 100) g")
    await pair.subscribe("FOR TABLE t")
    assert await pair.rows("SELECT count(*), min(v) FROM t") == [(100, "copied")]
    await pair.change(
        "INSERT INTO t VALUES (101, 'new')",
        "UPDATE t SET v = 'changed' WHERE id = 1",
        "UPDATE t SET id = 200 WHERE id = 2",
        "DELETE FROM t WHERE id BETWEEN 3 AND 100",
    )
    assert await pair.rows("SELECT id, v FROM t ORDER BY id") == [(1, "changed"), (101, "new"), (200, "copied")]


async def test_changes_arrive_under_each_replica_identity(pair: Pair) -> None:
    await pair.both(
        "CREATE TABLE by_key (id int PRIMARY KEY, v text)",
        "CREATE TABLE by_index (a int, k text NOT NULL CONSTRAINT by_index_k UNIQUE)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_k",
        "CREATE TABLE whole (a int, b text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE TABLE nothing (a int)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
    )
    await pair.source.execute(
        "INSERT INTO by_key VALUES (1, 'a'), (2, NULL), (3, 'c')",
        "INSERT INTO by_index VALUES (1, 'a'), (NULL, 'b'), (3, 'c')",
        "INSERT INTO whole VALUES (1, 'a'), (1, 'a'), (NULL, NULL), (NULL, 'd')",
        "INSERT INTO nothing VALUES (1)",
    )
    await pair.subscribe("FOR ALL TABLES")
    await pair.change(
        "UPDATE by_key SET v = v || '!', id = id + 10",
        "DELETE FROM by_key WHERE id = 13",
        "UPDATE by_index SET k = k || k, a = 7 WHERE k <> 'c'",
        "DELETE FROM by_index WHERE k = 'c'",
        "UPDATE whole SET b = 'z' WHERE ctid IN (SELECT min(ctid) FROM whole GROUP BY a)",
        "DELETE FROM whole WHERE b = 'd'",
        "INSERT INTO nothing VALUES (2)",
    )
    for table in ("by_key", "by_index", "whole", "nothing"):
        await pair.assert_same(f"SELECT t::text FROM {table} t ORDER BY 1")


async def test_only_the_operations_of_the_publication_arrive(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t WITH (publish = 'insert, delete')")
    await pair.change("INSERT INTO t VALUES (1, 'a'), (2, 'b')", "UPDATE t SET v = 'x'", "DELETE FROM t WHERE id = 1")
    assert await pair.rows("SELECT id, v FROM t") == [(2, "b")]
    await pair.change("ALTER PUBLICATION p SET (publish = 'insert, update')", "UPDATE t SET v = 'y'", "DELETE FROM t")
    assert await pair.rows("SELECT id, v FROM t") == [(2, "y")]


async def test_missing_rows_are_skipped_and_reported(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.source.execute("INSERT INTO t VALUES (1, 'secret'), (2, 'secret'), (3, 'secret')")
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("DELETE FROM t WHERE id < 3")
    await pair.change("UPDATE t SET v = 'other' WHERE id <> 2", "DELETE FROM t WHERE id = 2")
    assert await pair.rows("SELECT id, v FROM t") == [(3, "other")]
    await pair.fails(r'LOG:  conflict detected on relation "public.t": conflict=update_missing')
    await pair.fails(
        r"DETAIL:  Could not find the row to be updated.\s+Remote row \(1, other\); replica identity \(id\)=\(1\)."
    )
    await pair.fails(r'LOG:  conflict detected on relation "public.t": conflict=delete_missing')
    await pair.fails(r"DETAIL:  Could not find the row to be deleted.\s+Replica identity \(id\)=\(2\).")


async def test_a_transaction_is_seen_whole_or_not_at_all(pair: Pair) -> None:
    await pair.both("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE a, b")
    writer = await pair.source.connect()
    for number in range(50):
        async with writer.transaction():
            await writer.execute(f"INSERT INTO a SELECT generate_series({number * 10}, {number * 10 + 9})")
            await writer.execute(f"INSERT INTO b SELECT generate_series({number * 10}, {number * 10 + 9})")
        [(in_a, in_b)] = await pair.rows("SELECT (SELECT count(*) FROM a), (SELECT count(*) FROM b)")
        assert in_a == in_b
        assert in_a % 10 == 0
    await pair.caught_up()
    assert await pair.rows("SELECT count(*) FROM b") == [(500,)]


async def test_savepoints_rolled_back_leave_nothing(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.change(
        "BEGIN; INSERT INTO t VALUES (1); SAVEPOINT s; INSERT INTO t VALUES (2); ROLLBACK TO s;"
        " INSERT INTO t VALUES (3); COMMIT",
        "BEGIN; INSERT INTO t VALUES (4); ROLLBACK",
    )
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (3,)]


async def test_unchanged_toast_values_stay(pair: Pair) -> None:
    await pair.both(
        "CREATE TABLE t (id int PRIMARY KEY, body text, n int)",
        "ALTER TABLE t ALTER body SET STORAGE EXTERNAL",
        "CREATE TABLE f (id int, body text, n int)",
        "ALTER TABLE f ALTER body SET STORAGE EXTERNAL",
        "ALTER TABLE f REPLICA IDENTITY FULL",
    )
    await pair.subscribe("FOR ALL TABLES")
    await pair.change(
        "INSERT INTO t SELECT 1, string_agg(md5(g::text), ''), 0 FROM generate_series(1, 300) g",
        "INSERT INTO f SELECT * FROM t",
        "UPDATE t SET n = 1",
        "UPDATE t SET id = 2",
        "UPDATE f SET n = 1",
        "UPDATE f SET id = 2",
    )
    for table in ("t", "f"):
        await pair.assert_same(f"SELECT id, n, md5(body) FROM {table}")
        assert await pair.rows(f"SELECT id, n FROM {table}") == [(2, 1)]


async def test_empty_transactions_and_other_tables_are_confirmed(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE other (id int)")
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO other SELECT generate_series(1, 1000)")
    position = await pair.source.value("SELECT pg_current_wal_lsn()::text")
    await pair.source.wait_for(
        f"SELECT confirmed_flush_lsn >= '{position}' FROM pg_replication_slots WHERE slot_name = 's'"
    )


@pytest.mark.parametrize("synchronous_commit", ["on", "off"])
async def test_a_confirmed_position_is_in_the_progress_row_and_the_origin(pair: Pair, synchronous_commit: str) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t", synchronous_commit=synchronous_commit)
    await pair.change("INSERT INTO t VALUES (1)")
    [(row, origin)] = await pair.rows(
        "SELECT p.remote_lsn, o.remote_lsn FROM subscriber.progress p, pg_replication_origin_status o"
        " WHERE relid = 0 AND external_id = 'pg_' || p.subid"
    )
    assert row == origin
    confirmed = await pair.source.value("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 's'")
    assert confirmed >= row


async def test_a_table_leaves_and_comes_back(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t, u")
    await pair.change("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)")
    await pair.source.execute("ALTER PUBLICATION p DROP TABLE u")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.change("INSERT INTO t VALUES (2)", "INSERT INTO u VALUES (2)")
    assert await pair.rows("SELECT id FROM u") == [(1,)]
    await pair.target.execute("TRUNCATE u")
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE u")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    await pair.change("INSERT INTO u VALUES (3)")
    assert await pair.rows("SELECT id FROM u ORDER BY 1") == [(1,), (2,), (3,)]


async def test_publications_are_added_and_dropped(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO u VALUES (1)", "CREATE PUBLICATION q FOR TABLE u")
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ADD PUBLICATION q")
    await pair.caught_up()
    await pair.change("INSERT INTO u VALUES (2)", "INSERT INTO t VALUES (1)")
    assert await pair.rows("SELECT id FROM u ORDER BY 1") == [(1,), (2,)]
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DROP PUBLICATION p")
    await pair.caught_up()
    await pair.change("INSERT INTO u VALUES (3)", "INSERT INTO t VALUES (2)")
    assert await pair.rows("SELECT id FROM u ORDER BY 1") == [(1,), (2,), (3,)]
    assert await pair.rows("SELECT id FROM t") == [(1,)]


async def test_a_schema_is_published(pair: Pair) -> None:
    await pair.both(
        "CREATE SCHEMA a",
        "CREATE TABLE a.t (id int PRIMARY KEY)",
        "CREATE TABLE public.t (id int PRIMARY KEY)",
        "CREATE TABLE later (id int PRIMARY KEY)",
    )
    await pair.source.execute("INSERT INTO a.t VALUES (1)", "INSERT INTO t VALUES (1)", "INSERT INTO later VALUES (1)")
    await pair.subscribe("FOR TABLES IN SCHEMA a")
    await pair.change("INSERT INTO a.t VALUES (2)", "INSERT INTO t VALUES (2)")
    assert await pair.rows("SELECT id FROM a.t ORDER BY 1") == [(1,), (2,)]
    assert await pair.rows("SELECT id FROM t") == []
    await pair.both("ALTER TABLE later SET SCHEMA a")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    await pair.change("INSERT INTO a.later VALUES (2)")
    assert await pair.rows("SELECT id FROM a.later ORDER BY 1") == [(1,), (2,)]


async def test_logical_messages_do_no_harm(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.change(
        "SELECT pg_logical_emit_message(false, 'p', 'outside')",
        "BEGIN; INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, 'p', 'inside'); COMMIT",
    )
    assert await pair.rows("SELECT id FROM t") == [(1,)]


async def test_changes_of_unlogged_and_temporary_tables_are_not_replicated(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE UNLOGGED TABLE u (id int)")
    await pair.source.execute("CREATE MATERIALIZED VIEW m AS SELECT * FROM t")
    await pair.subscribe("FOR ALL TABLES")
    await pair.change("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)", "REFRESH MATERIALIZED VIEW m")
    await pair.change("CREATE TEMP TABLE x (id int); INSERT INTO x VALUES (1); INSERT INTO t VALUES (2)")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
    assert await pair.rows("SELECT id FROM u") == []


async def test_a_prepared_transaction_arrives_when_it_is_committed(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute(
        "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'kept'",
        "BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'not kept'",
    )
    await pair.change("INSERT INTO t VALUES (3)")
    assert await pair.rows("SELECT id FROM t") == [(3,)]
    await pair.change("COMMIT PREPARED 'kept'", "ROLLBACK PREPARED 'not kept'")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (3,)]
