"""A transaction of the publisher on its way to the target."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from subscriber.lsn import Lsn


class TransactionState(Enum):
    """The handling of a transaction's changes."""

    APPLY = auto()
    SKIP = auto()  # ALTER SUBSCRIPTION … SKIP named it: its changes are ignored
    ALREADY_PREPARED = auto()  # it was prepared before a restart and is sent again: its changes are on the target


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
    state: TransactionState = TransactionState.APPLY

    @property
    def outlives_commit_order(self) -> bool:
        """True if others commit while the target holds its rows: it will be prepared, or is still being streamed."""
        return self.gid is not None or not self.finish_lsn
