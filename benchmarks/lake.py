"""What a lake costs: time, bytes and memory for 1,000 net changes, and the time from a commit to the lake.

    python -m benchmarks.lake [--rows N] [--width BYTES] [--changes N] [--rounds N] [--stores local s3] [--json]
    python -m benchmarks.lake --cluster --rows 10000000 --width 1000

A table of N rows is loaded into a lake in each store. A round changes rows, 70 % updates, 15 % inserts and 15 %
deletes: first at random keys, then at the newest 2 % of the keys. The lake applies them as one batch. Then the body of
a plain foreachBatch merges them into another Delta table: Spark reads them with pgcdc and chooses the last change of
each key, and delta-rs merges these from the driver. That is the substitute for MERGE of Delta's Java library, which the
package registry of Python does not have. Both tables must have the publisher's rows at the end.

    s            seconds
    written MB   new files below the lake or the table
    received MB  what the server of the object store has counted, staged files included
    µs           processor time of the JVM and all Python processes for each change
    … RSS MB     the largest resident memory of a process

The first three are for 1,000 net changes. JSON means that Spark parses the same changes from Debezium-like JSON, which
a file has, with from_json(). `visible` is the time from the answer to a COMMIT of one row until it is in the table:
with `subscriber archive` and `subscriber lake follow` as processes, and with a streaming query and the foreachBatch.

With --cluster, Spark is a standalone cluster of two workers, the driver's heap is 512 MB, all files are in the object
store, and only the lake is measured. In each batch an executor is killed when it has begun to write new files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from urllib.request import urlopen

import anyio
import anyio.to_thread
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.environment import Stage, connection, execute, stage
from benchmarks.process_tree import CHILD, DRIVER, peak_memory, spark_seconds
from benchmarks.spark_sources import archive, debezium, noop
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location, location
from subscriber.demo.object_store import BUCKET, ObjectStore
from subscriber.demo.processes import Process
from subscriber.demo.spark_cluster import executors, standalone
from subscriber.lsn import Lsn
from subscriber.spark.changes.net_job import JAVA_OPTIONS
from subscriber.spark.environment import environment_variables
from subscriber.spark.java_runtime import java_home
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.session import spark_session

LABEL = "public.items"
TABLE = "CREATE TABLE items (id bigint PRIMARY KEY, number integer, amount numeric(12,2), at timestamptz, payload text)"
# Half of the keys are free for inserts. The text does not compress well.
ROW = """
SELECT {id}, i % 1000, (i % 100000) / 100.0, '2020-01-01'::timestamptz + i * interval '1 second',
       (SELECT left(string_agg(md5(i || '-' || j), ''), {width}) FROM generate_series(1, {width} / 32 + 1) j)
