"""StoredHistory: the history of a target in `subscriber.history`, so that a new process has it.

The points of a minute are stored as one row. The process of the launcher that leads writes them; others only read them.
An error of the target does not keep the status from being read: it is logged once, and the minute is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from subscriber import telemetry
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import history as store
from subscriber.catalog.store.history import HistoryPoint
from subscriber.errors import SubscriberError
from subscriber.settings import DEFAULTS, Settings
from subscriber.status.history import POINTS, RESOLUTION, StatusHistory

STORED_RESOLUTION = timedelta(minutes=1)
FORGET_INTERVAL = timedelta(minutes=10)
SHOWN = POINTS * RESOLUTION  # the hour of the graphs


class StoredHistory:
    """Reads the last hour once, and writes each minute if `history_retention` is set."""

    def __init__(self, history: StatusHistory, settings: Settings = DEFAULTS) -> None:
        self._history = history
        self._retention = settings.history_retention
        self._rows = settings.history_rows
        self._is_loaded = False
        self._stored: datetime | None = None  # the end of the last stored minute
        self._forgotten: datetime | None = None
        self._said = ""

    async def read_once(self, catalog: CatalogConnection) -> None:
        """Read the last hour, at the first call that succeeds."""
        if self._is_loaded:
            return
        try:
            async with catalog.use() as connection:
                points = await store.load(connection, SHOWN.total_seconds())
        except SubscriberError as error:
            self._say(error)
            return
        self._is_loaded = True
        for subid, stored in points.items():
            self._history.restore(subid, stored)

    async def write(self, catalog: CatalogConnection, subids: Iterable[int], now: datetime) -> None:
        """Store the last minute, if it is over, and delete old rows.

        Args:
            catalog: a connection to the target.
            subids: the subscriptions.
            now: the target's time.
        """
        if not self._retention or (self._stored is not None and now - self._stored < STORED_RESOLUTION):
            return
        since = self._stored or now - STORED_RESOLUTION
        points = {subid: _summary(now, measured) for subid in subids if (measured := self._since(subid, since))}
        self._stored = now
        try:
            async with catalog.use() as connection:
                await store.add(connection, points)
                if self._forgotten is None or now - self._forgotten >= FORGET_INTERVAL:
                    await store.forget(connection, self._retention, self._rows)
                    self._forgotten = now
        except SubscriberError as error:
            self._say(error)

    def _since(self, subid: int, since: datetime) -> list[HistoryPoint]:
        return [point for point in self._history.points(subid) if point.at > since]

    def _say(self, error: SubscriberError) -> None:
        if error.message != self._said:
            self._said = error.message
            telemetry.log(
                telemetry.WARNING,
                "subscriber.history is not available",
                detail=error.message,
                event="console.history",
            )


def _summary(at: datetime, points: Sequence[HistoryPoint]) -> HistoryPoint:
    """Return the point of a minute. There is at least one measured point."""
    return HistoryPoint(
        at,
        _mean(point.transactions for point in points),
        _mean(point.changes for point in points),
        _mean(point.bytes for point in points),
        max((point.lag_bytes for point in points if point.lag_bytes is not None), default=None),
        max((point.lag_seconds for point in points if point.lag_seconds is not None), default=None),
        points[-1].retained_bytes,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
