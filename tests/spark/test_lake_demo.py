"""`make demo-lake` as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest


def processes_with(variable: str) -> list[str]:
    """Return the command lines of the processes that have a variable in their environment."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes():
                command_lines.append((path.parent / "cmdline").read_text())
        except OSError:  # the process has ended
            continue
    return [command for command in command_lines if command]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_demo_of_the_lake() -> None:
    mark = uuid4().hex
    command = [sys.executable, "-m", "subscriber.demo.lake"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "DEMO_MARK": mark})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"kill -9 \d+: an executor is gone", done.stdout)
    assert done.stdout.count("as on the publisher") == 4
    assert done.stdout.endswith("identical\n")
    assert processes_with(mark) == []
