"""What workers tell about themselves, written to the catalog once a second.

Rows are written only when something in them has changed. They are for people and for the views; no
worker ever reads them to decide anything.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import anyio

from subscriber.catalog import stats, store
from subscriber.catalog.session import Catalog
from subscriber.catalog.store import WorkerStatus
from subscriber.errors import ProtocolError, ServerError
from subscriber.protocol.messages import moment
from subscriber.worker.apply_loop import ApplyLoop

FOREIGN_KEY_VIOLATION = "23503"
CANNOT_WRITE = ("25006", "53")  # read-only, or full: who applies changes says so, and the board waits
INTERVAL = 1.0  # seconds between two writes


class Report:
    """One worker's row. `status` may be changed at any time; the board writes it when it has changed."""

    def __init__(self, status: WorkerStatus) -> None:
        self.status = status
        self.written: WorkerStatus | None = None
        self.ended = False
        self.counts: Counter[str] = Counter()  # of pg_stat_subscription_stats, not yet written
        self._loop: ApplyLoop | None = None

    def follow(self, loop: ApplyLoop) -> None:
        """Take the counters and positions from a running apply loop."""
        self._loop = loop

    def update(self) -> None:
        """Bring `status` up to date."""
        loop, status = self._loop, self.status
        if loop is None:
            return
        counters = loop.counters
        status.transactions, status.changes, status.bytes = counters.transactions, counters.changes, counters.bytes
        status.one_by_one = dict(loop.one_by_one)
        status.received_lsn = loop.progress.positions.write
        status.latest_end_lsn = loop.progress.positions.flush
        if loop.streamed is not None:
            status.streamed = loop.streamed.status()
        if counters.last_send_time:
            with suppress(ProtocolError):  # the publisher's clock, which is for people only
                status.last_msg_send_time = moment(counters.last_send_time)


class Board:
    """All reports of one launcher."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._reports: list[Report] = []
        self._wake = anyio.Event()

    def add(self, subid: int, relid: int, worker_type: str) -> Report:
        report = Report(WorkerStatus(subid, relid, worker_type, "starting"))
        self._reports = [r for r in self._reports if (r.status.subid, r.status.relid) != (subid, relid)]
        self._reports.append(report)
        self.publish()
        return report

    def remove(self, report: Report) -> None:
        report.ended = True
        self.publish()

    def publish(self) -> None:
        """Write at once instead of at the next tick."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            with anyio.move_on_after(INTERVAL):
                await self._wake.wait()
            self._wake = anyio.Event()
            await self._write()

    async def _write(self) -> None:
        for report in list(self._reports):
            report.update()
            try:
                await self._write_one(report)
            except ServerError as error:
                if error.sqlstate.startswith(CANNOT_WRITE):
                    continue
                if error.sqlstate != FOREIGN_KEY_VIOLATION:
                    raise
                report.ended = True  # the subscription is being dropped at this moment
            if report.ended:
                self._reports.remove(report)

    async def _write_one(self, report: Report) -> None:
        status = report.status
        if report.counts:
            counts = Counter(report.counts)
            async with self._catalog.use() as connection:
                await stats.add_stats(connection, status.subid, counts)
            report.counts -= counts
        if report.ended:
            async with self._catalog.use() as connection:
                await store.remove_worker(connection, status.subid, status.relid)
        elif status != report.written:
            async with self._catalog.use() as connection:
                await store.report_worker(connection, status)
            report.written = replace(status)
