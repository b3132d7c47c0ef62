"""What a directory, or a path in an object store, is used for. Each use has a file or folder of its own.

A directory has one use. A second program would write among the files of the first one, and remove some of them.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from subscriber.changelog.storage import Location, directory_names
from subscriber.errors import StatementError
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE


class DirectoryUse(Enum):
    """The uses of a directory. The value is the name of the file that shows it, or of the folder of a Delta table."""

    CHANGE_LOG = "log.json"
    LAKE = "lake.json"
    SNAPSHOT = "snapshot.json"
    DELTA_TABLE = "_delta_log"

    @property
    def noun(self) -> str:
        """Return the use as a message names it."""
        return "Delta table" if self is DirectoryUse.DELTA_TABLE else self.name.lower().replace("_", " ")


def check_use(directory: Location, use: DirectoryUse) -> None:
    """Raise StatementError if a directory has another use. It need not exist.

    Raises:
        StatementError: it has another use.
        OSError: the storage cannot be read.
    """
    for other in DirectoryUse:
        if other is not use and _has(directory, other):
            raise StatementError(
                f'the directory "{directory}" has a {other.noun}',
                hint=f"Choose another directory for the {use.noun}.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )


def _has(directory: Location, use: DirectoryUse) -> bool:
    if use is DirectoryUse.DELTA_TABLE and not isinstance(directory, Path):  # an object store has no folders
        return use.value in directory_names(directory)
    return (directory / use.value).exists()
