"""Positions of a change log in a query of Spark: where it starts, and where it and each micro-batch end."""

from __future__ import annotations

import time
from collections.abc import Callable

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from subscriber.changelog.reader import ChangeLog, Reach
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.sources.options import parse_position
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

WAIT = 1.0  # seconds that a micro-batch waits for new changes
POLL = 0.02  # seconds between two checks while it waits
HEARTBEAT = 60.0  # seconds after which a position without changes makes a batch


def start_position(log: ChangeLog, start: str) -> Lsn:
    """Return the position of the option `start`: earliest, which is the default, latest, or an LSN."""
    if start == "latest":
        return log.end()
    return log.start() if start in ("", "earliest") else parse_position(start)


def end_position(log: ChangeLog, end: Lsn | None) -> Lsn:
    """Return the position at which a batch query ends.

    Args:
        log: the change log.
        end: the position that the query asks for. None: the end of the log.

    Raises:
        StatementError: the log ends before.
    """
    last = log.end()
    if end is not None and end > last:
        raise StatementError(
            f"the change log ends at {last}",
            detail=f"Changes up to {end} were requested.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    return last if end is None else end


def read_limit(changes: int | None, size: int | None) -> ReadLimit:
    """Return the limit of a micro-batch, in changes or in bytes. None: no limit."""
    if changes is not None:
        return ReadMaxRows(changes)
    return ReadAllAvailable() if size is None else ReadMaxBytes(size)


def changes_and_size(limit: ReadLimit) -> tuple[int | None, int | None]:
    """Return the number of changes and the bytes of a limit. None: it does not limit them."""
    return (
        limit.max_rows if isinstance(limit, ReadMaxRows) else None,
        limit.max_bytes if isinstance(limit, ReadMaxBytes) else None,
    )


class LogTail:
    """Finds the end of each micro-batch of a stream."""

    def __init__(self) -> None:
        self._last: Lsn | None = None  # for availableNow: the end of the log when the query started
        self._moved = time.monotonic()

    def stop_at_end(self, log: ChangeLog) -> None:
        """Read no further than the present end of the log."""
        self._last = log.end()

    def next_end(self, log: ChangeLog, begin: Lsn, reach: Callable[[], Reach]) -> Lsn | None:
        """Return the end of the next micro-batch, after a short wait if there are no changes.

        Args:
            log: the change log.
            begin: the beginning of the micro-batch.
            reach: returns the end that the limit permits.

        Returns:
            The end. None: there is nothing to read.
        """
        if self._last is not None:
            return max(begin, min(reach().position, self._last))
        until, seen = time.monotonic() + WAIT, begin
        while time.monotonic() < until:
            if (end := log.end()) > seen:
                seen = end
                found = reach()
                if found.changes or time.monotonic() - self._moved > HEARTBEAT:
                    self._moved = time.monotonic()
                    return found.position
            time.sleep(POLL)
        return None
