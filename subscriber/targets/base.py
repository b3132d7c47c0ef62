"""The contract between the apply loop and a target: what to implement in order to apply changes somewhere else.

Purpose. `worker/apply/loop.py` decodes the change stream and calls a Target. `targets/postgres/` applies to PostgreSQL;
`examples/list_target.py` is a complete target in a few lines; `subscriber/target_contract.py` tests any target.

Invariants.

- One task makes all calls, one after another. Only `watch()` runs concurrently.
- Transactions arrive whole and in commit order: `change()` and `truncate()` of one transaction, then its `commit()`.
  The next transaction begins after that. A transaction in which nothing was changed has no `commit()`.
- The rows of a transaction and its position become durable together, or neither does. After a restart the stream
  begins at the durable position, so a transaction that was not confirmed is sent again.
- Methods may return before the target has done the work. A failure is raised by any later call, or by `watch()`.
  After a failure nothing of a later transaction may become visible.

Failure cases.

- A call is canceled, or raises: the target is closed and never called again. An open transaction has to be rolled back.
- The process ends between the commit on the target and `on_committed`: the durable position is ahead of what the
  publisher knows. The publisher sends from the older position; the apply loop begins at `position`.

Source: apply_handle_insert() and the functions beside it in worker.c.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping

import anyio

from subscriber.apply.batch.batch import AppendedChanges, AppendResult, CommitCallbacks
from subscriber.apply.relation_map import LocalRelation, RelationMap, RelationMapping, map_same_columns
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Relation, Truncate, Update
from subscriber.protocol.tuple_data import UNCHANGED as UNCHANGED_VALUE

# All that a target has to import.
__all__ = [
    "UNCHANGED_VALUE",
    "AppendResult",
    "AppendedChanges",
    "CommitCallbacks",
    "Delete",
    "Insert",
    "Lsn",
    "Relation",
    "RelationMap",
    "RelationMapping",
    "RemoteTransaction",
    "ShouldApply",
    "Target",
    "Truncate",
    "Update",
    "map_same_columns",
]

# (table of the target, finish LSN of the transaction) -> whether changes of the table are to be applied
ShouldApply = Callable[[LocalRelation, Lsn], bool]


class Target(ABC):
    """One session with a target, used by one apply loop. The first five methods have to be implemented."""

    origin: str = "target"  # in the CONTEXT of errors: 'processing remote data for replication origin "…"'
    # Changes that were not applied in batches, by the reason. Empty for a target that has no batches.
    row_by_row_reasons: Mapping[str, int] = Counter()
    on_progress: Callable[[], None] = staticmethod(lambda: None)  # to be called when on_idle() has more to do

    @property
    def codec(self) -> str:
        """Python's name for the encoding in which the publisher is to send texts, see protocol/encodings.py."""
        return "utf-8"

    @property
    @abstractmethod
    def position(self) -> Lsn:
        """The end of the last transaction that was given to `commit()`, or of the one that is durable at the start."""

    @abstractmethod
    async def map_relation(self, remote: Relation) -> RelationMapping:
        """Find the table for a published one.

        Called for the first change of a table, and again after the publisher has described the table again.

        Args:
            remote: the published table: names, OIDs of types, replica identity.

        Returns:
            The mapping. A target that knows its tables makes it with `map_relation()` of `apply/relation_map.py`,
            which checks the columns; any other with `map_same_columns()`. Later calls get the same object.

        Raises:
            MappingError: there is no such table, or its columns do not fit.

        Cancellation: nothing was changed.
        """

    @abstractmethod
    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        """Apply the change of one row.

        The target opens its own transaction if this is the first change, and sets `transaction.is_open_on_target`.
        A row that an UPDATE or DELETE does not find is not an error.

        Args:
            transaction: the same object until its `commit()`.
            mapping: from `map_relation()`.
            change: rows are as the publisher sent them. `TupleData.split()` gives a status byte and a value for each of
                `mapping.remote.columns`: None is NULL, and a status of UNCHANGED_VALUE means that the value is the old
                one. `old` has the values that `mapping.search` finds the row by; an UPDATE without `old` has not
                changed them. `mapping.search` is None where all values of `old` have to be equal: then one such row
                is changed.

        Raises:
            ApplyError: the target cannot apply the change, now or an earlier one.

        Cancellation: the transaction has to be rolled back.
        """

    @abstractmethod
    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        """Remove all rows of all `mappings` in one statement; else as `change()`."""

    @abstractmethod
    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Commit the rows of the open transaction and the position together.

        Args:
            transaction: one with `is_open_on_target`.
            end_lsn: the position after the transaction, for `position` and for the next start.
            on_committed: to be called once, when the transaction is visible and committed. Where several are
                committed together, the call for the last one is enough. The calls are made in commit order.

        Raises:
            ApplyError: the commit failed, or something before it did.

        Cancellation: the transaction is committed with its position, or not at all.
        """

    def flush(self) -> None:
        """Send queued statements to the server, and return without waiting for results."""

    async def sync(self) -> None:
        """Wait until everything that was given is applied and committed, apart from an open transaction."""

    async def watch(self) -> None:
        """Wait until the target fails, and raise its error. Runs beside the calls until it is canceled."""
        await anyio.sleep_forever()

    async def on_idle(self) -> None:
        """Do the work that waits for a pause of the stream, for instance commit a batch."""

    # --- for targets that take changes without decoding them ----------------------------------------

    def append_raw_changes(
        self,
        transaction: RemoteTransaction,
        waiting: deque[bytes],
        limit: int,
        relations: RelationMap,
        should_apply: ShouldApply,
    ) -> AppendedChanges:
        """Take changes of `transaction` off the front of `waiting`, as the walsender sent them.

        Args:
            waiting: payloads of XLogData. Those that were taken are removed.
            limit: payloads at most.
            relations: the mappings that `map_relation()` made, by the publisher's OID.
            should_apply: a change of another table must not be taken.

        Returns:
            The number of changes, and their bytes; 0 and 0 where `change()` has to see the next one. `flush_if_full()`
            follows.
        """
        return AppendedChanges(0, 0)

    def append_raw_transactions(
        self,
        waiting: deque[bytes],
        limit: int,
        relations: RelationMap,
        should_apply: ShouldApply,
        ends: CommitCallbacks,
    ) -> AppendResult | None:
        """Take whole transactions off the front of `waiting`, up to `limit` changes, each as if it was committed.

        Called between transactions only.

        Returns:
            None where there are none to be taken. `flush_if_full()` follows.
        """
        return None

    async def flush_if_full(self) -> None:
        """Apply the current batch if it has reached its size limit."""

    def set_small_backlog(self, few: bool) -> bool:
        """Announce whether the changes until the next `on_idle()` are a `few` whole transactions.

        Returns:
            True if these changes must not be offered to `append_raw_changes()`.
        """
        return few
