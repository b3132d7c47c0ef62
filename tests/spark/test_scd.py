"""apply_changes(): a Delta table compared with its source, and all its versions with a replay of the changes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import Row, SparkSession

from subscriber.errors import ApplyError, StatementError
from subscriber.spark import apply_changes, write_snapshot
from subscriber.spark.scd.net_rows import net_rows
from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene, archived

COLUMNS = ("id", "number", "note", "big", "at", "ok", "raw")


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


async def write(scene: Scene, transactions: int) -> None:
    """Write what scene.py writes, and what a net effect finds difficult."""
    k = scene.chance.randint(1, 90)
    await scene.write(transactions)
    await scene.source.execute(
        f"DELETE FROM item WHERE id = {k}; INSERT INTO item VALUES ({k}, 1, 'again', repeat('z', 9000));"
        f"UPDATE item SET note = 'same' WHERE id = {k}; UPDATE item SET id = id + 5000 WHERE id IN ({k}, {k} + 1);"
        f"UPDATE item SET id = id + 5000 WHERE id IN ({k} + 5000, {k} + 5001); DELETE FROM item WHERE id = {k} + 10000",
        f"INSERT INTO item VALUES ({k}, 2) ON CONFLICT DO NOTHING; DELETE FROM item WHERE id = {k}",
    )


async def take_snapshot(scene: Scene) -> None:
    log, directory = scene.log.directory, scene.directory / "snapshot"
    await anyio.to_thread.run_sync(partial(write_snapshot, scene.source.dsn(), log=log, directory=directory))


def apply(spark: SparkSession, scene: Scene, scd: Any, into: str, *, limit: int = 10**6) -> None:
    options = {
        "tables": "public.item",
        "snapshot": str(scene.directory / "snapshot"),
        "maxChangesPerTrigger": str(limit),
    }
    stream = spark.readStream.format("pgcdc").options(**options).load(str(scene.log.directory))
    query = apply_changes(stream, scene.directory / into, keys=["id"], stored_as_scd_type=scd, available_now=True)
    query.awaitTermination()


def table(scene: Scene, into: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(scene.directory / into).to_pyarrow_table().to_pylist()
    return rows


async def check(scene: Scene, spark: SparkSession) -> None:
    """Compare the tables `one` and `two` with the source, and the versions with those of the change log."""
    source = Counter(await scene.source.rows("SELECT * FROM item"))
    assert Counter(tuple(row[name] for name in COLUMNS) for row in table(scene, "one")) == source
    versions = table(scene, "two")
    current = [tuple(row[name] for name in COLUMNS) for row in versions if row["__END_AT"] is None]
    assert Counter(current) == source
    options = {"tables": "public.item", "snapshot": str(scene.directory / "snapshot")}
    changes = spark.read.format("pgcdc").options(**options).load(str(scene.log.directory)).orderBy("_seq").collect()
    found = sorted((row["__START_AT"], row["__END_AT"], *(row[name] for name in COLUMNS[:4])) for row in versions)
    assert found == sorted(replayed(changes))
    times = {row._seq: row._commit_ts.timestamp() for row in changes}
    for row in versions:
        for at, time in (("__START_AT", "__START_TIME"), ("__END_AT", "__END_TIME")):
            assert (row[time] and row[time].timestamp()) == times.get(row[at])


def replayed(changes: Iterable[Row]) -> list[tuple[Any, ...]]:
    """Return the start, end and values of each version, one change after the other."""
    versions, rows = [], dict[int, tuple[str, dict[str, Any]]]()

    def end(key: int, at: str) -> None:
        if key in rows:
            start, row = rows.pop(key)
            versions.append((start, at, *(row[name] for name in COLUMNS[:4])))

    for change in changes:
        if change.op == "t":
            for key in list(rows):
                end(key, change._seq)
            continue
        after = change.after and change.after.asDict()
        before = change.before.id if change.before else after["id"]
        for name in change._unchanged or ():
            after[name] = rows[before][1][name]
        end(before, change._seq)
        if after:
            end(after["id"], change._seq)
            rows[after["id"]] = change._seq, after
    return versions + [(start, None, *(row[name] for name in COLUMNS[:4])) for start, row in rows.values()]


async def test_tables_follow_their_source(scene: Scene, spark: SparkSession) -> None:
    await take_snapshot(scene)
    await write(scene, 40)
    await scene.archive()
    await anyio.to_thread.run_sync(apply, spark, scene, 2, "two")
    await write(scene, 20)
    await scene.source.execute("UPDATE item SET ok = NOT ok; TRUNCATE item; INSERT INTO item (id, big) VALUES (1, 'x')")
    await write(scene, 20)
    await scene.archive()
    # Without its checkpoint, the query reads all changes again.
    (scene.directory / "two" / "_checkpoint").rename(scene.directory / "elsewhere")
    for scd, into in ((1, "one"), (2, "two")):
        await anyio.to_thread.run_sync(apply, spark, scene, scd, into)
    await check(scene, spark)
    with pytest.raises(StatementError, match="does not have the columns"):
        apply(spark, scene, 2, "one")


DRIVER = """
import sys
from subscriber.spark import apply_changes
from subscriber.spark.session import QUICK, spark_session

