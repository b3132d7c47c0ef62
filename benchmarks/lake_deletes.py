"""What files with the positions of deleted rows save a lake of Iceberg tables, and what they cost its readers.

    python -m benchmarks.lake_deletes [--rows N] [--width BYTES] [--changes N] [--rounds N] [--kinds random recent]
        [--store local|s3]

A table of N rows is loaded into two lakes, with local files or in an object store. One writes the positions of changed
rows, the other one writes each file with a changed row again (lake_deleted_percent=0). A round changes rows as
benchmarks.lake does, and both lakes apply them as one batch, in turns. Then PyIceberg reads all columns of both tables,
and the rows must be the publisher's.

    s            seconds, for 1,000 net changes
    written MB   new files below the lake, for 1,000 net changes
    received MB  what the server of the object store has counted, staged files included
    µs           processor time of the JVM and all Python processes for each change
    scan s       seconds in which PyIceberg reads the table
    deleted      deleted rows in the files, in percent of the table's rows
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from time import monotonic

import anyio
import anyio.to_thread
from pyspark.sql import SparkSession

from benchmarks.environment import stage
from benchmarks.lake import KINDS, LABEL, Figures, Source, Store, child, object_store, report
from benchmarks.process_tree import DRIVER
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import location
from subscriber.lsn import Lsn
from subscriber.settings import Settings
from subscriber.spark.changes.net_job import JAVA_OPTIONS
from subscriber.spark.environment import environment_variables
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.session import spark_session
from subscriber.spark.tables.table_format import ICEBERG

CATALOG = "benchmark{way}"
WAYS = {"positions": Settings(), "files again": Settings(lake_deleted_percent=0)}


def opened(directory: str, way: str) -> Lake:
    catalog = CATALOG.format(way=name_of(way)) if isinstance(location(directory), ObjectPath) else None
    return Lake(directory, format=ICEBERG, catalog=catalog, settings=WAYS[way])


def name_of(way: str) -> str:
    return way.replace(" ", "")


def load_lake(directory: str, way: str, log: str, source: str) -> Lsn:
    return anyio.run(load, opened(directory, way), ChangeLog(log), source)


def scan(directory: str, way: str) -> tuple[float, int, int]:
    """Read a table. Returns the seconds, the number of rows, and the sum of a column."""
    began, rows, numbers = monotonic(), 0, 0
    for batch in opened(directory, way).scan(LABEL).to_arrow_batch_reader():
        rows, numbers = rows + len(batch), numbers + sum(batch["number"].to_pylist())
    return monotonic() - began, rows, numbers


def deleted(lake: Lake, rows: int) -> float:
    """Return the deleted rows of a table, in percent of its rows."""
    stored = lake.store.open(LABEL)
    return 100 * sum(len(stored.folder.deleted(file)) for file in stored.files(None)) / rows


def catalogs(directory: Path) -> dict[str, str]:
    """Return the variables that configure PyIceberg for a catalog of each lake in the object store."""
    found = dict[str, str]()
    for name in map(name_of, WAYS):
        variable = f"PYICEBERG_CATALOG__{CATALOG.format(way=name).upper()}__"
        found |= {f"{variable}TYPE": "sql", f"{variable}URI": f"sqlite:///{directory}/{name}.db"}
    return found


async def measure(rows: int, width: int, changes: int, rounds: int, kinds: list[str], store: str) -> Figures:
    figures = Figures()
    async with stage() as on, AsyncExitStack() as stack:
        place = on.directory / "lakes"
        place.mkdir()
        stack.enter_context(environment_variables(catalogs(place)))  # before PyIceberg is imported
        of_all = Store("local", place) if store == "local" else await stack.enter_async_context(object_store(place))
        source = Source(on, width, on.directory / "log")
        await source.fill(rows)
        directories = {way: of_all.root / name_of(way) for way in WAYS}
        with child() as process:
            for way, directory in directories.items():
                arguments = str(directory), way, str(source.log), on.source.dsn()
                position = await anyio.to_thread.run_sync(process.submit(load_lake, *arguments).result)
        lakes = {way: opened(str(directory), way) for way, directory in directories.items()}
        with spark_session(java_options=JAVA_OPTIONS) as spark, child() as process:
            for number in range(rounds):
                for kind in kinds:
                    end = await source.change(changes, KINDS[kind])
                    expected = await source.sums()
                    ways = list(WAYS) if number % 2 else list(reversed(WAYS))
                    for way in ways:
                        name = f"{kind}, {way}"
                        one = partial(_apply, spark, of_all, lakes[way], source, position, end, name, figures)
                        await anyio.to_thread.run_sync(one)
                    for way in ways:
                        read = process.submit(scan, str(directories[way]), way)
                        seconds, *found = await anyio.to_thread.run_sync(read.result)
                        assert tuple(found) == expected
                        figures.add(f"{kind}, {way}, scan s", seconds)
                    figures.add(f"{kind}, deleted", deleted(lakes["positions"], expected[0]))
                    position = end
    return figures


def _apply(
    spark: SparkSession, store: Store, lake: Lake, source: Source, start: Lsn, end: Lsn, name: str, figures: Figures
) -> None:
    log = ChangeLog(source.log)
    options = {"tables": LABEL, "start": str(start), "end": str(end)}
    changed = spark.read.format("pgcdc").options(**options).load(str(source.log))
    net = changed.selectExpr("coalesce(after.id, before.id) AS id").distinct().count()
    with figures.batch(name, store, lake.directory, net, DRIVER):
        done = lake.advance(spark, log, start, end, history=False)
    assert not done.problems, done.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=100, help="bytes of the text of a row")
    parser.add_argument("--changes", type=int, default=10_000, help="of a batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = anyio.run(
        measure, options.rows, options.width, options.changes, options.rounds, options.kinds, options.store
    )
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
