"""The last error of a worker, and the wait before its next attempt, until the worker is past the error.

A worker that starts again has not solved anything yet: a large transaction that cannot be committed streams for a
minute before it fails again. So a good start neither clears the error nor shortens the next wait. Both happen when one
of two positions is durable on the target:

    behind everything that the worker had received when it failed, with the end of a transaction that was open
    at the end of the publisher's WAL, as the next attempt found it

The second ends the error of a publisher that has nothing new to send. It alone ends the error of a worker with streamed
transactions that had not ended: their changes come again, below the position of the failure.
"""

from __future__ import annotations

from datetime import UTC, datetime

from subscriber.errors import SubscriberError
from subscriber.redaction import redact
from subscriber.settings import DEFAULTS, Settings
from subscriber.worker.retry import Reaction, RetryDelay


class Recovery:
    """Belongs to a worker's task, not to one attempt of it: it outlives sessions, supervisors and lost targets.

    `error`, `error_hint` and `error_time` are None when there is no error, or the worker is past it.
    """

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.error: str | None = None
        self.error_hint: str | None = None
        self.error_time: datetime | None = None
        self._backoff = RetryDelay(settings)
        self._max_silent_retries = settings.max_silent_retries
        self._failing = False  # an attempt has failed, with or without a word, and the worker is not past that
        self._silent = 0
        self._failed_at: int | None = 0  # None: only the end of the WAL counts
        self._wal_end: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the worker is past all that has failed."""
        return not self._failing

    def failed(self, error: BaseException, position: int | None, how: Reaction) -> Reaction:
        """Keep an error that is to be reported.

        Args:
            position: the worker is past the error when more than that is durable. None: that cannot be said.
            how: the reaction to this kind of error.

        Returns:
            `how`; BACKOFF where a restart without a word has not helped too often.
        """
        if not self._failing:
            self._failed_at = 0
        self._failing = True
        self._wal_end = None
        if position is None or self._failed_at is None:
            self._failed_at = None
        else:
            self._failed_at = max(self._failed_at, position)
        if how in (Reaction.IMMEDIATE, Reaction.SHORT_DELAY):
            self._silent += 1
            if self._silent <= self._max_silent_retries:
                return how
            how = Reaction.BACKOFF
        self.error = error.message if isinstance(error, SubscriberError) else redact(repr(error))
        self.error_hint = error.hint if isinstance(error, SubscriberError) else None
        self.error_time = datetime.now(UTC)
        return how

    def resumed(self, wal_end: int) -> None:
        """Note where the publisher's WAL ends, at an attempt after an error."""
        self._wal_end = wal_end

    def reached(self, position: int) -> None:
        """Forget the error if the worker is past it, now that everything up to `position` is durable."""
        if not self._failing:
            return
        beyond = self._failed_at is not None and position > self._failed_at
        if beyond or (self._wal_end is not None and position >= self._wal_end):
            self.error = self.error_hint = self.error_time = None
            self._backoff.reset()
            self._failing, self._silent = False, 0

    def wait(self, how: Reaction) -> float:
        """Seconds until the next attempt. Raises ValueError for STOP, which has none."""
        return self._backoff.next(how)
