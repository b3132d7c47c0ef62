"""The first transaction after the worker's start that changes many tables, or a table with many columns.

    python -m benchmarks.first_touch [--tables 400] [--columns 600] [--rounds 5] [--json FILE]

Measures from the answer to COMMIT until the last row can be read on the target, for our subscription and PostgreSQL's
own; then a second transaction. Each round restarts the worker and waits until it has read the tables' definitions. The
order changes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import NATIVE, OURS, Stage, caught_up, connection, execute, stage, subscribe_both, wait_for
from benchmarks.replay import disable, enable

LOOKING = "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'subscriber: ours tables'"
Times = dict[str, dict[str, list[float]]]  # transaction -> subscription -> seconds of each round


async def measure(tables: int, columns: int, rounds: int) -> Times:
    """Measure both kinds, `rounds` times. Each subscription has all tables, and measures with half of them."""
    schema, kinds = [], dict[str, dict[str, list[str]]]()
    for name in (OURS, NATIVE):
        small, wide = [f"{name}_{number}" for number in range(tables)], f"{name}_wide"
        schema += [f"CREATE TABLE {table} (id int PRIMARY KEY, a text, b numeric)" for table in small]
        schema.append(f"CREATE TABLE {wide} (id int PRIMARY KEY, {', '.join(f'c{n} int' for n in range(columns - 1))})")
        kinds[name] = {f"{tables} tables": small, f"one table of {columns} columns": [wide]}
    times: Times = {}
    async with stage() as where:
        await execute(where.source, *schema, "CREATE PUBLICATION p FOR ALL TABLES")
        await subscribe_both(where, schema, "streaming = off")
        for name in (OURS, NATIVE):
            await disable(where, name)
        row = 0
        for number in range(rounds):
            for name in (OURS, NATIVE) if number % 2 == 0 else (NATIVE, OURS):
                await enable(where, name)
                await _at_rest(where, name)
                for kind, names in kinds[name].items():
                    for when in ("first", "again"):
                        row += 1
                        seconds = await _insert(where, name, names, row)
                        times.setdefault(f"{kind}, {when}", {}).setdefault(name, []).append(seconds)
                await disable(where, name)
    return times


async def _at_rest(where: Stage, name: str) -> None:
    """Wait until the changes for the other subscription are applied, and the tables' definitions are read."""
    async with connection(where.source) as source:
        position = await source.fetchval("SELECT pg_current_wal_lsn()::text")
    await wait_for(where.source, caught_up(name, position), where.launcher)
    await anyio.sleep(1)
    await wait_for(where.target, LOOKING, where.launcher)


async def _insert(where: Stage, name: str, tables: Sequence[str], row: int) -> float:
    """Insert a row into each table, in one transaction. Returns the seconds until all can be read."""
    async with connection(where.source) as source, connection(where.target, name) as target:
        async with source.transaction():
            await source.execute("; ".join(f"INSERT INTO {table} (id) VALUES ({row})" for table in tables))
        started = monotonic()
        last = await target.prepare(f"SELECT count(*) FROM {tables[-1]} WHERE id = {row}")
        while not await last.fetchval():
            await anyio.sleep(0.001)
        return monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_touch", description=__doc__)
    parser.add_argument("--tables", type=int, default=400)
    parser.add_argument("--columns", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    times = anyio.run(measure, arguments.tables, arguments.columns, arguments.rounds)
    print(f"{'':36} {'ours s':>8} {'native s':>9} {'ours/native':>12}")
    for kind, found in times.items():
        ours, native = statistics.median(found[OURS]), statistics.median(found[NATIVE])
        print(f"{kind:36} {ours:>8.3f} {native:>9.3f} {ours / native:>12.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "seconds": times}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
