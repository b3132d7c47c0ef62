"""ScdTarget: the Delta or Iceberg table that apply_changes() maintains.

**Invariants.** A micro-batch is one commit, which records the `_seq` of its last change: position, and number in the
transaction. Changes up to that `_seq` are in the table, and a repeated micro-batch does not have others.

**Failure cases.**

- Killed before the commit: the table is unchanged, and the micro-batch is repeated. Its staged files are removed. No
  version of the table has the files that executors have written.
- Killed after the commit, before Spark has recorded the micro-batch: the repeated one has no change that is newer.
- Another process commits to the table at the same time: the second commit fails, and apply_batch() starts again from
  the table as it is then.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from subscriber.changelog.row_columns import sequence_number
from subscriber.changelog.storage import Location, remove_directory
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.tables.merge import Columns, Versions
from subscriber.spark.tables.table_format import DELTA, ICEBERG, StoredTable, format_module
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE

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
_VERSIONS = Versions(END, frozenset([END, END_TIME]))

_STAGED = "_staged"  # Delta ignores names that begin with an underscore


class ScdTarget:
    """A table, which need not exist yet. Methods block."""

    def __init__(
        self,
        into: Location | str,
        columns: pa.Schema,
        keys: Sequence[int],
        *,
        history: bool,
        catalog: str | None = None,
    ) -> None:
        """Describe the table.

        Args:
            into: the location of a Delta table, or the name of an Iceberg table in the catalog.
            columns: the columns of the source's table.
            keys: the indexes of the key in `columns`.
            history: SCD type 2.
            catalog: the name of Iceberg's catalog in the configuration of PyIceberg; None: it is a Delta table.
        """
        self.into = into
        self.columns = columns
        self.keys = keys
        self.history = history
        self.catalog = catalog

    def __str__(self) -> str:
        kind = "Delta" if self.catalog is None else "Iceberg"
        return f'{kind} table "{self.into}"'

    def schema(self) -> pa.Schema:
        """Return the columns of the target."""
        return pa.schema([*self.columns, *(HISTORY if self.history else ())])

    def all_columns(self) -> Columns:
        """Return the columns of the target, as a merge needs them."""
        return Columns(tuple(self.schema().names), _VERSIONS if self.history else None)

    def exists(self) -> bool:
        """Return True if the table exists."""
        if self.catalog is None:
            return bool(format_module(DELTA).table_exists(self.into))
        iceberg = format_module(ICEBERG)
        return bool(iceberg.table_exists(iceberg.configured_catalog(self.catalog), self._iceberg_name()))

    def open(self) -> StoredTable:
        """Open the table at its newest version, and create it if it does not exist.

        Raises:
            StatementError: the table has other columns, or the library of its format is not installed.
        """
        table = self._opened()
        self._check_kind(table.folder.schema)
        stored, wanted = _types(table.folder.schema), _types(self.schema())
        different = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
        if different:
            name = different[0]
            raise StatementError(
                f"{self} does not have the columns of the source",
                detail=f'Column "{name}" is {stored.get(name, "missing")} instead of {wanted.get(name, "missing")}.',
                hint="Take a new snapshot with subscriber.spark.write_snapshot(), and apply it to a new table.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        return table

    def _check_kind(self, found: pa.Schema) -> None:
        """Raise StatementError if the table is one of the other SCD type."""
        other = 1 if self.history else 2
        rows, versions = self.columns.names, [*self.columns.names, *HISTORY.names]
        if set(found.names) == set(rows if self.history else versions):
            raise StatementError(
                f"{self} is one of SCD type {other}",
                detail="It has the versions of the rows."
                if other == 2
                else "It does not have the versions of the rows.",
                hint=f"Write stored_as_scd_type={other}, or apply the stream to a new table.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )

    def _opened(self) -> StoredTable:
        table: StoredTable
        if self.catalog is None:
            table = format_module(DELTA).open_table(self.into, self.schema())
            return table
        iceberg = format_module(ICEBERG)
        name = self._iceberg_name()
        table = iceberg.open_table(iceberg.configured_catalog(self.catalog), name, self.schema())
        return table

    def _iceberg_name(self) -> tuple[str, ...]:
        name = tuple(str(self.into).split("."))
        if len(name) < 2 or not all(name):
            raise StatementError(
                f'"{self.into}" does not name a table of an Iceberg catalog',
                hint="Write it as namespace.table.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
        return name

    @staticmethod
    def applied(table: StoredTable) -> str | None:
        """Return the `_seq` of the last change in the table. None: it has none."""
        return sequence_number(table.position, table.number) if table.position else None

    @staticmethod
    def staging(table: StoredTable) -> Location:
        """Return the directory of staged files, which is empty."""
        folder = table.folder.directory / _STAGED
        remove_directory(folder)
        return folder


def split_sequence(sequence: str) -> tuple[Lsn, int]:
    """Return position and number of a `_seq`."""
    return Lsn(int(sequence[:16], 16)), int(sequence[16:], 16)


def _types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: _type(field.type) for field in schema}


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_type(kind.value_type)}"
    if pa.types.is_struct(kind):
        return f"struct of {', '.join(f'{field.name} {_type(field.type)}' for field in kind.fields)}"
    if kind == pa.int16():  # Iceberg has no smaller type than int32
        return str(pa.int32())
    return str(kind).replace("large_", "").replace("_view", "")
