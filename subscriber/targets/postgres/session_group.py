"""Parallel sessions of an apply worker: batches of different rows, committed in the publisher's order.

Theory of operation. The sessions are lanes: the worker's own, and more if the subscription has any (apply_sessions). A
batch of whole transactions is sent through a lane without an open transaction, if none of its rows is in a batch that
is in flight in another lane. Its COMMIT, with progress before it, is sent in its turn: when everything before it is
committed, or precedes it in the same session. So each commit leaves the target in a state that the publisher had, and
readers of the target see no state that readers of the publisher could not see.

Rows are distinguished by their keys. A table with more than one unique index, in which different rows can conflict,
counts as one row. Foreign keys need no order: an apply worker's session does not check them (session_replication_role).
Tables whose triggers do fire are never in a batch. Other changes than batches of whole transactions wait until all
lanes are done, and use the worker's own session.

The first rejection ends all attempts: uncommitted transactions are rolled back in every lane, and applied again row by
row in the worker's own (batch_applier.py). So correctness does not depend on knowing which rows can conflict. Keys may
be equal though their bytes differ. Then a statement changes another number of rows than it has, and fails, or two
batches wait for each other. The server cannot detect that deadlock while the later one waits for its turn.
worker/apply/lock_waits.py finds the first one waiting for a lock, and rolls the others back: roll_back_for_lock().

Failure cases. batch_applier.py has those of a single session. Worker killed with transactions open in several lanes:
only the lane whose turn it is can have a COMMIT in flight, and it moves the progress row from the position that its
predecessors left. The next worker ends every lane's backend before it reads that row (worker/streaming/setup.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio

from subscriber.apply.batch.batch import Batch, TransactionSlice
from subscriber.apply.batch.table_batch import TableBatch
from subscriber.apply.relation_map import RelationMapping
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.settings import Settings
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.statement_context import StatementContext


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch that has been sent and whose result has not arrived; of one transaction or several."""

    portions: list[TransactionSlice]
    mappings: dict[int, RelationMapping]
    lane: RowApplier
    position: Lsn  # before it
    within: bool  # the target's transaction has begun with earlier portions
    fresh: frozenset[int]  # tables that were mapped just before
    tables: list[TableBatch] | None = None  # the rows that it changes; None: any rows
    commit: Callable[[], None] | None = None  # sends its COMMIT; None: it has been sent, or there is none

    @property
    def end_lsn(self) -> Lsn | None:
        """None: it ends with a portion."""
        return self.portions[-1].end_lsn

    def overlaps(self, tables: Iterable[TableBatch]) -> bool:
        """Return True if this batch has rows of `tables`, so that it must be committed first."""
        return self.tables is None or any(
            mine.mapping.local.oid == other.mapping.local.oid and mine.overlaps(other)
            for mine in self.tables
            for other in tables
        )