"""
KINDS = {"random": 1.0, "recent": 0.02}  # the part of the keys, from the newest on
UPDATES, OTHERS = 0.7, 0.15
MB = 1e6
COMMITS = 5  # that are waited for
POLL = 0.02  # seconds
TIMEOUT = 120.0  # seconds for a commit to be visible
OPTIONS = {"conditional_put": "etag", "timeout": "60s"}  # of delta-rs, as the lake has them
RECEIVED = "SeaweedFS_s3_bucket_traffic_received_bytes_total"


# --- the publisher ------------------------------------------------------------------------------


@dataclass
class Source:
    """The publisher's table, and its change log."""

    on: Stage
    width: int
    log: Location
    rows: int = 0

    async def fill(self, rows: int) -> None:
        await execute(self.on.source, TABLE)
        row = ROW.format(id="2 * i", width=self.width)
        for first in range(1, rows + 1, 500_000):
            last = min(rows, first + 499_999)
            await execute(self.on.source, f"INSERT INTO items {row} FROM generate_series({first}, {last}) i")
        await execute(self.on.source, "VACUUM ANALYZE items", "CREATE PUBLICATION p FOR ALL TABLES")
        await archive(self.on, self.log)  # the log begins here
        self.rows = rows

    async def change(self, changes: int, part: float) -> Lsn:
        """Change rows of a part of the keys in three transactions, and archive them. Returns the position."""
        span = int(self.rows * part)
        keys = "SELECT DISTINCT 2 * ({first} + floor(random() * {span}))::bigint{odd} FROM generate_series(1, {n})"
        chosen = partial(keys.format, first=self.rows - span + 1, span=span)
        updated, others = round(changes * UPDATES), round(changes * OTHERS)
        row = ROW.format(id="i", width=self.width)
        await execute(
            self.on.source,
            f"UPDATE items SET number = number + 1, amount = 0 WHERE id IN ({chosen(n=updated, odd='')})",
            f"DELETE FROM items WHERE id IN ({chosen(n=others, odd='')})",
            f"INSERT INTO items {row} FROM ({chosen(n=others, odd=' - 1')}) AS new (i) ON CONFLICT DO NOTHING",
        )
        return await archive(self.on, self.log)

    async def sums(self) -> tuple[int, int]:
        async with connection(self.on.source) as one:
            query = "SELECT count(*), sum(number) FROM items"
            ((count, numbers),) = await one.fetch(query, timeout=None)
            return count, numbers


# --- stores -------------------------------------------------------------------------------------


@dataclass
class Store:
    """A place for tables. `metrics` is the address of the server's counters; None: it has none."""

    name: str
    root: Location
    metrics: str | None = None

    def files(self, path: Location) -> dict[str, int]:
        """Return the sizes of the files below a path."""
        if isinstance(path, ObjectPath):
            return {str(found.path): found.size for found in path.objects()}
        return {str(file): file.stat().st_size for file in path.rglob("*") if file.is_file()}

    def received(self) -> float:
        """Return the bytes that the server has received; 0 without one."""
        if self.metrics is None:
            return 0.0
        with urlopen(self.metrics) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RECEIVED))


@asynccontextmanager
async def object_store(directory: Path) -> AsyncIterator[Store]:
    """Start a server of object storage. Its clients' variables are in the environment during the block."""
    server = ObjectStore()
    place = directory / "objects"
    place.mkdir()
    process = Process("store", server.command(place, volumes=1000), directory)
    with environment_variables(server.environment()):
        process.start()
        try:
            await anyio.to_thread.run_sync(server.wait, lambda: process.pid is not None, lambda: process.last_lines(50))
            yield Store("s3", location(f"s3://{BUCKET}/benchmark"), server.metrics)
        finally:
            await process.stop()


# --- what is measured ---------------------------------------------------------------------------


@dataclass
class Figures:
    """All figures, by their names: of each round one value.

    `has_kills`: the processor time of killed processes is lost, so none is measured.
    """

    has_kills: bool = False
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        print(f"{name}: {value:.3f}", file=sys.stderr, flush=True)
        self.values.setdefault(name, []).append(value)

    @contextmanager
    def batch(self, name: str, store: Store, path: Location, net: int, driver: str) -> Iterator[None]:
        """Measure the block, which applies `net` changes to what is below a path. `driver` is the kind of process."""
        before, received, cpu, began = store.files(path), store.received(), spark_seconds(), monotonic()
        with peak_memory() as peaks:
            yield
        seconds = monotonic() - began
        self.add(f"{name}, s", seconds / net * 1000)
        if not self.has_kills:
            self.add(f"{name}, µs", (spark_seconds() - cpu) / net * 1e6)
        files = store.files(path)
        new = [size for file, size in files.items() if before.get(file) != size]
        self.add(f"{name}, written MB", sum(new) / net * 1000 / MB)
        if store.metrics is not None:
            self.add(f"{name}, received MB", (store.received() - received) / net * 1000 / MB)
        for kind, peak in sorted(peaks.items()):
            if kind not in {DRIVER, CHILD} - {driver}:
                self.add(f"{name}, {kind} RSS MB", peak / MB)


