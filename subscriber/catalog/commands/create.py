"""CREATE SUBSCRIPTION. Source: CreateSubscription() in src/backend/commands/subscriptioncmds.c."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import asyncpg

from subscriber import names
from subscriber import server_features as features
from subscriber.apply.hooks.config import Hooks
from subscriber.catalog import origins
from subscriber.catalog.commands import (
    dead_tuples,
    ownership,
    privileges,
    publisher_connection,
    quarantine,
    refresh,
    refresh_sequences,
)
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.grammar.conflict_options import check_commit_times
from subscriber.catalog.grammar.options import FOR_CREATE, check_publications, parse_options
from subscriber.catalog.grammar.parser import CreateSubscription
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscriptions import add_subscription, set_publisher, set_two_phase_state
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.display import sql_literal
from subscriber.errors import ServerError, StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.timelines import read_history
from subscriber.remedy import Remedy
from subscriber.server_version import Wording
from subscriber.sqlstate import ACTIVE_SQL_TRANSACTION, DUPLICATE_OBJECT
from subscriber.subscription import StatementOptions, TwoPhaseState


async def create_subscription(
    connection: asyncpg.Connection, statement: CreateSubscription, notice: Notice, hooks: Hooks | None = None
) -> None:
    """Everything or nothing: the slot is created last, and dropped again if the catalog's commit fails."""
    options = parse_options(statement.options, FOR_CREATE)
    if options.create_slot and connection.is_in_transaction():
        what = "CREATE SUBSCRIPTION ... WITH (create_slot = true)"
        raise StatementError(f"{what} cannot run inside a transaction block", sqlstate=ACTIVE_SQL_TRANSACTION)
    who = await privileges.current_role(connection)
    privileges.check_create(
        who, password_required=options.password_required, server_major=connection.get_server_version().major
    )
    await privileges.check_name_is_free(connection, statement.name)
    options = quarantine.without_parallel_streaming(options)
    quarantine.check_combination(options)
    if "slot_name" not in options.specified:
        options = replace(options, slot_name=statement.name)
    password = options.password_required and not who.is_superuser
    origin = await publisher_connection.resolve(
        connection,
        statement.conninfo,
        statement.server,
        who.oid,
        password=password,
        connects=options.connect,
        notice=notice,
    )
    check_publications(statement.publications)
    if options.trusted_owners:
        await privileges.check_trusted_owners(connection, options.trusted_owners)
    await check_commit_times(connection, options.conflict_policy)
    if options.retain_dead_tuples:
        await dead_tuples.check(connection, notice)
        if not options.enabled:
            dead_tuples.warn_disabled(notice)
    elif options.max_retention_duration:
        dead_tuples.note_ineffective(notice)
    async with AsyncExitStack() as stack:
        slot = _Slot(options.slot_name)
        try:
            async with connection.transaction():
                subid = await insert_subscription(connection, statement, options, who.oid, origin.server)
                await origins.create_origin(connection, names.apply_origin(subid))
                if options.connect and origin.conninfo is not None:
                    publisher = await stack.enter_async_context(
                        publisher_connection.connect_to_publisher(
                            connection, statement.name, origin.conninfo, password=password
                        )
                    )
                    await _ask_publisher(connection, publisher, subid, statement, options, slot, notice, hooks)
                await dead_tuples.set_triggers(connection, subid, notice)
                slot.committing = True
        except BaseException:
            await slot.undo(connection, notice)
            raise
    if not options.connect:
        notice(
            "WARNING",
            "subscription was created, but is not connected",
            None,
            "To initiate replication, you must manually create the replication slot, enable the subscription, and"
            " alter the subscription to refresh publications."
            if features.REFRESH_SEQUENCES.is_in_major(connection.get_server_version().major)
            else "To initiate replication, you must manually create the replication slot, enable the subscription, and"
            " refresh the subscription.",
        )


