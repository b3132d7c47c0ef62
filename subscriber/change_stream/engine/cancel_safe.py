"""Cancellation-safe calls: the work continues if the awaiting task is canceled, and the next call returns its result.

The stream reads the next transaction, or the next batch of one, in many steps. They wait for frames, files and the
publisher's catalog. A consumer can be canceled in any step, for example by a timeout around the next transaction, and
can call again. Therefore these steps run in a task of the stream, and not in the consumer's task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

T = TypeVar("T")


class CancelSafeCall(Generic[T]):
    """One call, which runs in its own task."""

    def __init__(self, owner: object, call: Callable[[], Awaitable[T]]) -> None:
        self.owner = owner
        self._call = call
        self._done = anyio.Event()
        self._result: list[T] = []
        self._error: Exception | None = None

    async def run(self) -> None:
        """Run the call and store its result or error."""
        try:
            self._result.append(await self._call())
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    async def result(self) -> list[T]:
        """Wait for the end of the call.

        Returns:
            A list with its result. The list is empty if the call itself was canceled.

        Raises:
            Exception: the error that the call has raised.

        Cancellation: safe; the call continues.
        """
        # Without this check, a cancellation could interrupt a wait for a result that exists.
        if not self._done.is_set():
            await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CancelSafeCalls:
    """The cancellation-safe calls of one stream. At most one runs at a time.

    Attributes:
        current: the call whose result has not been returned yet. None: there is none.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self.current: CancelSafeCall[object] | None = None

    async def call(self, owner: object, call: Callable[[], Awaitable[T]]) -> T | None:
        """Run `call`, or continue to wait for an earlier call of the same owner.

        An unfinished call of another owner runs first, and its result is discarded.

        Args:
            owner: identifies calls that return the same result. Compared with ==.
            call: runs in a task of the stream.

        Returns:
            The result. None if the task of the call was canceled.

        Raises:
            Exception: the error of `call`, or of the unfinished call.

        Cancellation: safe; the next call with the same owner returns the result.
        """
        while True:
            errand = self.current
            if errand is None:
                errand = self.current = CancelSafeCall[object](owner, call)
                self._tasks.start_soon(errand.run)
            try:
                outcome = await errand.result()
            except Exception:
                self.current = None
                raise
            self.current = None
            if not outcome:
                return None
            if errand.owner == owner:
                result: T = outcome[0]  # type: ignore[assignment]  # the owner is the same, and so is the call
                return result