def newest(changes: DataFrame) -> DataFrame:
    """Return the last change of each key, as a plain foreachBatch chooses it."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    key = f.coalesce("after.id", "before.id")
    order = Window.partitionBy("key").orderBy(f.desc("_seq"))
    ranked = changes.withColumn("key", key).withColumn("place", f.row_number().over(order))
    return ranked.where("place = 1").select("key", "op", "after.*")


def merge(batch: DataFrame, table: str) -> None:
    """Merge a micro-batch into a Delta table: the body of a plain foreachBatch."""
    merge_rows(newest(batch).toArrow(), table)


def merge_rows(rows: pa.Table, table: str) -> None:
    merging = DeltaTable(table, storage_options=OPTIONS).merge(
        rows, "target.id = source.key", source_alias="source", target_alias="target"
    )
    names = ("id", "number", "amount", "at", "payload")
    values = {name: f"source.{name}" for name in names}
    merging = merging.when_matched_delete(predicate="source.op = 'd'")
    merging = merging.when_matched_update(values, predicate="source.op <> 'd'")
    merging.when_not_matched_insert(values, predicate="source.op <> 'd'").execute()


def child() -> ProcessPoolExecutor:
    """Return a process of its own for work of the driver, so that its memory does not count for what follows."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def load_lake(directory: str, log: str, source: str) -> Lsn:
    return anyio.run(load, Lake(directory), ChangeLog(log), source)


def copy_table(source: str, target: str) -> None:
    rows = DeltaTable(source, storage_options=OPTIONS).to_pyarrow_dataset()
    reader = pa.RecordBatchReader.from_batches(rows.schema, rows.to_batches())
    write_deltalake(target, reader, storage_options=OPTIONS)


class Tables:
    """A lake, and a table of the foreachBatch, in one store."""

    def __init__(self, store: Store, log: ChangeLog) -> None:
        self.store = store
        self.log = log
        self.lake = Lake(store.root / "lake")
        self.plain = store.root / "plain"
        self.position = Lsn(0)
        self._merging = child()

    async def load(self, source: Source, figures: Figures, *, with_plain: bool) -> None:
        name, began = f"{self.store.name} load", monotonic()
        with child() as process:
            arguments = str(self.lake.directory), str(self.log.directory), source.on.source.dsn()
            with peak_memory() as peaks:
                self.position = await anyio.to_thread.run_sync(process.submit(load_lake, *arguments).result)
            figures.add(f"{name}, s", monotonic() - began)
            figures.add(f"{name}, {CHILD} RSS MB", peaks[CHILD] / MB)
            if with_plain:
                copied = process.submit(copy_table, str(self.lake.store.path(LABEL)), str(self.plain))
                await anyio.to_thread.run_sync(copied.result)

    def apply(self, spark: SparkSession, end: Lsn, name: str, figures: Figures, net: int) -> None:
        """Apply the changes up to a position to the lake."""
        with figures.batch(f"{name}, lake", self.store, self.lake.directory, net, DRIVER):
            done = self.lake.advance(spark, self.log, self.position, end)
        assert not done.problems, done.problems

    def merge(self, spark: SparkSession, end: Lsn, name: str, figures: Figures, net: int) -> None:
        """Merge the same changes into the other table."""
        with figures.batch(f"{name}, foreachBatch", self.store, self.plain, net, CHILD):
            self._merging.submit(merge_rows, newest(self.changes(spark, end)).toArrow(), str(self.plain)).result()

    def changes(self, spark: SparkSession, end: Lsn, mode: str = "cdc") -> DataFrame:
        options = {"tables": LABEL, "start": str(self.position), "end": str(end), "mode": mode}
        return spark.read.format("pgcdc").options(**options).load(str(self.log.directory))

    def sums(self, path: Location) -> tuple[int, int]:
        """Return the number of rows, and the sum of a column."""
        numbers = (
            DeltaTable(str(path), storage_options=OPTIONS).to_pyarrow_dataset().to_table(columns=["number"])["number"]
        )
        return len(numbers), pc.sum(numbers).as_py()


