"""A target that is older than the confirmed position: restored from a backup, or failed over with data loss."""

from __future__ import annotations

import shutil
import subprocess

from subscriber.demo.servers import Servers
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.plugins.fix_subscriber import Subscriber, running_subscriber
from tests.scenarios.conftest import Pair

IDLE = "SELECT pg_logical_emit_message(false, 'test', 'nothing that is published')"


async def confirmed(source: Database) -> None:
    """Wait until all of the publisher's WAL is confirmed, including the part without published changes."""
    await source.wait_for(
        f"SELECT confirmed_flush_lsn >= '{await source.value('SELECT pg_current_wal_lsn()::text')}'"
        " FROM pg_replication_slots WHERE slot_name = 's'"
    )


async def stops(subscriber: Subscriber) -> None:
    status = await subscriber.wait_for_state("stopped")
    assert status["error"] == 'the target is behind replication slot "s"'
    assert "fresh copy" in status["error_hint"]
    assert subscriber.log.has("DETAIL:  The slot was confirmed up to [0-9A-F/]+, but the target knows of nothing after")


async def test_a_target_restored_from_a_backup_is_noticed(servers: Servers, source_db: Database) -> None:
    server = await servers.create("target", SETTINGS)
    await server.start()
    target = Database(server, "postgres")
    backup = server.directory / "backup"
    async with running_subscriber(target) as subscriber:
        pair = Pair(source_db, target, subscriber)
        await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
        await pair.subscribe("FOR TABLE t")
        await pair.change("INSERT INTO t VALUES (1)")
        await source_db.execute(IDLE)
        await confirmed(source_db)
        await subscriber.stop()
        await server.stop()
        subprocess.run(["cp", "-a", server.data, backup], check=True)
        # Nothing is missing, although the stream has moved since the last transaction: no false alarm.
        await server.start()
        subscriber.start()
        await subscriber.wait_for_state("streaming")
        await pair.change("INSERT INTO t VALUES (2)")
        await subscriber.stop()
        await server.stop()
        shutil.rmtree(server.data)
        backup.rename(server.data)
        await server.start()
        await pair.source.execute("INSERT INTO t VALUES (3)")
        subscriber.start()
        await stops(subscriber)
        assert await pair.rows("SELECT id FROM t") == [(1,)]
        # The user confirms that the subscription may resume without them.
        await subscriber.execute("ALTER SUBSCRIPTION s SET (slot_name = 's')")
        await pair.caught_up()
        assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (3,)]
    await server.stop()
