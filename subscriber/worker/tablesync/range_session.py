"""RangeSession: copies single ranges of a table, with one session on each server.

Several sessions of a table copy different ranges at a time (range_copy.py). They share a DividedTable.

Invariants.

- A range has one session at most: a session chooses its range, and the end of it, while no other one chooses.
- A range is being read before its transaction on the target begins. So a TRUNCATE that the apply worker executes
  does not wait for a copy that waits for the apply worker.
- One session at a time writes to the progress record, from the record of its range to the COMMIT. The server would
  refuse the second one of two transactions that write there at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic

import anyio

from subscriber import telemetry
from subscriber.apply.batch.binary_types import same_in_binary
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.progress import ProgressClaim
from subscriber.apply.relation_map import map_relation
from subscriber.catalog.store.workers import WorkerState
from subscriber.connection.session import joined_chunks
from subscriber.errors import ServerError, StaleCatalog
from subscriber.failpoints import Point, reached
from subscriber.limited_wait import POLL, LimitedWait
from subscriber.lsn import Lsn
from subscriber.names import table_sync_origin
from subscriber.publisher import ranges as queries
from subscriber.publisher.connection import Publisher
from subscriber.publisher.tables import PublishedTable, as_relation, copies_binary, copy_statement
from subscriber.ranges.table_ranges import KeyRange, RangeSnapshot, RangeState, TableRanges
from subscriber.subscription import Subscription
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.session.error_context import row_security
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.sql.row_statements import copy_from
from subscriber.worker.apply.range_changes import stored_range
from subscriber.worker.conflict_log import log_conflict
from subscriber.worker.context import LauncherContext
from subscriber.worker.status import Report
from subscriber.worker.table_states import TableStates
from subscriber.worker.tablesync.copied_rows import CopyReader

_MIN_ROWS, _MAX_ROWS = 1_000, 2_000_000


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that a synchronization worker copies.

    Attributes:
        subscription: the subscription.
        relid: OID of the table on the target.
        schema: its schema on the target.
        name: its name on the target.
        context: the launcher's context.
        tables: the states of the subscription's tables, shared with the apply worker.
        report: the status of the synchronization worker.
    """

    subscription: Subscription
    relid: int
    schema: str
    name: str
    context: LauncherContext
    tables: TableStates
    report: Report

    @property
    def label(self) -> str:
        """The name of the table on the target, for messages."""
        return f"{self.schema}.{self.name}"

    @property
    def published_name(self) -> tuple[str, str]:
        """Schema and name of the published table."""
        return self.tables.sources.get(self.relid, (self.schema, self.name))

    def report_conflict(self, found: Conflict, note: StatementContext) -> None:
        """Count and log a conflict of the worker."""
        self.report.counts[f"confl_{found.type}"] += 1
        log_conflict(table_sync_origin(self.subscription.oid, self.relid), found, note)


@dataclass(slots=True)
class DividedTable:
    """A table that is being copied by ranges: what all of its sessions share.

    Attributes:
        table: the table.
        published: the table of the publisher.
        ranges: the ranges. They are replaced if the copy starts again.
        claimed: the progress record of the copy.
        rows: the number of rows of the next range.
        choosing: held while a session chooses a range.
        recording: held while a session writes to the progress record.
    """

    table: CopiedTable
    published: PublishedTable
    ranges: TableRanges
    claimed: ProgressClaim
    rows: int
    choosing: anyio.Lock = field(default_factory=anyio.Lock)
    recording: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def is_current(self) -> bool:
        """True if the ranges are those that the apply worker decides changes by."""
        return self.table.tables.ranges(self.table.relid) is self.ranges

    @property
    def is_indexed(self) -> bool:
        """True while a worker builds indexes of the table."""
        return self.table.relid in self.table.tables.indexing

    @property
    def can_read(self) -> bool:
        """True if a range may be read now."""
        return not self.ranges.unsettled and not self.is_indexed

    def check_current(self) -> None:
        """Raise StaleCatalog if the ranges have been replaced."""
        if not self.is_current:
            raise StaleCatalog("the ranges of the table were loaded again")

    async def wait_for_apply_worker(self) -> None:
        """Wait until the apply worker has applied all transactions that it has received.

        Raises:
            StaleCatalog: the ranges have been replaced.
        """
        ranges = self.ranges
        ranges.awaited = True
        self.table.tables.notify()
        await self.table.tables.wait_until(lambda: not ranges.awaited or not self.is_current)
        self.check_current()
        await anyio.sleep(POLL)


