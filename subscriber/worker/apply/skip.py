"""TransactionSkipper: skips one whole transaction, as requested by ALTER SUBSCRIPTION … SKIP (lsn = …).

The transaction that moves the progress past the skipped one also clears the position in the catalog. So the position is
used exactly once, with crashes and retries too. If a transaction with another finish position is applied first, it
clears the position as well. In that case the stream does not contain the transaction that the user named.

Source: maybe_start_skipping_changes(), stop_skipping_changes(), clear_subscription_skip_lsn() in worker.c.
"""

from __future__ import annotations

from collections.abc import Callable

from subscriber import telemetry
from subscriber.apply.transaction import RemoteTransaction, TransactionState
from subscriber.catalog.store.subscriptions import CLEAR_SKIP
from subscriber.lsn import Lsn
from subscriber.targets.postgres.target import PostgresTarget


class TransactionSkipper:
    """Skips transactions of one apply worker."""

    def __init__(
        self, target: PostgresTarget, subscription: str, wanted: Callable[[], Lsn], cleared: Callable[[], None]
    ) -> None:
        """Create the skipper.

        Args:
            target: the apply worker's target.
            subscription: the name of the subscription.
            wanted: returns the finish LSN of the transaction to skip. 0: there is none.
            cleared: called when the statement that clears the position has been queued.
        """
        self._target = target
        self._subscription = subscription
        self._wanted = wanted
        self._cleared = cleared

    def is_named(self, transaction: RemoteTransaction) -> bool:
        """Return True if the transaction is the requested one."""
        return transaction.finish_lsn == self._wanted()

    def on_begin(self, transaction: RemoteTransaction) -> None:
        """Mark the transaction as skipped if its finish LSN is the requested one."""
        if self.is_named(transaction):
            transaction.state = TransactionState.SKIP
            self._log("starts", transaction)

    def _is_active(self, transaction: RemoteTransaction) -> bool:
        return bool(self._wanted()) and (transaction.state is TransactionState.SKIP or transaction.is_open_on_target)

    async def on_commit(self, transaction: RemoteTransaction, session: PostgresTarget | None = None) -> None:
        """Clear the position in the transaction that ends, if it was skipped or has changed rows.

        The named transaction may have begun before the statement that names it. Its next attempt skips it.

        Args:
            transaction: the transaction that ends.
            session: the session that has applied the transaction. None: the apply worker's.
        """
        if not self._is_active(transaction):
            return
        if transaction.state is not TransactionState.SKIP and self.is_named(transaction):
            return
        target = session or self._target
        await target.leave_batch_mode(transaction)
        wanted = self._wanted()
        target.row_applier.execute_at_end(transaction, CLEAR_SKIP, str(wanted))
        self._cleared()
        if transaction.state is TransactionState.SKIP:
            self._log("completed", transaction)
            return
        position = self._target.wording.position
        telemetry.log(
            telemetry.WARNING,
            f'skip-LSN of subscription "{self._subscription}" cleared',
            detail=f"Remote transaction's finish WAL location (LSN) {position(transaction.finish_lsn)} "
            f"did not match skip-LSN {position(wanted)}.",
            event="apply.skip",
            xid=transaction.xid,
            finish_lsn=transaction.finish_lsn,
        )

    def _log(self, what: str, transaction: RemoteTransaction) -> None:
        position = self._target.wording.position(transaction.finish_lsn)
        telemetry.log(
            telemetry.LOG,
            f"logical replication {what} skipping transaction at LSN {position}",
            event="apply.skip",
            xid=transaction.xid,
            finish_lsn=transaction.finish_lsn,
        )
