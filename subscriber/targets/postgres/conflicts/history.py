"""History of conflicts in subscriber.conflict_history: the subject of each conflict, and its resolution.

Failure cases, W the worker:

- A conflict that does not stop the stream is recorded in the transaction that applies the change and moves the
  progress. Both are committed, or neither, and the change is sent again.
- A conflict that stops the stream rolls its transaction back, so it is recorded in a transaction of its own
  afterwards. W killed before that: the change is sent again, with the same conflict. W killed after that: the change is
  sent again as well, and finds its row. `occurrences` counts the attempts; a row is one conflict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from subscriber.apply.conflicts.policy import PolicyOutcome, Rule
from subscriber.apply.conflicts.rules import ConflictRules
from subscriber.apply.conflicts.types import Conflict, LocalRow
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.display import jsonb_text
from subscriber.protocol.messages import moment
from subscriber.subscription import ConflictHistory
from subscriber.targets.postgres.session.progress import ProgressRecord

_COLUMNS = (
    "relid",
    "relation",
    "conflict_type",
    "index_name",
    "key",
    "remote_xid",
    "remote_finish_lsn",
    "remote_commit_time",
    "local_xid",
    "local_origin",
    "local_commit_time",
    "policy",
    "resolution",
    "local_row",
    "remote_row",
)
_RECORD = "SELECT subscriber.record_conflict($1, $2, $3)"


@dataclass(frozen=True, slots=True)
class History:
    """The conflicts of a subscription that are recorded, and the form of their records."""

    rules: ConflictRules

    def detail(self, conflict: Conflict) -> str:
        """Return the detail of a conflict for logs, with the key of the row if the subscription records rows."""
        keys = [row.key for row in conflict.local_rows if row.key] or ([tuple(conflict.key)] if conflict.key else [])
        if not self.rules.with_rows or not keys:
            return conflict.detail
        values = {**(conflict.local or {}), **conflict.key}
        shown = ", ".join(f"{name}={values.get(name)}" for name in keys[0])
        return f"{conflict.detail}\nKey: {shown}."

    def record(
        self,
        pipeline: Pipeline,
        progress: ProgressRecord,
        conflict: Conflict,
        relid: int,
        transaction: RemoteTransaction,
        rule: Rule,
        resolution: str,
        note: object,
    ) -> None:
        """Queue what records a conflict with the transaction that is open. `relid` is the mapped table's."""
        if self.rules.kept is ConflictHistory.NONE:
            return
        for line in self._lines(conflict, relid, transaction, rule, resolution):
            pipeline.execute(_RECORD, parameters=pipeline.texts((*progress.shown, line)), note=note)

    def error_lines(self, conflict: Conflict, relid: int, transaction: RemoteTransaction, rule: Rule) -> list[str]:
        """Build the records of a conflict that has stopped the stream, for record_conflict_error()."""
        if self.rules.kept is ConflictHistory.NONE:
            return []
        return list(self._lines(conflict, relid, transaction, rule, PolicyOutcome.ERROR))

    def _lines(
        self, conflict: Conflict, relid: int, transaction: RemoteTransaction, rule: Rule, resolution: str
    ) -> Iterator[str]:
        """A JSON object with _COLUMNS for each row that was in conflict, or one if there was none."""
        rows: tuple[LocalRow | None, ...] = conflict.local_rows or (None,)
        for row in rows:
            key = conflict.key
            if row is not None and row.index is not None:
                key = {name: row.values.get(name) for name in row.key}
            writer = row.writer if row is not None else conflict.deleted
            values = (
                relid,
                conflict.relation,
                conflict.type,
                row.index if row is not None else None,
                dict(key) if key else None,
                transaction.xid,
                str(transaction.finish_lsn),
                _time(transaction.commit_time),
                writer.xid if writer is not None else None,
                writer.origin if writer is not None else None,
                _time(writer.committed) if writer is not None else None,
                str(rule),
                resolution,
                dict(row.values) if row is not None and self.rules.with_rows else None,
                dict(conflict.remote) if conflict.remote is not None and self.rules.with_rows else None,
            )
            yield jsonb_text(dict(zip(_COLUMNS, values, strict=True)))


def _time(microseconds: int | None) -> str | None:
    return None if microseconds is None else moment(microseconds).isoformat()
