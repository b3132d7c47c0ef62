"""Outages that stop a subscription: its state, the messages, and the recovery.

See test_failures.py for server restarts, lost slots, another publisher and changes that do not match,
test_target_goes_back.py for a target with an older state, and tests/faults for networks.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.demo.servers import Server, Servers
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.model import SubscriptionStatus
from tests.passwords import MARK
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import Subscriptions, running_subscriber
from tests.scenarios.conftest import Pair

TABLE = "CREATE TABLE t (id int PRIMARY KEY)"


@pytest.fixture
async def publisher_of_its_own(servers: Servers, pair: Pair) -> Server:
    """Create a publisher that the test may damage, as the source of `pair`."""
    server = await servers.create("publisher", SETTINGS)
    await server.start()
    pair.source = Database(server, "postgres")
    return server


@pytest.fixture
async def target_of_its_own(servers: Servers, source_db: Database) -> AsyncIterator[Pair]:
    """Create a pair with a separate target that the test may damage."""
    server = await servers.create("target", SETTINGS)
    await server.start()
    target = Database(server, "postgres")
    async with running_subscriber(target) as subscriber:
        yield Pair(source_db, target, subscriber)


async def waits(pair: Pair, error: str, hint: str) -> dict[str, Any]:
    """Wait until the worker reports that error. Returns the report."""
    with anyio.fail_after(20):
        while True:
            status = await pair.subscriber.worker()
            match = re.search(error, status.get("error") or "")
            if match:
                break
            await anyio.sleep(0.02)
    assert re.search(hint, status["error_hint"] or ""), status["error_hint"]
    await pair.fails(f"ERROR:  .*{error}")
    return status


async def status_of(target: Database) -> SubscriptionStatus:
    """Return the subscription's status as `subscriber status` has it."""
    async with CatalogConnection.open(target.dsn(), "test") as catalog:
        (status,) = await assess_all(await read_catalog(catalog))
    return status


# --- the publisher --------------------------------------------------------------------------------


