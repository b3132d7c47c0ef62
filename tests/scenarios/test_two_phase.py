"""Prepared transactions arrive prepared, and are resolved when the publisher resolves them."""

from __future__ import annotations

import re

import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.names import prepared_gid
from subscriber.status.collect import read_catalog
from tests.plugins.fix_cluster import Database
from tests.scenarios.conftest import Pair

GIDS = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"
STATE = "SELECT subtwophasestate::text FROM subscriber.pg_subscription WHERE subname = 's'"
LEFT = "SELECT count(*) FROM subscriber.prepared"
OWN = "xmin::text::bigint IN (SELECT pg_current_xact_id()::text::bigint % 4294967296)"  # made by this transaction


async def subscribed(pair: Pair, **options: object) -> None:
    """Table t on both sides, and a subscription that has two_phase enabled."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.source.execute("INSERT INTO t VALUES (1, 'copied')")
    await pair.subscribe("FOR ALL TABLES", two_phase=True, **options)
    await enabled(pair)


async def enabled(pair: Pair) -> None:
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.target.wait_for(STATE, "e")
    await pair.subscriber.wait_for_state("streaming")


async def prepare(source: Database, gid: str, *statements: str) -> None:
    """Prepare a transaction in one session, as PREPARE TRANSACTION requires."""
    connection = await source.connect()
    for statement in ("BEGIN", *statements, f"PREPARE TRANSACTION '{gid.replace(chr(39), chr(39) * 2)}'"):
        await connection.execute(statement)
    await connection.close()
    await source.wait_for_catchup("s")


async def test_pending_becomes_enabled_when_all_tables_are_ready(pair: Pair) -> None:
    await subscribed(pair)
    assert pair.subscriber.log.has('for subscription "s" will restart so that two_phase can be enabled')
    assert await pair.source.value("SELECT two_phase FROM pg_replication_slots WHERE slot_name = 's'")


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
async def test_a_prepared_transaction_is_prepared_on_the_target_and_resolved(pair: Pair, how: str) -> None:
    await subscribed(pair)
    await prepare(pair.source, "a'b", "INSERT INTO t VALUES (2, 'p')", "UPDATE t SET v = 'q' WHERE id = 1")
    ((gid,),) = await pair.target.rows(GIDS)
    assert re.fullmatch(r"pg_gid_\d{10}_\d+", gid)
    assert await pair.rows("SELECT * FROM t") == [(1, "copied")]
    async with CatalogConnection.open(pair.target.dsn(), "test") as catalog:
        (transaction,) = next(iter((await read_catalog(catalog, ["s"])).prepared.values()))
    assert (transaction.gid, transaction.publisher_gid) == (gid, "a'b")
    await pair.change(f"{how} PREPARED 'a''b'")
    assert await pair.target.rows(GIDS) == []
    assert await pair.target.value(LEFT) == 0
    await pair.assert_same("SELECT * FROM t ORDER BY id")


@pytest.mark.parametrize("streaming", ["off", "parallel"])
async def test_a_row_that_a_trigger_leaves_out_of_a_prepared_transaction(pair: Pair, streaming: str) -> None:
    """A table is not queried after the transaction that has truncated it is prepared, because that holds the lock."""
    await pair.source.execute("CREATE TABLE parts (id int PRIMARY KEY)")
    await pair.target.execute(
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY HASH (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES WITH (modulus 1, remainder 0)",
    )
    await subscribed(pair, streaming=streaming)
    await pair.target.execute(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        *(
            statement
            for table in ("t", "part")
            for statement in (
                f"CREATE TRIGGER no BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION no()",
                f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER no",
            )
        ),
    )
    changes = [
        f"{change} {table}{rest}"
        for table in ("t", "parts")
        for change, rest in (
            ("TRUNCATE", ""),
            ("INSERT INTO", " (id) VALUES (2)"),
            ("UPDATE", " SET id = 3 WHERE id = 2"),
            ("DELETE FROM", " WHERE id = 3"),
        )
    ]
    await prepare(pair.source, "g", *changes)
    await pair.change("COMMIT PREPARED 'g'")
    assert await pair.rows("SELECT count(*) FROM t") == [(0,)]
    counted = "SELECT (confl_update_missing, confl_delete_missing)::text FROM subscriber.pg_stat_subscription_stats"
    await pair.target.wait_for(counted, "(2,2)")


async def test_a_transaction_that_another_role_has_prepared_is_not_the_publishers(pair: Pair) -> None:
    """Any role can use the next name, and its transaction would be committed instead of the publisher's."""
    await subscribed(pair)
    await pair.target.execute("CREATE ROLE stranger", "GRANT CREATE ON SCHEMA public TO stranger")
    subid = await pair.target.value("SELECT oid::bigint FROM subscriber.pg_subscription")
    xid = await pair.source.value("SELECT pg_current_xact_id()::text::bigint")
    names = [prepared_gid(subid, number) for number in range(xid + 1, xid + 4)]
    for name in names:
        session = await pair.target.connect()
        await session.execute(f"SET SESSION AUTHORIZATION stranger; BEGIN; PREPARE TRANSACTION '{name}'")
    await pair.subscriber.restart()
    session = await pair.source.connect()
    await session.execute("BEGIN; INSERT INTO t VALUES (2, 'p'); PREPARE TRANSACTION 'ours'")
    await pair.source.execute("COMMIT PREPARED 'ours'")
    await pair.fails("transaction identifier .* is already in use")
    assert [gid for (gid,) in await pair.target.rows(GIDS)] == names
    await pair.target.execute(*(f"ROLLBACK PREPARED '{name}'" for name in names))
    await pair.source.wait_for_catchup("s")
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    await pair.target.execute("DROP OWNED BY stranger; DROP ROLE stranger")


