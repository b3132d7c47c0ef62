"""What the benchmarks share: two servers, the real command beside them, and what /proc says about it."""

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

# As a server of some size has it, so that checkpoints do not fall into what is measured.
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

BIN = "SUBSCRIBER_BENCHMARK_BIN"  # in the environment: a directory with the servers' programs instead of the wheel's
OURS, NATIVE = "ours", "native"  # subscriptions, their slots, and databases of the target's server

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
    """Servers for one measurement, deleted at its end."""
    async with temporary_servers(Path(os.environ[BIN]) if BIN in os.environ else None) as servers:
        source = await servers.create("publisher", SETTINGS)
        target = await servers.create("target", SETTINGS)
        await source.start()
        await target.start()
        where = Stage(source, target, processes.launcher(target.dsn(), servers.directory), servers.directory)
        try:
            yield where
        finally:
            await where.launcher.stop()  # the last one: subscribe_both() puts another in its place


async def subscribe_both(where: Stage, tables: Sequence[str], options: str, *, source_dsn: str | None = None) -> None:
    """Ours and PostgreSQL's own, each in a database with `tables`; returns when all of those are ready.

    Publication `p` of the source is there already. `source_dsn`: how to reach the source, if not directly.
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
    """An asyncpg connection for the length of the block."""
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
    """Ask until `query` gives something that is true; that value. Raises if `process` ends or time is up."""
    started = monotonic()
    async with connection(server, dbname) as one:
        while not (value := await one.fetchval(query)):
            if process.pid is None or monotonic() - started > timeout:
                raise RuntimeError(f"never true: {query}\n{process.last_lines()}")
            await anyio.sleep(POLL)
    return value


def caught_up(slot: str, position: str) -> str:
    """A query on the publisher: whether everything before `position` is confirmed as durable."""
    return f"SELECT confirmed_flush_lsn >= '{position}' FROM pg_replication_slots WHERE slot_name = '{slot}'"


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in bytes."""

    peak: int  # highest since the start or the last reset_peak()
    now: int


def memory(pid: int) -> Memory:
    """Resident memory as Linux counts it."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmHWM", "VmRSS"):
            found[name] = int(rest.split()[0]) * 1024
    return Memory(found["VmHWM"], found["VmRSS"])


def reset_peak(pid: int) -> None:
    """Let the peak count from here on; where that is not allowed it goes on counting from the start."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, user and system."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def server_cpu_seconds(server: Server) -> float:
    """The same of all processes that a server has or had."""
    postmaster = server.pid
    assert postmaster is not None
    fields = _stat(postmaster)
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with those of children that have ended
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(_stat(int(process.name))[1]) == postmaster:
                seconds += cpu_seconds(int(process.name))
    return seconds


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
