"""pgcdc straight from a publisher: the query writes its log and its snapshot, without another program."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from subscriber.changelog.consumers import read_consumers, register
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.reader import ChangeLog
from subscriber.display import sql_identifier
from subscriber.errors import ChangeLogError, ConnectionLost, PublisherError, StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.spark import archiving, write_snapshot
from subscriber.spark.pgcdc import BATCH_OPTIONS, STREAM_OPTIONS, CdcQuery
from subscriber.spark.publisher_log import CLAIM, PublisherLog
from subscriber.spark.sources.table_snapshot import SnapshotRows, TableSnapshot
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_proxy import Proxies
from tests.spark.scene import ROWS, TABLES, Scene

COLUMNS = ("id", "number", "note", "big", "at", "ok", "raw")
SLOT = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'pgcdc'"


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> Scene:
    """Tables with rows, and nothing that archives their changes."""
    await source_db.execute(TABLES, ROWS, "CREATE PUBLICATION p FOR TABLE item, pair, bag")
    return Scene(source_db, tmp_path)


def options_of(scene: Scene, **more: str) -> dict[str, str]:
    own = {"conninfo": scene.source.dsn(), "publications": "p", "tables": "public.pair"}
    return {**own, "snapshot": str(scene.directory / "snapshot"), **more}


async def read(spark: SparkSession, scene: Scene, place: str, **more: str) -> list[Row]:
    def rows() -> list[Row]:
        options = options_of(scene, snapshot=f"{place}/snapshot") | more
        return spark.read.format("pgcdc").options(**options).load(f"{place}/log").orderBy("_seq").collect()

    return await anyio.to_thread.run_sync(rows)


def start(spark: SparkSession, scene: Scene, name: str, found: list[Row], **more: str) -> StreamingQuery:
    """Start a stream that adds its rows to `found`."""

    def add(rows: DataFrame, _: int) -> None:
        found.extend(rows.orderBy("_seq").collect())

    stream = spark.readStream.format("pgcdc").options(**options_of(scene, **more)).load(str(scene.directory / "log"))
    return stream.writeStream.foreachBatch(add).option("checkpointLocation", str(scene.directory / name)).start()


@asynccontextmanager
async def streaming(
    spark: SparkSession, scene: Scene, name: str, found: list[Row], **more: str
) -> AsyncIterator[StreamingQuery]:
    query = await anyio.to_thread.run_sync(lambda: start(spark, scene, name, found, **more))
    try:
        yield query
    finally:
        await anyio.to_thread.run_sync(query.stop)


async def wait_for_rows(found: list[Row], number: int) -> None:
    with anyio.fail_after(60):
        while len(found) < number:
            await anyio.sleep(0.05)


@pytest.mark.parametrize("storage", ["directory", "object store"])
async def test_a_batch_has_everything_until_now(
    scene: Scene, spark: SparkSession, objects: ObjectPath, storage: str
) -> None:
    place = str(scene.directory if storage == "directory" else objects)
    rows = await read(spark, scene, place)
    assert [row.op for row in rows] == ["r"] * 50
    await scene.source.execute("UPDATE pair SET value = -1 WHERE a = 1", "DELETE FROM pair WHERE a = 2")
    again = await read(spark, scene, place)
    assert again[:50] == rows
    assert [row.op for row in again[50:]] == ["u", "d"]
    assert (await scene.source.rows(SLOT)) == [(None,)]
    # Changes alone, and an end that the log has.
    changes = await read(spark, scene, place, snapshot="", start="earliest", end=str(await scene.position()))
    assert changes == again[50:]


async def test_limits_of_the_log(scene: Scene, objects: ObjectPath) -> None:
    """Segments that are older than keepAge are removed when the consumer has read them."""
    path = objects / "log"
    log = PublisherLog.of_options(options_of(scene, path=str(path), keepAge="0"))
    await anyio.to_thread.run_sync(log.begin)
    begin = ChangeLog(path).start()
    register(path, "reader", "test", begin)
    for _ in range(2):
        await scene.write(5)
        await anyio.to_thread.run_sync(log.catch_up)
    assert ChangeLog(path).start() == begin
    register(path, "reader", "test", ChangeLog(path).end())
    await scene.write(5)
    await anyio.to_thread.run_sync(log.catch_up)
    assert ChangeLog(path).start() > begin


async def test_a_stream_follows_its_publisher(scene: Scene, spark: SparkSession) -> None:
    collected: list[Row] = []
    async with streaming(spark, scene, "checkpoint", collected, consumer="pairs") as query:
        await wait_for_rows(collected, 50)
        await scene.source.execute("UPDATE pair SET value = -1 WHERE a = 1")
        await wait_for_rows(collected, 51)
        # The connection breaks, and the archiver continues.
        (pid,) = (await scene.source.rows(SLOT))[0]
        await scene.source.execute(f"SELECT pg_terminate_backend({pid})", "DELETE FROM pair WHERE a = 2")
        await wait_for_rows(collected, 52)
        # A second query of the log only reads.
        others: list[Row] = []
        async with streaming(spark, scene, "other", others):
            await wait_for_rows(others, 52)
            assert others == collected
            assert len(await scene.source.rows("SELECT FROM pg_replication_slots")) == 1
            # It writes the log from when the first query stops.
            await anyio.to_thread.run_sync(query.stop)
            await scene.source.execute("UPDATE pair SET value = -3 WHERE a = 3")
            await wait_for_rows(others, 53)
        progress: Any = query.lastProgress
        source = progress["sources"][0]
        reached, end = (Lsn.parse(json.loads(source[name])["lsn"]) for name in ("endOffset", "latestOffset"))
        assert collected[-1]._lsn < reached <= end
    await scene.source.wait_for(SLOT, None)
    (consumer,) = read_consumers(ChangeLog(scene.directory / "log").directory)
    assert consumer.name == "pairs"
    async with streaming(spark, scene, "checkpoint", collected, consumer="pairs"):
        await wait_for_rows(collected, 53)
    assert collected[-1] == others[-1]


async def test_a_slot_has_one_log(scene: Scene, tmp_path: Path) -> None:
    """A slot that exists may be another log's, which would lack the changes that are read from it."""

    def begin(name: str, **more: str) -> None:
        PublisherLog.of_options(options_of(scene, path=str(tmp_path / name), **more)).begin()

    # Killed after the slot was created, before the log was.
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / CLAIM).write_text("pgcdc")
    await scene.source.execute("SELECT pg_create_logical_replication_slot('pgcdc', 'pgoutput')")
    await anyio.to_thread.run_sync(begin, "log")
    with pytest.raises(
        StatementError, match=r'slot "pgcdc" exists, and the change log in ".*other" does not'
    ) as raised:
        await anyio.to_thread.run_sync(begin, "other")
    assert not (tmp_path / "other").exists()
    assert raised.value.command == "SELECT pg_drop_replication_slot('pgcdc');"
    with pytest.raises(PublisherError, match=r'of another slot or other publications\nDETAIL:  It is of slot "pgcdc"'):
        await anyio.to_thread.run_sync(partial(begin, "log", slot="s"))
    # The name of a slot that could not be created is free for other logs.
    with pytest.raises(SubscriberError, match='publication "q" does not exist'):
        await anyio.to_thread.run_sync(partial(begin, "third", slot="t", publications="q"))
    await scene.source.execute("SELECT pg_create_logical_replication_slot('t', 'pgoutput')")
    with pytest.raises(StatementError, match='slot "t" exists'):
        await anyio.to_thread.run_sync(partial(begin, "third", slot="t"))


