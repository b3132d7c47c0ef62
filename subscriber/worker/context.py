"""LauncherContext: the objects and settings that all workers of one launcher share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import anyio

from subscriber.apply.conflicts.rules import Resolver
from subscriber.apply.hooks.config import Hooks
from subscriber.catalog.connection import CatalogConnection
from subscriber.connection.conninfo import Conninfo
from subscriber.publisher.notices import NoticeLog
from subscriber.settings import DEFAULTS, Settings
from subscriber.spool.spool import Spool, default_spool_root
from subscriber.subscription import Subscription
from subscriber.worker.copy_rate import CopyRate
from subscriber.worker.status import Board
from subscriber.worker.wal_flush import Flusher

# Receives the name of a subscription, and an error of its workers that a retry alone cannot solve.
OnError: TypeAlias = Callable[[str, BaseException], Awaitable[None]]


async def ignore_error(_subscription: str, _error: BaseException) -> None:
    """Leave an error to the log and the status."""


def open_spool(settings: Settings, sync_id: str, subid: int, relid: int) -> Spool:
    """Return the spool of one worker, which uses a private directory in `settings.spool_dir`.

    Its limit is `settings.spool_limit`, or half of the free space of the disk.

    Args:
        settings: the directory, limit and buffer size.
        sync_id: the identifier of the target (catalog/identity.py).
        subid: OID of the subscription.
        relid: the place of the worker (catalog/worker_sessions.py). 0: the apply worker.
    """
    root = settings.spool_dir or default_spool_root()
    limit = settings.spool_limit
    if limit is None and root.exists():
        limit = shutil.disk_usage(root).free // 2
    return Spool(
        root / f"subscriber-{os.getuid()}-{sync_id}-{subid}-{relid}",
        limit=limit,
        buffer_size=settings.spool_buffer_size,
    )


@dataclass(frozen=True, slots=True)
class LauncherContext:
    """The objects and settings that all subscriptions of one launcher share.

    Attributes:
        target: the target's connection string for the role that runs the launcher.
        apply_target: the target's connection string for the role that applies changes.
        sync_id: the identifier of the target (catalog/identity.py).
        catalog: the launcher's session on the target.
        flusher: makes commits of workers durable.
        board: writes the status of workers.
        resolvers: the functions that a conflict_policy may call, by name.
        hooks: the program's hooks, by name of the subscription.
        settings: limits and intervals.
        on_error: called after each error of a worker that a retry alone cannot solve.
        copy_rate: the limit of initial copies.
        index_builds: the indexes that are built at a time, see `index_sessions`.
        notices: log the notices of publishers, by OID of the subscription.
        changed_sessions: OIDs of subscriptions with tables whose code changes the session's state (foreign_code.py).
    """

    target: Conninfo | str = field(repr=False)
    apply_target: Conninfo | str = field(repr=False)
    sync_id: str
    catalog: CatalogConnection
    flusher: Flusher
    board: Board
    resolvers: Mapping[str, Resolver] = field(default_factory=dict)
    hooks: Mapping[str, Hooks] = field(default_factory=dict)
    settings: Settings = DEFAULTS
    on_error: OnError = ignore_error
    copy_rate: CopyRate = field(default_factory=CopyRate)
    index_builds: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(DEFAULTS.index_sessions))
    notices: dict[int, NoticeLog] = field(default_factory=dict)
    changed_sessions: set[int] = field(default_factory=set)

    def notice_log(self, subid: int) -> NoticeLog:
        """Return the log for the notices of a subscription's publisher."""
        return self.notices.setdefault(subid, NoticeLog(self.settings.notices_per_minute))

    def of(self, subscription: Subscription) -> LauncherContext:
        """Return the context of one subscription's workers: an option of the subscription overrides a setting."""
        timeout = subscription.receiver_timeout(self.settings.receiver_timeout)
        return replace(self, settings=replace(self.settings, receiver_timeout=timeout))
