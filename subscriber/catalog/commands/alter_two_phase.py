"""ALTER SUBSCRIPTION … SET (two_phase): when it may be changed, and to which state.

true only makes it pending: the apply worker enables it, on the slot and in the catalog, when all tables are ready.
false takes effect at once, and from then on the publisher sends a transaction as a whole when it is committed. So every
transaction that it has already sent as prepared must have ended on the target, and the catalog must know that:
otherwise it would be sent a second time.

Failure cases:
- Killed before the slot is altered: no change.
- Killed after that, before the catalog's commit: the state is still pending or enabled, the slot's is off. Transactions
  are sent as a whole, as intended, and the statement can be repeated.

Source: AlterSubscription() in src/backend/commands/subscriptioncmds.c, LookupGXactBySubid() in twophase.c.
"""

from __future__ import annotations

import asyncpg

from subscriber.catalog.commands import worker_shutdown
from subscriber.catalog.store.prepared_transactions import (
    delete_prepared,
    has_committed_ahead,
    has_prepared_transactions,
)
from subscriber.catalog.store.subscriptions import set_two_phase_state
from subscriber.errors import StatementError
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription, TwoPhaseState


async def change(connection: asyncpg.Connection, subscription: Subscription, *, wanted: bool) -> None:
    """Set the state, in the connection's transaction, in which no worker can start any more.

    Raises StatementError (55000) while a worker is running, or if a transaction could be lost or applied twice.
    """
    subid = subscription.oid
    await worker_shutdown.check_none_is_running(connection, subid)
    if wanted:
        await set_two_phase_state(connection, subid, TwoPhaseState.PENDING)
        return
    # PostgreSQL asks only when it is enabled; it may have been before it was pending, once more.
    if subscription.two_phase is not TwoPhaseState.DISABLED:
        await _check_all_are_over(connection, subid)
    await delete_prepared(connection, subid)
    await set_two_phase_state(connection, subid, TwoPhaseState.DISABLED)


async def _check_all_are_over(connection: asyncpg.Connection, subid: int) -> None:
    message = 'cannot disable "two_phase" when prepared transactions exist'
    if await has_prepared_transactions(connection, subid):
        raise StatementError(
            message, hint="Resolve these transactions and try again.", sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE
        )
    if await has_committed_ahead(connection, subid):
        raise StatementError(
            message,
            detail="A transaction was committed on the target whose COMMIT PREPARED the subscription has not seen yet.",
            hint="Enable the subscription until it has, and try again.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
