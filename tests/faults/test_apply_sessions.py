"""The worker and the servers die while batches are applied in several parallel sessions."""

from __future__ import annotations

import random

import anyio
import pytest

from subscriber.failpoints import Point
from tests.faults.environment import Scene
from tests.faults.test_streamed import kill_for

TABLE = "CREATE TABLE keyed (id int PRIMARY KEY, v int, t text)"
ROWS = 30_000
SIDE_BY_SIDE = """
SELECT count(*) FROM subscriber.worker w JOIN pg_stat_activity a ON a.pid = w.pid WHERE w.worker_type = 'parallel apply'
"""


async def _start(faults: Scene) -> None:
    await faults.source.execute(
        TABLE,
        "ALTER PUBLICATION p ADD TABLE keyed",
        f"INSERT INTO keyed SELECT i, 0, 'row' FROM generate_series(1, {ROWS}) i",
    )
    await faults.target.execute(TABLE)
    await faults.create_subscription(options="WITH (apply_sessions = 3)")
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.target.wait_for(SIDE_BY_SIDE, 2)
    await faults.worker.kill9()


async def _write(faults: Scene) -> None:
    """Write transactions that are one batch each. Some consecutive ones change the same rows."""
    for part in (1, 2, 3, 1, 4, 4, 5, 6):
        await faults.source.execute(f"UPDATE keyed SET v = v + 1 WHERE id / 4000 = {part}")
        await faults.append(1500)


@pytest.mark.parametrize(
    ("point", "times"),
    [
        (Point.BATCH_SENT, 3),
        *[pytest.param(Point.BATCH_SENT, times, marks=pytest.mark.soak) for times in (1, 2, 4)],
        *[pytest.param(Point.COMMITTED, times, marks=pytest.mark.soak) for times in (1, 2, 3, 4)],
    ],
)
async def test_a_worker_that_dies_with_batches_in_several_sessions_loses_nothing(
    faults: Scene, point: Point, times: int
) -> None:
    await _start(faults)
    await _write(faults)
    await faults.run_into(point, times)
    assert (await faults.finish())["keyed"] == ROWS


@pytest.mark.parametrize(
    "point", [Point.BATCH_REJECTED, pytest.param(Point.BATCH_APPLIED_AGAIN, marks=pytest.mark.soak)]
)
async def test_a_worker_that_dies_with_a_rejected_batch_in_one_session_loses_nothing(
    faults: Scene, point: Point
) -> None:
    """In a third session a row is missing, and its change is skipped."""
    await _start(faults)
    await faults.target.execute("DELETE FROM keyed WHERE id = 13000")
    await _write(faults)
    await faults.source.execute("DELETE FROM keyed WHERE id = 13000")
    await faults.run_into(point)
    assert (await faults.finish())["keyed"] == ROWS - 1


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_random_kills_of_worker_and_servers_lose_nothing_with_several_sessions(
    faults: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.randrange(1000)
    chance = random.Random(seed)
    await _start(faults)
    stop = anyio.Event()

    async def write() -> None:
        """Write transactions. Some change recently changed rows, some have new keys."""
        while not stop.is_set():
            first = chance.randrange(ROWS)
            count = chance.choice([10, 500, 2500])
            change = chance.choice(
                [
                    f"UPDATE keyed SET v = v + 1 WHERE id BETWEEN {first} AND {first + count}",
                    f"DELETE FROM keyed WHERE id BETWEEN {first} AND {first + count}",
                    f"INSERT INTO keyed SELECT i, 1, 'again' FROM generate_series({first}, {first + count}) i"
                    " ON CONFLICT DO NOTHING",
                ]
            )
            try:
                await faults.source.execute(change)
                await faults.append(chance.choice([1, 1200]))
            except Exception:
                await anyio.sleep(0.1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        killed = await kill_for(faults, 90, chance, servers=0.2)
        stop.set()
    counts = await faults.finish(timeout=120)
    with capsys.disabled():
        print(f"\nseed {seed}; identical after {len(killed)} kills; rows: {counts}")
