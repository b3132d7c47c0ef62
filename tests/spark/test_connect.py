"""pgcdc, apply_changes() and a lake in a session of Spark Connect, which has no SparkContext."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from subscriber.demo.object_store import free_ports
from subscriber.spark.class_archive import spark_directory
from subscriber.spark.java_runtime import java_home
from subscriber.spark.lake.lake import Lake
from subscriber.spark.tables.table_format import FORMATS
from tests.archive.test_worker import archiving
from tests.plugins.fix_cluster import Database
from tests.spark.scene import NAMES, Scene, archived
from tests.spark.test_scd import COLUMNS, take_snapshot, write

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("grpc") is None, reason="pyspark[connect] is not installed"),
]

LAKE = [sys.executable, "-m", "subscriber", "lake"]
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
DRIVER = """
import sys
from pyspark.sql import SparkSession
from subscriber.spark import apply_changes, prepare_environment

log, snapshot, into = sys.argv[1:]
prepare_environment()
spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
assert "connect" in type(spark).__module__
for place, more in ((f"{into}/delta", {}), ("shop.items", {"catalog": "shop", "checkpoint": f"{into}/iceberg"})):
    stream = spark.readStream.format("pgcdc").options(tables="public.item", snapshot=snapshot).load(log)
    apply_changes(stream, place, keys=["id"], available_now=True, **more).awaitTermination()
spark.stop()
"""


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


async def test_tables_follow_their_source(scene: Scene, catalog: str, tmp_path: Path) -> None:
    await take_snapshot(scene)
    command = [sys.executable, "-c", DRIVER, str(scene.log.directory), str(scene.directory / "snapshot"), str(tmp_path)]
    for _ in range(2):
        await write(scene, 40)
        await scene.archive()
        await anyio.to_thread.run_sync(lambda: subprocess.run(command, check=True, timeout=300))
        source = Counter(await scene.source.rows("SELECT * FROM item"))
        delta = DeltaTable(tmp_path / "delta").to_pyarrow_table()
        iceberg = load_catalog(catalog).load_table("shop.items").scan().to_arrow()
        for rows in (delta, iceberg):
            assert Counter(tuple(row[name] for name in COLUMNS) for row in rows.to_pylist()) == source


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server of Spark Connect. Returns its address."""
    directory, port = tmp_path_factory.mktemp("connect"), free_ports(1)[0]
    spark = spark_directory()
    assert spark is not None
    variables = {"SPARK_HOME": str(spark), "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(java_home(directory))}
    options = ["--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.ui.enabled=false"]
    command = [
        str(spark / "bin" / "spark-submit"),
        "--master",
        "local[2]",
        *options,
        "--class",
        SERVER,
        "spark-internal",
    ]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while "Spark Connect server started" not in (directory / "log").read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_lake_follows_its_source(scene: Scene, tmp_path: Path, server: str, format: str) -> None:
    """Two tables are loaded by ranges. Three batches have inserts, moves of keys, truncates and deletes."""
    lake, source = Lake(tmp_path / "lake"), ["--source", scene.source.dsn(), "--ranges-above", "0"]
    where = [str(lake.directory), "--log", str(scene.log.directory)]
    for number in range(3):
        await scene.write(200)
        await scene.source.execute(f"UPDATE item SET id = -id - {number}000 WHERE id > 0", "TRUNCATE log")
        if number == 2:
            await scene.source.execute("TRUNCATE pair", "INSERT INTO pair VALUES (1, 'x', 1)")
        async with archiving(scene.source, scene.directory / "log"):
            # The first run ends at the end of the log. Tables that are loaded by ranges may be ahead.
            for _ in range(2):
                verb = ["advance"] if number else ["load", "--format", format]
                run = [*LAKE, *verb, *where, *source, "--master", server]
                await anyio.run_process(run, stdout=None, stderr=None)
        lake = Lake(tmp_path / "lake")
        for table in NAMES:
            rows = lake.to_arrow(f"public.{table}").to_pylist()
            names = lake.store.states()[f"public.{table}"].names()
            followed = Counter(tuple(row[name] for name in names) for row in rows)
            assert followed == Counter(await scene.source.rows(f"SELECT * FROM {table}"))


async def test_a_server_that_does_not_answer(scene: Scene, tmp_path: Path) -> None:
    """Neither does an address that is not one. A token in it is not shown."""
    where = ["load", str(tmp_path / "lake"), "--log", str(scene.log.directory), "--source", scene.source.dsn()]
    for address, message in (
        ("sc://127.0.0.1:1/;token=secret", b"could not connect to Spark Connect at 127.0.0.1:1"),
        ("sc://127.0.0.1:token=secret", b"the address of Spark Connect cannot be used"),
        (f"sc://127.0.0.1:{scene.source.server.port}/;token secret", b"the address of Spark Connect cannot be used"),
    ):
        done = await anyio.run_process([*LAKE, *where, "--master", address], check=False)
        assert done.returncode == 3
        assert message in done.stderr
        assert b"Traceback" not in done.stderr
        assert b"secret" not in done.stderr
