"""Iceberg tables in the catalog of a Hive metastore: that of PySpark's jars, which runs here."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pyarrow as pa
import pytest
from hive_metastore.ttypes import LockResponse, ShowLocksRequest, UnlockRequest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from subscriber.demo.processes import Process
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.lake.retention import forget_older
from subscriber.spark.scd.target import ScdTarget
from subscriber.spark.tables.hive import LakeHiveCatalog
from subscriber.spark.tables.iceberg import IcebergFormat
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.table_format import CommitConflict, NewColumn, storing
from tests.plugins.fix_cluster import Database
from tests.spark.conftest import configured
from tests.spark.hive_metastore import hive_metastore
from tests.spark.scene import NAMES, Scene, archived
from tests.spark.test_lake import advance, lake_rows, source_rows
from tests.spark.test_lake_iceberg import SCHEMA, Stored
from tests.spark.test_scd_merge import Applied, Model

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def metastore() -> Iterator[str]:
    with hive_metastore() as uri:
        yield uri


@pytest.fixture
def hive(metastore: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the catalog, which is empty."""
    options = {"LOCK_CHECK_RETRIES": "2", "HIVE__HIVE2_COMPATIBLE": "true"}  # its version is 2.3
    name = configured(monkeypatch, TYPE="hive", URI=metastore, **options)
    yield name
    catalog = load_catalog(name)
    for namespace in catalog.list_namespaces():
        for table in catalog.list_tables(namespace):
            catalog.drop_table(table)


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


def take_lock(stored: Stored) -> LockResponse:
    """Take the lock of the table, as a commit that is killed then."""
    catalog = stored.format.catalog
    assert isinstance(catalog, LakeHiveCatalog)
    with catalog._client as client:
        lock: LockResponse = client.lock(catalog._create_lock_request("public", "item"))
    return lock


def test_columns_change_places_and_types(tmp_path: Path, hive: str) -> None:
    stored = Stored(tmp_path, hive)
    stored.create()
    first = stored.open().version
    stored.open().change_columns(
        [NewColumn("small", pa.int32(), "id", None), NewColumn("id", pa.int16(), "small", None)], Lsn(2)
    )
    assert stored.rows() == [{"small": number, "id": number} for number in (1, 2)]
    stored.open().change_columns([NewColumn("id", pa.string(), "small", None)], Lsn(3))
    assert stored.rows() == [{"id": "1"}, {"id": "2"}]
    stored.create(4)  # the columns of before
    assert [row["a.b"] for row in stored.rows()] == ["b1", "b2"]
    assert stored.rows(first) == stored.rows()
    catalog = stored.format.catalog
    assert isinstance(catalog, LakeHiveCatalog)
    with catalog._client as client:
        assert [column.name for column in client.get_table("public", "item").sd.cols] == SCHEMA.names
    stored.format.remove("public.item", stored.path)
    with pytest.raises(FileNotFoundError):
        stored.open()


def test_names_that_the_metastore_does_not_distinguish_or_have(tmp_path: Path, hive: str) -> None:
    stored = Stored(tmp_path, hive)
    stored.create()
    tables = IcebergFormat(tmp_path, "one", hive)
    other, batch = tmp_path / "tables" / "Item", pa.RecordBatch.from_pylist([], schema=SCHEMA)
    for wrong in (
        lambda: tables.create("public.Item", other, SCHEMA, Lsn(1), [batch]),
        lambda: tables.open("public.Item", other),
    ):
        with pytest.raises(ApplyError, match=r"does not distinguish it from table public\.item"):
            wrong()
    tables.remove("public.Item", other)
    assert len(stored.rows()) == 2
    tables.create("public.Only", other, SCHEMA, Lsn(1), [batch])
    assert tables.open("public.Only", other).position == 1
    with pytest.raises(ApplyError, match="refuses its table: a b is not a valid object name"):
        tables.create("public.a b", tmp_path / "tables" / "a b", SCHEMA, Lsn(1), [batch])


def test_commits_exclude_each_other(tmp_path: Path, hive: str) -> None:
    stored = Stored(tmp_path, hive)
    stored.create()

    def commits(_: int) -> int:
        mine, done = Stored(tmp_path, hive), 0
        for number in range(10, 14):
            table = mine.open()
            try:
                table.commit([], [], Lsn(number))
            except (CommitConflict, OSError):
                continue
            done += 1
        return done

    before = len(stored.open().table.snapshots())
    with ThreadPoolExecutor() as threads:
        done = sum(threads.map(commits, range(2)))
    assert 4 <= done <= 8
    assert len(stored.open().table.snapshots()) == before + done
    assert len(stored.rows()) == 2


