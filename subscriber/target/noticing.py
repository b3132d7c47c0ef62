"""Conflicts that do not stop the stream, noticed in the answers to statements that were sent ahead.

The row of an UPDATE or DELETE that is not there, and the one that somebody else wrote last. Nothing waits for
this: by the time an answer says so, what came after may have been sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from subscriber.apply import conflict
from subscriber.apply.conflict import Writer
from subscriber.connection.pipeline import Pipeline, Rows
from subscriber.protocol.messages import Delete, Update
from subscriber.target import statements
from subscriber.target.acting import Acting
from subscriber.target.binding import Row, bind, searched
from subscriber.target.note import Note, OnConflict
from subscriber.target.statements import Plan


class Noticing:
    """For one apply session."""

    def __init__(self, pipeline: Pipeline, acting: Acting, on_conflict: OnConflict, origin: str) -> None:
        self._pipeline = pipeline
        self._acting = acting
        self._on_conflict = on_conflict
        self.origin = origin  # its name, whether the target has it or not
        self.origin_id: int | None = None  # ours; None: the target does not track who wrote a row
        self._unasked: list[Callable[[], None]] = []

    def answered(self, note: object, tag: str, rows: Rows) -> None:
        """A statement did not do what it should to exactly one row."""
        assert isinstance(note, Note)
        if not isinstance(note.change, Update | Delete) or note.mapping is None or note.transaction is None:
            return
        if tag.split()[-1] != "0" or self._pipeline.error is not None:
            return
        values = searched(note.change).split()
        if note.mapping.local.row_may_be_suppressed:
            self._look_for(note, values)
        else:
            self._report_missing(note, values)

    def _look_for(self, note: Note, values: Row) -> None:
        """Nothing was changed: is the row missing, or did a BEFORE trigger refuse?"""
        assert note.mapping is not None

        def found(_note: object, tag: str, _rows: Rows) -> None:
            if tag == "SELECT 0" and self._pipeline.error is None:
                self._report_missing(note, values)

        self._ask(statements.exists(note.mapping, statements.OLD, values[0]), note, values, found)

    def _report_missing(self, note: Note, values: Row) -> None:
        mapping, change = note.mapping, note.change
        assert mapping is not None
        assert isinstance(change, Update | Delete)

        def routed(_note: object, _tag: str, rows: Rows) -> None:
            number = rows[0][0] if rows else None
            leaf = mapping.local.partitions[int(number)] if number is not None else None
            self._on_conflict(conflict.missing(mapping, change, leaf), note)

        if mapping.local.partitions:
            self._ask(statements.find_partition(mapping, values[0]), note, values, routed)
        else:
            self._on_conflict(conflict.missing(mapping, change), note)

    def look_at_writer(self, row: int, new: Row, old: Row, note: Note) -> None:
        """Was the row that is about to be changed written by somebody else than this subscription?"""
        mapping, change = note.mapping, note.change
        if self.origin_id is None or note.resolved or mapping is None or not isinstance(change, Update | Delete):
            return

        def found(_note: object, _tag: str, rows: Rows) -> None:
            for time, origin_id, origin, label, xid, *values in rows:
                if conflict.is_ours(origin, self.origin):
                    continue
                writer = Writer(xid or "", time, origin_id != "0", origin)
                leaf = next((leaf for leaf in mapping.local.partitions if leaf.label == label), None)
                self._on_conflict(conflict.differs(mapping, change, writer, values, leaf), note)

        plan = statements.written_by_another(mapping, row, self.origin_id)
        formats, parameters = bind(plan, new, old)
        self._pipeline.execute(plan.sql, formats, parameters, note=note, expect=plan.expect, on_result=found)

    def ask_again(self) -> None:
        """What was skipped; once the refused transaction has been rolled back."""
        unasked, self._unasked = self._unasked, []
        for ask in unasked:
            ask()

    def _ask(self, plan: Plan, note: Note, values: Row, on_result: Callable[[object, str, Rows], None]) -> None:
        """Ask in whatever transaction is being sent just now; if that is refused and this skipped, at ask_again()."""
        formats, parameters = bind(plan, values, values)

        def again() -> None:
            self._unasked.append(partial(self._ask, plan, note, values, on_result))

        with self._pipeline.attempt(self._pipeline.awaits_attempts):
            role = self._acting.step_back(note)
            self._pipeline.execute(plan.sql, formats, parameters, note=note, on_result=on_result, on_skip=again)
            self._acting.resume(role, note)
            self._pipeline.sync()
