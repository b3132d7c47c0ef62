"""`subscriber adopt` for a subscription of the extension pglogical.

pglogical's slot has an output plugin of its own. While no worker uses the slot, the publisher copies it for pgoutput,
with the same position. Publications take the place of the replication sets. They have to exist before this position,
because the publisher decodes each change with the publications of that time.

1. The command waits until pglogical has confirmed a position after the publications. Nothing is changed yet.
2. A transaction disables pglogical's subscription, and inserts ours, which is disabled, without tables and origin.
3. The command waits until the worker has ended and its slot is inactive, and copies the slot.
4. A transaction gives ours the position, the tables and pglogical's origin, and enables it. pglogical cannot continue
   without its origin. The origin keeps its id, so its rows are no conflicts with another origin.
5. The command drops pglogical's slot and subscription.

A disabled subscription of ours without an origin, beside pglogical's with one, is the mark of steps 2 to 4.

Failure cases:
- Killed before step 2: no change.
- Killed before the commit of step 4: both subscriptions are disabled, and pglogical has slot, position and origin. The
  command undoes step 2 when it runs again, drops the copied slot, and starts over.
- A slot with the name of the subscription that another program creates while the command runs: step 3 fails. A slot is
  only dropped if it is at the positions of pglogical's, as a copy is. It stays otherwise.
- Killed after the commit of step 4: ours is complete. The command continues with step 5 when it runs again. Until then
  pglogical's slot retains WAL.
- Another error before the commit of step 4: the command undoes step 2 and drops the copied slot.
- The target is lost during the commit of step 4: nothing is undone and no slot is dropped, as ours may have it. The
  same command finds out.
- A worker of pglogical still has the origin: step 4 fails, because the origin cannot be advanced.
- DDL that pglogical sends while the command runs: step 4 is refused, as pglogical may not have executed it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import anyio
import asyncpg

from subscriber import names
from subscriber.apply.table_states import TableState
from subscriber.catalog import origins, pglogical_subscription
from subscriber.catalog.commands import handover, pglogical_obstacles, privileges, publisher_connection, refresh
from subscriber.catalog.commands.create import insert_subscription
from subscriber.catalog.commands.handover import Moved, Obstacle, OnStep, PublisherState
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.grammar.parser import CreateSubscription
from subscriber.catalog.native_subscription import Move
from subscriber.catalog.pglogical_subscription import PglogicalSubscription
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_rel import insert_relations
from subscriber.catalog.store.subscriptions import (
    delete_subscription,
    enable_subscription,
    find_subscription,
    set_publisher,
)
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.display import sql_identifier, sql_literal
from subscriber.errors import SlotLost, StatementError, SubscriberError
from subscriber.failpoints import Point, reach
from subscriber.limited_wait import LimitedWait
from subscriber.lsn import Lsn
from subscriber.publisher import pglogical
from subscriber.publisher.connection import Publisher, SlotInfo
from subscriber.publisher.pglogical import Messages
from subscriber.publisher.timelines import read_history
from subscriber.settings import Settings
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import SequenceMode, StatementOptions, Subscription

CATCHUP_PATIENCE = 60.0  # seconds for pglogical to confirm a position after the publications
START_PATIENCE = 15.0  # seconds for its worker to connect; pglogical restarts one after 5


@dataclass(frozen=True, slots=True)
class _Plan:
    """The new subscription, and the evidence that its first two steps rest on."""

    slot: str
    publications: tuple[str, ...]
    origin: str
    conflict_policy: str
    messages: Messages


async def adopt_pglogical(
    connection: asyncpg.Connection,
    subscription: PglogicalSubscription,
    publications: Sequence[str],
    *,
    notice: Notice,
    on_step: OnStep,
    settings: Settings,
) -> Moved | None:
    """Take over a subscription of pglogical.

    Args:
        connection: A connection of a superuser to the target, outside of a transaction, that commits synchronously.
        subscription: The subscription.
        publications: Publications that contain the same changes as its replication sets. Empty: those of a killed
            command. Without one, the error has the statements that create them.
        notice: Called with notices.
        on_step: Called after each step.
        settings: Time limits.

    Returns:
        The result, or None if the subscription is this program's already.

    Raises:
        StatementError: The subscription cannot be taken over exactly. It runs as before.
        PublisherError: The slot is lost.
        ServerError: An error of the publisher.
        asyncpg.PostgresError: An error of the target.

    Cancellation: the subscription runs as before, unless it is taken over already.
    """
    name = subscription.name
    async with _publisher(connection, subscription) as publisher:
        if (ours := await find_subscription(connection, name)) is not None:
            if await _is_moved(connection, subscription, ours):
                await _drop_rest(connection, publisher, subscription, notice, on_step)
                return None
            if await _is_begun(connection, subscription, ours):
                await _undo(connection, subscription, ours.oid, ours.slot_name or "", notice)
                replicated = await pglogical_subscription.find(connection, name)
                if replicated is None or await find_subscription(connection, name) is not None:
                    raise _altered(name)
                subscription, publications = replicated, publications or ours.publications
            else:
                raise _name_taken(name)
        plan = await _plan(connection, publisher, subscription, tuple(publications))
        await _wait_until_confirmed(publisher, subscription, Lsn.parse(plan.messages.position))
        subid = await _disable(connection, subscription, plan)
        try:
            on_step("disabled", f"pglogical's subscription {name} is disabled")
            reach(Point.ADOPT_DISABLED)
            await handover.wait_for_workers(
                connection,
                pglogical_subscription.load_workers,
                subscription.oid,
                system="pglogical",
                may_terminate=True,
                notice=notice,
                settings=settings,
            )
            source = await _wait_for_slot(publisher, subscription, active=False, patience=handover.PATIENCE)
            on_step("stopped", "its workers have ended")
            reach(Point.ADOPT_STOPPED)
            state, tables = await _copy_slot(publisher, subscription, plan, source)
            reach(Point.ADOPT_SLOT_COPIED)
            moved = await _take_over(connection, subscription, subid, state, tables)
        except BaseException:
            await _undo(connection, subscription, subid, plan.slot, notice)
            raise
        on_step("taken over", f"slot {plan.slot} has the position of {subscription.slot_name}")
        reach(Point.ADOPT_COMMITTED)
        if plan.conflict_policy:
            notice(
                "NOTICE",
                f"conflict_policy is '{plan.conflict_policy}', as pglogical.conflict_resolution requires",
                "Changes of tables with a policy are applied row by row.",
                "To stop at conflicts, and apply in batches: "
                f"ALTER SUBSCRIPTION {sql_identifier(name)} SET (conflict_policy = '');",
            )
        await _drop_rest(connection, publisher, subscription, notice, on_step)
    reach(Point.ADOPTED)
    return moved


def _publisher(
    connection: asyncpg.Connection, subscription: PglogicalSubscription
) -> AbstractAsyncContextManager[Publisher]:
    return publisher_connection.connect_to_publisher(
        connection, subscription.name, subscription.conninfo, password=False
    )


# --- what a killed command has left -----------------------------------------------------------------------------------


async def _is_begun(connection: asyncpg.Connection, subscription: PglogicalSubscription, ours: Subscription) -> bool:
    """Return True after step 2."""
    return (
        not ours.enabled
        and not subscription.enabled
        and ours.conninfo == subscription.conninfo
        and not await pglogical_subscription.has_origin(connection, names.apply_origin(ours.oid))
        and await pglogical_subscription.has_origin(connection, subscription.slot_name)
    )


async def _is_moved(connection: asyncpg.Connection, subscription: PglogicalSubscription, ours: Subscription) -> bool:
    """Return True after step 4."""
    return (
        not subscription.enabled
        and not await pglogical_subscription.has_origin(connection, subscription.slot_name)
        and await pglogical_subscription.has_origin(connection, names.apply_origin(ours.oid))
        and not await pglogical_subscription.load_unready(connection, subscription.oid)
    )


async def _undo(
    connection: asyncpg.Connection, subscription: PglogicalSubscription, subid: int, slot: str, notice: Notice
) -> None:
    """Undo step 2, and drop the copied slot. Does nothing after step 4. An error becomes a warning."""
    with anyio.CancelScope(shield=True):
        # Before pglogical continues, which moves its slot.
        is_copy = await _is_copy(connection, subscription, slot)
        async with handover.warning_of_disabled(notice, subscription.name, Move.ADOPT):
            async with connection.transaction():
                await pglogical_subscription.lock(connection)
                if not await pglogical_subscription.has_origin(connection, subscription.slot_name):
                    return
                await delete_subscription(connection, subid)
                await pglogical_subscription.set_enabled(connection, subscription.name, enabled=True)
            await _drop_copied_slot(connection, subscription, slot, is_copy, notice)


async def _drop_copied_slot(
    connection: asyncpg.Connection,
    subscription: PglogicalSubscription,
    slot: str,
    is_copy: bool | None,
    notice: Notice,
) -> None:
    """Drop a slot that the move has made, see _is_copy(). An error of the publisher becomes a warning."""
    try:
        if is_copy:
            async with handover.answering(), _publisher(connection, subscription) as publisher:
                await publisher.drop_slot(slot, missing_ok=True)
    except SubscriberError as error:
        _warn_of_slot(notice, slot, "may be left on the publisher", error.message)
    if is_copy is False:
        _warn_of_slot(notice, slot, "was not copied by this command, and stays", "It is at other positions.")
    elif is_copy is None:
        _warn_of_slot(notice, slot, "may be left on the publisher", "The publisher has not answered.")


async def _is_copy(connection: asyncpg.Connection, subscription: PglogicalSubscription, slot: str) -> bool | None:
    """Return True if the slot is an unused copy of pglogical's, or does not exist. None: no answer of the publisher."""
    try:
        # The other connection may be in the middle of an answer.
        async with handover.answering(), _publisher(connection, subscription) as publisher:
            copy, source = await publisher.slot(slot), await publisher.slot(subscription.slot_name)
    except SubscriberError:
        return None
    if copy is None:
        return True
    return (
        source is not None
        and (copy.plugin, copy.in_this_database, copy.active) == ("pgoutput", True, False)
        and (copy.restart_lsn, copy.confirmed_flush) == (source.restart_lsn, source.confirmed_flush)
    )


