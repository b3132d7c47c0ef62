"""Batches of one apply worker: append changes, send batches as attempts through its sessions, await the results.

Purpose. A batch is sent as BEGIN, a few statements (targets/postgres/sql/batch_statements.py), the check of each
table's shape, the progress, COMMIT. Nothing waits for an answer. Several batches may be in flight, in one session or in
several (targets/postgres/session_group.py).

Invariants.

- The changes of a batch are kept until its result has arrived. If the server rejects a batch, for any reason, it is
  rolled back, and so are the batches after it: the progress record has not reached the position they expect.
- A rejected batch is returned as a Rejection. targets/postgres/target.py replays it row by row.
- A transaction larger than a batch is applied in slices, each within a savepoint of the target's transaction. Its
  COMMIT is no attempt: the slices that were answered before cannot be replayed.

Failure cases. targets/postgres/session/progress.py has those of the progress record.

- The worker dies between sending a batch and its answer: the transaction is committed or not, and progress with it.
- The worker dies after a rejection, before or during the replay: nothing of the batch was committed. The position is
  that before the first transaction that was not.
- The worker dies while a slice is rolled back or replayed: its transaction is not committed.

The origin's position, which an abort moves (targets/postgres/session/progress.py), is moved by a rejected slice to that
of the transaction before, which is committed; by a rejected batch at worst beyond the progress record, which is
repaired at the next start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from subscriber.apply.batch.batch import AppendedChanges, AppendResult, Batch, BatchLimits, CommitCallbacks
from subscriber.apply.batch.table_batch import TableBatch
from subscriber.apply.relation_map import RelationMap, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.settings import DEFAULTS, Settings
from subscriber.targets.base import ShouldApply
from subscriber.targets.postgres.batch_rejection import ROW_MISSING, disable_batched_updates, rejection_reason
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.session_group import InFlightBatch, SessionGroup
from subscriber.targets.postgres.sql import row_statements

_SAVEPOINT = "subscriber_portion"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Batches that were rolled back, in the order of the stream."""

    batches: list[InFlightBatch]
    reason: str  # in a few words
    pauses: bool  # more batches would be rejected for the same reason

    @property
    def open_transaction(self) -> RemoteTransaction | None:
        """The transaction whose slice was rejected, and whose earlier slices are applied; None: there is none."""
        first = self.batches[0] if self.batches else None
        return first.portions[0].transaction if first is not None and first.within else None


