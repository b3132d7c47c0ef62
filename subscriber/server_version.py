"""The version of the target whose words the program uses.

PostgreSQL 19 prints positions and describes conflicts in other words than 18. A program that reads the server's log
expects those of its server.
"""

from __future__ import annotations

from contextvars import ContextVar

# A context variable, because one process can have targets of several versions. Tasks inherit it.
_MAJOR: ContextVar[int] = ContextVar("subscriber_target_major", default=18)


def speak_as(major: int) -> None:
    """Use the words of this major version in the present task, and in the tasks that it starts from now on."""
    _MAJOR.set(major)


def speaks_19() -> bool:
    """Return True if the words of PostgreSQL 19 are used."""
    return _MAJOR.get() >= 19
