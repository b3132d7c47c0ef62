"""apply_changes(): a Delta table that follows a stream of pgcdc, with SCD type 1 or 2.

    rows of the micro-batch ─▶ shuffled by key ─▶ net_rows() on executors ─▶ values that were not sent, from the target
                            ─▶ files in <table>/_staged ─▶ one commit by the driver (delta_target.py)

**Invariants.**

- Changes up to the `_seq` that the table records are not applied again, whatever the micro-batch.
- A micro-batch with a TRUNCATE, or with rows that change their keys, is netted by one task, because the key does not
  identify the related changes. All others are divided by key.

**Failure cases**, in addition to those of delta_target.py:

- Task killed: Spark repeats it. Only files that a finished task has reported are merged.
- Snapshot that is not the one which the table began with: an error, because rows that were deleted in between would
  stay.
- Change of a row that is neither in the table nor in the micro-batch, with values that were not sent: an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import pyarrow as pa

from subscriber.changelog.row_columns import sequence_number
from subscriber.changelog.storage import local_directory
from subscriber.display import near_word
from subscriber.errors import StatementError
from subscriber.spark.scd.delta_target import END, HISTORY, DeltaTarget
from subscriber.spark.scd.net_rows import key, net_rows, old_key, origin, value
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType


def apply_changes(
    stream: DataFrame,
    into: Path | str,
    *,
    keys: Sequence[str],
    checkpoint: Path | str | None = None,
    stored_as_scd_type: Literal[1, 2] = 1,
    table: str | None = None,
    available_now: bool = False,
) -> StreamingQuery:
    """Start a query that applies a stream of pgcdc to a Delta table.

    Args:
        stream: `spark.readStream.format("pgcdc")…load()`, in mode `cdc`.
        into: the directory of the Delta table, which driver and executors see under the same name. It is created if it
            does not exist.
        keys: the columns that identify a row: those of the replica identity, or of a primary key under FULL.
        checkpoint: the directory of Spark's checkpoint; None: `_checkpoint` in the directory of the table.
        stored_as_scd_type: 1: the table has the source's rows. 2: it has all versions of a row, with the columns
            `__START_AT`, `__END_AT` (values of `_seq`; a current version has no end), `__START_TIME` and `__END_TIME`.
        table: schema.table, if the stream has several tables.
        available_now: stop at the position where the log ends now.

    Returns:
        The query. Its awaitTermination() raises the error of a micro-batch.

    Raises:
        StatementError: the stream does not have the columns of pgcdc, it has no such table or key, or the Delta table
            has other columns.
    """
    changes = _changes(stream, table)
    row: StructType = changes.schema["after"].dataType  # type: ignore[assignment]
    if stored_as_scd_type not in (1, 2):
        raise StatementError("stored_as_scd_type must be 1 or 2", sqlstate=INVALID_PARAMETER_VALUE)
    for name in keys:
        if name not in row.names:
            raise StatementError(
                f'the table has no column "{name}"',
                hint=near_word(name, row.names) or f"Its columns are {', '.join(row.names)}.",
                sqlstate=UNDEFINED_COLUMN,
            )
    if not keys:
        raise StatementError("apply_changes() needs the key of the table", hint='For example: keys=["id"]')
    directory = local_directory(into, "A table of apply_changes()")
    target = _target(directory, row, keys, history=stored_as_scd_type == 2)
    target.open()

    def apply(batch: DataFrame, _: int) -> None:
        batch = batch.persist()
        try:
            apply_batch(batch, target)
        finally:
            batch.unpersist()

    writer = changes.writeStream.foreachBatch(apply)
    writer = writer.option("checkpointLocation", str(checkpoint or target.path / "_checkpoint"))
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.start()


def _changes(stream: DataFrame, table: str | None) -> DataFrame:
    """Return the changes of one table, with its columns in `before` and `after`."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    if not {"op", "before", "after", "_seq", "_lsn", "_unchanged"} <= set(stream.columns):
        raise StatementError(
            "the stream does not have the columns of pgcdc",
            hint='Read it with format("pgcdc"), without the option mode.',
            sqlstate=UNDEFINED_COLUMN,
        )
    if table is None:
        return stream
    row = stream.schema["after"].dataType
    assert isinstance(row, StructType)
    if table not in row.names:
        return stream.where(f.col("_table") == table)
    sides = {side: f.col(side)[table] for side in ("before", "after")}
    return stream.where(f.col("_table") == table).withColumns(sides)


def _target(path: Path, row: StructType, keys: Sequence[str], *, history: bool) -> DeltaTarget:
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = to_arrow_schema(row, timezone="UTC")
    columns = pa.schema([pa.field(field.name, field.type) for field in columns])
    taken = set(HISTORY.names) & set(columns.names) if history else set()
    if taken:
        raise StatementError(
            f"SCD type 2 has a column {min(taken)}, as the table does", sqlstate=INVALID_PARAMETER_VALUE
        )
    return DeltaTarget(path, columns, [columns.names.index(name) for name in keys], history=history)


