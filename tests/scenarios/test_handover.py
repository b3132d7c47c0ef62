"""Handover between workers: tables to the apply worker, a subscription to another launcher."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from subscriber import failpoints
from subscriber.catalog import worker_sessions
from subscriber.failpoints import Point
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, Program, Subscriber, Subscriptions
from tests.scenarios.conftest import Pair


async def test_changes_confirmed_before_a_table_was_ready_are_not_lost(pair: Pair) -> None:
    """The apply worker passes over changes of a table in finishedcopy, confirms them, and starts again."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    failpoints.armed[Point.COPY_COMMITTED] = pair.subscriber.cancel
    try:
        await pair.subscriber.create(pair.source, "p")
        await pair.target.wait_for("SELECT srsubstate = 'f' FROM subscriber.subscription_rel")
    finally:
        failpoints.armed.clear()
    await pair.subscriber.stop()

    relid = await pair.target.value("SELECT 't'::regclass::oid")
    subid = await pair.target.value("SELECT subid FROM subscriber.subscription")
    holder = await pair.target.connect()
    # A sync worker does not end the holder.
    pair.subscriber.settings = replace(QUICK, earlier_session_grace=60)
    try:
        assert await worker_sessions.register_own(holder, subid, relid)  # no sync worker can start
        pair.subscriber.start()
        await pair.source.execute("INSERT INTO t SELECT generate_series(2, 100)")
        await pair.source.wait_for_catchup("s")
        await pair.subscriber.stop()
    finally:
        await holder.close()
    pair.subscriber.settings = QUICK
    assert await pair.target.value("SELECT remote_lsn = '0/0' FROM subscriber.progress WHERE relid = 0")
    assert await pair.target.rows("SELECT * FROM t") == [(1,)]

    def restart_apply_worker() -> None:
        assert pair.subscriber.launcher is not None
        del failpoints.armed[Point.SYNCWAIT]
        pair.subscriber.launcher.supervisor("s").restart()

    failpoints.armed[Point.SYNCWAIT] = restart_apply_worker  # in its first read, the new worker finds the table
    pair.subscriber.start()
    await pair.caught_up()
    assert not failpoints.armed
    await pair.assert_same("SELECT id FROM t ORDER BY id")


class Patient(Program):
    """A program that stops itself when it first reaches a failpoint after `start`."""

    def stop_at(self, point: Point) -> None:
        self._command[2:3] = ["tests.faults.failpoint_cli", point.name, "stop", "1"]


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(None, marks=pytest.mark.soak),
        pytest.param(Point.COMMIT_READY, marks=pytest.mark.soak),
        Point.COMMIT_SENT,
    ],
)
async def test_a_standby_takes_over_from_a_frozen_launcher(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions, point: Point | None
) -> None:
    """The frozen launcher is in a transaction, or between two. Continued, it commits nothing and waits as standby."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int, writer text DEFAULT 'local')")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    frozen = Patient(target_db.dsn(), processes / "frozen.log")
    standby = Subscriber(target_db, settings=replace(QUICK, takeover_after=2.0))
    try:
        await frozen.start()
        await subscriptions.create(source_db, "p")
        await subscriptions.wait_for_sync(source_db)
        if point is not None:
            frozen.kill()
            frozen.stop_at(point)
            await frozen.start()
        await source_db.execute("INSERT INTO t SELECT generate_series(1, 100)")
        assert frozen.pid is not None
        if point is None:
            await source_db.wait_for_catchup("s")
            os.kill(frozen.pid, signal.SIGSTOP)
        with anyio.fail_after(10):
            while not is_stopped(frozen.pid):
                await anyio.sleep(0.02)
        standby.start()
        await source_db.execute("INSERT INTO t SELECT generate_series(101, 200)")
        await target_db.wait_for("SELECT count(*) FROM t", 200, timeout=60)
        os.kill(frozen.pid, signal.SIGCONT)
        await frozen.wait_for("waiting as standby")
        await source_db.execute("INSERT INTO t SELECT generate_series(201, 300)")
        await source_db.wait_for_catchup("s")
        assert await target_db.rows("SELECT count(*), count(DISTINCT id) FROM t") == [(300, 300)]
        assert standby.launcher is not None
        assert await target_db.value("SELECT pid FROM subscriber.launcher") == standby.launcher.pid
    finally:
        frozen.kill()
        await standby.stop()


async def test_a_commit_during_a_takeover_reports_the_takeover(pair: Pair) -> None:
    """Another launcher claims the record while the worker waits to move it. PostgreSQL only reports a changed tuple."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    subid = await pair.target.value("SELECT subid FROM subscriber.subscription")
    other = await pair.target.connect()
    async with other.transaction():
        await other.execute(f"SELECT subscriber.claim_progress({subid}, 0)")
        await pair.source.execute("INSERT INTO t VALUES (1)")
        await pair.target.wait_for("SELECT count(*) FROM pg_locks WHERE NOT granted", 1)
    await pair.fails("ERROR:  another session has moved the progress of this subscription")
    assert not pair.subscriber.log.has("concurrently updated")
    await pair.caught_up()
    await pair.assert_same("SELECT id FROM t")
