"""A publisher that fails over to a standby: with all applied transactions, or without."""

from __future__ import annotations

import anyio
import pytest

from subscriber.cli.commands.status import status as show_status
from subscriber.demo.servers import Servers
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.scenarios.conftest import Pair
from tests.scenarios.standbys import promote, standby_of

REPLACED = "the publisher has failed over to a server without all changes that were applied"


async def failing_over(servers: Servers, pair: Pair) -> tuple[Database, Database]:
    """Create a primary that the subscription follows, and its standby."""
    primary = await servers.create("primary", SETTINGS)
    await primary.start()
    pair.source = Database(primary, "postgres")
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.wait_for_ready(pair.source)
    standby = await standby_of(primary, servers, "standby")
    return pair.source, Database(standby, "postgres")


@pytest.mark.parametrize("by", ["address", "statement"])
async def test_applied_changes_that_the_new_primary_lacks_are_noticed(servers: Servers, pair: Pair, by: str) -> None:
    """The new primary has written past our position, with the same system identifier, and has a slot of the name."""
    primary, standby = await failing_over(servers, pair)
    await standby.server.stop()
    await pair.change("INSERT INTO t VALUES (1)")
    await pair.subscriber.stop()
    await primary.server.stop("immediate")
    if by == "address":
        standby.server.port = primary.server.port
    await standby.server.start()
    await promote(standby.server)
    await standby.execute(
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        "INSERT INTO t VALUES (2)",
        "CREATE TABLE junk AS SELECT generate_series(1, 100000)",
    )
    if by == "statement":
        await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{standby.dsn()}'")
    pair.subscriber.start()
    status = await pair.subscriber.wait_for_state("stopped")
    assert status["error"] == REPLACED
    assert pair.subscriber.log.has(
        "DETAIL:  Changes up to [0-9A-F/]+ of timeline 1 were applied. The publisher, on timeline 2, has none of them"
    )
    assert await show_status(pair.target.dsn()) == 1
    assert await pair.rows("SELECT id FROM t") == [(1,)]
    await standby.server.stop()


async def test_a_standby_with_everything_takes_over(servers: Servers, pair: Pair) -> None:
    primary, standby = await failing_over(servers, pair)
    await pair.change("INSERT INTO t VALUES (1)")
    position = await primary.value("SELECT pg_current_wal_lsn()::text")
    await standby.wait_for(f"SELECT pg_last_wal_replay_lsn() >= '{position}'")
    await primary.server.stop()
    await promote(standby.server)
    await standby.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')", "INSERT INTO t VALUES (2)")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{standby.dsn()}'")
    pair.source = standby
    await pair.fails("LOG:  the publisher continues on timeline 2; timeline 1 ended at [0-9A-F/]+")
    await pair.change("INSERT INTO t VALUES (3)")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,), (3,)]
    assert await pair.rows("SELECT subtimeline FROM subscriber.subscription") == [(2,)]
    await pair.subscriber.stop()
    # The former primary is back, and the connection leads there again.
    await standby.server.stop()
    await primary.server.start()
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{primary.dsn()}'")
    pair.subscriber.start()
    status = await pair.subscriber.wait_for_state("stopped")
    assert status["error"] in (
        "the publisher is on an earlier timeline than before",
        "the publisher is behind the subscription",
    )
    await primary.server.stop()


async def test_another_standby_with_the_same_timeline_is_noticed(servers: Servers, pair: Pair) -> None:
    """Two standbys that do not know of each other are promoted one after the other. Both choose timeline 2."""
    primary, first = await failing_over(servers, pair)
    second = Database(await standby_of(primary.server, servers, "second"), "postgres")
    await second.server.stop()
    await pair.change("INSERT INTO t VALUES (1)")
    await pair.subscriber.stop()
    await primary.server.stop()
    await promote(first.server)
    await first.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{first.dsn()}'")
    pair.source = first
    pair.subscriber.start()
    await pair.change("INSERT INTO t VALUES (2)")
    await first.server.stop("immediate")
    await second.server.start()
    await promote(second.server)
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{second.dsn()}'")
    status = await pair.subscriber.wait_for_state("stopped")
    assert status["error"] == REPLACED
    assert pair.subscriber.log.has("DETAIL:  Changes up to [0-9A-F/]+ of timeline 2 .* on timeline 2, has none of them")
    await second.server.stop()


async def test_a_standby_that_is_promoted_while_it_streams(servers: Servers, pair: Pair) -> None:
    """The walsender continues on the new timeline, so the target has changes of both when it connects again."""
    primary = await servers.create("primary", SETTINGS)
    await primary.start()
    pair.source = Database(primary, "postgres")
    await pair.source.needs(16, "a standby has slots")
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    standby = Database(await standby_of(primary, servers, "standby", hot_standby_feedback="on"), "postgres")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log_snapshots, pair.source)
        await pair.subscriber.create(standby, "p", "s")
        await pair.target.wait_for("SELECT count(*) FROM subscriber.subscription_rel WHERE srsubstate IN ('s', 'r')", 1)
        tasks.cancel_scope.cancel()
    await primary.stop()
    await promote(standby.server)
    pair.source = standby
    await pair.change("INSERT INTO t VALUES (1)")
    await pair.subscriber.restart()
    await pair.change("INSERT INTO t VALUES (2)")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
    assert await pair.rows("SELECT subtimeline, subtimelinehistory LIKE '1:%' FROM subscriber.subscription") == [
        (2, True)
    ]
    await standby.server.stop()


async def log_snapshots(primary: Database) -> None:
    """Let a standby create slots, which need such records of the primary."""
    while True:
        await primary.execute("SELECT pg_log_standby_snapshot()")
        await anyio.sleep(0.05)
