"""Failures, their messages, and the next steps."""

from __future__ import annotations

import json
import re
from typing import Literal

import anyio
import pytest

from subscriber.demo.servers import Servers
from subscriber.lsn import Lsn
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import Subscriber, running_subscriber
from tests.scenarios.conftest import Pair

QUIET = 0.6  # seconds: three times the interval of an unwanted retry


async def conflicting(pair: Pair, **options: object) -> None:
    """Table t, where an INSERT of the source is going to fail on the target."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t", **options)
    await pair.target.execute("INSERT INTO t VALUES (7, 'in the way')")
    await pair.source.execute("INSERT INTO t VALUES (6, 'before')", "INSERT INTO t VALUES (7, 'confidential')")


async def test_an_error_names_the_change_and_the_position_to_skip(pair: Pair) -> None:
    await conflicting(pair)
    position = await pair.source.value("SELECT pg_current_wal_lsn()")
    match = await pair.subscriber.log.wait_for(
        r'ERROR:  (?:conflict detected on relation "public.t": conflict=insert_exists|'
        r'duplicate key value violates unique constraint "t_pkey")\n(?:.*\n)*?'
        r'.*CONTEXT:  (?:.*\n.*)?processing remote data for replication origin "pg_(\d+)" during message type "INSERT" '
        r'for replication target relation "public.t" in transaction (\d+), finished at ([0-9A-F]+/[0-9A-F]+)'
    )
    subid, xid, lsn = match.groups()
    assert int(subid) == await pair.target.value("SELECT subid FROM subscriber.subscription")
    assert int(xid) == await pair.source.value("SELECT xmin::text::int FROM t WHERE id = 7")
    assert Lsn.parse(lsn) < position
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(6,), (7,)]  # the earlier rows are there
    await pair.target.wait_for("SELECT apply_error_count > 1 FROM subscriber.subscription_stats")  # retried
    await pair.target.execute("DELETE FROM t WHERE id = 7")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")


async def test_logs_have_no_row_values(pair: Pair) -> None:
    await conflicting(pair)
    await pair.fails("ERROR:  ")
    await pair.target.execute("TRUNCATE t")
    await pair.caught_up()
    await pair.change("UPDATE t SET v = 'confidential' WHERE id = 6", "DELETE FROM t WHERE id = 7")
    await pair.target.execute("ALTER TABLE t ADD CHECK (v <> 'confidential too')")
    await pair.source.execute("INSERT INTO t VALUES (8, 'confidential too')")
    await pair.fails('violates check constraint "t_v_check"')
    for line in pair.subscriber.log.text("json").splitlines():
        assert "confidential" not in line
        assert json.loads(line)["level"] in ("LOG", "ERROR", "WARNING")
    assert "password" not in pair.subscriber.log.text()
    status = await pair.rows("SELECT coalesce(string_agg(w::text, ' '), '') FROM subscriber.worker w")
    assert "confidential" not in status[0][0]


async def test_a_value_too_long_for_its_column_is_an_error(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.target.execute("CREATE TABLE t (id int PRIMARY KEY, v varchar(3))")
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO t VALUES (1, 'abc')")
    await pair.source.execute("UPDATE t SET v = 'abcd'")
    await pair.fails(r"ERROR:  value too long for type character varying\(3\)")
    assert await pair.rows("SELECT v FROM t") == [("abc",)]
    await pair.target.execute("ALTER TABLE t ALTER v TYPE text")
    await pair.caught_up()
    assert await pair.rows("SELECT v FROM t") == [("abcd",)]


async def test_disable_on_error_disables_the_subscription(pair: Pair) -> None:
    await conflicting(pair, disable_on_error=True)
    await pair.fails('LOG:  subscription "s" has been disabled because of an error')
    await pair.target.wait_for("SELECT subenabled FROM subscriber.subscription", False)
    assert await pair.target.value("SELECT apply_error_count FROM subscriber.subscription_stats") == 1
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await pair.target.execute("DELETE FROM t WHERE id = 7")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")


async def test_disable_on_error_of_a_copy(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.both("INSERT INTO t VALUES (1)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    await pair.subscriber.create(pair.source, "p", disable_on_error=True)
    await pair.fails('LOG:  subscription "s" has been disabled because of an error')
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await pair.target.execute("TRUNCATE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t")


async def stopped_with(pair: Pair, message: str) -> None:
    """Check that the subscription stops with that error and a hint, and does not retry."""
    status = await pair.subscriber.wait_for_state("stopped")
    assert re.search(message, status["error"])
    assert status["error_hint"]
    assert status["next_retry"] is None
    errors = pair.subscriber.log.text().count("ERROR:  ")
    await anyio.sleep(QUIET)
    assert pair.subscriber.log.text().count("ERROR:  ") == errors
    assert re.search(rf"ERROR:  .*{message}", pair.subscriber.log.text())
    assert "HINT:  " in pair.subscriber.log.text()


async def test_a_slot_that_is_gone_stops_the_subscription(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await pair.source.execute("SELECT pg_drop_replication_slot('s')")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await stopped_with(pair, 'replication slot "s" does not exist')
    # With a new slot that is set as slot_name, the subscription resumes.
    await pair.source.execute("SELECT pg_create_logical_replication_slot('s2', 'pgoutput')")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (slot_name = 's2')")
    await pair.change("INSERT INTO t VALUES (1)")
    assert await pair.rows("SELECT id FROM t") == [(1,)]


async def test_a_slot_dropped_under_a_running_subscription(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    dropping = await pair.source.connect()
    with anyio.fail_after(10):
        while True:  # it reconnects within a tenth of a second: try until we are in between
            await dropping.execute(
                "SELECT pg_terminate_backend(active_pid, 1000) FROM pg_replication_slots"
                " WHERE slot_name = 's' AND active"
            )
            if await dropping.fetchval(
                "SELECT count(pg_drop_replication_slot(slot_name)) FROM pg_replication_slots"
                " WHERE slot_name = 's' AND NOT active"
            ):
                break
    await stopped_with(pair, 'replication slot "s" does not exist')


async def test_another_publisher_at_the_same_address(
    new_servers: Servers, target_db: Database, subscriber: Subscriber
) -> None:
    first = await new_servers.create("first", SETTINGS)
    await first.start()
    source = Database(first, "postgres")
    pair = Pair(source, target_db, subscriber)
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO t VALUES (1)")
    await first.stop()
    second = await new_servers.create("second", SETTINGS)
    second.port = first.port
    await second.start()
    replaced = Database(second, "postgres")
    await replaced.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        "INSERT INTO t VALUES (2)",
    )
    await stopped_with(pair, "the publisher is another database cluster than before")
    assert await pair.rows("SELECT id FROM t") == [(1,)]
    await second.stop()


async def test_publication_missing_is_a_warning_and_is_found_once_it_exists(pair: Pair) -> None:
    await pair.source.needs(18, "a missing publication is a warning")
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    notices = await pair.subscriber.execute("ALTER SUBSCRIPTION s ADD PUBLICATION later WITH (refresh = false)")
    assert notices == []
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.fails('WARNING:  skipped loading publication "later"')
    await pair.source.execute("CREATE PUBLICATION later FOR TABLE u")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    await pair.change("INSERT INTO u VALUES (1)")
    assert await pair.rows("SELECT id FROM u") == [(1,)]
    assert await pair.rows("SELECT id FROM t") == [(1,)]


async def test_no_publisher_is_tried_again_until_it_is_back(pair: Pair, servers: Servers) -> None:
    server = await servers.create("publisher", SETTINGS)
    await server.start()
    pair.source = Database(server, "postgres")
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    modes: tuple[Literal["fast", "immediate"], ...] = ("fast", "immediate")
    for mode in modes:
        assert await server.stop(mode)
        status = await pair.subscriber.wait_for_state("waiting to retry")
        assert status["next_retry"] is not None
        await pair.target.wait_for("SELECT error LIKE '%could not connect to the publisher%' FROM subscriber.worker")
        await server.start()
        await pair.change("INSERT INTO t SELECT coalesce(max(id), 0) + 1 FROM t")
        await pair.target.wait_for(
            "SELECT state = 'streaming' AND error IS NULL FROM subscriber.worker WHERE relid = 0"
        )
    await pair.assert_same("SELECT id FROM t ORDER BY 1")
    assert not pair.subscriber.log.has("unexpected error")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_of_the_target_is_survived(
    servers: Servers, source_db: Database, mode: Literal["fast", "immediate"]
) -> None:
    server = await servers.create("target", SETTINGS)
    await server.start()
    target = Database(server, "postgres")
    async with running_subscriber(target) as subscriber:
        pair = Pair(source_db, target, subscriber)
        await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
        await pair.subscribe("FOR TABLE t")
        await pair.change("INSERT INTO t VALUES (1)")
        assert await server.stop(mode)
        await pair.source.execute("INSERT INTO t VALUES (2)")
        await server.start()
        await pair.caught_up()
        await pair.assert_same("SELECT id FROM t ORDER BY 1")
        assert not subscriber.log.has("unexpected error")
    await server.stop()


async def test_many_copies_that_fail_do_not_hold_up_the_others(pair: Pair) -> None:
    for number in range(4):
        await pair.both(f"CREATE TABLE bad{number} (id int PRIMARY KEY)", f"INSERT INTO bad{number} VALUES (1)")
    await pair.both("CREATE TABLE good1 (id int PRIMARY KEY)", "CREATE TABLE good2 (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO good1 VALUES (1)", "INSERT INTO good2 VALUES (1)")
    await pair.source.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await pair.subscriber.create(pair.source, "p")
    await pair.target.wait_for("SELECT (SELECT count(*) FROM good1) + (SELECT count(*) FROM good2)", 2)
    await pair.source.execute("INSERT INTO good1 VALUES (2)")
    await pair.target.wait_for("SELECT count(*) FROM good1", 2)
