"""`subscriber adopt`: take over a subscription of PostgreSQL's own. handover.py explains the steps and their failures.

Subscriptions of pglogical are taken over by adopt_pglogical.py.

The new subscription has the options of the old one, also those that the server's version implies: before PostgreSQL 16,
changes are always applied as the owner of the subscription. Sequences are synchronized only where PostgreSQL does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from subscriber import names
from subscriber import server_features as features
from subscriber.apply.table_states import TableState
from subscriber.catalog import identity, native_subscription, origins, pglogical_subscription
from subscriber.catalog.commands import handover, publisher_connection
from subscriber.catalog.commands.adopt_pglogical import adopt_pglogical
from subscriber.catalog.commands.create import insert_subscription
from subscriber.catalog.commands.handover import Moved, Obstacle, OnStep, PublisherState
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.grammar.parser import CreateSubscription
from subscriber.catalog.native_subscription import SEQUENCE, Mark, Move, NativeRelation, NativeSubscription
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_rel import add_native_relations
from subscriber.catalog.store.subscription_sequence import add_sequences, set_ready
from subscriber.catalog.store.subscriptions import (
    find_subscription,
    set_publisher,
    set_skip_lsn,
    set_two_phase_state,
)
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.display import shell_word, sql_identifier
from subscriber.errors import StatementError
from subscriber.failpoints import Point, reach
from subscriber.limited_wait import LimitedWait
from subscriber.publisher.connection import Publisher
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import STORED_OPTIONS, SequenceMode, StatementOptions, TwoPhaseState

STREAMING_PATIENCE = 1.0  # seconds for the slot of a running worker to be seen as active

# Columns of pg_subscription that are no options of a move. A column that is in neither list is one of a later version.
OTHER_COLUMNS = {
    *("oid", "subdbid", "subname", "subowner", "subconninfo", "subserver", "subpublications", "subskiplsn"),
    *("subretaindeadtuples", "submaxretention", "subretentionactive"),
}


async def adopt_subscription(
    connection: asyncpg.Connection,
    name: str,
    *,
    publications: Sequence[str] = (),
    notice: Notice,
    on_step: OnStep,
    settings: Settings = DEFAULTS,
) -> Moved | None:
    """Take over the subscription of PostgreSQL's own, or of pglogical, that has this name.

    Args:
        connection: A connection to the target, outside of a transaction, that commits synchronously.
        name: The subscription.
        publications: Publications in place of pglogical's replication sets. Empty for PostgreSQL's own.
        notice: Called with PostgreSQL's notices and our own.
        on_step: Called after each step.
        settings: Time limits.

    Returns:
        The result, or None if the subscription is this program's already.

    Raises:
        StatementError: The subscription does not exist, or cannot be taken over exactly. It runs as before.
        PublisherError: The slot is lost, or a password is required. It runs as before.
        ServerError: An error of the publisher.
        asyncpg.PostgresError: An error of the target.

    Cancellation: the subscription runs as before, unless it is taken over already.
    """
    await handover.check_superuser(connection, Move.ADOPT)
    await identity.check(connection)
    native = await native_subscription.find(connection, name)
    ours = await find_subscription(connection, name)
    if native is None:
        of_pglogical = await pglogical_subscription.find(connection, name)
        if of_pglogical is not None:
            return await adopt_pglogical(
                connection, of_pglogical, publications, notice=notice, on_step=on_step, settings=settings
            )
        if ours is None:
            known = [
                *await native_subscription.load_marks(connection),
                *await pglogical_subscription.load_names(connection),
            ]
            raise await handover.not_found(connection, name, Move.ADOPT, known)
        return None
    if publications:
        raise StatementError(
            f'subscription "{name}" of PostgreSQL has publications',
            hint=Remedy("run the command without other ones", f"subscriber adopt {shell_word(name)}"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if native.mark is not None and native.mark.move is Move.HAND_BACK:
        raise StatementError(
            f'subscription "{name}" is being handed back to PostgreSQL',
            hint=Remedy("first finish that", f"subscriber hand-back {shell_word(name)}"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if ours is not None:
        raise handover.name_taken(name)
    handover.refuse_obstacles(
        name, Move.ADOPT, [*_missing_slot(native), *await _find_obstacles(connection, native, enabled=native.enabled)]
    )
    assert native.slot_name is not None
    password = native.must_use_password
    source = await publisher_connection.resolve(
        connection, native.conninfo, native.server, native.owner_oid, password=password, connects=True, notice=notice
    )
    assert source.conninfo is not None
    async with publisher_connection.connect_to_publisher(
        connection, name, source.conninfo, password=password
    ) as publisher:
        async with handover.answering():
            await handover.find_slot(publisher, name, native.slot_name)
            await _check_same_publisher(connection, publisher, native)
        mark = await _disable(connection, native)
        async with handover.undoing(
            connection,
            notice,
            name,
            Move.ADOPT,
            lambda: native_subscription.set_comment(connection, name, mark.comment),
            lambda: native_subscription.set_enabled(connection, name, enabled=mark.was_enabled),
        ):
            on_step("disabled", f"PostgreSQL's subscription {name} is disabled")
            reach(Point.ADOPT_DISABLED)
            await handover.wait_for_workers(
                connection,
                native_subscription.load_workers,
                native.oid,
                system="PostgreSQL",
                may_terminate=await native_subscription.may_terminate(connection),
                notice=notice,
                settings=settings,
            )
            state = await handover.read_publisher(publisher, name, native.slot_name)
            on_step("stopped", "its workers have ended")
            reach(Point.ADOPT_STOPPED)
            moved = await _take_over(connection, state, native, mark)
    reach(Point.ADOPTED)
    return moved


def _missing_slot(native: NativeSubscription) -> list[Obstacle]:
    if native.slot_name is not None:
        return []
    remedy = f"ALTER SUBSCRIPTION {sql_identifier(native.name)} SET (slot_name = '…'); with the name of its slot."
    return [Obstacle("It has no replication slot.", remedy)]


async def _find_obstacles(
    connection: asyncpg.Connection, native: NativeSubscription, *, enabled: bool
) -> list[Obstacle]:
    """Return the reasons why the subscription cannot be taken over exactly. `enabled`: it is, or will be again."""
    quoted = sql_identifier(native.name)
    first = "" if enabled else f"ALTER SUBSCRIPTION {quoted} ENABLE; "
    obstacles = []
    relations = await native_subscription.load_relations(connection, native.oid)
    if unready := [relation for relation in relations if relation.relkind != SEQUENCE and relation.state != "r"]:
        remedy = (
            f"{first}SELECT srrelid::regclass, srsubstate FROM pg_subscription_rel; until all tables are ready (r)."
        )
        obstacles.append(Obstacle(f"Tables are not synchronized: {handover.describe_relations(unready)}.", remedy))
    if prepared := await native_subscription.load_prepared(connection, native.oid):
        remedy = f"{first}COMMIT PREPARED or ROLLBACK PREPARED on the publisher, until they have ended here as well."
        obstacles.append(Obstacle(f"Transactions are prepared on the target: {', '.join(prepared)}.", remedy))
    if native.columns.get("subretaindeadtuples"):
        obstacles.append(
            Obstacle(
                "With retain_dead_tuples the server keeps deleted rows, which only PostgreSQL's worker can find.",
                f"ALTER SUBSCRIPTION {quoted} DISABLE; ALTER SUBSCRIPTION {quoted} SET (retain_dead_tuples = false);"
                f" ALTER SUBSCRIPTION {quoted} ENABLE;",
            )
        )
    known = OTHER_COLUMNS | {column.name for column in STORED_OPTIONS.values()}
    if unknown := sorted(native.columns.keys() - known):
        obstacles.append(
            Obstacle(
                f"pg_subscription has columns that this version of subscriber does not know: {', '.join(unknown)}.",
                "Use a version of subscriber that knows this version of PostgreSQL.",
            )
        )
    return obstacles


async def _check_same_publisher(
    connection: asyncpg.Connection, publisher: Publisher, native: NativeSubscription
) -> None:
    """Refuse a publisher whose slot is unused while PostgreSQL's worker streams: the worker streams from another one.

    The same connection string may lead to another server from this machine, localhost for example.
    """
    assert native.slot_name is not None
    wait = LimitedWait("the activity of the slot", STREAMING_PATIENCE)
    while await native_subscription.is_streaming(connection, native.oid):
        if (await handover.find_slot(publisher, native.name, native.slot_name)).active:
            return
        if wait.is_over:
            what = f'PostgreSQL\'s worker streams, but replication slot "{native.slot_name}" is inactive there.'
            raise _leads_elsewhere(native.name, what)
        await wait.pause()


def _leads_elsewhere(name: str, evidence: str) -> StatementError:
    return StatementError(
        f'the connection string of subscription "{name}" leads to another server from here',
        detail=evidence,
        hint=handover.reachable_conninfo(name),
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


async def _disable(connection: asyncpg.Connection, native: NativeSubscription) -> Mark:
    """Disable the subscription and mark it, in one transaction. Returns the mark, also one of a killed command."""
    comment = native.comment if native.mark is None else native.mark.comment
    was_enabled = native.enabled or (native.mark is not None and native.mark.was_enabled)
    mark = Mark(Move.ADOPT, was_enabled, comment)
    async with connection.transaction():
        await native_subscription.set_enabled(connection, native.name, enabled=False)
        await native_subscription.set_comment(connection, native.name, str(mark))
    return mark


async def _take_over(
    connection: asyncpg.Connection, publisher: PublisherState, native: NativeSubscription, mark: Mark
) -> Moved:
    """Move slot, position, tables and sequences to a subscription of ours, in one transaction."""
    async with connection.transaction():
        # This locks PostgreSQL's subscription: nothing of it can change before the commit, and no worker can start.
        await native_subscription.set_slot_name(connection, native.name, None)
        now = await native_subscription.find(connection, native.name)
        workers = await native_subscription.load_workers(connection, native.oid)
        if now is None or now.definition != native.definition or workers:
            raise StatementError(
                f'subscription "{native.name}" was altered by another session',
                hint="Run the command again.",
                sqlstate=OBJECT_IN_USE,
            )
        obstacles = await _find_obstacles(connection, now, enabled=mark.was_enabled)
        handover.refuse_obstacles(native.name, Move.ADOPT, obstacles)
        position = await native_subscription.load_progress(connection, native.origin_name)
        relations = await native_subscription.load_relations(connection, native.oid)
        sequences = [relation for relation in relations if relation.relkind == SEQUENCE]
        if position > publisher.system.position:
            raise _leads_elsewhere(
                native.name, f"Changes up to {position} were applied; WAL ends at {publisher.system.position} there."
            )
        subid = await _insert(connection, native, mark, publisher.version)
        system = publisher.system
        await set_publisher(connection, subid, str(system.systemid), system.timeline, publisher.history)
        await progress_records.save(connection, subid, APPLY_WORKER, position)
        await progress_records.save_confirmed(connection, subid, publisher.slot.confirmed_flush)
        await add_native_relations(connection, subid, native.oid)
        await _add_sequences(connection, subid, sequences)
        # DROP SUBSCRIPTION finds no origin then. It would clear the position at once, also if the commit fails.
        await origins.rename_origin(connection, native.origin_name, names.apply_origin(subid))
        await native_subscription.drop(connection, native.name)
        reach(Point.ADOPT_READY)
    return Moved(
        name=native.name,
        slot=publisher.slot.name,
        position=max(position, publisher.slot.confirmed_flush or position),
        tables=len(relations) - len(sequences),
        sequences=len(sequences),
        enabled=mark.was_enabled,
    )


async def _insert(
    connection: asyncpg.Connection, native: NativeSubscription, mark: Mark, publisher_version: int
) -> int:
    """Insert our subscription with PostgreSQL's options. Returns its OID."""
    carries_sequences = features.PUBLISHED_SEQUENCES.is_in_major(
        connection.get_server_version().major
    ) and features.PUBLISHED_SEQUENCES.is_in(publisher_version)
    stated: dict[str, Any] = {
        option: column.read_value(native.columns[column.name])
        for option, column in STORED_OPTIONS.items()
        if column.name in native.columns and option not in ("streaming", "two_phase")
    }
    options = StatementOptions(
        **{
            "run_as_owner": True,  # before PostgreSQL 16, which has the option
            "sequences": SequenceMode.COPY if carries_sequences else SequenceMode.NONE,
            **stated,
            "enabled": mark.was_enabled,
            "slot_name": native.slot_name,
            "streaming": native.streaming,
            "two_phase": native.two_phase is not TwoPhaseState.DISABLED,
        }
    )
    statement = CreateSubscription(native.name, native.conninfo, native.publications, server=native.server)
    async with handover.unlogged(connection, handover.LOCK_TIMEOUT):
        subid = await insert_subscription(connection, statement, options, native.owner_oid, native.server_oid)
    await set_two_phase_state(connection, subid, native.two_phase)
    await set_skip_lsn(connection, subid, native.skip_lsn)
    return subid


async def _add_sequences(connection: asyncpg.Connection, subid: int, sequences: list[NativeRelation]) -> None:
    for sequence in sequences:
        name = (sequence.schema, sequence.name)
        await add_sequences(connection, subid, [name], sequence.state)
        if sequence.state == TableState.READY and sequence.lsn is not None:
            await set_ready(connection, subid, name, sequence.lsn)
