"""PostgreSQL's logical-replication subscriber, outside the server.

    import subscriber

    async with subscriber.connect(target_dsn) as db:
        await db.execute("CREATE SUBSCRIPTION s CONNECTION '…' PUBLICATION p")
        async with db.running():
            await db.wait_for_sync("s")

What is public is what `__all__` names. Everything is imported when it is first used: the command
`subscriber --help` has to answer in a tenth of a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.database import Database, connect
    from subscriber.errors import (
        ApplyError,
        ConnectionLost,
        ConninfoError,
        ProtocolError,
        PublisherError,
        PublisherReplaced,
        ServerError,
        SlotLost,
        StatementError,
        SubscriberError,
    )
    from subscriber.lsn import Lsn
    from subscriber.subscription import Subscription

__all__ = [
    "ApplyError",
    "ConnectionLost",
    "ConninfoError",
    "Database",
    "Lsn",
    "ProtocolError",
    "PublisherError",
    "PublisherReplaced",
    "ServerError",
    "SlotLost",
    "StatementError",
    "SubscriberError",
    "Subscription",
    "connect",
]

_HOMES = {
    "Database": "subscriber.database",
    "connect": "subscriber.database",
    "Lsn": "subscriber.lsn",
    "Subscription": "subscriber.subscription",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'subscriber' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "subscriber.errors")), name)


def __dir__() -> list[str]:
    return __all__
