"""PostgreSQL's logical-replication subscriber, outside the server.

    import subscriber

    async with subscriber.connect(target_dsn) as db:
        await db.create_subscription("s", source=source_dsn, publications=["p"])
        async with db.running():
            await db.wait_for_sync("s")

    async with subscriber.stream(source_dsn, slot="s", publications=["p"]) as stream:
        async for transaction in stream:
            async for change in transaction:
                …
            await transaction.ack()

    await subscriber.mirror(source_dsn, slot="m", publications=["p"], target="sqlite+aiosqlite:///copy.db")

    async with subscriber.move_database(source_dsn, target_dsn, "move") as move:
        await move.cutover()

The examples are a subscription between two servers, a change stream without a target, and a copy in another database.
consume() passes a change stream to callbacks.

The names in `__all__` are public. A name is imported when it is first used, because `subscriber --help` has to answer
in a tenth of a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.app import App
    from subscriber.apply.conflicts.rules import Resolver
    from subscriber.apply.conflicts.types import Conflict
    from subscriber.apply.hooks.config import Hook, Hooks
    from subscriber.catalog.store.conflict_history import ConflictRecord
    from subscriber.change_stream.api import stream
    from subscriber.change_stream.changes import Change, Delete, Insert, Message, Truncate, Update
    from subscriber.change_stream.consumer import Consumer, consume
    from subscriber.change_stream.kind import Kind
    from subscriber.change_stream.rows import NOT_SENT, UNCHANGED, Column, Missing, Relation, Row
    from subscriber.change_stream.stream import Stream
    from subscriber.change_stream.transaction import Transaction
    from subscriber.check.model import Finding
    from subscriber.connection.dsn import Dsn
    from subscriber.connection.password_function import PasswordRequest, set_password_function
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
        SubscriptionFailed,
        WaitTimeout,
    )
    from subscriber.lsn import Lsn
    from subscriber.migration.hooks import HookCall, HookEvent, MoveHook
    from subscriber.migration.migration import Migration, move_database
    from subscriber.migration.plan import Standing, Step
    from subscriber.migration.results import MigrationStatus, MoveResult, Rehearsal, ServerStatus, StepEvent
    from subscriber.migration.running_command import RunningCommand
    from subscriber.migration.start import StartOptions
    from subscriber.migration.steps import MoveOptions
    from subscriber.remedy import Remedy
    from subscriber.settings import Settings
    from subscriber.status.events import (
        ConflictDetected,
        Event,
        LagCrossed,
        StateChanged,
        TableStateChanged,
        WorkerFailed,
    )
    from subscriber.status.model import SubscriptionStatus
    from subscriber.subscription import Subscription
    from subscriber.targets.base import Target
    from subscriber.targets.sqlalchemy.hooks_from_metadata import hooks_from
    from subscriber.worker.apply.custom_target import apply_to
    from subscriber.worker.mirror.mirror import mirror

__version__ = "0.1.0"

__all__ = [
    "NOT_SENT",
    "UNCHANGED",
    "App",
    "ApplyError",
    "CatalogMoved",
    "Change",
    "Column",
    "Conflict",
    "ConflictDetected",
    "ConflictRecord",
    "ConnectionLost",
    "ConninfoError",
    "Consumer",
    "Database",
    "Delete",
    "Dsn",
    "Event",
    "Finding",
    "Hook",
    "HookCall",
    "HookError",
    "HookEvent",
    "Hooks",
    "Insert",
    "Kind",
    "LagCrossed",
    "Lsn",
    "MappingError",
    "Message",
    "Migration",
    "MigrationStatus",
    "Missing",
    "MoveHook",
    "MoveOptions",
    "MoveResult",
    "PasswordRequest",
    "ProtocolError",
    "PublisherError",
    "PublisherReplaced",
    "Rehearsal",
    "Relation",
    "Remedy",
    "Resolver",
    "Row",
    "RunningCommand",
    "ServerError",
    "ServerStatus",
    "Settings",
    "SlotLost",
    "Standing",
    "StartOptions",
    "StateChanged",
    "StatementError",
    "Step",
    "StepEvent",
    "Stream",
    "SubscriberError",
    "Subscription",
    "SubscriptionFailed",
    "SubscriptionStatus",
    "TableStateChanged",
    "Target",
    "Transaction",
    "Truncate",
    "Update",
    "WaitTimeout",
    "WorkerFailed",
    "apply_to",
    "connect",
    "consume",
    "hooks_from",
    "mirror",
    "move_database",
    "set_password_function",
    "stream",
]

_HOMES = {
    "HookCall": "subscriber.migration.hooks",
    "HookEvent": "subscriber.migration.hooks",
    "Migration": "subscriber.migration.migration",
    "MigrationStatus": "subscriber.migration.results",
    "MoveHook": "subscriber.migration.hooks",
    "MoveOptions": "subscriber.migration.steps",
    "MoveResult": "subscriber.migration.results",
    "RunningCommand": "subscriber.migration.running_command",
    "StartOptions": "subscriber.migration.start",
    "Rehearsal": "subscriber.migration.results",
    "ServerStatus": "subscriber.migration.results",
    "Standing": "subscriber.migration.plan",
    "Step": "subscriber.migration.plan",
    "StepEvent": "subscriber.migration.results",
    "move_database": "subscriber.migration.migration",
    "App": "subscriber.app",
    "Change": "subscriber.change_stream.changes",
    "Column": "subscriber.change_stream.rows",
    "Consumer": "subscriber.change_stream.consumer",
    "Delete": "subscriber.change_stream.changes",
    "Insert": "subscriber.change_stream.changes",
    "Kind": "subscriber.change_stream.kind",
    "Message": "subscriber.change_stream.changes",
    "Missing": "subscriber.change_stream.rows",
    "NOT_SENT": "subscriber.change_stream.rows",
    "Relation": "subscriber.change_stream.rows",
    "Row": "subscriber.change_stream.rows",
    "Stream": "subscriber.change_stream.stream",
    "Transaction": "subscriber.change_stream.transaction",
    "Truncate": "subscriber.change_stream.changes",
    "UNCHANGED": "subscriber.change_stream.rows",
    "Update": "subscriber.change_stream.changes",
    "consume": "subscriber.change_stream.consumer",
    "stream": "subscriber.change_stream.api",
    "PasswordRequest": "subscriber.connection.password_function",
    "set_password_function": "subscriber.connection.password_function",
    "Conflict": "subscriber.apply.conflicts.types",
    "Database": "subscriber.database",
    "ConflictDetected": "subscriber.status.events",
    "ConflictRecord": "subscriber.catalog.store.conflict_history",
    "Dsn": "subscriber.connection.dsn",
    "Event": "subscriber.status.events",
    "Finding": "subscriber.check.model",
    "LagCrossed": "subscriber.status.events",
    "Remedy": "subscriber.remedy",
    "StateChanged": "subscriber.status.events",
    "SubscriptionStatus": "subscriber.status.model",
    "TableStateChanged": "subscriber.status.events",
    "WorkerFailed": "subscriber.status.events",
    "Hook": "subscriber.apply.hooks.config",
    "Hooks": "subscriber.apply.hooks.config",
    "Target": "subscriber.targets.base",
    "apply_to": "subscriber.worker.apply.custom_target",
    "connect": "subscriber.database",
    "hooks_from": "subscriber.targets.sqlalchemy.hooks_from_metadata",
    "mirror": "subscriber.worker.mirror.mirror",
    "Lsn": "subscriber.lsn",
    "Resolver": "subscriber.apply.conflicts.rules",
    "Settings": "subscriber.settings",
    "Subscription": "subscriber.subscription",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'subscriber' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "subscriber.errors")), name)


def __dir__() -> list[str]:
    return __all__