class SessionGroup:
    """The in-flight batches of one worker, in the order of the stream."""

    def __init__(self, own: RowApplier, wake: Callable[[], None], settings: Settings) -> None:
        self._settings = settings
        self.attempts: deque[InFlightBatch] = deque()
        self.all: list[RowApplier] = [own]
        self._own = own
        self._wake = wake
        self._answered = anyio.Event()
        self._retreating = False
        self._recovering = False
        own.pipeline.on_trouble = self.notify

    def join(self, lane: RowApplier) -> None:
        """Use this session as well from now on."""
        self._own.copy_progress_to(lane)
        lane.pipeline.on_trouble = self.notify
        self.all.append(lane)
        self.notify()

    @property
    def has_extra_sessions(self) -> bool:
        return len(self.all) > 1

    # --- sending --------------------------------------------------------------------------------

    def pick_session(self, batch: Batch, *, whole: bool) -> RowApplier | None:
        """The lane that is to have `batch`; None: something has to be answered first.

        `whole`: it has nothing but whole transactions.
        """
        if len(self.attempts) >= self._settings.batches_in_flight + len(self.all) - 1:
            return None
        own = self._own
        if not self.has_extra_sessions:
            return own
        if not whole:
            return own if all(attempt.lane is own and attempt.commit is None for attempt in self.attempts) else None
        if not own.pipeline.only_attempts:  # the rows of earlier statements are unknown
            return own if all(attempt.lane is own for attempt in self.attempts) else None
        tables = list(batch.tables.values())
        for lane in sorted(self._idle(), key=self._load):
            if not any(attempt.overlaps(tables) for attempt in self.attempts if attempt.lane is not lane):
                return lane
        return None

    def add(self, attempt: InFlightBatch) -> None:
        """Its statements have been queued, its COMMIT not."""
        self.attempts.append(attempt)
        self.send_due_commits()
        attempt.lane.pipeline.flush()  # its commit may be due much later

    def should_send_early(self, batch: Batch) -> bool:
        """Return True if `batch` should be sent although another is in flight and it is not full."""
        if batch.rows < self._settings.parallel_batch_min_rows or not self.has_extra_sessions:
            return False
        return any(not self._load(lane) for lane in self.all)

    def _idle(self) -> list[RowApplier]:
        """Return the sessions that have no transaction whose COMMIT waits for its turn."""
        waiting = {id(attempt.lane) for attempt in self.attempts if attempt.commit is not None}
        return [lane for lane in self.all if id(lane) not in waiting]

    def _load(self, lane: RowApplier) -> int:
        return sum(attempt.lane is lane for attempt in self.attempts)

    def send_due_commits(self) -> None:
        """Send every COMMIT whose turn has come. Does nothing if a session is lost; Pipeline.watch() reports that."""
        if self._recovering or not self.attempts or self.attempts[0].lane.pipeline.error is not None:
            return
        lane = self.attempts[0].lane
        for attempt in self.attempts:
            if attempt.lane is not lane:
                return
            if attempt.commit is not None:
                commit, attempt.commit = attempt.commit, None
                commit()

    @property
    def position(self) -> Lsn | None:
        """The end of the last transaction that was sent; None where only the worker's own session knows."""
        return self.attempts[-1].end_lsn if self.attempts else None

    # --- results ----------------------------------------------------------------------------------

    @property
    def refused(self) -> bool:
        """True if an attempt was rejected, or has to be rolled back for a lock."""
        return self._retreating or any(lane.pipeline.refused is not None for lane in self.all)

    def notify(self) -> None:
        self._answered.set()
        self._wake()

    def done(self, attempt: InFlightBatch) -> None:
        self.attempts.remove(attempt)
        self.send_due_commits()
        self.notify()

    async def wait_for_result(self) -> None:
        """Wait for an answer that matters here. Raises the error of a session that is lost."""
        self._answered = anyio.Event()
        for lane in self.all:
            lane.pipeline.flush()
        self._raise_error()
        await self._answered.wait()
        self._raise_error()

    def _raise_error(self) -> None:
        for lane in self.all:
            if lane.pipeline.error is not None:
                raise lane.pipeline.error

    async def recover(self) -> tuple[SubscriberError | None, object, list[InFlightBatch]]:
        """Roll back all uncommitted batches.

        For a rejected slice of a large transaction, the worker's own transaction stays open: the caller rolls back to
        the savepoint.

        Returns:
            The error (None after roll_back_for_lock()), the note of its statement, and the batches.
        """
        self._recovering = True
        lanes = list(self.all)  # a session that joins meanwhile has nothing to roll back
        for attempt in self.attempts:
            if attempt.commit is not None:
                attempt.commit = None
                attempt.lane.pipeline.execute("ROLLBACK", note=StatementContext("ROLLBACK"))
                attempt.lane.rolled_back()
        for lane in lanes:
            lane.pipeline.queue_sync()  # for all before waiting: one may hold a lock that another needs
            lane.pipeline.flush()
        errors = {id(lane): await lane.pipeline.recover() for lane in lanes}
        attempts, self.attempts = list(self.attempts), deque()
        for lane in lanes:
            if errors[id(lane)][0] is not None and not (lane is self._own and attempts and attempts[0].within):
                lane.pipeline.execute("ROLLBACK", note=StatementContext("ROLLBACK"))
                lane.rolled_back()
                await lane.pipeline.sync()
        self._recovering = self._retreating = False
        foremost = [errors[id(attempt.lane)] for attempt in attempts[:1]]
        error, note = next(((e, n) for e, n in [*foremost, *errors.values()] if e is not None), (None, None))
        return error, note, attempts

    # --- locks ------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines of all sessions, in the order of their turns."""
        return list(dict.fromkeys([lane.pipeline for lane in (*(a.lane for a in self.attempts), *self.all)]))

    def roll_back_for_lock(self) -> bool:
        """The first lane waits for a lock: have the others roll back, if they have anything open."""
        if self._recovering or all(attempt.commit is None for attempt in self.attempts):
            return False
        self._retreating = True
        self.notify()
        return True
