"""PostgreSQL's logical-replication subscriber, outside the server.

    import subscriber

    async with subscriber.connect(target_dsn) as db:
        await db.execute("CREATE SUBSCRIPTION s CONNECTION '…' PUBLICATION p")
        async with db.running():
            await db.wait_for_sync("s")

    async with subscriber.stream(source_dsn, slot="s", publications=["p"]) as stream:
        async for transaction in stream:
            async for change in transaction:
                …
            await transaction.ack()

    await subscriber.mirror(source_dsn, slot="m", publications=["p"], target="sqlite+aiosqlite:///copy.db")

A subscription between two servers; only its changes, which consume() gives to callbacks; a copy in another database.

What is public is what `__all__` names. Everything is imported when it is first used: the command
`subscriber --help` has to answer in a tenth of a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.apply.conflict import Conflict
    from subscriber.apply.hooks import Hook, Hooks
    from subscriber.consumer.callbacks import Consumer, consume
    from subscriber.consumer.changes import Change, Delete, Insert, Message, Truncate, Update
    from subscriber.consumer.opening import stream
    from subscriber.consumer.rows import NOT_SENT, UNCHANGED, Column, Missing, Relation, Row
    from subscriber.consumer.stream import Stream
    from subscriber.consumer.transaction import Kind, Transaction
    from subscriber.database import Database, connect
    from subscriber.errors import (
        ApplyError,
        CatalogMoved,
        ConnectionLost,
        ConninfoError,
        HookError,
        MappingError,
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
    from subscriber.target.metadata import hooks_from
    from subscriber.target.resolving import Resolver
    from subscriber.worker.mirror import mirror

__version__ = "0.1.0"

__all__ = [
    "NOT_SENT",
    "UNCHANGED",
    "ApplyError",
    "CatalogMoved",
    "Change",
    "Column",
    "Conflict",
    "ConnectionLost",
    "ConninfoError",
    "Consumer",
    "Database",
    "Delete",
    "Hook",
    "HookError",
    "Hooks",
    "Insert",
    "Kind",
    "Lsn",
    "MappingError",
    "Message",
    "Missing",
    "ProtocolError",
    "PublisherError",
    "PublisherReplaced",
    "Relation",
    "Resolver",
    "Row",
    "ServerError",
    "SlotLost",
    "StatementError",
    "Stream",
    "SubscriberError",
    "Subscription",
    "Transaction",
    "Truncate",
    "Update",
    "connect",
    "consume",
    "hooks_from",
    "mirror",
    "stream",
]

_HOMES = {
    "Change": "subscriber.consumer.changes",
    "Column": "subscriber.consumer.rows",
    "Consumer": "subscriber.consumer.callbacks",
    "Delete": "subscriber.consumer.changes",
    "Insert": "subscriber.consumer.changes",
    "Kind": "subscriber.consumer.transaction",
    "Message": "subscriber.consumer.changes",
    "Missing": "subscriber.consumer.rows",
    "NOT_SENT": "subscriber.consumer.rows",
    "Relation": "subscriber.consumer.rows",
    "Row": "subscriber.consumer.rows",
    "Stream": "subscriber.consumer.stream",
    "Transaction": "subscriber.consumer.transaction",
    "Truncate": "subscriber.consumer.changes",
    "UNCHANGED": "subscriber.consumer.rows",
    "Update": "subscriber.consumer.changes",
    "consume": "subscriber.consumer.callbacks",
    "stream": "subscriber.consumer.opening",
    "Conflict": "subscriber.apply.conflict",
    "Database": "subscriber.database",
    "Hook": "subscriber.apply.hooks",
    "Hooks": "subscriber.apply.hooks",
    "connect": "subscriber.database",
    "hooks_from": "subscriber.target.metadata",
    "mirror": "subscriber.worker.mirror",
    "Lsn": "subscriber.lsn",
    "Resolver": "subscriber.target.resolving",
    "Subscription": "subscriber.subscription",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'subscriber' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "subscriber.errors")), name)


def __dir__() -> list[str]:
    return __all__
