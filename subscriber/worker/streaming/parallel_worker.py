"""Parallel apply workers: apply a streamed transaction while the publisher is streaming it.

Purpose. The apply worker, here the leader, writes every streamed transaction to its spool file. A parallel worker
follows one such file and applies it in its own session. Each subtransaction has a savepoint. Changes between two
savepoints are applied in batches.

Invariants.

- The file is always written, so a parallel worker may give up at any time and for any reason. Then the leader applies
  the file when the transaction commits, as it does if no worker was free.
- The leader waits for a parallel worker in three cases. They are the end of the worker's transaction, its abort, and
  the rollback of one of its subtransactions. Later changes in the stream may need rows that the subtransaction locked.
- A parallel worker is never ahead of the leader's commits. The leader sends commits without waiting for the results,
  and later changes may depend on these commits. So the worker may read a part of the file only after the target has
  acknowledged the commits that precede it in the stream.
- In tables without a key, a transaction that is applied while others are in progress changes rows that it has made
  itself before other equal rows (RowApplier.shares_rows()). Else it can take the row that another one needs, and leave
  a row that the other one's statement does not see yet.
- Transactions commit in the publisher's order. At the end the leader waits for the worker. The worker's transaction
  moves the progress record from the leader's last position (targets/postgres/session/progress.py).
- Each worker has its own replication origin, pg_<subid>_<n>. A session has one origin, and an origin has one session.

Failure cases.

- Leader, or the worker whose transaction ends now, blocked by a lock of another streamed transaction: a deadlock. The
  end of that transaction is later in the stream. worker/apply/lock_waits.py detects it, and the holder gives up. The
  publisher's own locks exclude most such deadlocks, but not those at unique indexes that only the target has.
- Worker's session ends: its transaction is rolled back, or prepared, or committed together with the progress.
- Backend of a dead worker processes a COMMIT late: the COMMIT fails if the progress record has moved since, as in any
  second session.

Source: applyparallelworker.c. Its header describes the deadlocks that its locks make visible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from itertools import groupby
from operator import itemgetter

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from subscriber import names, telemetry
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.dispatcher import Dispatcher
from subscriber.apply.relation_map import RelationMap
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import StaleCatalog, StaleMapping, SubscriberError, TextNeeded
from subscriber.exception_groups import root_cause
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.settings import DEFAULTS, Settings
from subscriber.spool import record_format as spool_format
from subscriber.spool.spool import SpooledTransaction
from subscriber.targets.postgres.session.statement_context import OnConflict, StatementContext
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.apply_hooks import ApplyRules
from subscriber.worker.session.applier import Applier, Counters

Ending = Callable[[PostgresTarget], Awaitable[None]]


class AssignmentOutcome(Enum):
    """The state of an assignment."""

    OPEN = auto()
    DONE = auto()  # committed or prepared
    GIVEN_UP = auto()  # rolled back: the target has none of its changes


class Assignment:
    """A streamed transaction that a parallel worker applies.

    The leader calls the methods of the first section, and the parallel worker those of the second.

    Attributes:
        spooled: the file of the transaction.
        transaction: the state of the transaction in the worker's session.
        outcome: the state of the assignment.
        conflicts: conflicts of the transaction. They are reported after its commit.
        applied: the number of applied changes.
        until: offset in the file. The worker may apply changes before it.
        relations: the tables that the publisher described in this transaction.
    """

    def __init__(
        self,
        spooled: SpooledTransaction,
        subid: int,
        rules: ApplyRules,
        settings: Settings = DEFAULTS,
    ) -> None:
        """Create the assignment. `rules` are called with finish LSN 0, because the real one is not known yet."""
        self._messages_per_turn = settings.parallel_messages_per_turn
        self._relation_limit = settings.relation_cache_size
        self.spooled = spooled
        self.transaction = RemoteTransaction(spooled.xid, Lsn(0), 0)
        self.outcome = AssignmentOutcome.OPEN
        self.conflicts: list[tuple[Conflict, StatementContext]] = []
        self.applied = 0
        self.until = 0
        self.relations = RelationMap()
        self._subid = subid
        self._rules = rules
        self._counters = Counters()
        self._repeated = False
        self._reported = 0  # of `applied`, by _report_applied()
        self._position = 0  # offset in the file: all changes before it are applied, or being applied
        self._later: deque[tuple[int, int]] = deque()  # (required commit of the leader, offset)
        self._savepoints: list[tuple[int, int]] = []  # open savepoints: (offset of the first change, xid)
        self._inside: set[int] = set()  # xids of `_savepoints`
        self._cut: int | None = None  # new length of the truncated file; None: the worker has rolled back to it
        self._back = anyio.Event()  # set when the worker has rolled back to `_cut`
        self._ending: Ending | None = None
        self._aborted = False
        self._changed = anyio.Event()
        self._over = anyio.Event()

    # --- the leader's side ----------------------------------------------------------------------

    def extend(self, commit: int) -> None:
        """Let the worker apply what the file contains now, as soon as the leader's commit `commit` is done."""
        self._later.append((commit, self.spooled.written))

    def committed(self, commit: int) -> None:
        """Record that the target has done the leader's commits up to number `commit`."""
        while self._later and self._later[0][0] <= commit:
            self.until = self._later.popleft()[1]
            self._changed.set()

    async def truncate(self, offset: int) -> None:
        """Roll back to `offset`, at which the file was truncated, and wait until the worker has done so.

        A subtransaction was rolled back on the publisher. Later changes may need the rows that it has locked. The wait
        also ends if the worker gives up, which rolls back the whole transaction.
        """
        if self.outcome is not AssignmentOutcome.OPEN:
            return
        self._cut = offset
        self.until = min(self.until, offset)
        self._later = deque((commit, min(until, offset)) for commit, until in self._later)
        self._back = anyio.Event()
        self._changed.set()
        await self._back.wait()

    def abort(self) -> None:
        """Make the worker roll back the transaction. Does not wait for it."""
        self._aborted = True
        self._changed.set()

    async def finish_with(self, ending: Ending) -> bool:
        """Make the worker apply the rest of the file and call `ending`, and wait for it.

        Called when all commits of the leader are done.

        Args:
            ending: commits or prepares the transaction in the worker's session.

        Returns:
            False if the worker has given up.
        """
        self._later.clear()
        self.until = self.spooled.written
        self._ending = ending
        self._changed.set()
        await self.wait_released()
        return self.outcome is AssignmentOutcome.DONE

    @property
    def is_leader_waiting(self) -> bool:
        """True if the leader waits for an end, an abort, or a rollback of a subtransaction."""
        return self.outcome is AssignmentOutcome.OPEN and (
            self._aborted or self._cut is not None or self._ending is not None
        )

    async def wait_released(self) -> None:
        """Wait until the worker has finished the assignment or given it up."""
        await self._over.wait()

    # --- the worker's side ----------------------------------------------------------------------

    def resolve(self, outcome: AssignmentOutcome) -> None:
        """Set the outcome, and end the leader's waits."""
        self.outcome = outcome
        self._back.set()
        self._over.set()

    def repeat(self) -> bool:
        """Reset the assignment, so that the next run() applies the file from its start.

        Called after the session was lost, which has rolled back the transaction.

        Returns:
            False if the assignment was repeated before.
        """
        if self._repeated:
            return False
        self._repeated = True
        self.transaction = RemoteTransaction(self.spooled.xid, Lsn(0), 0)
        self.applied = self._position = self._reported = 0
        self.conflicts.clear()
        self._savepoints.clear()
        self._inside.clear()
        return True

    async def run(self, target: PostgresTarget) -> AssignmentOutcome:
        """Apply the transaction to its end.

        Returns:
            DONE, or GIVEN_UP after abort().

        Raises:
            SubscriberError: the target has failed, or has rejected a change.
        """
        dispatcher = Dispatcher.replaying(self.transaction, codec=target.codec, relation_limit=self._relation_limit)
        self.relations = dispatcher.relations
        applier = Applier(target, dispatcher, self._rules, self._counters)
        decoder = Decoder()
        while True:
            self._changed = anyio.Event()
            if self._aborted:
                await target.roll_back(self.transaction)
                await target.sync()
                await reached(Point.PARALLEL_ROLLED_BACK)
                return AssignmentOutcome.GIVEN_UP
            if self._cut is not None:
                await self._go_back(target, self._cut)
            if self._position < self.until and await self._apply_chunks(target, applier, decoder):
                continue
            if self._ending is not None:
                await target.leave_batch_mode(self.transaction)
                self._report_applied()
                await self._ending(target)
                await reached(Point.PARALLEL_DONE)
                return AssignmentOutcome.DONE
            await target.flush_transaction(self.transaction)
            target.flush()
            self._report_applied()
            await self._changed.wait()
            await reached(Point.PARALLEL_WOKEN)

    async def _apply_chunks(self, target: PostgresTarget, applier: Applier, decoder: Decoder) -> bool:
        """Apply the changes before `until`. Returns False if the file cannot be read, because it is being truncated."""
        before = self._position
        async for records in self.spooled.read(self._position):
            for run in _runs(records, self._messages_per_turn):
                if self._cut is not None or self._aborted or run[0][0] >= self.until:
                    return True
                allowed = [record for record in run if record[0] < self.until]
                await self._apply_run(allowed, target, applier, decoder)
                # `until` may have advanced. The next change is in the middle of this run, so the file is read again.
                if len(allowed) < len(run):
                    return True
            target.flush()
        return self._position > before

    def _report_applied(self) -> None:
        """Log how many changes have been applied since the last call. None is held back in a batch."""
        if (number := self.applied - self._reported) > 0:
            telemetry.log(telemetry.DEBUG, f"applied {number} changes in the streaming chunk", xid=self.spooled.xid)
        self._reported = self.applied

    async def _apply_run(
        self, run: Sequence[spool_format.Record], target: PostgresTarget, applier: Applier, decoder: Decoder
    ) -> None:
        """Apply consecutive changes of one (sub)transaction. A subtransaction's first change gets a savepoint."""
        offset, xid, _ = run[0]
        if xid != self.spooled.xid and xid not in self._inside:
            self._inside.add(xid)
            self._savepoints.append((offset, xid))
            await target.savepoint(self.transaction, self._name(xid))
        # Set before the changes are applied: a truncation in the meantime has to move the position back.
        self._position = spool_format.end(run[-1])
        self.applied += len(run)
        await applier.apply_spooled([message for _, _, message in run], decoder)
        await anyio.lowlevel.checkpoint()

    async def _go_back(self, target: PostgresTarget, offset: int) -> None:
        """Roll back all applied changes at or after `offset`."""
        undone = None
        while self._savepoints and self._savepoints[-1][0] >= offset:
            undone = self._savepoints.pop()
            self._inside.discard(undone[1])
        if undone is not None:
            await target.roll_back_to(self.transaction, self._name(undone[1]))
            await target.sync()
            await reached(Point.PARALLEL_ROLLED_BACK)
        self._position = min(self._position, offset)
        self._cut = None
        self._back.set()

    def _name(self, xid: int) -> str:
        return names.subtransaction_savepoint(self._subid, xid)


