"""The bytes of a segment of the change log: a header, then blocks. No I/O here.

    segment   header, block, block, …; a sealed one ends with an index block and 16 bytes that say where it is
    header    magic, format version, the publisher's system identifier, where the segment starts, checksum
    block     kind, flags, length of the body, position, transactions, changes, two checksums; the body
    body      of MESSAGES: pgoutput messages as they came, each after its length in four bytes
              of POSITION: nothing; everything before the position is in the log, and there is no more
              of INDEX: (offset, position) of each block from which reading can begin

All numbers are big-endian, as on the wire. Checksums are CRC-32: one of a block's body, so that what is in
front of it can be trusted without reading the body; one of that, and of the segment and offset the block was
written for: a block that is intact but in the wrong place is damage, too.

The 16 bytes at the end have no checksum and need none, so all segments of format 1 are equally protected. Their
offset counts only where an index block lies that was written for this offset and ends at these 16 bytes. The index
block's position must be the end that the file name states (logfiles.SegmentReader.index()).

BOUNDARY on a block says that no transaction is open at its end, and `position` is where that end stands in
the publisher's WAL. RESTART says that reading can begin here: no transaction is open before it either,
and each relation is described again before its first change.

Source for what a block must survive: PostgreSQL's WAL records, xlogreader.c, ValidXLogRecord().
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED

MESSAGES = 0x4D  # M
POSITION = 0x50  # P
INDEX = 0x49  # I

BOUNDARY = 1
RESTART = 2

MAGIC = b"PGCHLOG\n"
VERSION = 1

_HEADER = struct.Struct(">8sIQQ")  # and the checksum
HEADER_SIZE = _HEADER.size + 4
_BLOCK = struct.Struct(">BBIQIII")  # the last is the body's checksum; and the head's
BLOCK_SIZE = _BLOCK.size + 4
_PLACE = struct.Struct(">QQ")
_ENTRY = struct.Struct(">QQ")
_TRAILER = struct.Struct(">Q8s")
TRAILER_SIZE = _TRAILER.size
_STATE = struct.Struct(">QQQQ")  # and the checksum
STATE_SIZE = _STATE.size + 4


class TornBlock(Exception):
    """The bytes are not a whole header, block or trailer: the file ends here, or is damaged here.

    Only this package sees it: files.py, which knows file and offset, raises ChangeLogDamaged instead.
    """


@dataclass(slots=True)
class Block:
    """`position` is 0 unless a transaction ends in it; `changes` counts rows, truncates and messages."""

    kind: int
    flags: int
    position: Lsn
    transactions: int
    changes: int
    body: bytes

    @property
    def boundary(self) -> bool:
        return bool(self.flags & BOUNDARY)

    @property
    def restart(self) -> bool:
        return bool(self.flags & RESTART)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return BLOCK_SIZE + len(self.body)


class BlockHead(NamedTuple):
    """A block without its body, `length` bytes; `checksum` is the body's, still to be compared."""

    kind: int
    flags: int
    length: int
    position: Lsn
    transactions: int
    changes: int
    checksum: int


def encode_header(system_id: int, start: Lsn) -> bytes:
    head = _HEADER.pack(MAGIC, VERSION, system_id, start)
    return head + zlib.crc32(head).to_bytes(4, "big")


def decode_header(data: bytes) -> tuple[int, Lsn]:
    """(system identifier, start). Raises TornBlock when the bytes are not a whole header."""
    head = data[: _HEADER.size]
    if len(data) < HEADER_SIZE or zlib.crc32(head) != int.from_bytes(data[_HEADER.size : HEADER_SIZE], "big"):
        raise TornBlock
    magic, version, system_id, start = _HEADER.unpack(head)
    if magic != MAGIC:
        raise TornBlock
    if version != VERSION:
        raise ChangeLogError(
            f"the change log has format {version}, but this program knows only {VERSION}",
            hint="Upgrade the subscriber program: a newer one has written this log.",
            sqlstate=FEATURE_NOT_SUPPORTED,
        )
    return system_id, Lsn(start)


def encode_block(block: Block, segment: Lsn, offset: int) -> bytes:
    """The block as it stands at `offset` of the segment that starts at `segment`."""
    numbers = (block.position, block.transactions, block.changes, zlib.crc32(block.body))
    head = _BLOCK.pack(block.kind, block.flags, len(block.body), *numbers)
    return head + _checksum(head, segment, offset) + block.body


def decode_head(data: bytes, segment: Lsn, offset: int) -> BlockHead:
    """Read BLOCK_SIZE bytes from `offset` of a segment. Raises TornBlock when no block was written there."""
    packed = data[: _BLOCK.size]
    if len(data) != BLOCK_SIZE or data[_BLOCK.size :] != _checksum(packed, segment, offset):
        raise TornBlock
    kind, flags, length, position, transactions, changes, checksum = _BLOCK.unpack(packed)
    return BlockHead(kind, flags, length, Lsn(position), transactions, changes, checksum)


def decode_body(head: BlockHead, body: bytes) -> Block:
    """Put a block together again. Raises TornBlock when the body is not the one that was written."""
    if len(body) != head.length or zlib.crc32(body) != head.checksum:
        raise TornBlock
    return Block(head.kind, head.flags, head.position, head.transactions, head.changes, body)


def _checksum(head: bytes, segment: Lsn, offset: int) -> bytes:
    return zlib.crc32(head, zlib.crc32(_PLACE.pack(segment, offset))).to_bytes(4, "big")


def split_messages(body: bytes) -> Iterator[bytes]:
    """The messages of a MESSAGES body. Raises TornBlock when the lengths do not add up."""
    pos, end = 0, len(body)
    while pos < end:
        length = int.from_bytes(body[pos : pos + 4], "big")
        pos += 4 + length
        if pos > end or not length:
            raise TornBlock
        yield body[pos - length : pos]


def encode_index(entries: list[tuple[int, Lsn]]) -> bytes:
    """The body of an INDEX block: (offset of a RESTART block, position before it)."""
    return b"".join([_ENTRY.pack(offset, position) for offset, position in entries])


def decode_index(body: bytes) -> list[tuple[int, Lsn]]:
    """Raises TornBlock for anything else than what encode_index() gives."""
    if len(body) % _ENTRY.size:
        raise TornBlock
    return [(offset, Lsn(position)) for offset, position in _ENTRY.iter_unpack(body)]


def encode_trailer(index_offset: int) -> bytes:
    return _TRAILER.pack(index_offset, MAGIC)


def decode_trailer(data: bytes) -> int:
    """Offset of the index block. Raises TornBlock when a segment does not end so."""
    if len(data) != TRAILER_SIZE or not data.endswith(MAGIC):
        raise TornBlock
    offset: int = _TRAILER.unpack(data)[0]
    return offset


@dataclass(frozen=True, slots=True)
class Durable:
    """How far the open segment may be read: everything before `offset` is on disk and ends a transaction."""

    segment: Lsn  # where the open segment starts
    offset: int
    position: Lsn
    changes: int  # in the segment so far

    def encode(self) -> bytes:
        packed = _STATE.pack(self.segment, self.offset, self.position, self.changes)
        return packed + zlib.crc32(packed).to_bytes(4, "big")

    @classmethod
    def decode(cls, data: bytes) -> Durable:
        """Raises TornBlock for anything else than what encode() gives."""
        if len(data) != STATE_SIZE or zlib.crc32(data[: _STATE.size]) != int.from_bytes(data[_STATE.size :], "big"):
            raise TornBlock
        segment, offset, position, changes = _STATE.unpack_from(data)
        return cls(Lsn(segment), offset, Lsn(position), changes)
