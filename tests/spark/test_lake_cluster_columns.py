"""Tables of a lake with cluster columns: loads, batches, DDL, later loads, and refused cluster columns."""

from __future__ import annotations

import json
from pathlib import Path

import anyio.to_thread
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from subscriber.cli.commands.lake.run import describe
from subscriber.cli.main import app
from subscriber.errors import StatementError
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.layout_options import parse_cluster, parse_partition
from subscriber.spark.lake.load import load
from subscriber.spark.lake.load_ranges import RangeLimits, RangeLoads, RangeStep
from subscriber.spark.lake.recluster import check_recluster, recluster_table
from subscriber.spark.tables.layout import Layout
from subscriber.spark.tables.recluster import Reclustering, overlapping
from subscriber.spark.tables.table_format import FORMATS
from tests.plugins.fix_cluster import Database
from tests.spark.scene import POSITIONS, Scene
from tests.spark.test_lake_partitions import advance
from tests.spark.test_lake_schema import rows_of, source_rows


def given(*options: str, partition: tuple[str, ...] = ()) -> Layout:
    return Layout(tuple(map(parse_partition, partition)), tuple(map(parse_cluster, options)))


def overlapping_files(lake: Lake, label: str) -> int:
    """Return the number of files of a table whose ranges overlap."""
    tasks = Reclustering(lake.store.open(label), lake.store.limits).keys_tasks()
    return sum(map(len, overlapping(task() for task in tasks)))


@pytest.mark.parametrize("format", FORMATS)
async def test_cluster_columns_follow_a_table(
    source_db: Database, tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    scene = Scene(source_db, tmp_path)
    lake = Lake(tmp_path / "lake", format=format, settings=POSITIONS)
    await source_db.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, at timestamptz, region text, amount int)",
        "INSERT INTO orders SELECT i, '2026-01-01'::timestamptz + i * 7919 % 1000 * '1 hour'::interval,"
        " CASE i % 3 WHEN 0 THEN 'eu' WHEN 1 THEN 'us' END, i % 10 FROM generate_series(1, 300) i",
        "CREATE PUBLICATION p FOR TABLE orders",
    )
    await scene.archive()
    with lake.lock():
        options = given("public.orders.at", "public.orders.amount", partition=("public.orders.region",))
        begins = await load(lake, scene.log, source_db.dsn(), layout=options)
    first, tables = await source_rows(source_db, "orders"), frozenset({"public.orders"})

    async def cluster(*statements: str) -> list[str]:
        """Run statements and advance. Returns the cluster columns of the table, whose rows must be the publisher's."""
        await source_db.execute(*statements)
        await advance(lake, scene, spark)
        assert rows_of(lake, "orders") == await source_rows(source_db, "orders")
        describe(lake.directory, json=True)
        described: list[str] = json.loads(capsys.readouterr().out)["tables"]["public.orders"]["cluster"]
        assert list(lake.store.open("public.orders").folder.cluster) == described
        return described

    assert await cluster() == ["at", "amount"]
    changes = [
        "UPDATE orders SET at = at - '1 year'::interval WHERE id % 7 = 0",
        "DELETE FROM orders WHERE id % 11 = 0",
        "INSERT INTO orders VALUES (1000, NULL, 'new', NULL)",
    ]
    assert await cluster(*changes) == ["at", "amount"]
    change = "UPDATE orders SET amount = amount + 1 WHERE id < 50"
    assert await cluster("ALTER TABLE orders RENAME at TO placed", change) == ["placed", "amount"]
    assert rows_of(lake, "orders", begins) == first
    assert await cluster("ALTER TABLE orders DROP placed", change) == ["amount"]
    await source_db.execute("ALTER TABLE orders ALTER amount TYPE numeric(10,2)", change)
    await advance(lake, scene, spark)
    assert "was rewritten" in lake.problems()["public.orders"].message  # as without cluster columns

    async def loaded(*options: str) -> None:
        layout = given(*options, partition=("none(public.orders)",))
        with lake.lock():
            await load(lake, scene.log, source_db.dsn(), tables=tables, layout=layout)

    await loaded()
    assert await cluster() == []  # numeric has no ranges
    await loaded("public.orders.region", "public.orders.id")
    assert await cluster() == ["region", "id"]
    describe(lake.directory, json=False)
    assert "clustered by region, id" in capsys.readouterr().out
    await loaded("none(public.orders)")
    assert await cluster() == []