# --- from a commit to the table -----------------------------------------------------------------


class Visible:
    """Programs that follow the publisher, and the time until their table has a commit."""

    def __init__(self, source: Source, tables: Tables) -> None:
        self.source = source
        self.tables = tables
        command, log, dsn = [sys.executable, "-m", "subscriber"], str(source.log), source.on.source.dsn()
        archiver = ["archive", "--directory", log, "--publication", "p", "--source", dsn]
        lake = ["lake", "follow", str(tables.lake.directory), "--log", log]
        self.archiver = Process("archive", [*command, *archiver], source.on.directory)
        self.follower = Process("lake", [*command, *lake], source.on.directory)

    async def measure(self, spark: SparkSession, figures: Figures) -> None:
        """Measure both, one after the other."""
        name = f"{self.tables.store.name} visible"
        self.archiver.start()
        try:
            self.follower.start()
            try:
                await self._commits(f"{name}, lake, s", self.tables.lake.store.path(LABEL), figures)
            finally:
                await self.follower.stop()
            running = await anyio.to_thread.run_sync(self._stream, spark)
            try:
                await self._commits(f"{name}, foreachBatch, s", self.tables.plain, figures)
            finally:
                await anyio.to_thread.run_sync(running.stop)
        finally:
            await self.archiver.stop()

    def _stream(self, spark: SparkSession) -> StreamingQuery:
        options = {"tables": LABEL, "start": str(self.tables.position)}
        changes = spark.readStream.format("pgcdc").options(**options).load(str(self.source.log))
        writer = changes.writeStream.foreachBatch(lambda batch, _: merge(batch, str(self.tables.plain)))
        checkpoint = self.source.on.directory / f"checkpoint-{self.tables.store.name}"
        return writer.option("checkpointLocation", str(checkpoint)).start()

    async def _commits(self, name: str, path: Location, figures: Figures) -> None:
        update = "UPDATE items SET number = number + 1 WHERE id = (SELECT max(id) FROM items) RETURNING id, number"
        for commit in range(COMMITS + 1):
            async with connection(self.source.on.source) as one:
                ((key, number),) = await one.fetch(update)
            began = monotonic()
            with anyio.fail_after(TIMEOUT):
                await anyio.to_thread.run_sync(_wait_for, path, key, number, abandon_on_cancel=True)
            if commit:  # the program starts during the first one
                figures.add(name, monotonic() - began)


def _wait_for(path: Location, key: int, number: int) -> None:
    seen = -1
    while True:
        table = DeltaTable(str(path), storage_options=OPTIONS)
        if table.version() != seen:
            seen = table.version()
            rows = table.to_pyarrow_dataset().to_table(columns=["number"], filter=pc.field("id") == key)
            if rows["number"].to_pylist() == [number]:
                return
        sleep(POLL)


# --- runs ---------------------------------------------------------------------------------------


async def measure(rows: int, width: int, changes: int, rounds: int, stores: list[str]) -> Figures:
    """Measure lakes and foreachBatch on this machine."""
    figures = Figures()
    async with stage() as on, AsyncExitStack() as stack:
        source = Source(on, width, on.directory / "log")
        await source.fill(rows)
        found = []
        for name in stores:
            place = on.directory / name
            place.mkdir()
            opened = Store(name, place) if name == "local" else await stack.enter_async_context(object_store(place))
            found.append(Tables(opened, ChangeLog(source.log)))
            await found[-1].load(source, figures, with_plain=True)
        with spark_session(java_options=JAVA_OPTIONS) as spark:
            for number in range(rounds):
                for kind, part in KINDS.items():
                    end = await source.change(changes, part)
                    await anyio.to_thread.run_sync(_one_round, spark, found, end, kind, number, on.directory, figures)
            expected = await source.sums()
            for tables in found:
                assert tables.sums(tables.lake.store.path(LABEL)) == expected
                assert tables.sums(tables.plain) == expected
            for tables in found:
                await Visible(source, tables).measure(spark, figures)
    return figures


