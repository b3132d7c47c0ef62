"""How fast a backlog is replayed, beside PostgreSQL's own subscription.

    python -m benchmarks.replay [--rows 200000] [--rounds 3] [--only NAME] [--json]

One publisher, two databases on one target server: PostgreSQL's own subscription feeds the one, ours the
other. Each workload is written while both are disabled; then one is enabled and timed until everything is
confirmed as durable, then the other; who goes first changes from round to round. "nothing" is the time
that enabling and confirming takes by itself, and is in all the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic

import anyio

from benchmarks.stage import INSERT, TABLE, Stage, caught_up, connection, cpu_seconds, execute, stage, wait_for
from subscriber.ops import demo_processes
from subscriber.ops.compare import compare

OURS, NATIVE = "ours", "native"


@dataclass
class Result:
    """Seconds of each round."""

    name: str
    rows: int
    ours: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)
    our_cpu: list[float] = field(default_factory=list)  # processor seconds of our process; the servers' are not in it

    @property
    def ratio(self) -> float:
        """Ours by native, of the medians: below 1 we are faster."""
        return statistics.median(self.ours) / statistics.median(self.native)


Write = Callable[[Stage], Awaitable[None]]


async def _nothing(where: Stage) -> None:
    await execute(where.source, "SELECT pg_logical_emit_message(true, 'benchmark', '')")


def _statement(sql: str) -> Write:
    async def write(where: Stage) -> None:
        await execute(where.source, sql)

    return write


def _small(transactions: int) -> Write:
    """An update and an insert each."""

    async def write(where: Stage) -> None:
        async with connection(where.source) as one:
            await one.execute("SET synchronous_commit = off")
            await one.execute(
                "CREATE TEMP SEQUENCE IF NOT EXISTS numbers; "
                "CREATE OR REPLACE PROCEDURE pg_temp.small(n int) LANGUAGE plpgsql AS $$ BEGIN "
                "FOR i IN 1..n LOOP UPDATE items SET number = number + 1 WHERE id = 1 + i % 1000; "
                "INSERT INTO history VALUES (i, 'row'); COMMIT; END LOOP; END $$"
            )
            await one.execute(f"CALL pg_temp.small({transactions})")
            await one.execute("SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'flush', '')")

    return write


def workloads(rows: int) -> list[tuple[str, int, Write]]:
    """Name, number of rows, what writes them."""
    return [
        ("nothing", 0, _nothing),
        ("insert, one transaction", rows, _statement(INSERT.format(first="1000001", last=1_000_000 + rows))),
        ("update by key, one transaction", rows, _statement("UPDATE items SET number = number + 1 WHERE id > 1000000")),
        ("delete by key, one transaction", rows, _statement("DELETE FROM items WHERE id > 1000000")),
        ("small transactions", rows // 4, _small(rows // 8)),
    ]


async def measure(rows: int, rounds: int, only: str | None) -> list[Result]:
    """All workloads, `rounds` times."""
    async with stage() as where:
        await _prepare(where)
        results: dict[str, Result] = {}
        for number in range(rounds):
            for name, size, write in workloads(rows):
                if only is None or only in name or size == rows:  # the large ones need each other's rows
                    result = results.setdefault(name, Result(name, size))
                    order = (OURS, NATIVE) if number % 2 == 0 else (NATIVE, OURS)
                    await _round(where, result, write, order)
        await _check(where)
        return [result for result in results.values() if only is None or only in result.name]


async def _prepare(where: Stage) -> None:
    tables = [TABLE, "CREATE TABLE history (i int, text text)"]
    await execute(where.source, *tables, INSERT.format(first=1, last=1000), "CREATE PUBLICATION p FOR ALL TABLES")
    dsn = where.source.dsn()
    create = f"CREATE SUBSCRIPTION {{}} CONNECTION '{dsn}' PUBLICATION p WITH (streaming = off, binary = false)"
    await execute(where.target, *(f"CREATE DATABASE {name}" for name in (OURS, NATIVE)))
    await execute(where.target, *tables, dbname=OURS)
    await execute(where.target, *tables, create.format(NATIVE), dbname=NATIVE)
    await demo_processes.execute(where.target.dsn(OURS), create.format(OURS))
    where.launcher = demo_processes.launcher(where.target.dsn(OURS), where.directory)
    where.launcher.start()
    for name, catalog in ((OURS, "subscriber"), (NATIVE, "pg_catalog")):
        states = f"{catalog}.{'subscription_rel' if name == OURS else 'pg_subscription_rel'}"
        ready = f"SELECT count(*) = 2 AND bool_and(srsubstate = 'r') FROM {states}"
        await wait_for(where.target, ready, where.launcher, dbname=name)
        await _disable(where, name)


async def _round(where: Stage, result: Result, write: Write, order: tuple[str, str]) -> None:
    await write(where)
    async with connection(where.source) as publisher:
        await publisher.execute("CHECKPOINT")
        position = await publisher.fetchval("SELECT pg_current_wal_lsn()::text")
    for name in order:
        await execute(where.target, "CHECKPOINT")
        pid = where.launcher.pid
        assert pid is not None
        cpu, started = cpu_seconds(pid), monotonic()
        await _alter(where, name, "ENABLE")
        await wait_for(where.source, caught_up(name, position), where.launcher)
        seconds = monotonic() - started
        if name == OURS:
            result.ours.append(seconds)
            result.our_cpu.append(cpu_seconds(pid) - cpu)
        else:
            result.native.append(seconds)
        await _disable(where, name)


async def _alter(where: Stage, name: str, what: str) -> None:
    if name == NATIVE:
        await execute(where.target, f"ALTER SUBSCRIPTION {name} {what}", dbname=name)
        return
    # The catalog's row directly: starting a program for the statement would be in the measurement.
    enabled = str(what == "ENABLE").lower()
    await execute(where.target, f"UPDATE subscriber.subscription SET subenabled = {enabled}", dbname=name)


async def _disable(where: Stage, name: str) -> None:
    await _alter(where, name, "DISABLE")
    inactive = f"SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{name}'"
    await wait_for(where.source, inactive, where.launcher)


async def _check(where: Stage) -> None:
    async for result in compare(where.target.dsn(NATIVE), where.target.dsn(OURS)):
        if result.differs:
            raise RuntimeError(f"the two targets differ: {result}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the large transactions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", metavar="NAME", help="only workloads whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    results = anyio.run(measure, arguments.rows, arguments.rounds, arguments.only)
    if arguments.json:
        workload = [
            {"name": r.name, "rows": r.rows, "ours": r.ours, "native": r.native, "cpu": r.our_cpu, "ratio": r.ratio}
            for r in results
        ]
        print(json.dumps({"cpus": os.cpu_count(), "workloads": workload}, indent=2))
        return 0
    print(f"{'workload':32} {'rows':>8} {'ours s':>8} {'native s':>9} {'ours/native':>12} {'our CPU s':>10}")
    for r in results:
        ours, native, cpu = (statistics.median(values) for values in (r.ours, r.native, r.our_cpu))
        print(f"{r.name:32} {r.rows:>8,} {ours:>8.2f} {native:>9.2f} {r.ratio:>12.2f} {cpu:>10.2f}")
    print(f"medians of {arguments.rounds} rounds, on {os.cpu_count()} processors shared with both servers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
