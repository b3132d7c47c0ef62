"""`subscriber hand-back`: return a subscription to PostgreSQL. handover.py explains the steps and their failures.

CREATE SUBSCRIPTION runs on the target and connects to the publisher from there, so it also shows that the target can
reach the publisher. It makes a subscription whose tables are ready. It has no slot, so it cannot be enabled before the
last step. PostgreSQL's worker discards changes of tables that it does not know, so the tables must be those of our
subscription.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import asyncpg

from subscriber import names
from subscriber import server_features as features
from subscriber.apply.table_states import TableState
from subscriber.catalog import hooked_tables, identity, native_subscription, origins
from subscriber.catalog.commands import handover, privileges, publisher_connection, worker_shutdown
from subscriber.catalog.commands.handover import Moved, Obstacle, OnStep, PublisherState
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.native_subscription import SEQUENCE, Mark, Move, NativeSubscription
from subscriber.catalog.store import progress_records, quarantine
from subscriber.catalog.store.prepared_transactions import (
    delete_prepared,
    has_committed_ahead,
    has_prepared_transactions,
)
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscription_sequence import load_sequences
from subscriber.catalog.store.subscriptions import (
    count_conflicts,
    delete_subscription,
    disable_subscription,
    enable_subscription,
    find_subscription,
)
from subscriber.display import sql_identifier
from subscriber.errors import StatementError
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.publisher.replication_stream import check_publisher, target_behind
from subscriber.quoting import identifier, literal
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import OPTIONS, STORED_OPTIONS, SequenceMode, Subscription, TwoPhaseState

CREATE_TIMEOUT = 60.0  # seconds for CREATE SUBSCRIPTION, which connects to the publisher

# Options that PostgreSQL's worker does without, with the same rows.
WITHOUT_INFLUENCE = (
    *("conflict_history", "conflict_log_rows", "copy_engine", "apply_sessions", "trusted_owners"),
    "wal_budget",
)
# Options with conditions of their own (_obstacles_of_version, _create_statement).
SPECIAL = {
    *("enabled", "slot_name", "two_phase", "streaming", "binary", "run_as_owner", "password_required"),
    *("sequences", "sequence_names", "retain_dead_tuples"),
}


async def hand_back_subscription(
    connection: asyncpg.Connection,
    name: str,
    *,
    notice: Notice,
    on_step: OnStep,
    settings: Settings = DEFAULTS,
) -> Moved | None:
    """Return the subscription with this name to PostgreSQL.

    Args:
        connection: A connection to the target, outside of a transaction, that commits synchronously.
        name: The subscription.
        notice: Called with PostgreSQL's notices and our own.
        on_step: Called after each step.
        settings: Time limits.

    Returns:
        The result, or None if the subscription is PostgreSQL's already.

    Raises:
        StatementError: The subscription does not exist, or cannot be handed back exactly. It runs as before.
        PublisherError: The slot is lost, or ahead of the target. It runs as before.
        ServerError: An error of the publisher.
        asyncpg.PostgresError: An error of the target.

    Cancellation: the subscription runs as before, unless it is handed back already.
    """
    await handover.check_superuser(connection, Move.HAND_BACK)
    await identity.check(connection)
    native = await native_subscription.find(connection, name)
    ours = await find_subscription(connection, name)
    if ours is None:
        if native is None:
            raise await handover.not_found(
                connection, name, Move.HAND_BACK, await privileges.subscription_names(connection)
            )
        return None
    if native is not None and (native.mark is None or native.mark.move is not Move.HAND_BACK):
        raise handover.name_taken(name)
    handover.refuse_obstacles(name, Move.HAND_BACK, await _find_obstacles(connection, ours))
    slot_name = ours.slot_name
    assert slot_name is not None
    async with publisher_connection.connect_to_publisher(
        connection, name, ours.conninfo, password=ours.must_use_password
    ) as publisher:
        async with handover.answering():
            await handover.find_slot(publisher, name, slot_name)
        mark = await _create(connection, publisher.server_version, ours, native, notice)
        async with handover.undoing(
            connection,
            notice,
            name,
            Move.HAND_BACK,
            lambda: native_subscription.drop(connection, name),
            lambda: _enable_again(connection, ours, mark),
        ):
            on_step("disabled", f"subscription {name} is disabled, and PostgreSQL's is created without a slot")
            reach(Point.HAND_BACK_CREATED)
            await worker_shutdown.wait_until_gone(connection, ours.oid, grace=settings.worker_shutdown_grace)
            state = await handover.read_publisher(publisher, name, slot_name)
            on_step("stopped", "its workers have ended")
            reach(Point.HAND_BACK_STOPPED)
            moved = await _hand_back(connection, state, ours, mark)
    reach(Point.HANDED_BACK)
    return moved


async def _enable_again(connection: asyncpg.Connection, ours: Subscription, mark: Mark) -> None:
    if mark.was_enabled:
        await enable_subscription(connection, ours.oid)


# --- obstacles ----------------------------------------------------------------------------------


async def _find_obstacles(connection: asyncpg.Connection, ours: Subscription) -> list[Obstacle]:
    """Return the reasons why PostgreSQL would not continue with exactly the same result."""
    columns = await native_subscription.load_columns(connection)
    obstacles = [
        *_obstacles_of_version(ours, connection.get_server_version().major, columns),
        *_obstacles_of_options(ours),
        *await _obstacles_of_state(connection, ours),
    ]
    if not await native_subscription.may_log_in(connection, ours.owner):
        problem = f"PostgreSQL's worker logs in as the subscription's owner, and role {ours.owner} may not."
        remedy = f"ALTER ROLE {sql_identifier(ours.owner)} LOGIN; and GRANT CONNECT ON DATABASE … TO it."
        obstacles.append(Obstacle(problem, remedy))
    if not await native_subscription.has_workers_allowed(connection):
        remedy = "ALTER SYSTEM SET max_logical_replication_workers = 4; and restart the target."
        obstacles.append(Obstacle("The target runs no workers of subscriptions.", remedy))
    return obstacles


def _obstacles_of_version(ours: Subscription, major: int, columns: frozenset[str]) -> list[Obstacle]:
    """Return the options of `ours` that this version of PostgreSQL lacks, or has with a fixed value."""
    alter, server = f"ALTER SUBSCRIPTION {sql_identifier(ours.name)}", f"PostgreSQL {major}"
    obstacles = [
        Obstacle(f"{server} does not have the option {option}.", f"{alter} SET ({option} = {_spelt(default)});")
        for option, column in STORED_OPTIONS.items()
        if column.name not in columns
        and option not in SPECIAL
        and option not in WITHOUT_INFLUENCE
        and getattr(ours, option) != (default := OPTIONS[option].default)
    ]
    if "subtwophasestate" not in columns and ours.two_phase is not TwoPhaseState.DISABLED:
        obstacles.append(
            Obstacle(
                f"{server} does not have the option two_phase.", f"{alter} SET (two_phase = false); while disabled."
            )
        )
    if "subrunasowner" not in columns and not ours.run_as_owner:
        problem = f"{server} always applies changes as the owner of the subscription, not as the owners of the tables."
        obstacles.append(Obstacle(problem, f"{alter} SET (run_as_owner = true);"))
    if "subpasswordrequired" not in columns and not ours.owner_is_superuser:
        problem = f"In {server} only a superuser may own a subscription, and {ours.owner} is none."
        obstacles.append(Obstacle(problem, f"{alter} OWNER TO CURRENT_USER;"))
    if "subskiplsn" not in columns and ours.skip_lsn:
        obstacles.append(Obstacle(f"{server} cannot skip a transaction.", f"{alter} SKIP (lsn = NONE);"))
    if "subserver" not in columns and ours.server is not None:
        obstacles.append(Obstacle(f"{server} cannot connect by a foreign server.", f"{alter} CONNECTION '…';"))
    return obstacles


def _obstacles_of_options(ours: Subscription) -> list[Obstacle]:
    """Return the options of `ours` that no version of PostgreSQL has, or that it implements in another way."""
    alter, obstacles = f"ALTER SUBSCRIPTION {sql_identifier(ours.name)}", []
    if ours.slot_name is None:
        obstacles.append(
            Obstacle("It has no replication slot.", f"{alter} SET (slot_name = '…'); with its slot's name.")
        )
    if ours.retain_dead_tuples:
        problem = "PostgreSQL does not know the deleted rows that subscriber has remembered."
        remedy = f"{alter} DISABLE; {alter} SET (retain_dead_tuples = false); {alter} ENABLE;"
        obstacles.append(Obstacle(problem, remedy))
    if ours.sequences is SequenceMode.FOLLOW:
        problem = "PostgreSQL does not keep sequences ahead of the publisher's."
        obstacles.append(Obstacle(problem, f"{alter} SET (sequences = copy);"))
    if ours.sequence_names:
        problem = "PostgreSQL synchronizes no sequences that are not published."
        obstacles.append(Obstacle(problem, f"{alter} SET (sequence_names = '');"))
    return obstacles


async def _obstacles_of_state(connection: asyncpg.Connection, ours: Subscription) -> list[Obstacle]:
    """Return the work of `ours` that has not ended, and the records that would be lost."""
    obstacles = []
    first = "" if ours.enabled else f"ALTER SUBSCRIPTION {sql_identifier(ours.name)} ENABLE; "
    if unready := await load_relation_states(connection, ours.oid, not_ready=True):
        shown = handover.describe_relations((relation.namespace, relation.name, relation.state) for relation in unready)
        remedy = f"{first}Wait until `subscriber status` shows all tables as ready."
        obstacles.append(Obstacle(f"Tables are not synchronized: {shown}.", remedy))
    if waiting := [
        sequence for sequence in await load_sequences(connection, ours.oid) if sequence.state != TableState.READY
    ]:
        shown = handover.describe_relations((sequence.schema, sequence.name, sequence.state) for sequence in waiting)
        remedy = f"{first}`subscriber status` shows the reason."
        obstacles.append(Obstacle(f"Sequences are not synchronized: {shown}.", remedy))
    if hooked := await hooked_tables.sources(connection, ours.oid):
        shown = ", ".join(sorted(".".join(source) for source in hooked.values()))
        remedy = "Run the program once with Hooks(), an empty one, for this subscription."
        obstacles.append(Obstacle(f"Hooks change the rows of: {shown}.", remedy))
    if await has_prepared_transactions(connection, ours.oid) or await has_committed_ahead(connection, ours.oid):
        remedy = f"{first}COMMIT PREPARED or ROLLBACK PREPARED on the publisher, until subscriber.prepared is empty."
        obstacles.append(Obstacle("Transactions are prepared on the target: see view subscriber.prepared.", remedy))
    if parked := await quarantine.count(connection, ours.oid):
        remedy = f"ALTER SUBSCRIPTION {sql_identifier(ours.name)} QUARANTINE RETRY; or DISCARD them."
        obstacles.append(Obstacle(f"Transactions are in quarantine: {parked}.", remedy))
    if count := await count_conflicts(connection, ours.oid):
        records = f"{count:,} records" if count > 1 else "A record"
        problem = f"{records} of subscriber.conflict_history would be deleted."
        remedy = (
            f"Copy them elsewhere if you need them; DELETE FROM subscriber.conflict_history WHERE subid = {ours.oid};"
        )
        obstacles.append(Obstacle(problem, remedy))
    return obstacles


async def _obstacles_of_relations(
    connection: asyncpg.Connection, publisher_version: int, ours: Subscription, native: NativeSubscription
) -> list[Obstacle]:
    """Return the tables and sequences that only one of the subscriptions has."""
    refresh = f"ALTER SUBSCRIPTION {sql_identifier(ours.name)} REFRESH PUBLICATION;"
    created = await native_subscription.load_relations(connection, native.oid)
    theirs = {(table.schema, table.name) for table in created if table.relkind != SEQUENCE}
    known = {(relation.namespace, relation.name) for relation in await load_relation_states(connection, ours.oid)}
    differences = [
        ("Tables of the publications are not in the subscription", theirs - known, refresh),
        ("Tables of the subscription are not in the publications", known - theirs, refresh),
    ]
    if _carries_sequences(connection, publisher_version):
        theirs = {(table.schema, table.name) for table in created if table.relkind == SEQUENCE}
        known = {(sequence.schema, sequence.name) for sequence in await load_sequences(connection, ours.oid)}
        refresh = f"ALTER SUBSCRIPTION {sql_identifier(ours.name)} SET (sequences = copy); {refresh}"
        differences += [
            ("Sequences of the publications are not in the subscription", theirs - known, refresh),
            ("Sequences of the subscription are not in the publications", known - theirs, refresh),
        ]
    return [
        Obstacle(f"{problem}: {', '.join('.'.join(table) for table in sorted(different))}.", remedy)
        for problem, different, remedy in differences
        if different
    ]


def _carries_sequences(connection: asyncpg.Connection, publisher_version: int) -> bool:
    """Return True if both servers have sequences in subscriptions."""
    return features.PUBLISHED_SEQUENCES.is_in_major(
        connection.get_server_version().major
    ) and features.PUBLISHED_SEQUENCES.is_in(publisher_version)


# --- step 1 -------------------------------------------------------------------------------------


async def _create(
    connection: asyncpg.Connection,
    publisher_version: int,
    ours: Subscription,
    left: NativeSubscription | None,
    notice: Notice,
) -> Mark:
    """Create PostgreSQL's subscription without a slot, mark it, and disable ours, in one transaction.

    `left` is one that a killed command has created. It is created again, because ours may have been altered since.
    """
    former = None if left is None else left.mark
    mark = Mark(Move.HAND_BACK, ours.enabled or (former is not None and former.was_enabled))
    columns = await native_subscription.load_columns(connection)
    async with connection.transaction():
        if left is not None:
            await native_subscription.drop(connection, left.name)
        async with handover.unlogged(connection, CREATE_TIMEOUT):
            await connection.execute(_create_statement(ours, columns))
        await native_subscription.set_owner(connection, ours.name, ours.owner)
        await native_subscription.set_comment(connection, ours.name, str(mark))
        native = await native_subscription.find(connection, ours.name)
        assert native is not None
        different = await _obstacles_of_relations(connection, publisher_version, ours, native)
        handover.refuse_obstacles(ours.name, Move.HAND_BACK, different)
        await disable_subscription(connection, ours.oid)
    await _say_what_ends(connection, publisher_version, ours, notice)
    return mark


def _create_statement(ours: Subscription, columns: frozenset[str]) -> str:
    """Return CREATE SUBSCRIPTION with the options that are columns of this server's pg_subscription."""
    values: dict[str, Any] = {
        option: getattr(ours, option)
        for option, column in STORED_OPTIONS.items()
        if column.name in columns and option not in SPECIAL
    }
    values["binary"] = bool(ours.binary)  # not set: text, which has the same result
    values["streaming"] = ours.streaming.option
    if "subrunasowner" in columns:  # since PostgreSQL 16
        values |= {"run_as_owner": ours.run_as_owner, "password_required": ours.password_required}
    elif ours.streaming.option == "parallel":
        values["streaming"] = "on"
    if "subtwophasestate" in columns:
        values["two_phase"] = ours.two_phase is not TwoPhaseState.DISABLED
    options = ", ".join(f"{option} = {_spelt(value)}" for option, value in values.items())
    source = f"CONNECTION {literal(ours.conninfo)}" if ours.server is None else f"SERVER {identifier(ours.server)}"
    publications = ", ".join(identifier(name) for name in ours.publications)
    return (
        f"CREATE SUBSCRIPTION {identifier(ours.name)} {source} PUBLICATION {publications}"
        f" WITH (enabled = false, create_slot = false, slot_name = NONE, copy_data = false, {options})"
    )