async def insert_subscription(
    connection: asyncpg.Connection, statement: CreateSubscription, options: StatementOptions, owner: int, server: int
) -> int:
    """Insert the catalog's rows of a subscription without tables, in the connection's transaction.

    Args:
        connection: A connection to the target.
        statement: The name, the connection string and the publications.
        options: The options. `two_phase` becomes pending.
        owner: OID of the role that owns the subscription.
        server: OID of the foreign server, or 0.

    Returns:
        The subscription's OID. Its origin does not exist yet.

    Raises:
        StatementError: The name is taken.
    """
    try:
        async with connection.transaction():
            await publisher_connection.hide_parameters(connection)
            subid = await add_subscription(
                connection, statement.name, owner, statement.conninfo, server, statement.publications, options
            )
    except asyncpg.UniqueViolationError:  # a concurrent statement created it first
        raise privileges.already_exists(statement.name) from None
    await progress_records.save(connection, subid, APPLY_WORKER, Lsn(0))
    return subid


class _Slot:
    """The slot on the publisher, which no rollback takes away."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.publisher: Publisher | None = None  # set once the slot is there
        self.committing = False

    async def create(self, publisher: Publisher, notice: Notice, *, two_phase: bool, failover: bool) -> None:
        assert self.name is not None
        try:
            await publisher.create_slot(self.name, snapshot="nothing", two_phase=two_phase, failover=failover)
        except ServerError as error:
            if error.sqlstate == DUPLICATE_OBJECT:
                remedy = Remedy(
                    "use another name WITH (slot_name = …), or that slot WITH (create_slot = false). If no subscriber"
                    " needs it, on the publisher",
                    f"SELECT pg_drop_replication_slot({sql_literal(self.name)});",
                )
                error.amend(hint=remedy)
            raise
        self.publisher = publisher
        notice("NOTICE", f'created replication slot "{self.name}" on publisher', None, None)

    async def undo(self, connection: asyncpg.Connection, notice: Notice) -> None:
        """Drop the slot, unless the subscription may be there: the target was lost while it committed."""
        if self.publisher is None or self.name is None:
            return
        if self.committing and connection.is_closed():
            notice(
                "WARNING",
                f'replication slot "{self.name}" was left on the publisher',
                "The connection to the target was lost before it said whether the subscription was committed.",
                "Drop the slot by hand if the subscription does not exist.",
            )
            return
        from anyio import CancelScope  # imported where it is needed, as this hardly ever is

        with CancelScope(shield=True):
            try:
                await publisher_connection.drop_slot(self.publisher, self.name, notice, missing_ok=True)
            except SubscriberError as error:
                notice("WARNING", error.message, error.detail, error.hint)


async def _ask_publisher(
    connection: asyncpg.Connection,
    publisher: Publisher,
    subid: int,
    statement: CreateSubscription,
    options: StatementOptions,
    slot: _Slot,
    notice: Notice,
    hooks: Hooks | None,
) -> None:
    """Do the part that needs the publisher: tables of its publications, its identity, the slot."""
    await publisher_connection.warn_of_missing_publications(publisher, statement.publications, notice)
    await publisher_connection.warn_of_other_origins(
        publisher,
        statement.name,
        statement.publications,
        notice,
        origin=options.origin,
        copy_data=options.copy_data is not None,
        retain_dead_tuples=options.retain_dead_tuples,
        wording=Wording.of(connection.get_server_version().major),
    )
    published = await publisher.tables(statement.publications)
    tables = await refresh.add_tables(connection, subid, published, copy_data=options.copy_data, hooks=hooks)
    await refresh_sequences.add(
        connection,
        subid,
        publisher,
        statement.publications,
        notice,
        mode=options.sequences,
        more=options.sequence_names,
        copy_data=options.copy_data is not None,
    )
    await ownership.check_rules(connection, subid, notice, copy_data=options.copy_data)
    identity = await publisher.identify_system()
    history = None if identity.in_recovery else str(await read_history(publisher, identity))
    await set_publisher(connection, subid, str(identity.systemid), identity.timeline, history)
    if options.create_slot:
        assert options.slot_name is not None
        await publisher_connection.refuse_own_cluster(connection, publisher, options.slot_name)
        # With tables to be copied, the worker enables it when they are ready: a transaction prepared while a table is
        # copied could be lost between two slots. Without any table it waits too, so that REFRESH may copy some.
        two_phase = options.two_phase and not options.copy_data and bool(tables)
        if two_phase:
            await set_two_phase_state(connection, subid, TwoPhaseState.ENABLED)
        await slot.create(publisher, notice, two_phase=two_phase, failover=options.failover)
