"""The load of a table into a lake, in one snapshot and by ranges of its key, while other sessions change rows.

    python -m benchmarks.lake_load [--rows N] [--width BYTES] [--rounds N] [--json]

A round loads the table of benchmarks.lake into a new lake in both ways. A session changes a hundred rows a second
meanwhile. Both lakes must have the publisher's rows at the end.

    s                seconds until the table can be read; the archiver has to bring the log to that position
    oldest snapshot  seconds that a snapshot of the load kept the publisher from removing dead rows, at most
    … RSS MB         the largest resident memory of a process
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

import anyio
import anyio.to_thread
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from benchmarks.environment import Stage, connection, stage
from benchmarks.lake import LABEL, MB, Figures, Source, report
from benchmarks.process_tree import peak_memory
from benchmarks.spark_sources import archive
from subscriber.changelog.reader import ChangeLog
from subscriber.spark.changes.net_job import JAVA_OPTIONS
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.lake.load_ranges import RangeLoads
from subscriber.spark.session import spark_session

KINDS = {"one snapshot": None, "ranges": 0}  # `larger` of load()
SAMPLE = 0.1  # seconds between two samples of the snapshots
_CHANGE = "UPDATE items SET number = number + 1 WHERE id = 2 * floor(random() * {rows})::bigint"
# pg_stat_activity has no start of a walsender's transaction, so the samples measure the age of a snapshot.
_SNAPSHOTS = """
SELECT pid, backend_xmin::text FROM pg_stat_activity
 WHERE backend_xmin IS NOT NULL AND application_name LIKE 'subscriber lake%'
"""


class Oldest:
    """The age of the oldest snapshot of a load so far, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self, on: Stage) -> None:
        since: dict[tuple[int, str], float] = {}
        async with connection(on.source) as one:
            while True:
                now = monotonic()
                since = {key: since.get(key, now) for key in map(tuple, await one.fetch(_SNAPSHOTS))}
                self.seconds = max([self.seconds, *(now - began for began in since.values())])
                await anyio.sleep(SAMPLE)


@asynccontextmanager
async def writing(source: Source) -> AsyncIterator[None]:
    """Change a hundred rows a second during the block."""
    ended = anyio.Event()

    async def write() -> None:
        async with connection(source.on.source) as one:
            while not ended.is_set():
                await one.execute(_CHANGE.format(rows=source.rows))
                await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        yield
        ended.set()


async def measure_load(source: Source, spark: SparkSession, kind: str, number: int, figures: Figures) -> None:
    """Load the table into a new lake."""
    lake, log = Lake(source.on.directory / f"lake-{kind}-{number}"), ChangeLog(source.log)
    dsn, oldest = source.on.source.dsn(), Oldest()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(oldest.watch, source.on)
        with peak_memory() as peak:
            began = monotonic()
            async with writing(source):
                await load(lake, log, dsn, larger=KINDS[kind])
                loads = RangeLoads(lake, log, dsn)
                while steps := await anyio.to_thread.run_sync(loads.step, spark):
                    assert all(step.error is None for step in steps), steps
                    if any(step.waits_for is not None for step in steps):
                        await archive(source.on, source.log)
            end = await archive(source.on, source.log)
            while (found := lake.next_batch(log, end)) is not None:
                await anyio.to_thread.run_sync(partial(lake.advance, spark, log, *found, history=False))
            figures.add(f"{kind}: s", monotonic() - began)
        tasks.cancel_scope.cancel()
    figures.add(f"{kind}: oldest snapshot", oldest.seconds)
    for process, size in peak.items():
        figures.add(f"{kind}: {process} RSS MB", size / MB)
    rows = lake.table(LABEL).to_pyarrow_dataset().to_table(columns=["number"]).column("number")
    assert (len(rows), pc.sum(rows).as_py()) == await source.sums()


async def measure(rows: int, width: int, rounds: int) -> Figures:
    figures = Figures()
    async with stage() as on:
        source = Source(on, width, on.directory / "log")
        await source.fill(rows)
        with spark_session(java_options=JAVA_OPTIONS) as spark:
            for number in range(rounds):
                for kind in KINDS:
                    await measure_load(source, spark, kind, number, figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=100, help="bytes of the text of a row")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = anyio.run(measure, options.rows, options.width, options.rounds)
    if options.json:
        print(json.dumps(figures.values))
    else:
        report(figures)


if __name__ == "__main__":
    main()
