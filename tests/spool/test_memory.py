"""The memory for ten million changes, in a separate process (spooling.py) because a peak does not fall.

.venv/bin/pytest -m soak tests/spool
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_ten_million_changes_of_five_million_subtransactions_take_little_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.spool.spooling", str(tmp_path / "spool")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read, left, memory = map(int, done.stdout.split())
    assert (read, left) == (10_000_000, 0)
    assert memory < 24_000_000
