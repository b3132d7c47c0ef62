"""Several tasks of a group fail together; one of them knows why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from subscriber.errors import ConnectionLost, SubscriberError


def iter_leaf_exceptions(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group and of groups inside it; an error that is no group is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from iter_leaf_exceptions(member)
    else:
        yield error


def is_cancelled() -> bool:
    """Whether this task was cancelled by asyncio's own means, whatever has been raised since."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def root_cause(error: BaseException) -> BaseException:
    """The error to act on and to report: a bug before ours, a refusal before a lost connection."""

    def rank(leaf: BaseException) -> int:
        if not isinstance(leaf, SubscriberError):
            return 0
        return 2 if isinstance(leaf, ConnectionLost) else 1

    return min(iter_leaf_exceptions(error), key=rank)
