"""A table as the publisher describes it, and its rows, whose values are read when they are asked for.

A column of a row is one of four things, and no two of them are equal:

    a value      of Python's type for the column's type, see change_stream/types/registry.py
    None         NULL
    UNCHANGED    a large value that the change did not touch and the publisher did not send
    NOT_SENT     not part of what the publisher sends of the row before: only its key was sent

Rows come by the million: a row is the bytes it came in until somebody asks.
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

    `name`; `type_name`, as format_type() writes it, without a modifier; `is_key`: it is part of the replica identity,
    as every column is under FULL. `type_oid` is on the publisher, `type_modifier` -1 for none.
    """

    __slots__ = ("binary", "is_key", "name", "text", "type_modifier", "type_name", "type_oid")

    def __init__(self, described: messages.RelationColumn, types: Types) -> None:
        known = types.get(described.type_oid)
        self.name = described.name
        self.is_key = described.is_key  # part of the replica identity; every column is under FULL
        self.type_oid = described.type_oid  # on the publisher
        self.type_modifier = described.type_modifier  # -1: none
        self.type_name = known.name
        self.text = known.text
        self.binary = known.binary

    def __repr__(self) -> str:
        return f"<Column {self.name} {self.type_name}{' key' * self.is_key}>"


class Relation:
    """A table on the publisher, as it was when the change was made.

    `schema` and `name`; `columns`, each a Column; `key`, the names of those that make up the replica identity, and
    `replica_identity`, which one that is. `relid` is its OID there; `str()` gives `schema.name`. Two descriptions of
    one table are two objects.
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
        # How its rows are read: the row of NULLs, and each column.
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
    """What a Row is made of, and the way to all of its values at once."""

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
        """The row whose columns are `data[start:end]`. `older` is the whole row before, where that was sent."""
        self.relation = relation
        self._data = data
        self._start = start
        self._end = end
        self._key_only = key_only
        self._older = older
        self._cut: list[tuple[int, bytes | None]] | None = None

    def dict(self) -> Values:
        """All columns by name; faster than asking for one after the other."""
        data, pos = self._data, self._start
        if self._key_only:
            return {name: self[name] for name in self}
        found: Values = {}
        name = ""
        try:
            for name, text, binary in self.relation.plan[1]:
                kind = data[pos]
                if kind == TEXT:
                    start = pos + 5
                    pos = start + _length_at(data, pos + 1)[0]
                    found[name] = text(data[start:pos])
                elif kind == NULL:
                    pos += 1
                    found[name] = None
                elif kind == BINARY:
                    start = pos + 5
                    pos = start + _length_at(data, pos + 1)[0]
                    found[name] = binary(data[start:pos])
                else:
                    pos += 1
                    found[name] = self[name]
        except (ValueError, ArithmeticError, LookupError, struct.error):
            self._columns()  # damaged bytes say so
            raise _unreadable(self.relation, self.relation.columns[self.relation.by_name[name]]) from None
        if pos != self._end:
            raise _damaged(self.relation)
        return found

    @abstractmethod
    def _columns(self) -> list[tuple[int, bytes | None]]: ...


class Row(RowData, Mapping[str, Any]):
    """One row, a mapping from the names of all published columns to values, UNCHANGED or NOT_SENT.

    `row["a"]` reads one value, `row.dict()` all at once. `text()` and `raw()` give what the publisher sent,
    for types that Python has nothing like.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has bytes of its own, and not those of the whole message."""
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
            raise _unreadable(self.relation, column) from None  # whose message may have the value in it

    def sent(self) -> Values:
        """The columns that have a value, or are NULL."""
        return {name: value for name, value in self.dict().items() if not isinstance(value, Missing)}

    def text(self, name: str) -> str | Missing | None:
        """The value as the type's output function writes it.

        Raises SubscriberError for a value that was sent in binary, unless its binary form is its text.
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
            if column.binary is column.text:  # a string, whose binary form is its text
                return str(column.text(value))
            raise SubscriberError(
                f'column "{name}" of {self.relation} was sent in binary',
                hint="Ask for the stream without binary to read values as text.",
                sqlstate=INVALID_BINARY_REPRESENTATION,
            )
        return value.decode("utf-8", "surrogateescape")

    def texts(self) -> Texts:
        """text() of all columns."""
        return {name: self.text(name) for name in self}

    def raw(self, name: str) -> bytes | Missing | None:
        """The bytes that were sent: text in UTF-8, or binary where that was asked for and the type has it."""
        number = self.relation.by_name[name]
        status, value = self._columns()[number]
        if value is not None:
            return value
        missing = self._without_value(number, status, raw=True)
        assert missing is None or isinstance(missing, bytes | Missing)
        return missing

    def is_binary(self, name: str) -> bool:
        """Whether raw() is the type's binary form."""
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
        return f"<Row of {self.relation}>"  # without its values: it may end up in a log

    def _is_older(self, number: int) -> bool:
        """Whether the value is that of the row before."""
        return self._older is not None and self._columns()[number][0] == _UNCHANGED_STATUS

    def _without_value(self, number: int, status: int, *, raw: bool = False) -> Any:
        column = self.relation.columns[number]
        if status == _UNCHANGED_STATUS:
            if self._older is not None:  # what was there before is what is there now
                return self._older.raw(column.name) if raw else self._older[column.name]
            return UNCHANGED
        return NOT_SENT if self._key_only and not column.is_key else None

    def _columns(self) -> list[tuple[int, bytes | None]]:
        """Status byte and value of each column; checked."""
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
