"""ALTER SUBSCRIPTION … SKIP (lsn = …): one transaction is passed over, as a whole.

The position to skip is cleared in the same local transaction that moves the progress past the skipped
one, so neither a crash nor a retry skips twice or not at all. A transaction with another finish position
that is applied first clears it as well: the user named one that does not come.

Source: maybe_start_skipping_changes(), stop_skipping_changes(), clear_subscription_skip_lsn() in worker.c.
"""

from __future__ import annotations

from collections.abc import Callable

from subscriber import telemetry
from subscriber.apply.transaction import RemoteTransaction, TransactionState
from subscriber.lsn import Lsn
from subscriber.targets.postgres.target import PostgresTarget


class TransactionSkipper:
    def __init__(
        self, target: PostgresTarget, subscription: str, wanted: Callable[[], Lsn], cleared: Callable[[], None]
    ) -> None:
        """`wanted` is the position to skip, 0 for none; `cleared` is called when it has been cleared."""
        self._target = target
        self._subscription = subscription
        self._wanted = wanted
        self._cleared = cleared

    def on_begin(self, transaction: RemoteTransaction) -> None:
        """A transaction begins: is it the one?"""
        if transaction.finish_lsn == self._wanted():
            transaction.state = TransactionState.SKIP
            self._log("starts", transaction)

    def _is_active(self, transaction: RemoteTransaction) -> bool:
        return bool(self._wanted()) and (transaction.state is TransactionState.SKIP or transaction.is_open_on_target)

    async def on_commit(self, transaction: RemoteTransaction, session: PostgresTarget | None = None) -> None:
        """Clear the position with the transaction that ends, if it was that one or anything was applied.

        Args:
            session: that has applied the transaction; None: the apply worker's own.
        """
        if not self._is_active(transaction):
            return
        target = session or self._target
        await target.leave_batch_mode(transaction)
        wanted = self._wanted()
        target.rows.clear_skip_lsn(transaction, wanted)
        self._cleared()
        if transaction.state is TransactionState.SKIP:
            self._log("completed", transaction)
            return
        telemetry.log(
            telemetry.WARNING,
            f'skip-LSN of subscription "{self._subscription}" cleared',
            detail=f"Remote transaction's finish WAL location (LSN) {transaction.finish_lsn} "
            f"did not match skip-LSN {wanted}.",
            event="apply.skip",
            xid=transaction.xid,
            finish_lsn=transaction.finish_lsn,
        )

    def _log(self, what: str, transaction: RemoteTransaction) -> None:
        telemetry.log(
            telemetry.LOG,
            f"logical replication {what} skipping transaction at LSN {transaction.finish_lsn}",
            event="apply.skip",
            xid=transaction.xid,
            finish_lsn=transaction.finish_lsn,
        )
