"""The envelope inside CopyData: what a walsender and a standby say to each other.

Positions are `Lsn`; times are microseconds since 2000-01-01 00:00 UTC, of the sender's clock.
Source: walsender.c (WalSndPrepareWrite, WalSndKeepalive, ProcessStandbyReplyMessage).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import assert_never

from subscriber._speedups import compiled
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.reader import left_over, too_short

XLOG_DATA = 0x77  # w
KEEPALIVE = 0x6B  # k
STANDBY_STATUS = 0x72  # r

XLOG_DATA_HEADER = struct.Struct(">BQQq")  # its size is where the payload starts
_KEEPALIVE = struct.Struct(">BQqB")
_STANDBY_STATUS = struct.Struct(">BQQQqB")


@dataclass(slots=True)  # by the million, see TupleData
class XLogData:
    """'w': one pgoutput message.

    `start` and `end` are equal: the change's own position; for a Commit the position after it; 0 for Relation
    and Type, and for a Begin or StreamStart that an Origin follows. So take the largest seen.
    """

    start: Lsn
    end: Lsn
    send_time: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Keepalive:
    """'k': the publisher has decoded everything before `end`, and may want an answer now."""

    end: Lsn
    send_time: int
    reply_requested: bool


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """'r': what the subscriber has, each "everything before this position".

    `flush` is what the publisher may forget: everything before it is durable on the target.
    """

    write: Lsn
    flush: Lsn
    apply: Lsn
    time: int
    reply_requested: bool


def decode_from_publisher(frame: bytes) -> XLogData | Keepalive | None:
    """Decode one CopyData payload of a walsender.

    The payload of XLogData is not decoded.

    Returns:
        None for an unknown kind of message, which the built-in subscriber ignores too.

    Raises:
        ProtocolError: the bytes are not exactly one message.
    """
    if not frame:
        raise ProtocolError("CopyData message is empty")
    letter = frame[0]
    if letter == XLOG_DATA:
        if len(frame) <= 25:
            raise too_short("XLogData", 0, 26, len(frame))
        _, start, end, send_time = XLOG_DATA_HEADER.unpack_from(frame)
        start_lsn = Lsn(start)
        return XLogData(start_lsn, start_lsn if end == start else Lsn(end), send_time, frame[25:])
    if letter == KEEPALIVE:
        _check_size(frame, _KEEPALIVE.size, "keepalive")
        _, end, send_time, reply_requested = _KEEPALIVE.unpack(frame)
        return Keepalive(Lsn(end), send_time, _boolean(reply_requested, "keepalive"))
    return None


@compiled
def weigh(frames: list[bytes]) -> tuple[int, list[bytes]]:
    """Return the size of CopyData payloads in bytes, and the keepalives among them.

    The last byte of a keepalive is 1 if the publisher requests a reply.
    """
    size = _KEEPALIVE.size
    return sum(map(len, frames)), [frame for frame in frames if len(frame) == size and frame[0] == KEEPALIVE]


def decode_from_subscriber(frame: bytes) -> StandbyStatus:
    """Decode one CopyData payload of a subscriber, where only status updates are expected.

    Raises ProtocolError for anything else.
    """
    if not frame:
        raise ProtocolError("CopyData message is empty")
    if frame[0] != STANDBY_STATUS:
        raise ProtocolError(f"unexpected message type {chr(frame[0])!r}")
    _check_size(frame, _STANDBY_STATUS.size, "standby status")
    _, write, flush, apply, time, reply_requested = _STANDBY_STATUS.unpack(frame)
    return StandbyStatus(Lsn(write), Lsn(flush), Lsn(apply), time, _boolean(reply_requested, "standby status"))


def encode(message: XLogData | Keepalive | StandbyStatus) -> bytes:
    """Encode one CopyData payload. Raises ValueError for a number that is too large for its field."""
    try:
        match message:
            case XLogData(start, end, send_time, payload):
                return XLOG_DATA_HEADER.pack(XLOG_DATA, start, end, send_time) + payload
            case Keepalive(end, send_time, reply):
                return _KEEPALIVE.pack(KEEPALIVE, end, send_time, reply)
            case StandbyStatus(write, flush, apply, time, reply):
                return _STANDBY_STATUS.pack(STANDBY_STATUS, write, flush, apply, time, reply)
            case _:
                assert_never(message)
    except struct.error as error:
        raise ValueError(f"{type(message).__name__} cannot be encoded: {error}") from None


def _check_size(frame: bytes, size: int, name: str) -> None:
    if len(frame) < size:
        raise too_short(name, 0, size, len(frame))
    if len(frame) > size:
        raise left_over(name, len(frame) - size)


def _boolean(value: int, name: str) -> bool:
    if value > 1:
        raise ProtocolError(f"unrecognized reply request {value} in {name} message")
    return value == 1
