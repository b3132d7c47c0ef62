"""LockWaitMonitor: detects deadlocks between an apply worker and its parallel workers, and reports other lock waits.

Purpose. A backend that waits for a lock sends nothing. If the target has not answered for `lock_wait_interval`, another
session queries the server for the sessions that hold the lock.

Failure cases. The end of the holder's transaction may be later in the stream than the waiting change. No server can
detect such a deadlock.

- Blocked by a parallel worker, for whose end the leader does not wait: the parallel worker gives up. The leader applies
  its transaction from the spool file when it ends.
- First of the worker's sessions blocked, with `apply_sessions`: the other sessions roll back
  (targets/postgres/in_flight_batches.py). The holder may be one of the other sessions, or wait for one.
- Parallel worker blocked by a transaction that this subscription has prepared: the parallel worker gives up. A restart
  can cause this wait. The prepared transaction then exists from the start. A transaction that is streamed again may
  have locked the same row earlier, in a subtransaction that it rolled back.
- Leader blocked by a transaction that this subscription has prepared: the prepared transaction is rolled back if the
  publisher has rolled it back by now. The publisher may have sent only a part of such a transaction
  (ReorderBufferPrepare() in reorderbuffer.c). So it can hold rows here that it did not hold there. Otherwise the
  monitor raises ApplyError, because the leader applies only committed changes and cannot give up.
- Blocked by another session: the worker waits, and `subscriber status` shows the holder. After `lock_wait_log_delay`
  the log names it.
- No answer, and no lock is the reason: after `lock_wait_log_delay` the status and the log report the wait.

Source: pa_lock_stream() and pa_lock_transaction() in applyparallelworker.c. They make waits for a parallel worker
visible to the server's deadlock detector. PostgreSQL's worker does not handle waits for prepared transactions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic

import anyio

from subscriber import telemetry
from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.errors import ApplyError
from subscriber.names import prepared_prefix
from subscriber.quoting import identifier, literal
from subscriber.settings import Settings
from subscriber.sqlstate import OBJECT_IN_USE
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.two_phase import TwoPhase
from subscriber.worker.status import Report
from subscriber.worker.streaming.parallel_worker import ParallelWorker, Pool

RolledBack = Callable[[int], Awaitable[bool]]

SHOWN_AFTER = 10  # checks without an answer, after which the status shows the wait

BLOCKERS = "SELECT pid, pg_catalog.pg_blocking_pids(pid) FROM pg_catalog.unnest($1::int[]) pid"
# A prepared transaction has no process. All its locks, including the one on its xid, have the same virtual transaction.
PREPARED_BLOCKERS = """
SELECT DISTINCT x.gid
  FROM pg_catalog.pg_locks w
  JOIN pg_catalog.pg_locks h ON h.granted AND h.pid IS NULL AND h.locktype = w.locktype
       AND (h.database, h.relation, h.page, h.tuple, h.transactionid, h.classid, h.objid, h.objsubid)
           IS NOT DISTINCT FROM
           (w.database, w.relation, w.page, w.tuple, w.transactionid, w.classid, w.objid, w.objsubid)
  JOIN pg_catalog.pg_locks o ON o.pid IS NULL AND o.virtualtransaction = h.virtualtransaction
       AND o.locktype = 'transactionid' AND o.granted
  JOIN pg_catalog.pg_prepared_xacts x ON x.transaction = o.transactionid
 WHERE w.pid = $1::int AND NOT w.granted
"""
NAMES = """
SELECT pid, application_name FROM pg_catalog.pg_stat_activity WHERE pid = ANY ($1::int[]) ORDER BY pid
"""
# The lock that a session waits for, and its statement. The text of the statement does not contain parameters.
WAITS_WITH = """
SELECT pg_catalog.format('%s of %s: %s', w.locktype, coalesce(w.relation::pg_catalog.regclass::text, 'a transaction'),
                         pg_catalog.left(a.query, 500))
  FROM pg_catalog.pg_locks w JOIN pg_catalog.pg_stat_activity a ON a.pid = w.pid
 WHERE w.pid = ANY ($1::int[]) AND NOT w.granted LIMIT 1
