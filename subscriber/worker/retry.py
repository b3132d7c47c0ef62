"""After an error: try again at once, try again later, or stop.

    class        which errors                                        reaction
    at once      StaleMapping: the target's table has a new shape;   again, without a word
                 LateConflict: a row came up that a policy decides
    in a moment  StaleCatalog: the launcher is about to stop us;     again, without a word
                 TextNeeded: the stream has to be in text
    transient    connections, refused ones too, shutdowns, slot      backoff with jitter, unlimited
                 active, deadlocks, no room, a read-only target
    data         everything else: the change itself, or what it      each retry_interval, as PostgreSQL does:
                 needs on the target                                 somebody may have repaired it
    permanent    PublisherError: slot lost, publisher replaced,      stop; a statement on the subscription or a
                 target behind; HooksMissing; ChangeLogDamaged       restart of the launcher starts it again

The SQLSTATE decides, never a text. PostgreSQL itself retries everything every 5 seconds for ever.
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
    IMMEDIATE = "at once"
    SHORT_DELAY = "in a moment"
    BACKOFF = "backoff"
    INTERVAL = "interval"
    STOP = "stop"


def reaction(error: BaseException) -> Reaction:
    match error:
        case StaleMapping() | LateConflict():
            return Reaction.IMMEDIATE
        case StaleCatalog() | TextNeeded():
            return Reaction.SHORT_DELAY
        case PublisherError() | HooksMissing() | ChangeLogDamaged():
            return Reaction.STOP
        case ConnectionLost() | OSError() | TimeoutError():
            return Reaction.BACKOFF
        case ServerError() if error.sqlstate.startswith(TRANSIENT):
            return Reaction.BACKOFF
        case _:
            return Reaction.INTERVAL


class RetryDelay:
    """The delay before the next attempt, by the reaction to the error; reset() after a good start."""

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._interval = settings.retry_interval
        self._short = settings.first_retry_delay
        self._backoff = Backoff(settings)

    def reset(self) -> None:
        """Start the back-off again with its first delay."""
        self._backoff.reset()

    def next(self, how: Reaction) -> float:
        """Return the delay in seconds; 0 for IMMEDIATE.

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
