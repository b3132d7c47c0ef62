"""The lake compared with its source: at every checked position, the Delta tables have the source's rows."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from subscriber.changelog.consumers import read_consumers
from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import Identity
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import LoggedColumn, TableVersion
from subscriber.changelog.writer import log_writer
from subscriber.cli.commands.lake.run import describe
from subscriber.cli.main import app
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake, boundary_file
from subscriber.spark.lake.lake_merge import LakeMerge
from subscriber.spark.lake.lake_table import LakeTable
from subscriber.spark.lake.load import load
from subscriber.spark.lake.retention import forget_older
from subscriber.spark.tables.table_format import FORMATS, ICEBERG
from tests.plugins.fix_cluster import Database
from tests.spark.scene import NAMES, POSITIONS, Scene, archived

Rows = Counter[tuple[Any, ...]]


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


async def source_rows(scene: Scene) -> dict[str, Rows]:
    return {table: Counter(await scene.source.rows(f"SELECT * FROM {table}")) for table in NAMES}


def lake_rows(lake: Lake, position: Lsn | None = None) -> dict[str, Rows]:
    def rows(table: str) -> Rows:
        rows_read = lake.to_arrow(f"public.{table}", position).to_pylist()
        return Counter(tuple(row.values()) for row in rows_read)

    return {table: rows(table) for table in NAMES}


async def advance(
    lake: Lake, scene: Scene, spark: SparkSession, until: Lsn, changes: int = 10**6, *, history: bool = False
) -> int:
    """Bring the lake there; how many batches that took."""
    log, batches = scene.log, 0
    while (batch := lake.next_batch(log, until, changes)) is not None:
        await anyio.to_thread.run_sync(partial(lake.advance, spark, log, *batch, history=history))
        batches += 1
    return batches


@pytest.mark.parametrize("format", FORMATS)
async def test_all_tables_are_the_sources_at_five_positions(
    scene: Scene, tmp_path: Path, spark: SparkSession, format: str
) -> None:
    lake = Lake(tmp_path / "lake", format=format, settings=POSITIONS)
    await scene.write(30)
    begins = await load(lake, scene.log, scene.source.dsn())
    seen = {begins: await source_rows(scene)}
    for _ in range(5):
        await scene.write(60)
        position = await scene.archive()
        seen[position] = await source_rows(scene)
        assert await advance(lake, scene, spark, position) == 1
    assert await advance(lake, scene, spark, position) == 0
    files = [file for label in lake.tables() for file in lake.store.open(label).files(None)]
    assert any(file.deletes for file in files) == (format == ICEBERG)
    for position, rows in seen.items():
        assert lake_rows(lake, position) == rows
    assert lake_rows(lake, Lsn(position + 10**9)) == rows
    assert lake.to_arrow("public.item", str(begins)).num_rows == seen[begins]["item"].total()
    for before in (Lsn(begins - 1), str(Lsn(begins - 1)), int(begins - 1)):
        with pytest.raises(StatementError, match=f"nothing as of {Lsn(begins - 1)}"):
            lake.to_arrow("public.item", before)  # type: ignore[arg-type]
    with pytest.raises(StatementError, match="must be an LSN"):
        lake.to_arrow("public.item", "yesterday")
    with pytest.raises(StatementError, match="no table"):
        lake.to_arrow("public.nowhere")
    assert lake_rows(Lake(tmp_path / "lake")) == rows


@pytest.mark.soak
async def test_added_columns_follow_and_history_is_kept(scene: Scene, tmp_path: Path, spark: SparkSession) -> None:
    lake = Lake(tmp_path / "lake")
    begins = await load(lake, scene.log, scene.source.dsn())
    await scene.source.execute("UPDATE pair SET value = 7000 WHERE a = 1", "ALTER TABLE pair ADD later date")
    await scene.source.execute(
        "UPDATE pair SET later = '2030-01-02' WHERE a = 2", "INSERT INTO pair VALUES (99, 'n', 99)"
    )
    await advance(lake, scene, spark, await scene.archive(), history=True)
    assert lake_rows(lake)["pair"] == (await source_rows(scene))["pair"]
    history = spark.read.parquet(str(tmp_path / "lake" / "history")).where("table = 'pair'")
    assert history.groupBy("op").count().orderBy("op").collect() == [("insert", 1), ("update", 2)]
    logged = spark.read.format("pgchanges").options(start=str(begins), tables="public.pair").load(str(tmp_path / "log"))
    kept, there = (
        sorted(rows.where("op <> 'message'").select("commit_lsn", "number").collect()) for rows in (history, logged)
    )
    assert kept == there


async def test_a_batch_that_was_begun_is_done_again_to_the_same_end(
    scene: Scene, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between two tables' commits, with a longer log when it resumes."""
    lake = Lake(tmp_path / "lake")
    await load(lake, scene.log, scene.source.dsn())
    await scene.write(60)
    first = await scene.archive()
    rows = await source_rows(scene)
    done: list[str] = []
    bring = LakeMerge._commit

    def ends(self: LakeMerge, state: LakeTable, *rest: Any) -> bool:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(state.label)
        return bring(self, state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LakeMerge, "_commit", ends)
        with pytest.raises(KeyboardInterrupt):
            lake.advance(spark, scene.log, *(lake.next_batch(scene.log, first) or ()))
    assert len({DeltaTable(tmp_path / "lake" / "tables" / name).version() for name in lake.tables()}) == 2
    await scene.write(60)
    last = await scene.archive()
    assert await advance(lake, scene, spark, last) == 2
    assert lake_rows(lake, first) == rows
    assert lake_rows(lake) == await source_rows(scene)


