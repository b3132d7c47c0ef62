"""The initial copy of one large table and of many small ones, compared with PostgreSQL's own.

    python -m benchmarks.initial_copy [--rows 1000000] [--tables 50] [--rounds 3] [--indexes] [--json FILE]

Measures from CREATE SUBSCRIPTION until every table is ready; the small tables have 1,000 rows each. Each round has a
new database on the target for each subscription. The order changes. Our subscriptions have copy_engine = asyncio and
ranges. --indexes adds two secondary indexes to every table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import INSERT, NATIVE, OURS, TABLE, Stage, execute, stage, wait_for
from subscriber.database import connect
from subscriber.demo import processes
from subscriber.demo.compare import compare

RANGES = "ranges"  # the name of our subscription with copy_engine = ranges
SMALL = 1000  # rows
Times = dict[str, dict[str, list[float]]]  # tables -> subscription -> seconds of each round


async def measure(rows: int, tables: int, rounds: int, *, indexes: bool) -> Times:
    """Measure both kinds, `rounds` times."""
    times: Times = {}
    kinds = {
        f"one table of {rows:,} rows": [TABLE, INSERT.format(first=1, last=rows)],
        f"{tables} tables of {SMALL:,} rows": [
            statement
            for number in range(tables)
            for statement in (
                f"CREATE TABLE small_{number} (id int PRIMARY KEY, label text)",
                f"INSERT INTO small_{number} SELECT i, 'label ' || i FROM generate_series(1, {SMALL}) i",
            )
        ],
    }
    for kind, statements in kinds.items():
        async with stage() as where:
            await execute(where.source, *statements, "CREATE PUBLICATION p FOR ALL TABLES")
            schema = [statement for statement in statements if "CREATE TABLE" in statement]
            if indexes:
                names = ["items"] if TABLE in schema else [f"small_{number}" for number in range(tables)]
                for table, columns in ((table, "label, id") for table in names):
                    schema += [f"CREATE INDEX ON {table} ({columns})", f"CREATE INDEX ON {table} (md5(label))"]
            for number in range(rounds):
                for name in (OURS, RANGES, NATIVE) if number % 2 == 0 else (NATIVE, RANGES, OURS):
                    seconds = await _copy(where, name, number, schema)
                    times.setdefault(kind, {}).setdefault(name, []).append(seconds)
    return times


async def _copy(where: Stage, name: str, number: int, schema: list[str]) -> float:
    database = f"{name}_{number}"
    await execute(where.target, f"CREATE DATABASE {database}", "CHECKPOINT")
    await execute(where.target, *schema, dbname=database)
    statement = f"CREATE SUBSCRIPTION {database} CONNECTION '{where.source.dsn()}' PUBLICATION p"
    ours = name != NATIVE
    if ours:
        statement += f" WITH (copy_engine = {'ranges' if name == RANGES else 'asyncio'})"
    if ours:  # our schema and process exist before, as the server's worker does
        await where.launcher.stop()
        where.launcher = processes.launcher(where.target.dsn(database), where.directory)
        where.launcher.start()
        await wait_for(where.target, "SELECT to_regclass('subscriber.worker')", where.launcher, dbname=database)
    if ours:
        async with connect(where.target.dsn(database)) as db:
            started = monotonic()
            await db.execute(statement)
    else:
        started = monotonic()
        await execute(where.target, statement, dbname=database)
    states = "subscriber.subscription_rel" if ours else "pg_subscription_rel"
    ready = f"SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM {states}"
    await wait_for(where.target, ready, where.launcher, dbname=database)
    seconds = monotonic() - started
    async for result in compare(where.source.dsn(), where.target.dsn(database)):
        if result.differs:
            raise RuntimeError(f"{name} differs from the source: {result}")
    if ours:
        await processes.execute(where.target.dsn(database), f"DROP SUBSCRIPTION {database}")
    else:
        await execute(where.target, f"DROP SUBSCRIPTION {database}", dbname=database)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.initial_copy", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tables", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--indexes", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    times = anyio.run(partial(measure, arguments.rows, arguments.tables, arguments.rounds, indexes=arguments.indexes))
    print(f"{'':32} {'asyncio s':>10} {'ranges s':>9} {'native s':>9} {'asyncio/native':>15} {'ranges/native':>14}")
    for kind, found in times.items():
        ours, ranges, native = (statistics.median(found[name]) for name in (OURS, RANGES, NATIVE))
        print(f"{kind:32} {ours:>10.2f} {ranges:>9.2f} {native:>9.2f} {ours / native:>15.2f} {ranges / native:>14.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "seconds": times}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
