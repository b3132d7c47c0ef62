"""The initial copy of a database, compared with PostgreSQL's own, and with pgcopydb if it is there.

    python -m benchmarks.initial_copy [--rows 1000000] [--tables 50] [--small-rows 1000] [--rounds 3] [--json FILE]
    python -m benchmarks.initial_copy --indexes [--rows 1000000] [--pgcopydb COMMAND] [--rounds 3] [--json FILE]

Measures from CREATE SUBSCRIPTION until every table is ready, of one large table and of many small ones. Each round has
a new database on the target for each subscription. The order changes. Our subscriptions have copy_engine = snapshot and
ranges. Each round prints the processor time of both servers and of our worker, which depends less on other load.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import (
    INSERT,
    NATIVE,
    OURS,
    TABLE,
    Stage,
    connection,
    cpu_seconds,
    execute,
    server_cpu_seconds,
    stage,
    wait_for,
)
from subscriber.database import connect
from subscriber.demo import processes
from subscriber.demo.compare import compare
from subscriber.demo.processes import Process

RANGES = "ranges"  # the name of our subscription with copy_engine = ranges
PGCOPYDB = "pgcopydb"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one copy, in seconds.

    Attributes:
        seconds: elapsed time.
        publisher: processor time of the publisher.
        target: processor time of the target.
        worker: processor time of our launcher. 0: PostgreSQL's own subscription, whose workers are in `target`, or
            pgcopydb.
        load: the load of the machine afterwards, in processes.
    """

    seconds: float
    publisher: float
    target: float
    worker: float
    load: float

    def __str__(self) -> str:
        processors = f"publisher {self.publisher:.2f} s, target {self.target:.2f} s, worker {self.worker:.2f} s"
        return f"{self.seconds:.2f} s (processor time: {processors}; load {self.load:.0f})"


Costs = dict[str, dict[str, list[Cost]]]  # tables -> subscription -> cost of each round


class Meter:
    """Measures one copy from the creation of the object until stop()."""

    def __init__(self, where: Stage, launcher: Process | None) -> None:
        self._where, self._launcher = where, launcher
        self._started, self._before = monotonic(), self._processors()

    def _processors(self) -> tuple[float, float, float]:
        worker = cpu_seconds(self._launcher.pid) if self._launcher is not None and self._launcher.pid else 0.0
        return server_cpu_seconds(self._where.source), server_cpu_seconds(self._where.target), worker

    def stop(self, number: int, name: str) -> Cost:
        """Print and return the cost."""
        seconds = monotonic() - self._started
        publisher, target, worker = (
            after - before for before, after in zip(self._before, self._processors(), strict=True)
        )
        cost = Cost(seconds, publisher, target, worker, os.getloadavg()[0])
        print(f"round {number + 1}: {name} {cost}", flush=True)
        return cost


async def measure(rows: int, tables: int, small_rows: int, rounds: int) -> Costs:
    """Measure one large table and many small ones, `rounds` times."""
    costs: Costs = {}
    kinds = {
        f"one table of {rows:,} rows": [TABLE, INSERT.format(first=1, last=rows)],
        f"{tables} tables of {small_rows:,} rows": [
            statement
            for number in range(tables)
            for statement in (
                f"CREATE TABLE small_{number} (id int PRIMARY KEY, label text)",
                f"INSERT INTO small_{number} SELECT i, 'label ' || i FROM generate_series(1, {small_rows}) i",
            )
        ],
    }
    for kind, statements in kinds.items():
        async with stage() as where:
            await execute(where.source, *statements, "CREATE PUBLICATION p FOR ALL TABLES")
            schema = [statement for statement in statements if "CREATE TABLE" in statement]
            for number in range(rounds):
                for name in (OURS, RANGES, NATIVE) if number % 2 == 0 else (NATIVE, RANGES, OURS):
                    cost = await _copy(where, name, number, schema)
                    costs.setdefault(kind, {}).setdefault(name, []).append(cost)
    return costs


