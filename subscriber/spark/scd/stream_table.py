"""The table of a stream that apply_changes() applies: its changes, its key, and where they may begin.

**Invariants.**

- The key identifies a row in each change: the publisher sends it with each deleted row and each changed key, and no two
  rows have the same one. Other columns would leave deleted rows in the target, or replace rows of another key.
- A target that has no change yet begins with all rows of the source, unless the stream names a start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subscriber.display import json_text, near_word
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.spark.sources.cdc_batch import RESCUED
from subscriber.spark.sources.options import name_list
from subscriber.spark.sources.stream_origin import Begin, RowIdentity, StreamOrigin, identities_after
from subscriber.sqlstate import (
    INVALID_PARAMETER_VALUE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_COLUMN,
    UNDEFINED_TABLE,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_COLUMNS = {"op", "before", "after", "_seq", "_lsn", "_unchanged"}


@dataclass(frozen=True, slots=True)
class StreamTable:
    """A table of a stream of pgcdc.

    Attributes:
        label: schema.table. None: it is not known.
        changes: its changes, with its columns in `before` and `after`.
        begin: where the stream begins. None: it is not known.
        identities: how the changes identify rows, from the beginning of the stream on. Empty: it is not known.
    """

    label: str | None
    changes: DataFrame
    begin: Begin | None
    identities: tuple[RowIdentity, ...]

    @classmethod
    def of(cls, stream: DataFrame, table: str | None) -> StreamTable:
        """Return a table of a stream.

        Args:
            stream: the stream.
            table: schema.table. None: the only one.

        Raises:
            StatementError: the stream does not have the columns of pgcdc in mode `cdc`, it has values that do not fit
                its columns, or it does not have the table.
        """
        if not set(stream.columns) >= _COLUMNS:
            raise StatementError(
                "the stream does not have the columns of pgcdc",
                hint='Read it with format("pgcdc"), without the option mode.',
                sqlstate=UNDEFINED_COLUMN,
            )
        if RESCUED in stream.columns:
            raise StatementError(
                f"apply_changes() does not store the column {RESCUED} of the stream",
                detail="Values that do not fit their columns would be lost.",
                hint='Leave out the option rescue, and read columns with such values as text: .option("text", "…").',
                sqlstate=INVALID_PARAMETER_VALUE,
            )
        origin = StreamOrigin.of(stream)
        label = table
        if origin is not None:
            label = _label(list(origin.tables), table)
        identities = origin.tables[label] if origin is not None and label is not None else ()
        return cls(label, _changes(stream, table), None if origin is None else origin.begin, identities)

    @property
    def row(self) -> StructType:
        """The columns of the table."""
        row: StructType = self.changes.schema["after"].dataType  # type: ignore[assignment]
        return row

    def key(self, keys: Sequence[str] | str | None) -> list[str]:
        """Return the columns of the key.

        Args:
            keys: their names. None: those of the newest identity.

        Raises:
            StatementError: the table has no such column, or the key is not known.
        """
        if keys is None:
            keys = self.identities[-1].key if self.identities else ()
        names = list(dict.fromkeys(name_list(keys)))
        for name in names:
            if name not in self.row.names:
                raise StatementError(
                    f'the table has no column "{name}"',
                    hint=near_word(name, self.row.names) or f"Its columns are {', '.join(self.row.names)}.",
                    sqlstate=UNDEFINED_COLUMN,
                )
        if not names:
            raise StatementError("apply_changes() needs the key of the table", hint='For example: keys=["id"]')
        return names

    def check_key(self, key: Sequence[str], applied: Lsn | None) -> None:
        """Check that the changes identify rows by a key.

        Args:
            key: the columns of the key.
            applied: the position of the last change that the target has. None: it has none.

        Raises:
            StatementError: they identify rows by other columns.
        """
        for identity in identities_after(self.identities, applied or Lsn(0)):
            if identity.has_key(key) or not set(identity.key) <= set(self.row.names):
                continue
            newest = self.identities[-1]
            is_newest = (identity.is_full, identity.key) == (newest.is_full, newest.key)
            since = "" if is_newest else f", from {identity.position} on"
            raise StatementError(
                f"the keys are {', '.join(key)}, but the changes of {self.label} are identified by "
                f"{', '.join(identity.key)}{since}",
                hint=f"Write keys={json_text(list(identity.key))}."
                if is_newest
                else "Take a new snapshot with subscriber.spark.write_snapshot(), and apply it to a new table.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )

    def check_begin(self, target: object) -> None:
        """Check that a target without any change gets all rows. Raises StatementError if it may not get them."""
        if self.begin == "":
            raise StatementError(
                f"the stream has no snapshot, and {target} is empty",
                detail=f"Rows of {self.label} that were there before the change log began would be missing.",
                hint="Write a snapshot with subscriber.spark.write_snapshot(), and name its directory: "
                '.option("snapshot", "…"). If the table had no rows then: .option("start", "earliest")',
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )


def _label(labels: Sequence[str], table: str | None) -> str:
    if table is None and len(labels) > 1:
        raise StatementError(
            "the stream has several tables",
            hint=f"Name one of them: table={json_text(labels[0])}",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    if table is not None and table not in labels:
        raise StatementError(
            f'the stream has no table "{table}"',
            hint=near_word(table, labels) or f"Its tables are {', '.join(labels)}.",
            sqlstate=UNDEFINED_TABLE,
        )
    return labels[0] if table is None else table


def _changes(stream: DataFrame, table: str | None) -> DataFrame:
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    if table is None:
        return stream
    row = stream.schema["after"].dataType
    assert isinstance(row, StructType)
    if table not in row.names:
        return stream.where(f.col("_table") == table)
    sides = {side: f.col(side)[table] for side in ("before", "after")}
    return stream.where(f.col("_table") == table).withColumns(sides)
