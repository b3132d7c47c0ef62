"""Add hints for the operator to errors of servers that have none, by SQLSTATE.

The messages of PostgreSQL are not changed.
"""

from __future__ import annotations

import shlex

from subscriber.errors import HookError, PublisherReplaced, ServerError, SlotLost, SubscriberError, TargetBehind
from subscriber.lsn import Lsn
from subscriber.quoting import identifier
from subscriber.sqlstate import (
    DISK_FULL,
    OBJECT_IN_USE,
    READ_ONLY_SQL_TRANSACTION,
)
from subscriber.worker.retry import Reaction, reaction

# For errors of both servers after the connection was accepted.
_LATER = {
    OBJECT_IN_USE: "Somebody else reads from the slot: the walsender of a connection that the publisher has not missed "
    "yet, and then it goes on by itself; or another subscriber, and then one of the two needs a slot of its own.",
    READ_ONLY_SQL_TRANSACTION: "The target is a standby. It goes on by itself once the target takes writes.",
    DISK_FULL: "Make room on the target. It goes on by itself.",
}


def add_hint(error: BaseException, subscription: str | None = None) -> None:
    """Add a hint to an error of a server that has none, and the command to one that a new slot repairs.

    Args:
        error: the error of a worker. Other errors are not changed.
        subscription: the subscription, if the error is its apply worker's.
    """
    if isinstance(error, SlotLost | TargetBehind | PublisherReplaced) and subscription is not None:
        name = shlex.quote(subscription)
        run = f"Run: subscriber reseed {name} - it makes a new slot, and reads only the rows that differ."
        if not (error.hint or "").startswith(run):
            otherwise = (error.hint or "").replace("Drop the subscription", "Or drop the subscription")
            error.hint = f"{run} {otherwise}".strip()
    if isinstance(error, ServerError) and error.hint is None:
        error.hint = _find(_LATER, error.sqlstate)


def skip_hint(error: BaseException, subscription: str) -> str | None:
    """Return the statement that skips the transaction of an error. None: the error is of none, or a retry can help.

    It is for the status and for programs. The log has PostgreSQL's own lines, whose CONTEXT has the position.
    """
    if not isinstance(error, SubscriberError) or error.finish_lsn is None or reaction(error) is not Reaction.INTERVAL:
        return None
    correct = "hook" if isinstance(error, HookError) else "data or the table on the target"
    skip = f"ALTER SUBSCRIPTION {identifier(subscription)} SKIP (lsn = '{Lsn(error.finish_lsn)}');"
    return f"Correct the {correct}, or skip the transaction: {skip}"


def _find(hints: dict[str, str], sqlstate: str) -> str | None:
    found = [prefix for prefix in hints if sqlstate.startswith(prefix)]
    return hints[max(found, key=len)] if found else None
