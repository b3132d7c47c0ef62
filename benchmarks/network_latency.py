"""Replay of a backlog over a network with latency, on either side of the worker.

    python -m benchmarks.network_latency [--rows 100000] [--round-trips 1,5,20] [--json FILE]

A proxy delays every byte by half of the round trip, in each direction. Its bandwidth is not limited. Rates are relative
to the proxy without delay in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import Stage, caught_up, connection, execute, stage, wait_for
from benchmarks.workloads import TABLES, workloads
from subscriber.demo import processes

KINDS = ("insert", "update", "small transactions")
CHUNK = 64 * 1024


@dataclass(frozen=True, slots=True)
class Result:
    side: str  # the delayed connection
    round_trip: float  # milliseconds
    workload: str
    rows: int
    seconds: float


@asynccontextmanager
async def delaying(port: int, round_trip: float) -> AsyncIterator[int]:
    """Run a proxy to `port` of this machine with a round trip of `round_trip` milliseconds. Returns its own port."""
    delay = round_trip / 2000
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1000)

        async def send() -> None:
            while True:
                at, data = await queue.get()
                await asyncio.sleep(max(0.0, at - monotonic()))
                writer.write(data)
                if not data:
                    break
                await writer.drain()
            with suppress(OSError):
                writer.write_eof()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            while data := await reader.read(CHUNK):
                await queue.put((monotonic() + delay, data))
            await queue.put((monotonic() + delay, b""))

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ExceptionGroup):
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
            writers.extend((writer, upstream_writer))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(carry, reader, upstream_writer)
                tasks.start_soon(carry, upstream_reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def measure(rows: int, round_trips: list[float]) -> list[Result]:
    """Measure each workload without delay and with each delay, to the target and to the source."""
    results = []
    for side, round_trip in [("target", 0.0), *((s, r) for s in ("target", "source") for r in round_trips)]:
        async with stage() as where:
            server = where.target if side == "target" else where.source
            async with delaying(server.port, round_trip) as port:
                found = await _replay(where, side, round_trip, port, rows)
                print(*found, sep="\n", file=sys.stderr)
                results += found
    return results


async def _replay(where: Stage, side: str, round_trip: float, port: int, rows: int) -> list[Result]:
    source, target = where.source.dsn(), where.target.dsn()
    if side == "target":
        target = target.replace(f":{where.target.port}", f":{port}")
    else:
        source = source.replace(f":{where.source.port}", f":{port}")
    await execute(where.source, *TABLES, "INSERT INTO items SELECT i FROM generate_series(1, 1000) i")
    await execute(where.source, "CREATE PUBLICATION p FOR ALL TABLES")
    await execute(where.target, *TABLES)
    create = f"CREATE SUBSCRIPTION s CONNECTION '{source}' PUBLICATION p WITH (streaming = off)"
    await processes.execute(where.target.dsn(), create)
    where.launcher = processes.launcher(target, where.directory)
    where.launcher.start()
    ready = "SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM subscriber.subscription_rel"
    await wait_for(where.target, ready, where.launcher)
    results = []
    for workload in workloads(rows):
        if workload.name in KINDS:
            await execute(where.target, "UPDATE subscriber.subscription SET subenabled = false")
            await wait_for(where.source, "SELECT NOT active FROM pg_replication_slots", where.launcher)
            await workload.write(where)
            async with connection(where.source) as publisher:
                position = await publisher.fetchval("SELECT pg_current_wal_lsn()::text")
            await execute(where.target, "UPDATE subscriber.subscription SET subenabled = true")
            await wait_for(where.source, "SELECT active FROM pg_replication_slots", where.launcher)
            started = monotonic()  # without connecting, which takes a dozen round trips once
            await wait_for(where.source, caught_up("s", position), where.launcher)
            results.append(Result(side, round_trip, workload.name, workload.rows, monotonic() - started))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network_latency", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--round-trips", default="1,5,20", help="milliseconds")
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    round_trips = [float(each) for each in arguments.round_trips.split(",")]
    results = anyio.run(measure, arguments.rows, round_trips)
    near = {result.workload: result.rows / result.seconds for result in results if not result.round_trip}
    print(f"{'long way to':12} {'ms':>4} {'workload':20} {'rows/s':>9} {'by 0 ms':>8}")
    for result in results:
        rate = result.rows / result.seconds
        print(
            f"{result.side:12} {result.round_trip:>4.0f} {result.workload:20} {rate:>9,.0f}"
            f" {rate / near[result.workload]:>8.2f}"
        )
    if arguments.json:
        document = {"cpus": os.cpu_count(), "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
