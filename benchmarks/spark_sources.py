"""Spark's data sources: processor time of a change by pgcdc and pgchanges, and pgsnapshot beside Spark's JDBC.

    python -m benchmarks.spark_sources [--rows N] [--rounds N] [--narrow] [--jdbc postgresql.jar] [--json]

The change log has an insert of each row in large transactions, then an update of each row in transactions of one to
five changes, then a delete of every tenth row. `cost` is the processor time of the JVM and all Python processes of a
query that reads all of them into Spark's `noop` sink, divided by the number of changes, of two processors. JSON means
that Spark parses a column of Debezium-like JSON, which a file has, with from_json(). `slope` is the cost of a change in
a longer query: what four scans of the log take more than one, divided by the changes of three. So it has no start of a
query and less of the JVM's compilation.

The queries on tables are timed: count, one row by its key, one column, and all columns. pgsnapshot is given the columns
and the condition; JDBC gets them from Spark, and has the same partitions. JDBC needs the jar of the driver, which is
not one of our dependencies (Debian: libpostgresql-jdbc-java).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from statistics import median
from time import monotonic

import anyio
import anyio.to_thread
from pyspark.sql import DataFrame, SparkSession

from benchmarks.environment import Stage, connection, execute, stage
from benchmarks.process_tree import spark_seconds
from subscriber.archive.worker import Archiver
from subscriber.changelog.storage import Location
from subscriber.changelog.writer import log_writer
from subscriber.lsn import Lsn
from subscriber.spark import exported_snapshot
from subscriber.spark.session import spark_session

TABLE = """
CREATE TABLE items (id bigint PRIMARY KEY, number integer, amount numeric(12,2), at timestamptz, day date, flag boolean,
                    share double precision, code uuid, raw bytea, label text)
"""
INSERT = """
INSERT INTO items SELECT i, (i::bigint * 7919) % 1000000, (i % 100000) / 100.0,
       '2020-01-01'::timestamptz + i * interval '1 second', '2020-01-01'::date + i % 3000, i % 3 = 0, i / 7.0,
       md5(i::text)::uuid, decode(md5(i::text), 'hex'), 'label of item ' || i
  FROM generate_series({first}, {last}) i
"""
NARROW_TABLE = "CREATE TABLE items (id bigint PRIMARY KEY, number integer, at timestamptz, label text)"
NARROW_INSERT = """
INSERT INTO items SELECT i, i % 1000, '2020-01-01'::timestamptz + i * interval '1 second', 'label of item ' || i
  FROM generate_series({first}, {last}) i
"""
CHANGE = """
CREATE PROCEDURE change(n int) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..n LOOP
        UPDATE items SET number = number + 1, at = at + interval '1 microsecond' WHERE id = i;
        IF i % 5 < i % 7 THEN COMMIT; END IF;
    END LOOP;
    DELETE FROM items WHERE id % 10 = 0;
