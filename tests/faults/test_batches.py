"""The worker dies while it applies batches, and while it applies a rejected batch row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.failpoints import Point
from subscriber.settings import variable_of
from tests.faults.environment import Scene
from tests.faults.test_points import while_appending

TABLE = "CREATE TABLE keyed (id int PRIMARY KEY, v int)"
LARGE = 25_000  # rows, more than fit into one batch


async def _start(faults: Scene, streaming: str = "off") -> None:
    await faults.source.execute(TABLE, "ALTER PUBLICATION p ADD TABLE keyed")
    await faults.target.execute(TABLE)
    await faults.create_subscription(options=f"WITH (streaming = {streaming})")
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.worker.kill9()


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
async def test_a_worker_that_dies_after_sending_a_batch_or_slice_loses_nothing(faults: Scene, times: int) -> None:
    await _start(faults)
    await faults.source.execute(f"INSERT INTO keyed SELECT i, i FROM generate_series(1, {LARGE}) i")
    await faults.run_into(Point.BATCH_SENT, times)
    await faults.source.execute("UPDATE keyed SET v = v + 1", f"UPDATE keyed SET id = id + {LARGE} WHERE id > 24000")
    await faults.run_into(Point.BATCH_SENT, times)
    await faults.source.execute("DELETE FROM keyed WHERE id % 2 = 1")
    await faults.run_into(Point.BATCH_SENT, times)
    assert (await faults.finish())["keyed"] == LARGE / 2


@pytest.mark.parametrize(
    "point", [Point.BATCH_REJECTED, pytest.param(Point.BATCH_APPLIED_AGAIN, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("rows", [500, pytest.param(LARGE, marks=pytest.mark.soak)])
async def test_a_worker_that_dies_while_it_replays_a_rejected_batch_loses_nothing(
    faults: Scene, point: Point, rows: int
) -> None:
    """A row to delete is not there, somewhere in the middle."""
    await _start(faults)
    await faults.source.execute(f"INSERT INTO keyed SELECT i, i FROM generate_series(1, {rows}) i")
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.target.execute(f"DELETE FROM keyed WHERE id = {rows - 100}")
    await faults.worker.kill9()
    await faults.source.execute(f"DELETE FROM keyed WHERE id > {rows // 10}")
    await faults.run_into(point)
    assert (await faults.finish())["keyed"] == rows // 10


@pytest.mark.soak
async def test_a_worker_that_dies_with_a_backlog_of_batches_loses_nothing(faults: Scene) -> None:
    await _start(faults)

    async def die() -> None:
        for _ in range(10):
            await faults.append(300)
            await faults.run_into(Point.BATCH_SENT)

    await while_appending(faults, die)
    await faults.finish()


@pytest.mark.parametrize(
    ("point", "times"),
    [
        (Point.BATCH_SENT, 2),
        pytest.param(Point.BATCH_SENT, 1, marks=pytest.mark.soak),
        pytest.param(Point.BATCH_SENT, 3, marks=pytest.mark.soak),
        pytest.param(Point.BATCH_REJECTED, 1, marks=pytest.mark.soak),
        pytest.param(Point.BATCH_APPLIED_AGAIN, 300, marks=pytest.mark.soak),
        pytest.param(Point.PARALLEL_DONE, 1, marks=pytest.mark.soak),
    ],
)
async def test_a_parallel_worker_that_dies_between_batches_loses_nothing(
    faults: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: Point, times: int
) -> None:
    """Between savepoints, some of which are rolled back. One of the transaction slices has a missing row."""
    monkeypatch.setenv(variable_of("spool_dir"), str(tmp_path / "spool"))
    await faults.source.execute(f"ALTER DATABASE {faults.source.name} SET logical_decoding_work_mem = '64kB'")
    await _start(faults, "parallel")
    await faults.source.execute(f"INSERT INTO keyed SELECT i, i FROM generate_series(1, {LARGE}) i")
    faults.worker.start()
    await faults.wait_until_equal()
    await faults.target.execute("DELETE FROM keyed WHERE id = 12000")
    await faults.worker.kill9()
    await faults.source.execute(
        f"BEGIN; UPDATE keyed SET v = v + 1; SAVEPOINT a; INSERT INTO keyed SELECT id + {LARGE}, v FROM keyed;"
        f" ROLLBACK TO a; INSERT INTO keyed SELECT i + {2 * LARGE}, i FROM generate_series(1, 500) i; SAVEPOINT b;"
        " DELETE FROM keyed WHERE id <= 20000; COMMIT"
    )
    await faults.run_into(point, times)
    assert (await faults.finish())["keyed"] == LARGE - 20_000 + 500
