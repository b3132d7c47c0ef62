"""The commands are killed while they work: driver, JVM, executors' Python workers, the target. Exact rows afterwards.

Each attempt starts a new Spark, which takes most of the time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from subscriber.demo.processes import Process
from subscriber.demo.servers import Server
from subscriber.spark.lake.lake import Lake
from subscriber.spark.session import DAEMON
from tests.plugins.fix_cluster import Database
from tests.spark.scene import NAMES, Scene, archived

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


def command(directory: Path, *arguments: str) -> Process:
    return Process(arguments[0], [sys.executable, "-m", "subscriber", *arguments], directory)


def descendants(pid: int) -> dict[int, str]:
    """Return all descendants of a process, and their command lines."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_text()
            except OSError:
                continue

    def is_below(process: int) -> bool:
        while process := parents.get(process, 0):
            if process == pid:
                return True
        return False

    return {process: name for process, name in names.items() if is_below(process)}


def python_workers(pid: int) -> list[int]:
    """Return the processes that Spark has forked for Python code of the driver with that id."""
    daemons = [process for process, name in descendants(pid).items() if DAEMON in name]
    return [process for daemon in daemons for process in descendants(daemon)]


def jvm(pid: int) -> list[int]:
    return [process for process, name in descendants(pid).items() if "org.apache.spark.deploy.SparkSubmit" in name]


async def kill_until_done(
    process: Process, victims: list[str], servers: dict[str, Server], scene: Scene, seed: int
) -> list[str]:
    """Repeatedly write more, start the process, and kill one of the victims. Then run it to a successful end.

    The kill happens after Spark's work has begun, in whatever step is running then. Returns the victims that were
    killed at work.
    """
    chance, killed = random.Random(seed), list[str]()
    for victim in victims:
        await scene.write(1000)
        await scene.archive()
        process.start()
        while process.pid is not None and not python_workers(process.pid):
            await anyio.sleep(0.02)
        await anyio.sleep(chance.uniform(0.0, 2.0))
        if process.pid is None:
            assert await process.wait() == 0, process.last_lines()
            continue
        if victim in servers:
            await servers[victim].kill9()
            await servers[victim].start()
            await process.wait()
        elif victim == "driver":
            await process.kill9()
        else:
            pids = jvm(process.pid) if victim == "jvm" else python_workers(process.pid)
            if not pids:  # Spark has ended, and the process is about to
                assert await process.wait() == 0, process.last_lines()
                continue
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)
            status = await process.wait()
            assert status == 0 or victim == "jvm", process.last_lines()
        killed.append(victim)
    process.start()
    assert await process.wait() == 0, process.last_lines(40)
    return killed


async def test_lake_is_killed(scene: Scene, tmp_path: Path) -> None:
    lake, log = Lake(tmp_path / "lake"), str(tmp_path / "log")
    arguments = [str(lake.directory), "--log", log, "--source", scene.source.dsn(), "--batch", "300"]
    load = command(tmp_path, "lake", "load", *arguments, "--no-history")
    load.start()
    await anyio.sleep(0.8)
    await load.kill9()  # while it loads
    load.start()
    assert await load.wait() == 0, load.last_lines()
    victims = ["driver", "worker", "jvm", "driver", "worker"]
    killed = await kill_until_done(command(tmp_path, "lake", "advance", *arguments), victims, {}, scene, seed=2)
    assert len(killed) > 2, killed
    for table in NAMES:
        rows_read = lake.table(f"public.{table}").to_pyarrow_table().to_pylist()
        assert Counter(tuple(row.values()) for row in rows_read) == Counter(
            await scene.source.rows(f"SELECT * FROM {table}")
        ), table
