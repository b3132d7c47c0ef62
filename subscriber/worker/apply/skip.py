"""ALTER SUBSCRIPTION … SKIP (lsn = …): one transaction is passed over, as a whole.

The position to skip is cleared in the same local transaction that moves the progress past the skipped
one, so neither a crash nor a retry skips twice or not at all. A transaction with another finish position
that is applied first clears it as well: the user named one that does not come.

Source: maybe_start_skipping_changes(), stop_skipping_changes(), clear_subscription_skip_lsn() in worker.c.
"""

from __future__ import annotations

from collections.abc import Callable

from subscriber import telemetry
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.targets.postgres.row_applier import PostgresTarget


class TransactionSkipper:
    def __init__(self, subscription: str, wanted: Callable[[], Lsn], cleared: Callable[[], None]) -> None:
        """`wanted` is the position to skip, 0 for none; `cleared` is called when it has been."""
        self._subscription = subscription
        self._wanted = wanted
        self._cleared = cleared

    def on_begin(self, transaction: RemoteTransaction) -> None:
        """A transaction begins: is it the one?"""
        if transaction.finish_lsn == self._wanted():
            transaction.skipped = True
            self._log("starts", transaction)

    def is_active(self, transaction: RemoteTransaction) -> bool:
        """Whether close() has something to do."""
        return bool(self._wanted()) and (transaction.skipped or transaction.is_open_on_target)

    def on_commit(self, target: PostgresTarget, transaction: RemoteTransaction) -> None:
        """It ends: clear the position with it, if it was that one or anything was applied."""
        if not self.is_active(transaction):
            return
        wanted = self._wanted()
        target.clear_skip_lsn(transaction, wanted)
        self._cleared()
        if transaction.skipped:
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
