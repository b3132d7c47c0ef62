"""What happened in a transaction: one object for each change.

    match change:
        case Insert(relation, new): …
        case Update(relation, old, new): …
        case Delete(relation, old): …
        case Truncate(relations): …
        case Message(prefix, content): …

They come by the million and hold the bytes they came in; rows are made when somebody asks for them.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from subscriber.consumer.rows import Relation, Row
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.tuples import skip_columns

_NEW = 0x4E  # N
_KEY = 0x4B  # K
_ROW = 0x4F  # O

_marker_at = struct.Struct(">BH").unpack_from
_HEAD = 3  # bytes of that
_xid_at = struct.Struct(">I").unpack_from

# Where the first row's marker stands in a frame: envelope, letter, the xid that only blocks have, relid.
MARKER = 25 + 1 + 4
MARKER_IN_BLOCK = MARKER + 4
MARKER_IN_MESSAGE = 1 + 4  # without its envelope


class _RowChange:
    """What the three share."""

    __slots__ = ("_data", "_pos", "relation")

    def __init__(self, relation: Relation, data: bytes, pos: int) -> None:
        """`pos` is where in `data` the first row's marker stands; the last row ends with `data`."""
        self.relation = relation
        self._data = data
        self._pos = pos

    @property
    def subxid(self) -> int | None:
        """The (sub)transaction that made the change, in a block that is handed over in progress; else None."""
        return int(_xid_at(self._data, 26)[0]) if self._pos == MARKER_IN_BLOCK else None


class Insert(_RowChange):
    """A new row."""

    __slots__ = ("_new",)
    __match_args__ = ("relation", "new")
    kind: ClassVar = "insert"
    old: ClassVar[None] = None

    def __init__(self, relation: Relation, data: bytes, pos: int) -> None:
        self.relation = relation  # not by super(): this is the hottest line of a consumer
        self._data = data
        self._pos = pos
        self._new: Row | None = None

    @property
    def new(self) -> Row:
        """The row."""
        row = self._new
        if row is None:
            data, pos, relation = self._data, self._pos, self.relation
            marker, ncols = _marker(data, pos, "INSERT")
            if marker != _NEW or ncols != len(relation.columns):
                raise _unexpected("INSERT", marker) if marker != _NEW else _wrong_count(relation, ncols)
            row = self._new = Row(relation, data, pos + _HEAD, len(data))
        return row

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity; empty where the table has none."""
        return {name: self.new[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Insert into {self.relation}>"


class Update(_RowChange):
    """A row before, as much of it as was sent, and after.

    `old` is the whole row under REPLICA IDENTITY FULL, the key's columns if one of them changed, and None
    otherwise. `new` has UNCHANGED for large values that were not touched, unless `old` is whole.
    """

    __slots__ = ("_new", "_old")
    __match_args__ = ("relation", "old", "new")
    kind: ClassVar = "update"

    def __init__(self, relation: Relation, data: bytes, pos: int) -> None:
        self.relation = relation
        self._data = data
        self._pos = pos
        self._new: Row | None = None
        self._old: Row | None = None

    @property
    def old(self) -> Row | None:
        """The row before: whole, its key, or None when neither was sent."""
        if self._new is None:
            self._find_rows()
        return self._old

    @property
    def new(self) -> Row:
        """The row after."""
        if self._new is None:
            self._find_rows()
            assert self._new is not None
        return self._new

    def _find_rows(self) -> None:
        data, pos = self._data, self._pos
        marker, ncols = _marker(data, pos, "UPDATE")
        whole = None
        if marker in (_KEY, _ROW):
            pos += _HEAD
            end = _end_of_row(data, pos, ncols, "UPDATE")
            self._old = _row(self.relation, data, pos, end, ncols, key_only=marker == _KEY)
            whole = self._old if marker == _ROW else None
            pos = end
            marker, ncols = _marker(data, pos, "UPDATE")
        if marker != _NEW:
            raise _unexpected("UPDATE", marker)
        self._new = _row(self.relation, data, pos + _HEAD, len(data), ncols, older=whole)

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity as they were before: which row to look for."""
        row = self.old or self.new
        return {name: row[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Update of {self.relation}>"


class Delete(_RowChange):
    """A row that is gone: `old` is its key, or all of it under REPLICA IDENTITY FULL."""

    __slots__ = ("_old",)
    __match_args__ = ("relation", "old")
    kind: ClassVar = "delete"
    new: ClassVar[None] = None

    def __init__(self, relation: Relation, data: bytes, pos: int) -> None:
        self.relation = relation
        self._data = data
        self._pos = pos
        self._old: Row | None = None

    @property
    def old(self) -> Row:
        """The row that was there: its key, or whole."""
        row = self._old
        if row is None:
            marker, ncols = _marker(self._data, self._pos, "DELETE")
            if marker not in (_KEY, _ROW):
                raise _unexpected("DELETE", marker)
            start, end = self._pos + _HEAD, len(self._data)
            row = self._old = _row(self.relation, self._data, start, end, ncols, key_only=marker == _KEY)
        return row

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity: which row to look for."""
        return {name: self.old[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Delete from {self.relation}>"


class Truncate:
    """Tables emptied by one statement."""

    __match_args__ = ("relations",)
    kind: ClassVar = "truncate"

    def __init__(
        self,
        relations: tuple[Relation, ...],
        *,
        cascade: bool,
        restart_identity: bool,
        subxid: int | None = None,
    ) -> None:
        self.relations = relations
        self.subxid = subxid
        self.cascade = cascade
        self.restart_identity = restart_identity

    def __repr__(self) -> str:
        return f"<Truncate of {', '.join(str(relation) for relation in self.relations)}>"


class Message:
    """What pg_logical_emit_message() wrote.

    `transactional` is False for one that belongs to no transaction; `lsn` is its position.
    """

    __match_args__ = ("prefix", "content")
    kind: ClassVar = "message"

    def __init__(
        self, prefix: str, content: bytes, *, lsn: Lsn, transactional: bool, subxid: int | None = None
    ) -> None:
        self.prefix = prefix
        self.subxid = subxid
        self.content = content
        self.lsn = lsn
        self.transactional = transactional

    @cached_property
    def text(self) -> str:
        """The content as UTF-8; raises UnicodeDecodeError when it is none."""
        return self.content.decode()

    def __repr__(self) -> str:
        return f"<Message {self.prefix!r} of {len(self.content)} bytes>"


Change = Insert | Update | Delete | Truncate | Message


def _marker(data: bytes, pos: int, name: str) -> tuple[int, int]:
    try:
        marker, ncols = _marker_at(data, pos)
    except struct.error:
        _cut_off(name)
    return marker, ncols


def _end_of_row(data: bytes, pos: int, ncols: int, name: str) -> int:
    try:
        return skip_columns(data, pos, ncols)
    except (IndexError, struct.error):
        _cut_off(name)


def _row(
    relation: Relation,
    data: bytes,
    start: int,
    end: int,
    ncols: int,
    *,
    key_only: bool = False,
    older: Row | None = None,
) -> Row:
    if ncols != len(relation.columns):
        raise _wrong_count(relation, ncols)
    return Row(relation, data, start, end, key_only=key_only, older=older)


def _wrong_count(relation: Relation, ncols: int) -> ProtocolError:
    return ProtocolError(f"a row of {relation} has {ncols} columns instead of {len(relation.columns)}")


def _cut_off(name: str) -> NoReturn:
    raise ProtocolError(f"{name} message is too short")


def _unexpected(name: str, marker: int) -> ProtocolError:
    return ProtocolError(f"unexpected row marker {chr(marker)!r} in {name} message")
