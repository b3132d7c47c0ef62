"""The set-based path: many changes gathered and applied as few statements, before the reference path or instead.

Theory of operation. Changes are gathered (apply/batch/batch.py) while they come; a batch is sent when the stream
pauses, when it is full, or when something comes that cannot be part of one. It is sent as an attempt: BEGIN, a few
statements (targets/postgres/sql/batch_statements.py), the look at each table's shape, progress, COMMIT, and nothing
waits for an answer. Several batches may be under way. Of each the changes are kept until it is answered. If the server
refuses one, for whatever reason, it is rolled back, and so are those behind it, since progress is no more where they
expect it; then all that was kept is applied again on the reference path, which says what there is to say: a conflict
that is passed over, an error with its position, or nothing at all.

What must not meet: a statement of the reference path behind an attempt that may be refused. So before the
first one of a transaction everything under way is waited for.

A transaction larger than a batch is applied in portions, each within a savepoint of the target's transaction, and
its COMMIT is no attempt: what was answered before cannot be applied again.

Changes of a transaction are all on one path, portions apart. Few changes are not worth a batch, and not gathered where
it is known that no more have come (set_small_backlog()); nor are many worth one that hardly fit together. After a
refusal the reference path is used for a while, longer each time in a row. What stands between two savepoints is a
portion, or several: what comes before a savepoint has been answered when that is set.

Kill points considered, besides those in targets/postgres/session/progress.py:
- between sending a batch and its answer: its transaction is committed or not, and progress with it, as one.
- after a refusal, before or while its changes are applied again: nothing of the batch was committed; the position
  is that before the first transaction that was not.
- while a portion of a large transaction is rolled back or applied again: its transaction is not committed.

The origin's position, which an abort moves (targets/postgres/session/progress.py), is moved by a refused portion to
that of the transaction before, which is committed; by a refused batch at worst beyond the row, which is repaired at the
next start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from subscriber.apply.batch.batch import (
    AppendedChanges,
    AppendResult,
    Batch,
    CommitCallbacks,
    TransactionSlice,
    decoded,
    why_not_batched,
)
from subscriber.apply.batch.table_batch import TableBatch
from subscriber.apply.relation_map import RelationMap, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.errors import MappingError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Relation, Truncate, Update
from subscriber.targets.base import ShouldApply
from subscriber.targets.postgres.batch_rejection import ROW_MISSING, disable_batched_updates, rejection_reason
from subscriber.targets.postgres.row_applier import PostgresTarget
from subscriber.targets.postgres.session.statement_context import OnConflict, StatementContext
from subscriber.targets.postgres.session_group import InFlightBatch, SessionGroup
from subscriber.targets.postgres.sql import row_statements

WORTHWHILE = 16  # changes; fewer are applied one by one
ROWS_IN_STEP = 3  # on average; with fewer the same
PAUSE = 1000  # changes on the reference path after a refusal; doubles with each in a row
LONGEST_PAUSE = 1_000_000

FEW = "few at a time"

_SAVEPOINT = "subscriber_portion"


class BatchingTarget(PostgresTarget):
    """A PostgresTarget that applies set-based what it can."""

    def __init__(self, session: Session | Pipeline, origin: str, on_conflict: OnConflict) -> None:
        super().__init__(session, origin, on_conflict)
        self.batching = True
        self.passing: Callable[[str], None] = lambda _: None  # for tests: called where a worker may die
        self.in_batches = 0  # changes applied set-based
        self.beside = 0  # of them in other sessions than its own
        self._batch = Batch()
        self._sessions = SessionGroup(self, self._wake_up)
        self._partially_sent_txn: RemoteTransaction | None = None  # portions of it were sent, its COMMIT was not
        self._row_by_row_txn: RemoteTransaction | None = None  # is being applied on the reference path
        self._reason = ""  # why
        self._small_backlog = False  # see set_small_backlog()
        self._end: Lsn | None = None  # of the last transaction in the batch
        self._pause = 0  # changes to go on the reference path
        self._refusals = 0  # in a row

    @property
    def position(self) -> Lsn:
        return self._end if self._end is not None else self._sent_position

    @property
    def _sent_position(self) -> Lsn:
        return self._sessions.position or super().position

    def join(self, lane: PostgresTarget) -> None:
        """Apply batches through this session as well from now on. It is configured, and has an origin."""
        self._sessions.join(lane)

    @property
    def pipelines(self) -> list[Pipeline]:
        return self._sessions.pipelines

    def roll_back_for_lock(self) -> bool:
        return self._sessions.roll_back_for_lock()

    def _wake_up(self) -> None:
        self.on_progress()

    # --- gathering ------------------------------------------------------------------------------

    def append_raw_changes(
        self,
        transaction: RemoteTransaction,
        waiting: deque[bytes],
        limit: int,
        relations: RelationMap,
        should_apply: ShouldApply,
    ) -> AppendedChanges:
        if not self._may_gather(transaction):
            return AppendedChanges(0, 0)
        find = self._finder(relations, should_apply, transaction.finish_lsn)
        taken = self._batch.append_raw(transaction, waiting, limit, find)
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
        if not self.batching or self._pause:
            return None
        find = self._finder(relations, should_apply, self.position)
        taken = self._batch.append_raw_transactions(waiting, limit, find, ends)
        if taken is not None:
            self._end = taken.end_lsn
        return taken

    def _finder(
        self, relations: RelationMap, should_apply: ShouldApply, finish_lsn: Lsn
    ) -> Callable[[bytes], TableBatch | None]:
        """Where changes of a table go, by its relid's four bytes, if it is known and still mapped as it was."""

        def find(relid: bytes) -> TableBatch | None:
            table = self._batch.tables.get(relid)
            if table is None or relations.get(table.mapping.remote.relid) is not table.mapping:
                return None
            return table if should_apply(table.mapping.local, finish_lsn) else None

        return find

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        if self._small_backlog:
            self._row_by_row_txn, self._reason = transaction, self._why_none() or mapping.local.batch_exclusion or FEW
        elif transaction is not self._row_by_row_txn:
            await self.flush_if_full()
        if transaction is not self._row_by_row_txn:
            reason = self._why_not(transaction, mapping, change)
            if reason is None:
                if not self._batch.fits(mapping):
                    await self._send(whatever=True)
                if self._batch.add(transaction, self._batch.table(mapping, change), change):
                    transaction.is_open_on_target = True
                    return
                reason = "row"
            await self._switch_to_row_by_row(transaction, reason)
        await self._change(transaction, mapping, change)

    async def _change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        self.row_by_row_reasons[self._reason] += 1
        if self._pause:
            self._pause -= 1
        await super().change(transaction, mapping, change)

    def _may_gather(self, transaction: RemoteTransaction) -> bool:
        return self.batching and transaction is not self._row_by_row_txn and not self._pause

    def _why_not(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> str | None:
        reason = self._why_none()
        if reason is not None:
            return reason
        try:
            self.roles.role([mapping.local])
        except MappingError:
            return "role"
        return why_not_batched(mapping, change)

    def _why_none(self) -> str | None:
        """The same where it is so of any change."""
        if not self.batching:
            return "switched off"
        if self._pause:
            return self._reason
        if self.resolution is not None:
            return "conflict policy"
        if self.conflicts.origin_id is not None:
            return "track_commit_timestamp"
        return None

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        if transaction is self._partially_sent_txn:
            self._note_end(transaction, end_lsn, on_committed)
            await self._send()
        elif self._batch.portions and self._batch.portions[-1].transaction is transaction:
            self._note_end(transaction, end_lsn, on_committed)
            await self.flush_if_full()
        else:
            await self._switch_to_row_by_row(transaction, "nothing")
            self._row_by_row_txn = None
            await super().commit(transaction, end_lsn, on_committed)

    def _note_end(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        portion = self._batch.portion(transaction)
        portion.end_lsn, portion.on_committed = end_lsn, on_committed
        self._end = end_lsn

    # --- whatever is not part of a batch ------------------------------------------------------------

    async def map_relation(self, remote: Relation) -> RelationMapping:
        await self._await_results()
        return await super().map_relation(remote)

    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        await self._switch_to_row_by_row(transaction, "TRUNCATE")
        await super().truncate(transaction, mappings, truncate)

    async def sync(self) -> None:
        await self._send()
        await self._await_results()
        await super().sync()

    async def leave_batch_mode(self, transaction: RemoteTransaction) -> None:
        """The caller is going to use the session itself, inside of `transaction`."""
        await self._switch_to_row_by_row(transaction, "not a plain transaction")

    async def _switch_to_row_by_row(self, transaction: RemoteTransaction, reason: str) -> None:
        """Have what came before `transaction` done, and all of it on the reference path, apart from portions sent."""
        if transaction is self._row_by_row_txn:
            return
        await self._send()
        if _is_worthwhile(self._batch):
            await self._send(whatever=True)
        await self._await_results()
        if transaction is self._row_by_row_txn:  # since portions of it were refused
            return
        self._reason = reason
        if transaction is self._partially_sent_txn:
            self._row_by_row_txn, self._partially_sent_txn = transaction, None
        begun, self._batch = self._batch, Batch()
        await self._replay_row_by_row(begun.portions, begun.mappings)
        self._row_by_row_txn = transaction

    # --- subtransactions --------------------------------------------------------------------------

    async def flush_transaction(self, transaction: RemoteTransaction) -> None:
        await self._switch_to_row_by_row(transaction, FEW)
        self._resume_batching(transaction)

    async def savepoint(self, transaction: RemoteTransaction, name: str) -> None:
        await self.flush_transaction(transaction)
        await super().savepoint(transaction, name)
        self._resume_batching(transaction)

    async def roll_back_to(self, transaction: RemoteTransaction, name: str) -> None:
        self._batch = Batch()  # all of it came after the savepoint
        await self._await_results()
        await super().roll_back_to(transaction, name)
        self._resume_batching(transaction)

    async def roll_back(self, transaction: RemoteTransaction) -> None:
        self._batch = Batch()
        await self._await_results()
        if transaction is not self._partially_sent_txn and transaction is not self._row_by_row_txn:
            transaction.is_open_on_target = False  # its changes had only been gathered
        self._partially_sent_txn = self._row_by_row_txn = None
        await super().roll_back(transaction)

    def _resume_batching(self, transaction: RemoteTransaction) -> None:
        """What comes next of it may be a portion again: nothing of it is under way."""
        self._partially_sent_txn, self._row_by_row_txn = transaction if transaction.is_open_on_target else None, None

    # --- sending --------------------------------------------------------------------------------

    async def flush_if_full(self) -> None:
        """Send the batch if it is due, and see to what was refused."""
        if self._batch.is_due:
            await self._send(whatever=True)
        elif self._sessions.refused:
            await self._await_results()

    def set_small_backlog(self, few: bool) -> bool:
        occupied = self._batch.portions or self._sessions.attempts or self._sessions.refused
        self._small_backlog = few and not occupied
        return self._small_backlog

    async def on_idle(self) -> None:
        """The stream pauses: do what was gathered of complete transactions."""
        if not self._small_backlog:  # else nothing was gathered
            if self._sessions.refused:
                await self._await_results()
            # Or what follows is gathered as well, until the answer wakes us.
            if not self._sessions.attempts or self._sessions.should_send_early(self._batch):
                await self._send()
        await super().on_idle()

    async def _send(self, *, whatever: bool = False) -> None:
        """Apply what was gathered of complete transactions; `whatever`: and of the one that is not."""
        batch, self._batch = self._batch, Batch()
        if batch.is_open and len(batch.portions) > 1:
            batch, self._batch = batch.split()
        elif batch.is_open and not whatever:
            self._batch = batch
            return
        if not batch.portions:
            return
        self._end = None
        whole = not batch.is_open and batch.portions[0].transaction is not self._partially_sent_txn
        while (lane := self._sessions.pick_session(batch, whole=whole)) is None and not self._sessions.refused:
            await self._sessions.wait_for_result()
        if self._sessions.refused:
            await self._await_results()
        lane = lane or self
        first = batch.portions[0].transaction
        if first is not self._row_by_row_txn and (
            first is self._partially_sent_txn or batch.is_open or _is_worthwhile(batch)
        ):
            self._attempt(batch, lane)
            self.passing("BATCH_SENT")
            await lane.pipeline.drain()
            return
        if first is not self._row_by_row_txn:
            await self._await_results()
            self._reason = FEW
        await self._replay_row_by_row(batch.portions, batch.mappings)

    def _attempt(self, batch: Batch, lane: PostgresTarget) -> None:
        """Queue the statements of a batch, and in its turn its COMMIT if it has one."""
        last = batch.portions[-1]
        within = last.transaction is self._partially_sent_txn
        attempt = InFlightBatch(
            batch.portions, batch.mappings, lane, self._sent_position, within, set(self._mapped_in_txn)
        )
        in_savepoint = within or last.end_lsn is None
        note = StatementContext("BATCH")

        def done(*_: object) -> None:
            self._refusals = 0
            self.in_batches += batch.rows
            self.beside += batch.rows * (lane is not self)
            self._sessions.done(attempt)

        def committed() -> None:
            if lane is not self and last.end_lsn is not None:
                self.set_progress_position(max(last.end_lsn, super(BatchingTarget, self).position))
            if not in_savepoint:
                done()
            if last.on_committed is not None:
                last.on_committed()

        def commit() -> None:
            assert last.end_lsn is not None
            with lane.pipeline.attempt(not in_savepoint):
                lane.set_progress_position(attempt.position)
                lane.queue_commit(last.transaction, last.end_lsn, committed)

        with lane.pipeline.attempt():
            if not within:
                lane.begin(last.transaction)
            if in_savepoint:
                self._queue_savepoint(last.transaction, _SAVEPOINT)
            lane.apply_steps(batch, note)
            if in_savepoint:
                if last.transaction.outlives_commit_order and any(
                    t.mapping.search is None for t in batch.tables.values()
                ):
                    lane.pipeline.execute(row_statements.REMEMBER_XIDS, note=note)
                lane.pipeline.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}", note=note, on_result=done)
                lane.pipeline.ask()
        if self._sessions.has_extra_sessions:
            attempt.tables = list(batch.tables.values())
            for table in attempt.tables:
                table.forget_rows()
        self._partially_sent_txn = last.transaction if last.end_lsn is None else None
        attempt.commit = commit if last.end_lsn is not None else None
        self._sessions.add(attempt)

    # --- what became of it ------------------------------------------------------------------------

    async def _await_results(self) -> None:
        """Wait until nothing is under way; what was refused has then been applied again."""
        while self._sessions.attempts and not self._sessions.refused:
            await self._sessions.wait_for_result()
        if not self._sessions.refused:
            return
        error, note, attempts = await self._sessions.recover()
        self.passing("BATCH_REFUSED")
        self._reason = rejection_reason(error)
        if self._reason != ROW_MISSING or not disable_batched_updates(note):
            self._pause = min(PAUSE * 2**self._refusals, LONGEST_PAUSE)
            self._refusals += 1
        if attempts:
            self._roll_back(attempts[0])
        self.conflicts.retry_queries()
        for attempt in attempts:
            await self._replay_row_by_row(attempt.portions, attempt.mappings)
        portions = self._batch.portions
        if portions and portions[0].transaction is self._row_by_row_txn:
            begun, self._batch = self._batch, Batch()
            await self._replay_row_by_row(begun.portions, begun.mappings)

    def _roll_back(self, attempt: InFlightBatch) -> None:
        """The first attempt that was refused, and those behind it, have done nothing."""
        transaction = attempt.portions[0].transaction
        self._partially_sent_txn = None
        self.set_progress_position(attempt.position)
        if attempt.within:
            self._queue_roll_back_to(transaction, _SAVEPOINT)
            self._row_by_row_txn = transaction
        self._mapped_in_txn = attempt.fresh

    async def _replay_row_by_row(self, portions: list[TransactionSlice], mappings: dict[int, RelationMapping]) -> None:
        """On the reference path, one transaction and one change after another."""
        for portion in [one for several in portions for one in several.transactions()]:
            transaction = portion.transaction
            if transaction is not self._row_by_row_txn:
                transaction.is_open_on_target = False
                self._row_by_row_txn = transaction
            for payload in portion.changes:
                change = decoded(payload)
                await self._change(transaction, mappings[change.relid], change)
                self.passing("BATCH_APPLIED_AGAIN")
            if portion.end_lsn is not None:
                self._row_by_row_txn = None
                assert portion.on_committed is not None
                await super().commit(transaction, portion.end_lsn, portion.on_committed)


def _is_worthwhile(batch: Batch) -> bool:
    return batch.rows >= WORTHWHILE and batch.rows >= batch.steps * ROWS_IN_STEP