def _one_round(
    spark: SparkSession, found: list[Tables], end: Lsn, kind: str, number: int, directory: Path, figures: Figures
) -> None:
    net = newest(found[0].changes(spark, end)).count()
    for tables in found:
        ways = [tables.apply, tables.merge]
        for way in ways if number % 2 else reversed(ways):
            way(spark, end, f"{tables.store.name} {kind}", figures, net)
    json_lines = directory / "json" / f"{kind}-{number}"
    parse = debezium(spark, found[0].changes(spark, end, mode="debezium"), json_lines)
    before = spark_seconds()
    noop(parse())
    figures.add(f"{kind}, JSON parsed, µs", (spark_seconds() - before) / net * 1e6)
    for tables in found:
        tables.position = end


async def measure_cluster(rows: int, width: int, changes: int, rounds: int) -> Figures:
    """Measure a lake whose files are written by a cluster that has nothing in common with the driver but the store."""
    figures = Figures(has_kills=True)
    async with stage() as on, AsyncExitStack() as stack:
        place = on.directory / "s3"
        place.mkdir()
        store = await stack.enter_async_context(object_store(place))
        variables = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        stack.enter_context(environment_variables({"JAVA_HOME": str(java_home(place)), **variables}))
        master = await stack.enter_async_context(standalone(on.directory))
        source = Source(on, width, store.root / "log")
        await source.fill(rows)
        tables = Tables(store, ChangeLog(source.log))
        await tables.load(source, figures, with_plain=False)
        conf = {"spark.driver.memory": "512m"}
        with spark_session(master=master, conf=conf, java_options=JAVA_OPTIONS) as spark:
            for _ in range(rounds):
                for kind, part in KINDS.items():
                    end = await source.change(changes, part)
                    await anyio.to_thread.run_sync(_on_cluster, spark, tables, on.directory, end, kind, figures)
        assert tables.sums(tables.lake.store.path(LABEL)) == await source.sums()
    return figures


def _on_cluster(spark: SparkSession, tables: Tables, directory: Path, end: Lsn, kind: str, figures: Figures) -> None:
    net = newest(tables.changes(spark, end)).count()
    ended = threading.Event()
    killer = threading.Thread(target=_kill_an_executor, args=(tables, directory, ended))
    killer.start()
    try:
        tables.apply(spark, end, f"cluster {kind}", figures, net)
    finally:
        ended.set()
        killer.join()
    tables.position = end


def _kill_an_executor(tables: Tables, directory: Path, ended: threading.Event) -> None:
    """Kill an executor when the first new file of the table is there. Its tasks are in the middle of the merge."""
    path = tables.lake.store.path(LABEL)
    before = tables.store.files(path).keys()
    while not ended.is_set():
        if tables.store.files(path).keys() - before:
            pid = executors(directory)[0]
            os.kill(pid, signal.SIGKILL)
            print(f"killed executor {pid}", file=sys.stderr, flush=True)
            return
        sleep(POLL)


def report(figures: Figures, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures.values))
        return
    for name, values in figures.values.items():
        print(f"{name:52} {median(values):10.3f}   {[round(value, 3) for value in values]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=100, help="bytes of the text of a row")
    parser.add_argument("--changes", type=int, default=10_000, help="of a batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stores", nargs="+", choices=("local", "s3"), default=["local", "s3"])
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arguments = options.rows, options.width, options.changes, options.rounds
    if options.cluster:
        figures = anyio.run(measure_cluster, *arguments)
    else:
        figures = anyio.run(measure, *arguments, options.stores)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