class RangeSession:
    """Copies ranges of one table with its own sessions on both servers."""

    def __init__(self, divided: DividedTable, publisher: Publisher, target: TargetSession) -> None:
        """Create the session. The target's session has its place, and an origin."""
        self._divided = divided
        self._publisher = publisher
        self._target = target
        self._filenode: str | None = None  # of the published table, at the last range

    async def copy_next(self) -> None:
        """Copy the next range that is not read, if there is one.

        Raises:
            StaleCatalog: the ranges have been replaced, or the range has to be read again.
            SubscriberError: a server refuses a statement, or cannot be reached.

        Cancellation: the range rolls back. Both sessions must be closed.
        """
        divided, started = self._divided, monotonic()
        rows = divided.rows
        part = await self._choose(rows)
        if part is None:
            return
        try:
            read_in = await self._begin(part)
            if read_in is None:
                return
            read_at = await self._publisher.now()
            await self._copy_rows(part, read_at)
        except BaseException:
            # The result of a COMMIT is unknown. The next run reads it from the catalog.
            if part.state is RangeState.READING:
                part.reset()
            raise
        finally:
            part.release()
            divided.table.tables.notify()
        settings, seconds = divided.table.context.settings, monotonic() - started
        telemetry.log(
            telemetry.DEBUG,
            f'a range of table "{divided.table.label}" is copied in {seconds:.3f} s',
            event="ranges.copied",
            relation=divided.table.label,
        )
        factor = settings.range_duration / max(seconds, 0.001)
        least = min(_MIN_ROWS, settings.range_rows)
        divided.rows = int(min(max(rows * min(max(factor, 0.5), 2.0), least), _MAX_ROWS))

    async def _choose(self, rows: int) -> KeyRange | None:
        """Take the next range, or its first `rows` rows. None: all are copied, or others copy them."""
        divided = self._divided
        async with divided.choosing:
            divided.check_current()
            part = divided.ranges.next_unread()
            if part is None:
                return None
            if not part.single:
                condition = part.condition(divided.ranges.key)
                at = await queries.boundary(self._publisher, divided.published, divided.ranges.key, condition, rows)
                if at is not None:
                    divided.ranges.split(part, at)
            part.take()
            return part

    async def _begin(self, part: KeyRange) -> RangeSnapshot | None:
        """Take a snapshot that sees all transactions whose changes of the range were skipped.

        Returns:
            None if the apply worker has to apply transactions first, or builds an index.
        """
        divided = self._divided
        wait = LimitedWait(f'skipped transactions of table "{divided.table.label}" in snapshots of the publisher')
        while True:
            read_in = await queries.begin(self._publisher, divided.published)
            divided.check_current()
            if await self._is_truncated(read_in):
                continue
            if divided.can_read and part.begin(read_in):
                await reached(Point.SNAPSHOT_TAKEN)
                divided.ranges.forget_seen(read_in.snapshot)
                return read_in
            await self._publisher.commit()
            if not divided.can_read:
                return None
            await wait.poll()

    async def _is_truncated(self, read_in: RangeSnapshot) -> bool:
        """Return True after a TRUNCATE since the last range, when the apply worker has executed it.

        If only the publisher can compare keys, the target cannot delete the rows of single ranges. So no range is read
        that contains a TRUNCATE which others do not contain. A new run of the copy does not know the last file.
        """
        divided = self._divided
        if not divided.ranges.key.is_compared_by_publisher:
            return False
        before, self._filenode = self._filenode, await queries.filenode(self._publisher, divided.published)
        if before == self._filenode or not any(
            table_range.state is RangeState.COPIED for table_range in divided.ranges
        ):
            return False
        await self._publisher.commit()
        while divided.ranges.settled < read_in.lsn:
            divided.table.report.enter(WorkerState.WAITING_FOR_APPLY_WORKER)
            await divided.wait_for_apply_worker()
        divided.table.report.enter(WorkerState.COPYING)
        return True

    async def _copy_rows(self, part: KeyRange, read_at: datetime) -> None:
        """Copy the rows of a range that is being read, and commit them with its record."""
        divided, target = self._divided, self._target
        local = await copy_transaction.begin(target, divided.table.schema, divided.table.name)
        divided.table.tables.find(local)  # raises an error if another table has the name
        mapping = map_relation(as_relation(divided.published), local, target.pipeline.codec)
        session = target.pipeline.session
        binary = copies_binary(divided.table.subscription.binary or False, self._publisher.server_version)
        binary = binary or same_in_binary(mapping)
        condition = part.condition(divided.ranges.key)
        await copy_transaction.copy_as(target, mapping)
        # The row of a single key may be there: its last changes were skipped.
        if part.single:
            there = part.condition(divided.ranges.key, on_target=True)
            await session.query(f"DELETE FROM {local.only} WHERE {there}")
        copy_into = copy_from(local.schema, local.name, [column.name for column in mapping.attributes], binary)
        copy_out = copy_statement(divided.published, binary=binary, condition=condition)
        copied = CopyReader(divided.table.report, divided.table.context.copy_rate)
        payloads = copied.read(self._publisher.session, copy_out, divided.published, divided.table.subscription)
        try:
            copied.finish(await session.copy_in(copy_into, joined_chunks(payloads)))
        except ServerError as error:
            raise row_security(error, mapping, target.roles) from error
        await self._publisher.commit()
        assert part.read_in is not None
        await self._wait_for_flush(part.read_in.lsn)
        record = stored_range(part.row or 0, divided.table.relid, divided.ranges, part)
        progress = ProgressRecord(divided.claimed, with_origin=False)
        async with divided.recording:
            await copy_transaction.end_range(target, mapping, progress, record, read_at)
            await reached(Point.COPIED)
            divided.check_current()
            if not part.accept():
                raise StaleCatalog("a range is read again, because a change has not waited for it")
            await copy_transaction.commit(target)
        await reached(Point.COPY_COMMITTED)
        part.end()

    async def _wait_for_flush(self, position: Lsn) -> None:
        """Wait until a crash of the publisher cannot undo transactions that a snapshot sees."""
        if await queries.is_flushed(self._publisher, position):
            return
        await queries.request_flush(self._publisher)
        wait = LimitedWait(f"the flush of the publisher's WAL up to {position}")
        while not await queries.is_flushed(self._publisher, position):
            await wait.poll()
