"""Parallel apply workers: a streamed transaction is applied while it is being streamed.

Theory of operation. The apply worker, here the leader, keeps every streamed transaction in its file, whatever
becomes of it. A parallel worker follows one such file in a session of its own and applies what it finds there,
each subtransaction under a savepoint, and what stands between two savepoints set by set. So nothing waits for a
parallel worker but the end of its transaction, and what comes after a savepoint was rolled back, since it may need
rows that were locked there. And a worker may give up at any time, for whatever reason: then the leader applies the
file when the transaction commits, as it does where no worker was free. What a worker cannot do right it need not do.

A worker is never ahead of the leader's commits. The leader sends commits without waiting for their answers; what
came after one in the stream may need what it made visible, so a worker is let see that part of the file only once
the target has answered.

At the end the leader waits for the worker: transactions commit in the publisher's order. The worker moves the
progress row in its own transaction, from where the leader has left it; see targets/postgres/session/progress.py.

An open transaction holds locks. If the leader, or the worker whose transaction ends now, waits for one of these,
it waits for ever, because what would end the holder comes later in the stream. worker/apply/lock_waits.py finds that,
and the holder gives up. The publisher's own locks rule most of it out; unique indexes that only the target has do not.

Each worker has a replication origin of its own, pg_<subid>_<n>: a session has one origin, an origin one session.

Kill points considered: whenever a worker's session ends, its transaction is gone, or prepared, or committed
together with the progress. A COMMIT that a dead worker's backend still has before it finds the progress row where
it was, or moved: it fails then, as any second session does.

Source: applyparallelworker.c; the deadlocks that its locks are for are described at its head.
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

from subscriber import telemetry
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.dispatcher import Dispatcher
from subscriber.apply.relation_map import RelationMap
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog import names
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import StaleCatalog, StaleMapping, SubscriberError, TextNeeded
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.settings import DEFAULTS
from subscriber.spool import record_format as spool_format
from subscriber.spool.spool import SpooledTransaction
from subscriber.targets.postgres.session.statement_context import OnConflict, StatementContext
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.apply_hooks import ApplyRules
from subscriber.worker.exception_groups import root_cause
from subscriber.worker.session.applier import Applier, Counters

Ending = Callable[[PostgresTarget], Awaitable[None]]


class AssignmentOutcome(Enum):
    OPEN = auto()
    DONE = auto()  # committed or prepared
    GIVEN_UP = auto()  # nothing of it is on the target


class Assignment:
    """One streamed transaction that a parallel worker applies; the leader's side and the worker's."""

    def __init__(
        self,
        spooled: SpooledTransaction,
        subid: int,
        rules: ApplyRules,
        messages_per_turn: int = DEFAULTS.parallel_messages_per_turn,
    ) -> None:
        """`rules` are asked with the finish LSN 0: it is not known yet."""
        self._messages_per_turn = messages_per_turn
        self.spooled = spooled
        self.transaction = RemoteTransaction(spooled.xid, Lsn(0), 0)
        self.outcome = AssignmentOutcome.OPEN
        self.conflicts: list[tuple[Conflict, StatementContext]] = []  # told when it has committed
        self.applied = 0  # changes
        self.until = 0  # what lies before this in the file may be applied
        self.relations = RelationMap()  # what it was told of tables
        self._subid = subid
        self._rules = rules
        self._counters = Counters()
        self._repeated = False
        self._position = 0  # in the file: everything before it is applied, or is just being
        self._later: deque[tuple[int, int]] = deque()  # (the leader's commit that has to be done for it, offset)
        self._savepoints: list[tuple[int, int]] = []  # (where its first change stands, xid), open ones
        self._inside: set[int] = set()  # the xids of these
        self._cut: int | None = None  # the file was cut there, and the worker has not gone back yet
        self._back = anyio.Event()  # it has
        self._ending: Ending | None = None
        self._aborted = False
        self._changed = anyio.Event()
        self._over = anyio.Event()

    # --- the leader's side ----------------------------------------------------------------------

    def extend(self, commit: int) -> None:
        """There is more in the file, for when the target has done the leader's commit of that number."""
        self._later.append((commit, self.spooled.written))

    def committed(self, commit: int) -> None:
        """The target has done the leader's commits up to that number."""
        while self._later and self._later[0][0] <= commit:
            self.until = self._later.popleft()[1]
            self._changed.set()

    async def truncate(self, offset: int) -> None:
        """The file was cut there: a subtransaction was rolled back. Wait until it is on the target, or all of it.

        What comes next in the stream may need the rows that it had locked.
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
        """The transaction was rolled back."""
        self._aborted = True
        self._changed.set()

    async def finish_with(self, ending: Ending) -> bool:
        """Wait until everything is applied and `ending` done, by the worker; false if it has given up.

        All commits of the leader are done.
        """
        self._later.clear()
        self.until = self.spooled.written
        self._ending = ending
        self._changed.set()
        await self.wait_released()
        return self.outcome is AssignmentOutcome.DONE

    @property
    def is_leader_waiting(self) -> bool:
        """Whether the leader waits for it."""
        return self.outcome is AssignmentOutcome.OPEN and (
            self._aborted or self._cut is not None or self._ending is not None
        )

    async def wait_released(self) -> None:
        """Wait until the worker has let go of it."""
        await self._over.wait()

    # --- the worker's side ----------------------------------------------------------------------

    def resolve(self, outcome: AssignmentOutcome) -> None:
        self.outcome = outcome
        self._back.set()
        self._over.set()

    def repeat(self) -> bool:
        """Have the next run() apply the file from its beginning; false if that was done before.

        The session of the one before is lost, and with it the transaction.
        """
        if self._repeated:
            return False
        self._repeated = True
        self.transaction = RemoteTransaction(self.spooled.xid, Lsn(0), 0)
        self.applied = self._position = 0
        self.conflicts.clear()
        self._savepoints.clear()
        self._inside.clear()
        return True

    async def run(self, target: PostgresTarget) -> AssignmentOutcome:
        """Apply it to its end. Raises what the target raises."""
        dispatcher = Dispatcher.replaying(self.transaction, codec=target.codec)
        self.relations = dispatcher.relations
        applier = Applier(target, dispatcher, self._rules, self._counters)
        decoder = Decoder()
        while True:
            self._changed = anyio.Event()
            if self._aborted:
                await target.roll_back(self.transaction)
                await target.sync()
                return AssignmentOutcome.GIVEN_UP
            if self._cut is not None:
                await self._go_back(target, self._cut)
            if self._position < self.until and await self._apply_chunks(target, applier, decoder):
                continue
            if self._ending is not None:
                await target.leave_batch_mode(self.transaction)
                await self._ending(target)
                reach(Point.PARALLEL_DONE)
                return AssignmentOutcome.DONE
            await target.flush_transaction(self.transaction)
            target.flush()
            await self._changed.wait()

    async def _apply_chunks(self, target: PostgresTarget, applier: Applier, decoder: Decoder) -> bool:
        """What may be applied; false if nothing can be read just now: the file is being cut."""
        before = self._position
        async for records in self.spooled.read(self._position):
            for run in _runs(records, self._messages_per_turn):
                if self._cut is not None or self._aborted or run[0][0] >= self.until:
                    return True
                allowed = [record for record in run if record[0] < self.until]
                await self._apply_run(allowed, target, applier, decoder)
                if len(allowed) < len(run):  # more may be allowed by now: it begins in the middle of this run
                    return True
            target.flush()
            telemetry.log(
                telemetry.DEBUG, f"applied {len(records)} changes in the streaming chunk", xid=self.spooled.xid
            )
        return self._position > before

    async def _apply_run(
        self, run: Sequence[spool_format.Record], target: PostgresTarget, applier: Applier, decoder: Decoder
    ) -> None:
        """Changes that one (sub)transaction made one after another; the first of a subtransaction needs a savepoint."""
        offset, xid, _ = run[0]
        if xid != self.spooled.xid and xid not in self._inside:
            self._inside.add(xid)
            self._savepoints.append((offset, xid))
            await target.savepoint(self.transaction, self._name(xid))
        self._position = spool_format.end(run[-1])  # a cut from now on goes back to where it has to
        self.applied += len(run)
        await applier.apply_spooled([message for _, _, message in run], decoder)
        await anyio.lowlevel.checkpoint()

    async def _go_back(self, target: PostgresTarget, offset: int) -> None:
        """Undo what was applied of the file from `offset` on."""
        undone = None
        while self._savepoints and self._savepoints[-1][0] >= offset:
            undone = self._savepoints.pop()
            self._inside.discard(undone[1])
        if undone is not None:
            await target.roll_back_to(self.transaction, self._name(undone[1]))
            await target.sync()
        self._position = min(self._position, offset)
        self._cut = None
        self._back.set()

    def _name(self, xid: int) -> str:
        return names.subtransaction_savepoint(self._subid, xid)


def _runs(records: Sequence[spool_format.Record], most: int) -> Iterator[Sequence[spool_format.Record]]:
    """`records` in pieces of at most `most`, each by one (sub)transaction."""
    for _, made in groupby(records, itemgetter(1)):
        same = list(made)
        for start in range(0, len(same), most):
            yield same[start : start + most]


Connect = Callable[[int, OnConflict], AbstractAsyncContextManager[PostgresTarget]]


class ParallelWorker:
    """A session of its own for one assignment after the other; `number` counts from 1."""

    def __init__(self, number: int, connect: Connect, on_conflict: OnConflict) -> None:
        self.number = number
        self.assignment: Assignment | None = None
        self.pipeline: Pipeline | None = None  # of its session on the target, while it has one
        self._connect = connect
        self._on_conflict = on_conflict
        self._scope = anyio.CancelScope()
        self._assigned = anyio.Event()

    @property
    def pid(self) -> int | None:
        """Of its backend on the target; None while it has none."""
        return self.pipeline.session.pid if self.pipeline is not None else None

    @property
    def xid(self) -> int:
        """The remote transaction that it applies; 0 for none."""
        return self.assignment.spooled.xid if self.assignment is not None else 0

    def assign(self, assignment: Assignment) -> None:
        """Have it begin; it has nothing to do now."""
        self.assignment = assignment
        self._assigned.set()

    def give_up(self) -> None:
        """Leave the assignment alone, and the session, whose backend may be waiting for a lock."""
        self._scope.cancel()

    async def run(self) -> None:
        """Until cancelled. No error of an assignment leaves this."""
        with telemetry.bound(worker="parallel apply"):
            while True:
                await self._assigned.wait()
                with anyio.CancelScope() as self._scope:
                    try:
                        async with self._connect(self.number, self._conflict) as target:
                            self.pipeline = target.rows.pipeline
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
        """Everything that is assigned, until the session fails."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(target.watch)
                while True:
                    await self._assigned.wait()
                    assert self.assignment is not None
                    self._release(self.assignment, await self.assignment.run(target))
        except BaseExceptionGroup as group:
            cause = root_cause(group)
            raise target.rows.explain(cause) if isinstance(cause, SubscriberError) else cause from None

    def _release(self, assignment: Assignment, outcome: AssignmentOutcome) -> None:
        self.assignment = None
        self._assigned = anyio.Event()
        if outcome is AssignmentOutcome.DONE:
            for found, note in assignment.conflicts:
                self._on_conflict(found, note)
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
    """The parallel workers of one apply worker; a session is opened when it is first needed, and kept."""

    def __init__(self, size: int, connect: Connect, on_conflict: OnConflict) -> None:
        """`connect(number, on_conflict)` opens the session of worker `number`; `on_conflict` is told at commit."""
        self.workers: list[ParallelWorker] = []
        self._size = size
        self._connect = connect
        self._on_conflict = on_conflict
        self._tasks: TaskGroup | None = None

    def start(self, tasks: TaskGroup) -> None:
        """Run the workers in `tasks` from now on."""
        self._tasks = tasks

    def assign(self, assignment: Assignment) -> ParallelWorker | None:
        """Give it to a worker that has nothing to do; None if there is none."""
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
