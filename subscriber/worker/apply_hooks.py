"""ApplyRules and ApplyHooks: the methods of a worker that its apply loop calls. The defaults apply every change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from subscriber.apply.hooks.config import Hooks
from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.ranges.table_ranges import Truncation
from subscriber.worker.transaction_timer import TransactionTimer


@dataclass(frozen=True, slots=True)
class Undecided:
    """A change that cannot be decided yet.

    Other tasks change the states on which a decision depends. So a decision has no await: it returns what it has to
    wait for. After the wait the caller decides again, from should_apply() on.

    Attributes:
        wait: to be awaited before the change is decided again.
        maps_again: the table has to be mapped again, too.
    """

    wait: Callable[[], Awaitable[None]]
    maps_again: bool = False


class ApplyRules:
    """Rules for single changes: which are applied, and how they are changed before.

    Attributes:
        table_hooks: the program's hooks for its tables. None: there are none.
        verify_binary_types: compare the types of each table with the target's. True if values are requested in binary
            although the subscription has not set it.
    """

    table_hooks: Hooks | None = None
    verify_binary_types = False

    def should_apply(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        """Return True if the changes of a transaction to a table are to be applied.

        Args:
            table: the table of the target.
            finish_lsn: the finish LSN of the transaction. 0: the transaction is still being streamed.

        Raises:
            SubscriberError: the table cannot be a target now, for example because it was replaced.
        """
        return True

    def change_during_copy(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> Insert | Update | Delete | Undecided | None:
        """Return the part of a change to apply to a table for which should_apply() has just returned False.

        Args:
            transaction: the transaction of the change.
            mapping: the table.
            change: the change.

        Returns:
            None if nothing of the change is to be applied.

        Raises:
            ApplyError: the change cannot be applied while the table is copied.
        """
        return None

    def truncate_during_copy(
        self, transaction: RemoteTransaction, mappings: Sequence[RelationMapping]
    ) -> Sequence[Truncation] | Undecided:
        """Return the effect of a TRUNCATE on each table for which should_apply() has just returned False.

        Args:
            transaction: the transaction of the TRUNCATE.
            mappings: the tables.

        Raises:
            ApplyError: the TRUNCATE cannot be applied while a table is copied.
        """
        return [Truncation(whole=False)] * len(mappings)

    async def delete_during_copy(
        self, transaction: RemoteTransaction, mapping: RelationMapping, conditions: Sequence[str]
    ) -> None:
        """Delete the rows of a table that a TRUNCATE concerns.

        Args:
            transaction: the transaction of the TRUNCATE.
            mapping: the table.
            conditions: SQL conditions of the rows.
        """


class ApplyHooks(ApplyRules):
    """Rules for changes, and actions of the worker between transactions.

    Attributes:
        background_tasks: tasks that run concurrently with the loop, in its task group, until it ends.
        timer: measures the transactions of the stream. None: they are not measured.
    """

    background_tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    timer: TransactionTimer | None = None

    def needs_boundary(self, position: Lsn) -> bool:
        """Return False if the loop may skip `before_transaction()` and `on_boundary()` up to `position`.

        The answer is False only if neither method would act at `position` or before it.
        """
        return True

    async def before_transaction(self, finish_lsn: Lsn) -> None:
        """Wait until a transaction may become visible on the target. Called while none of its changes is visible.

        Args:
            finish_lsn: the finish LSN of the transaction.
        """

    async def on_boundary(self, position: Lsn) -> bool:
        """Act between two transactions. Called at the start, after commits, and when the stream pauses.

        Args:
            position: the end of the processed part of the stream.

        Returns:
            True to end the loop.

        Raises:
            SubscriberError: ends the loop with this error.
        """
        return False

    def hides_apply_position(self) -> bool:
        """Return True while the apply position in status updates must not advance."""
        return False
