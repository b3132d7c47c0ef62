"""More than one source and one target: in both directions, in a chain, within one server, and with large values."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.conftest import Pair


@pytest.fixture
async def third_db(publisher: Server) -> AsyncIterator[Database]:
    """Create another database on the publisher's server."""
    async with fresh_database(publisher) as database:
        yield database


async def test_changes_in_both_directions_do_not_loop(pair: Pair) -> None:
    """With origin = none, replicated changes are not sent on."""
    await pair.source.needs(16, "a publisher knows origins")
    await pair.target.needs(16, "a publisher knows origins")
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE t")
    async with running_subscriber(pair.source) as back:
        await pair.subscriber.create(pair.source, "p", "there", origin="none", copy_data=False)
        await back.create(pair.target, "p", "back", origin="none", copy_data=False)
        await pair.source.execute("INSERT INTO t VALUES (1, 'source')")
        await pair.source.wait_for_catchup("there")
        await pair.target.execute("INSERT INTO t VALUES (2, 'target')", "UPDATE t SET v = v || '!'")
        await pair.target.wait_for_catchup("back")
        await pair.source.execute("DELETE FROM t WHERE id = 2")
        await pair.source.wait_for_catchup("there")
        await pair.target.wait_for_catchup("back")
        await pair.assert_same("SELECT * FROM t")
        assert await pair.rows("SELECT * FROM t") == [(1, "source!")]
        for subscriber in (pair.subscriber, back):
            assert not subscriber.log.has("ERROR|conflict")


async def test_changes_arrive_in_a_chain_of_servers(pair: Pair, third_db: Database) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await third_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.target.execute("CREATE PUBLICATION q FOR TABLE t")
    await pair.source.execute("INSERT INTO t VALUES (1, 'copied')")
    await pair.subscribe("FOR TABLE t")
    async with running_subscriber(third_db) as last:
        await last.create(pair.target, "q", "s2")
        await last.wait_for_sync(pair.target, "s2")
        await pair.change("INSERT INTO t VALUES (2, 'followed')", "UPDATE t SET v = v || '!'")
        # The worker commits with synchronous_commit = off, so the WAL of the target may end before these changes.
        await pair.target.flush_wal()
        await pair.target.wait_for_catchup("s2")
        assert await third_db.rows("SELECT id, v FROM t ORDER BY id") == [(1, "copied!"), (2, "followed!")]
        origins = await third_db.rows("SELECT count(*) FROM subscriber.progress WHERE remote_lsn > '0/0'")
        assert origins == [(1,)]


async def test_databases_of_one_server_replicate_to_each_other(source_db: Database, third_db: Database) -> None:
    """The slot must exist already: creating one waits for the very transaction of CREATE SUBSCRIPTION."""
    async with running_subscriber(third_db) as subscriber:
        pair = Pair(source_db, third_db, subscriber)
        await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
        await pair.source.execute(
            "INSERT INTO t VALUES (1)",
            "CREATE PUBLICATION p FOR TABLE t",
            "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        )
        await subscriber.create(source_db, "p", create_slot=False)
        await pair.caught_up()
        await pair.change("INSERT INTO t VALUES (2)")
        assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]


async def test_two_subscriptions_of_one_table(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute(
        "CREATE PUBLICATION evens FOR TABLE t WHERE (id % 2 = 0)",
        "CREATE PUBLICATION odds FOR TABLE t WHERE (id % 2 = 1)",
    )
    await pair.source.execute("INSERT INTO t VALUES (1), (2)")
    for name in ("evens", "odds"):
        await pair.subscriber.create(pair.source, name, name)
        await pair.subscriber.wait_for_sync(pair.source, name)
    await pair.source.execute("INSERT INTO t SELECT generate_series(3, 100)")
    for name in ("evens", "odds"):
        await pair.source.wait_for_catchup(name)
    await pair.assert_same("SELECT id FROM t ORDER BY 1")


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_values_larger_than_every_buffer(pair: Pair, binary: bool) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v bytea)", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    large = "decode(repeat(md5('{}'), 400000), 'hex')"  # 6.4 MB, twice that as text
    await pair.source.execute(f"INSERT INTO t VALUES (1, {large.format('copied')})")
    await pair.subscribe("FOR TABLE t", binary=binary)
    await pair.change(
        f"INSERT INTO t VALUES (2, {large.format('a')} || {large.format('b')}), (3, {large.format('c')})",
        "INSERT INTO t SELECT g, 'small' FROM generate_series(4, 100) g",
        f"UPDATE t SET v = {large.format('d')} WHERE id = 1",
    )
    await pair.assert_same("SELECT id, md5(v) FROM t ORDER BY id")


async def test_a_transaction_of_many_rows(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 40000) g")
    await pair.source.execute("BEGIN; UPDATE t SET v = 'y' WHERE id % 2 = 0; DELETE FROM t WHERE id % 3 = 0; COMMIT")
    await pair.source.wait_for_catchup("s", timeout=60)
    await pair.assert_same("SELECT count(*), sum(id), count(DISTINCT v) FROM t")
