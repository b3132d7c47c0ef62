"""Where what was fetched or built is kept: below the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """$XDG_CACHE_HOME/subscriber/NAME, made if it is not there."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "subscriber" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory
