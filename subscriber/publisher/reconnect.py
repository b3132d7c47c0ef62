"""The delay before the next attempt to connect: exponential back-off with jitter."""

from __future__ import annotations

import random

from subscriber.settings import DEFAULTS, Settings

_MAX_DOUBLINGS = 10  # keeps the power small; the limit is Settings.retry_interval


class Backoff:
    """Delays that double from `Settings.first_retry_delay` to `Settings.retry_interval`."""

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._limit = settings.retry_interval
        self._first = settings.first_retry_delay
        self._failures = 0

    def reset(self) -> None:
        """Start again with the first delay, after a successful attempt."""
        self._failures = 0

    def next(self) -> float:
        """Return the delay in seconds after one more failed attempt.

        The delay is shortened by up to a half at random, so that many workers do not connect at the same time.
        """
        delay = min(self._limit, self._first * 2.0 ** min(self._failures, _MAX_DOUBLINGS))
        self._failures += 1
        return delay * random.uniform(0.5, 1.0)