def _spelt(value: Any) -> str:
    """Return the value of an option in a statement."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else literal("" if value == () else str(value))


async def _say_what_ends(
    connection: asyncpg.Connection, publisher_version: int, ours: Subscription, notice: Notice
) -> None:
    """Name the settings and sequences that PostgreSQL does without."""
    ended = [option for option in WITHOUT_INFLUENCE if getattr(ours, option) != OPTIONS[option].default]
    if ended:
        notice("NOTICE", f"PostgreSQL does not have these options: {', '.join(ended)}", None, None)
    sequences = await load_sequences(connection, ours.oid)
    if sequences and not _carries_sequences(connection, publisher_version):
        notice("NOTICE", "PostgreSQL does not synchronize the sequences, which keep their values", None, None)


# --- step 3 -------------------------------------------------------------------------------------


async def _hand_back(
    connection: asyncpg.Connection, publisher: PublisherState, ours: Subscription, mark: Mark
) -> Moved:
    """Give slot and position to PostgreSQL's subscription, and delete ours, in one transaction."""
    columns, slot = await native_subscription.load_columns(connection), publisher.slot
    async with connection.transaction():
        # Both subscriptions are locked until the commit: no statement can alter one, and no worker can start.
        now = await privileges.get_owned_subscription(connection, ours.name)
        await worker_shutdown.end_workers(connection, ours.oid)
        await native_subscription.set_slot_name(connection, ours.name, slot.name)
        native = await native_subscription.find(connection, ours.name)
        unaltered = now.slot_name == slot.name and _create_statement(now, columns) == _create_statement(ours, columns)
        if native is None or native.enabled or native.mark != mark or not unaltered:
            raise StatementError(
                f'subscription "{ours.name}" was altered by another session',
                hint="Run the command again.",
                sqlstate=OBJECT_IN_USE,
            )
        obstacles = await _find_obstacles(connection, replace(now, enabled=mark.was_enabled))
        obstacles += await _obstacles_of_relations(connection, publisher.version, now, native)
        handover.refuse_obstacles(ours.name, Move.HAND_BACK, obstacles)
        position = await _final_position(connection, publisher, now)
        await _move_origin(connection, ours, native, position)
        if now.skip_lsn:
            await native_subscription.skip(connection, ours.name, now.skip_lsn)
        await native_subscription.set_comment(connection, ours.name, None)
        await native_subscription.set_enabled(connection, ours.name, enabled=mark.was_enabled)
        relations = await native_subscription.load_relations(connection, native.oid)
        await delete_prepared(connection, ours.oid)
        await delete_subscription(connection, ours.oid)
        reach(Point.HAND_BACK_READY)
    sequences = sum(relation.relkind == SEQUENCE for relation in relations)
    return Moved(
        name=ours.name,
        slot=slot.name,
        position=max(position, slot.confirmed_flush or position),
        tables=len(relations) - sequences,
        sequences=sequences,
        enabled=mark.was_enabled,
    )


