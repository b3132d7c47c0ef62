"""KeySelection: rows of a table by their keys, which a server finds with its index.

A comparison of touched ranges has one selection for each query. Both servers select the same keys.

Ranges need a key whose values are numbers, in the order of its index: an integer, or the first eight bytes of a uuid.
Both servers agree on the number of a key, because neither type has a collation. A text has one, and an index in another
collation than C does not find the range of a number.

A range has 2**width numbers. Its own number is that of a key without the last `width` bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from subscriber.apply.touched_ranges import SINGLE_KEYS, WHOLE_TABLE, Range, TouchedTable
from subscriber.comparison.columns import ComparedColumn
from subscriber.protocol.encodings import decode
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition
from subscriber.quoting import identifier, literal

KEYS_IN_A_QUERY = 500  # ranges or keys
ROWS_IN_A_QUERY = 50_000  # at most, unless one range is larger
INTEGERS = frozenset(("smallint", "integer", "bigint"))
MOST_VALUES = 64  # values of an integer key for each row, in a table that is divided into ranges
_LARGEST = 2**63 - 1
_LARGEST_WIDTH = 63
# No relation of a user is likely to have this name, which would hide it.
WANTED = '"subscriber: wanted keys"'


class NumberedKey(Enum):
    """The type of a key that is divided into ranges."""

    INTEGER = "pg_catalog.int8"
    UUID = "pg_catalog.uuid"

    @classmethod
    def of(cls, type_name: str) -> NumberedKey | None:
        """Return the kind for a type, as format_type() prints it; the base type of a domain."""
        if type_name in INTEGERS:
            return cls.INTEGER
        return cls.UUID if type_name == "uuid" else None

    def number(self, name: str) -> str:
        """Return SQL for the number of a key. `name`: its column, quoted."""
        if self is NumberedKey.INTEGER:
            return f"{name}::pg_catalog.int8"
        bits = f"('x' || pg_catalog.encode(pg_catalog.substr(pg_catalog.uuid_send({name}), 1, 8), 'hex'))"
        # Bytes have no sign.
        return f"({bits}::pg_catalog.bit(64)::pg_catalog.int8 # '{-_LARGEST - 1}'::pg_catalog.int8)"

    def bounds(self, first: int, last: int) -> list[str]:
        """Return the texts of the first and the last key of some numbers."""
        first, last = max(first, -_LARGEST - 1), min(last, _LARGEST)
        if self is NumberedKey.INTEGER:
            return [str(first), str(last)]
        return [f"{number + _LARGEST + 1:016x}{rest * 16}" for number, rest in ((first, "0"), (last, "f"))]

    def width(self, first: int, last: int, rows: int, rows_in_range: int) -> int | None:
        """Return the width of ranges that divide a table.

        Args:
            first: the lowest number.
            last: the highest number.
            rows: the number of rows, an estimate.
            rows_in_range: the number of rows in a range, if they are evenly distributed.

        Returns:
            None if the number of rows in a range has no useful limit, because integers are too sparse or the first
            bytes of uuids are too few. A range of uuids may have many rows nevertheless, see Differences.sums().
        """
        values = last - first + 1
        if self is NumberedKey.INTEGER and values > MOST_VALUES * max(1, rows):
            return None
        if self is NumberedKey.UUID and values < rows:
            return None
        return min(_LARGEST_WIDTH, (values * rows_in_range // max(1, rows)).bit_length())


@dataclass(frozen=True, slots=True)
class KeySelection:
    """Keys of a table.

    Attributes:
        keys: for a range its first and its last value, otherwise the text of each key column.
        range_key: the kind of the key, if `keys` are ranges, which do not overlap. None: they are single keys.
        rows: the number of rows at most.
    """

    keys: Sequence[Sequence[str]]
    range_key: NumberedKey | None
    rows: int

    def select(
        self,
        part: TablePartition,
        columns: str,
        filters: tuple[str, ...],
        key: Sequence[ComparedColumn],
        owned: str | None = None,
    ) -> str:
        """Return the query for the rows of a part that have one of the keys.

        Args:
            part: the part.
            columns: the columns, in SQL.
            filters: see TablePartition.select().
            key: the columns of the key.
            owned: another condition in SQL. None: there is none.
        """
        if self.range_key is not None:
            types = [self.range_key.value] * 2
            name = identifier(key[0].name)
            condition = f"{name} OPERATOR(pg_catalog.>=) {WANTED}.k0 AND {name} OPERATOR(pg_catalog.<=) {WANTED}.k1"
        else:
            types = [column.equal_type or "" for column in key]
            condition = " AND ".join(
                f"{identifier(column.name)} OPERATOR(pg_catalog.=) {WANTED}.k{n}" for n, column in enumerate(key)
            )
        values = ", ".join(f"({', '.join(map(literal, wanted))})" for wanted in self.keys)
        names = ", ".join(f"v{n}" for n in range(len(types)))
        # Texts that are equal as values of the type are one key.
        typed = ", ".join(f"v{n}::{type_name} AS k{n}" for n, type_name in enumerate(types))
        wanted = f"SELECT DISTINCT {typed} FROM (VALUES {values}) v ({names})"
        if owned is not None:
            condition = f"{condition} AND ({owned})"
        rows = part.select(columns, filters, condition)
        return f"SELECT r.* FROM ({wanted}) {WANTED} CROSS JOIN LATERAL ({rows}) r"


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
            return list(range_selections(_ranges(touched), NumberedKey.INTEGER))
        if len(widths) > 1 or any(column.equal_type is None for side in sides for column in side):
            return None
        values = {value for table in touched for value in table.ranges}
        keys = [[decode(bytes.fromhex(text), codec) for text in _texts(value, names)] for value in values]
    return [
        KeySelection(keys[start : start + KEYS_IN_A_QUERY], None, len(keys[start : start + KEYS_IN_A_QUERY]))
        for start in range(0, len(keys), KEYS_IN_A_QUERY)
    ]


def _texts(value: Range, names: Collection[str]) -> tuple[str, ...]:
    if isinstance(value, int) or len(value) != len(names):
        raise ValueError
    return value


class NumberRange(NamedTuple):
    """Numbers of keys, and the number of rows that have them at most."""

    first: int
    last: int
    rows: int


def range_selections(ranges: Iterable[NumberRange], key: NumberedKey) -> Iterator[KeySelection]:
    """Yield the selections for ranges of numbers. Neighbors are merged."""
    keys: list[list[str]] = []
    rows = 0
    for merged in _merged(ranges):
        if keys and (len(keys) == KEYS_IN_A_QUERY or rows + merged.rows > ROWS_IN_A_QUERY):
            yield KeySelection(keys, key, rows)
            keys, rows = [], 0
        keys.append(key.bounds(merged.first, merged.last))
        rows += merged.rows
    if keys:
        yield KeySelection(keys, key, rows)


def numbered_range(number: int, width: int, rows: int) -> NumberRange:
    """Return a range. `rows`: the number of its rows at most."""
    return NumberRange(number << width, ((number + 1) << width) - 1, rows)


def _ranges(touched: Sequence[TouchedTable]) -> Iterator[NumberRange]:
    for table in touched:
        for value in table.ranges:
            if not isinstance(value, int):
                raise TypeError
            yield numbered_range(value, table.width, 1 << table.width)


def _merged(ranges: Iterable[NumberRange]) -> list[NumberRange]:
    """Return ranges that neither overlap nor touch, in order."""
    merged: list[NumberRange] = []
    for added in sorted(ranges):
        if merged and added.first <= merged[-1].last + 1:
            before = merged[-1]
            merged[-1] = NumberRange(before.first, max(before.last, added.last), before.rows + added.rows)
        else:
            merged.append(added)
    return merged
