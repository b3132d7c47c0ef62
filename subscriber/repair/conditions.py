"""Conditions of a repair, which are checked before anything is compared or paused."""

from __future__ import annotations

from collections.abc import Collection

from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import quarantine
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.workers import load_permanent_error
from subscriber.catalog.worker_sessions import REPAIR
from subscriber.display import nearest_word, shell_word, sql_identifier
from subscriber.errors import StatementError, SubscriberError
from subscriber.limited_wait import LimitedWait
from subscriber.remedy import Remedy
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_TABLE
from subscriber.subscription import Subscription

KILLED_PATIENCE = 5.0  # seconds for the target to notice that an earlier command was killed


async def check_names(catalog: CatalogConnection, subscription: Subscription, tables: Collection[str]) -> None:
    """Check the names before anything is connected, compared or paused.

    Raises:
        StatementError: a table is not part of the subscription.
    """
    async with catalog.use() as connection:
        states = await load_relation_states(connection, subscription.oid) if tables else []
    full = {
        name: f"{relation.namespace}.{relation.name}"
        for relation in states
        for name in (relation.name, f"{relation.namespace}.{relation.name}")
    }
    for wrong in sorted({*tables} - {*full.values()}):
        name = sql_identifier(subscription.name)
        near = nearest_word(wrong, full)
        command = f"subscriber repair {shell_word(subscription.name)}"
        raise StatementError(
            f'table "{wrong}" is not part of subscription "{subscription.name}"',
            hint=Remedy("run", f"{command} {shell_word(full[near])}")
            if near
            else "Tables are named as on the publisher, with their schema: public.accounts. If the table is new in the"
            f" publications, run: ALTER SUBSCRIPTION {name} REFRESH PUBLICATION;",
            sqlstate=UNDEFINED_TABLE,
        )


async def check_is_enabled(catalog: CatalogConnection, subscription: Subscription) -> None:
    """Check that the subscription is enabled.

    Raises:
        StatementError: it is disabled. The error names another one that has disabled it.
    """
    if subscription.enabled:
        return
    async with catalog.use() as connection:
        worker = await load_permanent_error(connection, subscription.oid)
    enable = f"ALTER SUBSCRIPTION {sql_identifier(subscription.name)} ENABLE;"
    raise StatementError(
        f'subscription "{subscription.name}" is disabled',
        detail=None if worker is None else f"Its apply worker has an error: {worker.error}\n{worker.error_hint or ''}",
        hint=Remedy("" if worker is None else "first solve the error. Then", enable, Remedy("repair again.")),
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


async def check_is_free(catalog: CatalogConnection, subscription: Subscription) -> None:
    """Check that no other command repairs the subscription, and that none of its transactions is in quarantine.

    Raises:
        StatementError: a transaction is in quarantine. Rows that it would bring are not repaired, because it would find
            them at its retry.
        SubscriberError: another command repairs the subscription.
    """
    async with catalog.use() as connection:
        parked = await quarantine.count(connection, subscription.oid)
    if parked:
        raise StatementError(
            f'subscription "{subscription.name}" has transactions in quarantine',
            detail=f"There are {parked}. Their rows differ until they are applied.",
            hint=Remedy(
                "list them",
                f"subscriber quarantine list {shell_word(subscription.name)}",
                then=Remedy("retry or discard each, and repeat the command."),
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    wait = LimitedWait("another command that repairs the subscription", KILLED_PATIENCE)
    while True:
        async with catalog.use() as connection:
            holder = await worker_sessions.holder(connection, subscription.oid, REPAIR)
        if holder is None:
            return
        if wait.is_over:
            raise SubscriberError(
                f'subscription "{subscription.name}" is being repaired by another command',
                detail=f"Its session on the target is {holder}.",
                hint="Wait for its end.",
                sqlstate=OBJECT_IN_USE,
            )
        await wait.pause()