async def _final_position(connection: asyncpg.Connection, publisher: PublisherState, ours: Subscription) -> Lsn:
    """Return the position of the progress record, after the checks of a worker that starts.

    The commit of the connection's transaction makes it durable, with everything that the worker has committed.

    Raises:
        PublisherError: The publisher or the slot does not fit the position.
        StatementError: The publisher has failed over since a worker has connected to it.
    """
    position = await progress_records.load(connection, ours.oid)
    if position is None:
        raise StatementError(f'progress of subscription "{ours.name}" is missing in the catalog')
    system, slot = publisher.system, publisher.slot
    check_publisher(system, int(ours.system_id) if ours.system_id else None, position)
    same = ours.timeline_system == str(system.systemid)
    if same and (ours.timeline, ours.timeline_history) != (system.timeline, publisher.history):
        raise StatementError(
            f"the publisher continues on timeline {system.timeline}, which the subscription has not seen",
            hint=Remedy(
                command=f"ALTER SUBSCRIPTION {sql_identifier(ours.name)} ENABLE;",
                then=Remedy("try again when it is streaming."),
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    confirmed = await progress_records.load_confirmed(connection, ours.oid)
    there = slot.confirmed_flush or Lsn(0)
    if confirmed is not None and there > max(position, confirmed):
        raise target_behind(slot.name, there, max(position, confirmed))
    return position


async def _move_origin(
    connection: asyncpg.Connection, ours: Subscription, native: NativeSubscription, position: Lsn
) -> None:
    """Give our origin to PostgreSQL's subscription, at `position`, and drop those of parallel workers."""
    own = names.apply_origin(ours.oid)
    of_workers = await origins.find_origins(connection, ours.oid)
    if own in of_workers:
        await native_subscription.drop_origin(connection, native.origin_name)
        await origins.rename_origin(connection, own, native.origin_name)
    for origin in of_workers:
        if origin != own:
            await origins.drop_origin(connection, origin, missing_ok=True)
    # After a rollback the origin is ours again, and at our position.
    await native_subscription.set_progress(connection, native.origin_name, position)
