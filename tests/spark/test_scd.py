"""apply_changes(): tables compared with their source, and all versions of their rows with a replay of the changes."""

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
from pyiceberg.catalog import load_catalog
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from subscriber.changelog.row_columns import sequence_number
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark import apply_changes, write_snapshot
from subscriber.spark.scd.apply import apply_batch
from subscriber.spark.scd.stream_table import StreamTable
from subscriber.spark.scd.target import ScdTarget
from subscriber.spark.sources.stream_origin import RowIdentity
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


def apply(spark: SparkSession, scene: Scene, catalog: str | None, scd: Any) -> None:
    """Apply the changes to a table of the catalog; None: a Delta table."""
    options = {"tables": "public.item", "snapshot": str(scene.directory / "snapshot")}
    stream = spark.readStream.format("pgcdc").options(**options).load(str(scene.log.directory))
    into, more = place(scene, catalog, scd)
    query = apply_changes(stream, into, keys=["id"], stored_as_scd_type=scd, available_now=True, **more)
    query.awaitTermination()


def place(scene: Scene, catalog: str | None, scd: int) -> tuple[Any, Any]:
    if catalog is None:
        return scene.directory / f"scd{scd}", {}
    return f"shop.items.scd{scd}", {"catalog": catalog, "checkpoint": scene.directory / f"iceberg{scd}"}


def table(scene: Scene, catalog: str | None, scd: int) -> list[dict[str, Any]]:
    if catalog is None:
        rows = DeltaTable(scene.directory / f"scd{scd}").to_pyarrow_table()
    else:
        rows = load_catalog(catalog).load_table(f"shop.items.scd{scd}").scan().to_arrow()
    rows_read: list[dict[str, Any]] = rows.to_pylist()
    return rows_read


async def check(scene: Scene, spark: SparkSession, catalog: str | None, scd: int) -> None:
    """Compare a table with the source, and the versions of its rows with those of the change log."""
    source = Counter(await scene.source.rows("SELECT * FROM item"))
    rows = table(scene, catalog, scd)
    current = [tuple(row[name] for name in COLUMNS) for row in rows if row.get("__END_AT") is None]
    assert Counter(current) == source
    if scd == 1:
        return
    options = {"tables": "public.item", "snapshot": str(scene.directory / "snapshot")}
    changes = spark.read.format("pgcdc").options(**options).load(str(scene.log.directory)).orderBy("_seq").collect()
    versions = sorted((row["__START_AT"], row["__END_AT"], *(row[name] for name in COLUMNS[:4])) for row in rows)
    assert versions == sorted(replayed(changes))
    times = {row._seq: row._commit_ts.timestamp() for row in changes}
    for row in rows:
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


@pytest.mark.parametrize(
    "tables",
    [
        [("delta", 1), ("iceberg", 2)],
        pytest.param([("iceberg", 1), ("delta", 2)], marks=pytest.mark.soak),
    ],
    ids=str,
)
async def test_tables_follow_their_source(
    scene: Scene, spark: SparkSession, catalog: str, tables: list[tuple[str, int]]
) -> None:
    (first, scd), second = ((catalog if name == "iceberg" else None, scd) for name, scd in reversed(tables))
    await take_snapshot(scene)
    await write(scene, 40)
    await scene.archive()
    await anyio.to_thread.run_sync(apply, spark, scene, first, scd)
    await write(scene, 20)
    await scene.source.execute("UPDATE item SET ok = NOT ok; TRUNCATE item; INSERT INTO item (id, big) VALUES (1, 'x')")
    await write(scene, 20)
    await scene.archive()
    # Without its checkpoint, the query reads all changes again.
    checkpoint = "scd2/_checkpoint" if first is None else "iceberg2"
    (scene.directory / checkpoint).rename(scene.directory / "elsewhere")
    for side in ((first, scd), second):
        await anyio.to_thread.run_sync(apply, spark, scene, *side)
        await check(scene, spark, *side)


KEYED = """
CREATE TABLE named (id int PRIMARY KEY, code int NOT NULL UNIQUE, name text);
CREATE TABLE whole (id int PRIMARY KEY, code int, name text);
ALTER TABLE named REPLICA IDENTITY USING INDEX named_code_key; ALTER TABLE whole REPLICA IDENTITY FULL;
INSERT INTO named VALUES (1, 1, 'a'), (2, 2, 'b'); INSERT INTO whole VALUES (1, 1, 'a');
ALTER PUBLICATION p ADD TABLE named, whole
"""


