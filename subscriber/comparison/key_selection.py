"""KeySelection: rows of a table by their keys, which a server finds with its index.

A comparison of touched ranges has one selection for each query. Both servers select the same keys.

A range of an integer key has 2**width values. Its number is the key without the last `width` bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from subscriber.apply.touched_ranges import SINGLE_KEYS, WHOLE_TABLE, Range, TouchedTable
from subscriber.comparison.columns import ComparedColumn
from subscriber.protocol.encodings import decode
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition
from subscriber.quoting import identifier, literal

KEYS_IN_A_QUERY = 500  # ranges or keys
ROWS_IN_A_QUERY = 50_000  # at most, unless one range is larger
INTEGERS = frozenset(("smallint", "integer", "bigint"))
MOST_VALUES = 64  # values of the key for each row, in a table that is divided into ranges
_LARGEST = 2**63 - 1
# No relation of a user is likely to have this name, which would hide it.
_WANTED = '"subscriber: wanted keys"'


@dataclass(frozen=True, slots=True)
class KeySelection:
    """Keys of a table.

    Attributes:
        keys: for a range its first and its last value, otherwise the text of each key column.
        is_range: the key is one integer column, and `keys` are ranges that do not overlap.
        rows: the number of rows at most.
    """

    keys: Sequence[Sequence[str]]
    is_range: bool
    rows: int

    def select(
        self, part: TablePartition, columns: str, filters: tuple[str, ...], key: Sequence[ComparedColumn]
    ) -> str:
        """Return the query for the rows of a part that have one of the keys. `key`: the columns of the key."""
        if self.is_range:
            types = ["pg_catalog.int8"] * 2
            name = identifier(key[0].name)
            condition = f"{name} OPERATOR(pg_catalog.>=) {_WANTED}.k0 AND {name} OPERATOR(pg_catalog.<=) {_WANTED}.k1"
        else:
            types = [column.equal_type or "" for column in key]
            condition = " AND ".join(
                f"{identifier(column.name)} OPERATOR(pg_catalog.=) {_WANTED}.k{n}" for n, column in enumerate(key)
            )
        values = ", ".join(f"({', '.join(map(literal, wanted))})" for wanted in self.keys)
        names = ", ".join(f"v{n}" for n in range(len(types)))
        # Texts that are equal as values of the type are one key.
        typed = ", ".join(f"v{n}::{type_name} AS k{n}" for n, type_name in enumerate(types))
        wanted = f"SELECT DISTINCT {typed} FROM (VALUES {values}) v ({names})"
        rows = part.select(columns, filters, condition)
        return f"SELECT r.* FROM ({wanted}) {_WANTED} CROSS JOIN LATERAL ({rows}) r"


def selections(
    touched: Sequence[TouchedTable], names: Sequence[str], sides: Sequence[Sequence[ComparedColumn]], codec: str
) -> list[KeySelection] | None:
    """Return selections of all touched ranges of a table.

    Args:
        touched: the ranges.
        names: the columns of the table's key on the target.
        sides: the same columns on the publisher and on the target.
        codec: of the target's encoding.

    Returns:
        None if the whole table has to be read.

    Raises:
        ProtocolError: a range is damaged.
    """
    widths = {table.width for table in touched}
    if not names or WHOLE_TABLE in widths or any(table.key != tuple(names) for table in touched):
        return None
    with parsing("touched ranges"):
        if SINGLE_KEYS not in widths:
            if not all(side[0].type in INTEGERS for side in sides):
                return None
            return list(range_selections(_ranges(touched)))
        if len(widths) > 1 or any(column.equal_type is None for side in sides for column in side):
            return None
        found = {value for table in touched for value in table.ranges}
        keys = [[decode(bytes.fromhex(text), codec) for text in _texts(value, names)] for value in found]
    return [
        KeySelection(keys[start : start + KEYS_IN_A_QUERY], False, len(keys[start : start + KEYS_IN_A_QUERY]))
        for start in range(0, len(keys), KEYS_IN_A_QUERY)
    ]


def _texts(value: Range, names: Collection[str]) -> tuple[str, ...]:
    if isinstance(value, int) or len(value) != len(names):
        raise ValueError
    return value


def range_width(first: int, last: int, rows: int, rows_in_range: int) -> int | None:
    """Return the width of ranges that divide a table.

    Args:
        first: the lowest key.
        last: the highest key.
        rows: the number of rows, an estimate.
        rows_in_range: the number of rows in a range, if they are evenly distributed.

    Returns:
        None if the keys are so sparse that the number of rows in a range has no useful limit.
    """
    values = last - first + 1
    if values > MOST_VALUES * max(1, rows):
        return None
    return (values * rows_in_range // max(1, rows)).bit_length()


def range_selections(ranges: Iterable[tuple[int, int]]) -> Iterator[KeySelection]:
    """Yield the selections for ranges of integers, each with its first and last value. Neighbors are merged."""
    keys: list[list[str]] = []
    rows = 0
    for first, last in _merged(ranges):
        size = last - first + 1
        if keys and (len(keys) == KEYS_IN_A_QUERY or rows + size > ROWS_IN_A_QUERY):
            yield KeySelection(keys, True, rows)
            keys, rows = [], 0
        keys.append([str(max(first, -_LARGEST - 1)), str(min(last, _LARGEST))])
        rows += size
    if keys:
        yield KeySelection(keys, True, rows)


def numbered_range(number: int, width: int) -> tuple[int, int]:
    """Return the first and the last value of a range."""
    return number << width, ((number + 1) << width) - 1


def _ranges(touched: Sequence[TouchedTable]) -> Iterator[tuple[int, int]]:
    for table in touched:
        for value in table.ranges:
            if not isinstance(value, int):
                raise TypeError
            yield numbered_range(value, table.width)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and last values of ranges that neither overlap nor touch, in order."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged
