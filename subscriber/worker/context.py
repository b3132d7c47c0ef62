"""What all workers of one launcher share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from subscriber.apply.hooks.config import Hooks
from subscriber.catalog.connection import CatalogConnection
from subscriber.settings import DEFAULTS, Settings
from subscriber.spool.spool import Spool
from subscriber.targets.postgres.conflicts.resolution import Resolver
from subscriber.worker.status import Board
from subscriber.worker.wal_flush import Flusher


def _default_root() -> Path:
    """Where temporary files may be large: TMPDIR, or /var/tmp, which is on a disk where /tmp may be memory."""
    if "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK | os.X_OK):
        return Path("/var/tmp")
    return Path(tempfile.gettempdir())


def open_spool(settings: Settings, sync_id: str, subid: int, relid: int) -> Spool:
    """Open the spool of one worker: a private directory in `settings.spool_dir`.

    Args:
        sync_id: of the target, see catalog/identity.py.
        relid: 0 for the apply worker.
    """
    root = settings.spool_dir or _default_root()
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
    """What all subscriptions of one launcher share."""

    target: str = field(repr=False)  # the target's connection string, of the role that runs the launcher
    apply_target: str = field(repr=False)  # of the role that applies changes
    sync_id: str  # the target's, see catalog/identity.py
    catalog: CatalogConnection
    flusher: Flusher
    board: Board
    resolvers: Mapping[str, Resolver] = field(default_factory=dict)  # functions that a conflict_policy may call
    hooks: Mapping[str, Hooks] = field(default_factory=dict)  # by subscription; one with none has no hooks
    settings: Settings = DEFAULTS
