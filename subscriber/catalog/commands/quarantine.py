"""ALTER SUBSCRIPTION … QUARANTINE, and the options that quarantine excludes.

RETRY marks transactions for the worker, which applies them between two transactions of the stream. DISCARD and EDIT
change the catalog.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import asyncpg

from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.commands.quarantine_edit import edit_messages
from subscriber.catalog.grammar.parser import AlterQuarantine
from subscriber.catalog.grammar.quarantine_options import QuarantineOptions, parse_quarantine_options
from subscriber.catalog.store import quarantine as store
from subscriber.catalog.store.quarantine import QuarantinedTransaction
from subscriber.display import shell_word, sql_identifier
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.sqlstate import (
    INVALID_PARAMETER_VALUE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_OBJECT,
)
from subscriber.subscription import (
    ConflictHistory,
    CopyEngine,
    OnError,
    StatementOptions,
    Streaming,
    Subscription,
    SubscriptionOptions,
    TwoPhaseState,
)

_REASONS = {
    "streaming = parallel": "Parallel workers apply a transaction before it is complete.",
    "two_phase": "A prepared transaction holds its rows until another message.",
    "copy_engine = ranges": "While a table is copied, a transaction is applied to a part of its rows.",
}


def without_parallel_streaming(options: StatementOptions) -> StatementOptions:
    """Return the options of CREATE SUBSCRIPTION, with streaming = on as the default if on_error is quarantine."""
    if options.on_error is OnError.QUARANTINE and "streaming" not in options.specified:
        return replace(options, streaming=Streaming.ON)
    return options


def check_combination(options: SubscriptionOptions, *, in_use: bool = False) -> None:
    """Refuse options by which a transaction could pass the quarantine, or change rows that are not known.

    Args:
        options: the options as they will be. `two_phase` is a Boolean or a state.
        in_use: transactions are in quarantine, which counts as on_error = quarantine.

    Raises:
        StatementError: an option cannot be used with on_error = quarantine.
    """
    if options.on_error is not OnError.QUARANTINE and not in_use:
        return
    two_phase = getattr(options, "two_phase", False)
    chosen = {
        "streaming = parallel": options.streaming is Streaming.PARALLEL,
        "two_phase": two_phase not in (False, TwoPhaseState.DISABLED),
        "conflict_policy": bool(options.conflict_policy),
        "conflict_history = all": options.conflict_history is ConflictHistory.ALL,
        "copy_engine = ranges": options.copy_engine is CopyEngine.RANGES,
    }
    for option, is_set in chosen.items():
        if is_set:
            what = "on_error = quarantine" if not in_use else "transactions in quarantine"
            raise StatementError(
                f"{what} and {option} are mutually exclusive options",
                detail=_REASONS.get(option, "The rows that depend on such a transaction are not known."),
                hint="Use streaming = on." if option == "streaming = parallel" else None,
                sqlstate=INVALID_PARAMETER_VALUE,
            )


async def check_options(connection: asyncpg.Connection, subscription: Subscription, options: StatementOptions) -> None:
    """Check the options of ALTER SUBSCRIPTION … SET, together with those that it leaves as they are."""
    names = ("on_error", "streaming", "two_phase", "conflict_policy", "conflict_history", "copy_engine")
    if not options.specified.intersection(names):
        return
    altered = {name: getattr(options, name) for name in names if name in options.specified}
    if "two_phase" in altered:
        altered["two_phase"] = TwoPhaseState.PENDING if altered["two_phase"] else TwoPhaseState.DISABLED
    in_use = bool(await store.count(connection, subscription.oid))
    check_combination(replace(subscription, **altered), in_use=in_use)


async def refuse_while_in_use(connection: asyncpg.Connection, subscription: Subscription, what: str) -> None:
    """Refuse an operation that would ignore the quarantine.

    Args:
        connection: a connection to the target.
        subscription: the subscription.
        what: the operation, as the subject of the message.

    Raises:
        StatementError: transactions are in quarantine.
    """
    number = await store.count(connection, subscription.oid)
    if number:
        raise StatementError(
            f'{what} is impossible while transactions of subscription "{subscription.name}" are in quarantine',
            detail=f"There are {number}: subscriber quarantine list {shell_word(subscription.name)}",
            hint=Remedy(
                "repair the cause, then", f"ALTER SUBSCRIPTION {sql_identifier(subscription.name)} QUARANTINE RETRY;"
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def execute(
    connection: asyncpg.Connection, subscription: Subscription, statement: AlterQuarantine, notice: Notice
) -> None:
    """Run ALTER SUBSCRIPTION … QUARANTINE in the connection's transaction.

    Raises:
        StatementError: the transaction is not in quarantine, others depend on it, or the edit does not fit it.
    """
    options = parse_quarantine_options(statement)
    parked = {transaction.finish_lsn: transaction for transaction in await store.load(connection, subscription.oid)}
    if options.lsn is not None and options.lsn not in parked:
        raise not_in_quarantine(options.lsn, subscription.name)
    match statement.action:
        case "retry":
            await _retry(connection, subscription, parked, options.lsn)
        case "discard":
            assert options.lsn is not None
            await _discard(connection, subscription, parked, options.lsn, notice, cascade=statement.cascade)
        case "edit":
            await _edit(connection, subscription, parked, options)


def not_in_quarantine(lsn: Lsn, subscription: str) -> StatementError:
    """Return the error about a transaction that is not in quarantine."""
    return StatementError(
        f'transaction {lsn} of subscription "{subscription}" is not in quarantine',
        hint=Remedy("list those that are", f"subscriber quarantine list {shell_word(subscription)}"),
        sqlstate=UNDEFINED_OBJECT,
    )


def dependents(parked: Iterable[QuarantinedTransaction], lsn: Lsn) -> list[Lsn]:
    """Return the transactions that depend on one, directly or not, in the publisher's order."""
    dependent = {lsn}
    for transaction in sorted(parked, key=lambda one: one.finish_lsn):
        if transaction.depends_on & dependent:
            dependent.add(transaction.finish_lsn)
    return sorted(dependent - {lsn})


