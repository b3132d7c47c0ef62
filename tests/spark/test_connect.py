"""pgcdc and apply_changes() in a session of Spark Connect, which has no SparkContext."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import anyio.to_thread
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene, archived
from tests.spark.test_scd import COLUMNS, take_snapshot, write

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("grpc") is None, reason="pyspark[connect] is not installed"),
]

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
