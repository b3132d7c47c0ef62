"""A publisher that fails over to a standby while no archiver or mirror runs: with all stored changes, or without."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from subscriber.changelog.piece_reader import read
from subscriber.changelog.reader import ChangeLog
from subscriber.demo.servers import Servers
from subscriber.errors import ChangeLogDamaged, PublisherReplaced
from subscriber.protocol.messages import Insert
from tests.archive.test_worker import archive_until_now
from tests.mirror.conftest import Mirror
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.scenarios.standbys import promote, standby_of
from tests.scenarios.test_publisher_fails_over import log_snapshots

JUNK = "CREATE TABLE junk AS SELECT generate_series(1, 100000)"
SLOT = "SELECT pg_create_logical_replication_slot('a', 'pgoutput')"


async def primary_and_standby(servers: Servers) -> tuple[Database, Database]:
    server = await servers.create("primary", SETTINGS)
    await server.start()
    primary = Database(server, "postgres")
    await primary.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    standby = await standby_of(server, servers, "standby", hot_standby_feedback="on")
    return primary, Database(standby, "postgres")


def ids(directory: Path) -> list[bytes | None]:
    log = ChangeLog(directory)
    changes = [change.message for piece in log.pieces(log.start(), log.end()) for change in read(directory, piece)]
    return [message.new.split()[1][0] for message in changes if isinstance(message, Insert)]


async def test_a_failover_between_two_archivers(servers: Servers, tmp_path: Path) -> None:
    """The new primary lacks a stored change, and has written past the end of the log."""
    primary, standby = await primary_and_standby(servers)
    await archive_until_now(primary, tmp_path)
    await standby.server.stop()
    await primary.execute("INSERT INTO t VALUES (1)")
    await archive_until_now(primary, tmp_path)
    await primary.server.stop("immediate")
    await standby.server.start()
    await promote(standby.server)
    await standby.execute(SLOT, "INSERT INTO t VALUES (2)", JUNK)
    with pytest.raises(PublisherReplaced, match="has failed over to a server without all changes"):
        await archive_until_now(standby, tmp_path)
    assert ids(tmp_path) == [b"1"]
    (tmp_path / "timeline.json").write_text('{"timeline": 2, "ancestors": ""}')
    with pytest.raises(ChangeLogDamaged, match=r"timeline\.json"):
        await archive_until_now(standby, tmp_path)
    await standby.server.stop()


async def test_a_failover_without_a_loss(servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "subscriber")
    primary, standby = await primary_and_standby(servers)
    await primary.needs(16, "a standby has slots")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log_snapshots, primary)
        await standby.execute(SLOT, SLOT.replace("'a'", "'m'"))
        tasks.cancel_scope.cancel()
    await archive_until_now(primary, tmp_path)
    mirror = Mirror(primary, tmp_path / "mirror.db")
    await mirror.run()
    await primary.execute("INSERT INTO t VALUES (1)")
    await mirror.run()
    position = await archive_until_now(primary, tmp_path)
    await standby.wait_for(f"SELECT pg_last_wal_replay_lsn() >= '{position}'")
    await primary.server.stop()
    await promote(standby.server)
    await standby.execute("INSERT INTO t VALUES (2)")
    mirror.source = standby
    for number in (3, 4):  # the second archiver knows the new timeline
        await standby.execute(f"INSERT INTO t VALUES ({number})")
        await archive_until_now(standby, tmp_path)
        await mirror.run()
    assert mirror.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,), (4,)]
    assert ids(tmp_path) == [b"1", b"2", b"3", b"4"]
    assert sum("the publisher continues on timeline 2" in message for message in caplog.messages) == 1
    await standby.server.stop()
    # The former primary is back, and writes past the end of the log.
    await primary.server.start()
    await primary.execute(JUNK)
    mirror.source = primary
    for run in (partial(archive_until_now, primary, tmp_path), mirror.run):
        with pytest.raises(PublisherReplaced, match="is on an earlier timeline than before"):
            await run()
    await primary.server.stop()


async def test_a_failover_between_two_runs_of_a_mirror(servers: Servers, tmp_path: Path) -> None:
    primary, standby = await primary_and_standby(servers)
    mirror = Mirror(primary, tmp_path / "mirror.db")
    await mirror.run()
    await primary.execute("INSERT INTO t VALUES (1)")
    await mirror.run()
    await standby.server.stop()
    await primary.execute("INSERT INTO t VALUES (2)")
    await mirror.run()
    await primary.server.stop("immediate")
    await standby.server.start()
    await promote(standby.server)
    await standby.execute(SLOT.replace("'a'", "'m'"), "INSERT INTO t VALUES (3)", JUNK)
    mirror.source = standby
    with pytest.raises(PublisherReplaced, match="has failed over to a server without all changes"):
        await mirror.run()
    assert mirror.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
    await standby.server.stop()
