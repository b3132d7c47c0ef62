"""BatchTables: the columns that the tables have in a batch, and the tables that the batch sets aside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import SchemaHistory, TableVersion, column_steps, following, is_same
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.spark.lake.lake_table import LakeTable, TableProblem, text_columns
from subscriber.spark.lake.table_store import TableStore
from subscriber.spark.tables.table_format import NewColumn


class BatchTables:
    """The tables of one batch: their states at its start, and the tables that it sets aside."""

    def __init__(self, store: TableStore, log: ChangeLog, start: Lsn, end: Lsn) -> None:
        self._store = store
        self._log = log
        self._start = start
        self.end = end
        self._states = store.states()
        self.problems: dict[str, TableProblem] = {}

    def ignored(self) -> frozenset[str]:
        """Return the tables that are set aside, or were loaded after the batch."""
        return frozenset(self.problems) | {
            label
            for label, state in self._states.items()
            if state.problem is not None or (state.is_current and state.loaded >= self.end)
        }

    def follow(self, history: SchemaHistory, as_text: frozenset[str]) -> dict[str, LakeTable]:
        """Give the tables the columns that they have in the batch. Returns the states of the tables that it changes."""
        states = {}
        for label in self._states.keys() - self.ignored():
            with self.table(label):
                state = self._states[label]
                for version in versions_until(history, state, self.end):
                    state = self._step(state, version, as_text)
                if state.is_current:
                    states[label] = state
        return {label: state for label, state in states.items() if label not in self.problems}

    def description(self, state: LakeTable, history: SchemaHistory) -> Relation | None:
        """Return the only valid description of a table in the batch.

        None: an archiver without a schema history wrote the log, so that not every change of columns is known.
        """
        current = state.version
        if current is None or not any(version.position < self.end for version in history.named(state.label)):
            return None
        return current.relation()

    def _step(self, state: LakeTable, version: TableVersion, as_text: frozenset[str]) -> LakeTable:
        assert state.version is not None
        steps = column_steps(state.version, version)
        version = following(state.version, version)
        numbers = {step.after.number for step in steps if step.before is not None}
        kept = tuple(number for number in state.text if number in numbers)
        added = text_columns(version, as_text)
        after = state.following(version, kept + tuple(n for n in added if n not in numbers))
        renamed = {step.before.name: step.after.name for step in steps if step.before is not None}
        kinds = pa.schema([(step.after.name, after.kind(step.after)) for step in steps])
        after = replace(after, layout=state.layout.following(renamed, kinds))
        stored = {column.number: name for column, name in zip(state.version.columns, state.names(), strict=True)}
        columns = [
            NewColumn(
                name,
                after.kind(step.after),
                stored[step.before.number] if step.before is not None else None,
                step.fill,
            )
            for step, name in zip(steps, after.names(), strict=True)
        ]
        with self._store.storing():
            table = self._store.open(state.label)
            if table.position < self.end:  # otherwise the batch is repeated, and the table has it
                table.change_columns(columns, version.position)
        return after

    @contextlib.contextmanager
    def table(self, label: str) -> Iterator[None]:
        """Set a table aside if its changes cannot be applied in the block."""
        try:
            yield
        except SubscriberError as error:
            self.set_aside(label, error)

    def set_aside(self, label: str, error: SubscriberError) -> None:
        """Set a table aside, as of the start of the batch."""
        state = self._states.get(label, LakeTable(label))
        self.problems[label] = self._store.set_aside(state, error, self._start, self._log, state.as_text())

    def keep(self, state: LakeTable) -> None:
        """Store the state of a table that the batch does not change, if the table has other columns."""
        if state != self._states[state.label] and state.label not in self.problems:
            self._store.save(state)


def end_before_changes(history: SchemaHistory, state: LakeTable, start: Lsn, end: Lsn) -> Lsn:
    """Return the end of a batch in which a table keeps its columns: `end`, or the position of the first other ones."""
    before = state.version
    for version in versions_until(history, state, end):
        if before is not None and version.position > start and not is_same(before, version):
            return version.position
        before = version if before is None else following(before, version)
    return end


def versions_until(history: SchemaHistory, state: LakeTable, end: Lsn) -> list[TableVersion]:
    """Return the versions of a table that follow the one that the lake has, in a batch that ends at `end`."""
    current = state.version
    if current is None:
        return []
    versions = [version for version in history.of(current.relid) if version.position < end]
    if current in versions:
        return versions[versions.index(current) + 1 :]
    # The table was loaded. The archiver may have read the catalog for an earlier version after that.
    earlier = [version for version in versions if version.position < current.position]
    return [
        *(version for version in earlier[-1:] if version.asked > current.position),
        *(version for version in versions if version.position >= current.position),
    ]
