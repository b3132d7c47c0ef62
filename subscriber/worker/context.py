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
from subscriber.spool.spool import Spool
from subscriber.targets.postgres.conflicts.resolution import Resolver
from subscriber.worker.status import Board
from subscriber.worker.wal_flush import Flusher

SPOOL_VARIABLE = "SUBSCRIBER_SPOOL_DIR"


def _default_root() -> Path:
    """Where temporary files may be large: TMPDIR, or /var/tmp, which is on a disk where /tmp may be memory."""
    if "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK | os.X_OK):
        return Path("/var/tmp")
    return Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Where the files of streamed transactions go: a private folder for each worker, in `root`.

    `limit` is in bytes for each worker; None: half of what is free on the disk when the worker starts.
    """

    root: Path = field(default_factory=lambda: Path(os.environ.get(SPOOL_VARIABLE) or _default_root()))
    limit: int | None = None

    def open_spool(self, sync_id: str, subid: int, relid: int) -> Spool:
        """That of one worker; `sync_id` is the target's, `relid` 0 the apply worker's."""
        folder = self.root / f"subscriber-{os.getuid()}-{sync_id}-{subid}-{relid}"
        limit = self.limit
        if limit is None and self.root.exists():
            limit = shutil.disk_usage(self.root).free // 2
        return Spool(folder, limit=limit)


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
    spool: SpoolSettings = field(default_factory=SpoolSettings)
    hooks: Mapping[str, Hooks] = field(default_factory=dict)  # by subscription; one with none has no hooks
