"""The lake: the change log as partitioned Parquet, and each table as a Delta table, from one log.

    lake/
      lake.json                                 the log that feeds the lake
      history/upto=<position>/schema=…/table=…  the changes of one batch, as pgchanges returns them
      tables/<schema>.<table>/                  a Delta table; bytes that are not safe in names are written as ~XX
      boundaries/<position>                     at this position, all tables have the same transactions
      batch.json                                the current batch
      staged/                                   files that executors have written for it

Positions are file names of sixteen hexadecimal digits. A batch is a range of the log, of whole transactions. All tables
can be read as of any boundary; table() finds the version.

**Invariants.** batch.json names a batch before any of its effects. The boundary comes last.

**Failure cases.**

- Killed in the middle of a batch: the batch is repeated with the same end, because batch.json names it and the log
  returns the same changes for the same range. Its history directory belongs to this batch alone, and is overwritten. A
  Delta table that has the batch skips it (delta.py).
- Killed in the middle of a load: there is no boundary, and the load starts again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable

from subscriber.changelog.files import sync_directory
from subscriber.changelog.reader import ChangeLog
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import ERRORS
from subscriber.spark.changes.net_job import RowKeys, net_changes
from subscriber.spark.lake import delta
from subscriber.spark.lake.stage import Staged, ToArrow, value
from subscriber.sqlstate import NAME_TOO_LONG, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE, UNDEFINED_TABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH = 1_000_000  # changes

_ABOUT = "lake.json"
# Delta's library also interprets a path as a host name, so only characters that are valid in both are kept.
_IN_FILE_NAMES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_ESCAPE = "~"
LONGEST_NAME = 255  # bytes
_BATCH = "batch.json"


@dataclass(frozen=True, slots=True)
class LakeBatch:
    """A range of the log that was added to the lake. `rows` has the number of rows of the net effect, by table."""

    start: Lsn
    end: Lsn
    rows: Mapping[str, int]


class Lake:
    """A lake in a directory that the executors see under the same name.

    Its methods block. Only one process may write.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    # --- reading --------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Return True if the lake has been loaded."""
        return (self.directory / _ABOUT).exists() and bool(self.boundaries())

    def boundaries(self) -> list[Lsn]:
        """Return the positions at which all tables can be read, oldest first."""
        folder = self.directory / "boundaries"
        return sorted(Lsn(int(file.name, 16)) for file in folder.iterdir()) if folder.is_dir() else []

    def position(self) -> Lsn:
        """Return the newest position of the lake.

        Raises:
            StatementError: there is no lake in the directory.
        """
        self._check()
        return self.boundaries()[-1]

    def tables(self) -> list[str]:
        """Return schema.name of each table."""
        return sorted(_table_name(path.name) for path in (self.directory / "tables").iterdir())

    def table(self, name: str, position: Lsn | None = None) -> DeltaTable:
        """Return a table as of the last boundary at or before a position.

        Args:
            name: schema.name of the table.
            position: the position; None: the newest.

        Raises:
            StatementError: there is no such table, or no such boundary.
        """
        self._check()
        boundaries = [lsn for lsn in self.boundaries() if position is None or lsn <= position]
        if not boundaries:
            raise StatementError(
                f"the lake has nothing as of {position}", detail=f"It begins at {self.boundaries()[0]}."
            )
        path = self._path(name)
        if not path.is_dir():
            raise StatementError(f'the lake has no table "{name}"', sqlstate=UNDEFINED_TABLE)
        table = DeltaTable(path)
        version = delta.version_at(table, boundaries[-1])
        if version is None:
            raise StatementError(f'the lake has no table "{name}" as of {boundaries[-1]}', sqlstate=UNDEFINED_TABLE)
        table.load_as_version(version)
        return table

    def _path(self, name: str) -> Path:
        return self.directory / "tables" / _file_name(name)

    def _check(self) -> None:
        if not self.exists:
            raise StatementError(f'there is no lake in "{self.directory}"', sqlstate=UNDEFINED_FILE)

    # --- loading --------------------------------------------------------------------------------

    def begin(self, log: ChangeLog) -> None:
        """Create the directory, to which put() adds tables.

        Raises:
            StatementError: the lake is fed from another log.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._check_log(log)
        _write(self.directory / _ABOUT, _about(log))
        for folder in ("tables", "boundaries", "staged"):
            (self.directory / folder).mkdir(exist_ok=True)

    def _check_log(self, log: ChangeLog) -> None:
        file = self.directory / _ABOUT
        if file.exists() and (fed := json.loads(file.read_text())) != _about(log):
            raise StatementError(
                f'the lake in "{self.directory}" is fed from another log',
                detail=f'It is from slot "{fed["slot"]}" of system {fed["system_id"]}.',
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )

    def put(self, name: str, schema: pa.Schema, position: Lsn, rows: Iterable[pa.RecordBatch] = ()) -> None:
        """Create a table with all its rows as of `position`.

        Args:
            name: schema.name of the table.
            schema: the columns.
            rows: the rows, in record batches of `schema`.
        """
        delta.create(self._path(name), schema, position, rows)

    def finish_load(self, position: Lsn) -> None:
        """Add the first boundary: every table exists as of `position`."""
        self._add_boundary(position)

    # --- batches --------------------------------------------------------------------------------

    def next_batch(self, log: ChangeLog, until: Lsn, changes: int = BATCH) -> tuple[Lsn, Lsn] | None:
        """Return the next range of the log, or None if there is none.

        An unfinished batch is returned first.

        Args:
            until: the position at which the range ends at the latest.
            changes: the number of changes after which the range ends.

        Returns:
            The start and the end of the range.

        Raises:
            StatementError: the lake is fed from another log.
        """
        start = self.position()
        self._check_log(log)
        file = self.directory / _BATCH
        if file.exists():
            end = Lsn.parse(json.loads(file.read_text())["end"])
            if end > start:
                return start, end
            file.unlink()
        log.check(start)
        end = min(log.reach(start, changes=changes).position, until)
        return (start, end) if end > start else None

    def advance(
        self,
        spark: SparkSession,
        log: ChangeLog,
        start: Lsn,
        end: Lsn,
        *,
        as_text: frozenset[str] = frozenset(),
        tables: frozenset[str] | None = None,
        history: bool = True,
    ) -> LakeBatch:
        """Bring the lake from `start`, its position, to `end`.

        Args:
            as_text: the columns to keep as text, as schema.table.column.
            tables: the tables, as schema.table; None: all.
            history: also write the changes as Parquet.

        Returns:
            The range and the number of rows of each table.

        Raises:
            ApplyError: the changes do not match the lake's rows.
            SubscriberError: Spark could not finish the work.
        """
        _write(self.directory / _BATCH, {"start": str(start), "end": str(end)})
        if history:
            self._write_history(spark, log, start, end, tables)
        staged = self.directory / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        results = net_changes(spark, log, start, end, RowKeys({}), tables, ToArrow(staged, as_text))
        found: dict[str, list[Staged]] = {}
        for name, _, part in results:
            found.setdefault(name, []).append(part)
        for name, parts in found.items():
            self._bring(name, parts, start, end)
        self._add_boundary(end)
        (self.directory / _BATCH).unlink(missing_ok=True)
        shutil.rmtree(staged, ignore_errors=True)
        return LakeBatch(start, end, {name: sum(part.rows for part in parts) for name, parts in found.items()})

    def _bring(self, name: str, parts: list[Staged], start: Lsn, end: Lsn) -> None:
        rows = pa.concat_tables([_read(part.path) for part in parts], promote_options="default")
        columns, key = parts[0].columns, parts[0].key
        names = [column.name for column in columns]
        if not self._path(name).is_dir():  # published after the lake was loaded
            schema = pa.schema([(c.name, rows.schema.field(value(i)).type) for i, c in enumerate(columns)])
            delta.create(self._path(name), schema, start)
        truncated = any(part.truncated for part in parts)
        delta.apply(DeltaTable(self._path(name)), rows, names, key, end, truncated=truncated)

    def _write_history(
        self, spark: SparkSession, log: ChangeLog, start: Lsn, end: Lsn, tables: frozenset[str] | None
    ) -> None:
        from subscriber.spark.sources.pgchanges import register

        register(spark)
        options = {"path": str(log.directory), "start": str(start), "end": str(end)}
        if tables is not None:
            options["tables"] = ",".join(tables)
        changes = spark.read.format("pgchanges").options(**options).load()
        place = self.directory / "history" / f"upto={end:016X}"
        changes.write.partitionBy("schema", "table").mode("overwrite").parquet(str(place))

    def _add_boundary(self, position: Lsn) -> None:
        folder = self.directory / "boundaries"
        (folder / f"{position:016X}").touch()
        sync_directory(folder)


def _file_name(table: str) -> str:
    """Return the name of a table's directory: one path component for any table name.

    Raises:
        StatementError: the name is too long.
    """
    name = "".join(
        chr(byte) if byte in _IN_FILE_NAMES else f"{_ESCAPE}{byte:02X}" for byte in table.encode("utf-8", ERRORS)
    )
    if not name.strip("."):  # a name of only dots would be another directory
        name = name.replace(".", f"{_ESCAPE}2E")
    if len(name) > LONGEST_NAME:
        raise StatementError(f'the name of table "{table}" is too long for a directory', sqlstate=NAME_TOO_LONG)
    return name


def _table_name(file_name: str) -> str:
    """Return the table name from which _file_name() made that name."""
    found = re.sub(rb"~([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), os.fsencode(file_name))
    return found.decode("utf-8", ERRORS)


def _about(log: ChangeLog) -> dict[str, str]:
    return {"system_id": str(log.identity.system_id), "slot": log.identity.slot}


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _write(path: Path, fields: Mapping[str, str]) -> None:
    """Write a small file atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)
