"""The process that programs of tests are forked from, and the request for such a program.

It imports the package once. fix_forked.py starts it, and asks it for each program.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import platform
import runpy
import signal
import socket
import sys
import time
from dataclasses import dataclass
from importlib import import_module

from subscriber.cli.main import COMMANDS

# Programs of tests, each with what it imports at its start or for its work.
PROGRAMS = {
    "subscriber": (
        *(place.partition(":")[0] for place in COMMANDS.values()),
        "subscriber.app",
        "subscriber.archive.worker",
        "subscriber.catalog.commands.execute",
        "subscriber.check.check",
        "subscriber.check.recipe",
        "subscriber.check.rules",
        "subscriber.cli.commands.migrate.lines",
        "subscriber.migration.steps",
        "subscriber.repair.tables",
        "subscriber.status.collect",
        "subscriber.status.panels",
        "subscriber.worker.supervision.launcher",
        "anyio._backends._asyncio",
        "uvloop",
    ),
    "tests.faults.failpoint_cli": ("tests.faults.failpoint_cli",),
    "tests.change_stream.victim_process": ("subscriber.change_stream.api",),
}
CLONE_PARENT = 0x8000  # of clone(2): the parent of the new process is the parent of this one
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
LONGEST = 1 << 20  # bytes of a request


@dataclass(frozen=True)
class Request:
    """A program: `arguments` as of `python -m MODULE …`, and the state of its process."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    new_session: bool


def send(connection: socket.socket, request: Request, streams: list[int]) -> int:
    """Ask for a program whose stdin, stdout and stderr are `streams`. Returns its process id."""
    socket.send_fds(connection, [pickle.dumps(request)], streams)
    return int(connection.recv(32))


def serve(connection: socket.socket) -> None:
    """Fork a program for each request, until the other side closes the connection or ends."""
    for name in {name for names in PROGRAMS.values() for name in names}:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the programs
    while True:
        message, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
        if not message:
            return
        pid = _clone()
        if pid == 0:
            connection.close()
            _become(pickle.loads(message), streams)
            return
        connection.send(str(pid).encode())
        for stream in streams:
            os.close(stream)


def _clone() -> int:
    """Fork as os.fork() does, to a child not of this process but of its parent, which can wait for its end."""
    assert CLONE is not None
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(request: Request, streams: list[int]) -> None:
    """Be the program, as Python would have started it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request.new_session:
        os.setsid()
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = bool(request.environment.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
    sys.stderr.reconfigure(line_buffering=True, write_through=unbuffered)
    sys.orig_argv = request.arguments
    sys.argv = request.arguments[2:]
    sys.path[0] = request.directory
    runpy.run_module(request.arguments[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
