"""The NOTICEs and WARNINGs that a publisher sends in a stream, in the log.

A publisher decides how many it sends. So a limited number is logged in a minute, and one line has the number of the
others. Their texts are shortened when they are received (protocol/reader.py).
"""

from __future__ import annotations

import asyncio

from subscriber import telemetry
from subscriber.formatting import count

MINUTE = 60.0  # seconds


class NoticeLog:
    """Logs the notices of one publisher. It is called with the fields of a notice, and outlives connections."""

    def __init__(self, per_minute: int, *, only_warnings: bool = False) -> None:
        """Create the log.

        Args:
            per_minute: the number of notices that are logged in a minute.
            only_warnings: other notices are ignored, and not counted.
        """
        self._per_minute = per_minute
        self._only_warnings = only_warnings
        self._received = 0  # in this minute
        self._minute: asyncio.TimerHandle | None = None

    def __call__(self, fields: dict[str, str]) -> None:
        """Log a notice, or count it."""
        is_warning = fields.get("V", fields.get("S", "NOTICE")) == "WARNING"
        if self._only_warnings and not is_warning:
            return
        if self._minute is None:
            self._minute = asyncio.get_running_loop().call_later(MINUTE, self.end_minute)
        self._received += 1
        if self._received > self._per_minute:
            return
        telemetry.log(
            telemetry.WARNING if is_warning else telemetry.LOG,
            fields.get("M", ""),
            detail=fields.get("D"),
            hint=fields.get("H"),
            event="publisher.notice",
        )

    def end_minute(self) -> None:
        """Log the number of notices that were not logged, and begin to count again."""
        suppressed = self._received - self._per_minute
        if self._minute is not None:
            self._minute.cancel()
        self._minute, self._received = None, 0
        if suppressed > 0:
            telemetry.log(
                telemetry.WARNING,
                f"{count(suppressed, 'message')} of the publisher in the last minute were not logged",
                hint=f"The setting notices_per_minute is {self._per_minute}.",
                event="publisher.notices_suppressed",
            )
