"""The launcher on a test's database: in the test's own process, or as the real program.

    subscriber      a running launcher for target_db, with its log
    program         the command `subscriber run` for target_db, not started yet

    settings        those of `subscriber`; a test or a module may override them

The launcher in the test's process has short retry intervals; the program has its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any, Literal

import anyio
import pytest

from subscriber import telemetry
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.schema import ensure_schema
from subscriber.cli.logs import JsonFormatter, PostgresFormatter
from subscriber.connection.connect import connect
from subscriber.settings import Settings
from subscriber.telemetry import Parts
from subscriber.worker.supervision.launcher import Launcher
from tests.plugins.fix_cluster import Database, lengthening_pauses
from tests.plugins.fix_passwords import search
from tests.plugins.unsaid_waits import INTERVAL, LONGEST, watched_for_waits

QUICK = Settings(retry_interval=0.2, empty_database_poll_interval=0.1)
STOP_TIMEOUT = 10.0  # seconds that a launcher may take to end once it is cancelled

# Tables of a subscription that are not handed over yet.
UNFINISHED = """
SELECT count(*) FROM subscriber.subscription_rel r JOIN subscriber.subscription s ON s.subid = r.srsubid
 WHERE s.subname = '{name}' AND r.srsubstate NOT IN ({states})
"""


class Log(logging.Handler):
    """Every record of the package since the launcher's start."""

    def __init__(self) -> None:
        super().__init__(telemetry.LOG)
        self.records: list[logging.LogRecord] = []
        self._formatted: list[str] = []  # the first of the records, as text() of an earlier call has formatted them

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def parts(self) -> list[Parts]:
        """Message, detail, hint and context of each record, as the json and rich formats show them."""
        return [record.__dict__["parts"] for record in self.records]

    def text(self, style: Literal["postgres", "json"] = "postgres") -> str:
        """Return all records in that log format."""
        if style == "json":
            return "\n".join(map(JsonFormatter().format, self.records))
        self._formatted += map(PostgresFormatter().format, self.records[len(self._formatted) :])
        return "\n".join(self._formatted)

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.text()) is not None

    def tells_of_waiting(self) -> bool:
        """Return True if a worker has recently logged that it waits for an answer of the target."""
        since = time() - LONGEST - 2 * INTERVAL
        events = [record.__dict__["keys"].get("event") for record in self.records if record.created > since]
        return "target.silent" in events

    def clear(self) -> None:
        self.records.clear()
        self._formatted.clear()

    async def wait_for(self, pattern: str, *, timeout: float = 20.0) -> re.Match[str]:
        """Wait until the regular expression is found in the log's lines, in the postgres format."""
        with anyio.move_on_after(timeout):
            for pause in lengthening_pauses():
                if match := re.search(pattern, self.text()):
                    return match
                await anyio.sleep(pause)
        pytest.fail(f"after {timeout} s nothing in the log is like {pattern!r}; it ends with:\n{self.text()[-3000:]}")


@dataclass
class Subscriptions:
    """The statements and the waiting that tests need, for the subscriptions of one target database."""

    database: Database
    log: Log = field(default_factory=Log)

    async def execute(self, *statements: str) -> list[tuple[str, str]]:
        """Run SUBSCRIPTION statements; the notices as (severity, message)."""
        notices: list[tuple[str, str]] = []
        connection = await connect(self.database.dsn(), settings={"synchronous_commit": "on"})
        try:
            await ensure_schema(connection)
            for statement in statements:
                await execute(
                    connection,
                    statement,
                    notice=lambda severity, message, _detail, _hint: notices.append((severity, message)),
                )
        finally:
            connection.terminate()
        return notices

    async def create(self, source: Database | str, publications: str, name: str = "s", **options: object) -> None:
        """CREATE SUBSCRIPTION; `publications` and the options' values as the statement spells them."""
        dsn = source if isinstance(source, str) else source.dsn()
        given = ", ".join(f"{option} = {_spelt(value)}" for option, value in options.items())
        await self.execute(
            f"CREATE SUBSCRIPTION {name} CONNECTION '{dsn}' PUBLICATION {publications}"
            + (f" WITH ({given})" if given else "")
        )

    async def wait_for_sync(self, source: Database, name: str = "s", *, timeout: float = 30.0) -> None:
        """Wait until each table is copied and handed over, and the source's position is confirmed."""
        await self.database.wait_for(UNFINISHED.format(name=name, states="'s', 'r'"), 0, timeout=timeout)
        await source.wait_for_catchup(name, timeout=timeout)

    async def wait_for_ready(self, source: Database, name: str = "s", *, timeout: float = 30.0) -> None:
        """Wait until the apply worker alone has all tables, and the source's position is confirmed."""
        # The hand-over is finished at a position after the table's own; a transaction brings one.
        await source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        await self.database.wait_for(UNFINISHED.format(name=name, states="'r'"), 0, timeout=timeout)
        await source.wait_for_catchup(name, timeout=timeout)

    async def worker(self, name: str = "s") -> dict[str, Any]:
        """Return the apply worker's report; empty before the first one."""
        async with self.database.connection() as connection:
            row = await connection.fetchrow(
                "SELECT w.* FROM subscriber.worker w JOIN subscriber.subscription s USING (subid)"
                " WHERE s.subname = $1 AND w.relid = 0",
                name,
            )
        return dict(row) if row is not None else {}

    async def wait_for_state(self, state: str, name: str = "s", *, timeout: float = 20.0) -> dict[str, Any]:
        """Wait until the apply worker reports that state. Returns its report."""
        await self.database.wait_for(
            "SELECT state FROM subscriber.worker w JOIN subscriber.subscription s USING (subid)"
            f" WHERE s.subname = '{name}' AND w.relid = 0",
            state,
            timeout=timeout,
        )
        return await self.worker(name)


