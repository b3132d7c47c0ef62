"""RunningCommand: a command of a move while it runs, as an iterator of its events.

The command runs in a task of its own. Events wait without a limit until they are read, so a slow reader does not make
the pause of applications longer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from subscriber.migration.results import StepEvent

Result = TypeVar("Result")


class RunningCommand(Generic[Result]):
    """A command of a move that Migration.running() has started: an async iterator of its events.

    The iteration ends with the command. If the command fails, the iteration raises its error after the last event.
    """

    def __init__(self, events: MemoryObjectReceiveStream[StepEvent]) -> None:
        self._events = events
        self._scope = anyio.CancelScope()
        self._error: Exception | None = None
        self._results: list[Result] = []

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        return self

    async def __anext__(self) -> StepEvent:
        try:
            return await self._events.receive()
        except anyio.EndOfStream:
            self.raise_error()
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        """Cancel the command. Its last events, for example of an undo, can still be read."""
        self._scope.cancel()

    @property
    def canceled(self) -> bool:
        """True if the command has ended without a result, because it was canceled."""
        return self._scope.cancelled_caught

    @property
    def result(self) -> Result:
        """What the command returns.

        Raises:
            RuntimeError: it has not ended, has failed, or was canceled.
        """
        if not self._results:
            raise RuntimeError("the command of the move has no result")
        return self._results[0]

    def raise_error(self) -> None:
        """Raise the error of the command, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def run(self, command: Awaitable[Result], events: MemoryObjectSendStream[StepEvent]) -> None:
        """Run the command to its end."""
        with events, self._scope:
            try:
                self._results.append(await command)
            except Exception as error:
                self._error = error


@asynccontextmanager
async def run_command(
    command: Awaitable[Result], listen: Callable[[Callable[[StepEvent], None]], None]
) -> AsyncIterator[RunningCommand[Result]]:
    """Run a command during the block. At the end of the block, it is canceled and awaited.

    Args:
        command: of a Migration.
        listen: called with the function that takes each event of the command.

    Raises:
        Exception: the error of the command, if the iteration has not raised it; or that of the block.
    """
    send, receive = anyio.create_memory_object_stream[StepEvent](inf)
    running: RunningCommand[Result] = RunningCommand(receive)
    failure: Exception | None = None
    listen(send.send_nowait)
    with receive:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run, command, send)
            try:
                yield running
            except Exception as error:
                failure = error  # raised below, and not as a member of a group
            finally:
                running.cancel()
    if failure is not None:
        raise failure
    running.raise_error()
