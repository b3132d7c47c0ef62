"""The CONTEXT line of an error: what was being applied, and the position that SKIP needs."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.lsn import Lsn


@dataclass(slots=True)
class RemoteTransaction:
    """A transaction of the publisher that is being applied.

    `finish_lsn` is where its commit record starts, or its prepare record (what SKIP takes); 0 while a streamed
    transaction has not ended. `commit_time`, of the same record, is in microseconds since 2000-01-01 00:00 UTC.
    """

    xid: int
    finish_lsn: Lsn
    commit_time: int
    gid: str | None = None  # the publisher's, of a transaction that ends with PREPARE TRANSACTION; None: with COMMIT
    is_open_on_target: bool = False  # whether the target's transaction is open
    skipped: bool = False  # ALTER SUBSCRIPTION … SKIP named it: its changes are not applied
    present: bool = False  # it was prepared before a restart and comes again: its changes are not applied again

    @property
    def passed_over(self) -> bool:
        """Whether its changes are not to be applied."""
        return self.skipped or self.present

    @property
    def outlives_commit_order(self) -> bool:
        """Whether others commit while the target holds its rows: it will be prepared, or is still being streamed."""
        return self.gid is not None or not self.finish_lsn


def error_context(
    origin: str,
    message: str,
    relation: str | None = None,
    column: str | None = None,
    transaction: RemoteTransaction | None = None,
) -> str:
    """In PostgreSQL's own words; parts that are not known are left out.

    `message` is a name as "INSERT"; `relation` as "public.t". Source: apply_error_callback() in worker.c.
    """
    line = f'processing remote data for replication origin "{origin}" during message type "{message}"'
    if relation is not None:
        line += f' for replication target relation "{relation}"'
    if column is not None:
        line += f' column "{column}"'
    if transaction is not None:
        line += f" in transaction {transaction.xid}"
        if transaction.finish_lsn:
            line += f", finished at {transaction.finish_lsn}"
    return line
