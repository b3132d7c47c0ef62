"""The commands killed while they work: driver, executors' Python workers, the target. Exact rows afterwards.

Each attempt starts a Spark of its own, which is most of the time this takes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from subscriber.ops.demo_processes import Process
from subscriber.pipeline.lake import Lake
from tests.pipeline.scene import NAMES, TABLES, Scene, archived
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


def command(directory: Path, *arguments: str) -> Process:
    return Process(arguments[0], [sys.executable, "-m", "subscriber", *arguments], directory)


def python_workers(pid: int) -> list[int]:
    """The processes that Spark has forked for Python code, of the driver with that id."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_text()
            except OSError:
                continue

    def below(process: int) -> bool:
        return process == pid or (process in parents and below(parents[process]))

    daemons = {process for process, name in names.items() if "pyspark.daemon" in name and below(process)}
    return [process for process in daemons if parents[process] in daemons]


async def kill_until_done(process: Process, victims: list[str], target: Database | None, seed: int) -> None:
    """Start it, kill one of them each time, until it has ended well by itself after the last."""
    chance = random.Random(seed)
    while victims:
        victim = victims.pop()
        process.start()
        await anyio.sleep(chance.uniform(4.0, 20.0))
        if victim == "worker":
            with anyio.move_on_after(20):
                while process.pid is not None and not (workers := python_workers(process.pid)):
                    await anyio.sleep(0.01)
                if process.pid is not None:
                    os.kill(chance.choice(workers), signal.SIGKILL)
            assert await process.wait() == 0, process.last_lines()
        elif victim == "target" and target is not None:
            await target.server.kill9()
            await target.server.start()
            await process.wait()
        else:
            await process.kill9()
    process.start()
    assert await process.wait() == 0, process.last_lines(40)


async def test_catchup_is_killed(scene: Scene, target_db: Database, subscriber: Subscriber, tmp_path: Path) -> None:
    await target_db.execute(TABLES)
    await subscriber.create(scene.source, "p")
    await subscriber.wait_for_ready(scene.source)
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await scene.source.wait_for("SELECT NOT active FROM pg_replication_slots WHERE slot_name = 's'")
    await subscriber.stop()
    await scene.write(3000)
    await scene.archive()
    log = str(tmp_path / "log")
    process = command(tmp_path, "catchup", "s", "--target", target_db.dsn(), "--log", log, "--batch", "1500")
    await kill_until_done(process, ["driver", "worker", "target", "driver", "worker"], target_db, seed=1)
    for table in NAMES:
        assert await scene.rows(target_db, table) == await scene.rows(scene.source, table), table
    subscriber.start()
    await scene.write(20)
    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await scene.source.wait_for_catchup("s")
    for table in NAMES:
        assert await scene.rows(target_db, table) == await scene.rows(scene.source, table), table


async def test_lake_is_killed(scene: Scene, tmp_path: Path) -> None:
    lake, log = Lake(tmp_path / "lake"), str(tmp_path / "log")
    arguments = ["--log", log, "--to", str(lake.directory), "--source", scene.source.dsn(), "--batch", "1500"]
    load = command(tmp_path, "lake", *arguments, "--no-history")
    load.start()
    await anyio.sleep(0.8)
    await load.kill9()  # while it loads
    load.start()
    assert await load.wait() == 0, load.last_lines()
    await scene.write(3000)
    await scene.archive()
    await kill_until_done(command(tmp_path, "lake", *arguments), ["driver", "worker", "driver", "worker"], None, seed=2)
    for table in NAMES:
        found = lake.table(f"public.{table}").to_pyarrow_table().to_pylist()
        assert Counter(tuple(row.values()) for row in found) == Counter(
            await scene.source.rows(f"SELECT * FROM {table}")
        ), table
