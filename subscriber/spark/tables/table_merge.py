"""TableMerge: one table that a batch changes: the tasks for executors, and the commit of the files they write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.storage import Location, local_file
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.tables.data_files import LIMITS, FileLimits, NewFile
from subscriber.spark.tables.merge import Columns, Files, FileTask, InsertTask, MergedTable, file_tasks
from subscriber.spark.tables.stage import OP, Staged, has_ranges, origin, unchanged, value, write_arrow
from subscriber.spark.tables.table_format import CommitConflict, StoredTable

ATTEMPTS = 5  # at a commit, if other processes commit to the table at the same time
ROWS = 250_000  # in a new file, unless it has those of one staged file


class TableMerge:
    """The changes of a batch to one table. Methods block; they raise ApplyError if the changes cannot be applied."""

    def __init__(
        self,
        open_table: Callable[[], StoredTable],
        columns: Columns,
        parts: Sequence[Staged],
        position: Lsn,
        staging: Location,
        limits: FileLimits = LIMITS,
        *,
        number: int | None = None,
    ) -> None:
        """Describe the changes.

        Args:
            open_table: opens the table.
            columns: its columns.
            parts: the staged rows.
            position: the end of the batch.
            staging: the directory of staged rows.
            limits: how the table is divided into files.
            number: that of the last change in the transaction which ends at `position`; None: the batch has all of it.
        """
        self._open_table = open_table
        self._names = columns.names
        self._parts = parts
        self._position = position
        self._number = number
        self._versions = columns.versions
        self._staging = staging
        self._limits = limits
        self._attempts = 0
        self.version = 0  # of the stored table, after commit()

    def file_tasks(self) -> list[FileTask]:
        """Open the table, and return the tasks for its files. Empty if the table has the batch already."""
        self._table = self._open_table()
        self._is_done = (self._table.position, self._table.number) >= (self._position, self._number or 0)
        if self._is_done:
            return []
        self._table.check_writable()
        self._is_truncated = any(part.truncated for part in self._parts)
        key = self._parts[0].key
        # Equal rows of a table without a key cannot be distinguished, so the driver writes the whole table again.
        self._is_bag = key is None and not self._is_truncated and any(part.puts < part.rows for part in self._parts)
        staged = tuple(part.path for part in self._parts)
        self._merged = MergedTable(
            self._table.folder, self._names, key or (), staged, self._staging, self._limits, self._versions
        )
        self._files = self._table.files(self._names[key[0]] if key is not None else None)
        if self._is_truncated or self._is_bag:
            return []
        if any(part.moved for part in self._parts):
            self._merged = replace(self._merged, staged=(self._filled(),))
        known = [part.ranges for part in self._parts]
        ranges = (
            [key_range for ranges_of_part in known if ranges_of_part is not None for key_range in ranges_of_part]
            if None not in known
            else None
        )
        return file_tasks(self._merged, self._files, ranges)

    def insert_tasks(self, files: Sequence[Files]) -> list[InsertTask]:
        """Return the tasks for the rows that are in no file.

        Args:
            files: the results of file_tasks().
        """
        if self._is_done or self._is_bag:
            return []
        staged = self._merged.staged
        matched = tuple(
            frozenset[int]().union(*(file_result.found[place] for file_result in files)) for place in range(len(staged))
        )
        carried = tuple(path for file_result in files for path in file_result.carried)
        missing = sum(part.puts for part in self._parts) - sum(map(len, matched))
        if missing <= 0 and not carried:
            return []
        if missing <= ROWS:
            return [InsertTask(self._merged, matched, carried)]
        pairs = zip(staged, matched, strict=True)
        tasks = [InsertTask(replace(self._merged, staged=(path,)), (numbers,)) for path, numbers in pairs]
        return [replace(tasks[0], carried=carried), *tasks[1:]]

    def commit(self, files: Sequence[Files], inserted: Sequence[Sequence[NewFile]]) -> bool:
        """Commit the files that the tasks have written.

        Returns:
            False if another process has changed the table meanwhile, so that the tasks have to be repeated.
        """
        if self._is_done:
            self.version = self._table.version
            return True
        if self._is_bag:
            removed, inserted = self._files, [self._table.folder.write(self._bag().to_batches())]
        else:
            removed = (
                self._files if self._is_truncated else [file for file_result in files for file in file_result.removed]
            )
        added = [file for paths in (*(file_result.added for file_result in files), *inserted) for file in paths]
        deletes = [new for file_result in files for new in file_result.deletes]
        try:
            self.version = self._table.commit(removed, added, self._position, self._number, deletes)
        except CommitConflict as error:
            self._attempts += 1
            if self._attempts == ATTEMPTS:
                raise ApplyError("other programs change its table again and again", detail=str(error)) from error
            return False
        return True

    def _bag(self) -> pa.Table:
        """Return all rows of a table without a key after the batch. Raises ApplyError if a changed row is missing."""
        staged = pa.concat_tables([_read(part.path) for part in self._parts], promote_options="default")
        more, fewer = (self._merged.rows(staged.filter(pc.equal(staged[OP], op))) for op in "+-")
        schema = self._table.folder.schema
        rows = Counter(_hashable(pa.Table.from_batches(self._table.folder.rows(self._files), schema)))
        less = Counter(_hashable(fewer))
        if less - rows:
            raise ApplyError("a row was changed that is not in the table")
        left = pa.Table.from_pylist([dict(row) for row in (rows - less).elements()], schema=schema)
        return pa.concat_tables([left, more])

    def _rows_by_key(self, keys: Sequence[tuple[object, ...]]) -> dict[tuple[object, ...], dict[str, object]]:
        """Return the rows of the table that have one of these keys."""
        schema, names = self._table.folder.schema, [self._names[column] for column in self._merged.key]
        kind, wanted = schema.field(names[0]).type, [key[0] for key in keys]
        ranges = [(first, first) for first in wanted] if has_ranges(kind) and None not in wanted else None
        files = [file for file in self._files if file.may_have(ranges)]
        by_key = {}
        for batch in self._table.folder.rows(files):
            chosen = batch.filter(pc.is_in(batch[names[0]], pa.array(wanted, kind)))
            by_key.update({tuple(row[name] for name in names): row for row in chosen.to_pylist()})
        return by_key

    def _filled(self) -> Location:
        """Write the staged rows again. Unchanged values of rows with a new key are read from their old key."""
        names, key = self._names, self._merged.key
        staged = pa.concat_tables([_read(part.path) for part in self._parts], promote_options="default")
        moved = [index for index, op in enumerate(staged[OP].to_pylist()) if op == "m"]
        rows = staged.to_pylist()
        before = self._rows_by_key([tuple(rows[index][origin(column)] for column in key) for index in moved])
        for index in moved:
            row = rows[index]
            old = before.get(tuple(row[origin(column)] for column in key))
            if old is None:
                raise ApplyError("a row was changed that is not in the table")
            for column, name in enumerate(names):
                if row.get(unchanged(column)):
                    row[value(column)], row[unchanged(column)] = old.get(name), False
        filled = pa.Table.from_pylist(rows, schema=staged.schema)
        return write_arrow(filled.schema, filled.to_batches(), self._staging)


def _read(path: Location) -> pa.Table:
    with local_file(path) as local, pa.memory_map(str(local)) as file:
        return pa.ipc.open_file(file).read_all()


def _hashable(rows: pa.Table) -> list[tuple[tuple[str, object], ...]]:
    return [tuple(row.items()) for row in rows.to_pylist()]
