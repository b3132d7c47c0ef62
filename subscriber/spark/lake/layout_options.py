"""The layout of a lake's tables as users name it: partitions in the syntax of Iceberg, and cluster columns.

    public.orders.region          by the values of a column
    day(public.orders.created)    by the days of its values, for partitions; also year, month, hour
    none(public.orders)           the table has no partitions, or no cluster columns

Several columns of a table are partitions within partitions, and one order of rows, as they are given. So a Layout of
options has columns of any tables, as schema.table.column.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from subscriber.errors import StatementError
from subscriber.spark.tables.cluster import Cluster
from subscriber.spark.tables.layout import Layout
from subscriber.spark.tables.partitions import IDENTITY, TIMES, PartitionColumn, Partitions

_NONE = "none"
_OPTION = re.compile(r"([a-z]+)\((.+)\)", re.DOTALL)


def parse_partition(text: str) -> PartitionColumn:
    """Return the partitions that an option names. The column is schema.table.column, or schema.table for none().

    Raises:
        StatementError: there are no such partitions.
    """
    column = _parsed(text)
    if column.transform not in (IDENTITY, *TIMES, _NONE):
        raise StatementError(
            f"there are no partitions by {column.transform}()",
            hint=f"There are: {', '.join(f'{transform}()' for transform in TIMES)}.",
        )
    return column


def parse_cluster(text: str) -> str:
    """Return an option that names a cluster column, or none() with a table.

    Raises:
        StatementError: it names neither.
    """
    column = _parsed(text)
    if column.transform not in (IDENTITY, _NONE):
        raise StatementError(
            f"rows cannot be clustered by {column.transform}()", hint=f"Name the column: {column.column}."
        )
    return text


def option_column(text: str) -> str:
    """Return schema.table.column of an option, or schema.table of none()."""
    return _parsed(text).column


def _parsed(text: str) -> PartitionColumn:
    match = _OPTION.fullmatch(text)
    column = PartitionColumn(text) if match is None else PartitionColumn(match[2], match[1])
    if column.column.count(".") < (1 if column.transform == _NONE else 2):
        raise StatementError(f'"{column.column}" is not schema.table.column', hint="Example: public.orders.region")
    return column


class TableOptions(NamedTuple):
    """The given layout of one table, by the names of its columns. None: nothing is given."""

    partitions: Partitions | None
    cluster: Cluster | None

    def instead_of(self, layout: Layout) -> Layout:
        """Return the given layout, and what another one has of which nothing is given."""
        return Layout(
            layout.partitions if self.partitions is None else self.partitions,
            layout.cluster if self.cluster is None else self.cluster,
        )


def options_of_table(label: str, given: Layout) -> TableOptions:
    """Return the options for one table."""
    mine = [partition for partition in given.partitions if f"{partition.column}.".startswith(f"{label}.")]
    partitions = (
        partition._replace(column=partition.column[len(label) + 1 :])
        for partition in mine
        if partition.transform != _NONE
    )
    names = [entry for entry in given.cluster if entry == f"{_NONE}({label})" or entry.startswith(f"{label}.")]
    cluster = (entry.removeprefix(f"{label}.") for entry in names if entry != f"{_NONE}({label})")
    return TableOptions(tuple(partitions) if mine else None, tuple(cluster) if names else None)
