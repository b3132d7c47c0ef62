"""InFlightBatches: batches that were sent and not answered, in the order of the stream, in one session or several.

Theory of operation. A batch is sent as BEGIN, a few statements (targets/postgres/sql/batch_statements.py), the check of
each table's shape, the progress, COMMIT. Nothing waits for an answer. A worker has its own session, and more with
apply_sessions. A batch of whole transactions is sent through a session without an open transaction, if none of its rows
is in a batch that is in flight in another session. Its COMMIT, with progress before it, is sent in its turn: when
everything before it is committed, or precedes it in the same session. So each commit leaves the target in a state that
the publisher had, and readers of the target see no state that readers of the publisher could not see.

Rows are distinguished by their keys. A table with more than one unique index, in which different rows can conflict,
counts as one row. Foreign keys need no order: an apply worker's session does not check them (session_replication_role).
Tables whose triggers do fire are never in a batch. Other changes than batches of whole transactions wait until no
session has a batch in flight, and use the worker's own session.

Invariants.

- The changes of a batch are kept until its result has arrived. If the server rejects a batch, for any reason, it is
  rolled back, and so are the batches after it: the progress record has not reached the position they expect.
- The first rejection ends all batches: uncommitted transactions are rolled back in every session. They are returned as
  a Rejection, and targets/postgres/target.py applies them again row by row. So correctness does not depend on knowing
  which rows can conflict.
- A transaction larger than a batch is applied in slices, each within a savepoint of the target's transaction. Its
  COMMIT may not fail: the slices that were answered before cannot be applied again.

Keys may be equal though their bytes differ. Then a statement changes another number of rows than it has, and fails, or
two batches wait for each other. The server cannot detect that deadlock while the later one waits for its turn.
worker/apply/lock_waits.py finds the first one waiting for a lock, and rolls the others back: roll_back_for_lock().

Failure cases. targets/postgres/session/progress.py has those of the progress record.

- The worker dies between sending a batch and its answer: the transaction is committed or not, and progress with it.
- The worker dies with transactions open in several sessions: only the session whose turn it is can have a COMMIT in
  flight, and it moves the progress record from the position that its predecessors left. The next worker ends every
  session's backend before it reads that record (worker/session/parallel_session.py).
- The worker dies after a rejection, before or while changes are applied again: nothing of the batch was committed. The
  position is that before the first transaction that was not.
- The worker dies while a slice is rolled back or applied again: its transaction is not committed.

The origin's position, which an abort moves (targets/postgres/session/progress.py), is moved by a rejected slice to that
of the transaction before, which is committed; by a rejected batch at worst beyond the progress record, which is
repaired at the next start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import anyio

from subscriber import sqlstate
from subscriber.apply.batch.batch import Batch, TransactionSlice
from subscriber.apply.batch.table_batch import ChangeKind, TableBatch
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import SubscriberError
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.settings import Settings
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql import row_statements

_SAVEPOINT = "subscriber_slice"
_ROW_MISSING = "row missing"  # or not as it was expected to be


class BatchState(Enum):
    """The state of a batch that was sent."""

    SLICE = auto()  # it ends in the middle of a transaction, so it has no COMMIT
    COMMIT_WAITS = auto()  # for its turn
    COMMIT_SENT = auto()


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch that was sent and not answered, of one transaction or several.

    Attributes:
        slices: the transactions, with their changes.
        mappings: the mappings of its tables, by the publisher's OID.
        rows: the number of changes.
        applier: applies it in its session.
        position: the position of the progress record before it.
        continues: the target's transaction has begun with earlier slices.
        mapped: OIDs of tables that were mapped just before.
        state: the state of its COMMIT.
        tables: the rows that it changes. None: any rows.
    """

    slices: list[TransactionSlice]
    mappings: dict[int, RelationMapping]
    rows: int
    applier: RowApplier
    position: Lsn
    continues: bool
    mapped: frozenset[int]
    state: BatchState
    tables: list[TableBatch] | None = None

    @property
    def end_lsn(self) -> Lsn | None:
        """The end of its last transaction. None: it ends with a slice."""
        return self.slices[-1].end_lsn

    @property
    def in_savepoint(self) -> bool:
        """True if only its savepoint may be rolled back, and not the target's transaction."""
        return self.continues or self.end_lsn is None

    def overlaps(self, tables: Iterable[TableBatch]) -> bool:
        """Return True if this batch has rows of `tables`, so that it must be committed first."""
        return self.tables is None or any(
            mine.mapping.local.oid == other.mapping.local.oid and mine.overlaps(other)
            for mine in self.tables
            for other in tables
        )


