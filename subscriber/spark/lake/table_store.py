"""TableStore: the directories and files of the lake's tables, and their states."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import pyarrow as pa

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location, Lock, file_names, for_each, make_directory
from subscriber.display import shell_word
from subscriber.errors import LoadNeeded, SubscriberError, ValueUnsupported
from subscriber.lsn import Lsn
from subscriber.spark.lake.file_names import file_name
from subscriber.spark.lake.lake_table import (
    CommittedVersion,
    LakeTable,
    TableProblem,
    add_version,
    read_json,
    read_versions,
    write_json,
    write_versions,
)
from subscriber.spark.lake.range_load import RangeLoadFiles
from subscriber.spark.tables.data_files import LIMITS, FileLimits
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.table_format import StoredTable, TableFormat, storing

_STATE = ".json"

# The command of a hint has no connection string, which may have a password.
LOAD_CONDITION = "with SUBSCRIBER_SOURCE_DSN set and no other process that writes the lake"


def reload_command(lake: Location, log: ChangeLog, label: str, options: str = "") -> str:
    """Return the command that loads a table again. `options` are more of its options, each with a space before it."""
    where = f"--log {shell_word(str(log.directory))}{options} {shell_word(str(lake))}"
    return f"subscriber lake reload {where} {shell_word(label)}"


class TableStore:
    """The tables of a lake. A label is schema.name. Methods block."""

    def __init__(self, directory: Location, tables: TableFormat, limits: FileLimits = LIMITS) -> None:
        self.directory = directory
        self.format = tables
        self.limits = limits
        self.loads = RangeLoadFiles(directory)
        self.lock: Lock | None = None  # set while this process writes the lake

    def create(self) -> None:
        """Create the directories of an empty lake."""
        for folder in ("tables", "states", "versions", "loads"):
            make_directory(self.directory / folder)

    def path(self, label: str) -> Location:
        """Return the location of a table's files. Raises StatementError if the name is too long."""
        return self.directory / "tables" / file_name(label)

    def open(self, label: str) -> StoredTable:
        """Open a table at its newest version."""
        return self.format.open(label, self.path(label))

    def put(
        self,
        label: str,
        schema: pa.Schema,
        position: Lsn,
        rows: Iterable[pa.RecordBatch],
        layout: Layout = NO_LAYOUT,
    ) -> int:
        """Create a table with these rows as of `position`. The rows of an existing one are replaced.

        Returns the version.
        """
        self.format.create(label, self.path(label), schema, position, rows, layout)
        return self.open(label).version

    def storing(self) -> AbstractContextManager[None]:
        """Return a block in which an error of the format's library is the error of one table."""
        return storing(self.format)

    def _versions(self, label: str) -> Location:
        return self.directory / "versions" / file_name(label)

    def versions(self, label: str) -> list[CommittedVersion]:
        """Return the versions of a table that have a position, oldest first."""
        return read_versions(self._versions(label))

    def add_version(self, label: str, position: Lsn, version: int) -> None:
        """Record that a version of a table has the rows of `position`."""
        add_version(self._versions(label), position, version)

    def replace_version(self, label: str, position: Lsn, version: int) -> None:
        """Record that a later version of a table has the rows of `position`, in place of the newest one."""
        *before, newest = self.versions(label)
        if newest.position == position:
            write_versions(self._versions(label), [*before, CommittedVersion(position, version)])

    def forget_versions(self, label: str, before: Lsn) -> None:
        """Forget the versions of a table that only positions before `before` have."""
        versions = self.versions(label)
        kept = [version for version in versions if version.position > before]
        kept = [*[version for version in versions if version.position <= before][-1:], *kept]
        if kept != versions:
            write_versions(self._versions(label), kept)

    def remove(self, label: str) -> None:
        """Remove a table that is no longer published, with all its rows."""
        self.format.remove(label, self.path(label))
        self._versions(label).unlink(missing_ok=True)
        (self.directory / "states" / f"{file_name(label)}{_STATE}").unlink(missing_ok=True)

    def states(self) -> dict[str, LakeTable]:
        """Return the state of each table, by label."""
        folder = self.directory / "states"
        names = [name for name in file_names(folder) if name.endswith(_STATE)]
        states = for_each(folder, lambda name: LakeTable.from_json(read_json(folder / name)), names)
        return {state.label: state for state in states}

    def present(self) -> dict[str, LakeTable]:
        """Return the states of the tables that are published, those that are set aside too, sorted by label."""
        return {label: state for label, state in sorted(self.states().items()) if state.is_present}

    def save(self, state: LakeTable) -> None:
        """Store a state."""
        write_json(self.directory / "states" / f"{file_name(state.label)}{_STATE}", state.as_json())

    def check_lock(self) -> None:
        """Raise OSError if the lease of a lake in an object store has ended."""
        if self.lock is not None:
            self.lock.check()

    def set_aside(
        self, state: LakeTable, error: SubscriberError, after: Lsn, log: ChangeLog, as_text: frozenset[str]
    ) -> TableProblem:
        """Set a table aside, because its changes after `after` cannot be applied.

        Args:
            state: the table.
            error: the reason.
            after: the newest position at which the table is right.
            log: the change log.
            as_text: the columns of the table that are kept as text, as schema.table.column.

        Returns:
            The problem.
        """
        if isinstance(error, ValueUnsupported):
            as_text |= {error.column}
        text = "".join(f" --text {shell_word(column)}" for column in sorted(as_text))
        reload = reload_command(self.directory, log, state.label, text)
        before = f"{error.hint} Then load" if error.hint and not isinstance(error, ValueUnsupported) else "Load"
        hint = f"{before} the table again, {LOAD_CONDITION}: `{reload}`."
        problem = TableProblem(error.message, hint, isinstance(error, LoadNeeded))
        self.save(state.set_aside(problem, after))
        return problem
