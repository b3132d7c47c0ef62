"""The initial copy that the launcher starts, as a separate process.

    python -m subscriber.spark.copy.launched_copy NAME

It does what `subscriber copy NAME` does, and is not that command: a worker may not depend on the commands. The
connection strings are in the environment, because everybody could read their passwords on the command line. Each error
is a line "ERROR:  message" on stderr, which the launcher reads. The process ends with its stdin, and so with the
launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial

import anyio

from subscriber.display import printable
from subscriber.errors import SubscriberError
from subscriber.redaction import redact

TARGET_VARIABLE = "SUBSCRIBER_TARGET_DSN"
APPLY_VARIABLE = "SUBSCRIBER_APPLY_DSN"
ERROR = "ERROR:"
FAILED = 3


def command(name: str) -> list[str]:
    """Return the command line that copies the tables of subscription `name`."""
    return [sys.executable, "-m", "subscriber.spark.copy.launched_copy", name]


def environment(target: str, apply_target: str) -> dict[str, str]:
    """Return this process's environment with the connection strings added."""
    return {**os.environ, TARGET_VARIABLE: target, APPLY_VARIABLE: apply_target}


def main() -> None:
    """Copy the tables. Exits 3 after an error of ours; any other error is a traceback."""
    # Imported here: the launcher, which imports this module, needs none of it.
    from subscriber.spark.copy.driver_process import end_with_parent
    from subscriber.spark.copy.job import copy_tables

    end_with_parent()
    copy = partial(copy_tables, os.environ[TARGET_VARIABLE], sys.argv[1], apply_target=os.environ[APPLY_VARIABLE])
    try:
        anyio.run(copy)
    except* SubscriberError as group:
        for error in _leaves(group):
            print(f"{ERROR}  {printable(redact(error.message))}", file=sys.stderr)
        sys.exit(FAILED)


def _leaves(group: ExceptionGroup[SubscriberError]) -> Iterator[SubscriberError]:
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    main()
