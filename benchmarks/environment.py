"""The common environment of the benchmarks: two servers, the real command, and its figures in /proc."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import asyncpg

from subscriber.demo import processes
from subscriber.demo.processes import Process
from subscriber.demo.servers import Server, temporary_servers

# Settings of a larger server, so that no checkpoint falls into a measurement.
SETTINGS = {
    "shared_buffers": "256MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "max_logical_replication_workers": "8",
    "logical_decoding_work_mem": "64MB",
    "wal_sender_timeout": "60s",
}
POLL = 0.01  # seconds

BIN = "SUBSCRIBER_BENCHMARK_BIN"  # environment variable: a directory with the servers' programs, instead of the wheel's
OURS, NATIVE = "ours", "native"  # names of subscriptions, their slots, and databases of the target's server

TABLE = """
CREATE TABLE items (
  id bigint PRIMARY KEY, number integer, amount numeric(12,2), at timestamptz, flag boolean, label text)
"""
INSERT = """
INSERT INTO items SELECT i, (i::bigint * 7919) % 1000000, (i % 100000) / 100.0,
       '2020-01-01'::timestamptz + i * interval '1 second', i % 3 = 0, 'label of item ' || i
  FROM generate_series({first}, {last}) i
"""


@dataclass
class Stage:
    """Two servers and a launcher that is not started yet."""

    source: Server
    target: Server
    launcher: Process
    directory: Path


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """Create servers for one measurement. They are deleted at the end of the block."""
    async with temporary_servers(Path(os.environ[BIN]) if BIN in os.environ else None) as servers:
        source = await servers.create("publisher", SETTINGS)
        target = await servers.create("target", SETTINGS)
        await source.start()
        await target.start()
        where = Stage(source, target, processes.launcher(target.dsn(), servers.directory), servers.directory)
        try:
            yield where
        finally:
            await where.launcher.stop()  # the current one: subscribe_both() replaces it


async def subscribe_both(where: Stage, tables: Sequence[str], options: str, *, source_dsn: str | None = None) -> None:
    """Create our subscription and PostgreSQL's own, and wait until all their tables are ready.

    Each subscription has a database with `tables`. Publication `p` must exist on the source.

    Args:
        source_dsn: the connection string of the source; None: a direct connection.
    """
    create = f"CREATE SUBSCRIPTION {{}} CONNECTION '{source_dsn or where.source.dsn()}' PUBLICATION p WITH ({options})"
    await execute(where.target, *(f"CREATE DATABASE {name}" for name in (OURS, NATIVE)))
    await execute(where.target, *tables, dbname=OURS)
    await execute(where.target, *tables, create.format(NATIVE), dbname=NATIVE)
    await processes.execute(where.target.dsn(OURS), create.format(OURS))
    where.launcher = processes.launcher(where.target.dsn(OURS), where.directory)
    where.launcher.start()
    for name, states in ((OURS, "subscriber.subscription_rel"), (NATIVE, "pg_catalog.pg_subscription_rel")):
        ready = f"SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM {states}"
        await wait_for(where.target, ready, where.launcher, dbname=name)


@asynccontextmanager
async def connection(server: Server, dbname: str = "postgres") -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Open an asyncpg connection for the block."""
    found: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.dsn(dbname))
    try:
        yield found
    finally:
        await found.close()


async def execute(server: Server, *statements: str, dbname: str = "postgres") -> None:
    """Run statements, each in a transaction of its own."""
    async with connection(server, dbname) as one:
        for statement in statements:
            await one.execute(statement, timeout=None)


async def wait_for(
    server: Server, query: str, process: Process, *, timeout: float = 1800, dbname: str = "postgres"
) -> Any:
    """Repeat `query` until its value is true. Returns the value. Raises if `process` ends or the time is up."""
    started = monotonic()
    async with connection(server, dbname) as one:
        while not (value := await one.fetchval(query)):
            if process.pid is None or monotonic() - started > timeout:
                raise RuntimeError(f"never true: {query}\n{process.last_lines()}")
            await anyio.sleep(POLL)
    return value


def caught_up(slot: str, position: str) -> str:
    """Return a query for the publisher: whether everything before `position` is confirmed as durable."""
    return f"SELECT confirmed_flush_lsn >= '{position}' FROM pg_replication_slots WHERE slot_name = '{slot}'"


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one process, in bytes."""

    peak: int  # maximum since the start or the last reset_peak()
    now: int


def memory(pid: int) -> Memory:
    """Return the resident memory that Linux reports."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmHWM", "VmRSS"):
            found[name] = int(rest.split()[0]) * 1024
    return Memory(found["VmHWM"], found["VmRSS"])


def reset_peak(pid: int) -> None:
    """Reset the peak. If that is not permitted, the peak includes the time since the start."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process in seconds, user and system."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_cpu_seconds(server: Server) -> float:
    """Return the processor time of all present and past processes of a server."""
    postmaster = server.pid
    assert postmaster is not None
    fields = _stat(postmaster)
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # includes children that have ended
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(_stat(int(process.name))[1]) == postmaster:
                seconds += cpu_seconds(int(process.name))
    return seconds


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
