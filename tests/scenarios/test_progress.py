"""Confirmation and shutdown: no server waits longer for us than necessary."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from time import monotonic

import anyio
import pytest

from subscriber.demo.servers import Server, Servers
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import QUICK, Program, Subscriber, Subscriptions, running_subscriber
from tests.processes import popened
from tests.scenarios.conftest import Pair

COMMITS = 30
NO_END = ("--setting", "stream_stop_timeout=1h")  # a wait for it has no end


@pytest.fixture
async def own_publisher(servers: Servers) -> Server:
    server = await servers.create("publisher", {**SETTINGS, "wal_sender_timeout": "0"})
    await server.start()
    return server


@pytest.mark.parametrize("synchronous_commit", ["off", pytest.param("on", marks=pytest.mark.soak), "remote_apply"])
async def test_the_publisher_waits_for_us_and_only_as_long_as_needed(
    own_publisher: Server, target_db: Database, subscriber: Subscriber, synchronous_commit: str
) -> None:
    pair = Pair(Database(own_publisher, "postgres"), target_db, subscriber)
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t", synchronous_commit=synchronous_commit)
    await own_publisher.stop()
    await own_publisher.start(synchronous_standby_names="s")
    await pair.caught_up()
    writer = await pair.source.connect(synchronous_commit="remote_apply" if synchronous_commit != "off" else "on")
    waiting_commits, local_commits = [], []
    for number in range(COMMITS):
        began = monotonic()
        await writer.execute(f"INSERT INTO t VALUES ({number})")
        waiting_commits.append(monotonic() - began)
        assert await pair.rows("SELECT max(id) FROM t") == [(number,)]  # it is there when COMMIT returns
        began = monotonic()
        await writer.execute("SELECT txid_current()")
        local_commits.append(monotonic() - began)
    # A wait for a timer would be one second or ten, each time.
    assert min(waiting_commits) < 500 * min(local_commits), (waiting_commits, local_commits)

    await subscriber.stop()
    waiting = asyncio.create_task(writer.execute("INSERT INTO t VALUES (1000)"))
    watch = await pair.source.connect()
    with anyio.fail_after(10):
        while not await watch.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"):
            await anyio.sleep(0.02)
    assert not waiting.done()
    subscriber.start()
    await asyncio.wait_for(waiting, 10)
    assert await pair.rows("SELECT max(id) FROM t") == [(1000,)]
    await writer.execute("SET synchronous_commit = local")
    writer.terminate()
    watch.terminate()
    await own_publisher.stop("immediate")


async def test_a_publisher_that_shuts_down_is_let_go_at_once(own_publisher: Server, target_db: Database) -> None:
    """It waits until everything is confirmed to the very position it has sent."""
    settings = replace(QUICK, status_interval=3600)  # a wait for a timer has no end
    async with running_subscriber(target_db, settings=settings) as subscriber:
        pair = Pair(Database(own_publisher, "postgres"), target_db, subscriber)
        await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
        await pair.subscribe("FOR TABLE t")
        for number in range(4):
            await pair.source.execute(
                f"INSERT INTO t SELECT {number} * 10000 + g, 'x' FROM generate_series(1, 3000) g",
                "CREATE TABLE other AS SELECT generate_series(1, 1000)",
                "DROP TABLE other",
            )
            assert await own_publisher.stop()
            assert await pair.rows("SELECT count(*) FROM t") == [(3000 * (number + 1),)]
            await own_publisher.start()
            await pair.caught_up()
        await own_publisher.stop()


async def test_keepalives_are_answered_while_the_target_is_stuck(pair: Pair) -> None:
    """A transaction waits for a lock longer than wal_sender_timeout; the connection stays."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    source = pair.source.dsn(options="-c wal_sender_timeout=500ms")
    await pair.subscriber.create(source, "p")
    await pair.caught_up()
    pid = await pair.source.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = 's'")
    blocker = await pair.target.connect()
    async with blocker.transaction():
        await blocker.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        await pair.source.execute("INSERT INTO t VALUES (1)")
        await pair.target.wait_for("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass", 1)
        before = await pair.source.value("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 's'")
        await anyio.sleep(1.5)
        assert await pair.source.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = 's'") == pid
        held = await pair.source.value("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 's'")
        written = await pair.source.value("SELECT pg_current_wal_lsn()")
        assert before <= held < written
    await pair.caught_up()
    assert await pair.rows("SELECT id FROM t") == [(1,)]


