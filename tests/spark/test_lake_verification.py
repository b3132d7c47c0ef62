"""A lake compared with its publisher: each planted difference is found, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import anyio.from_thread
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from subscriber.cli.commands.lake.comparison import wait_for_log
from subscriber.cli.commands.lake.lines import LakeProgressLines
from subscriber.comparison.result import TableComparison
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.lake.row_sums import BUCKETS, BucketRows, RowSums, add_differences, buckets_to_read
from subscriber.spark.lake.verification import verify_lake
from subscriber.spark.tables.table_format import FORMATS
from tests.plugins.fix_cluster import Database
from tests.spark.scene import POSITIONS, Scene

SCHEMA = pa.schema([("a", pa.int32()), ("b", pa.string()), ("c", pa.binary())])
small = st.none() | st.sampled_from(["", "1", "1:", ":", "2:1", "-", "-:"])
rows = st.lists(st.tuples(st.none() | st.integers(0, 3), small, small.map(lambda text: text and text.encode())))


def batch(found: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = zip(*found, strict=True) if found else ([], [], [])
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def compared(publisher: list[tuple[Any, ...]], lake: list[tuple[Any, ...]], key: tuple[int, ...]) -> TableComparison:
    """Compare rows as verify_lake() does. All buckets that differ are read."""
    sums = RowSums(key), RowSums(key)
    for side_sums, values_of_side in zip(sums, (publisher, lake), strict=True):
        for row in values_of_side:
            side_sums.add(batch([row]))
    differing = sums[0].differing(sums[1])
    sides = BucketRows(key, differing), BucketRows(key, differing)
    for side, values_of_side in zip(sides, (publisher, lake), strict=True):
        side.add(batch(values_of_side))
    result = TableComparison("t")
    add_differences(result, SCHEMA.names, *sides)
    assert bool(differing) == (not result.is_same)
    return result


@given(rows, rows)
def test_rows_without_a_key(publisher: list[tuple[Any, ...]], lake: list[tuple[Any, ...]]) -> None:
    result = compared(publisher, lake, ())
    wanted, lake_rows = Counter(publisher), Counter(lake)
    assert result.missing_count == (wanted - lake_rows).total()
    assert result.extra_count == (lake_rows - wanted).total()
    assert result.changed_count == 0


@given(st.dictionaries(st.integers(0, 5), small), st.dictionaries(st.integers(0, 5), small), st.booleans())
def test_rows_with_a_key(publisher: dict[int, str | None], lake: dict[int, str | None], twice: bool) -> None:
    """The lake may even have a key twice."""
    more = [(key, value, b"") for key, value in lake.items()] * (2 if twice else 1)
    result = compared([(key, value, b"") for key, value in publisher.items()], more, (0,))
    assert result.missing == [(f"{key}",) for key in sorted(publisher.keys() - lake.keys())]
    extra = lake.keys() if twice else lake.keys() - publisher.keys()
    assert sorted(result.extra) == [(f"{key}",) for key in sorted(extra)]
    both = () if twice else publisher.keys() & lake.keys()
    assert result.changed == {(f"{key}",): ("b",) for key in both if publisher[key] != lake[key]}


def test_few_buckets_of_a_large_table_are_read() -> None:
    differing = list(range(BUCKETS))
    assert len(buckets_to_read(differing, 1_000)) == BUCKETS
    assert len(buckets_to_read(differing, 10_000_000)) == 40
    assert len(buckets_to_read(differing, 10**12)) == 1


TABLE = """
CREATE TABLE every (id int PRIMARY KEY, small smallint, large bigint, exact numeric(12,2), real real, double float8,
                    good boolean, raw bytea, text text, day date, local timestamp, at timestamptz, any_number numeric)
"""
ROWS = """
INSERT INTO every SELECT i, i, i, i / 4.0, i / 3.0, -0.0::float8 * i, i % 2 = 0, '\\xff00', 'a ' || i, '2026-01-01',
                         '2026-01-01 12:00', '2026-01-01 12:00+02', i / 7.0 FROM generate_series(1, 50) i;
