"""Whether a forked program is in the state in which Python would have started it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.fix_forked import original
from tests.plugins.forked import PROGRAMS

SHOW = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv, "environment": os.environ.get("GIVEN"), "folder": os.getcwd(), "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(), "files": sorted(os.listdir("/proc/self/fd")), "name": __name__,
    "input": sys.stdin.read(), "line_buffering": sys.stdout.line_buffering,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}))
print("line", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command of a program that shows its state."""
    (tmp_path / "shown.py").write_text(SHOW)
    monkeypatch.setitem(PROGRAMS, "shown", ())
    return [sys.executable, "-m", "shown", "one", "ä"]


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.new_interpreter)])
def test_the_state_of_a_program(shown: list[str], tmp_path: Path, forks: bool) -> None:
    assert original.new_interpreter is not forks
    environment = {**os.environ, "GIVEN": "ö"}
    done = subprocess.run(
        shown,
        input="text",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "line\n")
    document = json.loads(done.stdout)
    assert document.pop("files") == ["0", "1", "2", "3"]  # the last one is the folder itself
    assert document == {
        "arguments": [str(tmp_path / "shown.py"), "one", "ä"],
        "environment": "ö",
        "folder": str(tmp_path),
        "parent": os.getpid(),
        "session": True,
        "name": "__main__",
        "input": "text",
        "line_buffering": False,
        "interrupt": True,
    }


async def test_a_program_is_killed(shown: list[str], tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(*shown, stdin=subprocess.PIPE, cwd=tmp_path)
    process.kill()
    assert await process.wait() == -signal.SIGKILL