async def measure_with_indexes(rows: int, rounds: int, pgcopydb: Sequence[str] | None) -> Costs:
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
    costs: dict[str, list[Cost]] = {}
    async with stage() as where:
        await execute(where.source, *create, *insert, *indexes, "VACUUM ANALYZE", "CREATE PUBLICATION p FOR ALL TABLES")
        async with connection(where.source) as source:
            size = await source.fetchval("SELECT pg_size_pretty(pg_database_size(current_database()))")
        names = [OURS, RANGES, NATIVE, *([PGCOPYDB] if pgcopydb else [])]
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                if name == PGCOPYDB:
                    cost = await _clone(where, pgcopydb or (), number)
                else:
                    schema = [*create, *indexes] if name == NATIVE else without_key
                    cost = await _copy(where, name, number, schema, "copy_indexes = after")
                costs.setdefault(name, []).append(cost)
    return {f"database of {size}": costs}


async def _clone(where: Stage, pgcopydb: Sequence[str], number: int) -> Cost:
    """Clone the database with pgcopydb, with as many jobs as our subscription has."""
    database = f"pgcopydb_{number}"
    await execute(where.target, f"CREATE DATABASE {database}", "CHECKPOINT")
    command = [*pgcopydb, "clone", "--source", where.source.dsn(), "--target", where.target.dsn(database)]
    options = ["--table-jobs", "4", "--index-jobs", "4", "--no-owner", "--not-consistent", "--dir", f"/tmp/{database}"]
    meter = Meter(where, None)
    done = await anyio.run_process([*command, *options, "--restart"], check=False, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"pgcopydb has failed:\n{done.stdout.decode(errors='replace')[-3000:]}")
    cost = meter.stop(number, PGCOPYDB)
    await _verify(where, database)
    return cost


async def _verify(where: Stage, database: str) -> None:
    async for result in compare(where.source.dsn(), where.target.dsn(database)):
        if result.differs:
            raise RuntimeError(f"{database} differs from the source: {result}")


async def _copy(where: Stage, name: str, number: int, schema: list[str], options: str = "") -> Cost:
    database = f"{name}_{number}"
    await execute(where.target, f"CREATE DATABASE {database}", "CHECKPOINT")
    await execute(where.target, *schema, dbname=database)
    statement = f"CREATE SUBSCRIPTION {database} CONNECTION '{where.source.dsn()}' PUBLICATION p"
    ours = name != NATIVE
    if ours:
        engine = "copy_engine = " + ("ranges" if name == RANGES else "snapshot")
        statement += f" WITH ({', '.join(filter(None, (engine, options)))})"
    if ours:  # our schema and process exist before, as the server's worker does
        await where.launcher.stop()
        where.launcher = processes.launcher(where.target.dsn(database), where.directory)
        where.launcher.start()
        await wait_for(where.target, "SELECT to_regclass('subscriber.worker')", where.launcher, dbname=database)
        async with connect(where.target.dsn(database)) as db:
            meter = Meter(where, where.launcher)
            await db.execute(statement)
    else:
        meter = Meter(where, None)
        await execute(where.target, statement, dbname=database)
    states = "subscriber.subscription_rel" if ours else "pg_subscription_rel"
    ready = f"SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM {states}"
    await wait_for(where.target, ready, where.launcher, dbname=database)
    cost = meter.stop(number, name)
    await _verify(where, database)
    if ours:
        await processes.execute(where.target.dsn(database), f"DROP SUBSCRIPTION {database}")
    else:
        await execute(where.target, f"DROP SUBSCRIPTION {database}", dbname=database)
    return cost


def _as_json(costs: Costs) -> dict[str, dict[str, list[dict[str, float]]]]:
    return {kind: {name: list(map(asdict, rounds)) for name, rounds in found.items()} for kind, found in costs.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.initial_copy", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tables", type=int, default=50)
    parser.add_argument("--small-rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--indexes", action="store_true")
    parser.add_argument("--pgcopydb", metavar="COMMAND", default=shutil.which("pgcopydb"))
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    if arguments.indexes:
        pgcopydb = shlex.split(arguments.pgcopydb) if arguments.pgcopydb else None
        if pgcopydb is None:
            print("pgcopydb is not measured: it is not on PATH, and --pgcopydb does not name it")
        costs = anyio.run(measure_with_indexes, arguments.rows, arguments.rounds, pgcopydb)
    else:
        costs = anyio.run(measure, arguments.rows, arguments.tables, arguments.small_rows, arguments.rounds)
    for kind, found in costs.items():
        medians = {name: statistics.median(cost.seconds for cost in rounds) for name, rounds in found.items()}
        print(kind, *(f"{name} {seconds:.2f} s" for name, seconds in medians.items()), sep="  ")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "costs": _as_json(costs)}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
