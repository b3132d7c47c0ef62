"""The garbage collector finds connections that a test has left open, in whichever test runs then.

The warning, which fails that test, shows where the connection was opened.
"""

from __future__ import annotations

import sys
from itertools import islice
from traceback import format_list, walk_stack
from types import FrameType
from typing import Any

import asyncpg

FRAMES = 24  # the innermost


class Origin:
    """Where a connection was opened. Thousands are opened, and a stack of `traceback` takes 0.2 ms for each."""

    def __init__(self, frame: FrameType) -> None:
        stack = islice(walk_stack(frame), FRAMES)
        self._stack = [(each.f_code.co_filename, line, each.f_code.co_name, None) for each, line in stack]

    def __str__(self) -> str:
        return "".join(format_list(self._stack))


_init = asyncpg.Connection.__init__


def _init_and_remember(self: Any, *arguments: Any) -> None:
    _init(self, *arguments)
    if self._source_traceback is None:
        self._source_traceback = Origin(sys._getframe(1))


asyncpg.Connection.__init__ = _init_and_remember  # type: ignore[method-assign, assignment]
