"""Random DML and DDL while archiver and lake run as commands, and are killed with SIGKILL at random moments.

At the newest position of each round, each table of the lake equals the publisher's or cannot be read. Every tenth round
compares the last ten positions again. Tables are compacted and cleaned up while the lake writes. LAKE_ROUNDS and
LAKE_SEED choose the length and the workload.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from deltalake.exceptions import DeltaError
from pyiceberg.exceptions import CommitFailedException, ValidationException

from subscriber.changelog.reader import ChangeLog
from subscriber.demo.processes import Process
from subscriber.errors import StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.tables.table_format import FORMATS, ICEBERG
from tests.plugins.fix_cluster import Database
from tests.spark.test_kills import jvm, python_workers
from tests.spark.test_lake_ddl import ROUNDS, SEED, TABLES, Workload, has_deletes, maintain
from tests.spark.test_lake_schema import rows_of, source_rows

Rows = Counter[tuple[Any, ...]]
PATIENCE = 300.0  # seconds for a restarted command to reach a position on a busy machine


@dataclass
class Commands:
    """The archiver and the lake as processes. One that has ended is started again."""

    archiver: Process
    lake: Process
    chance: random.Random
    killed: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        for process in (self.archiver, self.lake):
            if process.pid is None:
                process.start()

    async def kill(self) -> None:
        """Kill one of: the archiver, the driver of the lake, its JVM, one of its Python workers."""
        victim = self.chance.choice(("archiver", "archiver", "driver", "driver", "jvm", "worker"))
        if victim in ("archiver", "driver"):
            await (self.archiver if victim == "archiver" else self.lake).kill9()
        elif (pid := self.lake.pid) is not None:
            pids = jvm(pid) if victim == "jvm" else python_workers(pid)
            if not pids:
                return
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)
        self.killed[victim] += 1

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(PATIENCE):
            while not condition():
                self.start()
                await anyio.sleep(0.2)


async def position_of(source: Database) -> Lsn:
    await source.execute("SELECT pg_logical_emit_message(true, 'scene', '')")
    return Lsn.parse(await source.value("SELECT pg_current_wal_insert_lsn()::text"))


def reached(lake: Lake, position: Lsn) -> bool:
    return lake.exists and lake.position() >= position


def compared(lake: Lake, table: str, rows: Rows, position: Lsn | None = None) -> str:
    """Return how the table is: right, or the class of the error that reading it raises."""
    try:
        rows_read = rows_of(lake, table, position)
    except (StatementError, DeltaError, OSError) as error:
        return type(error).__name__
    assert rows_read == rows, (SEED, table, position, rows_read - rows, rows - rows_read)
    return "right"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.soak
@pytest.mark.timeout(120 * ROUNDS)
async def test_every_table_is_right_or_set_aside_after_kills(source_db: Database, tmp_path: Path, format: str) -> None:
    chance = random.Random(SEED)
    workload, lake = Workload(source_db, chance, iter(range(100, 10**9))), Lake(tmp_path / "lake", format=format)
    for table in TABLES:
        await source_db.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, a int, b text, n numeric(8,2))",
            f"INSERT INTO {table} SELECT i, i, 'b' || i, i + 0.25 FROM generate_series(1, 10) i",
        )
    await source_db.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(TABLES)}")
    log, program = str(tmp_path / "log"), [sys.executable, "-m", "subscriber"]
    archive = [
        *program,
        "archive",
        "--source",
        source_db.dsn(),
        "--publication",
        "p",
        "--slot",
        "a",
        "--directory",
        log,
    ]
    options = [
        str(lake.directory),
        "--log",
        log,
        "--source",
        source_db.dsn(),
        "--no-history",
        "--master",
        "local[2,4]",
        "--setting",
        "lake_rewrite_size=0",
        "--setting",
        "lake_deleted_percent=40",
        "--ranges-above",
        chance.choice(("0", "1024")),
    ]
    commands = Commands(
        Process("archive", archive, tmp_path),
        Process("lake", [*program, "lake", "follow", *options], tmp_path),
        chance,
    )
    commands.archiver.start()
    await commands.wait_for(lambda: (tmp_path / "log" / "log.json").exists() and bool(ChangeLog(log).end()))
    loader = Process("load", [*program, "lake", "load", *options, "--format", format], tmp_path)
    loader.start()
    await loader.wait()
    states, earlier, seen = Counter[str](), Counter[str](), list[tuple[Lsn, dict[str, Rows]]]()
    with_deletes = 0
    try:
        for number in range(ROUNDS):
            commands.start()
            for _ in range(chance.randint(1, 5)):
                await workload.step()
                if chance.random() < 0.05:
                    await commands.kill()
                    commands.start()
            if chance.random() < 0.2 and lake.exists:
                with suppress(DeltaError, CommitFailedException, ValidationException, OSError, SubscriberError):
                    maintain(lake, chance, is_written=True)
            await workload.touch()
            if chance.random() < 0.1:
                await commands.kill()
            position = await position_of(source_db)
            rows = {table: await source_rows(source_db, table) for table in TABLES}
            await commands.wait_for(partial(reached, lake, position))
            seen.append((lake.position(), rows))  # a boundary; nothing is written meanwhile
            states.update(compared(lake, table, rows[table]) for table in TABLES)
            right = [table for table in TABLES if f"public.{table}" not in lake.problems()]
            with_deletes += sum(has_deletes(lake, table, rows[table].total()) for table in right)
            if number % 10 == 9:
                for before, old in seen[-10:]:
                    earlier.update(compared(lake, table, old[table], before) for table in TABLES)
                print(f"\n{number + 1} rounds, seed {SEED}: newest {dict(states)}, earlier {dict(earlier)}")
                print(f"killed {dict(commands.killed)}, statements {dict(workload.done)}", flush=True)
                print(f"tables with deleted positions {with_deletes}", flush=True)
        assert states["right"] > len(TABLES) * ROUNDS // 2
        assert (with_deletes > ROUNDS // 4) == (format == ICEBERG)
    finally:
        print(commands.lake.last_lines(60))
        await commands.lake.stop()
        await commands.archiver.stop()
