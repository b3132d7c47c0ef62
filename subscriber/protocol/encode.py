"""From pgoutput messages to bytes: the inverse of decode, for spools, tests and publishers of our own.

Source: the logicalrep_write_* functions of proto.c.
"""

from __future__ import annotations

import struct
from typing import assert_never

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
from subscriber.protocol.tuple_data import TupleData


def encode(message: Message) -> bytes:
    """Encode one message, first byte included.

    An `xid` that is not None is written, as inside a stream block. An `abort_lsn` that is not None makes a stream abort
    of parallel streaming.

    Raises ValueError for what the protocol cannot carry: a number that is too large for its field, a NUL
    byte in a string.
    """
    try:
        return message.letter + _body(message)
    except struct.error as error:
        raise ValueError(f"{message.message_type} message cannot be encoded: {error}") from None


def _body(message: Message) -> bytes:
    match message:
        case Insert() | Update() | Delete() | Relation() | Type() | Truncate() | LogicalMessage():
            return _xid(message.xid) + _change(message)
        case BeginPrepare() | Prepare() | StreamPrepare() | CommitPrepared() | RollbackPrepared():
            return _two_phase(message)
        case Begin(final_lsn, commit_time, xid):
            return struct.pack(">QqI", final_lsn, commit_time, xid)
        case Commit(commit_lsn, end_lsn, commit_time):
            return struct.pack(">BQQq", 0, commit_lsn, end_lsn, commit_time)
        case Origin(origin_lsn, name):
            return struct.pack(">Q", origin_lsn) + _string(name)
        case StreamStart(xid, first_segment):
            return struct.pack(">IB", xid, first_segment)
        case StreamStop():
            return b""
        case StreamCommit(xid, commit_lsn, end_lsn, commit_time):
            return struct.pack(">IBQQq", xid, 0, commit_lsn, end_lsn, commit_time)
        case StreamAbort(xid, subxid, None, _):
            return struct.pack(">II", xid, subxid)
        case StreamAbort(xid, subxid, abort_lsn, abort_time):
            return struct.pack(">IIQq", xid, subxid, abort_lsn, abort_time)
        case _:
            assert_never(message)


def _change(message: Insert | Update | Delete | Relation | Type | Truncate | LogicalMessage) -> bytes:
    match message:
        case Insert(_, relid, new):
            return struct.pack(">I", relid) + _row(0x4E, new)
        case Update(_, relid, old_part, old, new):
            return struct.pack(">I", relid) + _old_row(old_part, old) + _row(0x4E, new)
        case Delete(_, relid, old_part, old):
            return struct.pack(">I", relid) + _old_row(old_part, old)
        case Relation():
            return _relation(message)
        case Type(_, type_oid, namespace, name):
            return struct.pack(">I", type_oid) + _string(namespace) + _string(name)
        case Truncate(_, cascade, restart_identity, relids):
            count = len(relids)
            return struct.pack(f">IB{count}I", count, cascade | restart_identity << 1, *relids)
        case LogicalMessage(_, transactional, lsn, prefix, content):
            return struct.pack(">BQ", transactional, lsn) + _string(prefix) + struct.pack(">I", len(content)) + content
        case _:
            assert_never(message)


def _two_phase(message: BeginPrepare | Prepare | StreamPrepare | CommitPrepared | RollbackPrepared) -> bytes:
    match message:
        case BeginPrepare(prepare_lsn, end_lsn, prepare_time, xid, gid):
            return struct.pack(">QQqI", prepare_lsn, end_lsn, prepare_time, xid) + _string(gid)
        case (
            Prepare(first_lsn, end_lsn, time, xid, gid)
            | StreamPrepare(first_lsn, end_lsn, time, xid, gid)
            | CommitPrepared(first_lsn, end_lsn, time, xid, gid)
        ):
            return struct.pack(">BQQqI", 0, first_lsn, end_lsn, time, xid) + _string(gid)
        case RollbackPrepared(prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid, gid):
            fixed = struct.pack(">BQQqqI", 0, prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid)
            return fixed + _string(gid)
        case _:
            assert_never(message)


def _relation(message: Relation) -> bytes:
    parts = [struct.pack(">I", message.relid), _string(message.namespace), _string(message.name)]
    parts.append(message.replica_identity.encode("ascii"))
    parts.append(struct.pack(">H", len(message.columns)))
    for column in message.columns:
        parts += (bytes([column.is_key]), _string(column.name))
        parts.append(struct.pack(">Ii", column.type_oid, column.type_modifier))
    return b"".join(parts)


def _xid(xid: int | None) -> bytes:
    return b"" if xid is None else struct.pack(">I", xid)


def _old_row(part: OldPart | None, row: TupleData | None) -> bytes:
    return b"" if part is None or row is None else _row(part.value, row)


def _row(marker: int, row: TupleData) -> bytes:
    return struct.pack(">BH", marker, row.ncols) + row.raw


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    if b"\0" in encoded:
        raise ValueError("a string of the protocol cannot contain a NUL byte")
    return encoded + b"\0"
