"""Parts of a table: together they are the table, and no row is in two of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from subscriber.connection.connect import open_session
from subscriber.connection.session import Session
from subscriber.publisher.partitions import TablePartition, partition_table, whole
from subscriber.spark.copy.executor import PartTask
from subscriber.spark.copy.plan import BUNDLE, bundle, spread
from tests.plugins.fix_cluster import Database


@asynccontextmanager
async def session(database: Database) -> AsyncIterator[Session]:
    opened = await open_session(database.dsn(), settings={"search_path": "public"})
    try:
        yield opened
    finally:
        opened.abort()


async def parts_of(database: Database, table: str, part_bytes: int) -> list[TablePartition]:
    async with session(database) as opened:
        ((oid,),) = await opened.rows(f"SELECT '{table}'::regclass::oid")
        return await partition_table(opened, int(oid or 0), part_bytes)


@pytest.mark.parametrize("part_bytes", [8192, 50_000, 10**9])
async def test_parts_are_the_table(source_db: Database, part_bytes: int) -> None:
    await source_db.execute(
        "CREATE TABLE t AS SELECT i AS id, repeat('x', i % 300) AS pad FROM generate_series(1, 3000) i",
        "DELETE FROM t WHERE id % 7 = 0",
    )
    parts = await parts_of(source_db, "t", part_bytes)
    assert (len(parts) == 1) == (part_bytes == 10**9)
    found = [row for part in parts for (row,) in await source_db.rows(part.select("id", ("id > 10", "id = 3")))]
    assert sorted(found) == [i for i in range(1, 3001) if i % 7 and (i > 10 or i == 3)]


async def test_an_empty_table_is_one_part(source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t (id int)")
    (part,) = await parts_of(source_db, "t", 8192)
    assert part == TablePartition("public", "t", part.filenode)


async def test_leaves_of_a_partitioned_table(source_db: Database) -> None:
    await source_db.execute(
        "CREATE TABLE t (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (100) TO (200)",
        "INSERT INTO t SELECT generate_series(0, 199)",
    )
    parts = await parts_of(source_db, "t", 10**9)
    assert [part.name for part in parts] == ["t1", "t2"]
    all_of_it = whole("public", "t", parts)
    assert len(await source_db.rows(all_of_it.select("id"))) == 200
    assert whole("public", "t1", parts[:1]).filenode == parts[0].filenode


async def test_a_rewritten_table_has_another_filenode(source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t AS SELECT generate_series(1, 10) AS id")
    (before,) = await parts_of(source_db, "t", 8192)
    await source_db.execute("VACUUM FULL t")
    (after,) = await parts_of(source_db, "t", 8192)
    assert before.filenode != after.filenode


def task(relid: int, size: int, *, is_whole: bool) -> PartTask:
    part = TablePartition("public", "t", None)
    return PartTask(
        "", False, "", "", 1, b"", relid, 0, part, "", "public", "t", (), "none", None, False, True, size, is_whole
    )


def test_small_tables_are_one_task_and_parts_of_large_ones_are_not() -> None:
    parts = [task(1, 100, is_whole=False), task(1, 100, is_whole=False), task(2, 10**8, is_whole=True)]
    parts += [task(relid, 10_000, is_whole=True) for relid in range(3, 3 + BUNDLE + 5)]
    assert [len(together) for together in bundle(parts)] == [1, 1, 1, BUNDLE, 5]
    assert [part for together in bundle(parts) for part in together] == parts
    assert bundle(parts[:2]) == [(parts[0],), (parts[1],)]
    assert bundle([]) == []


def test_ranges_of_several_tables_are_copied_in_turns() -> None:
    large, middle, third = ([(task(relid, 100, is_whole=False),)] * count for relid, count in ((1, 5), (2, 2), (3, 2)))
    rest = [(task(4, 10, is_whole=True),), (task(5, 10, is_whole=True), task(6, 10, is_whole=True))]

    def order(slots: int) -> list[int]:
        return [together[0].relid for together in spread([*large, *middle, *third, *rest], slots)]

    assert order(1) == [1, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5]
    assert order(2) == [1, 2, 1, 2, 1, 3, 1, 3, 1, 4, 5]
    assert order(9) == [1, 2, 3, 1, 2, 3, 1, 1, 1, 4, 5]
    assert spread([], 2) == []
