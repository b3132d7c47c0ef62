"""Published tables and their rows, whose values are decoded on access.

A column of a row has one of four kinds of value, which are never equal to each other:

    a value      the Python object for the column's type, see change_stream/types/registry.py
    None         NULL
    UNCHANGED    a large value that the change did not modify and the publisher did not send
    NOT_SENT     a column of the old row that the publisher did not send; only the key was sent

A stream has millions of rows. So a row holds the bytes of its message, and decodes a value when a program reads it.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from subscriber._speedups import compiled
from subscriber.apply.sentinels import NOT_SENT as NOT_SENT
from subscriber.apply.sentinels import UNCHANGED as UNCHANGED
from subscriber.apply.sentinels import Missing as Missing
from subscriber.change_stream.types.registry import Types
from subscriber.errors import ProtocolError, SubscriberError
from subscriber.protocol import messages
from subscriber.protocol.messages import ReplicaIdentity
from subscriber.protocol.tuple_data import BINARY, NULL, TEXT
from subscriber.protocol.tuple_data import UNCHANGED as _UNCHANGED_STATUS
from subscriber.sqlstate import DATA_EXCEPTION, INVALID_BINARY_REPRESENTATION

Values = dict[str, Any]

_length_at = struct.Struct(">I").unpack_from


Texts = dict[str, str | Missing | None]


class Column:
    """A published column.

    Attributes:
        name: the name of the column.
        type_name: the type's name as format_type() returns it, without a modifier.
        type_oid: the type's OID on the publisher.
        type_modifier: as in pg_attribute.atttypmod. -1: none.
        is_key: the column is part of the replica identity. Under REPLICA IDENTITY FULL all columns are.
    """

    __slots__ = ("binary", "is_key", "name", "text", "type_modifier", "type_name", "type_oid")

    def __init__(self, described: messages.RelationColumn, types: Types) -> None:
        known = types.get(described.type_oid)
        self.name = described.name
        self.is_key = described.is_key
        self.type_oid = described.type_oid
        self.type_modifier = described.type_modifier
        self.type_name = known.name
        self.text = known.text
        self.binary = known.binary

    def __repr__(self) -> str:
        return f"<Column {self.name} {self.type_name}{' key' * self.is_key}>"


class Relation:
    """A table on the publisher, as it was when the change was made.

    `str()` returns `schema.name`. When the publisher describes a table again, its later changes have a new Relation.

    Attributes:
        schema: the name of the schema.
        name: the name of the table.
        relid: the table's OID on the publisher.
        columns: the published columns, each a Column.
        key: the names of the columns of the replica identity.
        replica_identity: the kind of the replica identity.
    """

    __slots__ = ("by_name", "columns", "key", "name", "plan", "relid", "replica_identity", "schema")

    def __init__(self, described: messages.Relation, types: Types) -> None:
        self.relid = described.relid
        self.schema = described.schema
        self.name = described.name
        self.replica_identity: ReplicaIdentity = described.replica_identity
        self.columns = tuple([Column(column, types) for column in described.columns])
        self.key = tuple([column.name for column in self.columns if column.is_key])
        self.by_name = {column.name: number for number, column in enumerate(self.columns)}
        if len(self.by_name) < len(self.columns):
            raise ProtocolError(f"{self} is described with several columns of one name")
        # For RowData.dict() and its compiled twin: a row of NULLs, and the name and functions of each column.
        self.plan = (
            dict.fromkeys(self.by_name),
            tuple([(column.name, column.text, column.binary) for column in self.columns]),
        )

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def __repr__(self) -> str:
        return f"<Relation {self}>"


@compiled
class RowData(Mapping[str, Any]):
    """The bytes of a Row, and dict(), which decodes all values in one pass. The C extension has a twin."""

    __slots__ = ("_cut", "_data", "_end", "_key_only", "_older", "_start", "relation")

    def __init__(
        self,
        relation: Relation,
        data: bytes,
        start: int,
        end: int,
        *,
        key_only: bool = False,
        older: Row | None = None,
    ) -> None:
        """Create a row from its columns in `data[start:end]`.

        Args:
            relation: the table.
            data: the bytes of the message.
            start: the offset of the first column.
            end: the offset after the last column.
            key_only: the publisher sent only the columns of the key.
            older: the whole old row, which has the values that did not change. None: it was not sent.
        """
        self.relation = relation
        self._data = data
        self._start = start
        self._end = end
        self._key_only = key_only
        self._older = older
        self._cut: list[tuple[int, bytes | None]] | None = None

    def dict(self) -> Values:
        """Return all columns by name. This is faster than an access to each column.

        Raises:
            SubscriberError: Python cannot represent a value.
            ProtocolError: the row is damaged.
        """
        data, pos = self._data, self._start
        if self._key_only:
            return {name: self[name] for name in self}
        values: Values = {}
        name = ""
        try:
            for name, text, binary in self.relation.plan[1]:
                kind = data[pos]
                if kind == TEXT:
                    start = pos + 5
                    pos = start + _length_at(data, pos + 1)[0]
                    values[name] = text(data[start:pos])
                elif kind == NULL:
                    pos += 1
                    values[name] = None
                elif kind == BINARY:
                    start = pos + 5
                    pos = start + _length_at(data, pos + 1)[0]
                    values[name] = binary(data[start:pos])
                else:
                    pos += 1
                    values[name] = self[name]
        except (ValueError, ArithmeticError, LookupError, struct.error):
            self._columns()  # raises the precise error if the bytes are damaged
            raise _unreadable(self.relation, self.relation.columns[self.relation.by_name[name]]) from None
        if pos != self._end:
            raise _damaged(self.relation)
        return values

    @abstractmethod
    def _columns(self) -> list[tuple[int, bytes | None]]: ...


class Row(RowData, Mapping[str, Any]):
    """One row: a mapping from the names of all published columns to values, UNCHANGED or NOT_SENT.

    `row["a"]` decodes one value, and `row.dict()` decodes all values. `text()` and `raw()` return a value as the
    publisher sent it, for types without a Python equivalent.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy only the bytes of the row, not those of the whole message."""
        return _copied, (self.relation, self._data[self._start : self._end], self._key_only, self._older)

    def __getitem__(self, name: str) -> Any:
        number = self.relation.by_name[name]
        status, value = self._columns()[number]
        if value is None:
            return self._without_value(number, status)
        column = self.relation.columns[number]
        try:
            return column.text(value) if status == TEXT else column.binary(value)
        except (ValueError, ArithmeticError, LookupError, struct.error):
            # Without the cause: its message may contain the value.
            raise _unreadable(self.relation, column) from None

    def sent(self) -> Values:
        """Return the columns that were sent, by name: those with a value, and those that are NULL."""
        return {name: value for name, value in self.dict().items() if not isinstance(value, Missing)}

    def text(self, name: str) -> str | Missing | None:
        """Return a value in the text format of its type's output function.

        Raises:
            SubscriberError: the value was sent in binary format, and that is not its text.
        """
        value = self.raw(name)
        if not isinstance(value, bytes):
            return value
        number = self.relation.by_name[name]
        if self._is_older(number):
            assert self._older is not None
            return self._older.text(name)
        if self.is_binary(name):
            column = self.relation.columns[number]
            if column.binary is column.text:  # a string: both formats are the same
                return str(column.text(value))
            raise SubscriberError(
                f'column "{name}" of {self.relation} was sent in binary',
                hint="Ask for the stream without binary to read values as text.",
                sqlstate=INVALID_BINARY_REPRESENTATION,
            )
        return value.decode("utf-8", "surrogateescape")

    def texts(self) -> Texts:
        """Return all columns by name, each as text() returns it.

        Raises:
            SubscriberError: as text().
        """
        return {name: self.text(name) for name in self}

    def raw(self, name: str) -> bytes | Missing | None:
        """Return the bytes that were sent: text in UTF-8, or the type's binary format, see is_binary()."""
        number = self.relation.by_name[name]
        status, value = self._columns()[number]
        if value is not None:
            return value
        missing = self._without_value(number, status, raw=True)
        assert missing is None or isinstance(missing, bytes | Missing)
        return missing

    def is_binary(self, name: str) -> bool:
        """Return True if raw() returns the type's binary format."""
        number = self.relation.by_name[name]
        if self._is_older(number):
            assert self._older is not None
            return self._older.is_binary(name)
        return self._columns()[number][0] == BINARY

    def __iter__(self) -> Iterator[str]:
        return iter(self.relation.by_name)

    def __len__(self) -> int:
        return len(self.relation.columns)

    def __repr__(self) -> str:
        return f"<Row of {self.relation}>"  # without values, which must not appear in a log

    def _is_older(self, number: int) -> bool:
        """Return True if the value is taken from the old row."""
        return self._older is not None and self._columns()[number][0] == _UNCHANGED_STATUS

    def _without_value(self, number: int, status: int, *, raw: bool = False) -> Any:
        column = self.relation.columns[number]
        if status == _UNCHANGED_STATUS:
            if self._older is not None:
                return self._older.raw(column.name) if raw else self._older[column.name]
            return UNCHANGED
        return NOT_SENT if self._key_only and not column.is_key else None

    def _columns(self) -> list[tuple[int, bytes | None]]:
        """Return the status byte and the value of each column.

        Raises:
            ProtocolError: the row is damaged.
        """
        if self._cut is not None:
            return self._cut
        data, pos = self._data, self._start
        cut: list[tuple[int, bytes | None]] = []
        try:
            for _ in self.relation.columns:
                kind = data[pos]
                if kind == TEXT or kind == BINARY:  # noqa: SIM109 - "in" takes twice as long
                    start = pos + 5
                    pos = start + _length_at(data, pos + 1)[0]
                    cut.append((kind, data[start:pos]))
                else:
                    if kind != NULL and kind != _UNCHANGED_STATUS:
                        raise ProtocolError(f"unrecognized data representation type {chr(kind)!r}")
                    pos += 1
                    cut.append((kind, None))
        except (IndexError, struct.error):
            raise _damaged(self.relation) from None
        if pos != self._end:
            raise _damaged(self.relation)
        self._cut = cut
        return cut


def _copied(relation: Relation, data: bytes, key_only: bool, older: Row | None) -> Row:
    return Row(relation, data, 0, len(data), key_only=key_only, older=older)


def _damaged(relation: Relation) -> ProtocolError:
    return ProtocolError(
        f"a row of {relation} does not fit its description",
        detail=f"It should have {len(relation.columns)} columns and end with them.",
    )


def _unreadable(relation: Relation, column: Column) -> SubscriberError:
    return SubscriberError(
        f'a value of column "{column.name}" of {relation} cannot be a Python object',
        detail=f"Its type is {column.type_name}.",
        hint="Read it with row.text() or row.raw().",
        sqlstate=DATA_EXCEPTION,
    )
