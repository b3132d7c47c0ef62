"""What happened in a transaction: one object for each change.

    match change:
        case Insert(relation, new): …
        case Update(relation, old, new): …
        case Delete(relation, old): …
        case Truncate(relations): …
        case Message(prefix, content): …

They come by the million: a change is a few references, and its rows are the bytes they came in.
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

LETTER = 25  # where a message begins in a frame, behind the envelope

_head_at = struct.Struct(">IBH").unpack_from  # relid, the first row's marker and its number of columns
_xid_at = struct.Struct(">I").unpack_from
_next_row = struct.Struct(">BH").unpack_from
_NEXT_ROW = 3  # bytes of that


@compiled
class RowChange:
    """What the three share: which ones of the rows there are depends on the kind.

    `subxid` is the (sub)transaction that made the change, in a block that is handed over in progress; else None.
    """

    __slots__ = ("new", "old", "relation", "subxid")

    def __init__(self, relation: Relation, old: Row | None, new: Row | None, subxid: int | None = None) -> None:
        self.relation = relation
        self.old = old
        self.new = new
        self.subxid = subxid


class _Copied:
    """The way to a copy, or through pickle, of what is compiled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        change: Any = self
        return type(change), (change.relation, change.old, change.new, change.subxid)


class Insert(_Copied, RowChange):
    """A new row: `new`."""

    __slots__ = ()
    __match_args__ = ("relation", "new")
    kind: ClassVar = "insert"
    old: None
    new: Row

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity; empty where the table has none."""
        return {name: self.new[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Insert into {self.relation}>"


class Update(_Copied, RowChange):
    """A row before, as much of it as was sent, and after.

    `old` is the whole row under REPLICA IDENTITY FULL, the key's columns if one of them changed, and None
    otherwise. `new` has UNCHANGED for large values that were not touched, unless `old` is whole.
    """

    __slots__ = ()
    __match_args__ = ("relation", "old", "new")
    kind: ClassVar = "update"
    new: Row

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity as they were before: which row to look for."""
        row = self.old or self.new
        return {name: row[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Update of {self.relation}>"


class Delete(_Copied, RowChange):
    """A row that is gone: `old` is its key, or all of it under REPLICA IDENTITY FULL."""

    __slots__ = ()
    __match_args__ = ("relation", "old")
    kind: ClassVar = "delete"
    old: Row
    new: None

    @property
    def key(self) -> dict[str, Any]:
        """The columns of the replica identity: which row to look for."""
        return {name: self.old[name] for name in self.relation.key}

    def __repr__(self) -> str:
        return f"<Delete from {self.relation}>"


class Truncate:
    """Tables emptied by one statement: `relations`; `cascade` and `restart_identity` as it was written."""

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
    """What pg_logical_emit_message() wrote: `prefix`, and `content` in bytes.

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

KINDS = (Insert, Update, Delete, Row)


def row_changes(
    frames: list[bytes], at: int, known: dict[int, Relation], batch: list[Change], letter: int, *, in_block: bool
) -> int:
    """Add the changes of rows in `frames` from `at` on to `batch`, up to the first that is something else: its place.

    A message stands at `letter` of a frame, which is behind an envelope unless that is 0. `known` has tables by
    OID. Raises ProtocolError for a change that is damaged, or of another table.
    """
    while True:
        at = take_changes(frames, at, known, batch, letter, in_block, KINDS)
        if at == len(frames) or (change := row_change(frames[at], known, letter, in_block)) is None:
            return at
        batch.append(change)  # take_changes() need not take everything
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
    """row_changes() as far as that is plain."""
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
    """The one change in `frame`; None if it is something else, or nothing."""
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