async def test_a_prepared_transaction_does_not_hold_up_later_transactions(pair: Pair) -> None:
    await subscribed(pair)
    await prepare(pair.source, "waits", "INSERT INTO t VALUES (2, 'p')")
    await pair.change("INSERT INTO t VALUES (3, 'not prepared')")
    assert await pair.rows("SELECT id FROM t ORDER BY id") == [(1,), (3,)]
    await pair.change("COMMIT PREPARED 'waits'")
    await pair.assert_same("SELECT * FROM t ORDER BY id")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_partitioned_table_of_somebody_else(pair: Pair, streamed: bool) -> None:
    """Protecting a superuser's session from the owner's code takes a lock that the next transaction would need."""
    await pair.both(
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY HASH (id)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES WITH (modulus 1, remainder 0)",
    )
    await pair.target.execute("CREATE ROLE parts_owner", "GRANT USAGE ON SCHEMA public TO parts_owner")
    await pair.target.execute("ALTER TABLE parts OWNER TO parts_owner", "ALTER TABLE part OWNER TO parts_owner")
    try:
        await pair.subscribe("FOR TABLE parts WITH (publish_via_partition_root)", two_phase=True)
        await enabled(pair)
        if streamed:
            await pair.source.stream_everything()
            await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE", "ALTER SUBSCRIPTION s ENABLE")
            await pair.subscriber.wait_for_state("streaming")
        await pair.source.execute("BEGIN; INSERT INTO parts VALUES (1); PREPARE TRANSACTION 'g'")
        await pair.fails('ERROR:  partitioned table "public.parts" cannot be changed by a prepared transaction here')
        await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (trusted_owners = 'parts_owner')")
        await pair.change("INSERT INTO parts VALUES (2)")
        await pair.change("COMMIT PREPARED 'g'")
        await pair.assert_same("SELECT * FROM parts ORDER BY id")
    finally:
        await pair.subscriber.stop()
        await pair.target.execute("DROP OWNED BY parts_owner CASCADE", "DROP ROLE parts_owner")