INSERT INTO every (id) SELECT i FROM generate_series(51, 60) i;
"""
OTHERS = {
    "small": 7,
    "large": 2**40,
    "exact": Decimal("0.01"),
    "real": 0.5,
    "double": 0.0,
    "good": None,
    "raw": b"\xff",
    "text": "a  1",
    "day": None,
    "local": datetime(2026, 1, 1, 12, 0, 0, 1),
    "at": datetime(2026, 1, 1, 12, tzinfo=UTC),
    "any_number": "0.1",
}


@pytest.mark.parametrize("format", FORMATS)
async def test_each_planted_difference_is_found(
    source_db: Database, tmp_path: Path, spark: SparkSession, format: str
) -> None:
    scene = Scene(source_db, tmp_path)
    await source_db.execute(
        TABLE,
        ROWS,
        "CREATE TABLE bag (a int, b text)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT i % 3, 'x' FROM generate_series(1, 30) i",
        "CREATE TABLE gone (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE every, bag, gone",
    )
    await scene.archive()
    lake = Lake(tmp_path / "lake", format=format, settings=POSITIONS)
    with lake.lock():
        await load(lake, scene.log, source_db.dsn())

    async def verify() -> dict[str, TableComparison]:
        with lake.lock():
            comparison = await verify_lake(lake, scene.log, source_db.dsn(), partial(reach, scene, lake, spark))
        assert comparison.lsn == lake.position()
        return {table.name: table for table in comparison.tables}

    await source_db.execute(
        "UPDATE every SET text = 'new' WHERE id % 5 = 0; DELETE FROM every WHERE id = 44",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag LIMIT 2)",
    )
    comparison = await verify()
    assert all(table.is_same for table in comparison.values())
    assert [(table.rows, table.target_rows) for table in comparison.values()] == [(28, 28), (59, 59), (0, 0)]
    assert (comparison["public.every"].key, comparison["public.bag"].key) == (("id",), ())

    def plant(label: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        stored = lake.store.open(label)
        changed = pa.RecordBatch.from_pylist(change(stored.to_arrow().to_pylist()), schema=stored.folder.schema)
        stored.commit(stored.files(None), stored.folder.write([changed]), stored.position)

    def others(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Change another column of each row, drop a row, and add two. One has a key that is there."""
        table = sorted(table, key=lambda row: int(row["id"]))
        changed = [row | {name: OTHERS[name]} for row, name in zip(table, OTHERS, strict=False)]
        rest = table[len(OTHERS) :]
        return [*changed, *rest[1:], rest[-1] | {"id": 1000}, rest[-1]]

    with lake.lock():
        plant("public.every", others)
        plant("public.bag", lambda table: [*table[1:], {"a": 5, "b": None}, {"a": 5, "b": None}])
    comparison = await verify()
    every, bag = comparison["public.every"], comparison["public.bag"]
    assert every.changed == {(f"{number}",): (name,) for number, name in enumerate(OTHERS, 1)}
    assert (every.missing, every.extra) == ([("13",)], [("1000",), ("60",)])
    assert (bag.missing_count, bag.extra_count, bag.changed_count) == (1, 2, 0)
    assert bag.extra == [("5", None)]

    # What cannot be compared says why, and the other tables are compared.
    await source_db.execute(
        "ALTER TABLE bag ADD COLUMN more int",
        "CREATE TABLE late (id int PRIMARY KEY)",
        "ALTER PUBLICATION p SET TABLE every, bag, late",
        "UPDATE every SET day = 'infinity' WHERE id = 1",
    )
    comparison = await verify()
    notes = {name: table.note or "" for name, table in comparison.items()}
    assert notes["public.bag"].startswith("its columns have changed")
    assert notes["public.late"] == "it is not in the lake"
    assert notes["public.gone"] == "it is no longer published"
    assert notes["public.every"].startswith("it is set aside: ")
    assert not any(table.is_same for table in comparison.values())


def reach(scene: Scene, lake: Lake, spark: SparkSession, position: Lsn) -> None:
    """Bring the lake to a position."""
    anyio.from_thread.run(scene.archive)
    while (next_batch := lake.next_batch(scene.log, position)) is not None:
        lake.advance(spark, scene.log, *next_batch, history=False)


async def test_a_value_that_does_not_fit_is_named(source_db: Database, tmp_path: Path) -> None:
    """The lake is not brought to the position here, so that the table is not set aside before."""
    scene, lake = Scene(source_db, tmp_path), Lake(tmp_path / "lake")
    await source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, day date)",
        "INSERT INTO t VALUES (1, NULL)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE t, u",
    )
    await scene.archive()
    with lake.lock():
        await load(lake, scene.log, source_db.dsn())
        await source_db.execute("SET session_replication_role = replica; INSERT INTO t VALUES (2, 'infinity')")
        comparison = await verify_lake(lake, scene.log, source_db.dsn(), lambda _: None)
    first, second = comparison.tables
    assert "day" in (first.note or "")
    assert second.is_same


async def test_a_log_that_is_behind_is_an_error(
    source_db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(source_db, tmp_path)
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    end = await scene.archive()
    with pytest.raises(StatementError, match=r"the change log has not reached \S+ within 0 s") as caught:
        wait_for_log(scene.log, Lsn(end + 1_000_000), LakeProgressLines(json=False), 0.0)
    assert "subscriber archive" in (caught.value.hint or "")
    LakeProgressLines(json=False).log_is_behind(Lsn(2), Lsn(1), 20.0)
    assert "waits for the change log, which is at 0/1, to reach 0/2, since 20 s" in capsys.readouterr().err
