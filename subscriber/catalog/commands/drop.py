"""DROP SUBSCRIPTION. Source: DropSubscription() in src/backend/commands/subscriptioncmds.c.

The workers must have ended before their origins and slots can be dropped. They read the catalog, so the subscription is
disabled first, in a transaction of its own. If the rest fails, most often because the publisher cannot be reached, the
subscription is enabled again. Two cases do not allow that, and their workers are terminated immediately: inside a
transaction block, which other sessions cannot see, and for an owner who may drop the subscription but not change it.

Transactions that are prepared on the target stay prepared, as PostgreSQL's do. A user who knows their outcome on the
publisher ends them: COMMIT PREPARED and ROLLBACK PREPARED 'pg_gid_<subid>_<xid>'.
"""

from __future__ import annotations

import asyncpg

from subscriber import names
from subscriber.apply.table_states import TableState
from subscriber.catalog import identity, origins
from subscriber.catalog.commands import dead_tuples, privileges, publisher_connection, worker_shutdown
from subscriber.catalog.commands.publisher_connection import Notice, PublisherUnreachable
from subscriber.catalog.grammar.parser import DropSubscription
from subscriber.catalog.store import quarantine
from subscriber.catalog.store.prepared_transactions import delete_prepared
from subscriber.catalog.store.subscription_rel import load_stored_relations
from subscriber.catalog.store.subscriptions import (
    delete_subscription,
    disable_subscription,
    enable_subscription,
    subscription_exists,
)
from subscriber.errors import StatementError
from subscriber.sqlstate import ACTIVE_SQL_TRANSACTION, CONNECTION_FAILURE
from subscriber.subscription import Subscription


async def drop_subscription(
    connection: asyncpg.Connection, statement: DropSubscription, notice: Notice, *, grace: float
) -> None:
    """Remove the subscription, its slots on the publisher and its origins here.

    `grace`: seconds for its workers to stop before their sessions are ended.
    """
    if statement.if_exists and not await subscription_exists(connection, statement.name):
        notice("NOTICE", f'subscription "{statement.name}" does not exist, skipping', None, None)
        return
    inside = connection.is_in_transaction()
    async with connection.transaction():
        subscription = await privileges.get_owned_subscription(connection, statement.name, to_drop=True)
        if subscription.slot_name is not None and inside:
            raise StatementError(
                "DROP SUBSCRIPTION cannot run inside a transaction block", sqlstate=ACTIVE_SQL_TRANSACTION
            )
        may_change = subscription.password_required or (await privileges.current_role(connection)).is_superuser
        disabled = subscription.enabled and may_change and not inside
        if disabled:
            await disable_subscription(connection, subscription.oid)
    try:
        if disabled or (not subscription.enabled and not inside):
            await worker_shutdown.wait_until_gone(connection, subscription.oid, grace=grace)
        async with connection.transaction():
            # Once more: between the two transactions it may have been changed, or dropped.
            subscription_now = await privileges.get_owned_subscription(connection, statement.name, to_drop=True)
            await _drop(connection, subscription_now, notice)
    except BaseException:
        if disabled and not connection.is_closed():
            from anyio import CancelScope  # imported where it is needed, as this hardly ever is

            with CancelScope(shield=True):
                await enable_subscription(connection, subscription.oid)
        raise


async def _drop(connection: asyncpg.Connection, subscription: Subscription, notice: Notice) -> None:
    subid, slot_name = subscription.oid, subscription.slot_name
    if parked := await quarantine.count(connection, subid):
        notice("WARNING", f"{parked} transaction{'s' * (parked > 1)} in quarantine will be removed", None, None)
    await worker_shutdown.end_workers(connection, subid)
    rows = await load_stored_relations(connection, subid)
    unfinished = [row["relid"] for row in rows if row["state"] != TableState.READY]
    bound = await identity.is_bound(connection)
    # The original of a copy in the same cluster has origins and slots of the same names.
    for origin in await origins.find_origins(connection, subid) if bound else ():
        await origins.drop_origin(connection, origin, missing_ok=True)
    sync_id = await identity.sync_id(connection)
    await delete_prepared(connection, subid)
    await dead_tuples.set_triggers(connection, subid, notice, drops=True)
    await delete_subscription(connection, subid)
    if slot_name is None and not (unfinished and bound):
        return
    sync_slots = [names.table_sync_slot(subid, relid, sync_id) for relid in unfinished]
    password = subscription.must_use_password
    try:
        async with publisher_connection.connect_to_publisher(
            connection, subscription.name, subscription.conninfo, password=password
        ) as publisher:
            for slot in sync_slots:
                await publisher_connection.drop_slot(publisher, slot, notice, missing_ok=True)
            if slot_name is not None:
                await publisher_connection.drop_main_slot(publisher, slot_name, subscription.system_id, notice)
    except PublisherUnreachable as error:
        if slot_name is None:  # SET (slot_name = NONE): the user takes care of the slots
            return
        for slot in sync_slots:
            notice("WARNING", f'could not drop tablesync replication slot "{slot}"', None, None)
        raise StatementError(
            f'could not connect to publisher when attempting to drop replication slot "{slot_name}": {error.reason}',
            hint="Use ALTER SUBSCRIPTION ... DISABLE to disable the subscription, and then use ALTER SUBSCRIPTION ..."
            " SET (slot_name = NONE) to disassociate it from the slot.",
            sqlstate=CONNECTION_FAILURE,
        ) from error