async def test_two_queries_write_one_snapshot(scene: Scene) -> None:
    """The second one waits for the first one, and has the same rows."""
    await scene.source.execute("INSERT INTO pair SELECT i, repeat('b', 200), i FROM generate_series(1000, 100000) i")
    options = options_of(scene, path=str(scene.directory / "log"))
    PublisherLog.of_options(options).begin()
    written = list[TableSnapshot]()

    def query() -> None:
        snapshot = CdcQuery(options, BATCH_OPTIONS).snapshot
        assert snapshot is not None
        written.append(snapshot)
        assert sum(len(SnapshotRows(file, 0, file.rows).lines(snapshot.directory)) for file in snapshot.files) == 99051

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(anyio.to_thread.run_sync, query)
            await anyio.sleep(0.1)
    assert len({snapshot.position for snapshot in written}) == 1


async def test_a_lost_slot_ends_the_stream(scene: Scene, spark: SparkSession) -> None:
    collected: list[Row] = []
    async with streaming(spark, scene, "checkpoint", collected) as query:
        await wait_for_rows(collected, 50)
        await scene.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 'pgcdc'")
        is_dropped = False
        while not is_dropped:  # the archiver may be faster than the second statement
            with suppress(asyncpg.ObjectInUseError):
                await scene.source.execute(
                    "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots",
                    "SELECT pg_drop_replication_slot('pgcdc')",
                )
                is_dropped = True
        with anyio.fail_after(60):
            while query.isActive:
                await anyio.sleep(0.1)
        error = str(query.exception())
        assert re.search('slot "pgcdc" (does not exist|was dropped)', error), error


