"""Add hints for the operator to errors of servers that have none, by SQLSTATE.

The messages of PostgreSQL are not changed.
"""

from __future__ import annotations

import re
from dataclasses import replace

from subscriber.display import shell_word
from subscriber.errors import (
    BinaryRefused,
    HookError,
    PublisherReplaced,
    ServerError,
    SlotLost,
    SubscriberError,
    TargetBehind,
)
from subscriber.lsn import Lsn
from subscriber.publisher.replication_stream import NO_PUBLICATION
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.retry import Reaction, reaction
from subscriber.sqlstate import (
    DISK_FULL,
    INSUFFICIENT_PRIVILEGE,
    OBJECT_IN_USE,
    READ_ONLY_SQL_TRANSACTION,
    UNIQUE_VIOLATION,
)

# For errors of both servers after the connection was accepted.
_LATER = {
    OBJECT_IN_USE: "Somebody else reads from the slot: the walsender of a connection that the publisher has not missed "
    "yet, and then it goes on by itself; or another subscriber, and then one of the two needs a slot of its own.",
    READ_ONLY_SQL_TRANSACTION: "The target is a standby. It goes on by itself once the target takes writes.",
    DISK_FULL: "Make room on the target. It goes on by itself.",
}

# Functions of src/backend/replication/logical/origin.c
_ORIGIN_ROUTINES = ("replorigin_session_setup", "replorigin_drop_guts", "replorigin_state_clear", "replorigin_advance")


def add_hint(error: BaseException, subscription: str | None = None) -> None:
    """Add a hint to an error of a server that has none, and the command to one that a new slot repairs.

    Args:
        error: the error of a worker. Other errors are not changed.
        subscription: the subscription, if the error is its apply worker's.
    """
    if isinstance(error, SlotLost | TargetBehind | PublisherReplaced) and subscription is not None:
        reseed = f"subscriber reseed {shell_word(subscription)}"
        if error.command != reseed:
            run = Remedy("make a new slot, and repair only the rows that differ", reseed)
            error.amend(hint=run.with_alternative(error.remedy))
    if isinstance(error, BinaryRefused) and subscription is not None:
        alter = f"ALTER SUBSCRIPTION {identifier(subscription)} SET (binary = false);"
        error.amend(hint=Remedy("if a type has no binary format, request text", alter))
    if isinstance(error, SubscriberError) and error.remedy == NO_PUBLICATION and subscription is not None:
        new_slot = Remedy("when it is there again", f"subscriber reseed {shell_word(subscription)}")
        remove = f"ALTER SUBSCRIPTION {identifier(subscription)} SET PUBLICATION …;"
        error.amend(
            hint=replace(NO_PUBLICATION, then=new_slot).with_alternative(
                Remedy(f"remove it from the subscription: {remove}")
            )
        )
    if isinstance(error, ServerError) and error.remedy is None:
        error.amend(hint=_of_origin(error) or _find(_LATER, error.sqlstate))


def _of_origin(error: ServerError) -> Remedy | None:
    """Return the remedy for an origin that another session has. It has the SQLSTATE of a slot that is in use."""
    if error.sqlstate != OBJECT_IN_USE or error.fields.get("R") not in _ORIGIN_ROUTINES:
        return None
    pids = re.findall(r"\d+", error.message)  # the last number of the message, which is translated
    wait = (
        "another session of the target applies changes with this replication origin. The session of a worker that was"
        " killed ends by itself, and then it goes on by itself"
    )
    return Remedy(f"{wait}. If it stays, on the target", f"SELECT pg_terminate_backend({pids[-1]});" if pids else None)


def add_copy_remedy(error: BaseException, subscription: str, table: str) -> None:
    """Add what to do about rows of the target that have the keys of copied rows.

    Args:
        error: the error of a table synchronization. Other errors are not changed.
        subscription: the name of the subscription.
        table: schema.table on the target.
    """
    if isinstance(error, ServerError) and error.sqlstate == UNIQUE_VIOLATION and error.remedy is None:
        resync = f"subscriber resync {shell_word(subscription)} {shell_word(table)}"
        error.amend(
            hint=Remedy(
                "the table has rows already. Compare it with the publisher's, and repair the rows that differ",
                resync,
                alternative=Remedy("empty the table, and copy it", f"{resync} --truncate"),
            )
        )


def skip_remedy(error: BaseException, subscription: str) -> Remedy | None:
    """Return the remedy with the statement that skips the transaction of an error.

    None: the error is of no transaction, or a retry can help.

    Format `postgres` of the log does not have it: the CONTEXT of PostgreSQL's own lines has the position.
    """
    if not isinstance(error, SubscriberError) or error.finish_lsn is None or reaction(error) is not Reaction.INTERVAL:
        return None
    is_of_hook = isinstance(error, HookError)  # tables with hooks cannot be repaired
    correct = Remedy(f"correct the {'hook' if is_of_hook else 'data or the table on the target'}.")
    if error.sqlstate == INSUFFICIENT_PRIVILEGE:
        correct = Remedy("find the missing privilege", f"subscriber check {shell_word(subscription)}")
    then = None if is_of_hook else Remedy("repair its rows", f"subscriber repair {shell_word(subscription)}")
    skip = f"ALTER SUBSCRIPTION {identifier(subscription)} SKIP (lsn = '{Lsn(error.finish_lsn)}');"
    return correct.with_alternative(Remedy("skip the transaction", skip, then))


def _find(hints: dict[str, str], sqlstate: str) -> str | None:
    fitting = [prefix for prefix in hints if sqlstate.startswith(prefix)]
    return hints[max(fitting, key=len)] if fitting else None
