"""Where fetched and built files are kept: in the user's cache directory."""

from __future__ import annotations

import os
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
