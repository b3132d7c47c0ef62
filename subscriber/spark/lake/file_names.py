"""The names of the files and directories of a lake's tables."""

from __future__ import annotations

from subscriber.errors import StatementError
from subscriber.protocol.encodings import ERRORS
from subscriber.sqlstate import NAME_TOO_LONG

# Delta's library also interprets a path as a host name, so only characters that are valid in both are kept.
_IN_FILE_NAMES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_ESCAPE = "~"
LONGEST_NAME = 240  # bytes, so that suffixes fit


def file_name(table: str) -> str:
    """Return the name of a table's directory: one path component for any table name.

    Raises:
        StatementError: the name is too long.
    """
    name = "".join(
        chr(byte) if byte in _IN_FILE_NAMES else f"{_ESCAPE}{byte:02X}" for byte in table.encode("utf-8", ERRORS)
    )
    if not name.strip("."):  # a name of only dots would be another directory
        name = name.replace(".", f"{_ESCAPE}2E")
    if len(name) > LONGEST_NAME:
        raise StatementError(f'the name of table "{table}" is too long for a directory', sqlstate=NAME_TOO_LONG)
    return name