def _warn_of_slot(notice: Notice, slot: str, state: str, reason: str) -> None:
    hint = f"If no subscriber needs it, on the publisher: SELECT pg_drop_replication_slot({sql_literal(slot)});"
    notice("WARNING", f'replication slot "{slot}" {state}', reason, hint)


# --- step 1: checks ---------------------------------------------------------------------------------------------------


async def _plan(
    connection: asyncpg.Connection,
    publisher: Publisher,
    subscription: PglogicalSubscription,
    publications: tuple[str, ...],
) -> _Plan:
    """Check everything, and return the new subscription.

    Raises:
        StatementError: The subscription cannot be taken over exactly, or the publications are not the same.
    """
    slot = _slot_name(subscription.name)
    obstacles = await pglogical_obstacles.find_obstacles(connection, publisher, subscription)
    if not subscription.enabled:
        enable = f"SELECT pglogical.alter_subscription_enable({sql_literal(subscription.name)});"
        obstacles.append(Obstacle("It is disabled, so it cannot pass the position of the publications.", enable))
    async with handover.answering():
        obstacles += await pglogical_obstacles.find_differences(publisher, subscription, publications)
        # After the publications: its position is after their commits.
        messages = await pglogical.messages(publisher)
        if await publisher.slot(slot) is not None:
            remedy = (
                f"On the publisher, if no subscription has it: SELECT pg_drop_replication_slot({sql_literal(slot)});"
            )
            obstacles.append(Obstacle(f'The publisher has a replication slot "{slot}" already.', remedy))
    handover.refuse_obstacles(subscription.name, Move.ADOPT, obstacles)
    return _Plan(
        slot,
        publications,
        pglogical_obstacles.ORIGINS[subscription.forward_origins],
        await pglogical_obstacles.conflict_policy(connection) or "",
        messages,
    )


