"""The contract between the apply loop and a target: what to implement in order to apply changes somewhere else.

Purpose. `worker/apply/loop.py` decodes the change stream and calls a Target. `targets/postgres/` applies to PostgreSQL,
`targets/sqlalchemy/` to databases that SQLAlchemy supports. `examples/list_target.py` is a complete target in a few
lines. `subscriber/target_contract.py` tests any target.

Invariants.

- Order. One task makes all calls, one after another. Only `watch()` runs concurrently. Transactions arrive whole and in
  commit order: `change()` and `truncate()` of one transaction, then its `commit()`. The next transaction begins after
  that. A transaction in which nothing was changed has no `commit()`.
- Waiting. The loop awaits each call before the next one. A call may return before the target has done the work. A
  failure is raised by any later call, or by `watch()`.
- Durability. The rows of a transaction and its position become durable together, or neither does. `on_committed` says
  that they are: from then on the publisher may discard the transaction.
- Grouping. A target may commit several transactions together. They become visible together, or none of them does.
- Duplicates. The stream begins at the durable position. A transaction that was not durable is sent again from its first
  change. A durable one is never sent again. A target that stores the position elsewhere than the rows has to apply the
  last transactions a second time.

Failure cases.

- A call is canceled, or raises: the target is closed and never called again. Its open transaction has to be rolled
  back, and so has each transaction that was not committed. Nothing of a later transaction may become visible.
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
from subscriber.server_version import Wording

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
    """One session with a target, used by one apply loop. Whoever has opened it closes it, which rolls back.

    The first five methods have to be implemented. The defaults of the others suit a target that does the work of each
    call before it returns.

    Attributes:
        origin: the name in the CONTEXT of errors: 'processing remote data for replication origin "…"'.
        wording: the version of PostgreSQL whose words the CONTEXT of errors and the log have.
        row_by_row_reasons: changes that were not applied in batches, by the reason. Empty: there are no batches.
        takes_payloads: `append_raw_changes()` and `append_raw_transactions()` are implemented. False: no call of them.
        on_progress: called when `on_idle()` has more to do, see `listen()`.
    """

    origin: str = "target"
    wording: Wording = Wording.POSTGRESQL_18
    row_by_row_reasons: Mapping[str, int] = Counter()
    takes_payloads = False
    on_progress: Callable[[], None] = staticmethod(lambda: None)

    def listen(self, on_progress: Callable[[], None]) -> None:
        """Take a function that the target calls when `on_idle()` has more to do. The apply loop does this once."""
        self.on_progress = on_progress

    @property
    def codec(self) -> str:
        """Python's name for the encoding in which the publisher is to send texts, see protocol/encodings.py."""
        return "utf-8"

    @property
    @abstractmethod
    def position(self) -> Lsn:
        """The end of the last transaction that was given to `commit()`, or of the one that is durable at the start.

        0: the target has no transaction yet. The stream begins at the position of the slot.
        """

    def accepts(self, published: Relation) -> bool:
        """Return True if changes of a published table are applied. False: they are ignored, and it is not mapped.

        Args:
            published: the table as the publisher describes it, before any hook.
        """
        return True

    @abstractmethod
    async def map_relation(self, remote: Relation) -> RelationMapping:
        """Find the table for a published one.

        Called for the first change of a table, and again after the publisher has described the table again, or for a
        transaction that was sent while it was in progress.

        Args:
            remote: the published table: names, OIDs of types, replica identity. A hook may have renamed the table and
                its columns. `relid` is always the publisher's.

        Returns:
            The mapping. A target that knows its tables makes it with `map_relation()` of `apply/relation_map.py`,
            which checks the columns; any other with `map_same_columns()`. A subclass can have what the target needs
            for each change. Later calls get the same object.

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

        A row that a DELETE does not find is not an error. A row that an UPDATE does not find shows that others have
        written to the target. The target ignores the UPDATE, as PostgreSQL does, or writes the new row. It raises
        ApplyError if it would write the row but not all values were sent. An INSERT of a row that exists may replace
        the row, or raise.

        Args:
            transaction: the same object until its `commit()`.
            mapping: from `map_relation()`.
            change: rows are as the publisher sent them. `TupleData.split()` gives a status byte and a value for each of
                `mapping.remote.columns`: None is NULL, and a status of UNCHANGED_VALUE means that the value is the old
                one. Texts are in `codec`, `apply_to()` requests UTF-8. `old` has the values that `mapping.search`
                finds the row by; an UPDATE without `old` has not changed them. `mapping.search` is None where all
                values of `old` have to be equal: then one such row is changed.

        Raises:
            ApplyError: the target cannot apply the change, now or an earlier one.

        Cancellation: the transaction has to be rolled back.
        """

    @abstractmethod
    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        """Remove all rows of all `mappings`, which are at least one; else as `change()`."""

    @abstractmethod
    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Commit the rows of the open transaction and the position together, now or with later transactions.

        A target that waits for later transactions commits when it has enough, and in `on_idle()` and `sync()`.

        Args:
            transaction: one with `is_open_on_target`.
            end_lsn: the position after the transaction, for `position` and for the next start.
            on_committed: to be called once, when the transaction is committed. A target that `apply_to()` uses calls
                it when the transaction is durable. Where several are committed together, the call for the last one is
                enough. The calls are made in commit order.

        Raises:
            ApplyError: the commit failed, or something before it did.

        Cancellation: the transaction is committed with its position, or not at all.
        """

    def flush(self) -> None:
        """Send queued statements to the server, and return without waiting for results. Empty: nothing is queued."""

    async def sync(self) -> None:
        """Wait until everything that was given is applied and committed, apart from an open transaction.

        Called between transactions, and before `apply_to()` returns. Empty: `commit()` waits.

        Raises:
            ApplyError: an earlier transaction could not be applied or committed.
        """

    async def watch(self) -> None:
        """Wait until the target fails, and raise its error. Runs beside the calls until it is canceled."""
        await anyio.sleep_forever()

    async def on_idle(self) -> None:
        """Do the work that waits for a pause of the stream, for instance commit a batch.

        Called each time when no change waits, also while a transaction is open. Empty: no work waits for a pause.

        Raises:
            ApplyError: as `sync()`.
        """

    # --- for targets that take changes without decoding them (takes_payloads) -----------------------

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
