"""The network between us and a server: disconnected, slow, fragmented, silent.

Each fault is detected and reported, and replication recovers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import anyio
import pytest

from tests.faults.environment import Scene
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_proxy import Proxies, Proxy
from tests.plugins.fix_subscriber import QUICK, Subscriber, running_subscriber

GONE = [2.0, pytest.param(60.0, marks=[pytest.mark.soak, pytest.mark.timeout(240)])]  # seconds


async def status_says(
    scene: Scene, condition: Callable[[dict[str, Any] | None], bool], *, timeout: float = 20.0
) -> dict[str, Any]:
    """Query the status until `condition` is true. Returns the status."""
    status = None
    with anyio.move_on_after(timeout):
        while True:
            _, status, _ = await scene.status()
            if condition(status):
                assert status is not None
                return status
    pytest.fail(f"after {timeout} s the status is {status}")


async def is_streaming(scene: Scene) -> dict[str, Any]:
    """Wait until the subscription streams and is past its last error. Returns the status."""
    return await status_says(
        scene, lambda status: status is not None and status["state"] == "streaming" and status["ok"]
    )


async def while_writing(scene: Scene, work: Callable[[], Awaitable[None]]) -> None:
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keep_appending, stop)
        await work()
        stop.set()


@pytest.mark.parametrize("seconds", GONE)
async def test_publisher_cannot_be_reached(faults: Scene, proxies: Proxies, seconds: float) -> None:
    proxy = await proxies.to(faults.source.server.port)
    await faults.append(100)
    await faults.create_subscription(proxy.dsn(faults.source.dsn()))
    faults.worker.start()
    await faults.wait_until_equal()

    async def away() -> None:
        await proxy.cut()
        began = monotonic()
        status = await status_says(faults, lambda status: status is not None and bool(status["error"]))
        assert status["state"] in ("waiting to retry", "connecting")
        assert not status["ok"]
        assert "publisher" in status["error"] or "WAL stream" in status["error"]
        assert "refused" in status["publisher"]["error"]
        await anyio.sleep(max(0.0, seconds - (monotonic() - began)))
        await proxy.restore()

    await while_writing(faults, away)
    status = await is_streaming(faults)
    assert status["error"] is None
    assert status["ok"]
    await faults.finish()


@pytest.mark.parametrize("seconds", GONE)
async def test_target_cannot_be_reached(faults: Scene, proxies: Proxies, seconds: float) -> None:
    """The status is stored on the target.

    By the broken route it is unreachable, by another one no launcher is active.
    """
    proxy = await proxies.to(faults.target.server.port)
    by_proxy = proxy.dsn(faults.target.dsn())
    faults.worker = faults.program(target=by_proxy)
    await faults.append(100)
    await faults.create_subscription()
    faults.worker.start()
    await faults.wait_until_equal()

    async def away() -> None:
        await proxy.cut()
        began = monotonic()
        status = await status_says(faults, lambda status: status is not None and status["state"] == "no launcher")
        assert not status["ok"]
        code, nothing, message = await faults.status(by_proxy)
        assert (code, nothing) == (3, None)
        assert "connection to server" in message
        assert "refused" in message
        await anyio.sleep(max(0.0, seconds - (monotonic() - began)))
        await proxy.restore()

    await while_writing(faults, away)
    await is_streaming(faults)
    await faults.finish()


async def test_repeated_losses_of_both_connections_lose_nothing(faults: Scene, proxies: Proxies) -> None:
    """Resets at any moment, in the middle of messages among them, from the first copy on."""
    to_source = await proxies.to(faults.source.server.port)
    to_target = await proxies.to(faults.target.server.port)
    faults.worker = faults.program(target=to_target.dsn(faults.target.dsn()))
    await faults.append(3000)
    await faults.create_subscription(to_source.dsn(faults.source.dsn()))
    faults.worker.start()

    async def lose() -> None:
        for after in (900, 20_000, 5, 1500):
            to_source.truncate(after)
            await anyio.sleep(0.4)
            to_target.truncate(after)
            await anyio.sleep(0.4)
            to_source.reset()
            await anyio.sleep(0.4)

    await while_writing(faults, lose)
    await to_source.restore()
    await to_target.restore()
    await faults.finish()


async def test_bytes_come_slowly_and_in_small_pieces(faults: Scene, proxies: Proxies) -> None:
    to_source = await proxies.to(faults.source.server.port)
    to_target = await proxies.to(faults.target.server.port)
    to_source.split, to_target.split = 3, 5
    faults.worker = faults.program(target=to_target.dsn(faults.target.dsn()))
    await faults.append(100)
    await faults.create_subscription(to_source.dsn(faults.source.dsn()))
    faults.worker.start()
    await faults.wait_until_equal()
    to_source.split = to_target.split = 100
    to_source.delay = to_target.delay = 0.01
    await faults.append(10)
    await faults.wait_until_equal()
    await to_source.restore()
    await to_target.restore()
    assert await faults.finish() == {"log": 110}


# --- silence ---------------------------------------------------------------------------------------


quick_timeouts = pytest.mark.parametrize("settings", [replace(QUICK, receiver_timeout=1, status_interval=0.1)])


async def equal(faults: Scene, subscriber: Subscriber) -> None:
    await subscriber.wait_for_ready(faults.source)
    await faults.check()


@pytest.mark.parametrize("settings", [replace(QUICK, status_interval=0.1)])
async def test_publisher_that_falls_silent_is_given_up(faults: Scene, proxies: Proxies, subscriber: Subscriber) -> None:
    """No reset and no end of the connection, but no data either, not even after a request.

    The option of the subscription replaces the setting, which is a minute.
    """
    proxy = await proxies.to(faults.source.server.port)
    await faults.append(10)
    await faults.create_subscription(proxy.dsn(faults.source.dsn()), "WITH (wal_receiver_timeout = '1s')")
    await equal(faults, subscriber)
    subscriber.log.clear()
    proxy.stall()
    await faults.append(10)
    await subscriber.log.wait_for("terminating logical replication worker due to timeout")
    status = await status_says(faults, lambda status: status is not None and bool(status["error"]))
    assert status["error"] == "terminating logical replication worker due to timeout"
    assert not status["ok"]
    await proxy.restore()
    await equal(faults, subscriber)
    assert (await is_streaming(faults))["error"] is None


@pytest.mark.soak
@quick_timeouts
async def test_silence_of_an_idle_publisher_is_no_silence(faults: Scene, subscriber: Subscriber) -> None:
    """It answers a request, even after three seconds without changes."""
    await faults.create_subscription()
    await equal(faults, subscriber)
    sender = "SELECT pid FROM pg_stat_replication WHERE application_name = 's'"
    pid = await faults.source.value(sender)
    await anyio.sleep(3.0)
    assert await faults.source.value(sender) == pid
    assert not subscriber.log.has("ERROR")


@pytest.mark.parametrize(
    ("rows", "text"),
    [pytest.param(3, 10, marks=pytest.mark.soak), pytest.param(20_000, 2000, id="more than the queue takes")],
)
async def test_keepalives_are_answered_while_the_target_is_stuck(
    source_db: Database, target_db: Database, rows: int, text: int
) -> None:
    """Behind a lock for three times wal_sender_timeout, which is 1 s; the walsender stays the same."""
    await source_db.execute("CREATE TABLE t (i int, text text)", "CREATE PUBLICATION p FOR TABLE t")
    await target_db.execute("CREATE TABLE t (i int, text text)")
    conninfo = source_db.dsn(options="-c wal_sender_timeout=1000")
    async with running_subscriber(target_db) as subscriber:
        await subscriber.create(conninfo, "p")
        await subscriber.wait_for_ready(source_db)
        sender = "SELECT pid FROM pg_stat_replication WHERE application_name = 's'"
        pid = await source_db.value(sender)
        blocker = await target_db.connect()
        async with blocker.transaction():
            await blocker.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            await source_db.execute(f"INSERT INTO t SELECT i, repeat('x', {text}) FROM generate_series(1, {rows}) i")
            await anyio.sleep(3.0)
            assert await source_db.value(sender) == pid
        await subscriber.wait_for_ready(source_db)
        assert await target_db.value("SELECT count(*) FROM t") == rows
        assert await source_db.value(sender) == pid
        assert not subscriber.log.has("ERROR")


async def test_stalled_target_is_waited_for(faults: Scene, proxies: Proxies) -> None:
    """No data passes for a while. The publisher still gets its status updates."""
    proxy: Proxy = await proxies.to(faults.target.server.port)
    faults.worker = faults.program(target=proxy.dsn(faults.target.dsn()))
    await faults.create_subscription()
    faults.worker.start()
    await faults.wait_until_equal()
    sender = "SELECT pid FROM pg_stat_replication WHERE application_name = 's'"
    pid = await faults.source.value(sender)

    async def stall() -> None:
        await anyio.sleep(0.3)
        proxy.stall()
        await anyio.sleep(1.5)
        await proxy.restore()

    await while_writing(faults, stall)
    await faults.wait_until_equal()
    assert await faults.source.value(sender) == pid
    await faults.finish()


async def test_target_that_falls_silent_is_given_up(source_db: Database, target_db: Database, proxies: Proxies) -> None:
    """The target's machine is gone, and another one has its address: no reset, and new connections work."""
    settings = replace(QUICK, target_timeout=0.5, lease_renewal_interval=0.2)
    proxy = await proxies.to(target_db.server.port)
    await source_db.execute("CREATE TABLE t (i int)", "CREATE PUBLICATION p FOR TABLE t")
    await target_db.execute("CREATE TABLE t (i int)")
    by_proxy = Database(replace(target_db.server, port=proxy.port), target_db.name)
    async with running_subscriber(by_proxy, settings=settings) as subscriber:
        await subscriber.create(source_db, "p")
        await subscriber.wait_for_ready(source_db)
        proxy.lose()
        await source_db.execute("INSERT INTO t SELECT generate_series(1, 10)")
        await subscriber.log.wait_for("the target does not answer")
        # The other ends of the lost connections still exist. The launcher terminates its own former sessions.
        await subscriber.wait_for_ready(source_db)
        assert await target_db.value("SELECT count(*) FROM t") == 10