def test_a_lock_that_a_killed_commit_left_sets_no_table_aside(tmp_path: Path, hive: str) -> None:
    stored = Stored(tmp_path, hive)
    stored.create()
    table, lock = stored.open(), take_lock(stored)
    with pytest.raises(OSError, match="has a lock on the table"), storing(stored.format):
        table.commit([], [], Lsn(2))
    catalog = stored.format.catalog
    assert isinstance(catalog, LakeHiveCatalog)
    with catalog._client as client:
        client.unlock(UnlockRequest(lockid=lock.lockid))
    table.commit([], [], Lsn(2))
    assert stored.open().position == 2


def test_a_metastore_that_is_gone_sets_no_table_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path, configured(monkeypatch, TYPE="hive", URI="thrift://127.0.0.1:1"))
    with pytest.raises(OSError, match="Could not connect"), storing(stored.format):
        stored.open()


async def test_a_lake_follows(scene: Scene, tmp_path: Path, spark: SparkSession, hive: str) -> None:
    lake = Lake(tmp_path / "lake", format="iceberg", catalog=hive)
    begins = await load(lake, scene.log, scene.source.dsn())
    seen = {begins: await source_rows(scene)}
    for ddl in (
        "ALTER TABLE item ADD more int DEFAULT 7",
        "ALTER TABLE item DROP raw",
        "ALTER TABLE log ALTER writer TYPE text",
        "ALTER TABLE pair RENAME b TO c",
    ):
        await scene.source.execute(ddl)
        await scene.write(20)
        position = await scene.archive()
        await advance(lake, scene, spark, position)
        if lake.problems():  # after ALTER TYPE, PostgreSQL has written the table again
            assert list(lake.problems()) == ["public.log"]
            position = await load(lake, scene.log, scene.source.dsn(), tables=frozenset({"public.log"}))
            await advance(lake, scene, spark, await scene.archive())
        seen[position] = await source_rows(scene)
    for checked, rows in seen.items():
        assert lake_rows(Lake(tmp_path / "lake"), checked) == rows
    stored = lake.store.open("public.log")
    assert isinstance(stored, StoredIcebergTable)
    stored.table.overwrite(lake.to_arrow("public.log"))  # a compaction by another program
    await scene.write(20)
    position = await scene.archive()
    await advance(lake, scene, spark, position)
    assert lake_rows(lake) == await source_rows(scene)
    assert forget_older(lake, 0, margin=-3600).errors == {}
    assert lake_rows(lake) == await source_rows(scene)


async def test_kills_of_the_command_leave_a_table_that_follows(scene: Scene, tmp_path: Path, hive: str) -> None:
    """A kill may leave a lock in the metastore, which removes it if it is configured for that. Here, the test does."""
    where = ["load", str(tmp_path / "lake"), "--log", str(scene.log.directory), "--master", "local[2]"]
    command = [sys.executable, "-m", "subscriber", "lake", *where, "--source", scene.source.dsn()]
    process = Process("lake", [*command, "--format", "iceberg", "--catalog", hive], tmp_path)
    catalog = load_catalog(hive)
    lake, position = Lake(tmp_path / "lake"), Lsn(0)
    for number in range(5):
        await scene.write(60)
        wanted = await scene.archive()
        process.start()
        begun = tmp_path / "lake" / ("batch.json" if number else "lake.json")
        with anyio.fail_after(90):
            while process.pid is not None and not begun.exists():
                await anyio.sleep(0.05)
        await anyio.sleep(scene.chance.random() * 3)
        await process.kill9()
        with catalog._client as client:  # type: ignore[attr-defined]
            for lock in client.show_locks(ShowLocksRequest()).locks:
                client.unlock(UnlockRequest(lockid=lock.lockid))
        position = wanted
    process.start()
    assert await process.wait() == 0, process.last_lines()
    lake = Lake(tmp_path / "lake")
    assert lake.position() >= position
    assert not lake.problems()
    assert lake_rows(lake) == await source_rows(scene)
    assert sorted(catalog.list_tables("public")) == sorted(("public", name) for name in NAMES)


def test_a_target_of_apply_changes(tmp_path: Path, hive: str) -> None:
    columns = pa.schema([("k", pa.int32()), ("v", pa.string())])
    applied, model = Applied(ScdTarget("shop.items", columns, [0], history=True, catalog=hive), tmp_path), Model(3)
    for _ in range(4):
        batch = [model.change() for _ in range(10)]
        assert applied.finish(applied.start(model.number, *batch))
        assert applied.versions() == {tuple(version) for version in model.versions}
