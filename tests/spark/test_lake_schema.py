"""The lake after DDL: each table equals the publisher's, or it is set aside with the reason while the others go on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from subscriber.cli.commands.lake.lines import LakeProgressLines
from subscriber.cli.commands.lake.run import TableLoads, describe
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.tables.delta import StoredDeltaTable
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.table_format import FORMATS
from tests.plugins.fix_cluster import Database
from tests.spark.scene import POSITIONS, Scene
from tests.spark.test_lake import advance

# Each table has columns id, a, b, n and three rows.
FOLLOWED = {
    "add_null": "ALTER TABLE add_null ADD c int, ADD d text",
    "add_default": "ALTER TABLE add_default ADD c int NOT NULL DEFAULT 7, ADD d date DEFAULT '2020-01-02'",
    "drop_one": "ALTER TABLE drop_one DROP a",
    "rename_one": "ALTER TABLE rename_one RENAME a TO z",
    "rename_two": "ALTER TABLE rename_two RENAME b TO x; ALTER TABLE rename_two RENAME n TO b",
    "widened": "ALTER TABLE widened ALTER n TYPE numeric(14,2)",
    "new_key": "ALTER TABLE new_key DROP CONSTRAINT new_key_pkey, ADD PRIMARY KEY (a)",
    "all_columns": "ALTER TABLE all_columns REPLICA IDENTITY FULL",
    "untouched": "SELECT 1",
}
SET_ASIDE = {
    "again": ("ALTER TABLE again DROP a; ALTER TABLE again ADD a int", "columns dropped and others added"),
    "scale": ("ALTER TABLE scale ALTER n TYPE numeric(10,0)", 'column "n" was changed'),
    "to_bigint": ("ALTER TABLE to_bigint ALTER a TYPE bigint", 'column "a" was changed'),
    "to_text": ("ALTER TABLE to_text ALTER a TYPE text", 'column "a" was changed'),
    "to_int": ("ALTER TABLE to_int ALTER n TYPE int", 'column "n" was changed'),
    "upper_case": ("ALTER TABLE upper_case ALTER b TYPE text USING upper(b)", 'column "b" was changed'),
    "computed": ("ALTER TABLE computed ADD c float DEFAULT random()", "values in earlier rows are not known"),
    "created": (
        "DROP TABLE created; CREATE TABLE created (id int PRIMARY KEY, a int, b text, n numeric(10,2));"
        " ALTER PUBLICATION p ADD TABLE created; INSERT INTO created VALUES (9, 9, '9', 9)",
        "dropped and created again",
    ),
    "infinite": ("ALTER TABLE infinite ADD d date; UPDATE infinite SET d = 'infinity'", "cannot be stored as date"),
    "left_": (
        "ALTER PUBLICATION p DROP TABLE left_; DELETE FROM left_; ALTER PUBLICATION p ADD TABLE left_",
        "another",
    ),
}


def rows_of(lake: Lake, table: str, position: Lsn | None = None) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(sorted(row.items())) for row in lake.to_arrow(f"public.{table}", position).to_pylist())


def clean_up(lake: Lake, label: str) -> None:
    """Compact a table, and remove its earlier versions."""
    stored = lake.store.open(label)
    if isinstance(stored, StoredIcebergTable):
        stored.table.overwrite(stored.to_arrow())
        stored.clean_up(0, frozenset())
        return
    assert isinstance(stored, StoredDeltaTable)
    stored.table.optimize.compact()
    stored.table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    stored.table.create_checkpoint()
    for file in sorted((Path(str(stored.path)) / "_delta_log").glob("*.json"))[:-1]:
        file.unlink()


async def source_rows(source: Database, table: str) -> Counter[tuple[Any, ...]]:
    async with source.connection() as connection:
        return Counter(tuple(sorted(row.items())) for row in await connection.fetch(f"SELECT * FROM {table}"))


@pytest.mark.parametrize("format", FORMATS)
async def test_tables_follow_ddl_or_are_set_aside(
    source_db: Database, tmp_path: Path, spark: SparkSession, format: str
) -> None:
    source, scene, lake = (
        source_db,
        Scene(source_db, tmp_path),
        Lake(tmp_path / "lake", format=format, settings=POSITIONS),
    )
    names = [*FOLLOWED, *SET_ASIDE, "old_name", "removed"]
    for name in names:
        await source.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, a int NOT NULL, b text, n numeric(10,2))",
            f"INSERT INTO {name} SELECT i, i, 'b' || i, i + 0.55 FROM generate_series(1, 3) i",
        )
    await source.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}")
    await scene.archive()
    with lake.lock():
        begins = await load(lake, scene.log, source.dsn())
    before = {name: await source_rows(source, name) for name in names}
    # In one transaction, so that one batch ends before all of it.
    changes = [f"{ddl}; UPDATE {name} SET id = 20 WHERE id = 2" for name, ddl in FOLLOWED.items()]
    changes += [f"{ddl}; UPDATE {name} SET id = 20 WHERE id = 2" for name, (ddl, _) in SET_ASIDE.items()]
    changes += [
        "ALTER TABLE old_name RENAME TO new_name; UPDATE new_name SET a = a + 1",
        "CREATE TABLE later (id int PRIMARY KEY, a int); INSERT INTO later VALUES (1, 1)",
        "INSERT INTO left_ VALUES (4, 4, '4', 4); UPDATE removed SET a = 5",
        "ALTER PUBLICATION p ADD TABLE later; INSERT INTO later VALUES (2, 2)",
    ]
    await source.execute(f"UPDATE {names[0]} SET a = -a", "BEGIN;" + ";".join(changes) + ";COMMIT")
    shutil.rmtree(tmp_path / "lake" / "tables" / "public.removed")
    assert await advance(lake, scene, spark, await scene.archive()) == 2
    changed = lake.boundaries()[-1]
    for name in FOLLOWED:
        assert rows_of(lake, name) == await source_rows(source, name), name
    problems = lake.problems()
    expected = {f"public.{name}": reason for name, (_, reason) in SET_ASIDE.items()}
    expected |= {"public.old_name": "was renamed", "public.new_name": "later", "public.later": "published later"}
    expected["public.removed"] = "cannot be read"
    assert problems.keys() == expected.keys()
    for label, reason in expected.items():
        assert reason in problems[label].message
        assert f"{lake.directory} {label}`" in problems[label].hint
        with pytest.raises(StatementError):
            lake.to_arrow(label)
    assert lake.store.present()["public.scale"].position(lake.position()) == lake.boundaries()[-2]
    names.remove("removed")
    for name in names:
        assert rows_of(lake, name, begins) == before[name], name

    # Loaded again while the publisher goes on; the others reach that position afterwards.
    await source.execute("UPDATE untouched SET a = 100", "UPDATE infinite SET d = NULL")
    loads = TableLoads(lake, scene.log, source.dsn(), frozenset(), LakeProgressLines(json=True))
    with lake.lock():
        assert await anyio.to_thread.run_sync(loads.check)
        assert lake.problems().keys() == {"public.infinite", "public.removed"}
        loaded = await load(lake, scene.log, source.dsn(), tables=frozenset(lake.problems()))
    assert not lake.problems()
    names.remove("old_name")
    current = {name: await source_rows(source, name) for name in [*names, "removed", "new_name", "later"]}
    await source.execute(*(f"UPDATE {name} SET id = id + 10" for name in current))
    await advance(lake, scene, spark, await scene.archive())
    for name, rows in current.items():
        assert rows_of(lake, name, loaded) == rows, name
        assert rows_of(lake, name) == await source_rows(source, name), name
        assert name in ("removed", "new_name", "later") or rows_of(lake, name, begins) == before[name]
    with pytest.raises(StatementError, match="no table"):
        lake.to_arrow("public.old_name")
    with pytest.raises(StatementError, match="not right as of"):
        lake.to_arrow("public.again", changed)

    for name in current:
        clean_up(lake, f"public.{name}")
    for name in current:
        assert rows_of(lake, name) == await source_rows(source, name), name
    with pytest.raises(StatementError, match="have been removed"):
        lake.to_arrow("public.untouched", begins)


async def test_a_table_that_cannot_be_loaded_does_not_stop_the_others(
    source_db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its hint leads to a load without errors. Tables that are published later are loaded without a hint.

    A new table has columns as text that hold times outside the range of their type. A table that has been loaded, and
    gets such a value, is set aside with a hint.
    """
    scene, lake = Scene(source_db, tmp_path), Lake(tmp_path / "lake")
    await source_db.execute(
        "CREATE TABLE good (id int PRIMARY KEY, t timestamp)",
        "CREATE TABLE times (id int PRIMARY KEY, d date, t timestamptz, u timestamp, n numeric(5,2), c date)",
        "INSERT INTO times VALUES (1, 'infinity', '0044-03-15 BC', '2000-01-01', 1, '2000-01-01'),"
        " (2, '12345-01-01', '12345-01-01', '294276-12-31', 'NaN', '9999-12-31')",
        "CREATE TABLE no_column ()",
        "CREATE PUBLICATION p FOR TABLE good, times, no_column",
    )
    await scene.archive()
    noticed: dict[str, str] = {}
    with lake.lock():
        begins = await load(lake, scene.log, source_db.dsn(), on_text=noticed.__setitem__)
        assert noticed.keys() == {f"public.times.{column}" for column in "dtun"}
        assert noticed["public.times.d"] == 'a value of column "public.times.d" cannot be stored as date'
        assert lake.store.present()["public.times"].as_text() == noticed.keys()
        assert describe(lake.directory, json=True) == 1
        tables = json.loads(capsys.readouterr().out)["tables"]
        assert {label: fields["state"] for label, fields in tables.items()} == {
            "public.good": "current",
            "public.no_column": "set aside",
            "public.times": "current",
        }
        assert "Give the table a column" in tables["public.no_column"]["hint"]
        await source_db.execute(
            "INSERT INTO good VALUES (1, '-infinity')", "UPDATE times SET c = '0001-01-01 BC' WHERE id = 1"
        )
        # A reload keeps the type that readers know. Each hint names the columns of the earlier loads too.
        for label, column in (("public.good", "t"), ("public.times", "c")):
            as_text = lake.store.present()[label].as_text()
            await load(lake, scene.log, source_db.dsn(), tables=frozenset({label}), as_text=as_text)
            as_text |= {f"{label}.{column}"}
            options = "".join(f" --text {name}" for name in sorted(as_text))
            assert lake.problems()[label].hint.endswith(f"{options} {lake.directory} {label}`.")
            await load(lake, scene.log, source_db.dsn(), tables=frozenset({label}), as_text=as_text)
        await source_db.execute(
            "ALTER TABLE no_column ADD a int",
            "CREATE TABLE later (id int PRIMARY KEY)",
            "ALTER PUBLICATION p ADD TABLE later",
            "ALTER PUBLICATION p DROP TABLE good",
        )
        loads = TableLoads(lake, scene.log, source_db.dsn(), frozenset(), LakeProgressLines(json=True))
        assert await anyio.to_thread.run_sync(loads.check)
        assert lake.problems().keys() == {"public.no_column"}
        await load(lake, scene.log, source_db.dsn(), tables=frozenset(lake.problems()))
    assert lake.tables() == ["public.later", "public.no_column", "public.times"]
    assert lake.store.present()["public.times"].condition(begins) == "ahead"
    assert lake.table("public.good", begins).to_pyarrow_table().num_rows == 0
    with lake.lock(), pytest.raises(StatementError, match="another process writes"), lake.lock():
        pass
    assert {row["d"] for row in DeltaTable(tmp_path / "lake/tables/public.times").to_pyarrow_table().to_pylist()} == {
        "infinity",
        "12345-01-01",
    }