async def test_a_password_that_is_changed(pair: Pair, publisher_of_its_own: Server) -> None:
    hba = publisher_of_its_own.data / "pg_hba.conf"
    hba.write_text(f"host all repl 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
    await publisher_of_its_own.reload()
    await pair.both(TABLE)
    await pair.source.execute(
        f"CREATE ROLE repl LOGIN REPLICATION PASSWORD '{MARK}-first'", "GRANT SELECT ON t TO repl"
    )
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    dsn = pair.source.dsn(password="PASSWORD").replace("postgres@", "repl@")
    await pair.subscriber.create(dsn.replace("PASSWORD", f"{MARK}-first"), "p")
    await pair.caught_up()
    await pair.source.execute(
        f"ALTER ROLE repl PASSWORD '{MARK}-second'", "SELECT pg_terminate_backend(pid) FROM pg_stat_replication"
    )
    await waits(pair, 'password authentication failed for user "repl"', 'ALTER SUBSCRIPTION "s" CONNECTION')
    assert "first" not in pair.subscriber.log.text()
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{dsn.replace('PASSWORD', f'{MARK}-second')}'")
    await pair.caught_up()
    await pair.source.execute("ALTER ROLE repl NOREPLICATION")
    await pair.source.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
    await waits(pair, "permission denied to start WAL sender", "WITH REPLICATION")
    await pair.source.execute("ALTER ROLE repl REPLICATION", "INSERT INTO t VALUES (2)")
    await pair.caught_up()
    await pair.assert_same("SELECT id FROM t ORDER BY id")


async def test_disable_on_error_does_not_disable_when_the_publisher_refuses(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t", disable_on_error=True)
    missing = pair.source.dsn().replace(pair.source.name, "no_such_database")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{missing}'")
    await waits(pair, 'database "no_such_database" does not exist', 'ALTER SUBSCRIPTION "s" CONNECTION')
    assert await pair.target.value("SELECT subenabled FROM subscriber.subscription")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{pair.source.dsn()}'")
    await pair.change("INSERT INTO t VALUES (1)")


async def test_somebody_else_reads_from_the_slot(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    other = await Publisher.connect(pair.source.dsn(), application_name="other")
    stream = await ReplicationStream.start(other, "s", Lsn(0), StreamOptions(("p",)))
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await waits(pair, 'replication slot "s" is active for PID', "a slot of its own")
    await stream.stop()
    await pair.change("INSERT INTO t VALUES (1)")
    assert await pair.rows("SELECT id FROM t") == [(1,)]


async def overtake(source: Database) -> None:
    """Write so much that the slot loses its WAL."""
    for _ in range(3):
        await source.execute("SELECT pg_logical_emit_message(false, 'test', 'x')", "SELECT pg_switch_wal()")
    await source.execute("CHECKPOINT")


async def test_a_slot_that_has_fallen_too_far_behind(pair: Pair, publisher_of_its_own: Server) -> None:
    await publisher_of_its_own.restart(max_slot_wal_keep_size="1MB", max_wal_size="32MB", min_wal_size="32MB")
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await overtake(pair.source)
    await pair.source.wait_for("SELECT wal_status FROM pg_replication_slots WHERE slot_name = 's'", "lost")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    status = await pair.subscriber.wait_for_state("stopped")
    assert re.search('can(not| no longer) .* replication slot "s"', status["error"])
    assert "fresh copy" in status["error_hint"]
    assert pair.subscriber.log.has("DETAIL:  This (replication )?slot has been invalidated")
    assert (await status_of(pair.target)).is_wrong


async def test_wal_that_the_slot_needs_is_gone(pair: Pair, publisher_of_its_own: Server) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    needed = await pair.source.value("SELECT pg_walfile_name(restart_lsn) FROM pg_replication_slots")
    await overtake(pair.source)
    await publisher_of_its_own.stop()
    for segment in (publisher_of_its_own.data / "pg_wal").glob("0*"):  # as after a restore that forgot them
        if segment.name <= needed:
            segment.unlink()
    await publisher_of_its_own.start()
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    status = await pair.subscriber.wait_for_state("stopped")
    assert "has already been removed" in status["error"]
    assert "fresh copy" in status["error_hint"]


async def test_a_table_dropped_on_the_publisher_is_a_silence(pair: Pair) -> None:
    await pair.both(TABLE, "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR ALL TABLES")
    await pair.change("INSERT INTO t VALUES (1)")
    await pair.change("DROP TABLE t", "INSERT INTO u VALUES (1)")
    assert await pair.rows("SELECT * FROM t, u") == [(1, 1)]
    assert (await pair.subscriber.worker())["error"] is None


async def test_a_target_in_the_publishers_cluster_is_told_apart(source_db: Database, publisher: Server) -> None:
    subscriptions = Subscriptions(source_db)
    await source_db.execute("CREATE PUBLICATION p")
    with pytest.raises(StatementError, match="the publisher is in the same cluster as the target") as caught:
        await subscriptions.create(source_db, "p")
    assert "create_slot = false" in (caught.value.hint or "")
    await source_db.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    await subscriptions.create(source_db, "p", create_slot=False, enabled=False)
    await subscriptions.execute("DROP SUBSCRIPTION s")


# --- the target -----------------------------------------------------------------------------------


async def test_a_table_dropped_on_the_target(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("DROP TABLE t")
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await waits(pair, 'logical replication target relation "public.t" does not exist', "Create the table")
    await pair.target.execute(TABLE)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    await pair.assert_same("SELECT id FROM t")


async def test_a_target_whose_disk_is_full(target_of_its_own: Pair) -> None:
    """The table's file is /dev/full, where writes fail because the kernel reports no space."""
    pair = target_of_its_own
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t", disable_on_error=True)
    server = pair.target.server
    file = server.data / await pair.target.value("SELECT pg_relation_filepath('t')")
    await server.stop()
    full(file)
    await server.start()
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await waits(pair, "No space left on device", "free disk space|Make room")
    await pair.target.wait_for("SELECT next_retry IS NOT NULL FROM subscriber.worker WHERE relid = 0")
    await server.stop()
    file.unlink()
    file.touch()
    os.chown(file, server.account.uid, server.account.gid)
    await server.start()
    await pair.caught_up()
    await pair.assert_same("SELECT id FROM t")


def full(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/full")