async def test_a_stream_that_would_not_be_exact_is_refused(scene: Scene, spark: SparkSession) -> None:
    await scene.source.execute(KEYED)
    await take_snapshot(scene)
    await scene.source.execute("UPDATE item SET note = 'x'")
    await scene.archive()
    log, into, folder = str(scene.log.directory), scene.directory / "table", str(scene.directory / "snapshot")

    def refused(table: str, keys: Any, *, more: Any = None, **options: str) -> StatementError:
        options = options or {"snapshot": folder}
        stream = spark.readStream.format("pgcdc").options(tables=table, **options).load(log)
        with pytest.raises(StatementError) as raised:
            apply_changes(stream.where("true"), into, keys=keys, **(more or {}))
        return raised.value

    for table, keys, right in (
        ("public.item", ["note"], '["id"]'),
        ("public.item", ["id", "note"], '["id"]'),
        ("public.pair", "a", '["a", "b"]'),
        ("public.named", ["id"], '["code"]'),
        ("public.whole", "name", '["id"]'),
    ):
        error = refused(table, keys)
        assert f"the changes of {table} are identified by" in error.message
        assert right in str(error.hint)
    assert "_rescued" in refused("public.item", "id", snapshot=folder, rescue="true").message
    both = "public.item,public.pair"
    assert 'table="public.item"' in str(refused(both, "id").hint)
    assert refused(both, "id", more={"table": "public.pairs"}).hint == 'Perhaps you meant "public.pair".'
    assert "the key of the table" in refused("public.bag", None).message
    assert "write_snapshot" in str(refused("public.item", "id", mode="cdc").hint)
    assert not into.exists()

    def follow(table: str, keys: Any, **options: str) -> None:
        options = options or {"snapshot": folder}
        stream = spark.readStream.format("pgcdc").options(tables=table, **options).load(log)
        apply_changes(stream, scene.directory / table, keys=keys, available_now=True).awaitTermination()

    def rows(table: str) -> list[tuple[Any, ...]]:
        rows_read = DeltaTable(scene.directory / table).to_pyarrow_table().to_pylist()
        return sorted(tuple(row.values()) for row in rows_read)

    await scene.source.execute("UPDATE named SET code = 3 WHERE id = 1; DELETE FROM named WHERE id = 2")
    await scene.source.execute("UPDATE whole SET id = 5, name = 'b'; INSERT INTO whole VALUES (1, 2, 'c')")
    await scene.archive()
    await anyio.to_thread.run_sync(follow, "public.named", None)
    await anyio.to_thread.run_sync(partial(follow, start="earliest"), "public.whole", ["code", "id"])
    assert rows("public.named") == [(1, 3, "a")]
    assert rows("public.whole") == [(1, 2, "c"), (5, 1, "b")]
    # A target that has changes is not empty, and its stream needs no snapshot.
    await anyio.to_thread.run_sync(partial(follow, mode="cdc"), "public.named", "code")
    assert rows("public.named") == [(1, 3, "a")]


def test_a_key_that_changes_in_the_log(spark: SparkSession) -> None:
    """Only the identities of changes that the target does not have count."""
    frame = spark.createDataFrame([], "after struct<id int, code int>")
    identities = (RowIdentity(Lsn(0), False, ("id",)), RowIdentity(Lsn(0x20), False, ("code",)))
    table = StreamTable("public.t", frame, "snapshot", identities)
    assert table.key(None) == ["code"]
    for key, reason in ((["id"], "are identified by code"), (["code"], "are identified by id, from 0/0 on")):
        with pytest.raises(StatementError, match=reason):
            table.check_key(key, None)
    table.check_key(["code"], Lsn(0x20))
    for whole in (RowIdentity(Lsn(0), True, ("id",)), RowIdentity(Lsn(0), True, ()), RowIdentity(Lsn(0), False, ())):
        StreamTable("public.t", frame, None, (whole,)).check_key(["id", "code"], None)


def test_values_that_were_not_sent_of_an_unknown_row_are_an_error(spark: SparkSession, tmp_path: Path) -> None:
    row = "struct<id int, big string>"
    kinds = (
        f"op string, before {row}, after {row}, _seq string, _lsn long, _commit_ts timestamp, _unchanged array<string>"
    )
    target = ScdTarget(tmp_path / "items", pa.schema([("id", pa.int32()), ("big", pa.string())]), [0], history=False)
    change = ("u", None, (7, None), sequence_number(5, 1), 5, None, ["big"])
    with pytest.raises(PySparkException, match="a row was changed that is not in"):
        apply_batch(spark.createDataFrame([change], kinds), target)
    assert target.applied(target.open()) is None


DRIVER = """
import sys
from subscriber.errors import StatementError
from subscriber.spark import apply_changes
from subscriber.spark.session import QUICK, spark_session

log, snapshot, into = sys.argv[1:4]
with spark_session(master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2"}, java_options=QUICK) as spark:
    print("started", flush=True)
    for kind in sys.argv[4:]:
        queries = []
        for scd in (1, 2):
            options = {"tables": "public.item", "snapshot": snapshot, "maxChangesPerTrigger": "60"}
            stream = spark.readStream.format("pgcdc").options(**options).load(log)
            more = {"stored_as_scd_type": scd, "available_now": True, "keys": ["id"]}
            if kind == "delta":
                queries.append(apply_changes(stream, f"{into}/scd{scd}", **more))
            else:
                more |= {"catalog": "shop", "checkpoint": f"{into}/iceberg{scd}"}
                queries.append(apply_changes(stream, f"shop.items.scd{scd}", **more))
        for query in queries:
            query.awaitTermination()
"""


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_kills_of_the_driver_lose_and_repeat_no_version(scene: Scene, spark: SparkSession, catalog: str) -> None:
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
            kinds = chance.sample(["delta", "iceberg"], 2)
            driver = subprocess.Popen(
                [sys.executable, "-c", DRIVER, *arguments, *kinds],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            with driver:
                assert driver.stdout is not None
                assert await anyio.to_thread.run_sync(driver.stdout.readline) == "started\n"
                if is_last:
                    assert await anyio.to_thread.run_sync(driver.wait) == 0
                else:
                    await anyio.sleep(chance.uniform(0, 16))
                    os.killpg(driver.pid, signal.SIGKILL)
        for name in (None, catalog):
            for scd in (1, 2):
                await check(scene, spark, name, scd)
