"""TouchRecorder: records the ranges of keys in which each transaction of a session changes rows, for track_ranges."""

from __future__ import annotations

from subscriber.apply.batch.table_batch import TableBatch
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.touched_ranges import RangesToRecord, TouchedRanges, TouchedTable, as_parameter
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.targets.postgres.session.progress import ProgressRecord

_TOUCH = "SELECT subscriber.touch($1, $2, $3)"


class TouchRecorder:
    """The ranges that the open transaction of one session has to record."""

    def __init__(self, touched: TouchedRanges, progress: ProgressRecord) -> None:
        """Create a recorder.

        Args:
            touched: the ranges that are recorded, for all sessions of the worker.
            progress: proves the right to record ranges.
        """
        self._touched = touched
        self._progress = progress
        self._own: TouchedRanges | None = None  # of a transaction that others do not wait for
        self._to_record = RangesToRecord()  # by the open transaction

    def begin(self) -> None:
        """A transaction begins."""
        self._own = None
        self._to_record.clear()

    def touch_row(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        """The transaction changes a row."""
        self._add(self._known_to(transaction).touch_row(mapping, change))

    def touch_batch(self, transaction: RemoteTransaction, table: TableBatch) -> None:
        """The transaction changes the rows of a batch."""
        self._add(self._known_to(transaction).touch(table.mapping, table.touched_keys, table.form))

    def touch_all(self, transaction: RemoteTransaction, mapping: RelationMapping) -> None:
        """The transaction may change any row of the table."""
        self._add(self._known_to(transaction).touch_all(mapping))

    def store(self, pipeline: Pipeline, note: object) -> None:
        """Queue the statement that records the ranges. The role is the session's own."""
        if ranges := self._to_record.take():
            values = (*self._progress.shown, as_parameter(ranges))
            pipeline.execute(_TOUCH, parameters=pipeline.texts(values), note=note)

    def forget(self) -> None:
        """Forget which ranges are recorded, because records of unanswered transactions were rolled back."""
        self._to_record.keep()
        self._touched.forget()
        if self._own is not None:
            self._own.forget()

    def _known_to(self, transaction: RemoteTransaction) -> TouchedRanges:
        """Return the ranges that need no record in the transaction.

        A transaction that others do not wait for may be rolled back after them. So they do not rely on its records, and
        it records everything itself, because a comparison may have read earlier records when it commits. A transaction
        does so up to its end: of a streamed one, the last changes are applied when its end is known.
        """
        if self._own is None and transaction.outlives_commit_order:
            self._own = self._touched.empty()
        return self._touched if self._own is None else self._own

    def _add(self, touched: TouchedTable | None) -> None:
        if touched is not None:
            self._to_record.add(touched)
