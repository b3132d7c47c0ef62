"""RunningCommand: a command of a move while it runs, as an iterator of its events.

The command runs in a task of its own. Events wait without a limit until they are read, so a slow reader does not make
the pause of applications longer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from subscriber.migration.results import StepEvent

Result = TypeVar("Result")


@dataclass(slots=True)
class _Outcome(Generic[Result]):
    """The end of a command, as its task leaves it."""

    results: list[Result] = field(default_factory=list)
    error: Exception | None = None

    def raise_error(self) -> None:
        """Raise the error of the command, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class RunningCommand(Generic[Result]):
    """A command of a move that Migration.running() has started: an async iterator of its events.

    The iteration ends with the command. If the command fails, the iteration raises its error after the last event.
    """

    def __init__(
        self, events: MemoryObjectReceiveStream[StepEvent], scope: anyio.CancelScope, outcome: _Outcome[Result]
    ) -> None:
        self._events = events
        self._scope = scope
        self._outcome = outcome

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        return self

    async def __anext__(self) -> StepEvent:
        try:
            return await self._events.receive()
        except anyio.EndOfStream:
            self._outcome.raise_error()
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
        """The result of the command.

        Raises:
            RuntimeError: it has not ended, has failed, or was canceled.
        """
        if not self._outcome.results:
            raise RuntimeError("the command of the move has no result")
        return self._outcome.results[0]


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
    scope = anyio.CancelScope()
    outcome: _Outcome[Result] = _Outcome()
    running = RunningCommand(receive, scope, outcome)

    async def run() -> None:
        with send, scope:
            try:
                outcome.results.append(await command)
            except Exception as error:
                outcome.error = error

    failure: Exception | None = None
    listen(send.send_nowait)
    with receive:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                yield running
            except Exception as error:
                failure = error  # raised below, and not as a member of a group
            finally:
                scope.cancel()
    if failure is not None:
        raise failure
    outcome.raise_error()
