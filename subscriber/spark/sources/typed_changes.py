"""typed_changes(): the changes of one table, with the columns and types that the table has at a position.

The schema history of the log tells which column of an earlier or later change is which, so a renamed column has its
values, and a column that was dropped has none under a new column of its name. Values of a column that had another type
are converted if the conversion is exact. Otherwise they fail the query, with the positions to choose.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import LoggedColumn, TableVersion
from subscriber.changelog.storage import Location
from subscriber.display import near_word, sql_identifier
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import RelationColumn
from subscriber.spark.sources.arrow_types import arrow_type
from subscriber.spark.sources.options import name_list
from subscriber.sqlstate import INVALID_TEXT_REPRESENTATION, UNDEFINED_TABLE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def typed_changes(
    changes: DataFrame,
    directory: Location | str,
    table: str,
    *,
    as_text: Collection[str] | str = frozenset(),
    position: str | None = None,
) -> DataFrame:
    """Convert one table's changes to the columns' own types.

    Args:
        changes: a DataFrame of `pgchanges`, of a batch or a stream.
        directory: the directory of the change log, or its URL in an object store.
        table: schema.name of the table.
        as_text: names of columns to keep as text.
        position: the position whose columns are used, as an LSN; None: the newest.

    Returns:
        A DataFrame with the columns commit_lsn, commit_time, xid, number, op, before, after and unchanged. `before` and
        `after` are structs with the table's columns; null if there is no such row. A value that its type cannot hold
        fails the query, and so does the value of a column that had another type, unless the conversion is exact.

    Raises:
        StatementError: the log has no change of the table up to the position, or the position is not an LSN.
    """
    from pyspark.sql import functions as f

    versions, texts = _versions(ChangeLog(directory), table, position), name_list(as_text)
    chosen = versions.chosen

    def struct(side: str) -> Column:
        fields = [
            versions.value(f.col(side), column, is_text=column.name in texts).alias(column.name)
            for column in chosen.columns
        ]
        return f.when(f.col(side).isNotNull(), f.struct(*fields)).alias(side)

    wanted = (f.col("schema") == chosen.schema) & (f.col("table") == chosen.name)
    plain = ("commit_lsn", "commit_time", "xid", "number", "op")
    return changes.where(wanted).select(*plain, struct("before"), struct("after"), "unchanged")


def _versions(log: ChangeLog, table: str, position: str | None) -> _Versions:
    try:
        until = Lsn.parse(position) if position is not None else None
    except ValueError as error:
        raise StatementError(str(error), sqlstate=INVALID_TEXT_REPRESENTATION) from None
    history = log.schema()
    named = [version for version in history.named(table) if until is None or version.position <= until]
    if not named:
        raise StatementError(
            f'the change log has no change of table "{table}"{"" if until is None else f" up to {until}"}',
            hint=near_word(table, (label for label in history.labels() if label != table)),
            sqlstate=UNDEFINED_TABLE,
        )
    return _Versions(named[-1], history.of(named[-1].relid))


@dataclass(frozen=True, slots=True)
class _Span:
    """A column in the changes from `start` on. `name` is None while the column does not exist."""

    start: Lsn
    name: str | None
    kind: pa.DataType


@dataclass(frozen=True, slots=True)
class _Versions:
    """The versions of a table, and the one whose columns are used."""

    chosen: TableVersion
    versions: list[TableVersion]

    def value(self, row: Column, column: LoggedColumn, *, is_text: bool) -> Column:
        """Return the column's value in a map of texts, for each of the spans in which it has a name and a type."""
        from pyspark.sql import functions as f

        kind = pa.string() if is_text else _kind(column)
        spans = self._spans(column)
        converted = self._converted(row, column, spans[-1], kind)
        for span, later in reversed(list(pairwise(spans))):
            earlier = self._converted(row, column, span, kind)
            converted = f.when(f.col("commit_lsn") < int(later.start), earlier).otherwise(converted)
        return converted

    def _spans(self, column: LoggedColumn) -> list[_Span]:
        spans: list[_Span] = []
        for version in self.versions:
            by_number = version.is_known and self.chosen.is_known
            same = (c for c in version.columns if (c.number == column.number if by_number else c.name == column.name))
            was = next(same, None)
            name, kind = (None, pa.string()) if was is None else (was.name, _kind(was))
            if not spans or (spans[-1].name, spans[-1].kind) != (name, kind):
                spans.append(_Span(version.position, name, kind))
        return spans

    def _converted(self, row: Column, column: LoggedColumn, span: _Span, kind: pa.DataType) -> Column:
        from pyspark.sql import functions as f

        wanted = from_arrow_type(kind)
        if span.name is None:
            return f.lit(None).cast(wanted)
        text = row[span.name]
        if _is_exact(span.kind, kind):
            return _typed(text, kind)
        message = (
            f"column {sql_identifier(column.name)} of table {self.chosen.label} has another type in changes from "
            f"{span.start} on than at {self.chosen.position}; read these changes with position = '{span.start}', or "
            "keep the column as text with as_text"
        )
        return f.when(text.isNotNull(), f.raise_error(f.lit(message)).cast(wanted))


def _kind(column: LoggedColumn) -> pa.DataType:
    return arrow_type(RelationColumn(column.is_key, column.name, column.type_oid, column.type_modifier))


def _is_exact(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return True if each value of a type has an equal one in another type, which its text is converted to."""
    if kind == wanted or pa.types.is_string(wanted):
        return True
    if pa.types.is_integer(kind) and pa.types.is_integer(wanted):
        return bool(kind.bit_width <= wanted.bit_width)
    if pa.types.is_decimal(kind) and pa.types.is_decimal(wanted):
        return bool(kind.scale <= wanted.scale and kind.precision - kind.scale <= wanted.precision - wanted.scale)
    return False


def _typed(text: Column, kind: pa.DataType) -> Column:
    from pyspark.sql import functions as f

    if pa.types.is_string(kind):
        return text
    if pa.types.is_binary(kind):
        return f.unhex(f.substr(text, f.lit(3)))
    return text.cast(from_arrow_type(kind))
