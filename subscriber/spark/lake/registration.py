"""The lake as a consumer of its change log, which keeps what the lake has not read (changelog/consumers.py)."""

from __future__ import annotations

from uuid import uuid4

from subscriber.changelog.consumers import register_reader
from subscriber.changelog.directory_use import DirectoryUse
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake_table import read_json

ABOUT = DirectoryUse.LAKE.value
ID = "id"  # the field of lake.json that distinguishes the lake from others of the same log


def lake_id(directory: Location) -> str:
    """Return the ID in lake.json of a lake, or a new one if it has none."""
    file = directory / ABOUT
    found: str | None = read_json(file).get(ID) if file.exists() else None
    return found or uuid4().hex[:12]


def consumer_name(directory: Location) -> str:
    """Return the name of a lake as a consumer of its log."""
    return f"lake-{lake_id(directory)}"


def register_lake(directory: Location, log: ChangeLog, position: Lsn) -> bool:
    """Have the log keep the changes after `position`. Returns False if this process may only read the log.

    Raises:
        ChangeLogError: the position cannot be stored, for another reason.
    """
    return register_reader(log.directory, consumer_name(directory), f"lake in {directory}", position)
