"""Choose how a worker reacts to an error: retry immediately, retry later, or stop.

    reaction     errors                                              next attempt
    IMMEDIATE    StaleMapping: the target's table was altered;       immediately, not logged
                 LateConflict: a policy can decide the conflict
    SHORT_DELAY  StaleCatalog: subscription or table was altered;    after first_retry_delay, not logged
                 TextNeeded: the stream has to be in text
    BACKOFF      transient: connection lost or refused, shutdown,    with exponential back-off and jitter,
                 slot active, deadlock, disk full, target read-only  without limit
    INTERVAL     all others: the change, or the target's table,      after each retry_interval, as in PostgreSQL,
                 causes the error                                    because it may have been repaired
    STOP         permanent: PublisherError (slot lost, publisher     after a statement on the subscription, or a
                 replaced, target behind), HooksMissing,             restart of the launcher
                 ChangeLogDamaged, TransactionTooLarge

The class of the error or its SQLSTATE decides, not its message. PostgreSQL retries after any error and without limit,
each wal_retrieve_retry_interval (5 seconds).
"""

from __future__ import annotations

from enum import Enum

from subscriber.errors import (
    ChangeLogDamaged,
    ConnectionLost,
    HooksMissing,
    LateConflict,
    PublisherError,
    ServerError,
    StaleCatalog,
    StaleMapping,
    TextNeeded,
    TransactionTooLarge,
)
from subscriber.publisher.reconnect import Backoff
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import (
    CLASS_CONNECTION_EXCEPTION,
    CLASS_INSUFFICIENT_RESOURCES,
    CLASS_SERVER_SHUTDOWN,
    DEADLOCK_DETECTED,
    LOCK_NOT_AVAILABLE,
    OBJECT_IN_USE,
    PROGRESS_OUT_OF_STEP,
    READ_ONLY_SQL_TRANSACTION,
    SERIALIZATION_FAILURE,
)

TRANSIENT = (
    CLASS_CONNECTION_EXCEPTION,
    CLASS_SERVER_SHUTDOWN,
    CLASS_INSUFFICIENT_RESOURCES,
    READ_ONLY_SQL_TRANSACTION,
    OBJECT_IN_USE,
    SERIALIZATION_FAILURE,
    DEADLOCK_DETECTED,
    LOCK_NOT_AVAILABLE,
    PROGRESS_OUT_OF_STEP,
)


class Reaction(Enum):
    """The reaction to an error. The header of this file describes the members."""

    IMMEDIATE = "at once"
    SHORT_DELAY = "in a moment"
    BACKOFF = "backoff"
    INTERVAL = "interval"
    STOP = "stop"


def reaction(error: BaseException) -> Reaction:
    """Return the reaction to an error of a worker."""
    match error:
        case StaleMapping() | LateConflict():
            return Reaction.IMMEDIATE
        case StaleCatalog() | TextNeeded():
            return Reaction.SHORT_DELAY
        case PublisherError() | HooksMissing() | ChangeLogDamaged() | TransactionTooLarge():
            return Reaction.STOP
        case ConnectionLost() | OSError() | TimeoutError():
            return Reaction.BACKOFF
        case ServerError() if error.sqlstate.startswith(TRANSIENT):
            return Reaction.BACKOFF
        case _:
            return Reaction.INTERVAL


class RetryDelay:
    """Computes the delay before the next attempt. Call reset() after an attempt that has succeeded."""

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._interval = settings.retry_interval
        self._short = settings.first_retry_delay
        self._backoff = Backoff(settings)

    def reset(self) -> None:
        """Make the next delay of the back-off its first one."""
        self._backoff.reset()

    def next(self, how: Reaction) -> float:
        """Return the delay in seconds. 0: IMMEDIATE.

        Raises:
            ValueError: the reaction is STOP.
        """
        match how:
            case Reaction.STOP:
                raise ValueError("a permanent error has no next attempt")
            case Reaction.IMMEDIATE:
                return 0.0
            case Reaction.SHORT_DELAY:
                return self._short
            case Reaction.INTERVAL:
                return self._interval
            case Reaction.BACKOFF:
                return self._backoff.next()