END $$
"""
PARTITIONS = 4
JAR = Path("/usr/share/java/postgresql.jar")
SCANS = 4


async def fill(on: Stage, rows: int, log: Path, *, narrow: bool = False) -> int:
    """Write and archive the changes. Returns their number."""
    table, insert = (NARROW_TABLE, NARROW_INSERT) if narrow else (TABLE, INSERT)
    await execute(on.source, table, CHANGE, "CREATE PUBLICATION p FOR ALL TABLES")
    await archive(on, log)
    for first in range(1, rows + 1, 100_000):
        await execute(on.source, insert.format(first=first, last=min(rows, first + 99_999)))
    async with connection(on.source) as one:
        await one.execute("SET synchronous_commit = off")
        await one.execute(f"CALL change({rows})", timeout=None)
    await archive(on, log)
    await execute(on.source, "VACUUM ANALYZE")
    return 2 * rows + rows // 10


async def archive(on: Stage, log: Location) -> Lsn:
    """Write everything that is committed to the log. Returns the position."""
    async with connection(on.source) as one:
        await one.execute("SELECT pg_logical_emit_message(true, 'end', '')")
        now = Lsn.parse(await one.fetchval("SELECT pg_current_wal_lsn()::text"))
    writer = log_writer(log)
    await anyio.to_thread.run_sync(writer.open)
    try:
        await Archiver(on.source.dsn(), "archive", ["p"], writer, now).run()
    finally:
        await anyio.to_thread.run_sync(writer.close)
    return now


def debezium(spark: SparkSession, changes: DataFrame, directory: Path) -> Callable[[], DataFrame]:
    """Store changes of pgcdc in mode debezium as lines of JSON. Returns a query that parses them."""
    changes.selectExpr("to_json(struct(*)) AS value").write.text(str(directory))
    schema = changes.schema

    def read() -> DataFrame:
        from pyspark.sql import functions as f

        return spark.read.text(str(directory)).select(f.from_json("value", schema).alias("change")).select("change.*")

    return read


def read_changes(spark: SparkSession, log: Path, directory: Path) -> dict[str, Callable[[], DataFrame]]:
    def cdc(**options: str) -> DataFrame:
        return spark.read.format("pgcdc").options(tables="public.items", **options).load(str(log))

    def plain() -> DataFrame:
        return spark.read.format("pgchanges").load(str(log))

    return {
        "pgcdc": cdc,
        "pgcdc, mode debezium": lambda: cdc(mode="debezium"),
        "pgchanges": plain,
        "JSON": debezium(spark, cdc(mode="debezium"), directory / "json"),
    }


def noop(table: DataFrame) -> None:
    table.write.format("noop").mode("overwrite").save()


def cost(query: Callable[[], DataFrame]) -> float:
    """Return the processor time of a query, in microseconds."""
    before = spark_seconds()
    noop(query())
    return (spark_seconds() - before) * 1e6


def repeated(query: Callable[[], DataFrame]) -> DataFrame:
    """Return a query that reads the log SCANS times."""
    return reduce(DataFrame.union, [query() for _ in range(SCANS)])


def read_tables(spark: SparkSession, on: Stage, options: dict[str, str], rows: int) -> dict[str, Callable[[], float]]:
    def ours(chosen: dict[str, str]) -> DataFrame:
        more = {"table": "public.items", "partitions": str(PARTITIONS), **chosen}
        return spark.read.format("pgsnapshot").options(**options, **more).load()

    def jdbc(_: dict[str, str]) -> DataFrame:
        return (
            spark.read.format("jdbc")
            .options(
                driver="org.postgresql.Driver",
                user="postgres",
                dbtable="items",
                url=f"jdbc:postgresql://127.0.0.1:{on.source.port}/postgres",
                fetchsize="10000",
                partitionColumn="id",
                lowerBound="1",
                upperBound=str(rows + 1),
                numPartitions=str(PARTITIONS),
            )
            .load()
        )

    queries: dict[str, tuple[Callable[[DataFrame], object], dict[str, str]]] = {
        "count": (lambda table: table.count(), {"columns": ""}),
        "one row by its key": (lambda table: table.where("id = 7").collect(), {"where": "id = 7", "partitions": "1"}),
        "one column": (lambda table: noop(table.select("label")), {"columns": "label"}),
        "all columns": (noop, {}),
    }

    def timed(
        query: Callable[[DataFrame], object], chosen: dict[str, str], load: Callable[[dict[str, str]], DataFrame]
    ) -> float:
        began = monotonic()
        query(load(chosen))
        return monotonic() - began

    found: dict[str, Callable[[], float]] = {}
    for name, (query, chosen) in queries.items():
        for source, load in (("pgsnapshot", ours), ("JDBC", jdbc)):
            found[f"{name}, {source}"] = partial(timed, query, chosen, load)
    return found


async def measure(rows: int, rounds: int, jar: Path | None, *, narrow: bool) -> dict[str, list[float]]:
    """Return microseconds of processor time by source, and seconds by query."""
    found: dict[str, list[float]] = {}
    conf = {"spark.jars": str(jar)} if jar is not None else {}
    async with stage() as on:
        log = on.directory / "log"
        changes = await fill(on, rows, log, narrow=narrow)

        def run() -> None:
            with spark_session(conf=conf) as spark:
                sources = read_changes(spark, log, on.directory)
                for _ in range(rounds):
                    for name, source in sources.items():
                        assert source().count() >= changes
                        one, all_scans = cost(source), cost(partial(repeated, source))
                        found.setdefault(f"{name}, µs", []).append(one / changes)
                        found.setdefault(f"{name}, slope, µs", []).append((all_scans - one) / changes / (SCANS - 1))
                with exported_snapshot(on.source.dsn()) as options:
                    tables = read_tables(spark, on, options, rows)
                    for _ in range(rounds + 1):  # the first one compiles
                        for name, query in tables.items():
                            if jar is not None or not name.endswith("JDBC"):
                                found.setdefault(f"{name}, s", []).append(query())

        await anyio.to_thread.run_sync(run)
    return {name: values[1:] if name.endswith(", s") else values for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--narrow", action="store_true", help="a table of four columns instead of ten")
    parser.add_argument("--jdbc", type=Path, default=JAR if JAR.exists() else None, help="pgjdbc's jar")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = anyio.run(partial(measure, options.rows, options.rounds, options.jdbc, narrow=options.narrow))
    if options.json:
        print(json.dumps(found))
    else:
        for name, values in found.items():
            print(f"{name:34} {median(values):8.2f}   {[round(value, 2) for value in values]}")


if __name__ == "__main__":
    main()
