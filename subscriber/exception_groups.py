"""Find the root cause in an ExceptionGroup that a task group has raised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from subscriber.errors import ConnectionLost, SubscriberError


def iter_leaf_exceptions(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group and of nested groups. An error that is not a group is yielded itself."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from iter_leaf_exceptions(member)
    else:
        yield error


def is_cancelled() -> bool:
    """Return True if `asyncio.Task.cancel()` was called for this task, even if another error has been raised since."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def root_cause(error: BaseException) -> BaseException:
    """Return the error to report: first a bug, then a SubscriberError, and last a lost connection.

    When one task fails, other tasks often lose their connections as a consequence.
    """

    def rank(leaf: BaseException) -> int:
        if not isinstance(leaf, SubscriberError):
            return 0
        return 2 if isinstance(leaf, ConnectionLost) else 1

    return min(iter_leaf_exceptions(error), key=rank)