@dataclass(frozen=True, slots=True)
class Rejection:
    """Batches that were rolled back.

    Attributes:
        batches: the batches, in the order of the stream.
        reason: the reason in a few words.
        pauses: more batches would be rejected for the same reason.
        earlier: the number of such rejections since a batch was applied.
    """

    batches: list[InFlightBatch]
    reason: str
    pauses: bool
    earlier: int

    @property
    def open_transaction(self) -> RemoteTransaction | None:
        """The transaction whose slice was rejected, and whose earlier slices are applied. None: there is none."""
        first = self.batches[0] if self.batches else None
        return first.slices[0].transaction if first is not None and first.continues else None


class InFlightBatches:
    """The batches in flight of one worker.

    Attributes:
        applied: the number of changes that were applied in batches.
        applied_beside: how many of these in other sessions than the worker's own.
    """

    def __init__(self, own: RowApplier, wake: Callable[[], None], settings: Settings) -> None:
        """Create the batches of a worker.

        Args:
            own: applies changes in the worker's own session.
            wake: called when a result has made room.
            settings: limits of batches.
        """
        self.applied = 0
        self.applied_beside = 0
        self._rejections = 0
        self._batches: deque[InFlightBatch] = deque()
        self._own = own
        self._appliers = [own]
        self._wake = wake
        self._settings = settings
        self._answered = anyio.Event()
        self._retreating = False  # all batches are rolled back for a lock
        self._recovering = False
        own.session.pipeline.on_trouble = self._notify

    def join(self, applier: RowApplier) -> None:
        """Use the session of this applier as well from now on."""
        applier.progress.follow(self._own.position)
        applier.session.pipeline.on_trouble = self._notify
        self._appliers.append(applier)
        self._notify()

    @property
    def position(self) -> Lsn:
        """The end of the last transaction that was sent."""
        sent = self._batches[-1].end_lsn if self._batches else None
        return sent or self._own.position

    @property
    def is_empty(self) -> bool:
        """True if no batch is in flight."""
        return not self._batches

    # --- sending --------------------------------------------------------------------------------

    async def wait_for_session(self, batch: Batch, *, whole: bool) -> RowApplier | None:
        """Wait until a session is free for a batch, and return its applier. None: a batch was rejected before.

        Args:
            batch: the batch to send.
            whole: it has nothing but whole transactions.
        """
        while not self.rejected:
            applier = self._free_for(batch, whole=whole)
            if applier is not None:
                return applier
            await self._wait_for_result()
        return None

    async def send(self, batch: Batch, applier: RowApplier, *, continues: bool) -> None:
        """Send a batch. `continues`: earlier slices of its transaction were sent."""
        self._queue(batch, applier, continues)
        reach(Point.BATCH_SENT, self._own.session.pipeline.flush)
        await applier.session.pipeline.drain()

    def should_send_early(self, batch: Batch) -> bool:
        """Return True if a batch should be sent although another is in flight and it is not full."""
        if batch.rows < self._settings.parallel_batch_min_rows or not self._has_more_sessions:
            return False
        return any(not self._load(applier) for applier in self._appliers)

    @property
    def _has_more_sessions(self) -> bool:
        return len(self._appliers) > 1

    def _free_for(self, batch: Batch, *, whole: bool) -> RowApplier | None:
        """Return the applier whose session is to have `batch`. None: something has to be answered first."""
        if len(self._batches) >= self._settings.batches_in_flight + len(self._appliers) - 1:
            return None
        own = self._own
        if not self._has_more_sessions:
            return own
        if not whole:
            idle = all(sent.applier is own and sent.state is not BatchState.COMMIT_WAITS for sent in self._batches)
            return own if idle else None
        if not own.session.pipeline.only_attempts:  # the rows of earlier statements are unknown
            return own if all(sent.applier is own for sent in self._batches) else None
        tables = list(batch.tables.values())
        for applier in sorted(self._idle(), key=self._load):
            if not any(sent.overlaps(tables) for sent in self._batches if sent.applier is not applier):
                return applier
        return None

    def _idle(self) -> list[RowApplier]:
        """Return the appliers whose sessions have no transaction whose COMMIT waits for its turn."""
        waiting = {id(sent.applier) for sent in self._batches if sent.state is BatchState.COMMIT_WAITS}
        return [applier for applier in self._appliers if id(applier) not in waiting]

    def _load(self, applier: RowApplier) -> int:
        return sum(sent.applier is applier for sent in self._batches)

    def _queue(self, batch: Batch, applier: RowApplier, continues: bool) -> None:
        """Queue the statements of a batch, and each COMMIT whose turn has come."""
        last, pipeline = batch.slices[-1], applier.session.pipeline
        sent = InFlightBatch(
            batch.slices,
            batch.mappings,
            batch.rows,
            applier,
            self.position,
            continues,
            self._own.session.mapped,
            BatchState.SLICE if last.end_lsn is None else BatchState.COMMIT_WAITS,
        )
        with pipeline.attempt():
            if not continues:
                applier.begin(last.transaction)
            if sent.in_savepoint:
                applier.savepoint(last.transaction, _SAVEPOINT)
            applier.apply_steps(batch, StatementContext("BATCH"), self._settings.copy_chunk_rows)
            if sent.in_savepoint:
                without_key = any(table.mapping.search is None for table in batch.tables.values())
                if without_key and applier.shares_rows(last.transaction):
                    pipeline.execute(row_statements.REMEMBER_XIDS, note=StatementContext("BATCH"))
                pipeline.execute(
                    f"RELEASE SAVEPOINT {_SAVEPOINT}",
                    note=StatementContext("BATCH"),
                    on_result=lambda *_: self._done(sent),
                )
                pipeline.ask()
        if self._has_more_sessions:
            sent.tables = list(batch.tables.values())
            for table in sent.tables:
                table.forget_rows()
        self._batches.append(sent)
        self._send_due_commits()
        pipeline.flush()  # the commit may be due much later

    def _send_due_commits(self) -> None:
        """Send every COMMIT whose turn has come. Does nothing if a session is lost; Pipeline.watch() reports that."""
        if self._recovering or not self._batches:
            return
        first = self._batches[0].applier
        if first.session.pipeline.error is not None:
            return
        for sent in self._batches:
            if sent.applier is not first:
                return
            if sent.state is BatchState.COMMIT_WAITS:
                self._send_commit(sent)

    def _send_commit(self, sent: InFlightBatch) -> None:
        last = sent.slices[-1]
        assert last.end_lsn is not None
        sent.state = BatchState.COMMIT_SENT
        with sent.applier.session.pipeline.attempt(not sent.in_savepoint):
            sent.applier.progress.follow(sent.position)
            sent.applier.queue_commit(last.transaction, last.end_lsn, partial(self._committed, sent))

    # --- results ----------------------------------------------------------------------------------

    @property
    def rejected(self) -> bool:
        """True if a batch was rejected, or the batches have to be rolled back for a lock."""
        return self._retreating or any(applier.session.pipeline.refused is not None for applier in self._appliers)

    def _committed(self, sent: InFlightBatch) -> None:
        last = sent.slices[-1]
        if sent.applier is not self._own and last.end_lsn is not None:
            self._own.progress.follow(max(last.end_lsn, self._own.position))
        if not sent.in_savepoint:
            self._done(sent)
        if last.on_committed is not None:
            last.on_committed()

    def _done(self, sent: InFlightBatch) -> None:
        """The server has applied a batch."""
        self._rejections = 0
        self.applied += sent.rows
        self.applied_beside += sent.rows * (sent.applier is not self._own)
        self._batches.remove(sent)
        self._send_due_commits()
        self._notify()

    def _notify(self) -> None:
        self._answered.set()
        self._wake()

    async def wait_for_results(self) -> Rejection | None:
        """Wait until nothing is in flight, or a batch was rejected. A rejected batch has been rolled back then.

        Raises:
            SubscriberError: a session is lost.
        """
        while self._batches and not self.rejected:
            await self._wait_for_result()
        if not self.rejected:
            return None
        error, note, batches = await self._recover()
        own = self._own
        reach(Point.BATCH_REJECTED, own.session.pipeline.flush)
        reason = _reason(error)
        pauses = reason != _ROW_MISSING or not _disable_batched_updates(note)
        rejection = Rejection(batches, reason, pauses, self._rejections)
        self._rejections += pauses
        if batches:
            own.progress.follow(batches[0].position)
            if rejection.open_transaction is not None:
                own.roll_back_to(rejection.open_transaction, _SAVEPOINT)
            own.session.restore_mapped(batches[0].mapped)
        own.conflicts.retry_queries()
        own.forget_touched()
        return rejection

    async def _wait_for_result(self) -> None:
        """Wait for an answer that matters here. Raises the error of a session that is lost."""
        self._answered = anyio.Event()
        for applier in self._appliers:
            applier.session.pipeline.flush()
        self._raise_error()
        await self._answered.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        for applier in self._appliers:
            if applier.session.pipeline.error is not None:
                raise applier.session.pipeline.error

    async def _recover(self) -> tuple[SubscriberError | None, object, list[InFlightBatch]]:
        """Roll back all uncommitted batches.

        For a rejected slice of a large transaction, the worker's own transaction stays open: the caller rolls back to
        the savepoint.

        Returns:
            The error (None after roll_back_for_lock()), the note of its statement, and the batches.
        """
        self._recovering = True
        appliers = list(self._appliers)  # a session that joins meanwhile has nothing to roll back
        for sent in self._batches:
            if sent.state is BatchState.COMMIT_WAITS:
                self._roll_back(sent.applier)
        for applier in appliers:
            # For all before waiting: one may hold a lock that another needs.
            applier.session.pipeline.queue_sync()
            applier.session.pipeline.flush()
        errors = {id(applier): await applier.session.pipeline.recover() for applier in appliers}
        batches, self._batches = list(self._batches), deque()
        for applier in appliers:
            if errors[id(applier)][0] is not None and not (applier is self._own and batches and batches[0].continues):
                self._roll_back(applier)
                await applier.session.pipeline.sync()
        self._recovering = self._retreating = False
        foremost = [errors[id(sent.applier)] for sent in batches[:1]]
        error, note = next(((e, n) for e, n in [*foremost, *errors.values()] if e is not None), (None, None))
        return error, note, batches

    def _roll_back(self, applier: RowApplier) -> None:
        applier.session.pipeline.execute("ROLLBACK", note=StatementContext("ROLLBACK"))
        applier.session.rolled_back()

    # --- locks ------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines of all sessions, in the order of their turns."""
        appliers = (*(sent.applier for sent in self._batches), *self._appliers)
        return list(dict.fromkeys([applier.session.pipeline for applier in appliers]))

    def roll_back_for_lock(self) -> bool:
        """The first session waits for a lock: have the others roll back. Returns False if they have nothing open."""
        if self._recovering or all(sent.state is not BatchState.COMMIT_WAITS for sent in self._batches):
            return False
        self._retreating = True
        self._notify()
        return True


def _reason(error: SubscriberError | None) -> str:
    """Return the reason of a rejection in a few words, without values of rows."""
    if error is None:
        return "deadlock"
    match error.sqlstate:
        # The error of a cast that batch_statements.py has fail if a statement affects another number of rows.
        case sqlstate.INVALID_TEXT_REPRESENTATION if " rows instead of " in error.message:
            return _ROW_MISSING
        case sqlstate.UNIQUE_VIOLATION:
            return "key exists"
        case sqlstate.TARGET_TABLE_CHANGED:
            return "table changed"
        case other:
            return f"error {other}"


def _disable_batched_updates(note: object) -> bool:
    """Disable batched updates of a table with several unique indexes. Returns False if they were already disabled.

    The rejected update has perhaps changed a column of such an index. Later updates are then likely to do the same.
    """
    if (
        not isinstance(note, StatementContext)
        or note.mapping is None
        or note.message not in (ChangeKind.UPDATE.name, ChangeKind.KEY_UPDATE.name)
    ):
        return False
    mapping = note.mapping
    if not mapping.local.other_unique or mapping.unique_values_change:
        return False
    mapping.unique_values_change = True
    return True
