"""The arguments of this process in the process list, which every user of the machine can read.

The kernel shows the memory that holds the arguments, so this module overwrites that memory. While Python starts, a
password in an argument is visible for a moment. A file, a service or an environment variable does not have this gap.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from subscriber.redaction import HIDDEN, RedactedStatement, redact_conninfo

DSN_OPTIONS = ("--target", "--source", "--apply-target")


def hide_passwords() -> None:
    """Overwrite the passwords of connection strings in this process's arguments.

    Does nothing on systems other than Linux.

    `sys.argv` is not changed.
    """
    given = sys.orig_argv
    shown = hidden(given)
    if shown != given and sys.platform == "linux":
        _overwrite(_block(given), _block(shown))


def hidden(arguments: list[str]) -> list[str]:
    """Return the arguments without passwords. No argument becomes longer."""
    shown = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, value = argument.partition("=")
        if before in DSN_OPTIONS:
            text = redact_conninfo(argument)
        elif equals and option in DSN_OPTIONS:
            text = f"{option}={redact_conninfo(value)}"
        else:
            text = str(RedactedStatement(argument))
        shown.append(text if len(text) <= len(argument) else text.replace(HIDDEN, "*"))
    return shown


def _block(arguments: list[str]) -> bytes:
    """Return the arguments as the kernel stores them in memory."""
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def _overwrite(given: bytes, shown: bytes) -> None:
    """Overwrite the arguments in memory with `shown` if that memory still contains `given`."""
    import ctypes  # slow to import, and needed only for a password

    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5), which counts from 3
        # Another library may have moved the arguments, as setproctitle does. The memory is then not ours to write.
        if Path("/proc/self/cmdline").read_bytes() != given or end - start != len(given):
            return
    except (OSError, IndexError, ValueError):
        return
    ctypes.memmove(start, shown.ljust(len(given), b"\0"), len(given))
