"""Kills at random moments while pgbench and another writer are active: no row is lost or duplicated.

pgbench_history and log have no key, so a row that is applied twice is there twice.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from subscriber.demo.processes import Process
from subscriber.demo.servers import Server
from tests.faults.environment import Scene

RATE = 300  # pgbench transactions per second: other tests run on the same machine

# Sums that pgbench keeps equal in each of its transactions.
BALANCES = """
SELECT (SELECT coalesce(sum(bbalance), 0) FROM pgbench_branches),
       (SELECT coalesce(sum(tbalance), 0) FROM pgbench_tellers),
       (SELECT coalesce(sum(abalance), 0) FROM pgbench_accounts), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)
"""


class Pgbench:
    """pgbench's own transactions from two clients, restarted when the publisher is back."""

    def __init__(self, scene: Scene) -> None:
        server = scene.source.server
        options = ["--client=2", "--time=3600", f"--rate={RATE}", "--no-vacuum", "--username=postgres"]
        where = ["--host=127.0.0.1", f"--port={server.port}", scene.source.name]
        self._process = Process("pgbench", [str(server.bin / "pgbench"), *options, *where], scene.directory)

    async def run(self, stop: anyio.Event) -> None:
        try:
            while not stop.is_set():
                if self._process.pid is None:
                    self._process.start()
                await anyio.sleep(0.1)
        finally:
            await self._process.stop()


@asynccontextmanager
async def writing(scene: Scene) -> AsyncIterator[None]:
    """Run both writers during the block."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Pgbench(scene).run, stop)
        tasks.start_soon(scene.keep_appending, stop)
        yield
        stop.set()


async def prepare(scene: Scene) -> None:
    """Create pgbench's tables on both sides; filled, keyed and published on the publisher."""
    source, target = scene.source, scene.target
    await source.server.program("pgbench", "-i", "-I", "dtGp", "-q", dbname=source.name)
    await source.execute(
        "ALTER PUBLICATION p ADD TABLE pgbench_accounts, pgbench_branches, pgbench_tellers, pgbench_history"
    )
    await target.server.program("pgbench", "-i", "-I", "dtp", "-q", dbname=target.name)
    await scene.append(1000)


async def crash(server: Server, random: random.Random) -> None:
    """Crash the server without a shutdown, and recover it: everything that was not flushed is lost."""
    if random.random() < 0.5:
        await server.kill9()
    else:
        await server.stop("immediate")
    await anyio.sleep(random.uniform(0.0, 0.5))
    await server.start()


async def kill_them(scene: Scene, whom: Sequence[str], seed: int, longest: float) -> None:
    """Kill them one after the other, each after a random delay of at most `longest` seconds."""
    chance = random.Random(seed)
    order = list(whom)
    chance.shuffle(order)
    for victim in order:
        if scene.worker.pid is None:
            scene.worker.start()
        await anyio.sleep(chance.uniform(0.1, longest))
        assert scene.worker.pid is not None, f"it ended by itself:\n{scene.worker.last_lines()}"
        match victim:
            case "worker":
                await scene.worker.kill9()
            case "publisher":
                await crash(scene.source.server, chance)
            case "target":
                await crash(scene.target.server, chance)


async def finish(scene: Scene, *, timeout: float = 60.0) -> dict[str, int]:
    counts = await scene.finish(timeout=timeout)
    assert await scene.target.rows(BALANCES) == await scene.source.rows(BALANCES)
    balances = set((await scene.target.rows(BALANCES))[0])
    assert len(balances) == 1
    assert counts["log"] > 1000
    assert counts["pgbench_history"] > 0
    return counts


async def test_worker_and_servers_are_killed(faults: Scene) -> None:
    await prepare(faults)
    async with writing(faults):
        await faults.create_subscription()
        await kill_them(faults, ["worker"] * 5 + ["publisher", "target"], seed=1, longest=1.5)
    await finish(faults)


END_ONE_OF_OURS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid()
   AND (application_name LIKE 'subscriber%' OR backend_type = 'walsender') ORDER BY random() LIMIT 1
"""


@pytest.mark.parametrize("times", [5, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_two_launchers_whose_connections_are_ended_at_random(faults: Scene, times: int) -> None:
    """A launcher that has lost its lock still has workers for a moment, while the other's begin."""
    chance = random.Random(times)
    other = Scene(faults.source, faults.target, faults.directory / "other")
    other.directory.mkdir()
    await prepare(faults)
    async with writing(faults):
        await faults.create_subscription()
        faults.worker.start()
        other.worker.start()
        try:
            for _ in range(times):
                await anyio.sleep(chance.uniform(0.1, 1.0))
                for database in chance.sample([faults.source, faults.target, faults.target], 2):
                    await database.execute(END_ONE_OF_OURS)
            assert other.worker.pid is not None, other.worker.last_lines()
        finally:
            await other.worker.stop()
    await finish(faults)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_worker_is_killed_fifty_times_and_each_server_ten_times(
    faults: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.randrange(1000)
    await prepare(faults)
    async with writing(faults):
        await faults.create_subscription()
        await kill_them(faults, ["worker"] * 50 + ["publisher", "target"] * 10, seed, longest=3.0)
    counts = await finish(faults, timeout=180)
    with capsys.disabled():
        print(f"\nseed {seed}; identical after 50 kills of the worker and 10 of each server; rows: {counts}")
