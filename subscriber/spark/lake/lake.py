"""The lake: the change log as partitioned Parquet, and each table as a Delta table, from one log.

    lake/
      lake.json                                 which log it is fed from
      history/upto=<position>/schema=…/table=…  the changes of one batch, as pgchanges gives them
      tables/<schema>.<table>/                  a Delta table; bytes that are not of plain names stand as ~XX
      boundaries/<position>                     here all of it has all transactions up to the position, and no others
      batch.json                                the batch that is being done
      staged/                                   what executors have written for it

Positions are file names of sixteen hexadecimal digits. A batch is a range of the log, whole transactions. All
tables can be read as of any boundary; table() finds the version.

Kill points considered. A batch is named in batch.json before anything of it is done, and done again with the
same end when it is found there: the log gives the same changes for the same range. History is written to a
directory that only this batch writes, which is begun anew. A Delta table that has the batch already knows so
(delta.py). The boundary comes last. A load that did not finish has no boundary, and is begun anew.
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
from subscriber.spark.lake.stage import Staged, ToArrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH = 1_000_000  # changes

_ABOUT = "lake.json"
# Delta's library takes a path for the name of a host too, so characters are left that both can have.
_IN_FILE_NAMES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_ESCAPE = "~"
LONGEST_NAME = 255  # bytes
_BATCH = "batch.json"


@dataclass(frozen=True, slots=True)
class LakeBatch:
    """A range of the log that was brought into the lake. `rows` by table are those of its net effect."""

    start: Lsn
    end: Lsn
    rows: Mapping[str, int]


class Lake:
    """A lake in a directory, which the executors see under the same name. Blocking; one process writes."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    # --- reading --------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether it has been begun, and loaded."""
        return (self.directory / _ABOUT).exists() and bool(self.boundaries())

    def boundaries(self) -> list[Lsn]:
        """The positions at which all tables can be read, oldest first."""
        folder = self.directory / "boundaries"
        return sorted(Lsn(int(file.name, 16)) for file in folder.iterdir()) if folder.is_dir() else []

    def position(self) -> Lsn:
        """How far the lake is. Raises StatementError when there is none."""
        self._check()
        return self.boundaries()[-1]

    def tables(self) -> list[str]:
        """schema.name of each table."""
        return sorted(_table_name(path.name) for path in (self.directory / "tables").iterdir())

    def table(self, name: str, position: Lsn | None = None) -> DeltaTable:
        """A table (schema.name) as of the last boundary at or before `position`; None: the newest.

        Raises StatementError when there is no such table, or no such boundary.
        """
        self._check()
        boundaries = [lsn for lsn in self.boundaries() if position is None or lsn <= position]
        if not boundaries:
            raise StatementError(
                f"the lake has nothing as of {position}", detail=f"It begins at {self.boundaries()[0]}."
            )
        path = self._path(name)
        if not path.is_dir():
            raise StatementError(f'the lake has no table "{name}"', sqlstate="42P01")
        table = DeltaTable(path)
        version = delta.version_at(table, boundaries[-1])
        if version is None:
            raise StatementError(f'the lake has no table "{name}" as of {boundaries[-1]}', sqlstate="42P01")
        table.load_as_version(version)
        return table

    def _path(self, name: str) -> Path:
        return self.directory / "tables" / _file_name(name)

    def _check(self) -> None:
        if not self.exists:
            raise StatementError(f'there is no lake in "{self.directory}"', sqlstate="58P01")

    # --- beginning ------------------------------------------------------------------------------

    def begin(self, log: ChangeLog) -> None:
        """Make the directory, for tables to be put into it with put(). Raises StatementError if it is another log's."""
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
                sqlstate="55000",
            )

    def put(self, name: str, schema: pa.Schema, position: Lsn, rows: Iterable[pa.RecordBatch] = ()) -> None:
        """A table with all its rows as of `position`."""
        delta.create(self._path(name), schema, position, rows)

    def finish_load(self, position: Lsn) -> None:
        """Every table is there as of `position`: the first boundary."""
        self._add_boundary(position)

    # --- batches --------------------------------------------------------------------------------

    def next_batch(self, log: ChangeLog, until: Lsn, changes: int = BATCH) -> tuple[Lsn, Lsn] | None:
        """The range to do next, of about so many changes and not beyond `until`; None: there is nothing to do.

        One that was begun is done to its end first. Raises StatementError if it is another log's lake.
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
        """Bring the lake from `start`, its position, to `end`. Other `tables` than these are left out, None none."""
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
        if not self._path(name).is_dir():  # published since the lake was loaded
            schema = pa.schema([rows.schema.field(column.name) for column in parts[0].columns])
            delta.create(self._path(name), schema, start)
        truncated = any(part.truncated for part in parts)
        delta.apply(DeltaTable(self._path(name)), rows, parts[0].key, end, truncated=truncated)

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
    """Return the name of a table's directory: one component of a path, whatever the publisher calls its table.

    Raises StatementError for one that is too long.
    """
    name = "".join(
        chr(byte) if byte in _IN_FILE_NAMES else f"{_ESCAPE}{byte:02X}" for byte in table.encode("utf-8", ERRORS)
    )
    if not name.strip("."):  # a name of dots alone is another directory
        name = name.replace(".", f"{_ESCAPE}2E")
    if len(name) > LONGEST_NAME:
        raise StatementError(f'the name of table "{table}" is too long for a directory', sqlstate="42622")
    return name


def _table_name(file_name: str) -> str:
    """Return the table that _file_name() gave that name."""
    found = re.sub(rb"~([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), os.fsencode(file_name))
    return found.decode("utf-8", ERRORS)


def _about(log: ChangeLog) -> dict[str, str]:
    return {"system_id": str(log.identity.system_id), "slot": log.identity.slot}


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _write(path: Path, fields: Mapping[str, str]) -> None:
    """Write a small file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)
