"""Tables of a lake with partitions: loads, batches, DDL, later loads, and refused partitions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import anyio.to_thread
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from subscriber.cli.commands.lake.lines import LakeProgressLines
from subscriber.cli.commands.lake.run import TableLoads, describe
from subscriber.cli.main import app
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.layout_options import parse_partition
from subscriber.spark.lake.load import load
from subscriber.spark.lake.load_ranges import RangeLimits, RangeLoads
from subscriber.spark.tables.layout import Layout
from subscriber.spark.tables.table_format import DELTA, FORMATS
from tests.plugins.fix_cluster import Database
from tests.spark.scene import POSITIONS, Scene
from tests.spark.test_lake_schema import rows_of, source_rows


def given(*options: str) -> Layout:
    return Layout(tuple(map(parse_partition, options)))


async def advance(lake: Lake, scene: Scene, spark: SparkSession) -> Lsn:
    until = await scene.archive()
    while (batch := lake.next_batch(scene.log, until)) is not None:
        await anyio.to_thread.run_sync(partial(lake.advance, spark, scene.log, *batch, history=False))
    return until


@pytest.mark.parametrize("format", FORMATS)
async def test_partitions_follow_a_table(
    source_db: Database, tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    scene = Scene(source_db, tmp_path)
    lake = Lake(tmp_path / "lake", format=format, settings=POSITIONS)
    await source_db.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, region text, at date, note text)",
        "CREATE TABLE later (LIKE orders INCLUDING ALL)",
        "INSERT INTO orders SELECT i, CASE i % 3 WHEN 0 THEN 'eu' WHEN 1 THEN 'a/b' END, '2026-01-01'::date + i % 40,"
        " 'n' FROM generate_series(1, 90) i",
        "CREATE PUBLICATION p FOR TABLE orders",
    )
    await scene.archive()
    at = "public.orders.at" if format == DELTA else "month(public.orders.at)"
    with lake.lock():
        begins = await load(lake, scene.log, source_db.dsn(), layout=given("public.orders.region", at))
    first = await source_rows(source_db, "orders")

    def partitions(table: str) -> list[str]:
        describe(lake.directory, json=True)
        described = json.loads(capsys.readouterr().out)["tables"][f"public.{table}"]["partitions"]
        stored = lake.store.open(f"public.{table}")
        names = [str(partition) for partition in stored.folder.partitions]
        assert names == described
        assert all(len(file.partition) == len(names) for file in stored.files(None))
        return names

    assert partitions("orders") == ["region", "at" if format == DELTA else "month(at)"]
    await source_db.execute(
        "UPDATE orders SET region = 'moved' WHERE id % 7 = 0",
        "DELETE FROM orders WHERE id % 11 = 0",
        "INSERT INTO orders VALUES (1000, 'new', NULL, 'n')",
    )
    await advance(lake, scene, spark)
    assert rows_of(lake, "orders") == await source_rows(source_db, "orders")
    await source_db.execute("ALTER TABLE orders RENAME region TO area", "UPDATE orders SET note = 'm' WHERE id < 50")
    await advance(lake, scene, spark)
    assert rows_of(lake, "orders") == await source_rows(source_db, "orders")
    await source_db.execute("ALTER TABLE orders DROP at", "UPDATE orders SET note = 'o' WHERE id < 50")
    renamed = await advance(lake, scene, spark)
    assert rows_of(lake, "orders") == await source_rows(source_db, "orders")
    assert rows_of(lake, "orders", begins) == first
    assert partitions("orders") == ["area"]

    # Loaded again: without the option, by ranges, and with other partitions. A table that is published later.
    ranges = RangeLoads(lake, scene.log, source_db.dsn(), RangeLimits(rows=30, most=30, sessions=2))
    options = given("public.later.region")
    loads = TableLoads(lake, scene.log, source_db.dsn(), frozenset(), LakeProgressLines(json=True), 2**30, options)
    await source_db.execute("ALTER PUBLICATION p ADD TABLE later", "INSERT INTO later VALUES (1, 'x', NULL, 'y')")
    with lake.lock():
        await load(lake, scene.log, source_db.dsn(), tables=frozenset({"public.orders"}), larger=0)
        while not any(step.position for step in await anyio.to_thread.run_sync(ranges.step, spark)):
            await scene.archive()
        assert await anyio.to_thread.run_sync(loads.check)
    capsys.readouterr()
    await source_db.execute("UPDATE orders SET area = 'eu' WHERE id % 2 = 0", "UPDATE later SET region = 'z'")
    await advance(lake, scene, spark)
    for table in ("orders", "later"):
        assert rows_of(lake, table) == await source_rows(source_db, table)
    assert (partitions("orders"), partitions("later")) == (["area"], ["region"])
    with lake.lock():
        tables = frozenset({"public.orders", "public.later"})
        changed = given("public.orders.note", "none(public.later)")
        await load(lake, scene.log, source_db.dsn(), tables=tables, layout=changed)
    await advance(lake, scene, spark)
    assert rows_of(lake, "orders") == await source_rows(source_db, "orders")
    assert (partitions("orders"), partitions("later")) == (["note"], [])
    assert len(rows_of(lake, "orders", renamed)) > 80


async def test_a_table_with_unusable_partitions_is_set_aside(
    source_db: Database, tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table is set aside with a command that loads it. The other tables are advanced."""
    scene, lake = Scene(source_db, tmp_path), Lake(tmp_path / "lake")
    names = ("orders", "others", "typo")
    for name in names:
        await source_db.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, region text)", f"INSERT INTO {name} VALUES (1, 'eu')"
        )
    await source_db.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}")
    await scene.archive()
    options = given("public.orders.region", "public.others.region", "public.typo.regoin")
    with lake.lock():
        await load(lake, scene.log, source_db.dsn(), layout=options)
    assert lake.problems()["public.typo"].message == 'it has no column "regoin" for its partitions'
    assert "with --partition. Then load the table again" in lake.problems()["public.typo"].hint
    await source_db.execute("UPDATE orders SET region = ''", "UPDATE others SET region = 'us'")
    await advance(lake, scene, spark)
    assert lake.problems().keys() == {"public.orders", "public.typo"}
    assert "take for NULL" in lake.problems()["public.orders"].message
    assert rows_of(lake, "others") == await source_rows(source_db, "others")

    def command(*options: str) -> StatementError:
        arguments = ["lake", "advance", str(tmp_path / "lake"), "--log", str(tmp_path / "log")]
        result = CliRunner().invoke(
            app, [*arguments, *(word for option in options for word in ("--partition", option))]
        )
        assert isinstance(result.exception, StatementError)
        return result.exception

    other = command("public.others.id")
    assert other.detail == "Its partitions: region."
    assert other.hint is not None
    assert f"lake reload --log {tmp_path}/log {tmp_path}/lake public.others" in other.hint
    assert "by whole values only" in (command("day(public.others.region)").detail or "")
    assert "bucket" in command("bucket(public.others.region)").message
    assert "schema.table.column" in command("region").message
