"""Comparison on Spark gives the result of the comparison in this process."""

from __future__ import annotations

from pyspark.sql import SparkSession

from subscriber.comparison import comparison
from subscriber.spark import verify
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber


async def test_spark_finds_the_differences_that_verify_finds(
    source_db: Database, target_db: Database, subscriber: Subscriber, spark: SparkSession
) -> None:
    await source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        "CREATE TABLE same (id int PRIMARY KEY)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 5000) i",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    await target_db.execute("CREATE TABLE t (id int PRIMARY KEY, a text)", "CREATE TABLE same (id int PRIMARY KEY)")
    await subscriber.create(source_db, "p", "s")
    await subscriber.wait_for_ready(source_db)
    await target_db.execute(
        "DELETE FROM t WHERE id = 5", "UPDATE t SET a = 'x' WHERE id = 4000", "INSERT INTO t VALUES (6000)"
    )
    by_spark = await verify(target_db.dsn(), "s", spark=spark, part_bytes=64 * 1024)
    by_asyncio = await comparison.verify(target_db.dsn(), "s")
    assert by_spark.tables == by_asyncio.tables
    (table,) = [table for table in by_spark.tables if not table.is_same]
    assert (table.missing, table.extra, list(table.changed)) == ([("5",)], [("6000",)], [("4000",)])
