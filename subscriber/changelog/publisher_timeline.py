"""The file timeline.json of a change log: the timelines of the publisher that the changes of the log belong to.

Purpose. The archiver compares it with the timelines of the publisher before it continues the log. So a publisher that
has failed over to a server without all stored changes is noticed, although no archiver ran at that time.

    timeline   the number of the timeline. null: not known, because the publisher was a standby, which can be promoted
               while it streams
    ancestors  number and end of each ancestor

Failure cases.

- File lost: the timelines are not known, and the next publisher is accepted.
- Process killed after the file is written, before changes are: all positions of the log are on the new timelines too,
  because the archiver has compared them before.
- File edited or damaged: ChangeLogDamaged, because the checksum differs.
"""

from __future__ import annotations

import json

from subscriber.changelog.files import damaged, json_checksum, reading
from subscriber.changelog.storage import Location, read_file, write_file
from subscriber.timeline_history import TimelineHistory

TIMELINE = "timeline.json"


def read_timeline(directory: Location) -> TimelineHistory | None:
    """Read the timelines of the log in `directory`. None: they are not known.

    Raises:
        ChangeLogDamaged: the file was changed or damaged.
        ChangeLogError: the file cannot be read.
    """
    path = directory / TIMELINE
    try:
        with reading(path):
            stored = json.loads(read_file(path))
        if stored.pop("checksum") != json_checksum(stored):
            raise ValueError("the checksum differs")
        number = stored["timeline"]
        return None if number is None else TimelineHistory.parse(int(number), stored["ancestors"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(
            f'change log file "{path}" is damaged',
            detail=f"It cannot be understood: {error}.",
            hint="Restore the file from a copy. Without a copy, make sure that the publisher has not failed over since"
            " an archiver ran, and remove the file.",
        ) from error


def store_timeline(directory: Location, history: TimelineHistory | None) -> None:
    """Store the timelines of the log in `directory` atomically. None: they are not known. Raises OSError."""
    fields = {
        "timeline": None if history is None else history.timeline,
        "ancestors": "" if history is None else str(history),
    }
    write_file(directory / TIMELINE, json.dumps({**fields, "checksum": json_checksum(fields)}, indent=2).encode())
