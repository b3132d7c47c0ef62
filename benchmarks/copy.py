"""The initial copy of one large and fifty small tables: with Spark, by PostgreSQL's own subscription, by JDBC.

python -m benchmarks.copy [--rows N] [--rounds N] [--jdbc postgresql.jar] [--json]

Our copy and PostgreSQL's alternate in the same servers. The time ends when all tables have all their rows: for
PostgreSQL when every table is in finishedcopy or later, for ours when copy_tables() returns. Spark is started before,
and has run Python tasks; its start time is reported separately. JDBC means that Spark reads and writes with its own
sources, with the same number of partitions. It needs the driver's jar, which is not one of our dependencies (Debian:
libpostgresql-jdbc-java).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import monotonic

import anyio
import anyio.to_thread
from pyspark.sql import SparkSession

from benchmarks.environment import INSERT, TABLE, Stage, connection, execute, stage
from subscriber.database import connect
from subscriber.spark.copy.job import copy_tables
from subscriber.spark.session import QUICK, spark_session
from subscriber.spark.tasks import run_tasks

SMALL = 50
SMALL_ROWS = 1000
PART_BYTES = 32 * 1024 * 1024
JAR = Path("/usr/share/java/postgresql.jar")
SUBSCRIPTION = "CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION p WITH ({options})"
COPIED = "SELECT bool_and(srsubstate IN ('f', 's', 'r')) FROM pg_catalog.pg_subscription_rel"


def names() -> list[str]:
    return ["items", *(f"small_{number}" for number in range(SMALL))]


def warm_up(number: int) -> int:
    """Run the first-time initialization of an executor."""
    import subscriber.spark.copy.executor

    return number + len(subscriber.spark.copy.executor.TARGET_SETTINGS)


async def prepare(on: Stage, rows: int) -> None:
    for server in (on.source, on.target):
        await execute(server, TABLE, *(f"CREATE TABLE {name} (LIKE items INCLUDING ALL)" for name in names()[1:]))
    await execute(on.source, INSERT.format(first=1, last=rows))
    for name in names()[1:]:
        await execute(on.source, f"INSERT INTO {name} SELECT * FROM items WHERE id <= {SMALL_ROWS}")
    await execute(on.source, "VACUUM ANALYZE", "CREATE PUBLICATION p FOR ALL TABLES")


async def empty(on: Stage, rows: int) -> None:
    """Check that all rows arrived, and remove them."""
    async with connection(on.target) as one:
        counts = [await one.fetchval(f"SELECT count(*) FROM {name}") for name in names()]
        assert counts == [rows] + [SMALL_ROWS] * SMALL, counts
        await one.execute(f"TRUNCATE {', '.join(names())}")
        await one.execute("CHECKPOINT")


async def native(on: Stage, options: str) -> float:
    async with connection(on.target) as one:
        started = monotonic()
        await one.execute(SUBSCRIPTION.format(dsn=on.source.dsn(), options=options))
        while not await one.fetchval(COPIED):
            await anyio.sleep(0.005)
        took = monotonic() - started
        while await one.fetchval("SELECT count(*) FROM pg_catalog.pg_subscription_rel WHERE srsubstate <> 'r'"):
            await anyio.sleep(0.05)
            await execute(on.source, "SELECT pg_logical_emit_message(true, 'benchmark', '')")
        await one.execute("DROP SUBSCRIPTION s")
    return took


async def ours(on: Stage, spark: SparkSession) -> float:
    async with connect(on.target.dsn()) as db:
        # Disabled, so that only this program copies.
        await db.execute(SUBSCRIPTION.format(dsn=on.source.dsn(), options="enabled = false, copy_engine = spark"))
        started = monotonic()
        await copy_tables(on.target.dsn(), "s", spark=spark, part_bytes=PART_BYTES)
        took = monotonic() - started
        await db.execute("DROP SUBSCRIPTION s")
    return took


async def jdbc(on: Stage, spark: SparkSession, rows: int) -> float:
    def copy() -> None:
        for name in names():
            count = rows if name == "items" else SMALL_ROWS
            url = {"driver": "org.postgresql.Driver", "user": "postgres", "dbtable": name}
            spark.read.format("jdbc").options(
                **url,
                url=f"jdbc:postgresql://127.0.0.1:{on.source.port}/postgres",
                fetchsize="10000",
                partitionColumn="id",
                lowerBound="1",
                upperBound=str(count + 1),
                numPartitions="4" if name == "items" else "1",
            ).load().write.format("jdbc").options(
                **url,
                url=f"jdbc:postgresql://127.0.0.1:{on.target.port}/postgres?reWriteBatchedInserts=true",
                batchsize="10000",
            ).mode("append").save()

    started = monotonic()
    await anyio.to_thread.run_sync(copy)
    return monotonic() - started


async def measure(rows: int, rounds: int, jar: Path | None) -> dict[str, list[float]]:
    conf = {"spark.jars": str(jar)} if jar is not None else {}
    started = monotonic()
    # As `subscriber copy` starts it. But the JVM processes JDBC's rows, so with JDBC it uses its whole compiler.
    with spark_session(conf=conf, java_options=QUICK if jar is None else "") as spark:
        run_tasks(spark, warm_up, [0, 1])
        found: dict[str, list[float]] = {"start of Spark": [monotonic() - started]}
        async with stage() as on:
            await prepare(on, rows)
            ways: dict[str, Callable[[], Awaitable[float]]] = {
                "spark": lambda: ours(on, spark),
                "native, text": lambda: native(on, "binary = false"),
                "native, binary": lambda: native(on, "binary = true"),
            }
            if jar is not None:
                ways["jdbc"] = lambda: jdbc(on, spark, rows)
            for _ in range(rounds):
                for name, way in ways.items():
                    found.setdefault(name, []).append(await way())
                    await empty(on, rows)
    return found


def report(found: dict[str, list[float]]) -> None:
    base = median(found["spark"])
    for name, times in found.items():
        ratio = f"  {median(times) / base:.2f} x spark's" if name != "start of Spark" else ""
        print(f"{name:16} {median(times):7.2f} s{ratio}   {[round(time, 2) for time in times]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the large table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jdbc", type=Path, default=JAR if JAR.exists() else None, help="pgjdbc's jar")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = anyio.run(measure, options.rows, options.rounds, options.jdbc)
    if options.json:
        print(json.dumps(found))
    else:
        report(found)


if __name__ == "__main__":
    main()
