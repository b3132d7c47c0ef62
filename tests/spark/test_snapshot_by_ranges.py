"""write_snapshot(): large tables are read by ranges while rows change, and the stream continues exactly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from subscriber.changelog.consumers import read_consumers
from subscriber.changelog.row_columns import split_lines
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.spark import write_snapshot
from subscriber.spark.pgcdc import BATCH_OPTIONS, CdcQuery, CdcReader
from subscriber.spark.snapshot.ranges import FOLDER, RangeTables, copy_lines
from subscriber.spark.sources.arrow_types import cells_array
from subscriber.spark.sources.table_snapshot import TableSnapshot
from tests.archive.test_worker import archiving
from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene, archived


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


@asynccontextmanager
async def repeating(function: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Call the function again and again during the block."""

    async def repeat() -> None:
        while True:
            await function()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(repeat)
        yield
        tasks.cancel_scope.cancel()


async def snapshot(scene: Scene, spark: SparkSession | None, **arguments: Any) -> Lsn:
    source, log, directory = scene.source.dsn(), scene.log.directory, scene.directory / "snapshot"
    call = partial(write_snapshot, source, log=log, directory=directory, spark=spark, ranges_above=0, **arguments)
    return await anyio.to_thread.run_sync(call)


def replayed(scene: Scene, table: str, key: tuple[str, ...]) -> dict[Any, dict[str, Any]]:
    """Return the rows after the snapshot and all changes, by key."""
    options = {"tables": table, "snapshot": str(scene.directory / "snapshot"), "path": str(scene.log.directory)}
    reader = CdcReader(CdcQuery(options, BATCH_OPTIONS))
    rows: dict[Any, dict[str, Any]] = {}
    for part in reader.partitions():
        for batch in reader.read(part):
            for row in batch.to_pylist():
                old = row["before"] or row["after"]
                before = rows.pop(tuple(old[name] for name in key), None)
                assert (before is None) == (row["op"] in "rc"), row
                if (after := row["after"]) is not None:
                    after.update({name: before[name] for name in row["_unchanged"] or () if before is not None})
                    rows[tuple(after[name] for name in key)] = after
    return rows


async def published(scene: Scene, table: str) -> list[tuple[Any, ...]]:
    return sorted(await scene.source.rows(f"SELECT * FROM {table}"))


async def test_rows_that_change_while_they_are_read(scene: Scene, spark: SparkSession) -> None:
    await scene.source.execute("INSERT INTO pair SELECT i, 'b' || i, i FROM generate_series(1000, 60000) i")
    moves = (
        "UPDATE pair SET a = 60000 - a WHERE a IN (SELECT (random() * 60000)::int FROM generate_series(1, 20))",
        "UPDATE item SET id = -id WHERE id IN (SELECT (random() * 100)::int FROM generate_series(1, 3))",
    )

    async def change() -> None:
        await scene.write(5)
        with suppress(asyncpg.UniqueViolationError):
            await scene.source.execute(*moves)

    async with archiving(scene.source, scene.directory / "log"), repeating(change):
        position = await snapshot(scene, spark, consumer="mine")
        await change()
    await scene.archive()
    for table, key in (("pair", ("a", "b")), ("item", ("id",))):
        rows_read = replayed(scene, f"public.{table}", key)
        assert sorted(tuple(row.values()) for row in rows_read.values()) == await published(scene, table)
    written = TableSnapshot.read(scene.directory / "snapshot")
    by_ranges = {file.table for file in written.files if file.name.startswith("ranges-")}
    assert by_ranges == {"public.pair", "public.item"}  # the others have no key
    assert not (scene.directory / "snapshot" / FOLDER).exists()
    assert [(reader.name, reader.position) for reader in read_consumers(scene.log.directory)] == [("mine", position)]


async def test_a_killed_call_continues(scene: Scene, spark: SparkSession) -> None:
    """It ends after the ranges are read: the rows are those of the first call, with the changes since."""
    folder = scene.directory / "snapshot"
    tables = frozenset({"public.item", "public.pair"})
    ranges = RangeTables(spark, scene.source.dsn(), scene.log, folder / FOLDER)
    async with archiving(scene.source, scene.directory / "log"):
        with ranges.lock():
            await anyio.to_thread.run_sync(ranges.load, tables)
            (folder / "000000.copy").write_bytes(b"unfinished")
            for session in (spark, None):
                with pytest.raises(StatementError, match="another process writes the snapshot"):
                    await snapshot(scene, session, tables=tables)
            assert (folder / "000000.copy").exists()
        begun = sorted((folder / FOLDER / "tables").rglob("*.parquet"))
        await scene.write(20)
        await snapshot(scene, spark, tables=tables)
        read = [file.table for file in TableSnapshot.read(folder).files]
        assert set(read) == tables
        assert begun
    await scene.archive()
    rows_read = replayed(scene, "public.pair", ("a", "b"))
    assert sorted(tuple(row.values()) for row in rows_read.values()) == await published(scene, "pair")


async def test_columns_that_change_after_the_ranges(scene: Scene, spark: SparkSession) -> None:
    """An error, and the next call begins again. Without a session it reads all tables in one snapshot."""
    folder = scene.directory / "snapshot"
    ranges = RangeTables(spark, scene.source.dsn(), scene.log, folder / FOLDER)
    async with archiving(scene.source, scene.directory / "log"):
        with ranges.lock():
            await anyio.to_thread.run_sync(ranges.load, frozenset({"public.pair"}))
        await scene.source.execute("ALTER TABLE pair ADD more int DEFAULT 5", "INSERT INTO pair VALUES (-1, 'x', -1)")
        with pytest.raises(ApplyError, match=r'table "public\.pair" could not be read by ranges: its columns changed'):
            await snapshot(scene, spark, tables=["public.pair"])
        await snapshot(scene, None, tables=["public.pair"])
    await scene.archive()
    rows_read = replayed(scene, "public.pair", ("a", "b"))
    assert sorted(tuple(row.values()) for row in rows_read.values()) == await published(scene, "pair")
    assert not (folder / FOLDER).exists()
    assert not read_consumers(scene.log.directory)


def test_rows_are_written_as_copy_prints_them() -> None:
    columns = [
        pa.array(["a\tb", "\\N", "\\.", None, "", "x\r\n"]),
        pa.array([None, "\\", "é", "", None, "\b"]),
    ]
    assert copy_lines([column.slice(0, 0) for column in columns]) == b""
    assert copy_lines([pa.array(["plain", None])]) == b"plain\n\\N\n"
    cells = split_lines(copy_lines(columns), 2)
    for column, cell in zip(columns, cells, strict=True):
        assert cells_array(len(column), cell).cast(pa.string()) == column
