"""The change log of a lake, and the lake as its consumer: the log keeps what the lake has not read.

See changelog/consumers.py.
"""

from __future__ import annotations

from uuid import uuid4

from subscriber.changelog.consumers import register_reader
from subscriber.changelog.directory_use import DirectoryUse
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake_table import read_json
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

ABOUT = DirectoryUse.LAKE.value
ID = "id"  # the field of lake.json that distinguishes the lake from others of the same log


def lake_id(directory: Location) -> str:
    """Return the ID in lake.json of a lake, or a new one if there is no lake."""
    file = directory / ABOUT
    identifier: str = read_json(file)[ID] if file.exists() else uuid4().hex[:12]
    return identifier


def consumer_name(directory: Location) -> str:
    """Return the name of a lake as a consumer of its log."""
    return f"lake-{lake_id(directory)}"


def register_lake(directory: Location, log: ChangeLog, position: Lsn) -> bool:
    """Have the log keep the changes after `position`. Returns False if this process may only read the log.

    Raises:
        ChangeLogError: the position cannot be stored, for another reason.
    """
    return register_reader(log.directory, consumer_name(directory), f"lake in {directory}", position)


def about(log: ChangeLog) -> dict[str, str]:
    """Return the fields of lake.json that identify its log."""
    return {"system_id": str(log.identity.system_id), "slot": log.identity.slot}


def check_log(directory: Location, log: ChangeLog) -> None:
    """Raise StatementError if there is a lake in the directory that is fed from another log."""
    file = directory / ABOUT
    if not file.exists():
        return
    fed = read_json(file)
    if not fed.items() >= about(log).items():
        raise StatementError(
            f'the lake in "{directory}" is fed from another log',
            detail=f'It is from slot "{fed["slot"]}" of system {fed["system_id"]}. The log in "{log.directory}" is'
            f' from slot "{log.identity.slot}" of system {log.identity.system_id}.',
            hint="Correct --log, or load a new lake in another directory.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
