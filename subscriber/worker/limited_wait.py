"""LimitedWait: a wait of a copy for another session, with a log line and a limit."""

from __future__ import annotations

from time import monotonic

import anyio

from subscriber import telemetry
from subscriber.errors import SubscriberError

POLL = 0.02  # seconds
_LOG_DELAY = 10.0  # seconds after which a wait is logged
_WAIT_LIMIT = 600.0  # seconds after which a wait is an error


class LimitedWait:
    """One wait, which starts when the object is created."""

    def __init__(self, what: str) -> None:
        """Start to wait. `what` completes the sentence "waiting for …"."""
        self._what = what
        self._started = monotonic()
        self._logged = False

    async def poll(self, pause: float = POLL) -> None:
        """Sleep for `pause` seconds. Raises SubscriberError at the limit."""
        waited = monotonic() - self._started
        if waited > _WAIT_LIMIT:
            raise SubscriberError(
                f"the copy of a table has waited {_WAIT_LIMIT:g} s for {self._what}",
                hint="Find long transactions in pg_stat_activity of the publisher by xact_start.",
            )
        if waited > _LOG_DELAY and not self._logged:
            self._logged = True
            telemetry.log(telemetry.LOG, f"waiting for {self._what}", event="ranges.waiting")
        await anyio.sleep(pause)
