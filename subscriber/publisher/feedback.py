"""Standby status updates, sent by a task of its own.

The publisher closes a connection that says nothing for wal_sender_timeout. So the updates must not wait
for the apply loop, which may be waiting itself: for a lock on the target, for a stuck server, for the
copy of a table. This task sends the current positions

- immediately when the publisher requests them, or when it may discard more WAL than before,
- PATIENCE after another position has changed, if a flush will follow: reporting each step of each transaction takes
  longer than applying a small one, and wakes the walsender each time,
- at each `status_interval`, or three times per wal_sender_timeout if that is shorter: while the queue is full, the
  connection is not read, and a request of the publisher would not be seen,
- with a request for a reply if the publisher did not request the update. The reply measures the lag: it contains the
  position up to which the publisher has sent everything, and the time. `receiver_timeout` without any received data
  ends the connection.

Source: send_feedback() and LogicalRepApplyLoop() in worker.c.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import anyio
import anyio.lowlevel

from subscriber.apply.progress import Positions
from subscriber.errors import ConnectionLost
from subscriber.failpoints import Point, reach
from subscriber.publisher.answers import count, parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import DEFAULTS, Settings

PATIENCE = 0.02  # seconds; PostgreSQL's own worker reports an applied position when its WAL is written, 0.2 s later

_SENDER_TIMEOUT = "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"  # milliseconds


async def read_sender_timeout(publisher: Publisher) -> float:
    """Return the publisher's wal_sender_timeout for this session in seconds; 0: the publisher has none."""
    rows = await publisher.session.rows(_SENDER_TIMEOUT)
    with parsing("wal_sender_timeout"):
        return count(rows[0][0]) / 1000


def limit_status_interval(settings: Settings, sender_timeout: float) -> Settings:
    """Return settings whose `status_interval` is at most a third of the publisher's wal_sender_timeout.

    Args:
        sender_timeout: in seconds; 0: the publisher has none.
    """
    if not sender_timeout:
        return settings
    return replace(settings, status_interval=min(settings.status_interval, sender_timeout / 3))


class Feedback:
    def __init__(
        self,
        stream: ReplicationStream,
        positions: Callable[[], Positions],
        *,
        reading: Callable[[], bool],
        patient: bool = False,
        settings: Settings = DEFAULTS,
        on_sent: Callable[[Positions], None] | None = None,
    ) -> None:
        """Create the task's state.

        Args:
            stream: the stream to which updates are sent.
            positions: returns the current positions.
            reading: returns False while a full queue stops the reader.
            patient: True if changes are flushed some time after they are applied, so that written and applied
                positions may wait PATIENCE for the flush.
            settings: intervals and time limits.
            on_sent: called with the positions of each update.
        """
        self._stream = stream
        self._positions = positions
        self._interval = settings.status_interval
        self._receiver_timeout = settings.receiver_timeout
        self._reading = reading
        self._patient = patient
        self._on_sent = on_sent
        self._timer: asyncio.TimerHandle | None = None  # runs while a changed position is not reported
        self._wake = anyio.Event()
        self._last_received = monotonic()
        self.sent: Positions | None = None

    def data_received(self) -> None:
        """Record that the publisher has sent data."""
        self._last_received = monotonic()

    def request_now(self) -> None:
        """Send an update now: the publisher asks for one, or the positions have moved."""
        self._wake.set()

    def positions_changed(self) -> None:
        """Send an update, now or soon, if the positions are not those of the last one."""
        positions = self._positions()
        if positions == self.sent:
            return
        if not self._patient or self.sent is None or positions.flush > self.sent.flush:
            self._wake.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._be_patient_no_more)

    def _be_patient_no_more(self) -> None:
        self._timer = None
        if self._positions() != self.sent:
            self._wake.set()

    async def run(self) -> None:
        try:
            while True:
                with anyio.move_on_after(self._interval) as unasked:
                    await self._wake.wait()
                self._wake = anyio.Event()
                self._check_silence()
                self._send(reply_requested=unasked.cancelled_caught and self._reading())
                # One update for all that moved in this turn of the event loop.
                await anyio.lowlevel.checkpoint()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _check_silence(self) -> None:
        """Raise ConnectionLost if the publisher has not sent anything for too long, though it was asked to."""
        if self._reading() and monotonic() - self._last_received > self._receiver_timeout:
            raise ConnectionLost("terminating logical replication worker due to timeout")

    def _send(self, *, reply_requested: bool) -> None:
        positions = self._positions()
        self._stream.send_status(positions.write, positions.flush, positions.apply, reply_requested=reply_requested)
        before, self.sent = self.sent, positions
        if self._on_sent is not None:
            self._on_sent(positions)
        if before is not None and positions.flush > before.flush:
            reach(Point.CONFIRMED)
