"""Peak memory of `subscriber run` while a large table is copied and a large transaction is applied.

    python -m benchmarks.memory [--rows 5000000] [--transaction 1000000] [--json]
    python -m benchmarks.memory --rows 1 --transaction 10000000     # half an hour, and 10 GB of disk

Each phase has its own peak: the kernel's high-water mark is reset between them. With streaming on and parallel, small
transactions are committed while the large one is open. The time until the slowest of them was visible on the target is
reported. Exits 1 above LIMIT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic

import anyio

from benchmarks.environment import (
    INSERT,
    TABLE,
    Stage,
    caught_up,
    connection,
    cpu_seconds,
    execute,
    memory,
    reset_peak,
    stage,
    wait_for,
)
from benchmarks.small_transactions import SMALL, small_ones
from subscriber.demo import processes

LIMIT = 200 * 1024 * 1024  # bytes
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    rows: int
    seconds: float
    cpu_seconds: float  # of the worker's process
    peak_bytes: int
    bytes_afterwards: int
    slowest_small: float | None = None  # seconds of the slowest concurrent transaction; None: there were none


async def measure(rows: int, transaction: int, *, streaming_only: bool) -> list[Phase]:
    """Measure all phases with one process, or only those of the three ways of streaming."""
    async with stage() as where:
        await execute(
            where.source, TABLE, INSERT.format(first=1, last=rows), SMALL, "CREATE PUBLICATION p FOR TABLE items, small"
        )
        await execute(where.target, TABLE, SMALL)
        phases = [await _copy(where, rows)]
        last = rows + transaction
        statements = (
            ("transaction: insert", INSERT.format(first=rows + 1, last=last)),
            ("transaction: update", f"UPDATE items SET number = number + 1 WHERE id > {rows}"),
            ("transaction: delete", f"DELETE FROM items WHERE id > {rows}"),
        )
        for name, statement in () if streaming_only else statements:
            phases.append(await _transaction(where, name, statement, transaction))
        for number, mode in enumerate(("off", "on", "parallel")):
            await processes.execute(where.target.dsn(), f"ALTER SUBSCRIPTION s SET (streaming = {mode})")
            first = rows + transaction * number + 1
            insert = INSERT.format(first=first, last=first + transaction - 1)
            phases.append(await _transaction(where, f"streaming {mode}", insert, transaction, small=True))
            for server in (where.source, where.target):
                await execute(server, "CHECKPOINT")  # otherwise the write-ahead log of all three phases is kept
        return phases


async def _copy(where: Stage, rows: int) -> Phase:
    create = f"CREATE SUBSCRIPTION s CONNECTION '{where.source.dsn()}' PUBLICATION p"
    await processes.execute(where.target.dsn(), create)
    where.launcher.start()
    assert where.launcher.pid is not None
    started = monotonic()
    ready = "SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM subscriber.subscription_rel"
    await wait_for(where.target, ready, where.launcher)
    return _phase(where, "copy", rows, started, 0.0)


async def _transaction(where: Stage, name: str, statement: str, rows: int, *, small: bool = False) -> Phase:
    pid = where.launcher.pid
    assert pid is not None
    reset_peak(pid)
    cpu = cpu_seconds(pid)
    slowest = None
    if small:
        slowest = await _with_small_ones(where, statement)
    else:
        await execute(where.source, statement)
    async with connection(where.source) as publisher:
        position = await publisher.fetchval("SELECT pg_current_wal_lsn()::text")
    started = monotonic()
    await wait_for(where.source, caught_up("s", position), where.launcher)
    return _phase(where, name, rows, started, cpu, slowest)


async def _with_small_ones(where: Stage, statement: str) -> float:
    """Run the statement in a transaction, and small ones until it commits. Returns the seconds of the slowest."""
    async with small_ones(where) as small, connection(where.source) as large:
        await large.execute("BEGIN")
        await large.execute(statement, timeout=None)
        small.stop.set()
        await large.execute("COMMIT", timeout=None)
    return small.slowest


def _phase(where: Stage, name: str, rows: int, started: float, cpu: float, slowest_small: float | None = None) -> Phase:
    pid = where.launcher.pid
    assert pid is not None
    found = memory(pid)
    return Phase(name, rows, monotonic() - started, cpu_seconds(pid) - cpu, found.peak, found.now, slowest_small)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the table that is copied")
    parser.add_argument("--transaction", type=int, default=1_000_000, help="rows of the transactions")
    parser.add_argument("--streaming-only", action="store_true", help="only transactions with each way of streaming")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    run = partial(measure, arguments.rows, arguments.transaction, streaming_only=arguments.streaming_only)
    phases = anyio.run(run)
    within = all(phase.peak_bytes < LIMIT for phase in phases)
    if arguments.json:
        values = {"cpus": os.cpu_count(), "limit_bytes": LIMIT, "ok": within, "phases": [asdict(p) for p in phases]}
        print(json.dumps(values, indent=2))
        return 0 if within else 1
    print(
        f"{'phase':22} {'rows':>10} {'seconds':>8} {'CPU s':>7} {'rows/s':>9} {'peak MiB':>9} {'after MiB':>9}  small"
    )
    for p in phases:
        small = "" if p.slowest_small is None else f" {p.slowest_small:>5.2f} s"
        print(
            f"{p.name:22} {p.rows:>10,} {p.seconds:>8.1f} {p.cpu_seconds:>7.1f} {p.rows / p.seconds:>9,.0f}"
            f" {p.peak_bytes / MIB:>9.1f} {p.bytes_afterwards / MIB:>9.1f}{small}"
        )
    print(f"{'within' if within else 'ABOVE'} the limit of {LIMIT / MIB:.0f} MiB, on {os.cpu_count()} processors")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
