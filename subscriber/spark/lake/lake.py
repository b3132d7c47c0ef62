"""The lake: the change log as partitioned Parquet, and each table as a Delta or Iceberg table, from one log.

    lake/
      lake.json                                 the log that feeds the lake, the tables that it has, and their format
      catalog.db                                the catalog of Iceberg tables, unless another one is named
      history/upto=<position>/schema=…/table=…  the changes of one batch, as pgchanges returns them
      tables/<schema>.<table>/                  a table; bytes that are not safe in names are written as ~XX
      states/<schema>.<table>                   its columns, and whether it is set aside (lake_table.py)
      versions/<schema>.<table>                 the versions that its format has, by position
      loads/<schema>.<table>                    the load by ranges that is not finished (load_ranges.py)
      boundaries/<position>                     at this position, all tables have the same transactions
      batch.json                                the current batch
      staged/                                   files that executors have written for it
      lock                                      locked by the process that writes; a lease in an object store

Positions are file names of sixteen hexadecimal digits. A batch is a range of the log, of whole transactions. Tables can
be read as of any boundary since their load, unless they are set aside; table() finds the version.

**Invariants.**

- batch.json names a batch before any of its effects. The boundary is written last.
- In a batch a table has one set of columns, because a batch ends where the columns of a table change. The stored
  table has these columns before it gets the rows of the batch.
- Every change of a table is compared with the columns that the lake expects. A table whose changes cannot be applied
  exactly is set aside with the rows of its last right position, and the others follow the log.

**Failure cases.**

- Killed in the middle of a batch: the batch is repeated with the same end, because batch.json names it and the log
  returns the same changes for the same range. Its history directory belongs to this batch alone, and is overwritten. A
  table that has the batch skips it (table_format.py).
- Killed in the middle of the first load: there is no boundary, and the load starts again.
- Killed in the middle of a reload: the table was set aside before, and stays so. A load by ranges continues.
- Two processes that both believe to have the lease of an object store: only one can write batch.json, and only one
  commit to a table succeeds. The other process finds that its lease has ended, and stops.
- Table removed from the storage, and loaded again: the versions of the first one are those of other positions. So a
  version is compared with its position.
- Table compacted, vacuumed, or its history cleaned up: the newest version is read without its history. An older version
  is read if the format still has it, and is an error otherwise.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from subscriber.changelog.directory_use import DirectoryUse, check_use
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import TableVersion
from subscriber.changelog.storage import (
    Location,
    file_names,
    location,
    locked,
    make_directory,
    remove_directory,
    write_file,
)
from subscriber.errors import ApplyError, LoadNeeded, StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.settings import DEFAULTS, Settings
from subscriber.spark.changes.net_job import NetTables, RowKeys, net_changes
from subscriber.spark.lake.batch import BatchTables, end_before_changes
from subscriber.spark.lake.history import write_history
from subscriber.spark.lake.lake_merge import LakeMerge
from subscriber.spark.lake.lake_table import (
    NOT_LOADED,
    CommittedVersion,
    LakeTable,
    TableProblem,
    chosen_layout,
    claim_json,
    lake_schema,
    read_json,
    stored_layout,
    text_columns,
    write_json,
)
from subscriber.spark.lake.layout_options import options_of_table
from subscriber.spark.lake.registration import ABOUT, ID, about, check_log, lake_id, register_lake
from subscriber.spark.lake.table_store import TableStore
from subscriber.spark.tables.data_files import FileLimits
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.stage import Staged, ToArrow
from subscriber.spark.tables.table_format import DELTA, ICEBERG, StoredTable, VersionGone, table_format
from subscriber.sqlstate import (
    INVALID_TEXT_REPRESENTATION,
    OBJECT_IN_USE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_FILE,
    UNDEFINED_TABLE,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyiceberg.table import DataScan
    from pyspark.sql import SparkSession

BATCH = 1_000_000  # changes

BATCH_FILE = "batch.json"
STAGED = "staged"
LOCK = "lock"
BOUNDARIES = "boundaries"
_BOUNDARY = re.compile("[0-9A-F]{16}")


@dataclass(frozen=True, slots=True)
class LakeBatch:
    """A range of the log that was added to the lake.

    `rows` has the number of rows of the net effect, by table. `problems` has the tables that were set aside.
    """

    start: Lsn
    end: Lsn
    rows: Mapping[str, int]
    problems: Mapping[str, TableProblem]


class LakeFormat(NamedTuple):
    """The format of a lake's tables. `catalog` is the name of Iceberg's catalog. None: a file in the lake."""

    name: str
    catalog: str | None


class Lake:
    """A lake in a directory that the executors see under the same name, or in an object store.

    Its methods block. Only one process may write.
    """

    def __init__(
        self,
        directory: Location | str,
        *,
        format: str | None = None,
        catalog: str | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        """Open a lake, which need not exist.

        Args:
            directory: its directory, or its URL in an object store.
            format: how its tables are stored, `delta` or `iceberg`; None: as they are, and `delta` in a new lake.
            catalog: the name of Iceberg's catalog in the configuration of PyIceberg; None: the one that the lake has,
                and a file in the directory of a new lake.
            settings: how its files are written.

        Raises:
            StatementError: storage of this kind is not supported.
        """
        self.directory = location(directory)
        self._given = format, catalog
        self._settings = settings

    @cached_property
    def _fields(self) -> Mapping[str, Any]:
        """The format of the tables, and the ID of the lake, as in lake.json."""
        name, catalog = self._given
        file = self.directory / ABOUT
        fields = read_json(file) if file.exists() else {}
        stored = LakeFormat(fields.get("format", DELTA), fields.get("catalog"))
        given = LakeFormat(name or stored.name, catalog or stored.catalog)
        if fields and given != stored:
            where = f" in catalog {stored.catalog}" if stored.catalog is not None else ""
            raise StatementError(
                f'the tables of the lake in "{self.directory}" are {stored.name} tables{where}',
                hint="Leave out --format and --catalog, or load a new lake in another directory.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        if given.catalog is not None and given.name != ICEBERG:
            raise StatementError("only a lake of Iceberg tables has a catalog", hint="Add --format iceberg.")
        return {"format": given.name, "catalog": given.catalog, ID: lake_id(self.directory)}

    @property
    def format(self) -> LakeFormat:
        """Return how the tables are stored. Raises StatementError if the lake has another format than the given one."""
        return LakeFormat(self._fields["format"], self._fields["catalog"])

    @cached_property
    def store(self) -> TableStore:
        """Return the tables. Raises StatementError if this process cannot have tables of the lake's format."""
        lake_tables = table_format(self.format.name, self.directory, self._fields[ID], self.format.catalog)
        return TableStore(self.directory, lake_tables, FileLimits.of(self._settings))

    # --- reading --------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Return True if a load of the lake has begun, or the lake exists."""
        return (self.directory / ABOUT).exists()

    @property
    def exists(self) -> bool:
        """Return True if the lake has been loaded."""
        return self.begun and bool(self.boundaries())

    def boundaries(self) -> list[Lsn]:
        """Return the positions at which the tables that follow the log can be read, oldest first.

        A table cannot be read at positions before its load, and at those at which it was set aside.
        """
        names = file_names(self.directory / BOUNDARIES)
        return sorted(Lsn(int(name, 16)) for name in names if _BOUNDARY.fullmatch(name))

    def position(self) -> Lsn:
        """Return the newest position of the lake.

        Raises:
            StatementError: there is no lake in the directory.
        """
        self._check()
        return self.boundaries()[-1]

    def tables(self) -> list[str]:
        """Return schema.name of each table, those that are set aside too."""
        return list(self.store.present())

    def problems(self) -> dict[str, TableProblem]:
        """Return the tables that are set aside, with the reasons."""
        return {label: state.problem for label, state in self.store.present().items() if state.problem is not None}

    def table(self, name: str, position: Lsn | str | None = None) -> DeltaTable:
        """Return a Delta table as of the last boundary at or before a position.

        Args:
            name: schema.name of the table.
            position: the position, as an Lsn or as its text; None: the newest.

        Raises:
            StatementError: there is no such table, no such boundary, the table is not right at the boundary, the
                position is not an LSN, or the lake has Iceberg tables.
        """
        self._check_format(DELTA, "scan")
        table: DeltaTable = self._stored(name, position).table  # type: ignore[attr-defined]
        return table

    def scan(self, name: str, position: Lsn | str | None = None) -> DataScan:
        """Return a scan of an Iceberg table as of the last boundary at or before a position.

        Args:
            name: schema.name of the table.
            position: the position, as an Lsn or as its text; None: the newest.

        Raises:
            StatementError: as table(), or the lake has Delta tables.
        """
        self._check_format(ICEBERG, "table")
        scan: DataScan = self._stored(name, position).scan()  # type: ignore[attr-defined]
        return scan

    def to_arrow(self, name: str, position: Lsn | str | None = None) -> pa.Table:
        """Return the rows of a table as of the last boundary at or before a position, for both formats.

        Args:
            name: schema.name of the table.
            position: the position, as an Lsn or as its text; None: the newest.

        Raises:
            StatementError: there is no such table, no such boundary, the table is not right at the boundary, or the
                position is not an LSN.
        """
        return self._stored(name, position).to_arrow()

    def _check_format(self, name: str, other: str) -> None:
        if self._fields["format"] != name:
            raise StatementError(
                f"the lake has {self._fields['format']} tables", hint=f"Read them with Lake.{other}()."
            )

    def _stored(self, name: str, at: Lsn | str | None) -> StoredTable:
        """Return a table as of the last boundary at or before a position. Raises the errors of table()."""
        self._check()
        position = None if at is None else _parsed(at)
        boundaries = [lsn for lsn in self.boundaries() if position is None or lsn <= position]
        if not boundaries:
            raise StatementError(
                f"the lake has nothing as of {position}", detail=f"It begins at {self.boundaries()[0]}."
            )
        boundary = boundaries[-1]
        state = self.store.states().get(name)
        if state is None:
            raise StatementError(f'the lake has no table "{name}"', sqlstate=UNDEFINED_TABLE)
        versions = self.store.versions(name)
        known = [version for version in versions if version.position <= boundary]
        if known and state.is_present and not state.has(boundary):
            problem = state.problem or TableProblem("it was set aside until it was loaded again", "")
            raise StatementError(
                f'table "{name}" of the lake is not right as of {boundary}',
                detail=f"{problem.message}. Its last right rows are those of {known[-1].position}.",
                hint=problem.hint or None,
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        if not known or not state.has(boundary):
            raise StatementError(
                f'the lake has no table "{name}" as of {boundary}',
                detail=f"{state.problem.message}." if state.problem is not None else None,
                hint=state.problem.hint if state.problem is not None else None,
                sqlstate=UNDEFINED_TABLE,
            )
        table = self.store.open(name)
        columns = state.version.position if state.version is not None else Lsn(0)
        is_newest = known[-1] == versions[-1] and table.position == known[-1].position
        # The newest version is read without the table's history, which may be gone. It may be ahead of the lake.
        if not is_newest or table.columns_position > columns:
            self._load_version(table, name, known[-1], boundary)
        return table

    def _load_version(self, table: StoredTable, name: str, known: CommittedVersion, boundary: Lsn) -> None:
        failed: Exception | None = None
        try:
            table.load_version(known.version)
            if (position := table.position) == known.position:
                return
            problem = f"has the rows of {position}, because another table was there"
        except VersionGone as error:
            problem, failed = str(error), error
        raise StatementError(
            f'the rows of table "{name}" as of {boundary} have been removed from the lake',
            detail=f"Version {known.version} of the {self.store.format.title} table {problem}.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        ) from failed

    def _check(self) -> None:
        if not self.exists:
            raise StatementError(f'there is no lake in "{self.directory}"', sqlstate=UNDEFINED_FILE)

    # --- loading --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing during the block. The directory is created if it does not exist.

        Raises:
            StatementError: another process writes the lake, or the catalog of its tables cannot be used. Without this
                check, the first batch would set all tables aside.
        """
        make_directory(self.directory)
        try:
            with locked(self.directory / LOCK) as self.store.lock:
                with self.store.storing():
                    self.store.format.connect()
                yield
        except BlockingIOError:
            raise StatementError(
                f'another process writes the lake in "{self.directory}"',
                hint="Stop the other `subscriber lake`, or wait until it has ended.",
                sqlstate=OBJECT_IN_USE,
            ) from None
        finally:
            self.store.lock = None

    def begin(self, log: ChangeLog, tables: frozenset[str] | None = None) -> None:
        """Create the directory, to which put() adds tables, or add tables to those that an existing lake has.

        Args:
            log: the log that feeds the lake.
            tables: the tables of the lake, as schema.table; None: all that are published.

        Raises:
            StatementError: the lake is fed from another log, or the directory has another use.
        """
        check_use(self.directory, DirectoryUse.LAKE)
        check_log(self.directory, log)
        make_directory(self.directory)
        if self.exists and tables is not None:
            earlier = self.wanted
            tables = None if earlier is None else earlier | tables
        store = self.store
        fields = {**about(log), "tables": None if tables is None else sorted(tables), **self._fields}
        write_json(self.directory / ABOUT, fields)
        store.create()
        make_directory(self.directory / BOUNDARIES)

    @property
    def wanted(self) -> frozenset[str] | None:
        """Return the tables that the lake was begun with, as schema.table; None: all that are published."""
        tables = read_json(self.directory / ABOUT)["tables"]
        return None if tables is None else frozenset(tables)

    def put(
        self,
        log: ChangeLog,
        version: TableVersion,
        position: Lsn,
        rows: Iterable[pa.RecordBatch] = (),
        as_text: frozenset[str] = frozenset(),
        layout: Layout = NO_LAYOUT,
    ) -> None:
        """Load a table with all its rows as of `position`. Its rows are replaced if it is in the lake.

        Args:
            log: the change log.
            version: the table.
            position: the position of the rows.
            rows: the rows, in record batches of lake_schema().
            as_text: the columns to keep as text, as schema.table.column.
            layout: the layout of tables, by schema.table.column (layout_options.py).

        Raises:
            ApplyError: the rows cannot be stored. The table is set aside.
        """
        label, text = version.label, text_columns(version, as_text)
        before = self.store.states().get(label, LakeTable(label))
        before = replace(before, layout=chosen_layout(before, version, as_text, layout))
        # Until the load is complete, the stored table may be ahead of the lake.
        self.fail_load(label, LoadNeeded(NOT_LOADED.message), log, as_text, layout)
        if not version.columns:
            raise ApplyError(
                "it has no column, and the lake has no such tables",
                hint="Give the table a column on the publisher, or remove it from the publication.",
            )
        stored = stored_layout(version, before.layout)
        with self.store.storing():
            number = self.store.put(label, lake_schema(version, as_text), position, rows, stored)
        self.store.add_version(label, position, number)
        self.store.loads.end(label)
        self.store.save(before.set_aside(NOT_LOADED, self._reached()).reloaded(version, text, position))

    def fail_load(
        self,
        label: str,
        error: SubscriberError,
        log: ChangeLog,
        as_text: frozenset[str] = frozenset(),
        layout: Layout = NO_LAYOUT,
    ) -> TableProblem:
        """Set a table aside because it cannot be loaded. Returns the problem.

        Args:
            label: schema.name of the table.
            error: the reason.
            log: the change log.
            as_text: the columns that the load kept as text, as schema.table.column.
            layout: the layout of tables that the load was given.
        """
        self.store.loads.end(label)
        state = self.store.states().get(label, LakeTable(label))
        state = replace(state, layout=options_of_table(label, layout).instead_of(state.layout))
        mine = frozenset(column for column in as_text if column.startswith(f"{label}."))
        return self.store.set_aside(state, error, self._reached(), log, mine)

    def _reached(self) -> Lsn:
        """Return the newest position; 0 during the first load."""
        return max(self.boundaries(), default=Lsn(0))

    def end_table(self, label: str) -> None:
        """Record that a table is no longer published. Its earlier rows can still be read as of their positions.

        Raises:
            StatementError: the lake has no such table.
        """
        state = self.store.states().get(label)
        if state is None:
            raise StatementError(f'there is no table "{label}" in the lake, or among the published ones')
        self.store.loads.end(label)
        self.store.save(state.ended(self.position()))

    def finish_load(self, position: Lsn) -> None:
        """Add a boundary up to which no table has a gap: the first one, or that of tables which were loaded later."""
        self._add_boundary(position)

    # --- batches --------------------------------------------------------------------------------

    def next_batch(
        self, log: ChangeLog, until: Lsn, changes: int = BATCH, *, even_empty: bool = True
    ) -> tuple[Lsn, Lsn] | None:
        """Return the next range of the log, or None if there is none.

        An unfinished batch is returned first. The range ends where a table changes its columns, or was loaded.

        Args:
            log: the change log.
            until: the position at which the range ends at the latest.
            changes: the number of changes after which the range ends.
            even_empty: also return a range without changes.

        Returns:
            The start and the end of the range.

        Raises:
            StatementError: the lake is fed from another log.
        """
        start = self.position()
        check_log(self.directory, log)
        file = self.directory / BATCH_FILE
        if file.exists():
            end = Lsn.parse(read_json(file)["end"])
            if end > start:
                return start, end
            file.unlink()
        log.check(start)
        reach = log.reach(start, changes=changes)
        if not reach.changes and not even_empty:
            return None
        end = min(reach.position, until)
        history = log.schema()
        for state in self.store.states().values():
            if start < state.loaded < end:
                end = state.loaded
            if state.is_current:
                end = end_before_changes(history, state, start, end)
        return (start, end) if end > start else None

    def advance(
        self,
        spark: SparkSession,
        log: ChangeLog,
        start: Lsn,
        end: Lsn,
        *,
        as_text: frozenset[str] = frozenset(),
        history: bool = True,
    ) -> LakeBatch:
        """Bring the lake from `start`, its position, to `end`.

        A table whose changes cannot be applied is set aside.

        Args:
            spark: the session.
            log: the change log.
            start: the start of the range, from next_batch().
            end: the end of the range.
            as_text: new columns to keep as text, as schema.table.column.
            history: also write the changes as Parquet.

        Returns:
            The range, the number of rows of each table, and the tables that were set aside.

        Raises:
            SubscriberError: the log cannot be read, or Spark could not finish the work.
        """
        self.store.check_lock()
        claim_json(self.directory / BATCH_FILE, {"start": str(start), "end": str(end)})
        wanted = self.wanted
        if history:
            write_history(spark, log, start, end, wanted, self.directory / "history")
        staged = self.directory / STAGED
        self.store.check_lock()
        remove_directory(staged)
        batch = BatchTables(self.store, log, start, end)
        schema = log.schema()
        states = batch.follow(schema, as_text)
        described = {label: batch.description(state, schema) for label, state in states.items()}
        tables = NetTables(wanted, batch.ignored(), described)
        text = frozenset[str]().union(*(state.as_text() for state in states.values()))
        keys = {label: names for label, state in states.items() if (names := state.key_names(start)) is not None}
        netted = net_changes(spark, log, start, end, RowKeys(keys), tables, ToArrow(staged, text))
        for label, error in netted.errors.items():
            batch.set_aside(label, error)
        by_label: dict[str, list[Staged]] = {}
        for label, part in netted.parts:
            by_label.setdefault(label, []).append(part)
        merge = LakeMerge(spark, self.store, batch, staged)
        merge.apply({label: states[label] for label in by_label}, by_label)
        for label in states.keys() - by_label.keys():
            batch.keep(states[label])
        self._add_boundary(end)
        register_lake(self.directory, log, self.store.loads.needed(end))
        self.store.check_lock()
        (self.directory / BATCH_FILE).unlink(missing_ok=True)
        remove_directory(staged)
        rows = {label: sum(part.rows for part in parts) for label, parts in by_label.items()}
        return LakeBatch(start, end, rows, batch.problems)

    def _add_boundary(self, position: Lsn) -> None:
        self.store.check_lock()
        write_file(boundary_file(self.directory, position), b"")


def _parsed(position: Lsn | str) -> Lsn:
    try:
        return Lsn.parse(position) if isinstance(position, str) else Lsn(position)
    except ValueError:
        raise StatementError(
            f'the position must be an LSN such as 16/B374D848, not "{position}"', sqlstate=INVALID_TEXT_REPRESENTATION
        ) from None


def boundary_file(directory: Location, position: Lsn) -> Location:
    """Return the file of a boundary of a lake."""
    return directory / BOUNDARIES / f"{position:016X}"
