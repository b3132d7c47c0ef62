"""What the refusal of a batch says about it, and about those to come."""

from __future__ import annotations

from subscriber.apply.batch.table_batch import ChangeKind
from subscriber.errors import SubscriberError
from subscriber.targets.postgres.session import schema_check
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql import batch_statements

ROW_MISSING = "row missing"  # or not as it was expected to be


def rejection_reason(error: SubscriberError | None) -> str:
    """In a few words; no row's values."""
    if error is None:
        return "deadlock"
    match error.sqlstate:
        case batch_statements.WRONG_COUNT if " rows instead of " in error.message:
            return ROW_MISSING
        case "23505":
            return "key exists"
        case schema_check.CHANGED:
            return "table changed"
        case sqlstate:
            return f"error {sqlstate}"


def disable_batched_updates(note: object) -> bool:
    """Have no more updates of the table in batches, if it has several unique indexes; false if there were none before.

    The refused one has perhaps changed a column of these, and where one does that more will.
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
