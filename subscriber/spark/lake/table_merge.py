"""TableMerge: one Delta table that a batch changes: the tasks for executors, and the commit of the files they write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from subscriber.changelog.storage import Location, local_file, stored_file
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.lake import delta
from subscriber.spark.lake.lake_table import LakeTable
from subscriber.spark.lake.merge import (
    LIMITS,
    DataFile,
    FileLimits,
    Files,
    FileTask,
    InsertTask,
    MergedTable,
    NewFile,
    file_tasks,
)
from subscriber.spark.lake.stage import OP, Staged, origin, unchanged, value

ATTEMPTS = 5  # at a commit, if other processes commit to the table at the same time
ROWS = 250_000  # in a new file, unless it has those of one staged file

# Features of Delta tables that these commits observe.
_FEATURES = frozenset({"appendOnly", "invariants", "timestampNtz"})
_WRITER_VERSIONS = (1, 2, 7)  # 7: the table names its features


class TableMerge:
    """The changes of a batch to one table. Methods block; they raise ApplyError if the changes cannot be applied."""

    def __init__(
        self,
        path: Location,
        state: LakeTable,
        parts: Sequence[Staged],
        position: Lsn,
        staging: Location,
        limits: FileLimits = LIMITS,
    ) -> None:
        """Describe the changes.

        Args:
            path: the location of the Delta table.
            state: the table, with the columns of the batch.
            parts: the staged rows.
            position: the end of the batch.
            staging: the directory of staged rows.
            limits: how the table is divided into files.
        """
        self._path = path
        self._names = state.names()
        self._parts = parts
        self._position = position
        self._staging = staging
        self._limits = limits
        self._attempts = 0

    def file_tasks(self) -> list[FileTask]:
        """Open the table, and return the tasks for its files. Empty if the table has the batch already."""
        self._table = delta.open_table(self._path)
        self._is_done = delta.position_of(self._table) >= self._position
        self._is_truncated = any(part.truncated for part in self._parts)
        key = self._parts[0].key
        # Equal rows of a table without a key cannot be distinguished, so the driver writes the whole table again.
        self._is_bag = key is None and not self._is_truncated and any(part.puts < part.rows for part in self._parts)
        if self._is_done or self._is_bag:
            return []
        _check_features(self._table)
        schema = pa.schema(self._table.schema().to_arrow())
        staged = tuple(part.path for part in self._parts)
        self._merged = MergedTable(self._path, schema, tuple(self._names), key or (), staged, self._limits)
        self._files = _data_files(self._table, self._names[key[0]] if key is not None else None)
        if self._is_truncated:
            return []
        if any(part.moved for part in self._parts):
            self._merged = replace(self._merged, staged=(self._filled(),))
        known = [part.ranges for part in self._parts]
        ranges = [one for found in known if found is not None for one in found] if None not in known else None
        return file_tasks(self._merged, self._files, ranges)

    def insert_tasks(self, files: Sequence[Files]) -> list[InsertTask]:
        """Return the tasks for the rows that are in no file.

        Args:
            files: the results of file_tasks().
        """
        if self._is_done or self._is_bag:
            return []
        staged = self._merged.staged
        found = tuple(frozenset[int]().union(*(one.found[place] for one in files)) for place in range(len(staged)))
        missing = sum(part.puts for part in self._parts) - sum(map(len, found))
        if missing <= 0:
            return []
        if missing <= ROWS:
            return [InsertTask(self._merged, found)]
        pairs = zip(staged, found, strict=True)
        return [InsertTask(replace(self._merged, staged=(path,)), (numbers,)) for path, numbers in pairs]

    def commit(self, files: Sequence[Files], inserted: Sequence[NewFile | None]) -> bool:
        """Commit the files that the tasks have written.

        Returns:
            False if another process has changed the table meanwhile, so that the tasks have to be repeated.
        """
        if self._is_done:
            return True
        try:
            if self._is_bag:
                rows = pa.concat_tables([_read(part.path) for part in self._parts], promote_options="default")
                delta.apply_bag(self._table, rows, self._names, self._position)
            else:
                self._commit(files, inserted)
        except CommitFailedError:
            self._attempts += 1
            if self._attempts == ATTEMPTS:
                raise
            return False
        return True

    def _commit(self, files: Sequence[Files], inserted: Sequence[NewFile | None]) -> None:
        now = int(time.time() * 1000)
        removed = self._files if self._is_truncated else [file for one in files for file in one.removed]
        added = [file for file in (*(one.added for one in files), *inserted) if file is not None]
        self._table.create_write_transaction(
            [
                *(RemoveAction(file.path, True, now, file.size, {}) for file in removed),
                *(AddAction(file.path, file.size, {}, now, True, file.statistics) for file in added),
            ],
            "append",
            self._table.schema(),
            commit_properties=delta.committed(self._position),
        )

    def _filled(self) -> Location:
        """Write the staged rows again. Unchanged values of rows with a new key are read from their old key."""
        names, key = self._names, self._merged.key
        staged = pa.concat_tables([_read(part.path) for part in self._parts], promote_options="default")
        moved = [index for index, op in enumerate(staged[OP].to_pylist()) if op == "m"]
        rows = staged.to_pylist()
        first = [rows[index][origin(key[0])] for index in moved]
        condition = pc.is_in(pc.field(names[key[0]]), pa.array(first, staged.schema.field(value(key[0])).type))
        before = {
            tuple(row[names[column]] for column in key): row
            for row in self._table.to_pyarrow_dataset().scanner(filter=condition).to_table().to_pylist()
        }
        for index in moved:
            row = rows[index]
            old = before.get(tuple(row[origin(column)] for column in key))
            if old is None:
                raise ApplyError("a row was changed that is not in the lake")
            for column, name in enumerate(names):
                if row.get(unchanged(column)):
                    row[value(column)], row[unchanged(column)] = old.get(name), False
        filled = pa.Table.from_pylist(rows, schema=staged.schema)
        path = self._staging / f"filled-{uuid4().hex}.arrow"
        with (
            stored_file(path) as local,
            pa.OSFile(str(local), "wb") as file,
            pa.ipc.new_file(file, filled.schema) as out,
        ):
            out.write_table(filled)
        return path


def _check_features(table: DeltaTable) -> None:
    protocol = table.protocol()
    unknown = set(protocol.writer_features or ()) - _FEATURES
    if protocol.min_writer_version not in _WRITER_VERSIONS:
        unknown.add(f"writer version {protocol.min_writer_version}")
    if unknown:
        raise ApplyError(
            f"its Delta table has a feature that the lake cannot write: {', '.join(sorted(unknown))}",
            hint="Another program has changed the table.",
        )


def _data_files(table: DeltaTable, column: str | None) -> list[DataFile]:
    """Return the files of a table, with the range of a column."""

    def bound(found: dict[str, Any], side: str) -> Any:
        return (found.get(side) or {}).get(column)

    actions = pa.table(table.get_add_actions()).to_pylist()
    return [DataFile(one["path"], one["size_bytes"], bound(one, "min"), bound(one, "max")) for one in actions]


def _read(path: Location) -> pa.Table:
    with local_file(path) as local, pa.memory_map(str(local)) as file:
        return pa.ipc.open_file(file).read_all()
