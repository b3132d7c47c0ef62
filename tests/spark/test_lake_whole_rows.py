"""Tables of a lake with REPLICA IDENTITY FULL: found by their primary key, while they are known to have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from pyspark.sql import SparkSession

from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.lake.load_ranges import RangeLoads
from subscriber.spark.tables.table_format import FORMATS
from subscriber.spark.tables.table_merge import TableMerge
from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene, archived
from tests.spark.test_load_ranges import FEW, finish

TABLE = """
CREATE TABLE whole (note text, b int, a int, big text, PRIMARY KEY (a, b));
ALTER TABLE whole REPLICA IDENTITY FULL, ALTER big SET STORAGE EXTERNAL;
INSERT INTO whole SELECT 'n' || i, i % 7, i, repeat('big' || i, 1500) FROM generate_series(1, 200) i;
ALTER PUBLICATION p SET TABLE whole;
"""
CHANGES = (
    "UPDATE whole SET note = note || '!' WHERE a % 5 = 0",
    "UPDATE whole SET b = b + 10 WHERE a % 9 = 0",
    "DELETE FROM whole WHERE a % 11 = 0",
    "INSERT INTO whole VALUES ('new', 3, (SELECT max(a) + 1 FROM whole), 'small')",
)


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        await scene.source.execute(TABLE)
        await scene.archive()
        yield scene


async def advance_until(lake: Lake, scene: Scene, spark: SparkSession, position: Lsn) -> None:
    while (batch := lake.next_batch(scene.log, position)) is not None:
        await anyio.to_thread.run_sync(partial(lake.advance, spark, scene.log, *batch, history=False))
    assert not lake.problems()


async def advance(lake: Lake, scene: Scene, spark: SparkSession) -> None:
    """Bring the lake to the end of the log, and compare its rows with the source's."""
    position = await scene.archive()
    expected: Counter[tuple[Any, ...]] = Counter(await scene.source.rows("SELECT note, b, a, big FROM whole"))
    await advance_until(lake, scene, spark, position)
    rows = lake.to_arrow("public.whole").to_pylist()
    assert Counter((row["note"], row["b"], row["a"], row["big"]) for row in rows) == expected


@pytest.mark.parametrize("format", FORMATS)
async def test_rows_are_found_by_the_primary_key(
    scene: Scene, tmp_path: Path, spark: SparkSession, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a load by ranges. The driver reads no rows of the table."""
    lake = Lake(tmp_path / "lake", format=format)
    await load(lake, scene.log, scene.source.dsn(), larger=0)
    loads = RangeLoads(lake, scene.log, scene.source.dsn(), FEW)
    assert lake.store.loads.all()
    while not all(load_state.is_read for load_state in lake.store.loads.all().values()):
        await anyio.to_thread.run_sync(loads.step, spark)
        await scene.source.execute(*CHANGES)
    monkeypatch.setattr(TableMerge, "_bag", None)
    await finish(loads, scene, spark)
    await scene.source.execute(*CHANGES)
    await advance(lake, scene, spark)
    await scene.source.execute("ALTER TABLE whole RENAME a TO a2", "ALTER TABLE whole RENAME a2 TO a", *CHANGES)
    await advance(lake, scene, spark)


async def test_a_key_that_was_dropped_and_added_again(scene: Scene, tmp_path: Path, spark: SparkSession) -> None:
    """Two rows have the same values of the key in between. The archiver reads the catalog afterwards."""
    lake = Lake(tmp_path / "lake")
    await load(lake, scene.log, scene.source.dsn())
    await scene.source.execute(
        "ALTER TABLE whole DROP CONSTRAINT whole_pkey",
        "INSERT INTO whole VALUES ('second', 1, 1, 'x')",
    )
    middle = await scene.position()
    await scene.source.execute(
        "DELETE FROM whole WHERE a = 1 AND note = 'n1'", "ALTER TABLE whole ADD PRIMARY KEY (a, b)", *CHANGES
    )
    await scene.archive()
    await advance_until(lake, scene, spark, middle)
    assert lake.to_arrow("public.whole").num_rows == 201
    await advance(lake, scene, spark)
    state = lake.store.states()["public.whole"]
    assert state.key_names(middle) is None
    assert state.key_names(lake.position()) == ("b", "a")
    await scene.source.execute(*CHANGES)
    await advance(lake, scene, spark)
