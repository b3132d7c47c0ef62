"""Whether fix_passwords finds a password that a test makes visible, in a run of pytest with a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INI = "[pytest]\nmarkers = prints_password\nasyncio_default_fixture_loop_scope = function\n"
TESTS = """
import asyncio, logging, subprocess, sys
from types import SimpleNamespace
import anyio, pytest
from subscriber import telemetry
from subscriber.migration.schema import archive
from tests.passwords import MARK

PRINT = [sys.executable, "-c", f"print('{MARK}')"]

def test_stdout(): print(MARK)
def test_stderr(): print(MARK, file=sys.stderr)
def test_log(): logging.getLogger("other").warning("%s", MARK)
def test_record(): telemetry.log(telemetry.WARNING, "x", detail=MARK)
def test_read_output(capfd):
    print(MARK)
    assert capfd.readouterr().out
def test_asyncio_program(): asyncio.run(anyio.run_process(PRINT))
def test_arguments(): asyncio.run(archive._run(["true", MARK]))
def test_called_back(monkeypatch):
    async def run(arguments): return subprocess.run(["true", MARK], capture_output=True).stdout
    monkeypatch.setattr(archive, "_run", run)
    asyncio.run(archive._entries(SimpleNamespace(pg_restore="pg_restore"), "file", "data"))
def test_program(): subprocess.run(PRINT, capture_output=True, text=True)
@pytest.fixture
def late():
    yield
    print(MARK)
def test_teardown(late): pass
@pytest.mark.prints_password
def test_without_reason(): print(MARK)
@pytest.mark.prints_password("the command prints new passwords")
def test_with_reason(): print(MARK)
def test_nothing(): print("********")
"""


def test_every_output_is_searched_in_the_processes_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    plugins = ["-p", "tests.plugins.fix_passwords", "-p", "no:cacheprovider", "-n", "1"]
    command = [sys.executable, "-m", "pytest", "-q", "-rE", *plugins, str(tmp_path)]
    output = tmp_path / "output"
    with output.open("wb") as file:  # not captured, which would be searched
        subprocess.run(
            command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=False
        )
    text = output.read_text()
    matches = set(re.findall(r"^ERROR .*::test_(\w+)", text, flags=re.MULTILINE))
    expected = {
        "stdout",
        "stderr",
        "log",
        "record",
        "read_output",
        "program",
        "asyncio_program",
        "arguments",
        "teardown",
    }
    assert matches == {*expected, "without_reason"}, text
    assert "13 passed, 10 errors" in text
