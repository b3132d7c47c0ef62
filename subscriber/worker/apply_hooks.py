"""ApplyRules and ApplyHooks: the methods of a worker that its apply loop calls. The defaults apply every change."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from subscriber.apply.hooks.config import Hooks
from subscriber.apply.relation_map import LocalRelation
from subscriber.lsn import Lsn


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


class ApplyHooks(ApplyRules):
    """Rules for changes, and actions of the worker between transactions.

    Attributes:
        background_tasks: tasks that run concurrently with the loop, in its task group, until it ends.
    """

    background_tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()

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