async def test_an_error_that_lasts_ends_the_stream(scene: Scene, proxies: Proxies) -> None:
    """The archiver retries it, and a query that only waits would seem to have no changes."""
    proxy = await proxies.to(scene.source.server.port)
    log = PublisherLog(proxy.dsn(scene.source.dsn()), scene.directory / "log", ["p"], patience=2.0)
    await anyio.to_thread.run_sync(log.begin)
    await anyio.to_thread.run_sync(log.follow)
    try:
        await scene.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 'pgcdc'")
        await proxy.cut()
        began, error = monotonic(), None
        with anyio.fail_after(60):
            while error is None:
                await anyio.sleep(0.05)
                try:
                    log.follow()
                except ConnectionLost as lost:
                    error = lost
        assert monotonic() - began > 2.0
        await proxy.restore()
        await scene.write(1)
        with anyio.fail_after(60):
            while error is not None:
                await anyio.sleep(0.05)
                with suppress(ConnectionLost):
                    log.follow()
                    error = None
    finally:
        await anyio.to_thread.run_sync(log.stop)
    await scene.source.wait_for(SLOT, None)


async def test_a_program_writes_the_log(scene: Scene) -> None:
    """During the block, and no longer. A query has the same slot by default, and continues the log."""

    def write() -> None:
        with archiving(scene.source.dsn(), log=scene.directory / "log", publications="p"):
            until = monotonic() + 30
            while ChangeLog(scene.directory / "log").end() < position:
                assert monotonic() < until
                sleep(0.05)

    await scene.write(5)
    position = await scene.position()
    await scene.source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
    await anyio.to_thread.run_sync(write)
    await scene.source.wait_for(SLOT, None)
    CdcQuery(options_of(scene, path=str(scene.directory / "log")), BATCH_OPTIONS)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_executors_read_a_large_table_before_the_query(scene: Scene, spark: SparkSession) -> None:
    source, log, directory = scene.source.dsn(), scene.directory / "log", scene.directory / "snapshot"

    def write() -> None:
        with archiving(source, log=log, publications="p"):
            write_snapshot(source, log=log, directory=directory, tables=["public.pair"], spark=spark, ranges_above=0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_always, scene)
        await anyio.to_thread.run_sync(write)
        tasks.cancel_scope.cancel()
    assert {file.name.partition("-")[0] for file in TableSnapshot.read(directory).files} == {"ranges"}
    rows = dict[tuple[int, str], tuple[object, ...]]()
    for change in await read(spark, scene, str(scene.directory)):
        if change.before:
            del rows[change.before.a, change.before.b]
        if change.op == "t":
            rows.clear()
        if change.after:
            rows[change.after.a, change.after.b] = tuple(change.after)
    assert Counter(rows.values()) == Counter(await scene.source.rows("SELECT * FROM pair"))


