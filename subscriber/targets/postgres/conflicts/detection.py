"""Detection of conflicts that do not stop the stream, in the results of pipelined statements.

They are the missing row of an UPDATE or DELETE, and the row that another origin wrote last. The applier does not wait
for these results: when one arrives, later statements have been sent and may fail. So remaining queries are kept until
they are answered, in another session if necessary: their transaction may be committed by then.

A report has values as text. The target prints binary values, so the same conflict has the same text in both formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from subscriber.apply.conflicts import types
from subscriber.apply.conflicts.types import RowWriter
from subscriber.apply.relation_map import Partition
from subscriber.connection.pipeline import Rows
from subscriber.protocol.messages import Delete, Update
from subscriber.targets.postgres.conflicts.deleted_rows import DeletedRows
from subscriber.targets.postgres.conflicts.row_lookup import printed, to_print
from subscriber.targets.postgres.session.statement_context import OnConflict, StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.sql import deleted_rows, row_statements
from subscriber.targets.postgres.sql.parameters import NO_ROW, Row, bind, searched
from subscriber.targets.postgres.sql.row_statements import Plan


@dataclass(slots=True, eq=False)
class _Question:
    plan: Plan
    new: Row
    old: Row
    note: StatementContext
    on_answer: Callable[[Rows], None]

    def queue(self, session: TargetSession, on_answer: Callable[[Rows], None]) -> None:
        """Queue the question in a session."""
        plan, note = self.plan, self.note
        formats, parameters = bind(plan, self.new, self.old)
        assert note.mapping is not None
        with session.asking(note.mapping, note):
            session.pipeline.execute(
                plan.sql,
                formats,
                parameters,
                note=note,
                types=plan.types,
                on_result=lambda _note, _tag, rows: on_answer(rows),
            )


@dataclass(slots=True, eq=False)
class _DeletionQuestion:
    """Asks which transaction deleted a row."""

    deleted: DeletedRows
    row: Row
    note: StatementContext
    on_answer: Callable[[RowWriter | None], None]

    def queue(self, session: TargetSession, on_answer: Callable[[RowWriter | None], None]) -> None:
        """Queue the question in a session."""
        mapping = self.note.mapping
        assert mapping is not None
        with session.asking(mapping, self.note, as_owner=False):
            self.deleted.find(session.pipeline, mapping, self.row, self.note, on_answer)


class ConflictDetector:
    """Detects conflicts in one apply session.

    Attributes:
        origin_id: the origin whose rows are its own. None: the target does not track who wrote a row.
    """

    def __init__(
        self,
        session: TargetSession,
        on_conflict: OnConflict,
        *,
        origin_id: int | None,
        deleted: DeletedRows | None,
    ) -> None:
        """Create the detector of a session.

        Args:
            session: the session.
            on_conflict: called for rows that are missing, and for those that another origin wrote last.
            origin_id: report rows that were written through another origin than this one, or none. None: the target
                does not track who wrote a row. It costs one more statement for each UPDATE and DELETE.
            deleted: finds deleted rows. None: the target does not remember them.
        """
        self.origin_id: Final = origin_id
        self._session = session
        self._pipeline = session.pipeline
        self._on_conflict = on_conflict
        self._wording = session.wording
        self._origin = session.origin  # whether the target has it or not
        self._deleted = deleted
        self._open: dict[_Question | _DeletionQuestion, None] = {}  # in order; asked or not, and not answered

    def on_result(self, note: object, tag: str, rows: Rows) -> None:
        """Process the result of a statement that did not change exactly one row."""
        assert isinstance(note, StatementContext)
        if not isinstance(note.change, Update | Delete) or note.mapping is None or note.transaction is None:
            return
        if tag.rsplit(maxsplit=1)[-1] != "0":
            return
        if not note.mapping.local.has_row_suppressing_trigger:  # else query_row() has reported it
            self._report_missing(note)

    def query_row(self, row: int, new: Row, old: Row, note: StatementContext) -> None:
        """Queue a query for the row to change. With a BEFORE trigger the result does not show if the row exists."""
        mapping = note.mapping
        if mapping is None or note.conflict_checked or not mapping.local.has_row_suppressing_trigger:
            return

        def absent(_note: object, _tag: str, _rows: Rows) -> None:
            self._report_missing(note)

        plan = row_statements.lock(mapping, row)
        formats, parameters = bind(plan, new, old)
        self._pipeline.execute(plan.sql, formats, parameters, note=note, expect=plan.expect, on_result=absent)

    def _report_missing(self, note: StatementContext) -> None:
        mapping, change = note.mapping, note.change
        assert mapping is not None
        assert isinstance(change, Update | Delete)
        values = searched(change).split()

        def report(leaf: Partition | None) -> None:
            if isinstance(change, Update) and self._deleted is not None and deleted_rows.has_key(mapping):
                self._ask(_DeletionQuestion(self._deleted, values, note, lambda writer: found(leaf, writer)))
            else:
                found(leaf, None)

        def found(leaf: Partition | None, writer: RowWriter | None) -> None:
            self._in_text(
                change,
                note,
                lambda shown: self._on_conflict(types.missing(mapping, shown, self._wording, leaf, writer), note),
            )

        def routed(rows: Rows) -> None:
            number = rows[0][0] if rows else None
            report(mapping.local.partitions[int(number)] if number is not None else None)

        if mapping.local.partitions:
            self._ask(_Question(row_statements.find_partition(mapping, values[0]), NO_ROW, values, note, routed))
        else:
            report(None)

    def _in_text(
        self, change: Update | Delete, note: StatementContext, report: Callable[[Update | Delete], None]
    ) -> None:
        """Call `report` with the change as the target prints it: immediately, unless it has binary values."""
        mapping = note.mapping
        assert mapping is not None
        asked = to_print(mapping, change)
        if asked is None:
            report(change)
            return
        plan, new, old = asked
        self._ask(_Question(plan, new, old, note, lambda rows: report(printed(mapping, change, new[0], old[0], rows))))

    def check_origin(self, row: int, new: Row, old: Row, note: StatementContext) -> None:
        """Queue a query whether another origin wrote the row to change."""
        mapping, change = note.mapping, note.change
        if (
            self.origin_id is None
            or note.conflict_checked
            or mapping is None
            or not isinstance(change, Update | Delete)
        ):
            return

        def found(_note: object, _tag: str, rows: Rows) -> None:
            others = [row for row in rows if not types.is_ours(row[2], self._origin)]
            if others:
                self._in_text(change, note, lambda shown: report(shown, others))

        def report(shown: Update | Delete, rows: Rows) -> None:
            for time, origin_id, origin, label, xid, *values in rows:
                writer = RowWriter(xid or "", time, origin_id != "0", origin)
                leaf = next((leaf for leaf in mapping.local.partitions if leaf.label == label), None)
                self._on_conflict(types.differs(mapping, shown, writer, values, self._wording, leaf), note)

        plan = row_statements.written_by_another(mapping, row, self.origin_id)
        formats, parameters = bind(plan, new, old)
        self._pipeline.execute(plan.sql, formats, parameters, note=note, expect=plan.expect, on_result=found)

    @property
    def has_pending_queries(self) -> bool:
        return bool(self._open)

    def retry_queries(self) -> None:
        """Send the skipped queries again, after the refused transaction is rolled back and all results are in."""
        for question in self._open:
            self._send(question)

    async def retry_on(self, session: TargetSession) -> None:
        """Send the open lookups on another session, because this one has failed."""
        self._session, self._pipeline = session, session.pipeline
        self.retry_queries()
        await self._pipeline.sync()

    def _ask(self, question: _Question | _DeletionQuestion) -> None:
        self._open[question] = None
        self._send(question)

    def _send(self, question: _Question | _DeletionQuestion) -> None:
        """Ask in the transaction that is being sent. If it is refused and this skipped, retry_queries() asks again."""

        def answered(answer: Any) -> None:
            if question in self._open:  # or both sessions have answered
                del self._open[question]
                question.on_answer(answer)

        with self._pipeline.attempt(self._pipeline.awaits_attempts):
            question.queue(self._session, answered)
            self._pipeline.queue_sync()
