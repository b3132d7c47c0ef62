"""The partitions of a lake's tables as users name them, in the syntax of Iceberg.

    public.orders.region          by the values of a column
    day(public.orders.created)    by the days of its values; also year, month, hour
    none(public.orders)           the table has no partitions

Several columns of a table are partitions within partitions, in the given order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from subscriber.errors import StatementError
from subscriber.spark.tables.partitions import IDENTITY, TIMES, PartitionColumn, Partitions

_NONE = "none"
_OPTION = re.compile(r"([a-z]+)\((.+)\)", re.DOTALL)


def parse_partition(text: str) -> PartitionColumn:
    """Return the partitions that an option names. The column is schema.table.column, or schema.table for none().

    Raises:
        StatementError: there are no such partitions.
    """
    match = _OPTION.fullmatch(text)
    found = PartitionColumn(text) if match is None else PartitionColumn(match[2], match[1])
    if found.transform not in (IDENTITY, *TIMES, _NONE):
        raise StatementError(
            f"there are no partitions by {found.transform}()",
            hint=f"There are: {', '.join(f'{one}()' for one in TIMES)}.",
        )
    if found.column.count(".") < (1 if found.transform == _NONE else 2):
        raise StatementError(f'"{found.column}" is not schema.table.column', hint="Example: public.orders.region")
    return found


def partitions_of_table(label: str, given: Iterable[PartitionColumn]) -> Partitions | None:
    """Return the given partitions of one table by the names of its columns; None: none are given for it."""
    mine = [one for one in given if f"{one.column}.".startswith(f"{label}.")]
    if not mine:
        return None
    return tuple(one._replace(column=one.column[len(label) + 1 :]) for one in mine if one.transform != _NONE)
