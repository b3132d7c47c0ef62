"""One Delta table of the lake: loaded once, then one commit for each batch, with the position that the table reaches.

**Invariants.** A commit of rows records its position twice. As an application transaction, of which Delta keeps the
newest, it makes a repeated batch harmless. In the commit's metadata, it tells a reader of the table the position. A
commit that changes the columns records the position of the new version in the same way, in another application.

**Failure cases.**

- Killed before the commit: nothing has happened.
- Killed after the commit: the repeated batch finds that the table has its position.
- Killed after the commit that changes the columns, which comes first: the repeated batch finds that the table has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction, write_deltalake

from subscriber.changelog.storage import Location, local_file, location
from subscriber.errors import ApplyError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.spark.lake.merge import aligned
from subscriber.spark.lake.stage import OP, value
from subscriber.spark.sources.arrow_types import arrow_array

APPLICATION = "subscriber"
COLUMNS = "subscriber.columns"  # the application whose transactions are the positions of changed columns
POSITION = "subscriber.lsn"  # in a commit's metadata: all transactions that ended up to this position are included


@contextmanager
def storing() -> Iterator[None]:
    """Turn an error of Delta's library in the block into ApplyError. It is the error of one table.

    Other OSErrors than a missing file are raised unchanged, because they are errors of the storage.
    """
    try:
        yield
    except (SubscriberError, MemoryError):
        raise
    except Exception as error:  # Delta's library raises errors without a class of their own
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        raise ApplyError(f"its Delta table cannot be read or written: {error}") from error


# Delta's library takes the address and the credentials of an object store from the environment, as ours does.
_OPTIONS = {"conditional_put": "etag", "timeout": "60s"}  # the store decides which of two commits is first


def open_table(path: Location) -> DeltaTable:
    """Open a table, which must exist."""
    return DeltaTable(str(path), storage_options=_OPTIONS)


def committed(position: Lsn) -> CommitProperties:
    """Return the properties of a commit of rows.

    The commit fails if another one has come first. Delta's library would repeat it without a look at the files that the
    other one has removed.
    """
    return CommitProperties(
        custom_metadata={POSITION: str(position)},
        app_transactions=[Transaction(APPLICATION, int(position))],
        max_commit_retries=0,
    )


def position_of(table: DeltaTable) -> Lsn:
    """Return the position of a table's newest commit of rows; 0 if it has none."""
    return Lsn(table.transaction_version(APPLICATION) or 0)


def columns_of(table: DeltaTable) -> Lsn:
    """Return the position of a table's newest commit of columns; 0 if it has none."""
    return Lsn(table.transaction_version(COLUMNS) or 0)


def create(path: Location, schema: pa.Schema, position: Lsn, rows: Iterable[pa.RecordBatch] = ()) -> None:
    """Create a table with these rows, in one commit. An existing table is replaced."""
    _replace(str(path), schema, rows, committed(position))


def _replace(
    table: str | DeltaTable, schema: pa.Schema, rows: Iterable[pa.RecordBatch], properties: CommitProperties
) -> None:
    """Replace columns and rows of a table. An error in `rows` is raised unchanged, and the table stays as it is."""
    failed: list[Exception] = []

    def read() -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except Exception as error:
            failed.append(error)
            raise

    reader = pa.RecordBatchReader.from_batches(schema, read())
    try:
        write_deltalake(
            table,
            reader,
            mode="overwrite",
            schema_mode="overwrite",
            commit_properties=properties,
            storage_options=_OPTIONS,
        )
    except Exception:
        if failed:
            raise failed[0] from None
        raise


class NewColumn(NamedTuple):
    """A column of a table after the columns have changed."""

    name: str
    kind: pa.DataType
    source: str | None  # the name that the column had; None: it is new
    fill: str | None  # the value of existing rows in a new column, as text


def change_columns(path: Location, columns: Sequence[NewColumn], position: Lsn) -> None:
    """Give a table these columns, in one commit, and convert its rows.

    Does nothing if the table has the columns of `position` already.

    Args:
        path: the location of the table.
        columns: the new columns.
        position: the position of the version with these columns.

    Raises:
        ApplyError: a value cannot be converted.
    """
    table = open_table(path)
    if columns_of(table) >= position:
        return
    before = pa.schema(table.schema().to_arrow())
    properties = CommitProperties(app_transactions=[Transaction(COLUMNS, int(position))])
    # Delta keeps the order of columns if their names are the same, so the order is of no importance.
    kept = {(column.source, column.name, column.kind) for column in columns if column.source is not None}
    new = [column for column in columns if column.source is None]
    if kept == {(field.name, field.name, field.type) for field in before}:
        if new and all(column.fill is None for column in new):
            fields = Schema.from_arrow(pa.schema([(column.name, column.kind) for column in new])).fields
            added = [Field(field.name, field.type, nullable=True) for field in fields]
            table.alter.add_columns(added, commit_properties=properties)
        if not any(column.fill is not None for column in new):
            return
    schema = pa.schema([(column.name, column.kind) for column in columns])
    _replace(table, schema, _converted(_rows_of(table, before), columns, schema), properties)


def _rows_of(table: DeltaTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all rows. Read by pyarrow, because Delta's library cannot read while it writes."""
    for uri in table.file_uris():
        with local_file(location(uri)) as file, pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                yield aligned(batch, schema)


def _converted(
    batches: Iterable[pa.RecordBatch], columns: Sequence[NewColumn], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        arrays = []
        for column in columns:
            if column.source is None:
                text = None if column.fill is None else column.fill.encode()
                one = arrow_array([text], column.kind, column.name)
                arrays.append(one.take(pa.array([0] * len(batch), pa.int32())))
            else:
                try:
                    arrays.append(pc.cast(batch[column.source], column.kind))
                except pa.ArrowInvalid:
                    raise ApplyError(f'a value of column "{column.name}" cannot be stored as {column.kind}') from None
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _rows(staged: pa.Table, names: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Return the staged rows with the columns of the table."""
    rows = pa.table([staged[value(index)] for index in range(len(names))], names=list(names))
    return rows.select(schema.names).cast(schema)


def apply_bag(table: DeltaTable, staged: pa.Table, names: Sequence[str], position: Lsn) -> None:
    """Apply staged rows to a table without a key, in one commit that writes the whole table again.

    Args:
        table: the Delta table.
        staged: the staged rows of stage.py.
        names: the names of the columns, which the staged rows have by number.
        position: all transactions up to this position are in the rows.

    Raises:
        ApplyError: a changed row is not in the table.
    """
    schema = pa.schema(table.schema().to_arrow())
    more = _rows(staged.filter(pc.equal(staged[OP], "+")), names, schema)
    fewer = _rows(staged.filter(pc.equal(staged[OP], "-")), names, schema)
    rows = Counter(_hashable(table.to_pyarrow_table().select(schema.names)))
    less = Counter(_hashable(fewer))
    if less - rows:
        raise ApplyError("a row was changed that is not in the lake")
    left = pa.Table.from_pylist([dict(row) for row in (rows - less).elements()], schema=schema)
    write_deltalake(table, pa.concat_tables([left, more]), mode="overwrite", commit_properties=committed(position))


def _hashable(rows: pa.Table) -> list[tuple[tuple[str, object], ...]]:
    return [tuple(row.items()) for row in rows.to_pylist()]