@pytest.mark.soak
async def test_a_value_that_arrow_cannot_hold_is_named_and_can_be_kept_as_text(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    lake = Lake(tmp_path / "lake")
    await load(lake, scene.log, scene.source.dsn())
    await scene.source.execute("INSERT INTO item (id, at) VALUES (777, 'infinity')")
    await load(lake, scene.log, scene.source.dsn(), tables=frozenset({"public.item"}))
    (label, problem), *others = lake.problems().items()
    assert (label, others) == ("public.item", [])
    assert "public.item.at" in problem.message
    assert "infinity" not in problem.message
    assert problem.hint.endswith(
        f"lake reload --log {tmp_path}/log --text public.item.at {lake.directory} public.item`."
    )
    as_text = frozenset({"public.item.at"})
    await load(lake, scene.log, scene.source.dsn(), as_text=as_text, tables=frozenset({label}))
    await scene.source.execute("UPDATE item SET at = '-infinity' WHERE id = 777")
    await advance(lake, scene, spark, await scene.archive())
    rows = lake.table("public.item").to_pyarrow_table(columns=["id", "at"]).to_pylist()
    assert {"id": 777, "at": "-infinity"} in rows


async def test_old_positions_are_forgotten(scene: Scene, tmp_path: Path, spark: SparkSession) -> None:
    lake = Lake(tmp_path / "lake")
    await load(lake, scene.log, scene.source.dsn())
    seen = {}
    for _ in range(4):
        await scene.write(40)
        position = await scene.archive()
        await advance(lake, scene, spark, position, history=True)
        seen[position] = await source_rows(scene)
    (consumer,) = read_consumers(scene.log.directory)
    assert (consumer.position, consumer.program) == (position, f"lake in {lake.directory}")

    positions = lake.boundaries()
    for old in positions[:3]:
        os.utime(str(boundary_file(lake.directory, old)), (0, 0))
    done = forget_older(lake, 3600)
    assert (done.positions, done.errors) == (3, {})
    assert lake.boundaries() == positions[3:]
    for checked in positions[3:]:
        assert lake_rows(lake, checked) == seen[checked]
    with pytest.raises(StatementError, match="nothing as of"):
        lake.table("public.item", positions[2])
    assert {path.name for path in (lake.directory / "history").iterdir()} == {f"upto={position:016X}"}

    await scene.source.execute("ALTER PUBLICATION p DROP TABLE log")
    lake.end_table("public.log")
    done = forget_older(lake, 0, margin=0)
    assert done.files > 0
    assert lake.boundaries() == [position]
    for label in ("public.item", "public.pair", "public.bag"):
        table = lake.table(label)
        stored = {str(path) for path in Path(str(lake.store.path(label))).glob("*.parquet")}
        assert stored == {uri.removeprefix("file://") for uri in table.file_uris()}
        assert len(lake.store.versions(label)) == 1
    assert "public.log" in lake.store.states()  # it can still be read as of the newest position

    await scene.write(40)
    await advance(lake, scene, spark, await scene.archive())
    forget_older(lake, 0, margin=0)
    rows = await source_rows(scene)
    for name in ("item", "pair", "bag"):
        rows_read = lake.table(f"public.{name}").to_pyarrow_table().to_pylist()
        assert Counter(tuple(row.values()) for row in rows_read) == rows[name]
    assert "public.log" not in lake.store.states()
    assert not lake.store.path("public.log").exists()


async def test_a_delta_table_that_was_removed_is_loaded_again(
    scene: Scene, tmp_path: Path, spark: SparkSession
) -> None:
    """The versions of the new Delta table have the numbers of those of the first one."""
    lake, label = Lake(tmp_path / "lake"), frozenset({"public.pair"})
    begins = await load(lake, scene.log, scene.source.dsn(), tables=label)
    await scene.source.execute("UPDATE pair SET value = -1 WHERE a = 1")
    first = await scene.archive()
    await advance(lake, scene, spark, first)
    shutil.rmtree(tmp_path / "lake" / "tables" / "public.pair")
    await load(lake, scene.log, scene.source.dsn(), tables=label)
    for value in (2, 3):
        await scene.source.execute(f"UPDATE pair SET value = -{value} WHERE a = {value}")
        await advance(lake, scene, spark, await scene.archive())
    rows_read = lake.table("public.pair").to_pyarrow_table().to_pylist()
    assert Counter(tuple(row.values()) for row in rows_read) == (await source_rows(scene))["pair"]
    for position in (begins, first):
        with pytest.raises(StatementError, match="have been removed from the lake"):
            lake.table("public.pair", position)


def test_a_lake_tells_what_it_has_and_takes_no_other_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = []
    for slot in ("a", "b"):
        writer = log_writer(tmp_path / slot)
        writer.open()
        writer.create(Identity(7, slot, ("p",), Lsn(0x1000)))
        writer.close()
        logs.append(ChangeLog(tmp_path / slot))
    lake = Lake(tmp_path / "lake")
    with pytest.raises(StatementError, match="there is no lake"):
        describe(lake.directory, json=True)
    lake.begin(logs[0])
    lake.put(
        logs[0],
        TableVersion(Lsn(1), Lsn(1), 7, "public", "t", "d", (LoggedColumn("id", 23, -1, True, 1),)),
        Lsn(0x1000),
    )
    assert not lake.exists  # the load has not finished
    lake.finish_load(Lsn(0x1000))
    assert describe(lake.directory, json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "lsn": "0/1000",
        "boundaries": ["0/1000"],
        "format": "delta",
        "tables": {
            "public.t": {
                "state": "current",
                "lsn": "0/1000",
                "message": None,
                "hint": None,
                "partitions": [],
                "cluster": [],
            }
        },
    }
    assert lake.next_batch(logs[0], Lsn(0x1000)) is None
    with pytest.raises(StatementError, match="another log"):
        lake.begin(logs[1])
    with pytest.raises(StatementError, match="another log"):
        lake.next_batch(logs[1], Lsn(0x1000))


def test_a_position_without_changes_can_wait(tmp_path: Path) -> None:
    writer, start, end = log_writer(tmp_path / "log"), Lsn(0x1000), Lsn(0x2000)
    writer.open()
    writer.create(Identity(7, "a", ("p",), start))
    builder = BlockBuilder(start)
    builder.note(end)
    writer.append(builder.take())
    writer.sync()
    lake, log = Lake(tmp_path / "lake"), ChangeLog(tmp_path / "log")
    lake.begin(log)
    lake.finish_load(start)
    assert lake.next_batch(log, log.end(), even_empty=False) is None
    assert lake.next_batch(log, log.end()) == (start, end)
    writer.close()


def test_storage_that_fails_is_an_error_with_its_reason(tmp_path: Path) -> None:
    writer = log_writer(tmp_path / "log")
    writer.open()
    writer.create(Identity(7, "a", ("p",), Lsn(0x1000)))
    writer.close()
    (tmp_path / "lake" / "lake.json").mkdir(parents=True)
    result = CliRunner().invoke(app, ["lake", "advance", str(tmp_path / "lake"), "--log", str(tmp_path / "log")])
    assert isinstance(result.exception, StatementError)
    assert "cannot be read or written: Is a directory" in str(result.exception)


ODD_SCHEMA, ODD_TABLE, LATE_TABLE = '../../up"', '/../../x"; y%2F\n\x1b[31m', ".."
# The last ones are names that the staged files have for themselves, or had once.
# Some differ only in case, which Delta does not distinguish.
ODD_COLUMNS = (
    *('i"d', 'source."v" OR true', "it's;--\n", "op", "_op", "_u_x", "_from_x", "value0", "back`tick"),
    *("OP", "oP", "op_11", 'I"D'),
)


def odd(*names: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


async def test_names_stay_in_their_place(source_db: Database, tmp_path: Path, spark: SparkSession) -> None:
    """As files inside the lake, and as names in Delta's merge."""
    first, late = odd(ODD_SCHEMA, ODD_TABLE), odd(ODD_SCHEMA, LATE_TABLE)
    key, value, *more = map(odd, ODD_COLUMNS)
    shape = f"({key} int PRIMARY KEY, {value} text, {', '.join(f'{name} text' for name in more)})"
    await source_db.execute(
        f"CREATE SCHEMA {odd(ODD_SCHEMA)}",
        f"CREATE TABLE {first} {shape}; CREATE TABLE {late} {shape}",
        f"INSERT INTO {first} SELECT i, 'v', {', '.join(f'i + {n}' for n in range(len(more)))}"
        " FROM generate_series(1, 5) i",
        f"CREATE PUBLICATION p FOR TABLE {first}",
    )
    directory = tmp_path / "inside"
    directory.mkdir()
    scene = Scene(source_db, directory)
    await scene.archive()
    lake = Lake(directory / "lake")
    await load(lake, scene.log, source_db.dsn())
    await source_db.execute(
        f"ALTER PUBLICATION p ADD TABLE {late}",
        f"UPDATE {first} SET {value} = 'new' WHERE {key} < 3",
        f"DELETE FROM {first} WHERE {key} = 5",
        f"UPDATE {first} SET {key} = 40 WHERE {key} = 4",
        f"INSERT INTO {late} VALUES (1, 'a', 'b')",
    )
    assert await advance(lake, scene, spark, await scene.archive(), history=True) == 1
    names = [f"{ODD_SCHEMA}.{ODD_TABLE}", f"{ODD_SCHEMA}.{LATE_TABLE}"]
    assert sorted(lake.tables()) == sorted(names)
    assert list(lake.problems()) == [names[1]]
    await load(lake, scene.log, source_db.dsn(), tables=frozenset(names[1:]))
    await source_db.execute(
        f"ALTER TABLE {first} RENAME op TO {odd('Value0')}",
        f"INSERT INTO {first} VALUES (50, 'a', {', '.join(map(str, range(len(more))))})",
    )
    await advance(lake, scene, spark, await scene.archive())
    columns = set(lake.table(names[0]).to_pyarrow_table().column_names)
    assert {"Value0", "value0_8", "OP", "oP_11", "op_11_12", 'I"D_13'} <= columns
    for name, table in zip(names, (first, late), strict=True):
        rows_read = lake.table(name).to_pyarrow_table().to_pylist()
        assert Counter(tuple(row.values()) for row in rows_read) == Counter(
            await source_db.rows(f"SELECT * FROM {table}")
        )
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert {path.name for path in directory.iterdir()} == {"log", "lake"}
    assert len(list((directory / "lake" / "tables").iterdir())) == 2
