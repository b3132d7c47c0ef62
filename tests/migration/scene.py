"""Two servers of a move, the launchers of both, and the command in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import asyncpg

from subscriber.failpoints import Point
from subscriber.migration.migration import Migration, move_database
from subscriber.migration.results import StepEvent
from subscriber.migration.running_command import Result
from subscriber.migration.steps import MoveOptions
from tests.migration.writers import REFUSED, SCHEMA, Application
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, running_subscriber

QUICK = MoveOptions(max_pause=30.0, max_lag=10.0, lag_window=0.1)


@asynccontextmanager
async def following(
    source: Database, target: Database, schema: Sequence[str] = SCHEMA, *, processes: Path | None = None
) -> AsyncIterator[dict[str, Program]]:
    """Have the target replicate the source, with launchers for both: in this process, or in their own.

    Args:
        processes: the directory of their logs. None: they run in this process.

    Returns:
        The launchers that run in processes of their own, of "source" and "target".
    """
    for database in (source, target):
        await database.execute(*schema[:-1])
    await source.execute(schema[-1], "CREATE PUBLICATION p FOR ALL TABLES")
    programs = {
        side: Program(side_database.dsn(), processes / f"{side_database.name}.{side}.log")
        for side, side_database in (("source", source), ("target", target))
        if processes is not None
    }
    try:
        async with (
            running_subscriber(target, start=processes is None) as there,
            running_subscriber(source, start=processes is None),
        ):
            for program in programs.values():
                await program.start()
            await there.create(source, "p", origin="none" if await source.major() >= 16 else "any")
            await there.wait_for_ready(source)
            yield programs
    finally:
        for program in programs.values():
            program.kill()


@asynccontextmanager
async def moving(source: Database, target: Database, **options: Any) -> AsyncIterator[Migration]:
    servers = source.dsn(), target.dsn()
    async with move_database(*servers, "s", options=replace(QUICK, **options), run=False) as moving_database:
        yield moving_database


async def listen(move: Migration, command: Awaitable[Result], on_event: Callable[[StepEvent], None]) -> Result:
    """Run a command of a move, and call `on_event` for each of its events."""
    async with move.running(command) as running:
        async for event in running:
            on_event(event)
    return running.result


async def wait_for_writes(found: Sequence[Application], to: Database, more: int = 5) -> None:
    """Wait until each application has written to that server."""
    for application in found:
        count = len(application.acknowledged)
        with anyio.fail_after(60):
            while application.moves[-1:] != [to.name] or len(application.acknowledged) < count + more:
                await anyio.sleep(0.02)


async def admits(database: Database, role: str) -> bool:
    """Return True if the server lets an application write now."""
    try:
        connection = await asyncpg.connect(database.dsn(user=role))
        try:
            await connection.execute("UPDATE account SET items = items WHERE false")
        finally:
            connection.terminate()
    except REFUSED:
        return False
    return True


@dataclass
class Command:
    """`subscriber migrate` between two databases, as a process that may be killed at a failpoint.

    `name` is that of the move; empty: the command has none.
    """

    source: Database
    target: Database
    name: str = "s"

    async def run(self, command: str, *options: str, point: Point | None = None, times: int = 1) -> tuple[int, str]:
        """Return the exit status and the output of both streams. With `point`, the process kills itself there."""
        process = await self.start(command, *options, point=point, times=times)
        with anyio.fail_after(300):  # a guard against a command that hangs
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def start(
        self, command: str, *options: str, point: Point | None = None, times: int = 1
    ) -> asyncio.subprocess.Process:
        """Return the running process."""
        program = [sys.executable, "-m", "subscriber"]
        if point is not None:
            program = [sys.executable, "-m", "tests.faults.failpoint_cli", point.name, "kill", str(times)]
        servers = ["--source", self.source.dsn(), "--target", self.target.dsn()]
        limits = (
            ["--lag-window", "0.1", "--max-lag", "10", "--max-pause", "60"] if command in ("cutover", "back") else []
        )
        return await asyncio.create_subprocess_exec(
            *program,
            "migrate",
            command,
            *([self.name] if self.name else []),
            *servers,
            *limits,
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
