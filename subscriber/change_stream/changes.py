"""The changes of a transaction: one object each.

    match change:
        case Insert(relation, new): …
        case Update(relation, old, new): …
        case Delete(relation, old): …
        case Truncate(relations): …
        case Message(prefix, content): …

A stream has millions of them. So a change holds a few references, and its rows hold the bytes of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from subscriber._speedups import compiled
from subscriber.change_stream.rows import Relation, Row
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import XLOG_DATA
from subscriber.protocol.tuple_data import skip_columns

_NEW = 0x4E  # N
_KEY = 0x4B  # K
_ROW = 0x4F  # O
_I, _U, _D = b"IUD"

LETTER = 25  # offset of a message in a frame, after the header of XLogData

_head_at = struct.Struct(">IBH").unpack_from  # relid, the first row's marker and its number of columns
_xid_at = struct.Struct(">I").unpack_from
_next_row = struct.Struct(">BH").unpack_from
_NEXT_ROW = 3  # bytes


@compiled
class RowChange:
    """Base of Insert, Update and Delete, which say what `old` and `new` are.

    Attributes:
        relation: the table.
        old: the row before the change, or a part of it. None: it was not sent.
        new: the row after the change. None for a Delete.
        subxid: the (sub)transaction that made the change, in a block of an in-progress transaction. Otherwise None.
    """

    __slots__ = ("new", "old", "relation", "subxid")

    def __init__(self, relation: Relation, old: Row | None, new: Row | None, subxid: int | None = None) -> None:
        self.relation = relation
        self.old = old
        self.new = new
        self.subxid = subxid


class _Copied:
    """Support for copy and pickle, which the compiled base class does not have."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        change: Any = self
        return type(change), (change.relation, change.old, change.new, change.subxid)


class Insert(_Copied, RowChange):
    """An INSERT of one row, `new`."""

    __slots__ = ()
    __match_args__ = ("relation", "new")
    kind: ClassVar = "insert"
    old: None
    new: Row

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity. Empty if the table has none."""
        return {name: self.new[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Insert into {self.relation}>"


class Update(_Copied, RowChange):
    """An UPDATE of one row.

    `old` is the whole row under REPLICA IDENTITY FULL. Otherwise it has the columns of the key if one of these changed,
    and is None if not. `new` has UNCHANGED for large values that the statement did not change, unless `old` is whole.
    """

    __slots__ = ()
    __match_args__ = ("relation", "old", "new")
    kind: ClassVar = "update"
    new: Row

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity before the change. They identify the row."""
        row = self.old or self.new
        return {name: row[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Update of {self.relation}>"


class Delete(_Copied, RowChange):
    """A DELETE of one row. `old` has the columns of its key, or all of them under REPLICA IDENTITY FULL."""

    __slots__ = ()
    __match_args__ = ("relation", "old")
    kind: ClassVar = "delete"
    old: Row
    new: None

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity. They identify the row."""
        return {name: self.old[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Delete from {self.relation}>"


class Truncate:
    """A TRUNCATE of one or several tables.

    Attributes:
        relations: the published tables among those that the statement truncated.
        cascade: the statement had CASCADE.
        restart_identity: the statement had RESTART IDENTITY.
        subxid: as for the change of a row.
    """

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
    """A logical message, written by pg_logical_emit_message().

    Attributes:
        prefix: the name under which a program writes its messages.
        content: the bytes of the message.
        lsn: the position of the message.
        transactional: False for a message that does not belong to a transaction.
        subxid: as for the change of a row.
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
        """The content, decoded from UTF-8.

        Raises:
            UnicodeDecodeError: the content is not UTF-8.
        """
        return self.content.decode()

    def __repr__(self) -> str:
        return f"<Message {self.prefix!r} of {len(self.content)} bytes>"


Change = Insert | Update | Delete | Truncate | Message

KINDS = (Insert, Update, Delete, Row)


def row_changes(
    frames: list[bytes], at: int, known: dict[int, Relation], batch: list[Change], letter: int, *, in_block: bool
) -> int:
    """Append the row changes in `frames` to `batch`, up to the first frame that has none.

    Args:
        frames: XLogData frames, or messages without their header.
        at: the index of the first frame to read.
        known: the described tables, by OID.
        batch: the list to append to.
        letter: the offset of the message in a frame. 0: messages without a header.
        in_block: the messages have the xid of a streamed block.

    Returns:
        The index of the first frame that is not a row change; `len(frames)` if there is none.

    Raises:
        ProtocolError: a change is damaged, or its table has not been described.
    """
    while True:
        at = take_changes(frames, at, known, batch, letter, in_block, KINDS)
        if at == len(frames) or (change := row_change(frames[at], known, letter, in_block)) is None:
            return at
        batch.append(change)  # the compiled take_changes() may stop before a row change
        at += 1


@compiled
def take_changes(
    frames: list[bytes],
    at: int,
    known: dict[int, Relation],
    batch: list[Change],
    letter: int,
    in_block: bool,
    kinds: tuple[type[Insert], type[Update], type[Delete], type[Row]],
) -> int:
    """Append row changes to `batch`, as row_changes() does. The compiled twin may stop earlier."""
    for frame in frames[at:] if at else frames:
        change = row_change(frame, known, letter, in_block)
        if change is None:
            break
        batch.append(change)
        at += 1
    return at


def row_change(
    frame: bytes, known: Mapping[int, Relation], letter: int, in_block: bool
) -> Insert | Update | Delete | None:
    """Return the row change in `frame`; None if the frame has another message or none."""
    if len(frame) <= letter or (letter and frame[0] != XLOG_DATA):
        return None
    kind = frame[letter]
    if kind not in _NAMES:
        return None
    pos = letter + 1
    subxid = None
    try:
        if in_block:
            (subxid,) = _xid_at(frame, pos)
            pos += 4
        relid, marker, ncols = _head_at(frame, pos)
        pos += 7
        relation = known.get(relid)
        if relation is None:
            raise ProtocolError(f"no relation with OID {relid} has been described")
        _check_count(relation, ncols)
        if kind == _I and marker == _NEW:
            return Insert(relation, None, Row(relation, frame, pos, len(frame)), subxid)
        if kind == _U and marker == _NEW:
            return Update(relation, None, Row(relation, frame, pos, len(frame)), subxid)
        if kind != _I and marker in (_KEY, _ROW):
            whole = marker == _ROW
            if kind == _D:
                return Delete(relation, Row(relation, frame, pos, len(frame), key_only=not whole), None, subxid)
            end = skip_columns(frame, pos, ncols)
            if end > len(frame):
                raise IndexError
            old = Row(relation, frame, pos, end, key_only=not whole)
            marker, ncols = _next_row(frame, end)
            if marker == _NEW:
                _check_count(relation, ncols)
                new = Row(relation, frame, end + _NEXT_ROW, len(frame), older=old if whole else None)
                return Update(relation, old, new, subxid)
    except (IndexError, struct.error):
        raise ProtocolError(f"{_NAMES[kind]} message is too short", detail=f"It has {len(frame)} bytes.") from None
    raise ProtocolError(f"unexpected row marker {chr(marker)!r} in {_NAMES[kind]} message")


_NAMES = {_I: "INSERT", _U: "UPDATE", _D: "DELETE"}


def _check_count(relation: Relation, ncols: int) -> None:
    if ncols != len(relation.columns):
        raise ProtocolError(f"a row of {relation} has {ncols} columns instead of {len(relation.columns)}")
