"""The place of downloaded and built files: the user's cache directory."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_directory(name: str) -> Path:
    """$XDG_CACHE_HOME/subscriber/NAME, made if it is not there.

    Root's is in /var/cache: servers that root starts run as another account, which cannot enter root's home.
    """
    home = Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or home
    directory = Path(base) / "subscriber" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def fill(place: Path, make: Callable[[Path], None]) -> Path:
    """Return `place`, and create it if it does not exist: `make(work)` fills an empty directory, which is then renamed.

    One process creates it, and other processes that need it wait. If `make` raises, nothing is left behind.
    """
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            work = place.with_name(f"{place.name}.tmp")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                make(work)
                work.rename(place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return place