log, snapshot, into = sys.argv[1:4]
with spark_session(master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2"}, java_options=QUICK) as spark:
    queries = []
    for scd, name in ((1, "one"), (2, "two")):
        options = {"tables": "public.item", "snapshot": snapshot, "maxChangesPerTrigger": "60"}
        stream = spark.readStream.format("pgcdc").options(**options).load(log)
        queries.append(apply_changes(stream, f"{into}/{name}", keys=["id"], stored_as_scd_type=scd, available_now=True))
    print("started", flush=True)
    for query in queries:
        query.awaitTermination()
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_kills_of_the_driver(scene: Scene, spark: SparkSession) -> None:
    """Kill driver and JVM at random moments; after each second kill the driver may finish, and is compared."""
    await take_snapshot(scene)
    chance = random.Random(3)
    arguments = [str(scene.log.directory), str(scene.directory / "snapshot"), str(scene.directory)]
    for round_ in range(12):
        await write(scene, 60)
        if round_ % 4 == 3:
            await scene.source.execute("TRUNCATE item; INSERT INTO item (id) SELECT generate_series(1, 90)")
        await scene.archive()
        for is_last in (False, True):
            driver = subprocess.Popen(
                [sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            with driver:
                assert driver.stdout is not None
                assert await anyio.to_thread.run_sync(driver.stdout.readline) == "started\n"
                if is_last:
                    assert await anyio.to_thread.run_sync(driver.wait) == 0
                else:
                    await anyio.sleep(chance.uniform(0, 8))
                    os.killpg(driver.pid, signal.SIGKILL)
        await check(scene, spark)


# --- without Spark ------------------------------------------------------------------------------


def changes(*rows: tuple[str, int | None, int | None, str | None, list[str]]) -> pa.Table:
    """Return changes: op, former key, key, value, unsent columns."""
    names = ("op", "old0", "value0", "value1", "unsent")
    kinds = (pa.string(), pa.int32(), pa.int32(), pa.string(), pa.list_(pa.string()))
    found = {
        name: pa.array(column, kind) for name, column, kind in zip(names, zip(*rows, strict=True), kinds, strict=True)
    }
    seq = [f"{index:026X}" for index in range(len(rows))]
    return pa.table({**found, "seq": seq, "time": pa.array(range(len(rows)), pa.timestamp("us", tz="UTC"))})


def test_values_that_were_not_sent_come_from_the_first_key() -> None:
    moved = changes(
        ("u", None, 1, "x", []), ("u", 1, 2, None, ["v"]), ("u", 5, 6, None, ["v"]), ("u", 6, 7, None, ["v"])
    )
    rows = net_rows(moved, ("k", "v"), [0], history=False).to_pylist()
    assert {(row["op"], row["key0"], row["value1"], row["from0"], str(row["unsent"])) for row in rows} == {
        ("delete", 1, None, None, "None"),
        ("delete", 5, None, None, "None"),
        ("delete", 6, None, None, "None"),
        ("put", 2, "x", None, "None"),
        ("put", 7, None, 5, "[1]"),
    }
    for history in (False, True):
        with pytest.raises(ApplyError, match="does not exist"):
            net_rows(changes(("d", 1, None, None, []), ("u", 1, 2, None, ["v"])), ("k", "v"), [0], history=history)
