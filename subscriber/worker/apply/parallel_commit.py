"""ParallelCommit: ends a transaction that a parallel worker has applied, in the publisher's commit order.

The parallel worker commits in its own session, and its commit moves the progress record from the leader's last
position. So the leader waits for its own commits and passes its progress to the worker. Then it waits for the worker's
commit and sets its progress to the end of that transaction.

Source: apply_handle_stream_commit() and apply_handle_stream_prepare() in worker.c, TRANS_LEADER_SEND_TO_PARALLEL.
"""

from __future__ import annotations

from subscriber.apply.transaction import RemoteTransaction
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.two_phase import TwoPhase
from subscriber.worker.apply.skip import TransactionSkipper
from subscriber.worker.streaming.parallel_worker import Assignment


class ParallelCommit:
    """Ends the transactions of the parallel workers of one apply worker. `leader` has the apply worker's session."""

    def __init__(self, leader: PostgresTarget, two_phase: TwoPhase | None, skipper: TransactionSkipper) -> None:
        self._leader = leader
        self._two_phase = two_phase
        self._skipper = skipper

    async def finish(self, assignment: Assignment, transaction: RemoteTransaction, end_lsn: Lsn) -> bool:
        """Make the worker commit or prepare the transaction, and wait for it.

        Args:
            assignment: the transaction as the worker has it.
            transaction: the transaction as its last message describes it, with a gid if it is prepared.
            end_lsn: the position after the transaction.

        Returns:
            False if the worker has given up: the target has none of the transaction's changes.

        Raises:
            SubscriberError: the leader's session fails.
        """

        async def end(session: PostgresTarget) -> None:
            applied = assignment.transaction
            session.row_applier.progress.follow(self._leader.row_applier.position)
            if transaction.gid is not None:
                assert self._two_phase is not None
                await self._two_phase.prepare(applied, end_lsn, session)
                return
            await self._skipper.on_commit(applied, session)
            if applied.is_open_on_target:
                await session.commit(applied, end_lsn, lambda: None)
                await session.sync()

        await self._leader.sync()
        await reached(Point.LEADER_SYNCED)
        if not await assignment.finish_with(end):
            return False
        if transaction.gid is None and assignment.transaction.is_open_on_target:
            self._leader.row_applier.progress.follow(end_lsn)
        return True
