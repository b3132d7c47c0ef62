"""Streamed and prepared transactions under SIGKILL: none is lost or applied twice, and no files remain.

SUBSCRIBER_SOAK_SEED=7 SUBSCRIBER_SOAK_SECONDS=600 pytest -m soak tests/faults/test_streamed.py
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import anyio
import pytest

from subscriber.settings import variable_of
from tests.faults import writers
from tests.faults.environment import Scene
from tests.faults.test_kills import crash

SEED = int(os.environ.get("SUBSCRIBER_SOAK_SEED", random.randrange(10_000)))
SECONDS = float(os.environ.get("SUBSCRIBER_SOAK_SECONDS", "120"))

MODES = ["on", "parallel"]
ENABLED = "SELECT subtwophasestate::text FROM subscriber.pg_subscription"


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the worker's files."""
    folder = tmp_path / "spool"
    monkeypatch.setenv(variable_of("spool_dir"), str(folder))
    return folder


async def subscribed(scene: Scene, streaming: str, sessions: int = 1) -> None:
    """Subscribe, and wait until everything is copied and two_phase is enabled."""
    options = f"streaming = {streaming}, two_phase = true, apply_sessions = {sessions}"
    await writers.prepare(scene)
    await scene.create_subscription(options=f"WITH ({options})")
    scene.worker.start()
    ready = "SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM subscriber.subscription_rel"
    while not await scene.target.value(ready):
        await scene.source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        await anyio.sleep(0.1)
    await scene.target.wait_for(ENABLED, "e")


async def finish(scene: Scene, spool: Path, *, timeout: float = 60.0) -> dict[str, int]:
    """Scene.finish(), and nothing of prepared or streamed transactions is left."""
    if scene.worker.pid is None:
        scene.worker.start()
    await scene.wait_until_equal(timeout=timeout)
    assert await scene.target.rows(writers.GIDS) == []
    assert await scene.target.rows("SELECT * FROM subscriber.prepared") == []
    counts = await scene.finish(timeout=timeout)
    await scene.worker.stop()
    assert [path for path in spool.rglob("*") if path.is_file()] == []
    return counts


async def kill_for(scene: Scene, seconds: float, chance: random.Random, servers: float) -> list[str]:
    """Kill about one process a second. Returns their names. `servers` is the fraction of servers, from 0 to 1."""
    killed = []
    with anyio.move_on_after(seconds):
        while True:
            if scene.worker.pid is None:
                scene.worker.start()
            await anyio.sleep(chance.uniform(0.3, 1.9))
            with anyio.CancelScope(shield=True):
                if chance.random() < servers:
                    victim = chance.choice([scene.source, scene.target])
                    killed.append("publisher" if victim is scene.source else "target")
                    await crash(victim.server, chance)
                else:
                    assert scene.worker.pid is not None, f"it ended by itself:\n{scene.worker.last_lines()}"
                    killed.append("worker")
                    await scene.worker.kill9()
    return killed


@pytest.mark.parametrize("streaming", [pytest.param("on", marks=pytest.mark.soak), "parallel"])
async def test_streamed_and_prepared_transactions_survive_kills(faults: Scene, spool: Path, streaming: str) -> None:
    await subscribed(faults, streaming)
    async with writers.writing(faults, 1, sessions=4, largest=800, pause=0.1):
        await kill_for(faults, 5, random.Random(1), servers=0.2)
    counts = await finish(faults, spool)
    assert counts["keyed"] > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("immediate", [False, True], ids=["64kB", "immediate"])
@pytest.mark.parametrize("streaming", MODES)
async def test_a_random_workload_of_every_kind_under_kills(
    faults: Scene, spool: Path, streaming: str, immediate: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = 1 + SEED % 3
    with capsys.disabled():
        how = f"streaming = {streaming}, {'immediate' if immediate else '64kB'}, apply_sessions = {lanes}"
        print(f"\nseed {SEED}, {SECONDS:.0f} s, {how}")
    await subscribed(faults, streaming, lanes)
    if immediate:
        await faults.source.stream_everything()
        await faults.worker.kill9()
    chance = random.Random(SEED)
    async with writers.writing(faults, SEED, sessions=8, largest=5000, pause=0.2) as sessions:
        killed = await kill_for(faults, SECONDS, chance, servers=0.15)
    counts = await finish(faults, spool, timeout=600)
    with capsys.disabled():
        print(
            f"identical after {sum(writer.ended for writer in sessions)} transactions; killed: worker"
            f" {killed.count('worker')} times, publisher {killed.count('publisher')}, target {killed.count('target')};"
            f" rows: {counts}"
        )
