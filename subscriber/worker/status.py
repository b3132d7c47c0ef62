"""Report and Board: the status of all workers of a launcher, written to table `worker` of the catalog once a second.

A row is written when it has changed, and at least every HEARTBEAT seconds. An older row belongs to a launcher that is
frozen or cannot write (status/problems.py). The rows are for users and views. Workers do not read them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Protocol

import anyio

from subscriber.apply.progress import Progress
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import stats
from subscriber.catalog.store.workers import StreamedStatus, WorkerState, WorkerStatus, remove_worker, report_worker
from subscriber.errors import ProtocolError, ServerError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import moment
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import CLASS_INSUFFICIENT_RESOURCES, FOREIGN_KEY_VIOLATION, READ_ONLY_SQL_TRANSACTION
from subscriber.worker.recovery import Recovery

# The target is read-only or full. The apply worker reports that; the board of statistics waits.
CANNOT_WRITE = (READ_ONLY_SQL_TRANSACTION, CLASS_INSUFFICIENT_RESOURCES)
TABLE_SYNC = "table synchronization"
HEARTBEAT = 5.0  # seconds between two writes of a row that has not changed
MAX_SAMPLES = 1000  # positions received and not durable, one a second


class LoopCounters(Protocol):
    """Counts of a worker since it has started.

    Attributes:
        transactions: transactions that have ended, including skipped ones.
        changes: changes of rows, including those of skipped transactions.
        bytes: received bytes.
        last_send_time: send time of the last message, in microseconds since 2000-01-01 UTC. 0: none has arrived.
    """

    @property
    def transactions(self) -> int: ...
    @property
    def changes(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def last_send_time(self) -> int: ...


class StreamedStatuses(Protocol):
    """The streamed transactions of a worker."""

    def status(self) -> tuple[StreamedStatus, ...]: ...


class Running(Protocol):
    """A loop that applies changes, as a report reads it. ApplyLoop of worker/apply/loop.py is one.

    Attributes:
        counters: counts since the start.
        progress: the positions that are received, applied and durable.
        streamed: the streamed transactions. None: streaming is off.
        one_by_one: the number of changes that were not applied in batches, by reason.
        needed: the position at which everything received so far is applied.
    """

    @property
    def counters(self) -> LoopCounters: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def streamed(self) -> StreamedStatuses | None: ...
    @property
    def one_by_one(self) -> Mapping[str, int]: ...
    @property
    def needed(self) -> Lsn: ...


class Report:
    """The row of one worker.

    Attributes:
        status: the contents of the row. Workers change it at any time, and the board writes it.
        recovery: the last error of the worker, which becomes part of the row.
        counts: increments of pg_stat_subscription_stats that have not been written.
    """

    def __init__(self, status: WorkerStatus, recovery: Recovery | None = None) -> None:
        self.status = status
        self.recovery = recovery or Recovery()
        self._copied_rows = self._copied_bytes = 0
        self.counts: Counter[str] = Counter()
        self._loop: Running | None = None
        self._samples: deque[tuple[Lsn, int]] = deque()  # (position, its send time), both ascending

    def counted(self, counts: Counter[str]) -> None:
        """The increments `counts` are written."""
        self.counts -= counts

    def enter(self, state: WorkerState, details: str = "") -> None:
        """The worker does something else now. `details` are shown behind the state."""
        # The time of the attempt that begins is shown until it succeeds.
        next_retry = self.status.next_retry if state is WorkerState.CONNECTING else None
        self.status = replace(self.status, state=f"{state}{details}", next_retry=next_retry)

    def wait(self, delay: float) -> None:
        """The worker waits for its next attempt, `delay` seconds."""
        self.enter(WorkerState.WAITING_TO_RETRY)
        self.status = replace(self.status, next_retry=datetime.now(UTC) + timedelta(seconds=delay))

    @contextmanager
    def back_afterwards(self) -> Iterator[None]:
        """After the block, the worker has the state from before."""
        before = self.status.state
        yield
        self.status = replace(self.status, state=before)

    def connected(self, pid: int | None) -> None:
        """The worker has this backend on the target. None: it has none any more."""
        self.status = replace(self.status, pid=pid)

    def led_by(self, pid: int | None) -> None:
        """The worker applies transactions of the apply worker with this backend on the target."""
        self.status = replace(self.status, leader_pid=pid)

    def limited(self, limits: tuple[str, ...]) -> None:
        """The target lacks these capabilities."""
        self.status = replace(self.status, limits=limits)

    def receives(self, format: str, reason: str | None) -> None:
        """The worker receives values in this format. `reason`: of text, if the option binary is not set."""
        self.status = replace(self.status, format=format, format_reason=reason)

    def waits_for(self, holder: str | None) -> None:
        """The backend waits for a lock or a session. None: it does not wait any more."""
        self.status = replace(self.status, waiting_for=holder)

    def copies(self, total_bytes: int) -> None:
        """A copy of that many bytes begins, or goes on."""
        self.status = replace(self.status, copy_total_bytes=total_bytes)

    def copied(self, rows: int, size: int) -> None:
        """The copy has received rows, or bytes of rows. The next update() shows them."""
        self._copied_rows += rows
        self._copied_bytes += size

    def compared(self, done: int, total: int) -> None:
        """The comparison has read `done` of `total` bytes."""
        self._copied_bytes = done
        self.status = replace(self.status, copy_bytes=done, copy_total_bytes=total)

    def follow(self, loop: Running) -> None:
        """Take the counters and positions from a running apply loop."""
        self._loop = loop

    def leave(self) -> None:
        """Read the last positions of the loop, which has ended, and detach it."""
        self.update()
        self._loop = None

    @property
    def position(self) -> int | None:
        """The position for Recovery.failed(), in the stream or in bytes of a copy. None: only the end of WAL counts."""
        if self._loop is None:
            return self._copied_bytes
        if self._loop.streamed is not None and self._loop.streamed.status():
            return None
        return self._loop.needed

    def update(self) -> None:
        """Update `status` from the loop and the last error."""
        if self._loop is not None:
            self._read(self._loop)
        elif self._copied_bytes:
            self.recovery.reached(self._copied_bytes)
        recovery = self.recovery
        self.status = replace(
            self.status,
            copy_rows=self._copied_rows,
            copy_bytes=self._copied_bytes,
            error=recovery.error,
            error_remedy=recovery.error_remedy,
            error_time=recovery.error_time,
            error_sqlstate=recovery.error_sqlstate,
            error_is_transient=recovery.error_is_transient,
        )

    def _read(self, loop: Running) -> None:
        counters, positions = loop.counters, loop.progress.positions
        self.status = replace(
            self.status,
            transactions=counters.transactions,
            changes=counters.changes,
            bytes=counters.bytes,
            one_by_one=dict(loop.one_by_one),
            received_lsn=positions.write,
            latest_end_lsn=positions.flush,
        )
        self.recovery.reached(positions.flush)
        if loop.streamed is not None:
            self.status = replace(self.status, streamed=loop.streamed.status())
        if counters.last_send_time:
            self._sample(loop.needed, counters.last_send_time)
            # An impossible time of the publisher's clock is not an error, because only users read it.
            with suppress(ProtocolError):
                self.status = replace(self.status, last_msg_send_time=moment(counters.last_send_time))
        while self._samples and self._samples[0][0] <= positions.flush:
            _, sent_at = self._samples.popleft()
            with suppress(ProtocolError):
                self.status = replace(self.status, latest_end_time=moment(sent_at))

    def _sample(self, position: Lsn, sent_at: int) -> None:
        """Store the send time of a new position. Positions that a new attempt receives again are not stored."""
        if (not self._samples or position > self._samples[-1][0]) and len(self._samples) < MAX_SAMPLES:
            self._samples.append((position, sent_at))


class Board:
    """The reports of all workers of one launcher."""

    def __init__(self, catalog: CatalogConnection, settings: Settings = DEFAULTS) -> None:
        self._catalog = catalog
        self._settings = settings
        self._reports: list[Report] = []
        self._ended: set[Report] = set()  # their rows are removed
        # A newer report has the row. It is not removed and written again, because views would not show its error in
        # between.
        self._replaced: set[Report] = set()
        self._written: dict[Report, tuple[WorkerStatus, float]] = {}  # the row, and its time by the monotonic clock
        self._wake = anyio.Event()

    def add(self, subid: int, relid: int, worker_type: str, recovery: Recovery | None = None) -> Report:
        """Add a report. It replaces an earlier report of the same worker.

        Args:
            subid: OID of the subscription.
            relid: the place of the worker (catalog/worker_sessions.py).
            worker_type: the type of the worker, as in pg_stat_subscription.
            recovery: the error of earlier attempts. None: there were none.
        """
        status = WorkerStatus(subid, relid, worker_type, WorkerState.STARTING)
        report = Report(status, recovery or Recovery(self._settings))
        for earlier in self._reports:
            if (earlier.status.subid, earlier.status.relid) == (subid, relid):
                self._replaced.add(earlier)
        self._reports.append(report)
        self.publish()
        return report

    def remove(self, report: Report) -> None:
        """Remove the row of a worker that has ended."""
        self._ended.add(report)
        self.publish()

    def has_ended(self, report: Report) -> bool:
        """Return True if the row of the worker is removed, or is to be."""
        return report in self._ended or report not in self._reports

    def table_syncs(self) -> list[int]:
        """Return the process IDs of the target's backends for table synchronization workers."""
        statuses = [report.status for report in self._reports if report not in self._ended]
        return [s.pid for s in statuses if s.worker_type == TABLE_SYNC and s.pid is not None]

    def publish(self) -> None:
        """Request a write before the next regular one."""
        self._wake.set()

    async def run(self) -> None:
        """Write changed rows every `report_interval` and after publish(), until canceled."""
        while True:
            with anyio.move_on_after(self._settings.report_interval):
                await self._wake.wait()
            self._wake = anyio.Event()
            await self.write()

    async def write(self) -> None:
        """Write changed rows, and remove the rows of workers that have ended."""
        for report in list(self._reports):
            # The worker may end while its row is being written. Then the next round removes the row.
            ended, replaced = report in self._ended, report in self._replaced
            report.update()
            try:
                await self._write_counts(report)
                if not replaced:
                    await self._write_row(report, ended=ended)
            except ServerError as error:
                if error.sqlstate.startswith(CANNOT_WRITE):
                    continue
                if error.sqlstate != FOREIGN_KEY_VIOLATION:
                    raise
                # The subscription is being dropped.
                ended = True
            if ended or replaced:
                self._reports.remove(report)
                self._ended.discard(report)
                self._replaced.discard(report)
                self._written.pop(report, None)

    async def _write_counts(self, report: Report) -> None:
        if report.counts:
            counts = Counter(report.counts)
            async with self._catalog.use() as connection:
                await stats.add_stats(connection, report.status.subid, counts)
            report.counted(counts)

    async def _write_row(self, report: Report, *, ended: bool) -> None:
        status = report.status
        if ended:
            async with self._catalog.use() as connection:
                await remove_worker(connection, status.subid, status.relid)
            return
        written, at = self._written.get(report, (None, 0.0))
        now = monotonic()
        if status != written or now - at >= HEARTBEAT:
            async with self._catalog.use() as connection:
                await report_worker(connection, status)
            self._written[report] = status, now
