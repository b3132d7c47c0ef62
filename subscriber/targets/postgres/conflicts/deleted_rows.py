"""Lookup of the transaction that deleted a missing row, for subscriptions with retain_dead_tuples."""

from __future__ import annotations

from collections.abc import Callable

from subscriber.apply.conflicts import types
from subscriber.apply.conflicts.types import RowWriter
from subscriber.apply.relation_map import RelationMapping
from subscriber.connection.pipeline import Pipeline, Rows
from subscriber.protocol import frontend
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.sql import deleted_rows
from subscriber.targets.postgres.sql.parameters import NO_ROW, Row, bind
from subscriber.targets.postgres.sql.row_statements import NEW


class DeletedRows:
    """The deleted rows that the target remembers, for the sessions of one worker."""

    def __init__(self, progress: ProgressRecord, origin: str) -> None:
        """`progress` proves the right to read them; `origin` is the name of the worker's origin."""
        self._progress = progress
        self._origin = origin

    def find(
        self,
        pipeline: Pipeline,
        mapping: RelationMapping,
        row: Row,
        note: object,
        on_answer: Callable[[RowWriter | None], None],
    ) -> None:
        """Queue a query for the last deletion of a row, in the transaction that is open.

        The session must have its own role. `on_answer` is called with the writer of the deletion. It is called with
        None if there was no deletion, or if this subscription applied it, as PostgreSQL 19 does.

        Args:
            pipeline: the session.
            mapping: the table, which must have a key.
            row: has the key of the row.
            note: the context of errors.
            on_answer: called when the result arrives.
        """

        def answered(_note: object, _tag: str, rows: Rows) -> None:
            on_answer(self._writer(rows))

        self._set_key(pipeline, mapping, row, note)
        sql = deleted_rows.find(mapping, self._progress.shown)
        pipeline.execute(sql, frontend.ALL_TEXT, pipeline.texts(()), note=note, on_result=answered)

    def remember(self, pipeline: Pipeline, mapping: RelationMapping, row: Row, note: object) -> None:
        """Queue a statement that remembers a row as deleted by the open transaction. As find() otherwise."""
        self._set_key(pipeline, mapping, row, note)
        pipeline.execute(
            deleted_rows.remember(mapping, self._progress.shown), frontend.ALL_TEXT, pipeline.texts(()), note=note
        )

    def _set_key(self, pipeline: Pipeline, mapping: RelationMapping, row: Row, note: object) -> None:
        plan = deleted_rows.key(mapping, NEW)
        formats, parameters = bind(plan, row, NO_ROW)
        pipeline.execute(plan.sql, formats, parameters, note=note)

    def _writer(self, rows: Rows) -> RowWriter | None:
        if not rows:
            return None
        time, committed, origin_id, origin, xid = rows[0]
        if types.is_ours(origin, self._origin):
            return None
        foreign = origin_id not in (None, "0")
        return RowWriter(xid or "", time, foreign, origin, int(committed) if committed else None)
