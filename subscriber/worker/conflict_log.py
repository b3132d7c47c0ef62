"""The log line of a conflict that does not stop the stream."""

from __future__ import annotations

from subscriber import telemetry
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.error_context import error_context
from subscriber.targets.postgres.session.statement_context import StatementContext


def log_conflict(origin: str, conflict: Conflict, note: StatementContext) -> None:
    """Log a conflict that does not stop the stream."""
    transaction, mapping = note.transaction, note.mapping
    assert transaction is not None
    assert mapping is not None
    context = error_context(origin, note.message, conflict.wording, mapping.label, None, transaction)
    telemetry.log(
        telemetry.LOG,
        conflict.message,
        detail=conflict.detail,
        exact_detail=conflict.exact_detail,
        context=[context],
        event="apply.conflict",
        relation=conflict.relation,
        conflict_type=conflict.type.value,
        xid=transaction.xid,
        finish_lsn=transaction.finish_lsn,
    )