def _runs(records: Sequence[spool_format.Record], most: int) -> Iterator[Sequence[spool_format.Record]]:
    """Yield `records` in runs of at most `most`, each of one (sub)transaction."""
    for _, made in groupby(records, itemgetter(1)):
        same = list(made)
        for start in range(0, len(same), most):
            yield same[start : start + most]


Connect = Callable[[int, OnConflict], AbstractAsyncContextManager[PostgresTarget]]


class ParallelWorker:
    """A parallel apply worker: one session, which applies one assignment after another.

    Attributes:
        number: the number of the worker, from 1.
        assignment: the current assignment. None: the worker is free.
        pipeline: the pipeline of the worker's session. None: it has no session.
    """

    def __init__(self, number: int, connect: Connect, on_conflict: OnConflict) -> None:
        self.number = number
        self.assignment: Assignment | None = None
        self.pipeline: Pipeline | None = None
        self._connect = connect
        self._on_conflict = on_conflict
        self._scope = anyio.CancelScope()
        self._assigned = anyio.Event()

    @property
    def pid(self) -> int | None:
        """The process ID of the worker's backend on the target. None: it has no session."""
        return self.pipeline.session.pid if self.pipeline is not None else None

    @property
    def xid(self) -> int:
        """The remote transaction that the worker applies. 0: it is free."""
        return self.assignment.spooled.xid if self.assignment is not None else 0

    def assign(self, assignment: Assignment) -> None:
        """Start to apply `assignment`. The worker must be free."""
        self.assignment = assignment
        self._assigned.set()

    def give_up(self) -> None:
        """Give up the assignment and close the session. Its backend may still wait for a lock."""
        self._scope.cancel()

    async def run(self) -> None:
        """Apply assignments until canceled. A SubscriberError of an assignment is logged and not raised."""
        with telemetry.bound(worker="parallel apply"):
            while True:
                await self._assigned.wait()
                with anyio.CancelScope() as self._scope:
                    try:
                        async with self._connect(self.number, self._conflict) as target:
                            self.pipeline = target.session.pipeline
                            await self._serve(target)
                    except SubscriberError as error:
                        if isinstance(error, StaleMapping) and self.assignment is not None and self.assignment.repeat():
                            self.pipeline = None
                            continue
                        self._failed(error)
                self.pipeline = None
                if self.assignment is not None:
                    self._release(self.assignment, AssignmentOutcome.GIVEN_UP)

    async def _serve(self, target: PostgresTarget) -> None:
        """Apply assignments in one session until it fails."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(target.watch)
                while True:
                    await self._assigned.wait()
                    assert self.assignment is not None
                    self._release(self.assignment, await self.assignment.run(target))
        except BaseExceptionGroup as group:
            cause = root_cause(group)
            raise target.session.explain(cause) if isinstance(cause, SubscriberError) else cause from None

    def _release(self, assignment: Assignment, outcome: AssignmentOutcome) -> None:
        self.assignment = None
        self._assigned = anyio.Event()
        if outcome is AssignmentOutcome.DONE:
            for conflict, note in assignment.conflicts:
                self._on_conflict(conflict, note)
        assignment.resolve(outcome)

    def _failed(self, error: SubscriberError) -> None:
        if self.assignment is None:
            return
        if isinstance(error, StaleMapping | StaleCatalog | TextNeeded):
            telemetry.log(telemetry.DEBUG, f"parallel apply worker gives up: {error}", xid=self.assignment.spooled.xid)
            return
        telemetry.log_error(error)
        telemetry.log(
            telemetry.ERROR,
            "logical replication parallel apply worker exited due to error",
            detail=f"Remote transaction {self.assignment.spooled.xid} will be applied from its file when it ends.",
            event="parallel.failed",
            xid=self.assignment.spooled.xid,
        )

    def _conflict(self, found: Conflict, note: StatementContext) -> None:
        if self.assignment is not None:
            self.assignment.conflicts.append((found, note))


class Pool:
    """The parallel workers of one apply worker. A worker opens its session for its first assignment, and keeps it."""

    def __init__(self, size: int, connect: Connect, on_conflict: OnConflict) -> None:
        """Create a pool without workers.

        Args:
            size: the maximum number of workers.
            connect: opens the session of the worker with a number, and reports its conflicts to the given callback.
            on_conflict: called with each conflict after the commit of its transaction.
        """
        self.workers: list[ParallelWorker] = []
        self._size = size
        self._connect = connect
        self._on_conflict = on_conflict
        self._tasks: TaskGroup | None = None

    def is_busy(self) -> bool:
        """Return True if a worker has an assignment."""
        return any(worker.assignment is not None for worker in self.workers)

    def start(self, tasks: TaskGroup) -> None:
        """Run the workers in `tasks`. Before this call, assign() returns None."""
        self._tasks = tasks

    def assign(self, assignment: Assignment) -> ParallelWorker | None:
        """Give the assignment to a free worker, which is started if necessary. Returns None if no worker is free."""
        for worker in self.workers:
            if worker.assignment is None:
                worker.assign(assignment)
                return worker
        if self._tasks is None or len(self.workers) >= self._size:
            return None
        worker = ParallelWorker(len(self.workers) + 1, self._connect, self._on_conflict)
        self.workers.append(worker)
        self._tasks.start_soon(worker.run)
        worker.assign(assignment)
        return worker
