"""Spark jobs exclude tables with hooks, and report it."""

from __future__ import annotations

import anyio
import pytest
from pyspark.sql import SparkSession

import subscriber
from subscriber import Hook, Hooks
from subscriber.comparison.comparison import verify
from subscriber.spark.copy.job import copy_tables
from tests.plugins.fix_cluster import Database

TABLES = "CREATE TABLE {} (a int PRIMARY KEY, b text); CREATE TABLE plain (a int PRIMARY KEY)"


@pytest.mark.soak  # as it waits for Spark
@pytest.mark.timeout(300)
async def test_hooks_change_rows_copied_and_verified_by_spark(
    source_db: Database, target_db: Database, spark: SparkSession
) -> None:
    hooks = {"s": Hooks({"t": Hook(to="u", mask={"b": "x"})})}
    await source_db.execute(TABLES.format("t"), "INSERT INTO t VALUES (1, 'secret')", "INSERT INTO plain VALUES (1)")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await target_db.execute(TABLES.format("u"))
    async with subscriber.connect(target_db.dsn(), hooks=hooks) as db:
        await db.execute(
            f"CREATE SUBSCRIPTION s CONNECTION '{source_db.dsn()}' PUBLICATION p WITH (copy_engine = spark)"
        )
        await copied_first(target_db, spark)
        assert await target_db.rows("SELECT * FROM u") == []
        assert await target_db.rows("SELECT * FROM plain") == [(1,)]
        async with db.running():
            with anyio.fail_after(60):
                await db.wait_for_sync("s")
            assert await target_db.rows("SELECT * FROM u") == [(1, "x")]
            found = {table.name: table for table in (await verify(target_db.dsn(), "s")).tables}
    assert found["public.t"].note == "hooks change its rows on their way"
    assert found["public.plain"].is_same


async def copied_first(target: Database, spark: SparkSession) -> None:
    """Run `subscriber copy` while no launcher runs that could hand over."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: copy_tables(target.dsn(), "s", spark=spark))
        await target.wait_for("SELECT count(*) FROM plain", 1, timeout=60)
        tasks.cancel_scope.cancel()
