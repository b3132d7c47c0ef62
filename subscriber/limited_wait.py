"""LimitedWait: a wait for another session or server, with a limit and a log line."""

from __future__ import annotations

from time import monotonic

import anyio

from subscriber import telemetry
from subscriber.errors import SubscriberError

POLL = 0.02  # seconds between two checks of the condition
LIMIT = 600.0  # seconds
_LOG_DELAY = 10.0  # seconds after which a wait is logged


class LimitedWait:
    """One wait, which starts when the object is created. Its owner checks the condition, and pauses in between."""

    def __init__(self, what: str, limit: float = LIMIT) -> None:
        """Start to wait. `what` completes the sentence "waiting for …"; `limit` is in seconds."""
        self._what = what
        self._limit = limit
        self._started = monotonic()
        self._logged = False

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return monotonic() - self._started

    @property
    def is_over(self) -> bool:
        """True at the limit."""
        return self.seconds >= self._limit

    async def pause(self, seconds: float = POLL) -> None:
        """Sleep until the next check. The owner has raised an error of its own if the wait is over."""
        if self.seconds > _LOG_DELAY and not self._logged:
            self._logged = True
            telemetry.log(telemetry.LOG, f"waiting for {self._what}", event="wait.long")
        await anyio.sleep(seconds)

    async def poll(self, seconds: float = POLL) -> None:
        """Sleep until the next check. Raises SubscriberError if the wait is over."""
        if self.is_over:
            raise SubscriberError(
                f"waited {self._limit:g} s for {self._what}",
                hint="Find long transactions in pg_stat_activity by xact_start.",
            )
        await self.pause(seconds)