async def _retry(
    connection: asyncpg.Connection,
    subscription: Subscription,
    parked: dict[Lsn, QuarantinedTransaction],
    lsn: Lsn | None,
) -> None:
    """Retry all transactions, or one and those that depend on it."""
    if lsn is None:
        await store.request_retry(connection, subscription.oid, list(parked))
        return
    before = sorted(parked[lsn].depends_on & parked.keys())
    if before:
        name = sql_identifier(subscription.name)
        raise StatementError(
            f"transaction {lsn} depends on other transactions in quarantine",
            detail=f"It depends on {', '.join(str(earlier) for earlier in before)}.",
            hint=Remedy(
                f"retry these first, which retries {lsn} as well",
                f"ALTER SUBSCRIPTION {name} QUARANTINE RETRY (lsn = '{before[0]}');",
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    await store.request_retry(connection, subscription.oid, [lsn, *dependents(parked.values(), lsn)])


async def _discard(
    connection: asyncpg.Connection,
    subscription: Subscription,
    parked: dict[Lsn, QuarantinedTransaction],
    lsn: Lsn,
    notice: Notice,
    *,
    cascade: bool,
) -> None:
    """Remove a transaction. Those that depend on it stay in quarantine, unless `cascade` removes them too."""
    others = dependents(parked.values(), lsn)
    if any(parked[finish_lsn].retry for finish_lsn in [lsn, *(others if cascade else ())]):
        raise StatementError(
            f"transaction {lsn} is being retried",
            hint="Wait until the worker has retried it.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    await store.remove(connection, subscription.oid, [lsn, *others] if cascade else [lsn])
    if others and not cascade:
        name = sql_identifier(subscription.name)
        notice(
            "NOTICE",
            f"{len(others)} transaction{'s' * (len(others) > 1)} that depended on {lsn} stay in quarantine",
            None,
            f"ALTER SUBSCRIPTION {name} QUARANTINE RETRY;",
        )


async def _edit(
    connection: asyncpg.Connection,
    subscription: Subscription,
    parked: dict[Lsn, QuarantinedTransaction],
    options: QuarantineOptions,
) -> None:
    assert options.lsn is not None
    transaction = parked[options.lsn]
    messages: list[bytes] = []
    place = 0
    while True:
        records, place = await store.read_messages(connection, subscription.oid, options.lsn, place)
        if not records:
            break
        messages += records
    edited = edit_messages(messages, options.change, options.column, options.value)
    if not await store.edit(
        connection, subscription.oid, transaction, edited.records, edited.relations, edited.changes
    ):
        raise StatementError(
            f"transaction {options.lsn} is being retried, or was edited by another statement",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
