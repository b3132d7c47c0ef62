"""The load of a table in one snapshot and by ranges of its key, while other sessions change rows.

    python -m benchmarks.lake_load [--of lake|snapshot] [--rows N] [--width BYTES] [--rounds N] [--json]

A round loads the table of benchmarks.lake in both ways: into a new lake, or into files of write_snapshot(). A session
changes a hundred rows a second meanwhile. Both lakes must have the publisher's rows at the end, and both snapshots all
rows.

    s                seconds until the table can be read; the archiver has to bring the log to that position
    oldest snapshot  seconds that a snapshot of the load kept the publisher from removing dead rows, at most
    … RSS MB         the largest resident memory of a process
"""

from __future__ import annotations

import argparse
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
from subscriber.spark.snapshot.writer import write_snapshot
from subscriber.spark.sources.table_snapshot import TableSnapshot

KINDS = {"one snapshot": None, "ranges": 0}  # `larger` of load()
SAMPLE = 0.1  # seconds between two samples of the snapshots
_CHANGE = "UPDATE items SET number = number + 1 WHERE id = 2 * floor(random() * {rows})::bigint"
# pg_stat_activity has no start of a walsender's transaction, so the samples measure the age of a snapshot.
_SNAPSHOTS = """
SELECT pid, backend_xmin::text FROM pg_stat_activity
 WHERE backend_xmin IS NOT NULL AND application_name ~ '^subscriber[ _](lake|snapshot)'
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


async def measure_snapshot(source: Source, spark: SparkSession, kind: str, number: int, figures: Figures) -> None:
    """Write the table to the files of a new snapshot."""
    directory, dsn, oldest = source.on.directory / f"snapshot-{kind}-{number}", source.on.source.dsn(), Oldest()
    by = None if KINDS[kind] is None else spark
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(oldest.watch, source.on)
        with peak_memory() as peak:
            began = monotonic()
            async with writing(source), archiving(source):
                write = partial(
                    write_snapshot, dsn, log=source.log, directory=directory, tables=[LABEL], spark=by, ranges_above=0
                )
                await anyio.to_thread.run_sync(write)
            figures.add(f"{kind}: s", monotonic() - began)
        tasks.cancel_scope.cancel()
    figures.add(f"{kind}: oldest snapshot", oldest.seconds)
    for process, size in peak.items():
        figures.add(f"{kind}: {process} RSS MB", size / MB)
    assert sum(file.rows for file in TableSnapshot.read(directory).files) == source.rows


@asynccontextmanager
async def archiving(source: Source) -> AsyncIterator[None]:
    """Have the log follow the publisher during the block."""
    ended = anyio.Event()

    async def repeat() -> None:
        while not ended.is_set():
            await archive(source.on, source.log)
            await anyio.sleep(SAMPLE)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(repeat)
        yield
        ended.set()


MEASURES = {"lake": measure_load, "snapshot": measure_snapshot}


async def measure(of: str, rows: int, width: int, rounds: int) -> Figures:
    figures = Figures()
    async with stage() as on:
        source = Source(on, width, on.directory / "log")
        await source.fill(rows)
        with spark_session(java_options=JAVA_OPTIONS) as spark:
            for number in range(rounds):
                for kind in KINDS:
                    await MEASURES[of](source, spark, kind, number, figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=MEASURES, default="lake")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=100, help="bytes of the text of a row")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = anyio.run(measure, options.of, options.rows, options.width, options.rounds)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
