"""The worker dies at each failpoint, and the next one recovers."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from subscriber.demo.processes import Process
from subscriber.failpoints import Point
from tests.faults.environment import Scene

SYNCHRONIZING = list(Point)[: list(Point).index(Point.READY_STORED) + 1]
# Reached only with prepared transactions, large transactions and batches.
BATCHES = (Point.BATCH_SENT, Point.BATCH_REJECTED, Point.BATCH_APPLIED_AGAIN)
ELSEWHERE = (Point.PREPARED, Point.RESOLVED, Point.PARALLEL_DONE, *BATCHES)
APPLYING = [point for point in list(Point)[list(Point).index(Point.CHANGE_SENT) :] if point not in ELSEWHERE]


async def while_appending(scene: Scene, work: Callable[[], Awaitable[None]]) -> None:
    """Write to the publisher while `work` runs."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keep_appending, stop, 0.02)
        await work()
        stop.set()


async def test_worker_dies_at_each_place_of_table_synchronization_in_turn(faults: Scene) -> None:
    """One table reaches syncdone with a kill at each point, others test the points after that."""
    await faults.append(300)
    await faults.create_subscription()

    async def die_everywhere() -> None:
        for point in SYNCHRONIZING[: SYNCHRONIZING.index(Point.SLOT_DROPPED)]:
            await faults.run_into(point)
        for name, point in (("late", Point.SLOT_DROPPED), ("later", Point.READY_STORED)):
            await faults.source.execute(
                f"CREATE TABLE {name} AS SELECT i FROM generate_series(1, 100) i",
                f"ALTER PUBLICATION p ADD TABLE {name}",
            )
            await faults.target.execute(f"CREATE TABLE {name} (i int)")
            await faults.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
            await faults.run_into(point)

    await while_appending(faults, die_everywhere)
    counts = await faults.finish()
    assert counts["late"] == counts["later"] == 100
    assert counts["log"] > 300


async def test_worker_dies_where_a_table_has_nothing_to_catch_up_with(faults: Scene) -> None:
    """Without writes: the apply worker has seen the table's position, until a new worker starts that has not."""
    await faults.append(300)
    await faults.create_subscription()
    for point in (Point.CAUGHT_UP, Point.SYNCDONE_STORED):
        await faults.run_into(point)
        await faults.append(5)
    assert await faults.finish() == {"log": 310}


async def test_worker_dies_at_each_place_of_applying_in_turn(faults: Scene) -> None:
    await faults.create_subscription()
    faults.worker.start()
    await faults.wait_until_equal()
    for point in APPLYING:
        await faults.worker.kill9()
        await faults.append(3)
        await faults.append(2)
        await faults.run_into(point)
    await faults.append()
    counts = await faults.finish()
    assert counts == {"log": len(APPLYING) * 5 + 2}


async def test_worker_dies_at_each_place_of_prepared_and_large_transactions_in_turn(faults: Scene) -> None:
    small = faults.source.dsn(options="-c logical_decoding_work_mem=64kB")
    await faults.create_subscription(small, "WITH (two_phase = true, streaming = parallel)")
    faults.worker.start()
    await faults.target.wait_for("SELECT subtwophasestate::text FROM subscriber.subscription", "e")
    await faults.wait_until_equal()
    await faults.worker.kill9()
    gid = f"of {faults.source.name}"
    await faults.source.execute(f"BEGIN; INSERT INTO log (number) VALUES (1); PREPARE TRANSACTION '{gid}'")
    await faults.run_into(Point.PREPARED)
    await faults.source.execute(f"COMMIT PREPARED '{gid}'")
    await faults.run_into(Point.RESOLVED)
    await faults.source.execute("INSERT INTO log (number) SELECT generate_series(1, 5000)")
    await faults.run_into(Point.PARALLEL_DONE)
    assert await faults.finish() == {"log": 5001}


async def test_worker_dies_between_recording_a_position_and_confirming_it(faults: Scene) -> None:
    """There are no published changes, but the slot must advance."""
    await faults.create_subscription()
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.worker.kill9()
    await faults.source.execute("SELECT pg_logical_emit_message(false, 'test', 'x')", "SELECT pg_switch_wal()")
    await faults.run_into(Point.RECORDED)
    await faults.append(3)
    assert await faults.finish() == {"log": 3}


@pytest.mark.soak
@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize("point", APPLYING)
async def test_worker_dies_while_applying_with_much_behind_it(faults: Scene, point: Point, times: int) -> None:
    await faults.append(1)
    await faults.create_subscription()
    await while_appending(faults, lambda: faults.run_into(point, times))
    await faults.finish()


@pytest.mark.soak
@pytest.mark.parametrize("point", SYNCHRONIZING)
async def test_worker_dies_once_during_table_synchronization(faults: Scene, point: Point) -> None:
    await faults.append(2000)
    await faults.create_subscription()
    await while_appending(faults, lambda: faults.run_into(point))
    await faults.finish()


# --- a server crashes while the worker stands still at a place -------------------------------------


async def crash_at(scene: Scene, point: Point, crash: Callable[[], Awaitable[None]]) -> None:
    """Run the worker to `point`, hold it there, crash a server, let go."""
    scene.worker = scene.program(point, how="stop")
    scene.worker.start()
    await stopped(scene.worker)
    await crash()
    assert scene.worker.pid is not None
    os.kill(scene.worker.pid, signal.SIGCONT)


async def stopped(program: Process, *, timeout: float = 20.0) -> None:
    with anyio.move_on_after(timeout):
        while program.pid is not None:
            if Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return
            await anyio.sleep(0.02)
    pytest.fail(f"it never stopped itself; the log ends with\n{program.last_lines()}")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see a process stop")
@pytest.mark.parametrize(
    "point",
    [
        Point.COMMITTED,
        pytest.param(Point.COMMIT_SENT, marks=pytest.mark.soak),
        pytest.param(Point.FLUSHED, marks=pytest.mark.soak),
        pytest.param(Point.CONFIRMED, marks=pytest.mark.soak),
    ],
)
async def test_target_crashes_around_a_commit(faults: Scene, point: Point) -> None:
    """A commit that was answered but not flushed may be lost by the crash.

    It is then applied again. A commit that was not lost is not.
    """
    await faults.append(3)
    await faults.create_subscription()
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.worker.kill9()
    await faults.append(5)

    async def crash() -> None:
        await faults.target.server.kill9()
        await faults.append(2)
        await faults.target.server.start()

    await crash_at(faults, point, crash)
    assert await faults.finish() == {"log": 10}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see a process stop")
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(Point.SLOT_CREATED, marks=pytest.mark.soak),
        pytest.param(Point.COPY_COMMITTED, marks=pytest.mark.soak),
        Point.CATCHUP,
        pytest.param(Point.SYNCDONE_STORED, marks=pytest.mark.soak),
    ],
)
async def test_publisher_crashes_during_table_synchronization(faults: Scene, point: Point) -> None:
    await faults.append(300)
    await faults.create_subscription()

    async def crash() -> None:
        await faults.source.server.kill9()
        await faults.source.server.start()
        await faults.append(5)

    await crash_at(faults, point, crash)
    assert await faults.finish() == {"log": 305}
