"""The command lines of processes, as shown by the kernel and `ps`."""

from __future__ import annotations

import os
from pathlib import Path


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty if it has ended."""
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
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found
