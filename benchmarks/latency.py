"""The time from a commit on the publisher until the row is visible on the target, at a steady rate.

    python -m benchmarks.latency [--rates 50,500] [--seconds 10] [--rounds 3] [--json FILE]

Transactions of one row, at even intervals. A connection to the target queries the newest row continuously. Times are
therefore rounded up by the duration of a query, equally for PostgreSQL's own subscription and ours. The two are
measured alternately.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import NATIVE, OURS, Stage, connection, execute, stage, subscribe_both
from benchmarks.replay import disable, enable

TABLE = "CREATE TABLE beats (id bigint PRIMARY KEY, at timestamptz DEFAULT clock_timestamp())"
WARM_UP = 20  # uncounted transactions


@dataclass
class Result:
    """Milliseconds of every transaction, of all rounds."""

    rate: int
    ours: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)


async def measure(rates: list[int], seconds: float, rounds: int) -> list[Result]:
    """Measure each rate with each subscription, `rounds` times."""
    async with stage() as where:
        await execute(where.source, TABLE, "CREATE PUBLICATION p FOR ALL TABLES")
        await subscribe_both(where, [TABLE], "streaming = off")
        for name in (OURS, NATIVE):
            await disable(where, name)
        results = [Result(rate) for rate in rates]
        first = 1
        for number in range(rounds):
            for result in results:
                for name in (OURS, NATIVE) if number % 2 == 0 else (NATIVE, OURS):
                    await enable(where, name)
                    count = max(int(result.rate * seconds), WARM_UP * 2)
                    found = await _steadily(where, name, result.rate, first, count)
                    (result.ours if name == OURS else result.native).extend(found[WARM_UP:])
                    first += count
                    await disable(where, name)
        return results


async def _steadily(where: Stage, name: str, rate: int, first: int, count: int) -> list[float]:
    """Return the milliseconds of `count` transactions at `rate` per second."""
    committed: list[float] = []
    seen: list[float] = []

    async def write() -> None:
        async with connection(where.source) as one:
            started = monotonic()
            for number in range(count):
                await anyio.sleep(max(0.0, started + number / rate - monotonic()))
                await one.execute(f"INSERT INTO beats VALUES ({first + number})")
                committed.append(monotonic())

    async with connection(where.target, name) as two, anyio.create_task_group() as tasks:
        newest = await two.prepare("SELECT coalesce(max(id), 0) FROM beats")
        while await newest.fetchval() < first - 1:  # the other subscription's transactions
            await anyio.sleep(0.05)
        tasks.start_soon(write)
        while len(seen) < count:
            last = await newest.fetchval()
            now = monotonic()
            seen += [now] * (min(last - first + 1, count) - len(seen))
    return [(s - c) * 1000 for s, c in zip(seen, committed, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--rates", default="50,500", help="transactions a second")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    rates = [int(rate) for rate in arguments.rates.split(",")]
    results = anyio.run(measure, rates, arguments.seconds, arguments.rounds)
    print(f"{'tx/s':>6} {'':>10} {'p50 ms':>8} {'p99 ms':>8}")
    for result in results:
        for name, values in (("ours", result.ours), ("native", result.native)):
            cuts = statistics.quantiles(values, n=100)
            print(f"{result.rate:>6} {name:>10} {cuts[49]:>8.2f} {cuts[98]:>8.2f}")
    if arguments.json:
        document = {"cpus": os.cpu_count(), "rates": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
