"""What a publisher sends about subscriptions of its own, if it is a target as well.

Schema "subscriber" is no part of a publication, although FOR ALL TABLES published its tables before they were UNLOGGED:
they have connection strings with passwords. Messages with the prefix "subscriber" only make commits durable, see
worker/wal_flush.py. OwnSchemaFilter removes both from a stream.
"""

from __future__ import annotations

from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Truncate

OWN_SCHEMA = "subscriber"
MESSAGE_PREFIX = "subscriber"

_MARK = b"subscriber\0"  # the schema in a RELATION message, the prefix in a MESSAGE
_LETTER = XLOG_DATA_HEADER.size
_BODY = _LETTER + 1
_XID = 4  # bytes in front of the body of a message in a block
_MARK_AT = {0x52: _BODY + 4, 0x4D: _BODY + 9}  # R: behind the OID; M: behind flags and position
_RARE = frozenset((b"R", b"M"))
_RELATION, _TRUNCATE = 0x52, 0x54
_ROWS = b"IUD"
_STREAM_START, _STREAM_STOP = 0x53, 0x45


class OwnSchemaFilter:
    """Removes the messages about schema `subscriber` from the frames of one connection. BEGIN and COMMIT stay."""

    def __init__(self) -> None:
        self._relids: set[int] = set()  # of tables in the schema
        self._in_block = False  # between STREAM START and STREAM STOP; only known while there are _relids

    def filter(self, frames: list[bytes]) -> list[bytes]:
        """Return the frames that are not ours, in their order; perhaps none."""
        if not self._relids and _RARE.isdisjoint([frame[_LETTER:_BODY] for frame in frames]):
            return frames
        return [kept for frame in frames if (kept := self._filter(frame))]

    def _filter(self, frame: bytes) -> bytes | None:
        if len(frame) < _BODY or frame[0] != XLOG_DATA:
            return frame
        letter = frame[_LETTER]
        if letter in _ROWS:
            return None if self._relid(frame) in self._relids else frame
        if letter in _MARK_AT:
            return None if self._is_marked(frame, _MARK_AT[letter]) else frame
        if letter == _TRUNCATE:
            return self._truncate(frame) if self._relids else frame
        if letter in (_STREAM_START, _STREAM_STOP):
            self._in_block = letter == _STREAM_START
        return frame

    def _relid(self, frame: bytes) -> int:
        at = _BODY + _XID if self._in_block else _BODY
        return int.from_bytes(frame[at : at + 4], "big")

    def _is_marked(self, frame: bytes, at: int) -> bool:
        """Return True for a RELATION of the schema or a MESSAGE with the prefix. A stream block shifts the mark."""
        for in_block, place in ((False, at), (True, at + _XID)):
            if frame.startswith(_MARK, place):
                self._in_block = in_block
                if frame[_LETTER] == _RELATION:
                    self._relids.add(self._relid(frame))
                return True
        if frame[_LETTER] == _RELATION:
            self._relids.discard(self._relid(frame))
        return False

    def _truncate(self, frame: bytes) -> bytes | None:
        message = Decoder(in_block=self._in_block).decode(frame, _LETTER)
        assert isinstance(message, Truncate)
        left = tuple(relid for relid in message.relids if relid not in self._relids)
        if len(left) == len(message.relids):
            return frame
        rest = Truncate(message.xid, message.cascade, message.restart_identity, left)
        return frame[:_LETTER] + encode(rest) if left else None
