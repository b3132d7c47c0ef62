"""The initial copy of a database, compared with PostgreSQL's own, and with pgcopydb if it is there.

    python -m benchmarks.initial_copy [--rows 1000000] [--tables 50] [--rounds 3] [--json FILE]
    python -m benchmarks.initial_copy --indexes [--rows 1000000] [--pgcopydb COMMAND] [--rounds 3] [--json FILE]

Measures from CREATE SUBSCRIPTION until every table is ready, of one large table and of many small ones of 1,000 rows
each. Each round has a new database on the target for each subscription. The order changes. Our subscriptions have
copy_engine = asyncio and ranges.

--indexes copies one large table and three of half its rows, with a primary key and two secondary indexes each. Our
subscriptions have copy_indexes = after, and the target's tables have no indexes. PostgreSQL's own subscription has all
indexes from the start. pgcopydb clones the database; it also copies the definitions of tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import INSERT, NATIVE, OURS, TABLE, Stage, connection, execute, stage, wait_for
from subscriber.database import connect
from subscriber.demo import processes
from subscriber.demo.compare import compare

RANGES = "ranges"  # the name of our subscription with copy_engine = ranges
PGCOPYDB = "pgcopydb"
SMALL = 1000  # rows
Times = dict[str, dict[str, list[float]]]  # tables -> subscription -> seconds of each round


async def measure(rows: int, tables: int, rounds: int) -> Times:
    """Measure one large table and many small ones, `rounds` times."""
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
            for number in range(rounds):
                for name in (OURS, RANGES, NATIVE) if number % 2 == 0 else (NATIVE, RANGES, OURS):
                    seconds = await _copy(where, name, number, schema)
                    times.setdefault(kind, {}).setdefault(name, []).append(seconds)
    return times


async def measure_with_indexes(rows: int, rounds: int, pgcopydb: Sequence[str] | None) -> Times:
    """Measure a database whose tables have two secondary indexes each, `rounds` times."""
    tables = {"items": rows, **{f"items_{number}": rows // 2 for number in range(3)}}
    create = [TABLE.replace("items", name) for name in tables]
    without_key = [statement.replace(" PRIMARY KEY", " NOT NULL") for statement in create]
    insert = [INSERT.replace("items", name).format(first=1, last=count) for name, count in tables.items()]
    indexes = [
        statement
        for name in tables
        for statement in (
            f"CREATE INDEX {name}_label ON {name} (label, id)",
            f"CREATE INDEX {name}_number ON {name} (number, at)",
        )
    ]
    times: dict[str, list[float]] = {}
    async with stage() as where:
        await execute(where.source, *create, *insert, *indexes, "VACUUM ANALYZE", "CREATE PUBLICATION p FOR ALL TABLES")
        async with connection(where.source) as source:
            size = await source.fetchval("SELECT pg_size_pretty(pg_database_size(current_database()))")
        names = [OURS, RANGES, NATIVE, *([PGCOPYDB] if pgcopydb else [])]
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                if name == PGCOPYDB:
                    seconds = await _clone(where, pgcopydb or (), number)
                else:
                    schema = [*create, *indexes] if name == NATIVE else without_key
                    seconds = await _copy(where, name, number, schema, "copy_indexes = after")
                times.setdefault(name, []).append(seconds)
                print(f"round {number + 1}: {name} {seconds:.2f} s", flush=True)
    return {f"database of {size}": times}


async def _clone(where: Stage, pgcopydb: Sequence[str], number: int) -> float:
    """Clone the database with pgcopydb, with as many jobs as our subscription has."""
    database = f"pgcopydb_{number}"
    await execute(where.target, f"CREATE DATABASE {database}", "CHECKPOINT")
    command = [*pgcopydb, "clone", "--source", where.source.dsn(), "--target", where.target.dsn(database)]
    options = ["--table-jobs", "4", "--index-jobs", "4", "--no-owner", "--not-consistent", "--dir", f"/tmp/{database}"]
    started = monotonic()
    done = await anyio.run_process([*command, *options, "--restart"], check=False, stderr=subprocess.STDOUT)
    seconds = monotonic() - started
    if done.returncode:
        raise RuntimeError(f"pgcopydb has failed:\n{done.stdout.decode(errors='replace')[-3000:]}")
    await _verify(where, database)
    return seconds


async def _verify(where: Stage, database: str) -> None:
    async for result in compare(where.source.dsn(), where.target.dsn(database)):
        if result.differs:
            raise RuntimeError(f"{database} differs from the source: {result}")


async def _copy(where: Stage, name: str, number: int, schema: list[str], options: str = "") -> float:
    database = f"{name}_{number}"
    await execute(where.target, f"CREATE DATABASE {database}", "CHECKPOINT")
    await execute(where.target, *schema, dbname=database)
    statement = f"CREATE SUBSCRIPTION {database} CONNECTION '{where.source.dsn()}' PUBLICATION p"
    ours = name != NATIVE
    if ours:
        engine = "copy_engine = " + ("ranges" if name == RANGES else "asyncio")
        statement += f" WITH ({', '.join(filter(None, (engine, options)))})"
    if ours:  # our schema and process exist before, as the server's worker does
        await where.launcher.stop()
        where.launcher = processes.launcher(where.target.dsn(database), where.directory)
        where.launcher.start()
        await wait_for(where.target, "SELECT to_regclass('subscriber.worker')", where.launcher, dbname=database)
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
    await _verify(where, database)
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
    parser.add_argument("--pgcopydb", metavar="COMMAND", default=shutil.which("pgcopydb"))
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    if arguments.indexes:
        pgcopydb = shlex.split(arguments.pgcopydb) if arguments.pgcopydb else None
        if pgcopydb is None:
            print("pgcopydb is not measured: it is not on PATH, and --pgcopydb does not name it")
        times = anyio.run(measure_with_indexes, arguments.rows, arguments.rounds, pgcopydb)
    else:
        times = anyio.run(measure, arguments.rows, arguments.tables, arguments.rounds)
    for kind, found in times.items():
        medians = {name: statistics.median(seconds) for name, seconds in found.items()}
        print(kind, *(f"{name} {seconds:.2f} s" for name, seconds in medians.items()), sep="  ")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "seconds": times}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
