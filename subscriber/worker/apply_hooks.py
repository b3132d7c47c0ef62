"""What an apply loop asks of the worker that runs it. The defaults apply every change of the stream."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from subscriber.apply.hooks.config import Hooks
from subscriber.apply.relation_map import LocalRelation
from subscriber.lsn import Lsn


class ApplyRules:
    """Which changes are applied, and what happens to them before."""

    table_hooks: Hooks | None = None  # of the program, for its tables; None: it has none
    # Values come in binary though the subscription does not say so: each table's types are compared with the target's.
    verify_binary_types = False

    def should_apply(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        """Return True if the changes of a transaction to a table of the target are to be applied.

        Args:
            table: of the target.
            finish_lsn: of the transaction; 0 while it is being streamed.
        """
        return True


class ApplyHooks(ApplyRules):
    """The same, and what the worker does between transactions."""

    # Tasks that run beside the loop, in its task group, until the loop ends.
    background_tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()

    def needs_boundary(self, position: Lsn) -> bool:
        """Return False if neither `before_transaction()` nor `on_boundary()` would act at `position`, nor before it.

        The loop need not call them then.
        """
        return True

    async def before_transaction(self, finish_lsn: Lsn) -> None:
        """Wait until a transaction may become visible on the target; none of it is yet."""

    async def on_boundary(self, position: Lsn) -> bool:
        """Act between two transactions: at every commit, and when the stream pauses.

        Returns:
            True to end the loop.
        """
        return False

    def hides_apply_position(self) -> bool:
        """Return True while the applied position is to be reported to the publisher as it was before."""
        return False
