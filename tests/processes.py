"""Processes that a test starts, and the command lines of processes as shown by the kernel and `ps`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process


@asynccontextmanager
async def opened(command: Sequence[str], **options: Any) -> AsyncIterator[Process]:
    """Start a process, and kill it at the end of the block if it still runs.

    The block of `anyio.open_process()` waits for the end of the process, also after a failed assertion.
    """
    async with await anyio.open_process(command, **options) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()


@contextmanager
def popened(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Do the same as opened() without an event loop. The streams of the process are text."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def runs(pid: int) -> bool:
    """Return True if the process runs. A process that has ended but has not been waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty if it has ended, and in the instant after exec()."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids = {pid}
    while grown := {child for child, parent in parents.items() if parent in pids} - pids:
        pids |= grown
    return pids