"""
PREPARED_BY = "SELECT x.owner::text FROM pg_catalog.pg_prepared_xacts x WHERE x.gid = $1"


class LockWaitMonitor:
    """Monitors the lock waits of one apply worker, its sessions and its parallel workers."""

    def __init__(
        self,
        target: PostgresTarget,
        subid: int,
        catalog: CatalogConnection,
        report: Report,
        pool: Pool | None,
        two_phase: TwoPhase | None = None,
        rolled_back: RolledBack | None = None,
    ) -> None:
        """Create the monitor.

        Args:
            target: the apply worker's target.
            subid: OID of the subscription.
            catalog: runs the queries about locks.
            report: its status gets the description of the wait.
            pool: the parallel workers. None: there are none.
            two_phase: the prepared transactions. None: two-phase commit is off.
            rolled_back: asks the publisher whether its transaction with an xid was rolled back. None: it cannot be
                asked, and prepared transactions are not rolled back.
        """
        self._two_phase = two_phase
        self._rolled_back = rolled_back
        self._target = target
        self._subid = subid
        self._prefix = prepared_prefix(subid)
        self._catalog = catalog
        self._report = report
        self._workers: list[ParallelWorker] = pool.workers if pool is not None else []

    async def run(self, settings: Settings) -> None:
        """Check for lock waits until canceled.

        Raises:
            ApplyError: the worker waits for a prepared transaction that ends later in the stream.
        """
        seen: object = None
        checks, since, logged = 0, monotonic(), False
        while True:
            await anyio.sleep(settings.lock_wait_interval)
            waiting = self._who_waits()
            checks = checks + 1 if waiting and waiting == seen else 0
            seen = waiting
            if checks:
                holders = await self._find_holders(list(waiting), shown=checks >= SHOWN_AFTER)
                silent = monotonic() - since
                unlocked = (
                    f"an answer of the target, for {silent:.0f} s" if silent > settings.lock_wait_log_delay else None
                )
                self._report.waits_for(holders or unlocked)
                if silent > settings.lock_wait_log_delay and not logged:
                    _say(silent, list(waiting), holders)
                    logged = True
                continue
            if logged:
                what = f"the target answers again, after {monotonic() - since:.0f} s"
                telemetry.log(telemetry.LOG, what, event="target.answers")
            since, logged = monotonic(), False
            self._report.waits_for(None)

    def _who_waits(self) -> Mapping[int, object]:
        """Return the backends that the worker waits for, by process ID, each with a token for its next answer."""
        awaited = [
            worker for worker in self._workers if worker.assignment is not None and worker.assignment.is_leader_waiting
        ]
        pipelines = [*self._target.pipelines, *(worker.pipeline for worker in awaited if worker.pipeline is not None)]
        return {pipeline.session.pid: pipeline.waits_for for pipeline in pipelines if pipeline.waits_for is not None}

    async def _find_holders(self, waiting: Sequence[int], *, shown: bool) -> str | None:
        """Find the holders of the locks, and end the wait if it is a deadlock.

        Args:
            waiting: process IDs of backends that have not answered.
            shown: the wait is long enough to be reported.

        Returns:
            A description of the holders. None: nothing to report.
        """
        ours = {worker.pid: worker for worker in self._workers if worker.pid is not None}
        async with self._catalog.use() as connection:
            rows = await connection.fetch(BLOCKERS, [*waiting, *(pid for pid in ours if pid not in waiting)])
            blockers = {row[0]: row[1] for row in rows}
            prepared = {
                pid: [row[0] for row in await connection.fetch(PREPARED_BLOCKERS, pid)]
                for pid in waiting
                if 0 in blockers.get(pid, ())
            }
            if blockers.get(self._target.pipelines[0].session.pid) and self._target.roll_back_for_lock():
                return None
            victim = self._victim(waiting, blockers, prepared, ours)
            if victim is not None and victim.pid is not None:
                await worker_sessions.terminate_session(connection, self._subid, victim.pid)
                return None
            others = {pid for waiter in waiting for pid in blockers.get(waiter, ()) if pid}
            names = await connection.fetch(NAMES, list(others)) if shown and others else []
        if not shown:
            return None
        gids = [gid for ids in prepared.values() for gid in ids]
        for gid in gids:
            if gid.startswith(self._prefix):
                if not await self._forestall(gid):
                    raise _hopeless(gid, await self._waits_with(waiting))
                return None
        holders = [f'process {row[0]} ("{row[1]}")' for row in names]
        holders += [f'prepared transaction "{gid}"' for gid in gids]
        return ", ".join(holders) or None

    async def _waits_with(self, waiting: Sequence[int]) -> str:
        async with self._catalog.use() as connection:
            return str(await connection.fetchval(WAITS_WITH, list(waiting)) or "nothing any more")

    async def _forestall(self, gid: str) -> bool:
        """Roll back prepared transactions that the publisher has rolled back. Returns True if `gid` was one.

        If others were rolled back and `gid` was not, the worker fails. Its next attempt may find the row unlocked.
        """
        if self._two_phase is None or self._rolled_back is None:
            return False
        gone = [name for name in self._two_phase.names if await self._rolled_back(int(name.rpartition("_")[2]))]
        for name in gone:
            what = f'prepared transaction "{name}" is in the way, and rolled back as on the publisher'
            telemetry.log(telemetry.LOG, what)
            async with self._catalog.use() as connection:
                await _roll_back(connection, name)
            self._two_phase.forget(name)
        return gid in gone

    def _victim(
        self,
        waiting: Sequence[int],
        blockers: Mapping[int, Sequence[int]],
        prepared: Mapping[int, Sequence[str]],
        ours: Mapping[int, ParallelWorker],
    ) -> ParallelWorker | None:
        """Choose a parallel worker and make it give up. Returns None if this would not end the wait."""
        holder = _holder(waiting, blockers, ours)
        if holder is not None:
            _give_up(
                holder,
                f"Process {waiting[0]} waits for process {holder.pid}, a parallel apply worker, which waits for the end"
                f" of remote transaction {holder.xid}, which comes later in the stream.",
            )
            return holder
        stuck = _stuck(prepared, ours, self._prefix)
        if stuck is None:
            return None
        worker, gid = stuck
        _give_up(
            worker,
            f"Process {worker.pid}, a parallel apply worker of remote transaction {worker.xid}, waits for prepared"
            f' transaction "{gid}", whose end comes later in the stream.',
        )
        return worker


def _say(silent: float, waiting: Sequence[int], holders: str | None) -> None:
    process = f"Process {', '.join(map(str, waiting))} of the target waits for"
    telemetry.log(
        telemetry.WARNING,
        f"no answer from the target for {silent:.0f} s",
        detail=f"{process} {holders}."
        if holders
        else f"{process} no lock: the statement takes long, or the network has lost it.",
        event="target.silent",
    )


def _give_up(victim: ParallelWorker, why: str) -> None:
    telemetry.log(
        telemetry.ERROR,
        "deadlock detected",
        detail=why,
        hint=f"Nothing need be done: remote transaction {victim.xid} will be applied from its file when it ends.",
        event="parallel.deadlock",
        xid=victim.xid,
    )
    victim.give_up()


def _holder(
    waiting: Sequence[int], blockers: Mapping[int, Sequence[int]], workers: Mapping[int, ParallelWorker]
) -> ParallelWorker | None:
    """Return a parallel worker that blocks a waiting session and itself waits for the stream. None: there is none."""
    reached, todo = set(waiting), list(waiting)
    while todo:
        for pid in blockers.get(todo.pop(), ()):
            worker = workers.get(pid)
            if worker is None or pid in reached:
                continue
            if worker.assignment is not None and not worker.assignment.is_leader_waiting:
                return worker
            reached.add(pid)
            todo.append(pid)
    return None


def _stuck(
    prepared: Mapping[int, Sequence[str]], workers: Mapping[int, ParallelWorker], prefix: str
) -> tuple[ParallelWorker, str] | None:
    """Return a parallel worker that waits for a prepared transaction of this subscription, and the transaction's name.

    Args:
        prefix: the start of the names of this subscription's prepared transactions.
    """
    for pid, gids in prepared.items():
        for gid in gids:
            if pid in workers and gid.startswith(prefix):
                return workers[pid], gid
    return None


def _hopeless(gid: str, waits_with: str) -> ApplyError:
    return ApplyError(
        f'a lock that is needed is held by prepared transaction "{gid}" of this subscription',
        detail="It will be committed or rolled back by a message that comes later in the stream, so waiting"
        f" for it would never end. Waits for {waits_with}",
        hint="The tables have a constraint or unique index that the publisher's have not. Drop it, or finish the"
        " prepared transaction on the publisher with two_phase off for a time.",
        sqlstate=OBJECT_IN_USE,
    )


async def _roll_back(connection: Connection, gid: str) -> None:
    """Roll back a prepared transaction as the role that has prepared it, because the server requires that role."""
    owner = await connection.fetchval(PREPARED_BY, gid)
    if owner is None:
        return
    await connection.execute(f"SET ROLE {identifier(owner)}")
    try:
        await connection.execute(f"ROLLBACK PREPARED {literal(gid)}")
    finally:
        await connection.execute("RESET ROLE")