async def test_statements_are_noticed_within_a_second(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    active = "SELECT active FROM pg_replication_slots WHERE slot_name = 's'"
    for option in ("binary = true", "streaming = off", "synchronous_commit = on", "origin = none"):
        pid = await pair.source.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = 's'")
        pair.subscriber.log.clear()
        await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SET ({option})")
        await pair.subscriber.log.wait_for(
            'LOG:  logical replication worker for subscription "s" will restart because of a parameter change',
            timeout=1,
        )
        await pair.source.wait_for(
            f"SELECT active AND active_pid <> {pid} FROM pg_replication_slots WHERE slot_name = 's'", timeout=2
        )
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for(active, False, timeout=1)
    await pair.fails('subscription "s" will stop because the subscription was disabled')
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await pair.source.wait_for(active, True, timeout=1)
    await pair.caught_up()
    assert await pair.rows("SELECT id FROM t") == [(1,)]
    await pair.subscriber.execute("ALTER SUBSCRIPTION s RENAME TO renamed")
    await pair.source.wait_for(
        "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'renamed'", 1, timeout=2
    )
    await pair.subscriber.execute("DROP SUBSCRIPTION renamed")
    assert await pair.source.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 's'") == 0
    await pair.subscriber.create(pair.source, "p", "again", copy_data=False)
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 'again'", timeout=2)


async def test_two_subscriptions_of_one_database(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute("CREATE PUBLICATION p1 FOR TABLE t", "CREATE PUBLICATION p2 FOR TABLE u")
    await pair.subscriber.create(pair.source, "p1", "s1")
    await pair.subscriber.create(pair.source, "p2", "s2")
    for name in ("s1", "s2"):
        await pair.subscriber.wait_for_sync(pair.source, name)
    await pair.target.execute("INSERT INTO t VALUES (1)")  # the first gets stuck, which is nothing to the second
    await pair.source.execute("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)")
    await pair.fails("ERROR:  ")
    await pair.source.wait_for_catchup("s2")
    assert await pair.rows("SELECT id FROM u") == [(1,)]


async def test_a_second_launcher_waits_and_takes_over(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    async with running_subscriber(pair.target) as standby:
        await standby.log.wait_for("another launcher works on this database; waiting as standby")
        await pair.change("INSERT INTO t VALUES (1)")
        await pair.subscriber.stop()
        await pair.change("INSERT INTO t VALUES (2)")
        assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
        # The active launcher loses its connection and its lock. Either may be next, but only one is active.
        await pair.target.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'subscriber launcher'"
            " AND datname = current_database()"
        )
        await standby.log.wait_for("WARNING:  the launcher has lost its connection to the target")
        await pair.change("INSERT INTO t VALUES (3)")
        assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,), (3,)]


async def test_the_program_ends_on_sigterm_whatever_it_is_doing(
    source_db: Database, target_db: Database, program: Program, subscriptions: Subscriptions
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t", "CREATE PUBLICATION q FOR TABLE u")
    program._command += NO_END
    await program.start()
    await subscriptions.create(source_db, "p")
    await subscriptions.wait_for_sync(source_db)
    assert await program.stop() == 0  # idle

    await source_db.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 30000) g")
    await program.start("apply worker .* has started")
    assert await program.stop() == 0  # applying

    await program.start("apply worker .* has started")
    await subscriptions.wait_for_sync(source_db)
    assert await target_db.value("SELECT count(*) FROM t") == 30000
    blocker = await target_db.connect()
    async with blocker.transaction():
        await blocker.execute("LOCK TABLE t, u IN ACCESS EXCLUSIVE MODE")
        await source_db.execute("DELETE FROM t WHERE id = 1")
        await subscriptions.execute("ALTER SUBSCRIPTION s ADD PUBLICATION q")
        await target_db.wait_for("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'u'::regclass")
        assert await program.stop() == 0  # waiting for locks
    assert "Traceback" not in program.text
    assert "ERROR" not in program.text


async def test_the_program_ends_on_sigterm_without_a_publisher(
    own_publisher: Server, target_db: Database, program: Program, subscriptions: Subscriptions
) -> None:
    source = Database(own_publisher, "postgres")
    for database in (source, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await source.execute("CREATE PUBLICATION p FOR TABLE t")
    await subscriptions.create(source, "p")
    program._command += NO_END
    await program.start()
    await subscriptions.wait_for_sync(source)
    await own_publisher.stop()
    await program.wait_for("could not connect to the publisher")
    assert await program.stop() == 0
    assert os.environ.get("PGPASSWORD", "none of it") not in program.text


# Replaces a name lookup with an unreachable name server.
STUCK = """
import time
import anyio.to_thread
from subscriber.cli import main
from subscriber.worker.supervision.launcher import Launcher

def stay():
    print("stuck", flush=True)
    time.sleep(60)

async def run(self, on_ready):
    await anyio.sleep(0.1)
    await anyio.to_thread.run_sync(stay, abandon_on_cancel=True)

Launcher.run = run
main.main()
"""


def test_the_program_ends_on_sigterm_although_a_thread_is_stuck() -> None:
    command = [sys.executable, "-c", STUCK, "run", "--target", "postgresql://nowhere.invalid/x", "--log-format", "json"]
    with popened(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        process.terminate()
        _, said = process.communicate(timeout=5)
    assert process.returncode == 0
    assert "received shutdown request" in said