def _slot_name(name: str) -> str:
    """Return the name of the new slot: that of the subscription, as far as slots can have it."""
    return re.sub(r"[^a-z0-9_]", "_", name.lower())[:63]


async def _find_slot(publisher: Publisher, subscription: PglogicalSubscription) -> SlotInfo:
    slot = await publisher.slot(subscription.slot_name)
    if slot is None or slot.plugin != pglogical.PLUGIN or not slot.in_this_database or slot.is_lost:
        state = "has lost WAL that the subscription needs" if slot is not None and slot.is_lost else "does not exist"
        raise SlotLost(
            f'replication slot "{subscription.slot_name}" of pglogical {state} on the publisher',
            hint="If the subscription works, its connection string leads elsewhere from here: see"
            " pglogical.alter_node_add_interface() and pglogical.alter_subscription_interface().",
        )
    return slot


async def _wait_for_slot(
    publisher: Publisher, subscription: PglogicalSubscription, *, active: bool, patience: float
) -> SlotInfo:
    """Wait until a worker of pglogical has its slot, or none has it.

    Raises:
        StatementError: That has not happened after `patience` seconds.
        SlotLost: There is no such slot.
    """
    wait = LimitedWait(f'replication slot "{subscription.slot_name}"', patience)
    while True:
        async with handover.answering():
            slot = await _find_slot(publisher, subscription)
        if slot.active is active:
            return slot
        if wait.is_over:
            raise StatementError(
                f'replication slot "{subscription.slot_name}" of pglogical is {"inactive" if active else "in use"}',
                detail=f'Subscription "{subscription.name}" is {"enabled" if active else "disabled"}.',
                hint="See the log of the target, and: SELECT * FROM pglogical.show_subscription_status();",
                sqlstate=OBJECT_IN_USE,
            )
        await wait.pause()


