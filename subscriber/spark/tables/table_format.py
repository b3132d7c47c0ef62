"""The contract of a table format: what lakes and apply_changes() need of Delta (delta.py) and Iceberg (iceberg.py).

**Invariants.** A commit of rows records its position in the same atomic step, so that a batch that is repeated finds
its position and does nothing. A commit of columns records the position of the new version in the same way, in another
place. A commit fails if another one has come first, because a repetition could add rows twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError, StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.spark.sources.arrow_types import arrow_array
from subscriber.spark.tables.data_files import DataFile, DataFolder, NewFile
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.position_deletes import NewDeletes

DELTA = "delta"
ICEBERG = "iceberg"
FORMATS = (DELTA, ICEBERG)

POSITION = "subscriber.lsn"  # the property of a commit of rows: all transactions that ended up to it are included
NUMBER = "subscriber.number"  # … and of that position's transaction the changes up to this number; only apply_changes()
COLUMNS = "subscriber.columns"  # the property of a commit of columns: the position of their version


class CommitConflict(Exception):
    """Another process has changed the table since it was opened."""


class VersionGone(Exception):
    """A version of a table cannot be read any more. The message is the end of a sentence about the table."""


class NewColumn(NamedTuple):
    """A column of a table after the columns have changed."""

    name: str
    kind: pa.DataType
    source: str | None  # the name that the column had; None: it is new
    fill: str | None  # the value of existing rows in a new column, as text


class StoredTable(Protocol):
    """A table, opened at its newest version. Methods block."""

    @property
    def version(self) -> int:
        """Return the number that the format gives to this version."""

    @property
    def position(self) -> Lsn:
        """Return the position of the newest commit of rows in this version; 0 if there is none."""

    @property
    def number(self) -> int:
        """Return the number of the newest commit's last change in the transaction of `position`; 0: none."""

    @property
    def columns_position(self) -> Lsn:
        """Return the position of the newest commit of columns in this version; 0 if there is none."""

    @property
    def folder(self) -> DataFolder:
        """Return where the files of the table are, and its columns."""

    def to_arrow(self) -> pa.Table:
        """Return all rows of the version that is loaded."""

    def load_version(self, version: int) -> None:
        """Read from this version from now on. Raises VersionGone if the storage does not have it."""

    def check_writable(self) -> None:
        """Raise ApplyError if another program has given the table a feature that commit() does not observe."""

    def files(self, column: str | None) -> list[DataFile]:
        """Return the files of the table, with the range of a column; None: without ranges."""

    def commit(
        self,
        removed: Sequence[DataFile],
        added: Sequence[NewFile],
        position: Lsn,
        number: int | None = None,
        deletes: Sequence[NewDeletes] = (),
        *,
        same_rows: bool = False,
    ) -> int:
        """Replace files in one commit, which has `position`. Returns the version.

        Args:
            removed: files of the table.
            added: new files.
            position: the position that the table reaches.
            number: that of the last change in the transaction of `position`; None: the table does not have numbers.
            deletes: the positions of deleted rows of other files of the table. None, unless its folder has an address.
            same_rows: the new files have the rows of the removed ones, so that readers of changes skip the commit.

        Raises:
            CommitConflict: another commit has come first, and nothing has changed.
        """

    def change_columns(self, columns: Sequence[NewColumn], position: Lsn) -> None:
        """Give the table these columns in one commit, and convert its rows.

        Does nothing if the table has the columns of `position` already. The columns of its layout keep that role,
        except for those that are dropped, and for cluster columns that get a type without an order.

        Args:
            columns: the new columns.
            position: the position of the version with these columns.

        Raises:
            ApplyError: a value cannot be converted.
        """

    def clean_up(self, hours: int, versions: frozenset[int]) -> int:
        """Remove the files that only versions older than `hours` need, except `versions`. Returns their number."""


class TableFormat(Protocol):
    """Creates, opens and removes the tables of a lake. A label is schema.name."""

    title: str  # for messages

    def connect(self) -> None:
        """Make what all tables need usable. Raises StatementError if that is not possible."""

    def open(self, label: str, path: Location) -> StoredTable:
        """Open a table, which must exist."""

    def create(
        self,
        label: str,
        path: Location,
        schema: pa.Schema,
        position: Lsn,
        rows: Iterable[pa.RecordBatch],
        layout: Layout = NO_LAYOUT,
    ) -> None:
        """Create a table with these rows, in one commit. An existing table is replaced, and keeps its older versions.

        An error in `rows` is raised unchanged, and the table stays as it is. ApplyError: the format cannot have the
        layout.
        """

    def remove(self, label: str, path: Location) -> None:
        """Remove a table with all its versions, if it exists."""

    def raises_storage_error(self, error: Exception) -> bool:
        """Return True if an error of the format's library is one of the storage, not of one table."""


def table_format(name: str, directory: Location, lake_id: str, catalog: str | None) -> TableFormat:
    """Return a format.

    Args:
        name: one of FORMATS.
        directory: the directory of the lake.
        lake_id: distinguishes the tables of this lake from those of others in the same catalog.
        catalog: the name of Iceberg's catalog in the configuration of PyIceberg; None: a catalog in the directory.

    Raises:
        StatementError: the library of the format is not installed, or the lake cannot have such tables.
    """
    lake_format: TableFormat = format_module(name).table_format(directory, lake_id, catalog)
    return lake_format


def format_module(name: str) -> Any:
    """Import the module of a format. Raises StatementError if there is none, or its library is not installed."""
    if name not in FORMATS:
        raise StatementError(f'there is no table format "{name}"', hint=f"The formats are: {', '.join(FORMATS)}.")
    try:
        return importlib.import_module(f"subscriber.spark.tables.{name}")
    except ModuleNotFoundError as error:
        extra = {DELTA: "lake", ICEBERG: "iceberg"}[name]
        raise StatementError(
            f"{name} tables need the module {error.name}",
            hint=f"Install it with: pip install 'pgsubscriber[spark,{extra}]'",
        ) from None


@contextmanager
def storing(tables: TableFormat) -> Iterator[None]:
    """Turn an error of the format's library in the block into ApplyError. It is the error of one table.

    CommitConflict and OSErrors other than a missing file are raised unchanged: the latter are errors of the storage.
    """
    try:
        yield
    except (SubscriberError, MemoryError, CommitConflict):
        raise
    except Exception as error:  # the libraries raise errors without a class of their own
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        if tables.raises_storage_error(error):
            raise OSError(str(error)) from error
        raise ApplyError(f"its {tables.title} table cannot be read or written: {error}") from error


def converted(
    batches: Iterable[pa.RecordBatch], columns: Sequence[NewColumn], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield rows of a table with its new columns.

    Args:
        batches: rows with the columns that the table had.
        columns: the new columns, in the order of `schema`.
        schema: the schema of the result.

    Raises:
        ApplyError: a value cannot be converted.
    """
    for batch in batches:
        arrays = []
        for column, field in zip(columns, schema, strict=True):
            if column.source is None:
                text = None if column.fill is None else column.fill.encode()
                constant = arrow_array([text], column.kind, column.name).cast(field.type)
                arrays.append(constant.take(pa.array([0] * len(batch), pa.int32())))
            else:
                try:
                    arrays.append(pc.cast(batch[column.source], field.type))
                except pa.ArrowInvalid:
                    raise ApplyError(f'a value of column "{column.name}" cannot be stored as {field.type}') from None
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
