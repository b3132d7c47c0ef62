"""Decode pgoutput messages.

A message does not contain two facts that its layout depends on. Inside a stream block, R Y I U D T M have an xid after
their first byte. With parallel streaming, A is longer. The Decoder keeps these two facts and nothing else: its caller
checks whether a message is legal at this point of the stream.

Row changes, and the BEGIN and COMMIT of small transactions, are by far the most frequent messages. They are decoded
with precompiled layouts and without a Reader. An index or a layout that exceeds the bytes raises by itself, and one
place converts that to a ProtocolError, so valid messages pay nothing for the check. All other messages are decoded
with Reader.

Source: the logicalrep_read_* functions of proto.c. As there, undefined flags are an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import cast

from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.frontend import LARGE
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    OldPart,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from subscriber.protocol.reader import Reader, left_over, non_zero_lsn
from subscriber.protocol.tuple_data import TupleData, skip_columns

MAX_COLUMNS = 1664  # MaxTupleAttributeNumber

_NEW = 0x4E  # N
_KEY = 0x4B  # K
_ROW = 0x4F  # O
_OLD_PARTS = {_KEY: OldPart.KEY, _ROW: OldPart.ROW}

# [xid,] relid, the marker of the first row, its number of columns
_change = struct.Struct(">IBH").unpack_from
_streamed_change = struct.Struct(">IIBH").unpack_from
_next_row = struct.Struct(">BH").unpack_from
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">BQQq")

_STREAM_START = struct.Struct(">IB")
_STREAM_COMMIT = struct.Struct(">IBQQq")
_STREAM_ABORT = struct.Struct(">II")
_STREAM_ABORT_PARALLEL = struct.Struct(">IIQq")
_BEGIN_PREPARE = struct.Struct(">QQqI")
_PREPARE = struct.Struct(">BQQqI")
_ROLLBACK_PREPARED = struct.Struct(">BQQqqI")
_TYPE_OF_COLUMN = struct.Struct(">Ii")
_TRUNCATE = struct.Struct(">IB")
_MESSAGE = struct.Struct(">BQ")

_TRUNCATE_CASCADE = 1
_TRUNCATE_RESTART_IDENTITY = 2


class Decoder:
    """Decodes the messages of one connection, in their order.

    `parallel` is True if the connection requested `streaming 'parallel'`. `in_block` is True between STREAM START
    and STREAM STOP. The decoder sets it; a caller sets it to decode changes that were spooled from inside a block.
    """

    __slots__ = ("_rare", "in_block")

    def __init__(self, *, parallel: bool = False, in_block: bool = False) -> None:
        self.in_block = in_block
        self._rare = _RARE | {0x41: _stream_abort_parallel} if parallel else _RARE

    def decode(self, data: bytes | bytearray | memoryview, pos: int = 0) -> Message:
        """Decode the one message that `data` holds from `pos` to its end, first byte included.

        Raises ProtocolError for anything else than exactly one well-formed message, and then `in_block`
        is as it was. The rows of a memoryview are views, see in_place().
        """
        if type(data) is not bytes:
            data = cast(bytes, data) if type(data) is memoryview else bytes(data)
        try:
            frequent = _frequent(data[pos])
            if frequent is not None:
                return frequent(data, pos + 1, self.in_block)
        except (IndexError, struct.error):
            raise _cut_off(data, pos) from None
        return self._decode_rare(data, pos)

    def _decode_rare(self, data: bytes, pos: int) -> Message:
        letter = data[pos]
        name = _NAMES.get(letter)
        if name is None:
            raise ProtocolError(f'invalid logical replication message type "??? ({letter})"')
        read = Reader(bytes(data), name, pos + 1)
        in_block_only = _PREFIXED.get(letter)
        message: Message
        if in_block_only is not None:
            xid = _valid_xid(read.uint(4)) if self.in_block else None
            message = in_block_only(read, xid)
        else:
            message = self._rare[letter](read)
        read.finish()
        if letter == 0x53:  # S
            self.in_block = True
        elif letter == 0x45:  # E
            self.in_block = False
        return message


def in_place(message: bytes) -> bytes | memoryview:
    """Return `message` in the form that decode() should be given: a large one as a view.

    TupleData.raw of a large message is then a view of it, so the rows are never copied.
    """
    return memoryview(message) if len(message) > LARGE else message


def _cut_off(data: bytes, pos: int) -> ProtocolError:
    if pos >= len(data):
        return ProtocolError("message is empty")
    return ProtocolError(
        f"{_NAMES[data[pos]]} message is too short",
        detail=f"It ends after {len(data) - pos} bytes.",
    )


def _valid_xid(xid: int) -> int:
    if not xid:
        raise ProtocolError("invalid transaction ID in streamed replication transaction")
    return xid


# --- the frequent ones: `pos` is after the first byte; IndexError and struct.error mean "too short" ---


def _begin(data: bytes, pos: int, in_block: bool) -> Begin:
    final_lsn, commit_time, xid = _BEGIN.unpack_from(data, pos)
    if len(data) != pos + 20:
        raise left_over("BEGIN", len(data) - pos - 20)
    return Begin(non_zero_lsn(final_lsn, "final_lsn", "BEGIN"), commit_time, xid)


def _commit(data: bytes, pos: int, in_block: bool) -> Commit:
    flags, commit_lsn, end_lsn, commit_time = _COMMIT.unpack_from(data, pos)
    if len(data) != pos + 25:
        raise left_over("COMMIT", len(data) - pos - 25)
    if flags:
        raise _unrecognized_flags(flags, "COMMIT")
    return Commit(Lsn(commit_lsn), Lsn(end_lsn), commit_time)


def _insert(data: bytes, pos: int, in_block: bool) -> Insert:
    xid: int | None
    if in_block:
        xid, relid, marker, ncols = _streamed_change(data, pos)
        pos += 11
        if not xid:
            _valid_xid(xid)
    else:
        xid = None
        relid, marker, ncols = _change(data, pos)
        pos += 7
    if marker != _NEW:
        raise _unexpected_row("INSERT", "N", marker)
    end = skip_columns(data, pos, ncols)
    if end != len(data):
        raise _wrong_end("INSERT", data, end)
    return Insert(xid, relid, TupleData(data[pos:], ncols))


def _update(data: bytes, pos: int, in_block: bool) -> Update:
    xid: int | None
    if in_block:
        xid, relid, marker, ncols = _streamed_change(data, pos)
        pos += 11
        if not xid:
            _valid_xid(xid)
    else:
        xid = None
        relid, marker, ncols = _change(data, pos)
        pos += 7
    old_part = old = None
    if marker != _NEW:
        old_part = _OLD_PARTS.get(marker)
        if old_part is None:
            raise _unexpected_row("UPDATE", "N, O or K", marker)
        end = skip_columns(data, pos, ncols)
        old = TupleData(data[pos:end], ncols)
        marker, ncols = _next_row(data, end)
        pos = end + 3
        if marker != _NEW:
            raise _unexpected_row("UPDATE", "N", marker)
    end = skip_columns(data, pos, ncols)
    if end != len(data):
        raise _wrong_end("UPDATE", data, end)
    return Update(xid, relid, old_part, old, TupleData(data[pos:], ncols))


def _delete(data: bytes, pos: int, in_block: bool) -> Delete:
    xid: int | None
    if in_block:
        xid, relid, marker, ncols = _streamed_change(data, pos)
        pos += 11
        if not xid:
            _valid_xid(xid)
    else:
        xid = None
        relid, marker, ncols = _change(data, pos)
        pos += 7
    old_part = _OLD_PARTS.get(marker)
    if old_part is None:
        raise _unexpected_row("DELETE", "O or K", marker)
    end = skip_columns(data, pos, ncols)
    if end != len(data):
        raise _wrong_end("DELETE", data, end)
    return Delete(xid, relid, old_part, TupleData(data[pos:], ncols))


def _unexpected_row(name: str, expected: str, marker: int) -> ProtocolError:
    return ProtocolError(f"expected the row marker {expected} in {name} message, got {chr(marker)!r}")


def _unrecognized_flags(flags: int, name: str) -> ProtocolError:
    return ProtocolError(f"unrecognized flags {flags} in {name} message")


def _wrong_end(name: str, data: bytes, end: int) -> ProtocolError:
    if end < len(data):
        return left_over(name, len(data) - end)
    return ProtocolError(
        f"{name} message is too short",
        detail=f"The last column needs {end - len(data)} bytes more.",
    )


# --- everything else ---


def _zero_flags(flags: int, read: Reader) -> None:
    if flags:
        raise _unrecognized_flags(flags, read.name)


def _origin(read: Reader) -> Origin:
    return Origin(Lsn(read.uint(8)), read.text())


def _stream_start(read: Reader) -> StreamStart:
    xid, first_segment = read.fields(_STREAM_START)
    if first_segment > 1:
        raise ProtocolError(f"unrecognized first segment {first_segment} in {read.name} message")
    return StreamStart(_valid_xid(xid), first_segment == 1)


def _stream_stop(read: Reader) -> StreamStop:
    return StreamStop()


def _stream_commit(read: Reader) -> StreamCommit:
    xid, flags, commit_lsn, end_lsn, commit_time = read.fields(_STREAM_COMMIT)
    _zero_flags(flags, read)
    return StreamCommit(xid, Lsn(commit_lsn), Lsn(end_lsn), commit_time)


def _stream_abort(read: Reader) -> StreamAbort:
    xid, subxid = read.fields(_STREAM_ABORT)
    return StreamAbort(xid, subxid, None, None)


def _stream_abort_parallel(read: Reader) -> StreamAbort:
    xid, subxid, abort_lsn, abort_time = read.fields(_STREAM_ABORT_PARALLEL)
    return StreamAbort(xid, subxid, Lsn(abort_lsn), abort_time)


def _begin_prepare(read: Reader) -> BeginPrepare:
    prepare_lsn, end_lsn, prepare_time, xid = read.fields(_BEGIN_PREPARE)
    return BeginPrepare(
        non_zero_lsn(prepare_lsn, "prepare_lsn", read.name),
        non_zero_lsn(end_lsn, "end_lsn", read.name),
        prepare_time,
        xid,
        read.identifier(),
    )


def _prepare_fields(read: Reader) -> tuple[Lsn, Lsn, int, int, str]:
    flags, prepare_lsn, end_lsn, prepare_time, xid = read.fields(_PREPARE)
    _zero_flags(flags, read)
    if not xid:
        raise ProtocolError(f"invalid two-phase transaction ID in {read.name} message")
    return (
        non_zero_lsn(prepare_lsn, "prepare_lsn", read.name),
        non_zero_lsn(end_lsn, "end_lsn", read.name),
        prepare_time,
        xid,
        read.identifier(),
    )


def _prepare(read: Reader) -> Prepare:
    return Prepare(*_prepare_fields(read))


def _stream_prepare(read: Reader) -> StreamPrepare:
    return StreamPrepare(*_prepare_fields(read))


def _commit_prepared(read: Reader) -> CommitPrepared:
    flags, commit_lsn, end_lsn, commit_time, xid = read.fields(_PREPARE)
    _zero_flags(flags, read)
    return CommitPrepared(
        non_zero_lsn(commit_lsn, "commit_lsn", read.name),
        non_zero_lsn(end_lsn, "end_lsn", read.name),
        commit_time,
        xid,
        read.identifier(),
    )


def _rollback_prepared(read: Reader) -> RollbackPrepared:
    flags, prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid = read.fields(_ROLLBACK_PREPARED)
    _zero_flags(flags, read)
    return RollbackPrepared(
        non_zero_lsn(prepare_end_lsn, "prepare_end_lsn", read.name),
        non_zero_lsn(rollback_end_lsn, "rollback_end_lsn", read.name),
        prepare_time,
        rollback_time,
        xid,
        read.identifier(),
    )


def _relation(read: Reader, xid: int | None) -> Relation:
    relid = read.uint(4)
    namespace = read.identifier()
    name = read.identifier()
    identity = chr(read.uint(1))
    try:
        replica_identity = ReplicaIdentity(identity)
    except ValueError:
        raise ProtocolError(f"unrecognized replica identity {identity!r} in {read.name} message") from None
    natts = read.uint(2)
    if natts > MAX_COLUMNS:
        raise ProtocolError(f"{read.name} message has {natts:,} columns")
    columns = tuple([_relation_column(read) for _ in range(natts)])
    return Relation(xid, relid, namespace, name, replica_identity, columns)


def _relation_column(read: Reader) -> RelationColumn:
    flags = read.uint(1)
    if flags > 1:
        raise ProtocolError(f"unrecognized column flags {flags} in {read.name} message")
    name = read.identifier()
    type_oid, type_modifier = read.fields(_TYPE_OF_COLUMN)
    return RelationColumn(flags == 1, name, type_oid, type_modifier)


def _type(read: Reader, xid: int | None) -> Type:
    type_oid = read.uint(4)
    return Type(xid, type_oid, read.identifier(), read.identifier())


def _truncate(read: Reader, xid: int | None) -> Truncate:
    nrelids, flags = read.fields(_TRUNCATE)
    if flags & ~(_TRUNCATE_CASCADE | _TRUNCATE_RESTART_IDENTITY):
        raise _unrecognized_flags(flags, read.name)
    relids = read.take(4 * nrelids)  # before anything is built: the count may be nonsense
    return Truncate(
        xid,
        bool(flags & _TRUNCATE_CASCADE),
        bool(flags & _TRUNCATE_RESTART_IDENTITY),
        struct.unpack(f">{nrelids}I", relids),
    )


def _message(read: Reader, xid: int | None) -> LogicalMessage:
    flags, lsn = read.fields(_MESSAGE)
    if flags > 1:
        raise _unrecognized_flags(flags, read.name)
    prefix = read.string()
    length = read.uint(4)
    return LogicalMessage(xid, flags == 1, Lsn(lsn), prefix, read.take(length))


_FREQUENT: dict[int, Callable[[bytes, int, bool], Message]] = {
    0x49: _insert,  # I
    0x55: _update,  # U
    0x44: _delete,  # D
    0x42: _begin,  # B
    0x43: _commit,  # C
}
_frequent = _FREQUENT.get

_PREFIXED: dict[int, Callable[[Reader, int | None], Message]] = {
    0x52: _relation,  # R
    0x59: _type,  # Y
    0x54: _truncate,  # T
    0x4D: _message,  # M
}

_RARE: dict[int, Callable[[Reader], Message]] = {
    0x4F: _origin,  # O
    0x53: _stream_start,  # S
    0x45: _stream_stop,  # E
    0x63: _stream_commit,  # c
    0x41: _stream_abort,  # A
    0x62: _begin_prepare,  # b
    0x50: _prepare,  # P
    0x4B: _commit_prepared,  # K
    0x72: _rollback_prepared,  # r
    0x70: _stream_prepare,  # p
}

_NAMES: dict[int, str] = {kind.letter[0]: kind.message_type for kind in Message.__args__}
