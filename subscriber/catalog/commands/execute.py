"""Executing statements about subscriptions: checks, order, messages and outcome are PostgreSQL 18's.

PostgreSQL executes them inside a server; here a client does. So no statement may leave a part of its work behind:
catalog changes are one transaction each, and effects that no rollback undoes (slots on the publisher) are last in it.

Source: AlterSubscription() and AlterSubscriptionOwner() in src/backend/commands/subscriptioncmds.c; renaming is
AlterObjectRename_internal() in alter.c. CREATE, DROP and the list of tables are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import assert_never

import asyncpg

from subscriber import server_features as features
from subscriber.apply.hooks.config import Hooks
from subscriber.catalog import identity
from subscriber.catalog.commands import (
    alter_two_phase,
    dead_tuples,
    ownership,
    privileges,
    publisher_connection,
    quarantine,
)
from subscriber.catalog.commands.create import create_subscription
from subscriber.catalog.commands.drop import drop_subscription
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.commands.refresh import refresh
from subscriber.catalog.commands.refresh_tables import refresh_tables
from subscriber.catalog.grammar.conflict_options import check_commit_times
from subscriber.catalog.grammar.options import (
    FOR_PUBLICATIONS,
    FOR_REFRESH,
    FOR_REFRESH_TABLE,
    FOR_SET,
    FOR_SKIP,
    check_publications,
    merge_publications,
    parse_options,
)
from subscriber.catalog.grammar.parser import (
    AlterConnection,
    AlterEnabled,
    AlterOptions,
    AlterOwner,
    AlterPublications,
    AlterQuarantine,
    AlterRefresh,
    AlterRefreshSequences,
    AlterRefreshTables,
    AlterRename,
    AlterSkip,
    CreateSubscription,
    DropSubscription,
    Statement,
    parse,
)
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_sequence import reset_sequences
from subscriber.catalog.store.subscriptions import (
    accept_loss,
    find_subscription,
    forget_publisher,
    rename_subscription,
    set_conninfo,
    set_enabled,
    set_options,
    set_publications,
    set_skip_lsn,
)
from subscriber.connection.errors import CLIENT_ERRORS, server_fields
from subscriber.display import sql_identifier
from subscriber.errors import ConnectionLost, ServerError, StatementError
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.server_version import Wording
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import (
    ACTIVE_SQL_TRANSACTION,
    INSUFFICIENT_PRIVILEGE,
    INVALID_PARAMETER_VALUE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
)
from subscriber.subscription import STORED_OPTIONS, StatementOptions, Subscription, TwoPhaseState

SET_OWNER = "SELECT subscriber.set_owner($1::oid, $2::oid)"
ORIGIN_PROGRESS = "SELECT subscriber.origin_progress($1::text)::text"
MAY_BECOME = "SELECT pg_catalog.pg_has_role($1::oid, $2::text)"

SET_COLUMNS = [name for name, column in STORED_OPTIONS.items() if name in FOR_SET and not column.has_states]


async def execute(
    connection: asyncpg.Connection,
    sql: str,
    *,
    notice: Notice,
    hooks: Mapping[str, Hooks] = MappingProxyType({}),
    settings: Settings = DEFAULTS,
    parameters: Sequence[str | int | bool] = (),
) -> None:
    """Execute CREATE, ALTER and DROP SUBSCRIPTION statements, separated by semicolons, one after the other.

    Nothing is executed if the text cannot be parsed. Otherwise each statement is a transaction of its own (or part of
    the connection's, where PostgreSQL allows that in a transaction block), and the first error ends the execution.
    Where the catalog belongs to another database, only statements that give up a subscription are executed.

    Args:
        connection: a connection to the target. Its role becomes the owner of new subscriptions.
        sql: the statements.
        notice: called with severity (NOTICE or WARNING), message, detail and hint of PostgreSQL's messages.
        hooks: by subscription, the hooks that decide which table of the target receives which rows.
        settings: time limits.
        parameters: the values of $1, $2, … in the text.

    Raises:
        StatementError: a statement is invalid or not allowed.
        PublisherError: the publisher refuses the operation.
        CatalogMoved: the catalog belongs to another database.
        ServerError: an error of the publisher or the target.
        ConnectionLost: a connection broke.
    """
    await execute_parsed(connection, parse(sql, parameters), notice=notice, hooks=hooks, settings=settings)


async def execute_parsed(
    connection: asyncpg.Connection,
    statements: Sequence[Statement],
    *,
    notice: Notice,
    hooks: Mapping[str, Hooks] = MappingProxyType({}),
    settings: Settings = DEFAULTS,
) -> None:
    """Execute parsed statements. The arguments and errors of execute()."""
    for statement in statements:
        try:
            if not await _gives_up(connection, statement):
                await identity.check(connection)
            await _execute(connection, statement, notice, hooks, settings)
        except (asyncpg.PostgresConnectionError, *CLIENT_ERRORS) as error:
            raise ConnectionLost(f"connection to the target was lost: {error}") from error
        except asyncpg.PostgresError as error:
            raise ServerError(server_fields(error)) from error


async def _gives_up(connection: asyncpg.Connection, statement: Statement) -> bool:
    """Return True for a statement that makes a subscription give up its slot, or ends it."""
    match statement:
        case AlterEnabled():
            return not statement.enabled
        case AlterOptions():
            options = parse_options(statement.options, FOR_SET)
            return options.specified == {"slot_name"} and options.slot_name is None
        case DropSubscription():
            subscription = await find_subscription(connection, statement.name)
            return subscription is None or subscription.slot_name is None
    return False


async def _execute(
    connection: asyncpg.Connection,
    statement: Statement,
    notice: Notice,
    hooks: Mapping[str, Hooks],
    settings: Settings,
) -> None:
    match statement:
        case CreateSubscription():
            await create_subscription(connection, statement, notice, hooks.get(statement.name))
        case DropSubscription():
            await drop_subscription(connection, statement, notice, grace=settings.worker_shutdown_grace)
        case _:
            inside = connection.is_in_transaction()
            async with connection.transaction():
                await _alter(_Altering(connection, inside, notice, hooks), statement)


class _Altering:
    """The values that every form of ALTER SUBSCRIPTION needs."""

    def __init__(
        self, connection: asyncpg.Connection, inside: bool, notice: Notice, hooks: Mapping[str, Hooks]
    ) -> None:
        self.connection = connection
        self.inside = inside  # in a transaction block of the caller's
        self.notice = notice
        self.hooks = hooks

    def outside_only(self, what: str) -> None:
        """Raise an error in a transaction block, because a rollback would not undo the command."""
        if self.inside:
            raise StatementError(f"{what} cannot run inside a transaction block", sqlstate=ACTIVE_SQL_TRANSACTION)


async def _alter(
    altering: _Altering,
    statement: AlterConnection
    | AlterPublications
    | AlterRefresh
    | AlterRefreshSequences
    | AlterRefreshTables
    | AlterEnabled
    | AlterOptions
    | AlterSkip
    | AlterQuarantine
    | AlterOwner
    | AlterRename,
) -> None:
    connection = altering.connection
    subscription = await privileges.get_owned_subscription(connection, statement.name)
    match statement:
        case AlterConnection():
            owner, _ = await privileges.find_role(connection, subscription.owner)
            origin = await publisher_connection.resolve(
                connection,
                statement.conninfo,
                statement.server,
                owner,
                password=subscription.must_use_password,
                connects=False,
                notice=altering.notice,
            )
            await publisher_connection.hide_parameters(connection)
            await set_conninfo(connection, subscription.oid, statement.conninfo, origin.server)
            # The statement decides which server is the publisher from now on.
            await forget_publisher(connection, subscription.oid)
            await progress_records.save_confirmed(connection, subscription.oid, None)
        case AlterRefreshSequences():
            await _refresh_sequences(altering, subscription)
        case AlterRefreshTables():
            options = parse_options(statement.options, FOR_REFRESH_TABLE)
            await refresh_tables(
                connection,
                subscription,
                statement.tables,
                truncate=options.truncate,
                delete_extra=options.delete_extra,
            )
        case AlterEnabled():
            if statement.enabled and subscription.slot_name is None:
                message = "cannot enable subscription that does not have a slot name"
                raise StatementError(message, sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
            await set_enabled(connection, subscription.oid, enabled=statement.enabled)
            if not statement.enabled and subscription.retain_dead_tuples:
                dead_tuples.warn_disabled(altering.notice)
        case AlterPublications():
            await _alter_publications(altering, subscription, statement)
        case AlterRefresh():
            await _alter_refresh(altering, subscription, statement)
        case AlterOptions():
            await _set_options(altering, subscription, parse_options(statement.options, FOR_SET))
        case AlterSkip():
            await _skip(connection, subscription, parse_options(statement.options, FOR_SKIP).lsn)
        case AlterQuarantine():
            await quarantine.execute(connection, subscription, statement, altering.notice)
        case AlterOwner():
            await _change_owner(connection, subscription, statement)
        case AlterRename():
            privileges.check_database(await privileges.current_role(connection))
            await privileges.check_name_is_free(connection, statement.new_name)
            await rename_subscription(connection, subscription.oid, statement.new_name)
        case _:
            assert_never(statement)


async def _alter_publications(altering: _Altering, subscription: Subscription, statement: AlterPublications) -> None:
    options = parse_options(statement.options, FOR_PUBLICATIONS)
    if statement.action == "set":
        check_publications(statement.publications)
        publications = statement.publications
    else:
        publications = merge_publications(
            subscription.publications,
            statement.publications,
            add=statement.action == "add",
            subscription=subscription.name,
        )
    await set_publications(altering.connection, subscription.oid, publications)
    if not options.refresh:
        return
    command = f"ALTER SUBSCRIPTION ... {statement.action.upper()} PUBLICATION"
    if not subscription.enabled:
        advice = f"{command} ... WITH (refresh = false)"
        raise StatementError(
            "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions",
            hint=f"Use {advice}." if statement.action == "set" else f"Use {advice} instead.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if subscription.two_phase is TwoPhaseState.ENABLED and options.copy_data:
        raise StatementError(
            "ALTER SUBSCRIPTION with refresh and copy_data is not allowed when two_phase is enabled",
            hint=f"Use {command} with refresh = false, or with copy_data = false, or use DROP/CREATE SUBSCRIPTION.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    altering.outside_only("ALTER SUBSCRIPTION with refresh")
    await refresh(
        altering.connection,
        subscription,
        publications,
        altering.notice,
        copy_data=options.copy_data,
        validate=() if statement.action == "drop" else statement.publications,
        hooks=altering.hooks.get(subscription.name),
    )


async def _alter_refresh(altering: _Altering, subscription: Subscription, statement: AlterRefresh) -> None:
    if not subscription.enabled:
        message = f"{_refresh_command(altering.connection)} is not allowed for disabled subscriptions"
        raise StatementError(message, hint=_enable(subscription), sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
    command = _refresh_command(altering.connection)
    options = parse_options(statement.options, FOR_REFRESH)
    if subscription.two_phase is TwoPhaseState.ENABLED and options.copy_data:
        raise StatementError(
            f"{command} with copy_data is not allowed when two_phase is enabled",
            hint=f"Use {command} with copy_data = false, or use DROP/CREATE SUBSCRIPTION.",
        )
    altering.outside_only(command)
    await refresh(
        altering.connection,
        subscription,
        subscription.publications,
        altering.notice,
        copy_data=options.copy_data,
        validate=(),
        hooks=altering.hooks.get(subscription.name),
    )


def _disable(subscription: Subscription) -> Remedy:
    return Remedy("disable it first", f"ALTER SUBSCRIPTION {sql_identifier(subscription.name)} DISABLE;")


def _enable(subscription: Subscription) -> Remedy:
    return Remedy("enable it first", f"ALTER SUBSCRIPTION {sql_identifier(subscription.name)} ENABLE;")


def _refresh_command(connection: asyncpg.Connection) -> str:
    """Return the name of REFRESH PUBLICATION in messages of the server's version."""
    command = "ALTER SUBSCRIPTION ... REFRESH"
    return (
        f"{command} PUBLICATION"
        if features.REFRESH_SEQUENCES.is_in_major(connection.get_server_version().major)
        else command
    )


async def _refresh_sequences(altering: _Altering, subscription: Subscription) -> None:
    """Have all sequences of the subscription synchronized again. New ones of the publications are not added."""
    if not subscription.enabled:
        message = "ALTER SUBSCRIPTION ... REFRESH SEQUENCES is not allowed for disabled subscriptions"
        raise StatementError(message, hint=_enable(subscription), sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
    await reset_sequences(altering.connection, subscription.oid)


async def _set_options(altering: _Altering, subscription: Subscription, options: StatementOptions) -> None:
    """SET (…): the catalog first; then, as no rollback undoes that, the slot on the publisher.

    Two options are the slot's too. The worker itself switches two_phase on, when it may, so only false is set here.
    """
    connection, specified = altering.connection, options.specified
    if "slot_name" in specified and options.slot_name is None and subscription.enabled:
        message = "cannot set slot_name = NONE for enabled subscription"
        raise StatementError(message, hint=_disable(subscription), sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
    if "password_required" in specified and not options.password_required:
        who = await privileges.current_role(connection)
        if not who.is_superuser:
            raise privileges.password_required_error()
    if "trusted_owners" in specified:
        await privileges.check_trusted_owners(connection, options.trusted_owners)
    if "two_phase" in specified:
        _check_slot_option(altering, subscription, "two_phase", slot_too=not options.two_phase)
        if "slot_name" in specified and not options.two_phase:
            raise StatementError('"slot_name" and "two_phase" cannot be altered at the same time')
        await alter_two_phase.change(connection, subscription, wanted=options.two_phase)
    if "failover" in specified:
        _check_slot_option(altering, subscription, "failover", slot_too=True)
    await check_commit_times(connection, options.conflict_policy)
    await quarantine.check_options(connection, subscription, options)
    await _check_retention(altering, subscription, options)
    # Who is no superuser sees only subscriptions that require passwords, and may not write that column.
    unchanged = options.password_required == subscription.password_required
    names = [name for name in SET_COLUMNS if name in specified and not (name == "password_required" and unchanged)]
    if names:
        await set_options(connection, subscription.oid, {name: getattr(options, name) for name in names})
    if "retain_dead_tuples" in specified:
        await dead_tuples.set_triggers(connection, subscription.oid, altering.notice)
    if "source_tag" in specified:
        await ownership.check_rules(connection, subscription.oid, altering.notice)
    await _check_origins(altering, subscription, options)
    if "slot_name" in specified:
        # Also where the name stays the same: the worker continues from where the slot stands
        # (worker/apply/confirmed_position.py).
        await progress_records.save_confirmed(connection, subscription.oid, None)
        # ... or from where the publisher's history parts from the applied changes (worker/apply/progress_claim.py).
        if options.slot_name is not None:
            await accept_loss(connection, subscription.oid)
    failover = options.failover if "failover" in specified else None
    no_two_phase = "two_phase" in specified and not options.two_phase
    if (no_two_phase or failover is not None) and subscription.slot_name is not None:
        password = subscription.must_use_password
        async with publisher_connection.connect_to_publisher(
            connection, subscription.name, subscription.conninfo, password=password
        ) as publisher:
            await publisher.alter_slot(
                subscription.slot_name, failover=failover, two_phase=False if no_two_phase else None
            )


async def _check_retention(altering: _Altering, subscription: Subscription, options: StatementOptions) -> None:
    """Check retain_dead_tuples and max_retention_duration, and report effects that they do not have yet."""
    retains = subscription.retain_dead_tuples
    if "retain_dead_tuples" in options.specified:
        _check_slot_option(altering, subscription, "retain_dead_tuples", slot_too=False)
        if options.retain_dead_tuples and not retains:
            await dead_tuples.check(altering.connection, altering.notice)
            dead_tuples.note_disabled(altering.notice)
        retains = options.retain_dead_tuples
    if "max_retention_duration" in options.specified and options.max_retention_duration and not retains:
        dead_tuples.note_ineffective(altering.notice)


async def _check_origins(altering: _Altering, subscription: Subscription, options: StatementOptions) -> None:
    """Warn if retain_dead_tuples is set and the publisher has changes of other origins.

    The statement does not need the publisher otherwise, so an unreachable one is a warning.
    """
    specified = options.specified
    retains = (options if "retain_dead_tuples" in specified else subscription).retain_dead_tuples
    origin = (options if "origin" in specified else subscription).origin
    if not retains or origin.lower() == "none" or specified.isdisjoint(("retain_dead_tuples", "origin")):
        return
    if subscription.slot_name is None:
        return
    try:
        async with publisher_connection.connect_to_publisher(
            altering.connection, subscription.name, subscription.conninfo, password=subscription.must_use_password
        ) as publisher:
            await publisher_connection.warn_of_other_origins(
                publisher,
                subscription.name,
                subscription.publications,
                altering.notice,
                origin=origin,
                copy_data=False,
                retain_dead_tuples=retains,
                wording=Wording.of(altering.connection.get_server_version().major),
            )
    except publisher_connection.PublisherUnreachable as error:
        message = "could not check whether the publisher has changes from different origins"
        altering.notice("WARNING", message, error.message, None)


def _check_slot_option(altering: _Altering, subscription: Subscription, option: str, *, slot_too: bool) -> None:
    """Check an option of the slot, which cannot be changed while the slot is in use. `slot_too`: it alters the slot."""
    if subscription.enabled:
        message = f'cannot set option "{option}" for enabled subscription'
        raise StatementError(message, hint=_disable(subscription), sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
    if not slot_too:
        return
    if subscription.slot_name is None:
        message = f'cannot set option "{option}" for a subscription that does not have a slot name'
        raise StatementError(message, sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
    altering.outside_only(f"ALTER SUBSCRIPTION ... SET ({option})")


async def _skip(connection: asyncpg.Connection, subscription: Subscription, lsn: Lsn) -> None:
    if lsn:
        progress = await progress_records.load(connection, subscription.oid)
        text = await connection.fetchval(ORIGIN_PROGRESS, subscription.origin_name)
        reached = max(progress or Lsn(0), Lsn.parse(text) if text else Lsn(0))
        if lsn < reached:
            position = Wording.of(connection.get_server_version().major).position
            message = f"skip WAL location (LSN {position(lsn)}) must be greater than origin LSN {position(reached)}"
            raise StatementError(message, sqlstate=INVALID_PARAMETER_VALUE)
    await set_skip_lsn(connection, subscription.oid, lsn)


async def _change_owner(connection: asyncpg.Connection, subscription: Subscription, statement: AlterOwner) -> None:
    oid, name = await privileges.find_role(connection, statement.role)
    if name == subscription.owner:
        return
    can_set = features.set_role_privilege(connection.get_server_version().major)
    if not await connection.fetchval(MAY_BECOME, oid, can_set):
        raise StatementError(
            f'must be able to SET ROLE "{name}"', hint=privileges.AS_SUPERUSER, sqlstate=INSUFFICIENT_PRIVILEGE
        )
    privileges.check_database(await privileges.current_role(connection))
    await connection.execute(SET_OWNER, subscription.oid, oid)