class BatchApplier:
    """The batch that is being gathered, and those in flight. `rows` is the worker's own session."""

    def __init__(self, rows: RowApplier, wake: Callable[[], None], settings: Settings = DEFAULTS) -> None:
        """Create an applier on the session of `rows`. `wake` is called when a result has made room."""
        self._settings = settings
        self._limits = batch_limits(settings)
        self.batch = Batch(self._limits)
        self.sessions = SessionGroup(rows, wake, settings)
        self.applied = 0  # changes
        self.applied_beside = 0  # changes applied in other sessions than `rows`
        self.rejections = 0  # in a row
        self._rows = rows
        self._end: Lsn | None = None  # of the last transaction in the batch

    @property
    def position(self) -> Lsn:
        """The end of the last transaction that was gathered, sent or applied."""
        return self._end if self._end is not None else self._sent_position

    @property
    def _sent_position(self) -> Lsn:
        return self.sessions.position or self._rows.position

    @property
    def is_idle(self) -> bool:
        """True if no change is in the batch, in flight or rejected."""
        return not (self.batch.portions or self.sessions.attempts or self.sessions.refused)

    # --- gathering ------------------------------------------------------------------------------

    def append_raw(
        self,
        transaction: RemoteTransaction,
        waiting: deque[bytes],
        limit: int,
        relations: RelationMap,
        should_apply: ShouldApply,
    ) -> AppendedChanges:
        """See Target.append_raw_changes()."""
        find = self._finder(relations, should_apply, transaction.finish_lsn)
        taken = self.batch.append_raw(transaction, waiting, limit, find)
        if taken.changes:
            transaction.is_open_on_target = True
        return taken

    def append_raw_transactions(
        self,
        waiting: deque[bytes],
        limit: int,
        relations: RelationMap,
        should_apply: ShouldApply,
        ends: CommitCallbacks,
    ) -> AppendResult | None:
        """See Target.append_raw_transactions()."""
        find = self._finder(relations, should_apply, self.position)
        taken = self.batch.append_raw_transactions(waiting, limit, find, ends)
        if taken is not None:
            self._end = taken.end_lsn
        return taken

    def _finder(
        self, relations: RelationMap, should_apply: ShouldApply, finish_lsn: Lsn
    ) -> Callable[[bytes], TableBatch | None]:
        """Return a function that finds the batch of a table by its relid, if its mapping is the same."""

        def find(relid: bytes) -> TableBatch | None:
            table = self.batch.tables.get(relid)
            if table is None or relations.get(table.mapping.remote.relid) is not table.mapping:
                return None
            return table if should_apply(table.mapping.local, finish_lsn) else None

        return find

    def add(self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete) -> bool:
        """Add one change to the batch; false if its row cannot be part of one."""
        if not self.batch.add(transaction, self.batch.table(mapping, change), change):
            return False
        transaction.is_open_on_target = True
        return True

    def has_gathered(self, transaction: RemoteTransaction) -> bool:
        """Return True if the last changes of the batch belong to the transaction."""
        return bool(self.batch.portions) and self.batch.portions[-1].transaction is transaction

    def add_commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """The transaction ends with the batch."""
        portion = self.batch.portion(transaction)
        portion.end_lsn, portion.on_committed = end_lsn, on_committed
        self._end = end_lsn

    def take(self, *, with_open: bool) -> Batch | None:
        """Take the whole transactions of the batch; `with_open`: and the open one. Returns None if it is empty."""
        batch, self.batch = self.batch, Batch(self._limits)
        if batch.is_open and len(batch.portions) > 1:
            batch, self.batch = batch.split()
        elif batch.is_open and not with_open:
            self.batch = batch
            return None
        if not batch.portions:
            return None
        self._end = None
        return batch

    def take_all(self) -> Batch:
        """Take the whole batch, also with an open transaction."""
        batch, self.batch = self.batch, Batch(self._limits)
        return batch

    def is_worthwhile(self, batch: Batch) -> bool:
        """Return True if a batch is faster than its changes row by row."""
        settings = self._settings
        return batch.rows >= settings.batch_min_rows and batch.rows >= batch.steps * settings.batch_min_rows_per_step

    # --- sending --------------------------------------------------------------------------------

    async def wait_for_session(self, batch: Batch, *, whole: bool) -> RowApplier | None:
        """Wait until a session is free for `batch`; None if something was rejected before.

        `whole`: it has nothing but whole transactions.
        """
        while True:
            session = self.sessions.pick_session(batch, whole=whole)
            if session is not None or self.sessions.refused:
                return None if self.sessions.refused else session
            await self.sessions.wait_for_result()

    async def send(self, batch: Batch, session: RowApplier, *, within: bool) -> None:
        """Send a batch. `within`: earlier slices of its transaction were sent."""
        self._attempt(batch, session, within)
        reach(Point.BATCH_SENT, self._rows.pipeline.flush)
        await session.pipeline.drain()

    def _attempt(self, batch: Batch, session: RowApplier, within: bool) -> None:
        """Queue the statements of a batch, and in its turn its COMMIT if it has one."""
        last, own = batch.portions[-1], self._rows
        attempt = InFlightBatch(
            batch.portions, batch.mappings, session, self._sent_position, within, own.mapped_in_transaction
        )
        in_savepoint = within or last.end_lsn is None

        def done(*_: object) -> None:
            self.rejections = 0
            self.applied += batch.rows
            self.applied_beside += batch.rows * (session is not own)
            self.sessions.done(attempt)

        def committed() -> None:
            if session is not own and last.end_lsn is not None:
                own.set_progress_position(max(last.end_lsn, own.position))
            if not in_savepoint:
                done()
            if last.on_committed is not None:
                last.on_committed()

        def commit() -> None:
            assert last.end_lsn is not None
            with session.pipeline.attempt(not in_savepoint):
                session.set_progress_position(attempt.position)
                session.queue_commit(last.transaction, last.end_lsn, committed)

        with session.pipeline.attempt():
            if not within:
                session.begin(last.transaction)
            if in_savepoint:
                own.savepoint(last.transaction, _SAVEPOINT)
            session.apply_steps(batch, StatementContext("BATCH"), self._settings.copy_chunk_rows)
            if in_savepoint:
                without_key = any(table.mapping.search is None for table in batch.tables.values())
                if without_key and session.shares_rows(last.transaction):
                    session.pipeline.execute(row_statements.REMEMBER_XIDS, note=StatementContext("BATCH"))
                session.pipeline.execute(
                    f"RELEASE SAVEPOINT {_SAVEPOINT}", note=StatementContext("BATCH"), on_result=done
                )
                session.pipeline.ask()
        if self.sessions.has_extra_sessions:
            attempt.tables = list(batch.tables.values())
            for table in attempt.tables:
                table.forget_rows()
        attempt.commit = commit if last.end_lsn is not None else None
        self.sessions.add(attempt)

    # --- results ----------------------------------------------------------------------------------

    async def wait_for_results(self) -> Rejection | None:
        """Wait until nothing is in flight, or a batch was rejected. A rejected batch has been rolled back then."""
        while self.sessions.attempts and not self.sessions.refused:
            await self.sessions.wait_for_result()
        if not self.sessions.refused:
            return None
        error, note, batches = await self.sessions.recover()
        reach(Point.BATCH_REFUSED, self._rows.pipeline.flush)
        reason = rejection_reason(error)
        rejection = Rejection(batches, reason, reason != ROW_MISSING or not disable_batched_updates(note))
        if batches:
            self._rows.set_progress_position(batches[0].position)
            if rejection.open_transaction is not None:
                self._rows.roll_back_to(rejection.open_transaction, _SAVEPOINT)
            self._rows.mapped_in_transaction = batches[0].fresh
        self._rows.conflicts.retry_queries()
        self._rows.forget_touched()
        return rejection


def batch_limits(settings: Settings) -> BatchLimits:
    """Return the limits of a batch as the settings have them."""
    return BatchLimits(
        rows=settings.batch_rows,
        bytes=settings.batch_size,
        steps=settings.batch_steps,
        small_transaction=settings.batch_small_transaction,
        run=settings.batch_run,
        largest_message=settings.batch_largest_message,
    )
