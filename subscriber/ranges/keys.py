"""RangeKey: the columns by which a table is divided into ranges, and their order.

A key is a tuple of integers, one for each column. Their order is that of the publisher's index: integers by value, and
uuid by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from subscriber.protocol.tuple_data import BINARY, TEXT, TupleData
from subscriber.quoting import identifier, literal

Key = tuple[int, ...]


def _uuid(text: str) -> int:
    return UUID(text).int


def _uuid_text(value: int) -> str:
    return str(UUID(int=value))


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _unsigned(data: bytes) -> int:
    return int.from_bytes(data, "big")


class KeyRangeError(Exception):
    """A table cannot be divided into ranges. The message is the reason."""


@dataclass(frozen=True, slots=True)
class KeyType:
    """A type whose order is known: its name in SQL, and its values as integers."""

    name: str
    from_text: Callable[[str], int]
    from_binary: Callable[[bytes], int]
    to_text: Callable[[int], str]


# By the OID of the type, which is the same on all servers.
KEY_TYPES = {
    21: KeyType("pg_catalog.int2", int, _signed, str),
    23: KeyType("pg_catalog.int4", int, _signed, str),
    20: KeyType("pg_catalog.int8", int, _signed, str),
    2950: KeyType("pg_catalog.uuid", _uuid, _unsigned, _uuid_text),
}


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of a key, with the OID of its type."""

    name: str
    type_oid: int

    @property
    def type(self) -> KeyType:
        """The type. Raises KeyError if its order is not known."""
        return KEY_TYPES[self.type_oid]


@dataclass(frozen=True, slots=True)
class RangeKey:
    """The columns of a table's replica identity, in the order of its index."""

    columns: tuple[KeyColumn, ...]

    def of_row(self, published: Sequence[str], row: TupleData, before: TupleData | None = None) -> Key:
        """Return the key of a row. A value that was not sent is that of the row `before`.

        Args:
            published: the names of the row's columns.
            row: the row.
            before: an earlier version of the row. None: there is none.

        Raises:
            ValueError: a column is not published, or a value is NULL, not sent, or not of its type.
        """
        statuses, values = row.split()
        former = before.split() if before is not None else None
        key = []
        for column in self.columns:
            place = published.index(column.name)
            status, value = statuses[place], values[place]
            if status not in (TEXT, BINARY) and former is not None:
                status, value = former[0][place], former[1][place]
            if value is None:
                raise ValueError(f'key column "{column.name}" has no value')
            key.append(column.type.from_binary(value) if status == BINARY else column.type.from_text(value.decode()))
        return tuple(key)

    def from_texts(self, texts: Sequence[str | None]) -> Key:
        """Return the key of values as the publisher prints them.

        Raises:
            ValueError: a value is missing or not of its type.
        """
        return tuple(column.type.from_text(text or "") for column, text in zip(self.columns, texts, strict=True))

    def texts(self, key: Key) -> list[str]:
        """Return the values of a key as a server prints them."""
        return [column.type.to_text(value) for column, value in zip(self.columns, key, strict=True)]

    @property
    def names(self) -> str:
        """The columns, as a list in SQL."""
        return ", ".join(identifier(column.name) for column in self.columns)

    def comparison(self, operator: str, key: Key) -> str:
        """Return a condition in SQL that compares the columns with `key`."""
        values = ", ".join(
            f"{literal(text)}::{column.type.name}" for text, column in zip(self.texts(key), self.columns, strict=True)
        )
        return f"({self.names}) OPERATOR(pg_catalog.{operator}) ({values})"

    def condition(self, low: Key | None, high: Key | None) -> str:
        """Return a condition in SQL for low <= key < high. None: there is no limit."""
        limits = [(">=", low), ("<", high)]
        return " AND ".join(self.comparison(operator, key) for operator, key in limits if key is not None) or "true"
