"""Temporary directories of Spark sessions. The directories of killed processes are removed.

**Invariants.** A process locks a file in its directory, and the system releases the lock when the process ends. So a
directory whose lock is free belongs to no process.

**Failure cases.**

- Driver killed with SIGKILL: the next process of this user that needs a directory removes that of the driver.
- Process killed before its lock has its name: the directory stays, without contents.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "subscriber-spark-"
_LOCK = "lock"

_locks: dict[Path, int] = {}  # descriptors of the locks of this process


def create_work_directory() -> Path:
    """Create a directory of this process, and remove the directories of processes that have ended."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Another process must not find the file before it is locked.
    unfinished = directory / f"{_LOCK}.unfinished"
    lock = os.open(unfinished, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unfinished.rename(directory / _LOCK)
    _locks[directory] = lock
    return directory


def remove_work_directory(directory: Path) -> None:
    """Remove a directory of create_work_directory(), as far as possible."""
    shutil.rmtree(directory, ignore_errors=True)
    if (lock := _locks.pop(directory, None)) is not None:
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
