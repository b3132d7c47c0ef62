"""The garbage collector finds connections that a test has left open, in whichever test runs then.

The warning, which fails that test, shows where the connection was opened.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import asyncpg

FRAMES = 24  # the innermost

_init = asyncpg.Connection.__init__


def _init_and_remember(self: Any, *arguments: Any) -> None:
    _init(self, *arguments)
    if self._source_traceback is None:
        stack = traceback.walk_stack(sys._getframe(1))
        self._source_traceback = traceback.StackSummary.extract(stack, limit=FRAMES, lookup_lines=False)


asyncpg.Connection.__init__ = _init_and_remember  # type: ignore[method-assign, assignment]
