"""Tables of a lake that are loaded by ranges of their keys, while their rows change."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from pyspark.sql import SparkSession

from subscriber.changelog.consumers import read_consumers
from subscriber.cli.commands.lake.lines import LakeProgressLines
from subscriber.cli.commands.lake.run import TableLoads, describe
from subscriber.errors import LoadNeeded
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.lake_merge import LakeMerge
from subscriber.spark.lake.load import load
from subscriber.spark.lake.load_ranges import RangeLimits, RangeLoads, RangeStep
from subscriber.spark.lake.range_load import RangeLoadFiles
from subscriber.spark.lake.table_store import TableStore
from subscriber.spark.tables.table_format import FORMATS
from tests.plugins.fix_cluster import Database
from tests.spark.scene import NAMES, POSITIONS, Scene, archived
from tests.synchronous import block_commits, release_commits

FEW = RangeLimits(rows=40, most=40, sessions=2)


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        await scene.source.execute(
            "INSERT INTO item SELECT i, i, 'n' || i, repeat('big' || i, 1500), now() FROM generate_series(101, 300) i",
            "INSERT INTO pair SELECT i, 'b' || i, i FROM generate_series(51, 200) i",
        )
        yield scene


async def source_rows(scene: Scene, table: str) -> Counter[tuple[Any, ...]]:
    return Counter(await scene.source.rows(f"SELECT * FROM {table}"))


def lake_rows(lake: Lake, table: str, position: Lsn | None = None) -> Counter[tuple[Any, ...]]:
    rows_read = lake.to_arrow(f"public.{table}", position).to_pylist()
    names = lake.store.states()[f"public.{table}"].names()  # Delta keeps the order of columns
    return Counter(tuple(row[name] for name in names) for row in rows_read)


async def advance(lake: Lake, scene: Scene, spark: SparkSession, until: Lsn) -> None:
    while (batch := lake.next_batch(scene.log, until)) is not None:
        await anyio.to_thread.run_sync(partial(lake.advance, spark, scene.log, *batch, history=False))


async def step(loads: RangeLoads, spark: SparkSession) -> list[RangeStep]:
    return await anyio.to_thread.run_sync(loads.step, spark)


async def finish(loads: RangeLoads, scene: Scene, spark: SparkSession) -> dict[str, Lsn]:
    """Step until all loads have ended. Returns the positions of the tables."""
    ended = dict[str, Lsn]()
    for _ in range(100):
        steps = await step(loads, spark)
        if not steps:
            return ended
        for last_step in steps:
            assert last_step.error is None, last_step.error
            if last_step.position is not None:
                ended[last_step.label] = last_step.position
            if last_step.waits_for is not None:
                await scene.archive()
    raise AssertionError(steps)


@pytest.mark.parametrize("format", FORMATS)
async def test_rows_that_change_between_the_ranges(
    scene: Scene, tmp_path: Path, spark: SparkSession, format: str
) -> None:
    lake = Lake(tmp_path / "lake", format=format, settings=POSITIONS)
    await load(lake, scene.log, scene.source.dsn(), larger=0)
    assert set(lake.store.loads.all()) == {"public.item", "public.pair"}  # log and bag have no key
    loads = RangeLoads(lake, scene.log, scene.source.dsn(), FEW)
    while not all(load_state.is_read for load_state in lake.store.loads.all().values()):
        await scene.write(10)
        # In each step, a range and a row whose key moves to a range that is read, and back.
        await scene.source.execute(
            "UPDATE item SET id = -id WHERE id IN (SELECT id FROM item ORDER BY random() LIMIT 3)"
        )
        await step(loads, spark)
    assert len(lake.store.loads.all()["public.item"].ranges) > 5
    with pytest.raises(Exception, match="no table"):
        lake.to_arrow("public.item")
    ended = await finish(loads, scene, spark)
    assert set(ended) == {"public.item", "public.pair"}
    position = await scene.archive()
    rows = {table: await source_rows(scene, table) for table in ("item", "pair", "bag", "log")}
    await advance(lake, scene, spark, position)
    assert not lake.problems()
    for table, expected in rows.items():
        assert lake_rows(lake, table) == expected


async def read_all(loads: RangeLoads, lake: Lake, spark: SparkSession) -> None:
    while not all(load_state.is_read for load_state in lake.store.loads.all().values()):
        await step(loads, spark)


async def begun(scene: Scene, tmp_path: Path, table: str) -> tuple[Lake, RangeLoads]:
    """Load a small table, and begin to load this one."""
    lake = Lake(tmp_path / "lake")
    if not lake.exists:
        await load(lake, scene.log, scene.source.dsn(), tables=frozenset({"public.log"}))
    await load(lake, scene.log, scene.source.dsn(), tables=frozenset({f"public.{table}"}), larger=0)
    return lake, RangeLoads(lake, scene.log, scene.source.dsn(), FEW)


async def check(lake: Lake, scene: Scene, spark: SparkSession, table: str) -> None:
    """Check that the lake's table has the source's rows."""
    position = await scene.archive()
    expected = await source_rows(scene, table)
    await advance(lake, scene, spark, position)
    assert not lake.problems()
    assert lake_rows(lake, table) == expected


async def test_transactions_that_snapshots_see_later_than_the_log(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    """One has written its commit record before the load begins, one between two ranges; both wait for a standby."""
    await load(Lake(tmp_path / "lake"), scene.log, scene.source.dsn(), tables=frozenset({"public.log"}))
    async with scene.source.connection() as root, anyio.create_task_group() as tasks:
        try:
            await block_commits(root)
            tasks.start_soon(scene.source.execute, "UPDATE pair SET value = 1001 WHERE a = 1")
            await scene.source.wait_for("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'", 1)
            lake, loads = await begun(scene, tmp_path, "pair")
            (first,) = await step(loads, spark)
            assert (first.waits_for or "").startswith("transactions that write to it")
            await release_commits(root)
            await scene.source.wait_for("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'", 0)
            assert (await step(loads, spark))[0].rows > 0
            await block_commits(root)
            for key in (2, 199):  # in a range that is read, and in one that is not
                tasks.start_soon(scene.source.execute, f"UPDATE pair SET value = 9000{key} WHERE a = {key}")
            await scene.source.wait_for("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'", 2)
            await read_all(loads, lake, spark)
            assert lake.store.loads.all()["public.pair"].ranges[-1].rows
        finally:
            await release_commits(root)
    await finish(loads, scene, spark)
    await check(lake, scene, spark, "pair")


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE pair ADD more int DEFAULT 5",
        "TRUNCATE pair; INSERT INTO pair VALUES (7, 'b', 7)",
        "DROP TABLE pair; CREATE TABLE pair (b text, value bigint, a int, PRIMARY KEY (a, b));"
        " INSERT INTO pair VALUES ('b', 5, 7); ALTER PUBLICATION p ADD TABLE pair",
    ],
    ids=["alter", "truncate", "create"],
)
@pytest.mark.parametrize("late", [False, True], ids=["between", "after"])
async def test_ddl_while_ranges_are_read(
    scene: Scene, tmp_path: Path, spark: SparkSession, statement: str, late: bool
) -> None:
    """Between two ranges, it makes the load begin again. After the last one, only another table does."""
    lake, loads = await begun(scene, tmp_path, "pair")
    await step(loads, spark)
    if late:
        await read_all(loads, lake, spark)
    await scene.source.execute(f"BEGIN; {statement}; COMMIT", "DELETE FROM pair WHERE a = 3")
    error = None
    for _ in range(20):
        steps = await step(loads, spark)
        if not steps:
            break
        error = error or steps[0].error
        await scene.archive()
    assert (error is None) == (late and "DROP" not in statement), error
    if error is not None:
        assert ("dropped" if late else "changed") in error.message
        assert lake.store.states()["public.pair"].needs_load
        await load(lake, scene.log, scene.source.dsn(), tables=frozenset({"public.pair"}), larger=0)
        await finish(loads, scene, spark)
    await check(lake, scene, spark, "pair")


async def test_the_lake_is_ahead_of_ddl_after_the_last_range(scene: Scene, tmp_path: Path, spark: SparkSession) -> None:
    """A load that ended before the DDL would lack the changes up to the position of the lake, so it begins again."""
    lake, loads = await begun(scene, tmp_path, "pair")
    await read_all(loads, lake, spark)
    await scene.source.execute("ALTER TABLE pair ADD c int", "DELETE FROM pair WHERE a = 3")
    await advance(lake, scene, spark, await scene.archive())
    (done,) = await step(loads, spark)
    assert done.position is None
    assert done.error is not None
    assert "changed while" in done.error.message
    await load(lake, scene.log, scene.source.dsn(), tables=frozenset({"public.pair"}), larger=0)
    await finish(loads, scene, spark)
    await check(lake, scene, spark, "pair")


OTHERS = (("rows", "delta"), ("changes", "iceberg"), ("state", "delta"), ("end", "delta"))


@pytest.mark.parametrize(
    ("point", "format"),
    [
        ("rows", "iceberg"),
        ("changes", "delta"),
        ("state", "iceberg"),
        ("end", "iceberg"),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in OTHERS),
    ],
)
async def test_a_load_that_was_killed_continues(
    scene: Scene, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, point: str, format: str
) -> None:
    """Before the commit of ranges, in the merge of their changes, between its commit and the state, and after that.

    The next run brings the other tables to a later position first.
    """
    lake = Lake(tmp_path / "lake", format=format, settings=POSITIONS)
    await load(lake, scene.log, scene.source.dsn(), larger=0)
    lake.store.loads.end("public.item")
    loads = RangeLoads(lake, scene.log, scene.source.dsn(), FEW)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    await step(loads, spark)
    read = lake.store.loads.all()["public.pair"].rows
    if point == "rows":
        with monkeypatch.context() as patch:
            stored = type(lake.store.open("public.pair"))
            patch.setattr(stored, "commit", killed)
            with pytest.raises(KeyboardInterrupt):
                await step(loads, spark)
        assert lake.store.loads.all()["public.pair"].rows > read  # stored before the commit
        await scene.source.execute("UPDATE pair SET value = value + 5000")
    await read_all(loads, lake, spark)
    await scene.source.execute("UPDATE pair SET value = -value WHERE a < 100", "DELETE FROM pair WHERE a > 190")
    await scene.archive()
    if point != "rows":
        with monkeypatch.context() as patch:
            where: dict[str, tuple[Any, str]] = {
                "changes": (LakeMerge, "_commit"),
                "state": (TableStore, "add_version"),
                "end": (RangeLoadFiles, "end"),
            }
            patch.setattr(*where[point], killed)
            with pytest.raises(KeyboardInterrupt):
                await step(loads, spark)
        await scene.source.execute("UPDATE pair SET value = value + 5000 WHERE a < 10")
        await advance(lake, scene, spark, await scene.archive())
    lake = Lake(tmp_path / "lake")
    ended = await finish(RangeLoads(lake, scene.log, scene.source.dsn(), FEW), scene, spark)
    assert set(ended) == {"public.pair"}
    lake.store.save(lake.store.states()["public.item"].ended(lake.position()))
    await check(lake, scene, spark, "pair")


async def test_a_state_that_is_not_that_of_the_table(scene: Scene, tmp_path: Path, spark: SparkSession) -> None:
    """Another process stored it last, or another server is the publisher."""
    lake, loads = await begun(scene, tmp_path, "pair")
    await step(loads, spark)
    right = lake.store.loads.all()["public.pair"]
    for wrong, reason in (
        (replace(right, ranges=tuple(read._replace(commit=read.commit + 1) for read in right.ranges)), "not those of"),
        (replace(right, timeline=right.timeline + 1), "another server"),
    ):
        lake.store.loads.save(wrong)
        (done,) = await step(loads, spark)
        assert isinstance(done.error, LoadNeeded)
        assert reason in done.error.message
        assert not lake.store.loads.all()


async def test_a_load_that_another_version_has_begun_begins_again(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    lake, loads = await begun(scene, tmp_path, "pair")
    await step(loads, spark)
    (file,) = (tmp_path / "lake" / "loads").iterdir()
    fields = json.loads(file.read_text())
    del fields["files"]
    file.write_text(json.dumps(fields))
    assert await step(loads, spark) == []
    lines = LakeProgressLines(json=False)
    again = TableLoads(lake, scene.log, scene.source.dsn(), frozenset(), lines, larger=0)
    await anyio.to_thread.run_sync(again.check)
    await finish(loads, scene, spark)
    await check(lake, scene, spark, "pair")


async def test_a_table_that_cannot_be_read_does_not_stop_the_load_of_others(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    lake = Lake(tmp_path / "lake")
    await load(lake, scene.log, scene.source.dsn(), larger=0)
    loads = RangeLoads(lake, scene.log, scene.source.dsn(), FEW)
    await scene.source.execute("ALTER TABLE item RENAME TO other")
    item, pair = await step(loads, spark)
    await scene.source.execute("ALTER TABLE other RENAME TO item")
    assert (item.waits_for or "").startswith("another attempt: ")
    assert pair.rows > 0
    assert (await step(loads, spark))[0].rows > 0


async def test_the_log_keeps_what_a_load_needs(scene: Scene, tmp_path: Path, spark: SparkSession) -> None:
    lake, loads = await begun(scene, tmp_path, "pair")
    await step(loads, spark)
    start = lake.store.loads.all()["public.pair"].start
    await scene.source.execute("INSERT INTO log VALUES (1)")
    await advance(lake, scene, spark, await scene.archive())
    assert lake.position() > start
    assert [consumer.position for consumer in read_consumers(scene.log.directory)] == [start]
    await finish(loads, scene, spark)
    await check(lake, scene, spark, "pair")
    assert [consumer.position for consumer in read_consumers(scene.log.directory)] == [lake.position()]


async def test_progress_of_loads_is_printed(
    scene: Scene, tmp_path: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, source = Lake(tmp_path / "lake"), scene.source.dsn()
    await load(lake, scene.log, source)
    loads = TableLoads(lake, scene.log, source, frozenset(), LakeProgressLines(json=True), 0)
    for table in ("pair", "bag"):
        lake.fail_load(f"public.{table}", LoadNeeded("it was renamed"), scene.log)
    assert await anyio.to_thread.run_sync(loads.needed)
    assert not loads.problems()
    assert lake.problems().keys() == {"public.pair"}
    assert not await anyio.to_thread.run_sync(loads.needed)  # it is being loaded
    await scene.archive()
    for _ in range(10):
        await anyio.to_thread.run_sync(partial(loads.step, spark))
        await scene.archive()
    assert not lake.problems()
    await scene.source.execute("UPDATE pair SET value = -value")
    lake.fail_load("public.pair", LoadNeeded("it was renamed"), scene.log)
    async with scene.source.connection() as writer:
        await writer.execute("BEGIN; DELETE FROM pair WHERE a = 1")
        assert await anyio.to_thread.run_sync(loads.needed)
        assert not await anyio.to_thread.run_sync(partial(loads.step, spark, limit=0))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["in_one_snapshot", "loaded", "loaded"]
    assert [line["tables"] for line in lines[1:]] == [["public.bag"], ["public.pair"]]
    assert describe(lake.directory, json=False) == 1
    assert "it is being loaded by ranges" in capsys.readouterr().out


@pytest.mark.soak
async def test_the_command_loads_by_ranges_and_names_tables_that_it_cannot(scene: Scene, tmp_path: Path) -> None:
    """With --ranges-above 0 all tables are large. The command ends when all tables are loaded."""
    lake, source = Lake(tmp_path / "lake"), scene.source.dsn()
    command = ["load", str(lake.directory), "--log", str(scene.log.directory), "--no-history", "--json"]
    arguments = [sys.executable, "-m", "subscriber", "lake", *command, "--source", source, "--ranges-above", "0"]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=PIPE)

    async def archive() -> None:  # the load waits for the log to reach its snapshots
        while True:
            await scene.archive()
            await anyio.sleep(1)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(archive)
            printed, _ = await process.communicate()
            tasks.cancel_scope.cancel()
        assert process.returncode == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    lines = list(map(json.loads, printed.splitlines()))
    reasons = {line["table"]: line["reason"] for line in lines if line["event"] == "in_one_snapshot"}
    assert reasons == dict.fromkeys(
        ["public.bag", "public.log"], "the table has no replica identity that is an index, and no primary key"
    )
    loaded = [line["tables"] for line in lines if line["event"] == "loaded"]
    assert loaded[0] == ["public.bag", "public.log"]
    assert sorted(loaded[1:]) == [["public.item"], ["public.pair"]]
    for table in NAMES:
        assert lake_rows(lake, table) == await source_rows(scene, table)


OTHER_TABLES = """
CREATE TYPE mood AS ENUM ('z', 'a', 'm');
CREATE TABLE word (note int, mood mood, number numeric, big text, PRIMARY KEY (mood, number));
ALTER TABLE word ALTER big SET STORAGE EXTERNAL;
INSERT INTO word SELECT i, (ARRAY['z', 'a', 'm']::mood[])[i % 3 + 1], i, repeat('b' || i, 1500)
  FROM generate_series(1, 150) i;
