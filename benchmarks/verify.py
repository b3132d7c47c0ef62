"""`subscriber verify`, complete and since the last comparison, and the cost of `track_ranges`.

    python -m benchmarks.verify [--rows 10000000] [--changes 1000] [--backlog 200000] [--rounds 3] [--json FILE]

The complete comparison is measured beside md5(string_agg(...)) of the table on both servers at the same time. A proxy
counts the bytes that the publisher sends. The comparison since the last one follows an update of `changes` rows, in
transactions of one row, at random places of the table.

The cost of `track_ranges` is the time to replay a backlog with the option, divided by the time without it. The backlog
is made while the subscription is disabled. Two kinds are measured: transactions with one update each, at random
places, and one transaction that updates consecutive rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import INSERT, TABLE, Stage, connection, execute, stage, wait_for
from benchmarks.reseed import READY, SLOT_IS_IDLE, Figure, counted, sums, timed
from subscriber.comparison import Comparison, verify
from subscriber.demo import processes

CONFIRMED = "SELECT confirmed_flush_lsn >= '{}' FROM pg_replication_slots WHERE slot_name = 's'"
Write = Callable[[Stage, int, int], Awaitable[None]]


async def one_by_one(on: Stage, rows: int, changes: int) -> None:
    """Update rows at random places, in transactions of one row."""
    chance = random.Random(changes)
    places = ", ".join(str(chance.randint(1, rows)) for _ in range(changes))
    await execute(
        on.source,
        f"DO $$ DECLARE i bigint; BEGIN FOREACH i IN ARRAY ARRAY[{places}] LOOP"
        " UPDATE items SET number = number + 1 WHERE id = i; COMMIT; END LOOP; END $$",
    )


async def at_once(on: Stage, rows: int, changes: int) -> None:
    """Update consecutive rows in one transaction."""
    first = random.randint(1, max(1, rows - changes))
    await execute(on.source, f"UPDATE items SET number = number + 1 WHERE id BETWEEN {first} AND {first + changes - 1}")


BACKLOGS: dict[str, Write] = {"one row in a transaction": one_by_one, "one transaction": at_once}


async def caught_up(on: Stage) -> None:
    """Wait until all changes of the publisher are applied and durable."""
    async with connection(on.source) as session:
        position = await session.fetchval("SELECT pg_current_wal_insert_lsn()::text")
    await execute(on.source, "SELECT pg_logical_emit_message(true, 'benchmark', '')")
    await wait_for(on.source, CONFIRMED.format(position), on.launcher)


async def replayed(on: Stage, write: Write, rows: int, changes: int, *, tracked: bool) -> float:
    """Return the seconds for the replay of a backlog."""
    target = on.target.dsn()
    await processes.execute(target, "ALTER SUBSCRIPTION s DISABLE")
    await wait_for(on.source, SLOT_IS_IDLE, on.launcher)
    await processes.execute(target, f"ALTER SUBSCRIPTION s SET (track_ranges = {str(tracked).lower()})")
    await write(on, rows, changes)
    await execute(on.target, "CHECKPOINT")
    started = monotonic()
    await processes.execute(target, "ALTER SUBSCRIPTION s ENABLE")
    await caught_up(on)
    return monotonic() - started


async def measure(
    rows: int, changes: int, backlog: int, rounds: int
) -> tuple[dict[str, Figure], dict[str, tuple[float, float]]]:
    """Return the figures of comparisons, and for each backlog the median times without and with `track_ranges`."""
    figures: dict[str, Figure] = {}
    async with stage() as on, counted(on.source.port) as counter:
        dsn = f"host=127.0.0.1 port={counter.port} dbname=postgres user=postgres"
        target = on.target.dsn()
        await execute(on.target, TABLE)
        await execute(on.source, TABLE, INSERT.format(first=1, last=rows), "VACUUM ANALYZE")
        await execute(on.source, "CREATE PUBLICATION p FOR ALL TABLES", "CHECKPOINT")
        on.launcher.start()
        await wait_for(on.target, "SELECT to_regclass('subscriber.worker')", on.launcher)
        await processes.execute(
            target, f"CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION p WITH (track_ranges = true)"
        )
        await wait_for(on.target, READY, on.launcher)
        await execute(on.target, "VACUUM ANALYZE")
        await caught_up(on)

        async def compare(*, since_last: bool = False) -> Comparison:
            found = await verify(target, "s", since_last=since_last)
            if not found.is_same:
                raise RuntimeError("the tables differ")
            return found

        figures["md5(string_agg(...))"] = await timed(counter, lambda: sums(on))
        figures["verify"] = await timed(counter, compare)
        await one_by_one(on, rows, changes)
        await caught_up(on)
        name = f"verify --since last, after {changes:,} changes"
        figures[name] = await timed(counter, lambda: compare(since_last=True))
        times: dict[str, tuple[float, float]] = {}
        for name, write in BACKLOGS.items():
            found: dict[bool, list[float]] = {False: [], True: []}
            for number in range(2 * rounds):
                tracked = number % 4 in (1, 2)
                found[tracked].append(await replayed(on, write, rows, backlog, tracked=tracked))
            times[name] = statistics.median(found[False]), statistics.median(found[True])
    return figures, times


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--backlog", type=int, default=200_000, help="changes of each backlog")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    figures, times = anyio.run(measure, arguments.rows, arguments.changes, arguments.backlog, arguments.rounds)
    print(f"{'':42} {'seconds':>8} {'sent KiB':>9}")
    for name, one in figures.items():
        print(f"{name:42} {one.seconds:>8.2f} {one.sent / 1024:>9.1f}")
    print(
        f"\n{'replay of ' + format(arguments.backlog, ',') + ' changes':42} {'without':>8} {'tracked':>9} {'ratio':>6}"
    )
    for name, (without, tracked) in times.items():
        print(f"{name:42} {without:>8.2f} {tracked:>9.2f} {tracked / without:>6.2f}")
    if arguments.json:
        found = {name: {"seconds": one.seconds, "sent": one.sent} for name, one in figures.items()}
        replay = {name: {"without": without, "tracked": tracked} for name, (without, tracked) in times.items()}
        arguments.json.write_text(
            json.dumps({"cpus": os.cpu_count(), "rows": arguments.rows, **found, "replay": replay}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
