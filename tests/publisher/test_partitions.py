"""Parts of a table: together they are the table, and no row is in two of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from subscriber.connection.connect import open_session
from subscriber.connection.session import Session
from subscriber.publisher.partitions import TablePartition, partition_table, whole
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
    rows_read = [row for part in parts for (row,) in await source_db.rows(part.select("id", ("id > 10", "id = 3")))]
    assert sorted(rows_read) == [i for i in range(1, 3001) if i % 7 and (i > 10 or i == 3)]


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
