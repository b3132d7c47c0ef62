"""Failpoints: named steps of a worker, at which tests kill it, or hold it while others go on.

    reach(Point.COMMIT_SENT)                costs one test of an empty dictionary
    await reached(Point.COPY_COMMITTED)     the same; a test that explores interleavings may hold the task there

The package itself changes neither `armed` nor `explorer`. No option and no environment variable does. A test program
sets them, and then runs the command in the same process.

A call of reached() follows an await. So a task that is held there is one whose answer arrives later. Nothing happens
that could not happen without tests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum


class Point(StrEnum):
    """The failpoints, in the order in which a table synchronization, a command and a transaction reach them."""

    # Table synchronization. apply/table_states.py has the states.
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

    # The apply worker between two transactions, while tables are not ready.
    SETTLED = "all transactions applied, copies that wait for that not told"

    # The apply worker before a transaction, while tables are not ready, or transactions are paused or in quarantine.
    TRANSACTION_BEGUN = "transaction begins, none of its changes decided"
    PAUSE_SETTLED = "all transactions committed for a pause, the pause not acknowledged"

    # Quarantine.
    QUARANTINE_READ = "quarantine read from the catalog, transactions compared with an earlier one"
    TRANSACTION_EXAMINED = "transaction compared with the quarantine, neither applied nor parked"
    RETRY_CHOSEN = "parked transaction chosen for a retry, nothing of it applied"
    RETRIED = "retry committed, later transactions still compared with it"

    # Confirmed position.
    RECORDED = "position without a transaction recorded, publisher not told"

    # A subscription over its wal_budget.
    GAVE_UP = "subscription disabled because of wal_budget, slot still there"

    # Copies by ranges, which also reach points of table synchronization.
    RANGES_READ = "copied ranges read from the catalog, apply worker decides by earlier ones"
    SNAPSHOT_TAKEN = "snapshot of a range taken, nothing read yet"
    LAST_INDEX_BUILT = "last indexes built, state not stored"
    CHANGE_DELAYED = "change of a table that is copied has waited, not decided again"

    # Comparison and repair of rows.
    WORKER_HELD = "apply worker paused, no snapshot of the publisher at its position"
    ROWS_COMPARED = "rows that differ are known, none repaired"
    REPAIR_PAUSED = "apply worker paused at the position of a repair, its rows not read"
    REPAIR_READ = "rows of a repair read, none changed"
    REPAIR_COMMITTED = "rows of a repair committed, apply worker still paused"

    # Streamed transactions.
    SPOOL_CUT = "spool file truncated, parallel worker not told"
    LEADER_SYNCED = "all transactions of the leader committed, end of the streamed one not told"
    PARALLEL_WOKEN = "parallel worker woken, nothing decided"
    PARALLEL_ROLLED_BACK = "subtransaction or transaction rolled back, leader not told"

    # The archiver.
    LOG_LOCKED = "lock of the change log taken, log not opened"
    LOG_OPENED = "change log opened, slot not read"
    LOG_STORED = "blocks stored in the change log, publisher not told"

    # Statements.
    TABLE_REMOVED = "table removed from the subscription, not committed"

    # Indexes that are built after the copy.
    INDEX_BUILT = "index of the table built, the next one not"
    FOREIGN_KEY_ADDED = "foreign key added, not validated"
    FOREIGN_KEY_VALIDATED = "foreign key validated, mark of the table still there"

    # Subscriptions that change hands (catalog/commands/adopt.py, adopt_pglogical.py and hand_back.py).
    ADOPT_DISABLED = "the other subscription disabled, its workers may still run"
    ADOPT_STOPPED = "the other subscription's workers have ended, nothing taken over"
    ADOPT_SLOT_COPIED = "slot of pglogical copied, nothing taken over"
    ADOPT_READY = "subscription taken over, not committed"
    ADOPT_COMMITTED = "subscription taken over, pglogical's not dropped"
    ADOPTED = "subscription taken over, nobody told"
    HAND_BACK_CREATED = "PostgreSQL's subscription created without a slot, ours disabled"
    HAND_BACK_STOPPED = "our workers have ended, nothing handed back"
    HAND_BACK_READY = "subscription handed back, not committed"
    HANDED_BACK = "subscription handed back, nobody told"

    # Moves of databases: the steps of migration/plan.py, each after its effect and before the end is stored.
    MIGRATE_PREFLIGHT = "no obstacle found"
    MIGRATE_ROLES = "roles created on the target"
    MIGRATE_DEFINITIONS = "tables created on the target"
    MIGRATE_SUBSCRIBE = "subscription created, target fenced"
    MIGRATE_COPY = "all tables copied"
    MIGRATE_REST = "indexes, constraints and triggers created on the target"
    MIGRATE_LARGE_OBJECTS = "large objects copied, or left behind"
    MIGRATE_VIEWS = "materialized views refreshed"
    MIGRATE_ANALYZE = "statistics collected, start not stored as complete"
    MIGRATE_GUARD = "following server fenced"
    MIGRATE_ARM = "way back replicates, or has to wait"
    MIGRATE_PREPARE = "triggers created, fence open"
    MIGRATE_GATES = "nothing prevents the pause"
    MIGRATE_HOLD = "hooks for the pause called"
    MIGRATE_FREEZE = "fence closed, sessions live"
    MIGRATE_QUIET = "sessions ended"
    MIGRATE_DRAIN = "everything applied"
    MIGRATE_SEQUENCES = "sequences advanced"
    MIGRATE_OBJECTS = "large objects equal, or left behind"
    MIGRATE_STOP = "subscription disabled"
    MIGRATE_TURN = "way back replicates in any case"
    MIGRATE_SWITCH = "switch stored, following server closed"
    MIGRATE_OPEN = "new server open, the other one not told"
    MIGRATE_REDIRECT = "hooks for the new server called"
    MIGRATE_SETTLE = "new roles stored on both servers"
    MIGRATE_PROBE = "a marker has gone the way back"
    MIGRATE_UNDO = "serving server open again"
    MIGRATE_ABORT = "fence and way back removed"
    MIGRATE_DROP = "one subscription of the move dropped"
    MIGRATE_RELEASE = "both servers released, end of the move not stored on the serving one"
    MIGRATE_END = "end of the move stored on both servers"

    # Changes and transactions.
    CHANGE_SENT = "change sent to the target"
    COMMIT_READY = "all changes sent, COMMIT not"
    COMMIT_SENT = "COMMIT sent, no answer yet"
    BATCH_SENT = "batch sent, no answer yet"
    BATCH_REJECTED = "batch rejected, nothing of it applied again"
    BATCH_APPLIED_AGAIN = "changes of a rejected batch applied again, not the last of them"
    PREPARED = "PREPARE TRANSACTION done, progress not sent"
    RESOLVED = "COMMIT PREPARED or ROLLBACK PREPARED done, progress not sent"
    PARALLEL_DONE = "parallel worker has committed or prepared, the leader does not know"
    COMMITTED = "commit answered, not flushed"
    FLUSHED = "commit flushed, publisher not told"
    CONFIRMED = "publisher told"


armed: dict[Point, Callable[[], None]] = {}  # the action of each armed point
explorer: Callable[[Point], Awaitable[None]] | None = None  # holds tasks at points (tests/interleavings)


def reach(point: Point, before: Callable[[], None] | None = None) -> None:
    """Run the action of `point` if a test has armed it.

    Args:
        point: the step that the worker has reached.
        before: called before the action, to complete the step. For example, it flushes queued statements.
    """
    if armed and point in armed:
        if before is not None:
            before()
        armed[point]()


async def reached(point: Point, before: Callable[[], None] | None = None) -> None:
    """Run the action of `point`, see reach(), and wait if an explorer holds the task there."""
    reach(point, before)
    if explorer is not None:
        await explorer(point)
