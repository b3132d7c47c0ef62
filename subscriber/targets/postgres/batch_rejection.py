"""Consequences of a rejected batch for later batches."""

from __future__ import annotations

from subscriber import sqlstate
from subscriber.apply.batch.table_batch import ChangeKind
from subscriber.errors import SubscriberError
from subscriber.targets.postgres.session.statement_context import StatementContext

ROW_MISSING = "row missing"  # or not as it was expected to be


def rejection_reason(error: SubscriberError | None) -> str:
    """Return the reason of a rejection in a few words, without values of rows."""
    if error is None:
        return "deadlock"
    match error.sqlstate:
        # The error of a cast that batch_statements.py has fail if a statement affects another number of rows.
        case sqlstate.INVALID_TEXT_REPRESENTATION if " rows instead of " in error.message:
            return ROW_MISSING
        case sqlstate.UNIQUE_VIOLATION:
            return "key exists"
        case sqlstate.TARGET_TABLE_CHANGED:
            return "table changed"
        case other:
            return f"error {other}"


def disable_batched_updates(note: object) -> bool:
    """Disable batched updates of a table with several unique indexes. Returns False if they were already disabled.

    The rejected update has perhaps changed a column of such an index. Later updates are then likely to do the same.
    """
    if (
        not isinstance(note, StatementContext)
        or note.mapping is None
        or note.message not in (ChangeKind.UPDATE.name, ChangeKind.KEY_UPDATE.name)
    ):
        return False
    mapping = note.mapping
    if not mapping.local.other_unique or mapping.unique_values_change:
        return False
    mapping.unique_values_change = True
    return True
