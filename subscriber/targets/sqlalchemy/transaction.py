"""A transaction of the target that a cancellation ends cleanly.

anyio cancels a task again at each point where it waits, until it has left the scope. SQLAlchemy releases a connection
in several steps, and each step waits. If a statement is cancelled in that way, its connection is never closed,
and its transaction keeps its locks. So does SQLite's where a query is cancelled before its rows are fetched, since
a connection with an unfinished query is closed when the query is.

So each statement runs in a task of its own, and has a short time to end after a cancellation. Then it is cancelled
once, and the cancelled caller waits for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
from sqlalchemy import Connection, CursorResult, Executable
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from subscriber import telemetry

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 2.0  # seconds for a statement to end by itself after a cancellation
CLOSE_TIMEOUT = 10.0  # seconds for a cancelled statement to end, and for a connection to close


class SqlTransaction:
    """The statements of one transaction of the target. Created by begin()."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        """Execute a statement. `parameters`: a mapping of names to values, or a list of such; None: it has none."""
        return await _run(self._connection.execute(statement, parameters))

    async def run_sync(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function(connection, …)`, which may use the connection without awaiting."""
        return await _run(self._connection.run_sync(function, *args, **kwargs))


@asynccontextmanager
async def begin(engine: AsyncEngine) -> AsyncIterator[SqlTransaction]:
    """Committed at the end of the block, rolled back if the block raises."""
    connection = engine.connect()
    try:
        await _run(_start(connection))
        yield SqlTransaction(connection)
        await _run(connection.commit())
    finally:
        if connection.sync_connection is not None:
            with anyio.CancelScope(shield=True):
                await _end(asyncio.ensure_future(connection.close()), "a connection to the target")


async def _start(connection: AsyncConnection) -> None:
    await connection.start()


async def _run(step: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task], timeout=PATIENCE)
            task.cancel()
            await _end(task, "a statement of the target")
        raise


async def _end(task: asyncio.Future[Any], what: str) -> None:
    await asyncio.wait([task], timeout=CLOSE_TIMEOUT)
    if not task.done():
        task.cancel()
        telemetry.log(telemetry.WARNING, f"{what} did not end within {CLOSE_TIMEOUT:.0f} s, and is left behind")
    elif not task.cancelled():
        task.exception()  # mark it as retrieved: no task awaits this one any more
