"""The tables and columns that options of `subscriber lake` name, checked before anything is written.

Names are compared with the tables of the lake, their columns in the change log, and the published tables. The publisher
is asked only if it has to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import anyio
import pyarrow as pa

from subscriber.changelog.reader import ChangeLog
from subscriber.display import near_word, shell_word
from subscriber.errors import PublisherError, StatementError
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.lake_table import LakeTable
from subscriber.spark.lake.layout_options import option_column
from subscriber.spark.lake.table_store import reload_command
from subscriber.spark.publisher_snapshot import check_publisher, publisher_session
from subscriber.spark.tables.layout import Layout
from subscriber.sqlstate import (
    INVALID_PARAMETER_VALUE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_COLUMN,
    UNDEFINED_TABLE,
)

_NEAR = 0.8  # names of tables have their schemas, and are more alike than other words
_EXAMPLE = "Example: public.orders.region"

Columns = frozenset[str] | None  # of a table; None: they are not known


class OptionNames(NamedTuple):
    """The names that the options have.

    Attributes:
        tables: of --table, as schema.table. None: not given.
        reload: of `subscriber lake reload`, as schema.table.
        text: of --text, as schema.table.column.
        layout: of --partition and --cluster.
    """

    tables: frozenset[str] | None
    reload: frozenset[str]
    text: frozenset[str]
    layout: Layout

    def of_columns(self) -> Iterator[tuple[str, str]]:
        """Yield each option that names a column, and its schema.table.column, or schema.table for none()."""
        for column in sorted(self.text):
            yield "text", column
        for partition in self.layout.partitions:
            yield "partition", partition.column
        for name in self.layout.cluster:
            yield "cluster", option_column(name)


def check_names(lake: Lake, log: ChangeLog, source: str | None, names: OptionNames) -> list[tuple[str, str]]:
    """Check the names, before the first write.

    Args:
        lake: the lake, which need not exist.
        log: the change log.
        source: the connection string of the publisher. None: a run without it.
        names: the names.

    Returns:
        The options for tables that are not known, but may be published later: the option, and the name.

    Raises:
        StatementError: there is no such table or column, or the lake has other tables than those of --table.
        SubscriberError: the publisher has to be read, and cannot be.
    """
    wanted = [*names.reload, *(names.tables or ()), *(name for _, name in names.of_columns())]
    if not wanted:  # the lake and the log need not be read
        return []
    known, exists = _lake_columns(lake, log), lake.exists
    if exists:
        _check_same_tables(lake, log, names.tables)
    if source is not None and not all(_is_known(name, known) for name in wanted):
        for label, columns in anyio.run(_published_columns, log, source, wanted).items():
            known[label] = None if columns is None else columns | (known.get(label) or frozenset())
    for label in sorted(names.reload | (names.tables or frozenset())):
        if label not in known:
            raise _no_table(label, known)
    if not exists and names.tables is not None:
        known = {label: columns for label, columns in known.items() if label in names.tables}
    later = list[tuple[str, str]]()
    for option, name in names.of_columns():
        if (label_of_name := _label(name, known)) is not None:
            _check_column(label_of_name, name, known[label_of_name])
            if option == "text" and exists and label_of_name not in names.reload:
                reload = reload_command(lake.directory, log, label_of_name, f" --text {shell_word(name)}")
                _check_text(lake.store.present().get(label_of_name), name, reload)
            continue
        if option == "text" and name.count(".") < 2:
            raise StatementError(
                f'"{name}" is not schema.table.column', hint=_EXAMPLE, sqlstate=INVALID_PARAMETER_VALUE
            )
        table = name if name.count(".") == 1 else name.rpartition(".")[0]
        if not exists or source is None or near_word(table, known, cutoff=_NEAR) is not None:
            raise _no_table(table, known)
        later.append((option, name))
    return later


def _lake_columns(lake: Lake, log: ChangeLog) -> dict[str, Columns]:
    """Return the tables of a lake that exists, with the columns that they have in the lake and in the log."""
    columns_by_label: dict[str, Columns] = {}
    history = log.schema()
    for label, state in lake.store.present().items() if lake.exists else ():
        versions = [state.version, *history.named(label)[-1:]]
        columns = {column.name for version in versions if version is not None for column in version.columns}
        columns_by_label[label] = frozenset(columns) or None
    return columns_by_label


async def _published_columns(log: ChangeLog, source: str, names: Iterable[str]) -> dict[str, Columns]:
    """Return the published tables. Columns are read for tables that an option for columns names."""
    publications = log.identity.publications
    async with publisher_session(source, "lake") as publisher:
        await check_publisher(publisher, log)
        columns_by_label: dict[str, Columns] = {}
        for schema, name in await publisher.tables(publications):
            label = f"{schema}.{name}"
            columns_by_label[label] = None
            if any(column_name.startswith(f"{label}.") for column_name in names):
                try:
                    table = await publisher.table(schema, name, publications)
                except PublisherError:  # the load sets the table aside, with the reason
                    continue
                columns_by_label[label] = frozenset(column.name for column in table.columns)
        return columns_by_label


def _label(name: str, known: Mapping[str, Columns]) -> str | None:
    """Return the table that a name belongs to: schema.table, or schema.table.column."""
    labels = [label for label in known if f"{name}.".startswith(f"{label}.")]
    return max(labels, key=len, default=None)


def _is_known(name: str, known: Mapping[str, Columns]) -> bool:
    label = _label(name, known)
    return label is not None and _has_column(known[label], name[len(label) + 1 :])


def _has_column(columns: Columns, column: str) -> bool:
    return not column or columns is None or column in columns


def _check_column(label: str, name: str, columns: Columns) -> None:
    column = name[len(label) + 1 :]
    if columns is not None and not _has_column(columns, column):
        raise StatementError(
            f'table "{label}" has no column "{column}"',
            hint=near_word(column, columns) or f"Its columns are {', '.join(sorted(columns))}.",
            sqlstate=UNDEFINED_COLUMN,
        )


def _check_text(state: LakeTable | None, name: str, reload: str) -> None:
    """Raise StatementError if a column of a loaded table is to be text, and is not. Only a load could make it so."""
    if state is None or state.version is None or not state.is_current:
        return
    for column in state.version.columns:
        if f"{state.label}.{column.name}" == name and not pa.types.is_string(state.kind(column)):
            raise StatementError(
                f'column "{name}" is not text in the lake',
                hint=f"Leave out --text for it, or load the table again: {reload}",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )


def _no_table(label: str, known: Mapping[str, Columns]) -> StatementError:
    there = f"There are {', '.join(sorted(known))}." if known else None
    return StatementError(
        f'there is no table "{label}" in the lake, or among the published ones',
        hint=near_word(label, known, cutoff=_NEAR) or there,
        sqlstate=UNDEFINED_TABLE,
    )


def _check_same_tables(lake: Lake, log: ChangeLog, tables: frozenset[str] | None) -> None:
    """Raise StatementError if --table has other tables than the lake. Nothing but a load could make that true."""
    wanted = lake.wanted
    if tables is None or tables == wanted:
        return
    has = "all published tables" if wanted is None else ", ".join(sorted(wanted))
    added = sorted(tables - (lake.store.present().keys() if wanted is None else wanted))
    hint = "Leave out --table, which counts when a lake is loaded for the first time."
    if added:
        near = near_word(added[0], lake.tables(), cutoff=_NEAR)
        hint = near or f"{hint} To add a table: {reload_command(lake.directory, log, added[0])}"
    raise StatementError(
        "the lake has other tables than those of --table",
        detail=f"It has {has}.",
        hint=hint,
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )
