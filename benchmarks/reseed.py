"""A lost slot: `subscriber reseed` after few changes, compared with the initial copy; and `subscriber verify`.

    python -m benchmarks.reseed [--rows 10000000] [--changed 0.001] [--json FILE]

All connections to the publisher pass through a proxy, which counts the bytes that the publisher sends. `verify` is
compared with md5(string_agg(...)) of the table on both servers at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import INSERT, TABLE, Stage, connection, execute, stage, wait_for
from subscriber.comparison import verify
from subscriber.demo import processes
from subscriber.demo.servers import Server
from subscriber.repair import reseed

CHUNK = 1024 * 1024  # bytes
MD5 = "SELECT md5(string_agg(md5(i::text), '' ORDER BY id)) FROM items i"
READY = "SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM subscriber.subscription_rel"
SLOT_IS_IDLE = "SELECT NOT active FROM pg_replication_slots WHERE slot_name = 's'"


@dataclass
class Counter:
    """Bytes that a server has sent."""

    port: int = 0
    sent: int = 0


@asynccontextmanager
async def counted(port: int) -> AsyncIterator[Counter]:
    """Run a proxy in front of `port` of this machine, for the block."""
    counter = Counter()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        while data := await reader.read(CHUNK):
            counter.sent += len(data) * count
            writer.write(data)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ExceptionGroup):
            above_reader, above_writer = await asyncio.open_connection("127.0.0.1", port)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: pump(reader, above_writer, count=False))
                tasks.start_soon(lambda: pump(above_reader, writer, count=True))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=CHUNK)
    counter.port = server.sockets[0].getsockname()[1]
    try:
        yield counter
    finally:
        server.close()


@dataclass
class Figure:
    """The time of a step, and the bytes that the publisher has sent for it."""

    seconds: float
    sent: int


async def timed(counter: Counter, step: Callable[[], Awaitable[object]]) -> Figure:
    """Run a step."""
    started, before = monotonic(), counter.sent
    await step()
    return Figure(monotonic() - started, counter.sent - before)


async def measure(rows: int, changed: float) -> dict[str, Figure]:
    """Run all steps on new servers."""
    figures: dict[str, Figure] = {}
    async with stage() as on, counted(on.source.port) as counter:
        dsn = on.source.dsn().replace(f"port={on.source.port}", f"port={counter.port}")
        if "host=127.0.0.1" not in dsn:
            dsn = f"host=127.0.0.1 port={counter.port} dbname=postgres user=postgres"
        await execute(on.target, TABLE)
        await execute(on.source, TABLE, INSERT.format(first=1, last=rows), "VACUUM ANALYZE")
        await execute(on.source, "CREATE PUBLICATION p FOR ALL TABLES", "CHECKPOINT")
        on.launcher.start()
        await wait_for(on.target, "SELECT to_regclass('subscriber.worker')", on.launcher)
        target = on.target.dsn()

        async def copy() -> None:
            await processes.execute(target, f"CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION p")
            await wait_for(on.target, READY, on.launcher)

        async def compare() -> None:
            if not (await verify(target, "s")).is_same:
                raise RuntimeError("the tables differ")

        figures["initial copy"] = await timed(counter, copy)
        await execute(on.target, "VACUUM ANALYZE")
        figures["verify"] = await timed(counter, compare)
        figures["md5(string_agg(...))"] = await timed(counter, lambda: sums(on))
        await processes.execute(target, "ALTER SUBSCRIPTION s DISABLE")
        await wait_for(on.source, SLOT_IS_IDLE, on.launcher)
        step = round(1 / changed)
        await execute(
            on.source,
            "SELECT pg_drop_replication_slot('s')",
            f"UPDATE items SET label = 'changed', number = -1 WHERE id % {step} = 0",
        )
        figures["reseed"] = await timed(counter, lambda: reseed(target, "s"))
        await compare()
    return figures


async def sums(on: Stage) -> None:
    """Compute the checksum of the table on both servers."""

    async def one(server: Server) -> None:
        async with connection(server) as session:
            await session.fetchval(MD5, timeout=None)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, on.source)
        tasks.start_soon(one, on.target)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reseed", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--changed", type=float, default=0.001, help="share of the rows")
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    figures = anyio.run(measure, arguments.rows, arguments.changed)
    copied = figures["initial copy"]
    print(f"{'':22} {'seconds':>8} {'of the copy':>12} {'sent MiB':>9} {'of the copy':>12}")
    for name, one in figures.items():
        share = f"{one.seconds / copied.seconds:>12.1%} {one.sent / 1024**2:>9.1f} {one.sent / copied.sent:>12.2%}"
        print(f"{name:22} {one.seconds:>8.1f} {share}")
    if arguments.json:
        found = {name: {"seconds": one.seconds, "sent": one.sent} for name, one in figures.items()}
        arguments.json.write_text(
            json.dumps({"cpus": os.cpu_count(), "rows": arguments.rows, **found}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
