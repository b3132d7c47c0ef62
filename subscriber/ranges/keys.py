"""RangeKey: the columns by which a table is divided into ranges, and their order.

A key is a tuple of values, one for each column. Python computes the order of most types as the publisher does
(key_types.py). The publisher alone knows that of texts with other collations, and of enums. Such columns have the type
and the collation for a comparison by the publisher, and their values are texts, which are only compared for equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subscriber.protocol.tuple_data import BINARY, TEXT, TupleData
from subscriber.quoting import identifier, literal
from subscriber.ranges.key_types import ENUM, KEY_TYPES, KeyType

Key = tuple[Any, ...]

PRINTED = 0  # in place of a type's OID: values are texts as the publisher prints them, and are not compared


class KeyRangeError(Exception):
    """A table cannot be divided into ranges. The message is the reason."""


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of a key.

    Attributes:
        name: its name.
        type_oid: the OID of its type on the publisher, or PRINTED.
        compared_as: type and collation, in SQL, with which the publisher compares values. None: Python does.
    """

    name: str
    type_oid: int
    compared_as: str | None = None

    @property
    def type(self) -> KeyType:
        """The type. Raises KeyError if neither Python nor the publisher has its order."""
        return ENUM if self.compared_as is not None and self.type_oid not in KEY_TYPES else KEY_TYPES[self.type_oid]

    def cast(self, text: str, *, on_target: bool = False) -> str:
        """Return a value as a constant in SQL. An enum of the target may have another name."""
        if self.type is ENUM:
            return literal(text) if on_target else f"{literal(text)}::{self.compared_as}"
        return f"{literal(text)}::{self.type.name}"


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
        if None in texts:
            raise ValueError("a key column has no value")
        return tuple(column.type.from_text(text or "") for column, text in zip(self.columns, texts, strict=True))

    def texts(self, key: Key) -> list[str]:
        """Return the values of a key as a server prints them."""
        return [column.type.to_text(value) for column, value in zip(self.columns, key, strict=True)]

    @property
    def is_compared_by_publisher(self) -> bool:
        """True if only the publisher knows the order of keys."""
        return any(column.compared_as is not None for column in self.columns)

    @property
    def names(self) -> str:
        """The columns, as a list in SQL."""
        return ", ".join(identifier(column.name) for column in self.columns)

    def comparison(self, operator: str, key: Key, *, on_target: bool = False) -> str:
        """Return a condition in SQL that compares the columns with `key`.

        Args:
            operator: =, < or >=.
            key: the key.
            on_target: compare in the publisher's order on the target, whose columns may have other collations. If only
                the publisher knows the order, the operator must be =.
        """
        values = ", ".join(
            column.cast(text, on_target=on_target) for text, column in zip(self.texts(key), self.columns, strict=True)
        )
        conditions = [f"({self.names}) OPERATOR(pg_catalog.{operator}) ({values})"]
        if on_target and any(column.type.is_text for column in self.columns):
            names = ", ".join(
                identifier(column.name) + ' COLLATE pg_catalog."C"' * column.type.is_text for column in self.columns
            )
            # An index of the target has its rows by the columns' own collations.
            kept = conditions if operator == "=" else []
            conditions = [*kept, f"({names}) OPERATOR(pg_catalog.{operator}) ({values})"]
        return " AND ".join(conditions)

    def condition(self, low: Key | None, high: Key | None, *, on_target: bool = False) -> str:
        """Return a condition in SQL for low <= key < high. None: there is no limit."""
        limits = [(">=", low), ("<", high)]
        conditions = [
            self.comparison(operator, key, on_target=on_target) for operator, key in limits if key is not None
        ]
        return " AND ".join(conditions) or "true"

    def place_query(self, key: Key, lows: Sequence[Key]) -> str:
        """Return a query for the publisher: how many of the keys `lows` are not greater than `key`."""
        rows = ", ".join(f"({self._constants(low)})" for low in lows)
        names = ", ".join(f"c{number}" for number in range(len(self.columns)))
        return (
            f"SELECT pg_catalog.count(*) FROM (VALUES {rows}) AS low ({names})"
            f" WHERE ({names}) OPERATOR(pg_catalog.<=) ({self._constants(key)})"
        )

    def _constants(self, key: Key) -> str:
        """Return the values of a key with the types and collations by which the publisher compares them."""
        return ", ".join(
            f"{literal(text)}::{column.compared_as or column.type.name}"
            for text, column in zip(self.texts(key), self.columns, strict=True)
        )
