"""Fork the programs of tests from a process that has imported the package.

Python takes 0.4 s of a processor to import what `subscriber run` needs, and tests start hundreds of programs. Each
program `python -m MODULE …` whose module is in PROGRAMS is therefore a fork of one process, which starts on first use.
It is a child of this process as if Python had started it, with its own arguments, environment, folder, streams and
signals; but `ps` shows the arguments of the process that it was forked from. A test of how the program starts has
Python start it: @pytest.mark.new_interpreter.
"""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.forked import CLONE, PROGRAMS, Request, send

ROOT = Path(__file__).parents[2]
# Variables that are read when Python starts, or when it imports the package.
AT_START = ("PYTHON", "COVERAGE_PROCESS", "LANG", "LC_", "SUBSCRIBER_PURE")

_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_start)


class Original:
    """The process that programs are forked from."""

    def __init__(self) -> None:
        self.new_interpreter = False  # for the programs of this test
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # tests start programs in several threads

    def fork(self, request: Request, streams: list[int]) -> int:
        """Start a program, and return its process id."""
        with self._lock:
            if self._connection is None:
                self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with other:
                    command = [sys.executable, "-m", "tests.plugins.forked", str(other.fileno())]
                    self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[other.fileno()])
            return send(self._connection, request, streams)

    def close(self) -> None:
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.wait()


original = Original()


def _execute_child(process: subprocess.Popen[Any], *args: Any) -> None:
    """Fork a program, or have Python start it."""
    given = _parameters.bind(process, *args).arguments
    if original.new_interpreter or not _can_fork(given):
        _start(process, *args)
        return
    environment = os.environ if given["env"] is None else given["env"]
    request = Request(
        [os.fsdecode(argument) for argument in given["args"]],
        dict(environment),
        str(Path(given["cwd"] or "").absolute()),
        given["start_new_session"],
    )
    streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    process.pid = original.fork(request, [number if fd == -1 else fd for number, fd in enumerate(streams)])
    process._child_created = True  # type: ignore[attr-defined]
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _can_fork(given: dict[str, Any]) -> bool:
    match given["args"]:
        case [sys.executable, "-m", str(module), *_] if module in PROGRAMS:
            special = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
            return not any(given[name] for name in special) and _at_start(given["env"]) == _at_start(os.environ)
    return False


def _at_start(environment: Mapping[str, str] | None) -> dict[str, str]:
    variables = os.environ if environment is None else environment
    return {k: v for k, v in variables.items() if k.startswith(AT_START) and k != "PYTHONUNBUFFERED"}


@pytest.fixture(scope="session", autouse=True)
def forked_programs() -> Iterator[None]:
    if CLONE is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", _execute_child)
        yield
    original.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    original.new_interpreter = item.get_closest_marker("new_interpreter") is not None
    return (yield)
