"""Positions of a change log in a query of Spark: where it starts, and where it and each micro-batch end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from subscriber.changelog.consumers import check_name, register
from subscriber.changelog.reader import ChangeLog, Reach
from subscriber.changelog.storage import Location
from subscriber.errors import ChangeLogError, StatementError
from subscriber.lsn import Lsn
from subscriber.spark.sources.options import position_option
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

WAIT = 1.0  # seconds that a micro-batch waits for new changes
POLL = 0.02  # seconds between two checks while it waits
HEARTBEAT = 60.0  # seconds after which a position without changes makes a batch


def start_option(source: str, options: Any) -> str:
    """Return the option `start`. Raises StatementError if it is no position."""
    position_option(source, options, "start", ("earliest", "latest"))
    text: str = options.get("start", "")
    return text


def start_position(log: ChangeLog, start: str) -> Lsn:
    """Return the position of the option `start`: earliest, which is the default, latest, or an LSN."""
    if start == "latest":
        return log.end()
    return log.start() if start in ("", "earliest") else Lsn.parse(start)


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


def consumer_option(options: Any) -> str | None:
    """Return the value of the option `consumer`. Raises StatementError if it is not a name."""
    return check_name(options["consumer"]) if options.get("consumer") else None


class StreamConsumer:
    """The consumer of a stream with the option `consumer`. Without a name it does nothing."""

    def __init__(self, name: str | None, source: str, directory: Location) -> None:
        self._name = name
        self._source = source
        self._directory = directory  # of the log

    def begin(self, log: ChangeLog, position: Lsn) -> None:
        """Have the log keep the changes after `position`, where a new query begins.

        Raises:
            ChangeLogError: the consumer cannot be registered, or the log does not have these changes.
        """
        if self._name is not None:
            self._register(self._name, position)
            log.check(position)

    def move(self, position: Lsn) -> None:
        """Record that Spark has committed the changes before `position`. An error only keeps more of the log."""
        if self._name is not None:
            with suppress(ChangeLogError):
                self._register(self._name, position)

    def _register(self, name: str, position: Lsn) -> None:
        register(self._directory, name, f"stream of {self._source}", position)


class LogTail:
    """Finds the end of each micro-batch of a stream."""

    def __init__(self) -> None:
        self._last: Lsn | None = None  # for availableNow: the end of the log when the query started
        self._moved = time.monotonic()

    def stop_at_end(self, log: ChangeLog) -> None:
        """Read no further than the present end of the log."""
        self._last = log.end()

    @property
    def has_end(self) -> bool:
        """Return True after stop_at_end()."""
        return self._last is not None

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
                reached = reach()
                if reached.changes or time.monotonic() - self._moved > HEARTBEAT:
                    self._moved = time.monotonic()
                    return reached.position
            time.sleep(POLL)
        return None
