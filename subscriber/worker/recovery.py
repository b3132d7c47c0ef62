"""Recovery: keeps the last error of a worker, and the delay before its next attempt, until the worker is past it.

A restart alone does not show that the cause is gone. For example, a large transaction that cannot be committed streams
for a minute before it fails again. So a successful start neither clears the error nor resets the back-off. Both happen
when one of two positions is durable on the target:

- a position after everything that the worker had received at the failure, including the end of an open transaction;
- the end of the publisher's WAL at the next attempt.

The second position ends the error if the publisher has nothing new to send. Only this position counts if streamed
transactions were open at the failure, because their changes are sent again from before the failed position.
"""

from __future__ import annotations

from datetime import UTC, datetime

from subscriber.errors import SubscriberError
from subscriber.redaction import redact
from subscriber.remedy import Remedy
from subscriber.retry import Reaction, RetryDelay
from subscriber.settings import DEFAULTS, Settings


class Recovery:
    """The last error of one worker. It outlives the worker's attempts, its supervisor, and the launcher's sessions.

    Attributes:
        error: the message. None: there was no error, or the worker is past it.
        error_remedy: what to do about it. None: nothing is known.
        error_time: the time of the error. None: as `error`.
        error_sqlstate: its SQLSTATE. None: as `error`, or the error has none.
        error_is_transient: True if a retry alone can solve it. None: as `error`.
    """

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.error: str | None = None
        self.error_remedy: Remedy | None = None
        self.error_time: datetime | None = None
        self.error_sqlstate: str | None = None
        self.error_is_transient: bool | None = None
        self._backoff = RetryDelay(settings)
        self._max_silent_retries = settings.max_silent_retries
        self._failing = False  # an attempt has failed, logged or not, and the worker is not past that error
        self._silent = 0  # immediate restarts in a row that were not logged
        self._failed_at: int | None = 0  # position of the failure; None: only the end of the WAL counts
        self._wal_end: int | None = None  # end of the publisher's WAL at this attempt; None: not known yet

    @property
    def is_over(self) -> bool:
        """True if the worker is past all its errors."""
        return not self._failing

    def failed(self, error: BaseException, position: int | None, how: Reaction) -> Reaction:
        """Record the failure of an attempt, and keep its error if it is to be reported.

        Args:
            error: the error.
            position: the worker is past the error when a later position is durable. None: only the end of the WAL
                counts.
            how: the reaction to this kind of error.

        Returns:
            `how`, or BACKOFF if `max_silent_retries` restarts in a row have not helped.
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
        self.error_remedy = error.remedy if isinstance(error, SubscriberError) else None
        self.error_sqlstate = error.sqlstate if isinstance(error, SubscriberError) else None
        self.error_is_transient = how not in (Reaction.INTERVAL, Reaction.STOP)
        self.error_time = datetime.now(UTC)
        return how

    def resumed(self, wal_end: int) -> None:
        """Record the end of the publisher's WAL at the start of an attempt."""
        self._wal_end = wal_end

    def reached(self, position: int) -> None:
        """Clear the error if the worker is past it. Everything up to `position` is durable on the target."""
        if not self._failing:
            return
        beyond = self._failed_at is not None and position > self._failed_at
        if beyond or (self._wal_end is not None and position >= self._wal_end):
            self.clear()

    def clear(self) -> None:
        """Forget the error: an attempt has succeeded."""
        self.error = self.error_remedy = self.error_time = self.error_sqlstate = self.error_is_transient = None
        self._backoff.reset()
        self._failing, self._silent = False, 0

    def wait(self, how: Reaction) -> float:
        """Return the seconds until the next attempt.

        Raises:
            ValueError: the reaction is STOP.
        """
        return self._backoff.next(how)