async def write_always(scene: Scene) -> None:
    while True:
        await scene.write(5)
        await anyio.sleep(0.05)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("p", ("p",)),
        (" p , Q,", ("Q", "p")),
        ('"p", "a, b","say ""x"""', ("a, b", "p", 'say "x"')),
        ('x"y, name with spaces', ("name with spaces", 'x"y')),
    ],
)
async def test_names_of_publications(source_db: Database, tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    create = [f"CREATE PUBLICATION {sql_identifier(name)}" for name in names]
    await source_db.execute("CREATE TABLE pair (a int)", *create)
    log = PublisherLog.of_options({"conninfo": source_db.dsn(), "path": str(tmp_path / "log"), "publications": text})
    await anyio.to_thread.run_sync(log.begin)
    assert ChangeLog(tmp_path / "log").identity.publications == names


def test_waits_are_printed() -> None:
    """By a process that has not configured logging."""
    program = """
from subscriber import telemetry
from subscriber.spark.publisher_log import show_waits

show_waits()
telemetry.log(telemetry.LOG, "waits", event="archive.slot_wait")
telemetry.log(telemetry.LOG, "starts", event="archive.started")
telemetry.log(telemetry.WARNING, "warns", event="publisher.notice")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "waits\nwarns\n"


async def test_options_are_checked(scene: Scene) -> None:
    path = str(scene.directory / "log")

    def query(**options: str) -> CdcQuery:
        return CdcQuery({"path": path, "tables": "public.pair"} | options, {*BATCH_OPTIONS, *STREAM_OPTIONS})

    for options, message in (
        ({"slot": "s"}, 'option "slot" of pgcdc needs the option "conninfo"'),
        ({"keepSize": "1"}, 'option "keepSize" of pgcdc needs the option "conninfo"'),
        ({"conninfo": "host=nowhere"}, 'needs the option "publications"'),
        ({"conninfo": "host=nowhere", "publications": "p", "keepAge": "-1"}, "must be a number of hours"),
    ):
        with pytest.raises(StatementError, match=message):
            query(**options)
    assert not Path(path).exists()
    with pytest.raises(ConnectionLost, match="Connection refused"):
        query(conninfo="host=127.0.0.1 port=1", publications="p")
    with pytest.raises(SubscriberError, match='publication "q" does not exist'):
        query(conninfo=scene.source.dsn(), publications="q")
    (scene.directory / "file").touch()
    with pytest.raises(ChangeLogError, match=r"could not create the change log in .*: Not a directory"):
        query(conninfo=scene.source.dsn(), publications="p", path=str(scene.directory / "file" / "log"))
    (scene.directory / "lake.json").touch()
    with pytest.raises(StatementError, match="has a lake"):
        CdcQuery({**options_of(scene), "path": str(scene.directory)}, BATCH_OPTIONS)


DRIVER = """
import sys
from subscriber.spark import apply_changes
from subscriber.spark.session import QUICK, spark_session

conninfo, directory, kind = sys.argv[1:]
with spark_session(master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2"}, java_options=QUICK) as spark:
    print("started", flush=True)
    options = {
        "conninfo": conninfo, "publications": "p", "tables": "public.item", "snapshot": f"{directory}/snapshot",
        "maxChangesPerTrigger": "60", "consumer": "items", "keepSize": "1",
    }
    stream = spark.readStream.format("pgcdc").options(**options).load(f"{directory}/log")
    apply_changes(stream, f"{directory}/items", available_now=kind == "now").awaitTermination()
"""


@contextmanager
def driver(scene: Scene, kind: str) -> Iterator[subprocess.Popen[str]]:
    """Run the query. `kind`: "now", to the present position of the publisher, or "follow", until it is killed."""
    command = [sys.executable, "-c", DRIVER, scene.source.dsn(), str(scene.directory), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_kills_of_the_driver_lose_and_repeat_no_change(scene: Scene) -> None:
    """Snapshot, log and table after kills at random moments, while an application writes."""
    chance = random.Random(5)
    for round_ in range(12):
        await scene.write(30)
        with driver(scene, "follow") as process:
            until = monotonic() + chance.uniform(0, 12)
            while monotonic() < until:
                await scene.write(1)
                await anyio.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
        if round_ % 3 == 2:
            with driver(scene, "now") as process:
                assert process.wait() == 0
            rows = DeltaTable(str(scene.directory / "items")).to_pyarrow_table().to_pylist()
            delivered = Counter(tuple(row[name] for name in COLUMNS) for row in rows)
            assert delivered == Counter(await scene.source.rows("SELECT * FROM item"))
