"""DeltaTarget: the Delta table that apply_changes() maintains, and its commits.

**Invariants.** A micro-batch is one commit. The commit records the `_seq` of its last change, in two application
transactions of Delta: the position, and the number. Delta keeps the newest transaction of each application even when it
removes old log files. Changes up to that `_seq` are in the table, and a repeated micro-batch does not have others.

**Failure cases.**

- Killed before the commit: the table is unchanged, and the micro-batch is repeated. Its staged files are removed.
- Killed after the commit, before Spark has recorded the micro-batch: the repeated one has no change that is newer.
- Another process commits to the table at the same time: one of the two commits fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from subscriber.changelog.row_columns import sequence_number
from subscriber.errors import StatementError
from subscriber.quoting import identifier
from subscriber.spark.scd.net_rows import key, value
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE

# SCD type 2: the versions of a row. The values of _START_AT and _END_AT are those of _seq.
START, END = "__START_AT", "__END_AT"
START_TIME, END_TIME = "__START_TIME", "__END_TIME"
HISTORY = pa.schema(
    [
        (START, pa.string()),
        (END, pa.string()),
        (START_TIME, pa.timestamp("us", tz="UTC")),
        (END_TIME, pa.timestamp("us", tz="UTC")),
    ]
)
_POSITION, _NUMBER = "subscriber.apply_changes.lsn", "subscriber.apply_changes.number"
_SEQUENCE = "subscriber.seq"  # in the metadata of a commit
_STAGED = "_staged"  # Delta ignores names that begin with an underscore


class DeltaTarget:
    """A Delta table in a directory that driver and executors see under the same name. Methods block."""

    def __init__(self, path: Path, columns: pa.Schema, keys: Sequence[int], *, history: bool) -> None:
        """Describe the table, which need not exist.

        Args:
            path: the directory of the table.
            columns: the columns of the source's table.
            keys: the indexes of the key in `columns`.
            history: SCD type 2.
        """
        self.path = path
        self.columns = columns
        self.keys = keys
        self.history = history

    def schema(self) -> pa.Schema:
        """Return the columns of the target."""
        return pa.schema([*self.columns, *(HISTORY if self.history else ())])

    def open(self) -> DeltaTable:
        """Open the table, and create it if it does not exist.

        Raises:
            StatementError: the table has other columns.
        """
        if not DeltaTable.is_deltatable(str(self.path)):
            return DeltaTable.create(str(self.path), self.schema())
        table = DeltaTable(str(self.path))
        found, wanted = _types(pa.schema(table.schema().to_arrow())), _types(self.schema())
        different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if different:
            name = different[0]
            raise StatementError(
                f'the Delta table in "{self.path}" does not have the columns of the source',
                detail=f'Column "{name}" is {found.get(name, "missing")} instead of {wanted.get(name, "missing")}.',
                hint="Take a new snapshot with subscriber.spark.write_snapshot(), and apply it to a new table.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        return table

    def applied(self, table: DeltaTable) -> str | None:
        """Return the `_seq` of the last change in the table. None: it has none."""
        position, number = table.transaction_version(_POSITION), table.transaction_version(_NUMBER)
        return None if position is None or number is None else sequence_number(position, number)

    def staging(self) -> Path:
        """Return an empty directory for staged files."""
        folder = self.path / _STAGED
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(
        self, table: DeltaTable, files: Iterable[str], sequence: str, emptied: tuple[str, object] | None
    ) -> None:
        """Merge staged rows, and remove the files.

        Args:
            table: the table.
            files: the staged files.
            sequence: the `_seq` of the last change of the micro-batch.
            emptied: `_seq` and time of the first TRUNCATE. None: there is none.
        """
        properties = CommitProperties(
            custom_metadata={_SEQUENCE: sequence},
            app_transactions=[
                Transaction(_POSITION, int(sequence[:16], 16)),
                Transaction(_NUMBER, int(sequence[16:], 16)),
            ],
        )
        staged = _reader(list(files))
        if staged is None:
            return
        if self.history:
            self._merge_history(table, staged, emptied, properties)
        elif emptied is not None:
            names = [value(index) for index in range(len(self.columns))]
            puts = (batch.filter(pc.equal(batch["op"], "put")) for batch in staged)
            rows = (_renamed(batch.select(names), self.columns) for batch in puts)
            reader = pa.RecordBatchReader.from_batches(self.columns, rows)
            write_deltalake(table, reader, mode="overwrite", commit_properties=properties)
        else:
            self._merge(table, staged, properties)
        shutil.rmtree(self.path / _STAGED, ignore_errors=True)

    def _matches(self) -> str:
        return " AND ".join(
            f"target.{identifier(self.columns.names[column])} = source.{key(index)}"
            for index, column in enumerate(self.keys)
        )

    def _values(self) -> dict[str, str]:
        return {identifier(name): f"source.{value(index)}" for index, name in enumerate(self.columns.names)}

    def _merge(self, table: DeltaTable, staged: pa.RecordBatchReader, properties: CommitProperties) -> None:
        merge = table.merge(
            staged, self._matches(), source_alias="source", target_alias="target", commit_properties=properties
        )
        merge = merge.when_matched_delete(predicate="source.op = 'delete'")
        merge = merge.when_matched_update(self._values(), predicate="source.op = 'put'")
        merge.when_not_matched_insert(self._values(), predicate="source.op = 'put'").execute()

    def _merge_history(
        self,
        table: DeltaTable,
        staged: pa.RecordBatchReader,
        emptied: tuple[str, object] | None,
        properties: CommitProperties,
    ) -> None:
        is_current = f"target.{identifier(END)} IS NULL"
        predicate = f"source.op = 'close' AND {is_current} AND {self._matches()}"
        merge = table.merge(
            staged, predicate, source_alias="source", target_alias="target", commit_properties=properties
        )
        merge = merge.when_matched_update({identifier(END): 'source."end"', identifier(END_TIME): "source.end_time"})
        history = {
            identifier(START): "source.start",
            identifier(END): 'source."end"',
            identifier(START_TIME): "source.start_time",
            identifier(END_TIME): "source.end_time",
        }
        merge = merge.when_not_matched_insert({**self._values(), **history}, predicate="source.op = 'add'")
        if emptied is not None:
            end, time = emptied
            ended = {identifier(END): f"'{end}'", identifier(END_TIME): f"arrow_cast('{time}', {_TIME})"}
            merge = merge.when_not_matched_by_source_update(ended, predicate=is_current)
        merge.execute()


_TIME = "'Timestamp(Microsecond, Some(\"UTC\"))'"


def _types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type).replace("large_", "").replace("_view", "") for field in schema}


def _renamed(batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    arrays = [array.cast(field.type) for array, field in zip(batch.columns, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _reader(files: list[str]) -> pa.RecordBatchReader | None:
    """Return the rows of staged files. None: there are none."""
    if not files:
        return None

    def batches() -> Iterator[pa.RecordBatch]:
        for file in files:
            with pa.memory_map(file) as opened:
                reader = pa.ipc.open_file(opened)
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)

    with pa.memory_map(files[0]) as opened:
        schema = pa.ipc.open_file(opened).schema
    return pa.RecordBatchReader.from_batches(schema, batches())