@pytest.mark.parametrize("format", FORMATS)
async def test_files_are_put_in_order(source_db: Database, tmp_path: Path, spark: SparkSession, format: str) -> None:
    """At the end of a load by ranges, whose ranges are those of keys, and later by a command."""
    scene, label = Scene(source_db, tmp_path), "public.orders"
    lake = Lake(tmp_path / "lake", format=format, settings=POSITIONS)
    await source_db.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, at timestamptz, region text)",
        "INSERT INTO orders SELECT i, '2026-01-01'::timestamptz + i * 7919 % 1000 * '1 hour'::interval, 'eu'"
        " FROM generate_series(1, 300) i",
        "CREATE PUBLICATION p FOR TABLE orders",
    )
    await scene.archive()
    ranges = RangeLoads(lake, scene.log, source_db.dsn(), RangeLimits(rows=90, most=90, sessions=2))
    with lake.lock():
        await load(lake, scene.log, source_db.dsn(), layout=given("public.orders.at"), larger=0)
        steps, overlaps = list[RangeStep](), list[int]()
        while not any(step.position for step in steps):
            steps = await anyio.to_thread.run_sync(ranges.step, spark)
            overlaps.append(overlapping_files(lake, label))
            await scene.archive()
    assert [*overlaps[:2], max(overlaps[2:])] == [2, 4, 0]
    await source_db.execute("INSERT INTO orders VALUES (301, '2026-01-05', 'us')")
    await advance(lake, scene, spark)
    assert overlapping_files(lake, label) > 0

    position, rows = lake.position(), await source_rows(source_db, "orders")
    written = list[tuple[int, int]]()
    with lake.lock():
        check_recluster(lake, label)
        done = await anyio.to_thread.run_sync(recluster_table, spark, lake, label, lambda *some: written.append(some))
    assert done.removed > 1
    assert written == [(0, 301)]
    assert overlapping_files(lake, label) == 0
    assert lake.store.versions(label)[-1] == (position, done.version)
    assert rows_of(lake, "orders") == rows
    await source_db.execute("DELETE FROM orders WHERE id < 100")
    await advance(lake, scene, spark)
    assert rows_of(lake, "orders", position) == rows
    assert rows_of(lake, "orders") == await source_rows(source_db, "orders")


async def test_a_table_with_unusable_cluster_columns_is_set_aside(source_db: Database, tmp_path: Path) -> None:
    """A table is set aside with a command that loads it."""
    scene, lake = Scene(source_db, tmp_path), Lake(tmp_path / "lake")
    for name in ("orders", "others"):
        await source_db.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, good boolean)", f"INSERT INTO {name} VALUES (1, true)"
        )
    await source_db.execute("CREATE PUBLICATION p FOR TABLE orders, others")
    await scene.archive()
    options = given("public.orders.good", "public.others.id", "public.nowhere.x", "none(public.elsewhere)")
    with lake.lock():
        await load(lake, scene.log, source_db.dsn(), layout=options)
    (problem,) = lake.problems().values()
    assert problem.message == "it cannot be clustered by good: the column is bool"
    assert "with --cluster. Then load the table again" in problem.hint

    def command(*columns: str, recluster: str | None = None) -> StatementError:
        given = [word for column in columns for word in ("--cluster", column)]
        advance = ["lake", "advance", str(tmp_path / "lake"), "--log", str(tmp_path / "log"), *given]
        words = ["lake", "recluster", str(tmp_path / "lake"), recluster] if recluster else advance
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, StatementError)
        return result.exception

    other = command("none(public.others)")
    assert other.detail == "Its cluster columns: id."
    assert other.hint is not None
    assert "Leave out --cluster" in other.hint
    assert f"lake reload --log {tmp_path}/log {tmp_path}/lake public.others" in other.hint
    assert command("month(public.others.at)").hint == "Name the column: public.others.at."
    assert "schema.table.column" in command("others.id").message

    assert command(recluster="public.nowhere").message == 'the lake has no table "public.nowhere"'
    aside = command(recluster="public.orders")
    assert aside.message.startswith('table "public.orders" of the lake is set aside: it cannot be clustered by good')
    with lake.lock():
        layout = given("none(public.others)")
        await load(lake, scene.log, source_db.dsn(), tables=frozenset({"public.others"}), layout=layout)
    none = command(recluster="public.others")
    assert none.message == 'table "public.others" of the lake has no cluster columns'
    assert f"--cluster public.others.COLUMN {tmp_path}/lake public.others" in (none.hint or "")
