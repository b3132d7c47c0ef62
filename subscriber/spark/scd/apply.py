"""apply_changes(): a Delta or Iceberg table that follows a stream of pgcdc, with SCD type 1 or 2.

    rows of the micro-batch ─▶ shuffled by key ─▶ net_rows() on executors ─▶ values that were not sent, from the target
        ─▶ files in <table>/_staged ─▶ new files of the table, by executors ─▶ one commit by the driver

The files are written as those of a lake are (tables/merge.py). The commit is that of the table's format (target.py).

**Invariants.**

- Changes up to the `_seq` that the table records are not applied again, whatever the micro-batch.
- A micro-batch with a TRUNCATE, or with rows that change their keys, is netted by one task, because the key does not
  identify the related changes. All others are divided by key.

**Failure cases**, in addition to those of target.py:

- Task killed: Spark repeats it. Only files that a finished task has reported are merged.
- Snapshot that is not the one which the table began with: an error, because rows that were deleted in between would
  stay.
- Change of a row that is neither in the table nor in the micro-batch, with values that were not sent: an error.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.directory_use import DirectoryUse, check_use
from subscriber.changelog.row_columns import sequence_number
from subscriber.changelog.storage import Location, location, make_directory, remove_directory
from subscriber.errors import ApplyError, StatementError
from subscriber.spark.scd.net_rows import key, net_rows, old_key, origin, value
from subscriber.spark.scd.staged_rows import stage
from subscriber.spark.scd.stream_table import StreamTable
from subscriber.spark.scd.target import END, HISTORY, ScdTarget, split_sequence
from subscriber.spark.tables.data_files import DataFile, DataFolder
from subscriber.spark.tables.merge import run
from subscriber.spark.tables.stage import Staged, has_ranges
from subscriber.spark.tables.table_format import StoredTable
from subscriber.spark.tables.table_merge import ATTEMPTS, TableMerge
from subscriber.spark.tasks import run_tasks_of_rows, spare_collector, sparing
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType


def apply_changes(
    stream: DataFrame,
    into: Path | str,
    *,
    keys: Sequence[str] | str | None = None,
    checkpoint: Path | str | None = None,
    stored_as_scd_type: Literal[1, 2] = 1,
    table: str | None = None,
    available_now: bool = False,
    catalog: str | None = None,
) -> StreamingQuery:
    """Start a query that applies a stream of pgcdc to a Delta or Iceberg table, which is created if it does not exist.

    Args:
        stream: `spark.readStream.format("pgcdc")…load()`, in mode `cdc`, without `rescue`. With the option `start` in
            place of `snapshot`, the table has changed rows only.
        into: the directory of the Delta table, which driver and executors see under the same name, or its URL in an
            object store. With `catalog`, namespace.table of the Iceberg table.
        keys: the columns that identify a row: those of the replica identity, or of the primary key under FULL. None:
            as the change log describes them. A table without any in the log needs a unique key without nulls.
        checkpoint: the location of Spark's checkpoint; None: `_checkpoint` in the directory of the Delta table.
        stored_as_scd_type: 1: the table has the source's rows. 2: it has all versions of a row, with the columns
            `__START_AT`, `__END_AT` (values of `_seq`; a current version has no end), `__START_TIME` and `__END_TIME`.
        table: schema.table, if the stream has several tables.
        available_now: stop at the position where the log ends now.
        catalog: the name of an Iceberg catalog in the configuration of PyIceberg; None: the table is a Delta table.

    Returns:
        The query. Its awaitTermination() raises the error of a micro-batch.

    Raises:
        StatementError: the stream does not have the columns of pgcdc or has the option rescue, it has no such table,
            its changes identify rows by other columns, the target has other columns, it is empty and the stream has
            neither a snapshot nor a start, a table that is not in a directory has no `checkpoint`,
            or the directory has another use.
        OSError: the storage cannot be read.
    """
    source = StreamTable.of(stream, table)
    if stored_as_scd_type not in (1, 2):
        raise StatementError("stored_as_scd_type must be 1 or 2", sqlstate=INVALID_PARAMETER_VALUE)
    names = source.key(keys)
    target = _target(into, source.row, names, history=stored_as_scd_type == 2, catalog=catalog)
    if checkpoint is None:
        checkpoint = checkpoint_of(target)
    if catalog is None:
        check_use(location(into), DirectoryUse.DELTA_TABLE)
    applied = target.applied(target.open()) if target.exists() else None
    source.check_key(names, None if applied is None else split_sequence(applied)[0])
    if applied is None:
        source.check_begin(target)
    target.open()

    def apply(batch: DataFrame, _: int) -> None:
        batch = batch.persist()
        try:
            apply_batch(batch, target)
        finally:
            batch.unpersist()

    writer = source.changes.writeStream.foreachBatch(apply)
    writer = writer.option("checkpointLocation", str(checkpoint))
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def checkpoint_of(target: ScdTarget) -> Path:
    """Return the default location of Spark's checkpoint. Raises StatementError if the target is not in a directory."""
    directory = location(target.into) if target.catalog is None else None
    if not isinstance(directory, Path):
        raise StatementError(
            f"the query of {target} needs a checkpoint",
            hint="Give it a location that Spark can write: checkpoint=….",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return directory / "_checkpoint"


def _target(into: Path | str, row: StructType, keys: Sequence[str], *, history: bool, catalog: str | None) -> ScdTarget:
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = to_arrow_schema(row, timezone="UTC")
    columns = pa.schema([pa.field(field.name, field.type) for field in columns])
    taken = set(HISTORY.names) & set(columns.names) if history else set()
    if taken:
        raise StatementError(
            f"SCD type 2 has a column {min(taken)}, as the table does", sqlstate=INVALID_PARAMETER_VALUE
        )
    places = [columns.names.index(name) for name in keys]
    return ScdTarget(into, columns, places, history=history, catalog=catalog)


def apply_batch(batch: DataFrame, target: ScdTarget) -> None:
    """Apply a micro-batch, in one commit.

    Raises:
        StatementError: the rows are of another snapshot than those of the table.
        ApplyError: a change cannot be applied, or other processes commit to the table again and again.
    """
    for _ in range(ATTEMPTS):
        if _is_applied(batch, target):
            return
    raise ApplyError(f"other programs change {target} again and again")


def _is_applied(batch: DataFrame, target: ScdTarget) -> bool:
    """Apply a micro-batch. Returns False if another process has committed to the table meanwhile."""
    from pyspark.sql import functions as f

    table = target.open()
    table.check_writable()
    applied = target.applied(table)
    if applied is not None:
        batch = batch.where(f.col("_seq") > applied)
    names = [target.columns.names[index] for index in target.keys]
    is_moved = f.col("op") == "u"
    differs = [f.col("before")[name] != f.col("after")[name] for name in names]
    moved = is_moved & f.col("before").isNotNull() & f.when(_any(differs), True).otherwise(False)
    partial_key = f.when(f.size("_unchanged") > 0, f.coalesce(f.col("before")[names[0]], f.col("after")[names[0]]))
    (summary,) = batch.select(
        f.max("_seq").alias("last"),
        f.max(f.when(f.col("op") == "r", f.col("_lsn"))).alias("snapshot"),
        f.max(moved | (f.col("op") == "t")).alias("is_whole"),
        f.min(partial_key).alias("low"),
        f.max(partial_key).alias("high"),
    ).collect()
    if summary.last is None:
        return True
    _check_snapshot(summary.snapshot, applied, target)
    staging = target.staging(table)
    make_directory(staging)
    try:
        rows = _netted(batch, target, names, is_whole=bool(summary.is_whole))
        if summary.low is not None:
            rows = _completed(rows, table, target, _files(table, target, (summary.low, summary.high)))
        staged = rows.mapInArrow(sparing(_stager(target, staging)), "staged binary").collect()
        parts = [pickle.loads(row.staged) for row in staged]
        return not parts or _merge(batch.sparkSession, parts, target, summary.last, staging)
    finally:
        remove_directory(staging)


def _merge(spark: SparkSession, parts: Sequence[Staged], target: ScdTarget, last: str, staging: Location) -> bool:
    """Write the files of the table again that the staged rows change, and commit them."""
    position, number = split_sequence(last)
    merge = TableMerge(target.open, target.all_columns(), parts, position, staging, number=number)
    files = _results(spark, merge.file_tasks())
    return merge.commit(files, _results(spark, merge.insert_tasks(files)))


def _results(spark: SparkSession, tasks: Sequence[Any]) -> list[Any]:
    results = run_tasks_of_rows(spark, run, tasks)
    for result in results:
        if isinstance(result, ApplyError):
            raise result
    return results


def _any(conditions: Sequence[Column]) -> Column:
    either = conditions[0]
    for condition in conditions[1:]:
        either = either | condition
    return either


def _check_snapshot(position: int | None, applied: str | None, target: ScdTarget) -> None:
    if position is not None and applied is not None and applied[:16] != sequence_number(position - 1, 0)[:16]:
        raise StatementError(
            f"{target} has the rows of another snapshot",
            detail="Rows that were deleted between the two would stay.",
            hint="Apply the stream to a new table, or continue with the snapshot and the checkpoint of this one.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _netted(batch: DataFrame, target: ScdTarget, names: Sequence[str], *, is_whole: bool) -> DataFrame:
    """Return the rows to merge, computed on the executors."""
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import from_arrow_schema

    columns, keys, history = list(target.columns.names), target.keys, target.history
    values = [f.col("after")[name].alias(value(index)) for index, name in enumerate(columns)]
    olds = [f.col("before")[name].alias(old_key(index)) for index, name in enumerate(names)]
    about = [
        f.col("op"),
        f.col("_seq").alias("seq"),
        f.col("_commit_ts").alias("time"),
        f.col("_unchanged").alias("unsent"),
    ]
    parts = 1 if is_whole else int(batch.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    named = [f.coalesce(f.col("after")[name], f.col("before")[name]) for name in names]
    part = f.lit(0) if parts == 1 else f.pmod(f.xxhash64(*named), f.lit(parts))

    def net(changes: pa.Table) -> pa.Table:
        spare_collector()
        return net_rows(changes, columns, keys, history=history).cast(schema)

    schema = _staged_schema(target)
    rows = batch.select(*about, *values, *olds, part.alias("part"))
    netted: DataFrame = rows.groupBy("part").applyInArrow(net, from_arrow_schema(schema))
    return netted


def _staged_schema(target: ScdTarget) -> pa.Schema:
    time = pa.timestamp("us", tz="UTC")
    kinds = [target.columns.field(index).type for index in target.keys]
    return pa.schema(
        [
            ("op", pa.string()),
            ("start", pa.string()),
            ("end", pa.string()),
            ("start_time", time),
            ("end_time", time),
            ("unsent", pa.list_(pa.int32())),
            *((name(index), kind) for index, kind in enumerate(kinds) for name in (key, origin)),
            *((value(index), field.type) for index, field in enumerate(target.columns)),
        ]
    )


def _files(table: StoredTable, target: ScdTarget, keys: tuple[Any, Any]) -> list[DataFile]:
    """Return the files of the table that may have a key of a range."""
    column = target.columns.field(target.keys[0])
    # Spark's times are in this process's time zone.
    is_comparable = has_ranges(column.type) and not pa.types.is_timestamp(column.type)
    return [file for file in table.files(column.name) if file.may_have([keys] if is_comparable else None)]


def _completed(staged: DataFrame, table: StoredTable, target: ScdTarget, files: Sequence[DataFile]) -> DataFrame:
    """Return the staged rows with the values that were not sent, from the current rows in files of the target."""
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import from_arrow_schema

    columns = pa.schema([pa.field(_target_value(index), field.type) for index, field in enumerate(target.columns)])
    reader = _reader(table.folder, files, target, columns)
    numbers = staged.sparkSession.range(0, len(files), 1, max(len(files), 1))
    current = numbers.mapInArrow(sparing(reader), from_arrow_schema(columns))
    matches = [f.col(origin(place)) == f.col(_target_value(column)) for place, column in enumerate(target.keys)]
    condition = f.col("unsent").isNotNull()
    for match in matches:
        condition = condition & match
    joined = staged.join(current, condition, "left")
    missing = f.col("unsent").isNotNull() & f.col(_target_value(target.keys[0])).isNull()
    error = f.raise_error(f.lit(f"subscriber.errors.ApplyError: a row was changed that is not in {target}"))
    values = []
    for index in range(len(target.columns)):
        kind = staged.schema[value(index)].dataType
        current_value = f.when(missing, error.cast(kind)).otherwise(f.col(_target_value(index)))
        is_unsent = f.array_contains("unsent", index)
        values.append(f.when(is_unsent, current_value).otherwise(f.col(value(index))).alias(value(index)))
    return joined.select(*(name for name in staged.columns if not name.startswith("value")), *values)


def _target_value(index: int) -> str:
    return f"target{index}"


_Batches = Iterator[pa.RecordBatch]


def _reader(
    folder: DataFolder, files: Sequence[DataFile], target: ScdTarget, columns: pa.Schema
) -> Callable[[_Batches], _Batches]:
    """Return a function that reads the current rows of the files whose numbers it gets. Runs on executors."""
    names, history = target.columns.names, target.history

    def read(batches: _Batches) -> _Batches:
        for number in (number for batch in batches for number in batch["id"].to_pylist()):
            for rows in folder.rows([files[number]]):
                current = rows.filter(pc.is_null(rows[END])) if history else rows
                arrays = [current[name].cast(field.type) for name, field in zip(names, columns, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=columns)

    return read


def _stager(target: ScdTarget, staging: Location) -> Callable[[_Batches], _Batches]:
    """Return a function that writes the rows of a partition to a file. Runs on executors."""
    width, keys, history = len(target.columns), target.keys, target.history

    def write(batches: _Batches) -> _Batches:
        if filled := [batch for batch in batches if batch.num_rows]:
            staged = stage(pa.Table.from_batches(filled), width, keys, staging, history=history)
            yield pa.record_batch([pa.array([pickle.dumps(staged)], pa.binary())], names=["staged"])

    return write