def _spelt(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


@dataclass
class Subscriber(Subscriptions):
    """A launcher in this process. stop() cancels it, which interrupts its work as suddenly as a kill."""

    launcher: Launcher | None = None  # the last one started
    apply_target: str | None = None  # of the role that applies changes
    settings: Settings = QUICK  # of the next one started
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, "it runs already"
        # Not an anyio task group: pytest runs a fixture's two halves in two tasks.
        self.launcher = Launcher(self.database.dsn(), apply_target=self.apply_target, settings=self.settings)
        self._task = asyncio.create_task(self.launcher.run())

    def cancel(self) -> None:
        """Start to stop, without waiting."""
        assert self._task is not None
        self._task.cancel()

    async def stop(self) -> None:
        """Cancel the launcher and wait for its end. Raises its error if it had failed."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_TIMEOUT)
        if not task.done():
            where = "\n".join(str(waiting) for waiting in asyncio.all_tasks())
            pytest.fail(f"the launcher does not end {STOP_TIMEOUT} s after it was cancelled:\n{where}")
        with suppress(asyncio.CancelledError):
            task.result()

    async def restart(self) -> None:
        await self.stop()
        self.start()


@asynccontextmanager
async def running_subscriber(
    database: Database, *, start: bool = True, settings: Settings = QUICK
) -> AsyncIterator[Subscriber]:
    """Run a launcher for `database`, stopped at the end. Fails if a session waits long for a lock without a report."""
    subscriber = Subscriber(database, settings=settings)
    level = telemetry.logger.level
    telemetry.logger.addHandler(subscriber.log)
    telemetry.logger.setLevel(telemetry.LOG)
    try:
        if start:
            subscriber.start()
        async with watched_for_waits(database, subscriber.log.tells_of_waiting):
            yield subscriber
    finally:
        telemetry.logger.removeHandler(subscriber.log)
        telemetry.logger.setLevel(level)
        await subscriber.stop()


@pytest.fixture
def settings() -> Settings:
    return QUICK


@pytest.fixture
async def subscriber(target_db: Database, settings: Settings) -> AsyncIterator[Subscriber]:
    async with running_subscriber(target_db, settings=settings) as subscriber:
        yield subscriber


class Program:
    """`subscriber run` as a process of its own, logging to a file in one of its formats."""

    def __init__(self, dsn: str, log: Path, log_format: str = "postgres", options: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "subscriber", "run", "--target", dsn, "--log-format", log_format]
        self._command = [*command, *options]
        self._log = log
        self._pid_file = log.with_suffix(".pid")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id; None while the process does not run."""
        return None if self._process is None else self._process.pid

    @property
    def text(self) -> str:
        """Return its log, of all its runs."""
        return self._log.read_text() if self._log.exists() else ""

    async def start(self, expect: str = "launcher started", *, timeout: float = 60.0) -> None:
        """Start, and wait for at most `timeout` seconds until the log contains `expect`."""
        seen = len(self.text)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._pid_file.write_text(f"{self._process.pid}\n")
        await self.wait_for(expect, since=seen, timeout=timeout)

    async def wait_for(self, pattern: str, *, since: int = 0, timeout: float = 60.0) -> re.Match[str]:
        with anyio.move_on_after(timeout):
            for pause in lengthening_pauses():
                if match := re.search(pattern, self.text[since:]):
                    return match
                if self._process is not None and self._process.poll() is not None:
                    pytest.fail(f"it ended with {self._process.returncode}:\n{self.text}")
                await anyio.sleep(pause)
        pytest.fail(f"after {timeout} s nothing in the log is like {pattern!r}; it ends with:\n{self.text[-3000:]}")

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end. Returns the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        status = await asyncio.to_thread(self._process.wait, 30)
        self._forget()
        return status

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        self._process = None
        self._pid_file.unlink()


@pytest.fixture
def program(target_db: Database, processes: Path) -> Iterator[Program]:
    program = Program(target_db.dsn(), processes / "run.log")
    yield program
    program.kill()
    search(program.text, "log of subscriber run")


@pytest.fixture
def subscriptions(target_db: Database) -> Subscriptions:
    """Execute statements for target_db, independent of its launcher."""
    return Subscriptions(target_db)
