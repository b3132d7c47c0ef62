"""A worker fails, without a kill, at points where it leaves something behind, or fails repeatedly."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from subscriber.demo.processes import Process
from subscriber.errors import ConnectionLost
from subscriber.failpoints import Point, armed
from tests.faults.environment import Scene
from tests.plugins.fix_subscriber import QUICK, Subscriber


def fail_once(monkeypatch: pytest.MonkeyPatch, point: Point) -> None:
    """Make the next worker that reaches `point` lose its connection."""

    def lose() -> None:
        del armed[point]
        raise ConnectionLost("lost for a test")

    monkeypatch.setitem(armed, point, lose)


@pytest.mark.parametrize("point", list(Point)[: list(Point).index(Point.READY_STORED) + 1])
async def test_sync_worker_loses_its_connection(
    faults: Scene, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch, point: Point
) -> None:
    """It restarts, or the apply worker cleans up after it, without a restart of the program."""
    fail_once(monkeypatch, point)
    await faults.append(100)
    await faults.create_subscription()
    await subscriber.log.wait_for("lost for a test")
    await faults.append(5)
    await subscriber.wait_for_ready(faults.source)
    await faults.source.wait_for("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 1)
    await faults.target.wait_for("SELECT count(*) FROM subscriber.progress", 1)
    await faults.target.wait_for("SELECT count(*) FROM subscriber.worker", 1)
    assert await faults.check() == {"log": 105}


@pytest.mark.parametrize("settings", [replace(QUICK, retry_interval=0)])
async def test_a_committed_copy_whose_answer_was_lost_is_not_repeated(
    faults: Scene, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next table sync worker starts before the launcher has read the catalog again."""
    fail_once(monkeypatch, Point.COPY_COMMITTED)
    await faults.append(100)
    await faults.create_subscription()
    await subscriber.log.wait_for("lost for a test")
    await subscriber.wait_for_ready(faults.source)
    assert await faults.check() == {"log": 100}


@pytest.mark.parametrize("settings", [replace(QUICK, retry_interval=30)])
async def test_table_that_cannot_be_copied_costs_the_others_nothing(faults: Scene, subscriber: Subscriber) -> None:
    """While its next attempt is waited for, each commit of other tables asks whether it is time."""
    await faults.create_subscription()
    await subscriber.wait_for_ready(faults.source)
    await faults.source.execute("CREATE TABLE wide (i int, j int)", "ALTER PUBLICATION p ADD TABLE wide")
    await faults.target.execute("CREATE TABLE wide (i int)")
    await faults.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await subscriber.log.wait_for('missing replicated column: "j"')
    before = len(asyncio.all_tasks())
    for _ in range(100):
        await faults.append(1)
    await faults.source.wait_for_catchup("s")
    assert len(asyncio.all_tasks()) - before < 10


async def test_slot_left_over_that_somebody_still_reads_is_dropped_later(faults: Scene, subscriber: Subscriber) -> None:
    """For example the walsender of a worker whose machine is gone, which notices that later."""
    await subscriber.stop()
    await faults.create_subscription()
    await faults.run_into(Point.SYNCDONE_STORED)
    slot = await faults.source.value("SELECT slot_name::text FROM pg_replication_slots WHERE slot_name LIKE '%sync%'")
    server = faults.source.server
    where = ["--host=127.0.0.1", f"--port={server.port}", "--username=postgres", f"--dbname={faults.source.name}"]
    options = ["--start", f"--slot={slot}", "--option=proto_version=1", "--option=publication_names=p", "--file=-"]
    reader = Process("reader", [str(server.bin / "pg_recvlogical"), *where, *options], faults.directory)
    reader.start()
    try:
        await faults.source.wait_for(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'")
        subscriber.start()
        await subscriber.wait_for_ready(faults.source)
    finally:
        await reader.kill9()
    await faults.source.wait_for("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%sync%'", 0)
    await faults.check()