CREATE TABLE area (id int, name text, big text, PRIMARY KEY (name, id)) PARTITION BY LIST (id);
CREATE TABLE area_1 PARTITION OF area FOR VALUES IN (1);
CREATE TABLE area_2 (big text, name text NOT NULL, gone int, id int NOT NULL);
ALTER TABLE area_2 DROP gone, ALTER big SET STORAGE EXTERNAL;
ALTER TABLE area ATTACH PARTITION area_2 DEFAULT;
INSERT INTO area SELECT i % 3 + 1, chr(ascii('A') + i % 26) || i, repeat('b' || i, 1500) FROM generate_series(1, 150) i;
ALTER PUBLICATION p SET (publish_via_partition_root);
ALTER PUBLICATION p SET TABLE word, area, log;
"""
SOME = "(SELECT {0} FROM {1} ORDER BY random() LIMIT {2})"
WORD, AREA = (partial(SOME.format, *table) for table in (("mood, number", "word"), ("name, id", "area")))
OTHER_CHANGES = (
    f"UPDATE word SET number = CASE scale(number) WHEN 0 THEN number + 0.00 ELSE trim_scale(number) END"
    f" WHERE (mood, number) IN {WORD(5)}",
    f"UPDATE word SET mood = 'm', number = number + 1000 WHERE (mood, number) IN {WORD(3)}",
    f"DELETE FROM word WHERE (mood, number) IN {WORD(2)}",
    "INSERT INTO word SELECT 0, 'a', count(*), 'small' FROM word ON CONFLICT DO NOTHING",
    f"UPDATE area SET name = translate(name, 'ABCxyz', 'xyzABC') WHERE (name, id) IN {AREA(5)}",
    f"UPDATE area SET id = id % 3 + 1 WHERE (name, id) IN {AREA(3)}",
    f"DELETE FROM area WHERE (name, id) IN {AREA(2)}",
)


async def test_keys_that_only_the_publisher_compares_and_partitions(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    """Enums, whose order is not that of their names; numbers, which several texts are; rows that change partitions."""
    await scene.source.execute(OTHER_TABLES)
    await scene.archive()
    lake = Lake(tmp_path / "lake")
    await load(lake, scene.log, scene.source.dsn(), larger=0)
    assert set(lake.store.loads.all()) == {"public.word", "public.area"}
    loads = RangeLoads(lake, scene.log, scene.source.dsn(), FEW)
    while not all(load_state.is_read for load_state in lake.store.loads.all().values()):
        await step(loads, spark)
        await scene.source.execute(*OTHER_CHANGES)
    ended = await finish(loads, scene, spark)
    assert set(ended) == {"public.word", "public.area"}
    await scene.source.execute(*OTHER_CHANGES)
    position = await scene.archive()
    word = await scene.source.rows("SELECT note, mood::text, number::text, big FROM word")
    expected = {"word": Counter(word), "area": await source_rows(scene, "area")}
    await advance(lake, scene, spark, position)
    assert not lake.problems()
    for table, rows in expected.items():
        assert lake_rows(lake, table) == rows


async def partly_loaded(scene: Scene, tmp_path: Path, spark: SparkSession) -> tuple[Lake, RangeLoads]:
    """Load some ranges of the partitioned table."""
    await scene.source.execute(OTHER_TABLES)
    await scene.archive()
    lake, loads = await begun(scene, tmp_path, "area")
    await step(loads, spark)
    return lake, loads


async def test_a_partition_that_is_detached_between_the_ranges(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    """No change of the log deletes its rows, so the load begins again."""
    lake, loads = await partly_loaded(scene, tmp_path, spark)
    await scene.source.execute("ALTER TABLE area DETACH PARTITION area_1")
    (done,) = await step(loads, spark)
    assert done.error is not None
    assert "changed while it was loaded" in done.error.message
    await load(lake, scene.log, scene.source.dsn(), tables=frozenset({"public.area"}), larger=0)
    await scene.archive()
    await finish(loads, scene, spark)
    await check(lake, scene, spark, "area")


async def test_a_partition_that_is_attached_between_the_ranges(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    """As after a load: the lake has the rows that it gets, and not those that it had before."""
    lake, loads = await partly_loaded(scene, tmp_path, spark)
    await scene.source.execute(
        "CREATE TABLE area_3 (LIKE area)",
        "INSERT INTO area_3 VALUES (77, '0', ''), (77, 'zz', '')",
        "ALTER TABLE area ATTACH PARTITION area_3 FOR VALUES IN (77)",
        "INSERT INTO area VALUES (77, '1', ''), (77, 'zy', '')",
        "UPDATE area SET id = 77 WHERE (name, id) IN (SELECT name, id FROM area WHERE id = 2 ORDER BY name LIMIT 5)",
    )
    await read_all(loads, lake, spark)
    await finish(loads, scene, spark)
    await scene.source.execute("DELETE FROM area_3 WHERE name IN ('0', 'zz')")
    await check(lake, scene, spark, "area")
