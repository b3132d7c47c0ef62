"""Transactions committed after ALTER SUBSCRIPTION use the new settings, however early they arrive."""

from __future__ import annotations

import anyio
import pytest

from subscriber.worker.supervision.launcher import Launcher
from tests.scenarios.conftest import Pair

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
WAITING = "SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'u'::regclass"
READY = "SELECT count(*) FROM subscriber.subscription_rel WHERE srsubstate = 'r'"
DELETED = "SELECT count(*) FROM t"
FORMAT = "SELECT state || ' ' || format FROM subscriber.worker WHERE relid = 0"


@pytest.fixture
def unaware(monkeypatch: pytest.MonkeyPatch) -> anyio.Event:
    """Hide all statements from the launcher until the event is set."""
    event = anyio.Event()
    reconcile = Launcher._reconcile

    async def later(self: Launcher, *args: object) -> None:
        if self._supervisors:
            await event.wait()
        await reconcile(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "_reconcile", later)
    return event


@pytest.mark.parametrize("streaming", ["off", "parallel"])
async def test_nothing_is_applied_after_disable(pair: Pair, unaware: anyio.Event, streaming: str) -> None:
    """The rows are deleted on the publisher because they are to be kept on the subscriber."""
    if streaming != "off":
        await pair.source.stream_everything()
    await pair.both(TABLE)
    await pair.source.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    await pair.subscribe("FOR TABLE t", streaming=streaming)
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.change("UPDATE t SET v = 'c' WHERE id = 1")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.execute("DELETE FROM t")
    await anyio.sleep(1)
    assert await pair.target.value(DELETED) == 2
    unaware.set()
    await pair.subscriber.log.wait_for("will stop because the subscription was disabled")
    assert await pair.target.value(DELETED) == 2
    assert not pair.subscriber.log.has("ERROR")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await pair.source.wait_for_catchup("s")
    assert await pair.target.value(DELETED) == 0


async def test_nothing_is_prepared_after_disable(pair: Pair, unaware: anyio.Event) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t", two_phase=True)
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.source.execute("BEGIN; INSERT INTO t VALUES (1, 'a'); PREPARE TRANSACTION 'p'")
    await pair.target.wait_for("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()", 1)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.execute("COMMIT PREPARED 'p'")
    await anyio.sleep(1)
    assert await pair.target.value(DELETED) == 0
    unaware.set()
    await pair.subscriber.log.wait_for("will stop because the subscription was disabled")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await pair.source.wait_for_catchup("s")
    assert await pair.target.value(DELETED) == 1
    assert not pair.subscriber.log.has("ERROR")


async def test_a_worker_reads_new_settings_without_the_launcher(pair: Pair, unaware: anyio.Event) -> None:
    """Here a worker that restarts on its own applies the transaction after the statement."""
    await pair.both(TABLE)
    await pair.source.execute("CREATE TABLE u (id int PRIMARY KEY)", "CREATE PUBLICATION other FOR TABLE u")
    await pair.target.execute("CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET PUBLICATION other WITH (refresh = false)")
    await pair.source.execute("INSERT INTO t VALUES (1, 'a')")
    await pair.source.wait_for_catchup("s")
    assert await pair.target.value(DELETED) == 0
    assert not pair.subscriber.log.has("ERROR")
    unaware.set()


async def test_a_worker_that_reads_new_settings_forgets_the_reason_for_text(pair: Pair, unaware: anyio.Event) -> None:
    """The launcher is notified after the restart, and has no change to report then."""
    await pair.both("CREATE TABLE t (n int)")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("ALTER TABLE t ALTER n TYPE bigint", "INSERT INTO t VALUES (1)")
    await pair.target.wait_for(FORMAT, "streaming text")
    await pair.target.execute("ALTER TABLE t ALTER n TYPE bigint")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (synchronous_commit = local)")
    await pair.change("INSERT INTO t VALUES (2)")
    await pair.target.wait_for(FORMAT, "streaming binary")
    unaware.set()
    await pair.change("INSERT INTO t VALUES (3)")
    await pair.assert_same("SELECT n FROM t ORDER BY n")
    assert not pair.subscriber.log.has("ERROR")


async def test_a_worker_that_reads_new_settings_restarts_a_copy(pair: Pair, unaware: anyio.Event) -> None:
    """The copy of u, which has the old settings, waits for a lock meanwhile."""
    await pair.both(TABLE, "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO u VALUES (1)", "CREATE PUBLICATION p FOR ALL TABLES")
    async with pair.target.connection() as stranger, stranger.transaction():
        await stranger.execute("LOCK TABLE u")
        await pair.subscriber.create(pair.source, "p", "s")
        await pair.target.wait_for(f"SELECT count(*) FROM ({WAITING}) w", 1)
        waiting = await pair.target.value(WAITING)
        await pair.target.wait_for(READY, 1)
        await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (synchronous_commit = local)")
        await pair.source.execute("INSERT INTO t VALUES (1, 'a')")
        await pair.target.wait_for("SELECT count(*) FROM t", 1)
        await pair.target.wait_for(f"SELECT count(*) FROM ({WAITING}) w WHERE pid <> {waiting}", 1)
    unaware.set()
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.assert_same("SELECT id FROM u")
    assert pair.subscriber.log.text().count("because of a parameter change") == 1
    assert not pair.subscriber.log.has("ERROR")
