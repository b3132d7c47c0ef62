"""A lake in an object store, with a log in one: nothing of it is in a file system."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import local_file
from subscriber.demo.processes import Process
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import BATCH_FILE, Lake
from subscriber.spark.lake.lake_merge import LakeMerge
from subscriber.spark.lake.lake_table import LakeTable, claim_json
from subscriber.spark.lake.load import load
from subscriber.spark.lake.load_ranges import RangeLimits, RangeLoads
from subscriber.spark.lake.retention import forget_older
from tests.plugins.fix_cluster import Database
from tests.spark.scene import NAMES, POSITIONS, Scene, archived
from tests.spark.test_lake import lake_rows, source_rows
from tests.spark.test_object_store import archive

pytestmark = pytest.mark.soak


class Interrupted(Exception):
    pass


@pytest.fixture
async def scene(source_db: Database, objects: ObjectPath, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        await archive(scene, objects / "log")
        yield scene


def names(objects: ObjectPath) -> set[str]:
    return {stored.path.key.removeprefix(f"{objects.key}/").split("/")[0] for stored in objects.objects()}


async def test_the_lake_follows_and_survives_interruptions_and_maintenance(
    scene: Scene, objects: ObjectPath, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, log = Lake(str(objects / "lake")), ChangeLog(objects / "log")
    await scene.write(30)
    await archive(scene, objects / "log")
    begins = await load(lake, log, scene.source.dsn())
    seen = {begins: await source_rows(scene)}
    bring, done = LakeMerge._commit, list[str]()

    def ends(self: LakeMerge, state: LakeTable, *rest: Any) -> bool:
        brought = bring(self, state, *rest)
        done.append(state.label)
        if len(done) % 5 == 2:  # a batch has four tables
            raise Interrupted
        return brought

    with monkeypatch.context() as patch:
        patch.setattr(LakeMerge, "_commit", ends)
        for _ in range(4):
            await scene.write(60)
            position = await archive(scene, objects / "log")
            seen[position] = await source_rows(scene)
            while (batch := lake.next_batch(log, position)) is not None:
                try:
                    await anyio.to_thread.run_sync(lake.advance, spark, log, *batch)
                except Interrupted:
                    continue
    assert len(done) > 10
    for checked, rows in seen.items():
        assert lake_rows(lake, checked) == rows

    for label in lake.tables():
        table = lake.table(label)
        table.optimize.compact()
        table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert lake_rows(lake) == rows
    with pytest.raises((StatementError, FileNotFoundError)):
        lake_rows(lake, begins)
    await scene.write(60)
    position = await archive(scene, objects / "log")
    lake.advance(spark, log, *(lake.next_batch(log, position) or ()))
    assert lake_rows(lake) == await source_rows(scene)
    assert names(objects / "lake") == {"lake.json", "history", "tables", "states", "versions", "boundaries"}

    history = [entry.path for entry in (objects / "lake" / "history").objects()]
    logged = spark.read.format("pgchanges").options(start=str(begins)).load(str(objects / "log"))
    stored = Counter[str]()
    for path in history:
        schema, name = path.key.split("/")[-3:-1]
        stored[f"{schema.removeprefix('schema=')}.{name.removeprefix('table=')}"] += stored_rows(path)
    expected = Counter({f"public.{name}": logged.where(f"`table` = '{name}'").count() for name in NAMES})
    assert {name: stored[name] for name in expected} == expected

    positions = lake.boundaries()
    forgotten = forget_older(lake, 0, margin=0)
    assert (forgotten.positions, forgotten.errors) == (len(positions) - 1, {})
    assert forgotten.files > 0
    assert lake.boundaries() == positions[-1:]
    assert lake_rows(lake) == await source_rows(scene)
    assert names(objects / "lake") == {"lake.json", "tables", "states", "versions", "boundaries"}


def stored_rows(path: ObjectPath) -> int:
    """Return the number of rows of a Parquet file."""
    with local_file(path) as local:
        rows: int = pq.read_metadata(local).num_rows
    return rows


@pytest.mark.parametrize("kind", ["catalog", "rest_catalog"])
async def test_iceberg_tables_and_a_catalog_of_ones_own(
    scene: Scene, objects: ObjectPath, spark: SparkSession, request: pytest.FixtureRequest, kind: str
) -> None:
    catalog = request.getfixturevalue(kind)
    lake, log = (
        Lake(objects / "lake", format="iceberg", catalog=catalog, settings=POSITIONS),
        ChangeLog(objects / "log"),
    )
    begins = await load(lake, log, scene.source.dsn())
    seen = {begins: await source_rows(scene)}
    for _ in range(3):
        await scene.write(60)
        position = await archive(scene, objects / "log")
        seen[position] = await source_rows(scene)
        while (batch := lake.next_batch(log, position)) is not None:
            await anyio.to_thread.run_sync(lake.advance, spark, log, *batch)
    for checked, rows in seen.items():
        assert lake_rows(Lake(objects / "lake"), checked) == rows
    # A table is loaded again by ranges.
    await load(lake, log, scene.source.dsn(), tables=frozenset({"public.item"}), larger=0)
    loads = RangeLoads(lake, log, scene.source.dsn(), RangeLimits(rows=40, most=40))
    while steps := await anyio.to_thread.run_sync(loads.step, spark):
        assert steps[0].error is None
        await scene.write(10)
        position = await archive(scene, objects / "log")
    rows = await source_rows(scene)
    while (batch := lake.next_batch(log, position)) is not None:
        await anyio.to_thread.run_sync(lake.advance, spark, log, *batch)
    assert not lake.problems()
    assert lake_rows(lake) == rows
    assert forget_older(lake, 0, margin=-3600).errors == {}
    assert lake_rows(lake) == rows


@pytest.mark.timeout(400)
async def test_commands_are_killed_and_two_of_them_exclude_each_other(
    scene: Scene, objects: ObjectPath, tmp_path: Path
) -> None:
    where = [str(objects / "lake"), "--log", str(objects / "log"), "--master", "local[2,4]"]
    where += ["--source", scene.source.dsn()]
    command = [sys.executable, "-m", "subscriber", "lake"]
    load = Process("load", [*command, "load", *where], tmp_path)
    first = Process("first", [*command, "follow", *where, "--batch", "200"], tmp_path)
    second = Process("second", [*command, "advance", *where], tmp_path)
    lake = Lake(objects / "lake")
    load.start()
    assert await load.wait() == 0, load.last_lines()
    rows, position = await source_rows(scene), lake.position()
    await scene.write(10)
    await archive(scene, objects / "log")
    for round_ in range(4):
        first.start()
        with anyio.fail_after(90):
            while lake.position() <= position:
                assert first.pid is not None, first.last_lines()
                await anyio.sleep(0.2)
        if round_ == 0:
            second.start()
            assert await second.wait() == 3
            assert f'another process writes the lake in "{objects / "lake"}"' in second.last_lines()
            assert "Stop the other `subscriber lake`" in second.last_lines()
        position = lake.position()
        await scene.write(400)
        rows = await source_rows(scene)
        end = await archive(scene, objects / "log")
        with anyio.fail_after(60):
            while lake.position() <= position:
                assert first.pid is not None, first.last_lines()
                await anyio.sleep(0.05)
        await first.kill9()  # in the middle of the batches
        position = lake.position()
    second.start()  # waits for the end of the lease
    assert await second.wait() == 0, second.last_lines()
    assert lake_rows(lake, end) == rows
    assert lake.position() >= end


async def test_a_batch_of_a_process_that_has_lost_the_lease(
    scene: Scene, objects: ObjectPath, spark: SparkSession
) -> None:
    """Both have planned their batch at the same position. The second one changes nothing."""
    lake, log = Lake(objects / "lake"), ChangeLog(objects / "log")
    await load(lake, log, scene.source.dsn())
    start = lake.position()
    first, second = [await after_writes(scene, objects) for _ in range(2)]
    claim_json(objects / "lake" / BATCH_FILE, {"start": str(start), "end": str(second)})
    with pytest.raises(FileExistsError):
        lake.advance(spark, log, start, first)
    assert lake.next_batch(log, first) == (start, second)
    lake.advance(spark, log, start, second)
    assert lake_rows(lake) == await source_rows(scene)


async def after_writes(scene: Scene, objects: ObjectPath) -> Lsn:
    await scene.write(20)
    return await archive(scene, objects / "log")


async def test_names_that_need_an_escape(
    source_db: Database, objects: ObjectPath, spark: SparkSession, tmp_path: Path
) -> None:
    name = 'odd/na me%2F".ö'
    quoted = '"' + name.replace('"', '""') + '"'
    await source_db.execute(
        f"CREATE TABLE {quoted} (id int PRIMARY KEY, b text)", f"CREATE PUBLICATION p FOR TABLE {quoted}"
    )
    scene = Scene(source_db, tmp_path)
    await archive(scene, objects / "log")
    lake, log = Lake(objects / "lake"), ChangeLog(objects / "log")
    await load(lake, log, source_db.dsn())
    await source_db.execute(f"INSERT INTO {quoted} VALUES (1, 'x')")
    end = await archive(scene, objects / "log")
    lake.advance(spark, log, *(lake.next_batch(log, end) or ()))
    assert lake.table(f"public.{name}").to_pyarrow_table().to_pylist() == [{"id": 1, "b": "x"}]
    (uri,) = lake.table(f"public.{name}").file_uris()
    assert DeltaTable(uri.rpartition("/")[0]).version() == lake.table(f"public.{name}").version()
    assert any(f"table={quote(name, safe=' ')}" in stored.path.key for stored in (objects / "lake").objects())
