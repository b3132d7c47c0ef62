"""Places at which a worker may die, by name, so that tests can have it die exactly there.

    reach(Point.COMMIT_SENT)        costs one look into an empty dictionary

Nothing in the package ever puts anything into `armed`: no option, no variable of the environment. A
test's own program does, and then runs the command in the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Point(StrEnum):
    """In the order in which a table, and then a transaction, comes past them."""

    # table synchronization: the worker's states are those of apply/table_states.py
    DATASYNC_STORED = "datasync stored, nothing done yet"
    SLOT_CREATED = "slot of the table created, nothing copied yet"
    COPIED = "all rows copied, not committed"
    COPY_COMMITTED = "copy committed, nobody told"
    SYNCWAIT = "waiting for the apply worker"
    CATCHUP = "position to catch up to is known"
    CAUGHT_UP = "caught up, state not stored"
    SYNCDONE_STORED = "syncdone stored, slot still there"
    SLOT_DROPPED = "slot of the table dropped, origin still there"
    READY_STORED = "ready stored, nobody told"

    # confirming
    RECORDED = "position without a transaction recorded, publisher not told"

    # applying
    CHANGE_SENT = "change sent to the target"
    COMMIT_READY = "all changes sent, COMMIT not"
    COMMIT_SENT = "COMMIT sent, no answer yet"
    BATCH_SENT = "batch sent, no answer yet"
    BATCH_REFUSED = "batch refused, nothing of it applied again"
    BATCH_APPLIED_AGAIN = "changes of a refused batch applied again, not the last of them"
    PREPARED = "PREPARE TRANSACTION done, progress not sent"
    RESOLVED = "COMMIT PREPARED or ROLLBACK PREPARED done, progress not sent"
    PARALLEL_DONE = "parallel worker has committed or prepared, the leader does not know"
    COMMITTED = "commit answered, not flushed"
    FLUSHED = "commit flushed, publisher not told"
    CONFIRMED = "publisher told"


armed: dict[Point, Callable[[], None]] = {}


def reach(point: Point, before: Callable[[], None] | None = None) -> None:
    """The worker stands at `point`; where that is armed `before` is called first, to make it true."""
    if armed and point in armed:
        if before is not None:
            before()
        armed[point]()
