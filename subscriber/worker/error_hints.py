"""Add hints for the operator to errors of servers that have none, by SQLSTATE.

The messages of PostgreSQL are not changed.
"""

from __future__ import annotations

import shlex

from subscriber.errors import PublisherReplaced, ServerError, SlotLost, SubscriberError, TargetBehind
from subscriber.lsn import Lsn
from subscriber.quoting import identifier
from subscriber.sqlstate import (
    CLASS_INVALID_AUTHORIZATION,
    DISK_FULL,
    INSUFFICIENT_PRIVILEGE,
    INVALID_CATALOG_NAME,
    INVALID_PASSWORD,
    OBJECT_IN_USE,
    READ_ONLY_SQL_TRANSACTION,
    TOO_MANY_CONNECTIONS,
)
from subscriber.worker.retry import Reaction, reaction

_CONNECTION = "Correct the subscription's connection: ALTER SUBSCRIPTION … CONNECTION '…'."

# For errors of the publisher while a worker connects. The longest matching prefix decides.
REFUSALS = {
    INVALID_PASSWORD: f"The password is not, or no longer, that of the role. {_CONNECTION}",
    CLASS_INVALID_AUTHORIZATION: "The publisher's pg_hba.conf has no line for this role, database and address, or the "
    f"role may not log in or has no REPLICATION attribute. {_CONNECTION}",
    INVALID_CATALOG_NAME: _CONNECTION,
    INSUFFICIENT_PRIVILEGE: "On the publisher: ALTER ROLE … WITH REPLICATION.",
    TOO_MANY_CONNECTIONS: "The publisher has no connection or walsender left: see its max_connections and "
    "max_wal_senders.",
}

# For errors of both servers after the connection was accepted.
_LATER = {
    OBJECT_IN_USE: "Somebody else reads from the slot: the walsender of a connection that the publisher has not missed "
    "yet, and then it goes on by itself; or another subscriber, and then one of the two needs a slot of its own.",
    READ_ONLY_SQL_TRANSACTION: "The target is a standby. It goes on by itself once the target takes writes.",
    DISK_FULL: "Make room on the target. It goes on by itself.",
}


def connection_hint(sqlstate: str) -> str | None:
    """Return the hint for a connection that the publisher has rejected. None: there is no hint for this SQLSTATE."""
    return _find(REFUSALS, sqlstate)


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
            error.hint = f"{run} {error.hint or ''}".strip()
    if isinstance(error, ServerError) and error.hint is None:
        error.hint = _find(_LATER, error.sqlstate)
    if (
        isinstance(error, SubscriberError)
        and error.hint is None
        and error.finish_lsn is not None
        and subscription is not None
        and reaction(error) is Reaction.INTERVAL
    ):
        error.hint = (
            "Correct the data or the table on the target, or skip the transaction: ALTER SUBSCRIPTION"
            f" {identifier(subscription)} SKIP (lsn = '{Lsn(error.finish_lsn)}');"
        )


def _find(hints: dict[str, str], sqlstate: str) -> str | None:
    found = [prefix for prefix in hints if sqlstate.startswith(prefix)]
    return hints[max(found, key=len)] if found else None