async def test_a_transaction_without_published_changes_is_prepared(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t", two_phase=True)
    await enabled(pair)
    await prepare(pair.source, "g", "INSERT INTO t VALUES (1)", "SELECT pg_logical_emit_message(true, 'x', 'y')")
    await prepare(pair.source, "h", "INSERT INTO u VALUES (1)")
    await pair.change("COMMIT PREPARED 'h'", "COMMIT PREPARED 'g'")
    await pair.assert_same("SELECT * FROM t")
    assert await pair.target.rows(GIDS) == []


async def test_a_restart_between_the_two_changes_nothing(pair: Pair) -> None:
    await subscribed(pair)
    await prepare(pair.source, "one", "INSERT INTO t VALUES (2, 'p')")
    await prepare(pair.source, "two", "INSERT INTO t VALUES (3, 'p')")
    await pair.subscriber.restart()
    await pair.change("COMMIT PREPARED 'one'", "ROLLBACK PREPARED 'two'")
    assert await pair.target.rows(GIDS) == []
    await pair.assert_same("SELECT * FROM t ORDER BY id")


async def test_a_transaction_prepared_before_two_phase_arrives_at_its_commit(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t")
    await prepare(pair.source, "early", "INSERT INTO t VALUES (1, 'early')")
    assert await pair.target.rows(GIDS) == []
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (two_phase = true)", "ALTER SUBSCRIPTION s ENABLE")
    await enabled(pair)
    await pair.change("COMMIT PREPARED 'early'")
    await pair.assert_same("SELECT * FROM t")
    assert await pair.target.rows(GIDS) == []


async def test_a_commit_of_what_somebody_rolled_back_here_is_an_error_and_can_be_skipped(pair: Pair) -> None:
    await subscribed(pair)
    await prepare(pair.source, "g", "INSERT INTO t VALUES (2, 'p')")
    ((gid,),) = await pair.target.rows(GIDS)
    await pair.target.execute(f"ROLLBACK PREPARED '{gid}'")
    await pair.source.execute("COMMIT PREPARED 'g'")
    error = await pair.fails(
        rf'ERROR:  prepared transaction with identifier "{gid}" does not exist[\s\S]*finished at \S+'
    )
    position = error.rsplit(" ", 1)[1]
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{position}')")
    await pair.change("INSERT INTO t VALUES (3, 'goes on')")
    assert await pair.rows("SELECT id FROM t ORDER BY id") == [(1,), (3,)]


async def test_a_commit_that_somebody_did_here_before_us_is_taken_as_done(pair: Pair) -> None:
    await subscribed(pair)
    await prepare(pair.source, "g", "INSERT INTO t VALUES (2, 'p')")
    ((gid,),) = await pair.target.rows(GIDS)
    await pair.subscriber.stop()
    await pair.target.execute(f"COMMIT PREPARED '{gid}'")
    pair.subscriber.start()
    await pair.change("COMMIT PREPARED 'g'")
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    assert await pair.target.value(LEFT) == 0


async def test_a_skipped_transaction_is_prepared_empty(pair: Pair) -> None:
    await subscribed(pair)
    await pair.target.execute("INSERT INTO t VALUES (2, 'in the way')")
    connection = await pair.source.connect()
    for statement in ("BEGIN", "INSERT INTO t VALUES (2, 'late'), (3, 'late')", "PREPARE TRANSACTION 'g'"):
        await connection.execute(statement)
    await connection.close()
    match = await pair.subscriber.log.wait_for(r"in transaction \d+, finished at ([0-9A-F]+/[0-9A-F]+)")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{match[1]}')")
    await pair.source.wait_for_catchup("s")
    assert len(await pair.target.rows(GIDS)) == 1
    await pair.change("COMMIT PREPARED 'g'")
    assert await pair.rows("SELECT * FROM t ORDER BY id") == [(1, "copied"), (2, "in the way")]
    assert await pair.target.value("SELECT subskiplsn::text FROM subscriber.pg_subscription") == "0/0"


async def test_a_lock_that_only_the_target_has_is_reported_instead_of_waited_for(pair: Pair) -> None:
    await subscribed(pair)
    await pair.target.execute("CREATE UNIQUE INDEX here_only ON t (v)")
    await prepare(pair.source, "g", "INSERT INTO t VALUES (2, 'same')")
    await pair.source.execute("INSERT INTO t VALUES (3, 'same')")
    await pair.fails('ERROR:  a lock that is needed is held by prepared transaction "pg_gid_')
    await pair.source.execute("ROLLBACK PREPARED 'g'")  # detected before it arrives
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    assert pair.subscriber.log.has("is in the way, and rolled back as on the publisher")
    assert await pair.target.value(LEFT) == 0


async def test_a_prepared_delete_takes_an_equal_row_that_no_transaction_holds(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (a int, b text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    await pair.source.execute("INSERT INTO t SELECT 1, 'same' FROM generate_series(1, 20)")
    await pair.subscribe("FOR TABLE t", two_phase=True)
    await enabled(pair)
    one = "(SELECT ctid FROM t LIMIT 1 FOR UPDATE SKIP LOCKED)"
    for number in range(5):
        await prepare(pair.source, f"g{number}", f"DELETE FROM t WHERE ctid = {one}")
        await pair.change(f"UPDATE t SET a = {number + 2} WHERE ctid = {one}")
    for number in range(5):
        await pair.change(f"{'COMMIT' if number % 2 else 'ROLLBACK'} PREPARED 'g{number}'")
    await pair.assert_same("SELECT a, count(*) FROM t GROUP BY a ORDER BY a")


async def test_a_prepared_transaction_takes_its_own_equal_rows_first(pair: Pair) -> None:
    """A prepared transaction must not lock a row that is unlocked on the publisher: there it changed its own row."""
    await pair.both("CREATE TABLE t (a int, b text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    await pair.source.execute("INSERT INTO t VALUES (2, 'same'), (1, 'same'), (4, 'same')")
    await pair.subscribe("FOR TABLE t", two_phase=True)
    await enabled(pair)
    await prepare(
        pair.source,
        "g",
        f"UPDATE t SET a = 2 WHERE a = 1; UPDATE t SET a = 3 WHERE a = 2 AND {OWN};"
        f" INSERT INTO t VALUES (4, 'same'); DELETE FROM t WHERE a = 4 AND {OWN}",
    )
    await pair.change("DELETE FROM t WHERE a = 2", "DELETE FROM t WHERE a = 4")
    await pair.change("COMMIT PREPARED 'g'")
    assert await pair.rows("SELECT * FROM t") == [(3, "same")]


async def test_a_prepared_transaction_takes_its_own_batched_equal_rows_first(pair: Pair) -> None:
    """They belong to subtransactions that have ended and released their locks."""
    await pair.both("CREATE TABLE t (a int, b text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    await pair.source.execute("INSERT INTO t SELECT 1, 'same' FROM generate_series(1, 5)")
    await pair.subscribe("FOR TABLE t", two_phase=True)
    await enabled(pair)
    made = "INSERT INTO t SELECT 1, 'same' FROM generate_series(1, 20)"
    await prepare(
        pair.source,
        "g",
        f"{made}; UPDATE t SET a = 2 WHERE a = 1 AND {OWN}; {made}; DELETE FROM t WHERE a = 1 AND {OWN}",
    )
    await pair.change("DELETE FROM t WHERE a = 1")
    await pair.change("COMMIT PREPARED 'g'")
    assert await pair.rows("SELECT DISTINCT * FROM t") == [(2, "same")]


async def test_a_subscription_that_its_first_copy_disabled_can_be_enabled_again(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    await pair.subscriber.create(pair.source, "p", "s", two_phase=True, streaming="on", disable_on_error=True)
    await pair.target.wait_for("SELECT subenabled FROM subscriber.pg_subscription", False)
    await pair.target.execute("TRUNCATE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await enabled(pair)
    await pair.assert_same("SELECT * FROM t")
