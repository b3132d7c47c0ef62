"""Archiver, snapshot and data sources with a change log in an object store, and without a common file system."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from deltalake import DeltaTable
from pyiceberg.utils.config import Config
from pyspark.sql import SparkSession

from subscriber.archive.worker import Archiver
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.piece_reader import read
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.writer import log_writer
from subscriber.demo.processes import Process
from subscriber.lsn import Lsn
from subscriber.spark import apply_changes, write_snapshot
from subscriber.spark.sources.table_snapshot import TableSnapshot
from subscriber.spark.tables.iceberg import configured_catalog
from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene, archived

Change = tuple[Lsn, int, object]


async def archive(scene: Scene, objects: ObjectPath) -> Lsn:
    """Have everything that is committed in the log `objects`; the position."""
    await scene.source.execute("SELECT pg_logical_emit_message(true, 'scene', '')")
    now = await scene.position()
    writer = log_writer(objects)
    await anyio.to_thread.run_sync(writer.open)
    try:
        with anyio.fail_after(60):
            await Archiver(scene.source.dsn(), "objects", ["p"], writer, now).run()
    finally:
        writer.close()
    return now


def changes(log: ChangeLog, start: Lsn, end: Lsn) -> list[Change]:
    return [
        (change.begin.final_lsn, change.number, change.message)
        for piece in log.pieces(start, end)
        for change in read(log.directory, piece)
    ]


@pytest.mark.soak
async def test_spark_reads_log_and_snapshot(
    spark: SparkSession, source_db: Database, objects: ObjectPath, tmp_path: Path
) -> None:
    async with archived(source_db, tmp_path) as scene:
        await archive(scene, objects / "log")
        start = ChangeLog(objects / "log").end()
        await scene.write(100)
        position = await anyio.to_thread.run_sync(
            lambda: write_snapshot(scene.source.dsn(), log=str(objects / "log"), directory=str(objects / "snapshot"))
        )
        await scene.write(100)
        end = await archive(scene, objects / "log")
        await scene.archive()
    log = ChangeLog(objects / "log")
    logged = changes(log, start, end)
    assert logged == changes(scene.log, start, end)

    read_changes = spark.read.format("pgchanges").options(start=str(start), end=str(end))
    stored, local = (read_changes.load(str(log.directory)) for log in (log, scene.log))
    assert stored.count() == local.count() > 100

    options = {"tables": "public.item", "snapshot": str(objects / "snapshot")}
    rows = spark.read.format("pgcdc").options(**options).load(str(objects / "log"))
    operations = {row["op"]: row["count"] for row in rows.groupBy("op").count().collect()}
    assert operations["r"] > 50
    assert operations["u"] > 0
    assert start < position < end


@pytest.mark.soak
async def test_a_snapshot_by_ranges(
    spark: SparkSession, source_db: Database, objects: ObjectPath, tmp_path: Path
) -> None:
    log, snapshot = str(objects / "log"), str(objects / "snapshot")
    async with archived(source_db, tmp_path) as scene:
        await archive(scene, objects / "log")
        async with anyio.create_task_group() as tasks:

            async def follow() -> None:
                while not done.is_set():
                    await scene.write(5)
                    await archive(scene, objects / "log")
                    await anyio.sleep(1)

            done = anyio.Event()
            tasks.start_soon(follow)
            write = partial(
                write_snapshot, scene.source.dsn(), log=log, directory=snapshot, spark=spark, ranges_above=0
            )
            await anyio.to_thread.run_sync(write)
            done.set()
        assert {file.table for file in TableSnapshot.read(snapshot).files if file.name.startswith("ranges")} == {
            "public.item",
            "public.pair",
        }
        stream = spark.readStream.format("pgcdc").options(tables="public.item", snapshot=snapshot).load(log)
        query = apply_changes(
            stream, tmp_path / "items", keys=["id"], checkpoint=tmp_path / "checkpoint", available_now=True
        )
        await anyio.to_thread.run_sync(query.awaitTermination)
        source = Counter(await scene.source.rows("SELECT id, number, note, big FROM item"))
    rows = DeltaTable(str(tmp_path / "items")).to_pyarrow_table().to_pylist()
    assert Counter(tuple(row[name] for name in ("id", "number", "note", "big")) for row in rows) == source


@pytest.mark.soak
async def test_tables_of_apply_changes(
    spark: SparkSession,
    source_db: Database,
    objects: ObjectPath,
    tmp_path: Path,
    catalog: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__WAREHOUSE", str(objects / "warehouse"))
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    log, snapshot = str(objects / "log"), str(objects / "snapshot")
    places: list[tuple[str, dict[str, Any]]] = [
        (str(objects / "items"), {}),
        ("shop.items", {"catalog": catalog}),
    ]
    async with archived(source_db, tmp_path) as scene:
        await archive(scene, objects / "log")
        await anyio.to_thread.run_sync(lambda: write_snapshot(scene.source.dsn(), log=log, directory=snapshot))
        for _ in range(2):
            await scene.write(60)
            await archive(scene, objects / "log")
            stream = spark.readStream.format("pgcdc").options(tables="public.item", snapshot=snapshot).load(log)
            for into, more in places:
                checkpoint = tmp_path / into.rpartition("/")[2]
                query = apply_changes(stream, into, keys=["id"], checkpoint=checkpoint, available_now=True, **more)
                await anyio.to_thread.run_sync(query.awaitTermination)
        source = Counter(await scene.source.rows("SELECT id, number, note, big FROM item"))
    delta = DeltaTable(str(objects / "items"), storage_options={"conditional_put": "etag"}).to_pyarrow_table()
    iceberg = configured_catalog(catalog).load_table("shop.items").scan().to_arrow()
    for rows in (delta, iceberg):
        assert (
            Counter(tuple(row[name] for name in ("id", "number", "note", "big")) for row in rows.to_pylist()) == source
        )


@pytest.mark.soak
@pytest.mark.timeout(300)  # it waits for the end of seven leases
async def test_the_archiver_is_killed(source_db: Database, objects: ObjectPath, tmp_path: Path) -> None:
    async with archived(source_db, tmp_path) as scene:
        await archive(scene, objects)
        start = ChangeLog(objects).end()
        command = [sys.executable, "-m", "subscriber", "archive", "--directory", str(objects)]
        options = ["--source", scene.source.dsn(), "--slot", "objects", "--publication", "p", "--segment-age", "1"]
        process = Process("archive", [*command, *options], tmp_path)
        for pause in (0.2, 1.1, 1.3, 2.0, 0.7, 1.0):
            process.start()
            await anyio.sleep(16)  # until the lease of the killed process has ended
            await scene.write(1000)
            await anyio.sleep(pause)
            await process.kill9()
        end = await archive(scene, objects)
        await scene.archive()
    log = ChangeLog(objects)
    assert not log.damage()
    assert changes(log, start, end) == changes(scene.log, start, end)
