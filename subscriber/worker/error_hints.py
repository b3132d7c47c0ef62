"""What the operator can do about an error that comes without a hint, by SQLSTATE and by who has said it.

PostgreSQL's own messages stay as they are; this only fills in a hint where there is none.
"""

from __future__ import annotations

from subscriber.errors import ServerError
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

_CONNECTION = "Correct the subscription's connection: ALTER SUBSCRIPTION … CONNECTION '…'."

# Said by the publisher while a worker connects. The longest prefix that fits counts.
REFUSALS = {
    INVALID_PASSWORD: f"The password is not, or no longer, that of the role. {_CONNECTION}",
    CLASS_INVALID_AUTHORIZATION: "The publisher's pg_hba.conf has no line for this role, database and address, or the "
    f"role may not log in or has no REPLICATION attribute. {_CONNECTION}",
    INVALID_CATALOG_NAME: _CONNECTION,
    INSUFFICIENT_PRIVILEGE: "On the publisher: ALTER ROLE … WITH REPLICATION.",
    TOO_MANY_CONNECTIONS: "The publisher has no connection or walsender left: see its max_connections and "
    "max_wal_senders.",
}

# Said by either server later on.
_LATER = {
    OBJECT_IN_USE: "Somebody else reads from the slot: the walsender of a connection that the publisher has not missed "
    "yet, and then it goes on by itself; or another subscriber, and then one of the two needs a slot of its own.",
    READ_ONLY_SQL_TRANSACTION: "The target is a standby. It goes on by itself once the target takes writes.",
    DISK_FULL: "Make room on the target. It goes on by itself.",
}


def connection_hint(sqlstate: str) -> str | None:
    """For an error of connecting to the publisher; None if there is nothing to say."""
    return _find(REFUSALS, sqlstate)


def add_hint(error: BaseException) -> None:
    """Give an error of a server's a hint, if it has none."""
    if isinstance(error, ServerError) and error.hint is None:
        error.hint = _find(_LATER, error.sqlstate)


def _find(hints: dict[str, str], sqlstate: str) -> str | None:
    found = [prefix for prefix in hints if sqlstate.startswith(prefix)]
    return hints[max(found, key=len)] if found else None
