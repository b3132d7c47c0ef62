"""A transaction of the target that a cancellation ends cleanly.

anyio cancels a task again at each point where it waits, until it has left the scope. SQLAlchemy releases a connection
in several steps, and each step waits. If a statement is cancelled in that way, its connection is never closed,
and its transaction keeps its locks. So does SQLite's where a query is cancelled before its rows are fetched, since
a connection with an unfinished query is closed when the query is.

So each statement runs in a task of its own, and has a short time to end after a cancellation. Then it is cancelled
once, and the cancelled caller waits for its end.

The errors of the driver are replaced by errors without its text, which may have values of rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
from sqlalchemy import Connection, CursorResult, Executable
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from subscriber import telemetry
from subscriber.errors import ApplyError, SubscriberError, TargetLost
from subscriber.sqlstate import CHARACTER_NOT_IN_REPERTOIRE, EXTERNAL_ROUTINE_EXCEPTION
from subscriber.targets.sqlalchemy.dialects.mysql import lost_hint, refused_hint

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 2.0  # seconds for a statement to end by itself after a cancellation
_HINT = "The exception that this one was raised from has the driver's text."
CLOSE_TIMEOUT = 10.0  # seconds for a cancelled statement to end, and for a connection to close


class SqlTransaction:
    """One transaction, and its statements. begin() must be awaited first, and close() at the end in any case.

    All methods except close() raise TargetLost if the connection is lost, and ApplyError for other errors.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._dialect = engine.dialect.name
        self._connection = engine.connect()

    async def begin(self) -> None:
        """Take a connection of the engine."""
        try:
            await _finish(self._connection.start())
        except (SQLAlchemyError, OSError) as error:
            what = type(error.orig if isinstance(error, DBAPIError) else error).__name__
            raise TargetLost(f"could not connect to the target: {what}", hint=_HINT) from error

    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        """Execute a statement. `parameters`: a mapping of names to values, or a list of such; None: it has none."""
        return await self._run(self._connection.execute(statement, parameters))

    async def run_sync(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function(connection, …)`, which may use the connection without awaiting."""
        return await self._run(self._connection.run_sync(function, *args, **kwargs))

    async def commit(self) -> None:
        """Commit the transaction."""
        await self._run(self._connection.commit())

    async def _run(self, step: Coroutine[Any, Any, T]) -> T:
        try:
            return await _finish(step)
        except SQLAlchemyError as error:
            raise self._translated(error) from error
        except UnicodeEncodeError:  # it contains the value
            raise ApplyError(
                "a text cannot be written in the encoding of the target", sqlstate=CHARACTER_NOT_IN_REPERTOIRE
            ) from None

    def _translated(self, error: SQLAlchemyError) -> SubscriberError:
        if not isinstance(error, DBAPIError):
            return ApplyError(f"the target could not be used: {type(error).__name__}")
        what = type(error.orig).__name__
        if error.connection_invalidated:
            return TargetLost(f"lost connection to the target: {what}", hint=lost_hint(self._dialect))
        return ApplyError(
            f"the target refused a statement: {what}",
            hint=refused_hint(self._dialect, error.orig) or _HINT,
            sqlstate=EXTERNAL_ROUTINE_EXCEPTION,
        )

    async def close(self) -> None:
        """Return the connection to the engine. A transaction that is not committed is rolled back."""
        if self._connection.sync_connection is not None:
            with anyio.CancelScope(shield=True):
                await _end(asyncio.ensure_future(self._connection.close()), "a connection to the target")


async def _finish(step: Coroutine[Any, Any, T]) -> T:
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
