"""Spark's daemon of Python workers, for executors on this machine: that of pyspark, which prints less here.

At the end of a session, the JVM closes the connections of its workers first, and then has them ended. In between, a
worker cannot write any more, and pyspark's daemon prints the traceback of that, or as much of it as there is time for.
So a command that has succeeded ends with "Traceback (most recent call last):", most often on a busy machine.

Errors of tasks are not concerned: workers send them to the JVM.
"""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace

from pyspark import daemon


def print_error() -> None:
    """Print the exception that is handled now, unless the JVM has closed the connection."""
    if not isinstance(sys.exception(), ConnectionError):
        traceback.print_exc()


if __name__ == "__main__":
    vars(daemon)["traceback"] = SimpleNamespace(print_exc=print_error, format_exc=traceback.format_exc)
    daemon.manager()