async def _wait_until_confirmed(publisher: Publisher, subscription: PglogicalSubscription, position: Lsn) -> None:
    """Wait until pglogical has confirmed `position`.

    Raises:
        StatementError: It has not after CATCHUP_PATIENCE seconds (55006), or its worker does not run.
    """
    await _wait_for_slot(publisher, subscription, active=True, patience=START_PATIENCE)
    async with handover.answering():
        await pglogical.flush_wal(publisher)
    wait = LimitedWait(f'subscription "{subscription.name}" of pglogical to confirm {position}', CATCHUP_PATIENCE)
    while True:
        async with handover.answering():
            confirmed = (await _find_slot(publisher, subscription)).confirmed_flush
        if confirmed is not None and confirmed >= position:
            return
        if wait.is_over:
            raise StatementError(
                f'subscription "{subscription.name}" of pglogical has not confirmed {position}',
                detail=f"It has confirmed {confirmed}. It has to pass this position before it can be taken over.",
                hint="Wait until it has caught up, then run the command again. On the publisher: SELECT"
                " confirmed_flush_lsn, pg_current_wal_lsn() FROM pg_replication_slots"
                f" WHERE slot_name = {sql_literal(subscription.slot_name)};",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await wait.pause()


# --- steps 2 to 4 -----------------------------------------------------------------------------------------------------


async def _disable(connection: asyncpg.Connection, subscription: PglogicalSubscription, plan: _Plan) -> int:
    """Disable pglogical's subscription, and insert ours, in one transaction. Returns its OID."""
    who = await privileges.current_role(connection)
    options = StatementOptions(
        enabled=False,
        slot_name=plan.slot,
        origin=plan.origin,
        run_as_owner=True,  # pglogical applies changes as a superuser
        sequences=SequenceMode.NONE,
        conflict_policy=plan.conflict_policy,
    )
    statement = CreateSubscription(subscription.name, subscription.conninfo, plan.publications)
    async with connection.transaction():
        await pglogical_subscription.lock(connection)
        if await pglogical_subscription.find(connection, subscription.name) != subscription:
            raise _altered(subscription.name)
        await pglogical_subscription.set_enabled(connection, subscription.name, enabled=False)
        async with handover.unlogged(connection, handover.LOCK_TIMEOUT):
            return await insert_subscription(connection, statement, options, who.oid, 0)


async def _copy_slot(
    publisher: Publisher, subscription: PglogicalSubscription, plan: _Plan, source: SlotInfo
) -> tuple[PublisherState, list[tuple[str, str]]]:
    """Check once more, copy the slot, and read what the last step needs, which then sends no requests.

    Raises:
        StatementError: pglogical has sent DDL, or the replication sets have changed.
    """
    async with handover.answering():
        if not plan.messages.are_those_of(await pglogical.messages(publisher)):
            raise StatementError(
                "pglogical has sent commands while the subscription was taken over",
                detail="They are in pglogical.queue of the publisher, and may not have been executed here.",
                hint="Run the command again, and no pglogical.replicate_ddl_command() meanwhile.",
                sqlstate=OBJECT_IN_USE,
            )
        differences = await pglogical_obstacles.find_differences(publisher, subscription, plan.publications)
        handover.refuse_obstacles(subscription.name, Move.ADOPT, differences)
        tables = await publisher.tables(plan.publications)
        system = await publisher.identify_system()
        history = None if system.in_recovery else str(await read_history(publisher, system))
        await pglogical.copy_slot(publisher, subscription.slot_name, plan.slot)
        slot = await handover.find_slot(publisher, subscription.name, plan.slot)
        if slot.confirmed_flush != source.confirmed_flush:
            raise _altered(subscription.name)
    return PublisherState(slot, system, history, publisher.server_version), tables


async def _take_over(
    connection: asyncpg.Connection,
    subscription: PglogicalSubscription,
    subid: int,
    publisher: PublisherState,
    tables: list[tuple[str, str]],
) -> Moved:
    """Give our subscription the position, the tables and the origin, and enable it, in one transaction."""
    confirmed, system = publisher.slot.confirmed_flush, publisher.system
    assert confirmed is not None
    async with connection.transaction():
        await pglogical_subscription.lock(connection)
        now = await pglogical_subscription.find(connection, subscription.name)
        ours = await find_subscription(connection, subscription.name)
        if now != replace(subscription, enabled=False) or ours is None or ours.oid != subid or ours.enabled:
            raise _altered(subscription.name)
        position = await pglogical_subscription.load_position(connection, subscription.slot_name)
        if position > system.position:
            raise StatementError(
                f'the connection string of subscription "{subscription.name}" leads to another server from here',
                detail=f"Changes up to {position} were applied; WAL ends at {system.position} there.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await set_publisher(connection, subid, str(system.systemid), system.timeline, publisher.history)
        await progress_records.save(connection, subid, APPLY_WORKER, position)
        await progress_records.save_confirmed(connection, subid, confirmed)
        relids = await refresh.local_relids(connection, tables)
        await insert_relations(connection, subid, relids, TableState.READY)
        if not await origins.rename_origin(connection, subscription.slot_name, names.apply_origin(subid)):
            raise _altered(subscription.name)
        await enable_subscription(connection, subid)
        reach(Point.ADOPT_READY)
    return Moved(
        name=subscription.name,
        slot=publisher.slot.name,
        position=max(position, confirmed),
        tables=len(tables),
        sequences=0,
        enabled=True,
    )


# --- step 5 -----------------------------------------------------------------------------------------------------------


async def _drop_rest(
    connection: asyncpg.Connection,
    publisher: Publisher,
    subscription: PglogicalSubscription,
    notice: Notice,
    on_step: OnStep,
) -> None:
    """Drop pglogical's slot and subscription, and say what else is left of it."""
    async with handover.answering():
        await publisher.drop_slot(subscription.slot_name, missing_ok=True, wait=True)
    is_last = await pglogical_subscription.drop(connection, subscription.name)
    on_step(
        "dropped", f"pglogical's subscription {subscription.name} and its slot {subscription.slot_name} are dropped"
    )
    if is_last:
        drop_node = f"SELECT pglogical.drop_node({sql_literal(subscription.node)}); DROP EXTENSION pglogical;"
        notice(
            "NOTICE",
            "pglogical is still installed",
            "This database has no other subscription of pglogical.",
            f"To remove it here: {drop_node} The publisher's node and replication sets are needed by other subscribers"
            " only. There: SELECT pglogical.drop_node(node_name) FROM pglogical.node JOIN pglogical.local_node"
            " USING (node_id); DROP EXTENSION pglogical;",
        )


def _altered(name: str) -> StatementError:
    return StatementError(
        f'subscription "{name}" was altered by another session', hint="Run the command again.", sqlstate=OBJECT_IN_USE
    )


def _name_taken(name: str) -> StatementError:
    return StatementError(
        f'both pglogical and subscriber have a subscription "{name}" in this database',
        hint=f"Rename one of them: ALTER SUBSCRIPTION {sql_identifier(name)} RENAME TO …",
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )
