"""The time from COMMIT to visibility of a large transaction with streaming off, on and parallel.

    python -m benchmarks.streaming [--rows 200000] [--rounds 3] [--json]

There is one subscription at a time, ours and PostgreSQL's own alternately. The time of the transaction's statements is
not measured. The measurement starts when the publisher has answered the COMMIT, and ends when the last row can be read
on the target. The publisher streams transactions that exceed WORK_MEM.

Meanwhile another session commits one small transaction after another. The slowest is the time from the answer to its
COMMIT until its row can be read on the target. It includes waiting in the publisher's WAL behind the large
transaction's changes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from statistics import median
from time import monotonic

import anyio

from benchmarks.environment import INSERT, NATIVE, OURS, TABLE, Stage, connection, cpu_seconds, execute, stage, wait_for
from benchmarks.small_transactions import SMALL, small_ones
from subscriber.demo import processes

MODES = ("off", "on", "parallel")
WORK_MEM = "4MB"
POLL = 0.002  # seconds
READY = "SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM {}"
STATES = {OURS: "subscriber.subscription_rel", NATIVE: "pg_catalog.pg_subscription_rel"}


@dataclass(frozen=True, slots=True)
class Sample:
    mode: str
    who: str
    transaction: float  # seconds on the publisher, up to the answer to its COMMIT
    visible: float  # seconds after that
    slowest: float  # seconds until it was visible, of the small transactions committed meanwhile
    cpu: float  # processor seconds of our process since the start of the transaction; 0 for PostgreSQL's


async def measure(rows: int, rounds: int) -> list[Sample]:
    """Return all samples, in the order of measurement."""
    async with stage() as where:
        await execute(
            where.source,
            TABLE,
            SMALL,
            f"ALTER DATABASE postgres SET logical_decoding_work_mem = '{WORK_MEM}'",
            "CREATE PUBLICATION p FOR TABLE items, small",
        )
        await execute(where.target, *(f"CREATE DATABASE {name}" for name in (OURS, NATIVE)))
        for name in (OURS, NATIVE):
            await execute(where.target, TABLE, SMALL, dbname=name)
        where.launcher = processes.launcher(where.target.dsn(OURS), where.directory)
        where.launcher.start()
        turns = [
            (mode, who)
            for number in range(rounds)
            for mode in MODES
            for who in ((OURS, NATIVE) if number % 2 else (NATIVE, OURS))
        ]
        return [await _sample(where, mode, who, rows) for mode, who in turns]


async def _sample(where: Stage, mode: str, who: str, rows: int) -> Sample:
    async def statement(text: str) -> None:
        if who == OURS:
            await processes.execute(where.target.dsn(OURS), text)
        else:
            await execute(where.target, text, dbname=NATIVE)

    await execute(where.source, "TRUNCATE items, small")
    await execute(where.target, "TRUNCATE items, small", dbname=who)
    options = f"WITH (streaming = {mode})"
    await statement(f"CREATE SUBSCRIPTION {who} CONNECTION '{where.source.dsn()}' PUBLICATION p {options}")
    await execute(where.source, "INSERT INTO items (id) VALUES (0)")  # a table becomes ready at a transaction
    await wait_for(where.target, READY.format(STATES[who]), where.launcher, dbname=who)
    try:
        return await _transaction(where, mode, who, rows)
    finally:
        await statement(f"DROP SUBSCRIPTION {who}")


async def _transaction(where: Stage, mode: str, who: str, rows: int) -> Sample:
    pid = where.launcher.pid
    assert pid is not None
    async with connection(where.source) as source, connection(where.target, who) as target:
        cpu, began = cpu_seconds(pid), monotonic()
        async with small_ones(where, who) as small:
            await source.execute(f"BEGIN; {INSERT.format(first=1, last=rows)}; COMMIT", timeout=None)
            committed = monotonic()
            small.stop.set()
            while not await target.fetchval(f"SELECT EXISTS (SELECT FROM items WHERE id = {rows})"):
                if where.launcher.pid is None:
                    raise RuntimeError(where.launcher.last_lines())
                await anyio.sleep(POLL)
            visible = monotonic() - committed
            cpu = cpu_seconds(pid) - cpu if who == OURS else 0.0
        return Sample(mode, who, committed - began, visible, small.slowest, cpu)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the transaction")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    samples = anyio.run(measure, arguments.rows, arguments.rounds)
    if arguments.json:
        values = {"cpus": os.cpu_count(), "rows": arguments.rows, "samples": [asdict(sample) for sample in samples]}
        print(json.dumps(values, indent=2))
        return 0
    print(f"{arguments.rows:,} rows, medians of {arguments.rounds} rounds, on {os.cpu_count()} processors")
    head = f"{'streaming':10} {'transaction':>12} {'ours':>8} {'native':>8} {'ratio':>6} {'our CPU':>8}"
    print(f"{head} {'slowest small':>14} {'native':>8}")
    for mode in MODES:
        ours, native = (
            [sample for sample in samples if (sample.mode, sample.who) == (mode, who)] for who in (OURS, NATIVE)
        )
        visible, beside = median(s.visible for s in ours), median(s.visible for s in native)
        took = median(s.transaction for s in (*ours, *native))
        cpu = median(s.cpu for s in ours)
        small, small_beside = median(s.slowest for s in ours), median(s.slowest for s in native)
        figures = f"{took:>10.2f} s {visible:>6.2f} s {beside:>6.2f} s {visible / beside:>6.1f} {cpu:>6.2f} s"
        print(f"{mode:10} {figures} {small:>12.2f} s {small_beside:>6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
