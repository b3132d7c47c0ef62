"""Work that goes on when whoever waits for it is cancelled: he gets the result when he asks again.

What lies between two transactions, or between two pieces of one, is read in many steps, with waiting between them:
for frames, files, the publisher's catalog. A consumer may be cancelled in any of them, as by a timeout around the
next transaction, and go on afterwards. So these steps are no part of his task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

T = TypeVar("T")


class CancelSafeCall(Generic[T]):
    """One piece of work, in a task of its own."""

    def __init__(self, owner: object, call: Callable[[], Awaitable[T]]) -> None:
        self.owner = owner
        self._call = call
        self._done = anyio.Event()
        self._result: list[T] = []
        self._error: Exception | None = None

    async def run(self) -> None:
        try:
            self._result.append(await self._call())
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    async def result(self) -> list[T]:
        """Wait for it. Its one result, or none when it was cancelled itself; raises what it raised."""
        if not self._done.is_set():  # waiting for what is there could be cancelled, too
            await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CancelSafeCalls:
    """One at a time."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self.current: CancelSafeCall[object] | None = None  # one that nobody has taken the result of

    async def call(self, owner: object, call: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `call`, or of an earlier one of the same owner that he did not wait for.

        One that another owner did not wait for is waited for, and its result is dropped. None: all was cancelled.
        """
        while True:
            errand = self.current
            if errand is None:
                errand = self.current = CancelSafeCall[object](owner, call)
                self._tasks.start_soon(errand.run)
            try:
                found = await errand.result()
            except Exception:
                self.current = None
                raise
            self.current = None
            if not found:
                return None
            if errand.owner == owner:
                result: T = found[0]  # type: ignore[assignment]  # the owner is the same, and so is the call
                return result