def apply_batch(batch: DataFrame, target: DeltaTarget) -> None:
    """Apply a micro-batch, in one commit.

    Raises:
        StatementError: the rows are of another snapshot than those of the table.
    """
    from pyspark.sql import functions as f

    table = target.open()
    applied = target.applied(table)
    if applied is not None:
        batch = batch.where(f.col("_seq") > applied)
    names = [target.columns.names[index] for index in target.keys]
    is_moved = f.col("op") == "u"
    differs = [f.col("before")[name] != f.col("after")[name] for name in names]
    moved = is_moved & f.col("before").isNotNull() & f.when(_any(differs), True).otherwise(False)
    (found,) = batch.select(
        f.max("_seq").alias("last"),
        f.max(f.when(f.col("op") == "r", f.col("_lsn"))).alias("snapshot"),
        f.max(moved | (f.col("op") == "t")).alias("is_whole"),
        f.max(f.size("_unchanged") > 0).alias("is_partial"),
        f.min_by(
            f.struct(f.col("_seq").alias("seq"), f.col("_commit_ts").alias("time")),
            f.when(f.col("op") == "t", f.col("_seq")),
        ).alias("emptied"),
    ).collect()
    if found.last is None:
        return
    _check_snapshot(found.snapshot, applied, target)
    staged = _netted(batch, target, names, is_whole=bool(found.is_whole))
    if found.is_partial and applied is not None:
        staged = _completed(staged, table.file_uris(), target)
    files = staged.mapInArrow(_writer(str(target.staging())), "path string").collect()
    emptied = None if found.emptied is None else (found.emptied.seq, _utc(found.emptied.time))
    target.commit(table, [row.path for row in files], found.last, emptied)


def _any(conditions: Sequence[Column]) -> Column:
    found = conditions[0]
    for condition in conditions[1:]:
        found = found | condition
    return found


def _utc(time: Any) -> str:
    """Return a time of collect(), which is in this process's time zone, as text in UTC."""
    from datetime import UTC

    return str(time.astimezone(UTC).replace(tzinfo=None))


def _check_snapshot(position: int | None, applied: str | None, target: DeltaTarget) -> None:
    if position is not None and applied is not None and applied[:16] != sequence_number(position - 1, 0)[:16]:
        raise StatementError(
            f'the Delta table in "{target.path}" has the rows of another snapshot',
            detail="Rows that were deleted between the two would stay.",
            hint="Apply the stream to a new table, or continue with the snapshot and the checkpoint of this one.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _netted(batch: DataFrame, target: DeltaTarget, names: Sequence[str], *, is_whole: bool) -> DataFrame:
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
        return net_rows(changes, columns, keys, history=history).cast(schema)

    schema = _staged_schema(target)
    rows = batch.select(*about, *values, *olds, part.alias("part"))
    netted: DataFrame = rows.groupBy("part").applyInArrow(net, from_arrow_schema(schema))
    return netted


def _staged_schema(target: DeltaTarget) -> pa.Schema:
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


def _completed(staged: DataFrame, files: Sequence[str], target: DeltaTarget) -> DataFrame:
    """Return the staged rows with the values that were not sent, from the current rows of the target."""
    from pyspark.sql import functions as f

    def quoted(name: str) -> Column:
        return f.col(f"`{name.replace('`', '``')}`")

    current = staged.sparkSession.read.parquet(*files)
    if target.history:
        current = current.where(f.col(END).isNull())
    names = target.columns.names
    current = current.select(
        f.struct(*(quoted(names[column]) for column in target.keys)).alias("target_key"),
        *(quoted(name).alias(f"target{index}") for index, name in enumerate(names)),
    )
    wanted = f.when(f.col("unsent").isNotNull(), f.struct(*(f.col(origin(i)) for i in range(len(target.keys)))))
    matches = [wanted[origin(index)] == f.col("target_key")[names[column]] for index, column in enumerate(target.keys)]
    condition = matches[0]
    for match in matches[1:]:
        condition = condition & match
    joined = staged.join(current, condition, "left")
    missing = f.col("unsent").isNotNull() & f.col("target_key").isNull()
    error = f.raise_error(f.lit("a row was changed that is not in the Delta table"))
    values = []
    for index in range(len(names)):
        kind = staged.schema[value(index)].dataType
        current_value = f.when(missing, error.cast(kind)).otherwise(f.col(f"target{index}"))
        is_unsent = f.array_contains("unsent", index)
        values.append(f.when(is_unsent, current_value).otherwise(f.col(value(index))).alias(value(index)))
    return joined.select(*(name for name in staged.columns if not name.startswith("value")), *values)


def _writer(folder: str) -> Any:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        path = f"{folder}/{uuid4().hex}.arrow"
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"path": [path]})

    return write
