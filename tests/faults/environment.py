"""A publisher with writers, a target, and `subscriber run` as a process to be killed between them."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import asyncpg
import pytest

from subscriber.demo.compare import compare
from subscriber.demo.processes import Process
from subscriber.failpoints import Point
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions

# No table here has a key, so duplicate rows are visible.
LOG = "CREATE TABLE log (writer int, number bigint, at timestamptz DEFAULT clock_timestamp(), text text)"
APPEND = """
INSERT INTO log (writer, number, text) SELECT $1, $2::bigint, repeat('x', ($2::bigint % 200)::int)
  FROM generate_series(1, $3::int)
"""

_LEFT_ON_SOURCE = """
SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() ORDER BY 1
"""
_LEFT_ON_TARGET = """
SELECT roname FROM pg_replication_origin, subscriber.subscription
 WHERE roname = 'pg_' || subid::text OR roname LIKE 'pg\\_' || subid::text || '\\_%' ORDER BY 1
"""
# Those of parallel apply workers stay with the subscription; no table's OID is below 16384.
_LEFT_OF_SYNC = f"""
SELECT roname FROM ({_LEFT_ON_TARGET}) t WHERE NOT roname ~ '_[0-9]{{1,4}}$' ORDER BY 1
"""
_PROGRESS = "SELECT relid::bigint FROM subscriber.progress ORDER BY 1"
_STATES = "SELECT srsubstate::text, count(*) FROM subscriber.subscription_rel GROUP BY 1"


@dataclass
class Scene:
    """One subscription `s`; `directory` is for the processes' logs."""

    source: Database
    target: Database
    directory: Path
    worker: Process = field(init=False)  # `subscriber run`
    appended: int = 0  # transactions of append()

    def __post_init__(self) -> None:
        self.worker = self.program()

    def program(
        self, point: Point | None = None, how: str = "kill", times: int = 1, *, target: str | None = None
    ) -> Process:
        """Return `subscriber run`. With `point` it kills or stops itself there.

        `target`: another route to the target.
        """
        armed = [] if point is None else [point.name, how, str(times)]
        module = "subscriber" if point is None else "tests.faults.failpoint_cli"
        arguments = ["run", "--target", target or self.target.dsn(), "--log-format", "postgres"]
        return Process("run", [sys.executable, "-m", module, *armed, *arguments], self.directory)

    async def create_subscription(self, conninfo: str | None = None, options: str = "") -> None:
        conninfo = conninfo or self.source.dsn()
        statement = f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p {options}"
        await self.execute(statement)

    async def execute(self, statement: str) -> None:
        """Execute a statement on subscriptions."""
        await Subscriptions(self.target).execute(statement)

    async def append(self, rows: int = 2, writer: int = 0) -> None:
        """Execute one transaction on the publisher."""
        async with self._writer() as connection:
            self.appended += 1
            await connection.execute(APPEND, writer, self.appended, rows)

    async def keep_appending(self, stop: anyio.Event, pause: float = 0.005) -> None:
        """Small transactions until `stop`; a publisher that is down is waited for."""
        while not stop.is_set():
            try:
                async with self._writer() as connection:
                    while not stop.is_set():
                        self.appended += 1
                        await connection.execute(APPEND, 1, self.appended, 1 + self.appended % 3)
                        await anyio.sleep(pause)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
                await anyio.sleep(0.05)  # killed in the middle of a Parse, asyncpg calls it an error of its own

    @asynccontextmanager
    async def _writer(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(self.source.dsn())
        try:
            yield connection
        finally:
            connection.terminate()

    async def run_into(self, point: Point, times: int = 1, *, timeout: float = 20.0) -> None:
        """Run the worker until it has died at `point`."""
        program = self.program(point, times=times)
        await self.run_until_dead(program, point, timeout)

    async def run_until_dead(self, program: Process, point: Point, timeout: float) -> None:
        program.start()
        with anyio.move_on_after(timeout):
            while program.pid is not None:
                await anyio.sleep(0.02)
        if program.pid is not None:
            await program.stop()
            pytest.fail(f"never reached {point.name}; the log ends with\n{program.last_lines()}")
        assert await program.wait() == -9, program.last_lines()

    async def wait_until_equal(self, *, timeout: float = 60.0) -> None:
        """After the last write: wait until all changes have arrived and are confirmed, and all tables are ready."""
        position = await self.source.value("SELECT pg_current_wal_insert_lsn()::text")
        confirmed = f"SELECT confirmed_flush_lsn >= '{position}' FROM pg_replication_slots WHERE slot_name = 's'"
        started = monotonic()
        while True:
            states = dict(await self.target.rows(_STATES))
            if set(states) == {"r"} and await self.source.value(confirmed):
                return
            if self.worker.pid is None:
                pytest.fail(f"subscriber run has ended unexpectedly:\n{self.worker.last_lines()}")
            if monotonic() - started > timeout:
                pytest.fail(f"not equal after {timeout} s, table states {states}:\n{self.worker.last_lines(40)}")
            await anyio.sleep(0.05)

    async def check(self) -> dict[str, int]:
        """Check that both sides have the same rows, without leftovers. Returns the number of rows by table."""
        counts = {}
        async for result in compare(self.source.dsn(), self.target.dsn()):
            assert not result.differs, result
            counts[result.name] = result.same
        subid = await self.target.value("SELECT subid::bigint FROM subscriber.subscription")
        # A table may be ready a moment before its sync worker has cleared up.
        await self.source.wait_for(f"SELECT array_agg(slot_name) FROM ({_LEFT_ON_SOURCE}) t", ["s"])
        await self.target.wait_for(f"SELECT array_agg(roname) FROM ({_LEFT_OF_SYNC}) t", [f"pg_{subid}"])
        await self.target.wait_for(f"SELECT array_agg(relid) FROM ({_PROGRESS}) t", [0])
        return counts

    async def finish(self, *, timeout: float = 60.0) -> dict[str, int]:
        """Call wait_until_equal() and check() with a worker that is not killed, then remove the subscription."""
        if self.worker.pid is None:
            self.worker.start()
        await self.wait_until_equal(timeout=timeout)
        counts = await self.check()
        await self.execute("DROP SUBSCRIPTION s")
        assert await self.source.rows(_LEFT_ON_SOURCE) == []
        assert await self.target.rows(_LEFT_ON_TARGET) == []
        return counts

    async def status(self, target: str | None = None) -> tuple[int, dict[str, Any] | None, str]:
        """Run `subscriber status --json`. Returns the exit status, the status of `s` (None: not listed), and stderr."""
        command = [sys.executable, "-m", "subscriber", "status", "--json", "--target", target or self.target.dsn()]
        done = await anyio.run_process(command, check=False)
        if not done.stdout:
            return done.returncode, None, done.stderr.decode()
        (document,) = json.loads(done.stdout)["subscriptions"]
        return done.returncode, document, done.stderr.decode()


@asynccontextmanager
async def scene(source: Database, target: Database, directory: Path) -> AsyncIterator[Scene]:
    """Table `log` on both sides, published as `p`."""
    await source.execute(LOG, "CREATE PUBLICATION p FOR TABLE log")
    await target.execute(LOG)
    played = Scene(source, target, directory)
    try:
        yield played
    finally:
        await played.worker.stop()


@pytest.fixture
async def faults(source_db: Database, target_db: Database, processes: Path) -> AsyncIterator[Scene]:
    async with scene(source_db, target_db, processes) as played:
        yield played
