"""The format of a segment of the change log: a header, then blocks. This module does no I/O.

Purpose. A segment stores transactions in blocks. A reader can start at each RESTART block. It detects damaged blocks.
All numbers are big-endian, as in the replication protocol.

    segment   header, block, block, …; a sealed segment ends with an index block and a trailer of 16 bytes
    header    magic, format version, the publisher's system identifier, start of the segment, checksum
    block     kind, flags, length of the body, position, transactions, changes, two checksums; the body
    body      of MESSAGES: pgoutput messages as received, each after its length in four bytes
              of POSITION: empty; the log has all transactions before the position
              of INDEX: (offset, position before it) of each RESTART block
    trailer   offset of the index block, magic

Invariants.

- BOUNDARY on a block means that no transaction is open at its end. `position` is this end in the publisher's WAL.
- RESTART on a block means that a reader can start there. No transaction is open before the block, and each relation is
  described again before its first change.
- CONTINUES on a block means that a reader can start there if it knows the open transaction: its BEGIN, which is the
  first message of the block after the last boundary, and the number of its changes so far. Relations are described
  again.
- A block has two CRC-32 checksums. The first covers the body, so that a reader can trust the head without reading the
  body. The second covers the head, the segment's start and the block's offset.

Failure cases.

- An intact block is in the wrong place: its second checksum fails.
- The trailer is damaged: it has no checksum and needs none, so all segments of format 1 are equally protected. A reader
  accepts its offset if an index block was written for this offset and ends at the trailer. The position of the index
  block must be the end in the file name (files.py:SegmentReader.index).

Source for the damage that a block must reveal: PostgreSQL's WAL records, ValidXLogRecord() in xlogreader.c.
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
CONTINUES = 4

MAGIC = b"PGCHLOG\n"
VERSION = 1

_HEADER = struct.Struct(">8sIQQ")  # then the checksum
HEADER_SIZE = _HEADER.size + 4
_BLOCK = struct.Struct(">BBIQIII")  # the last number is the body's checksum; then the head's checksum
BLOCK_SIZE = _BLOCK.size + 4
_PLACE = struct.Struct(">QQ")
_ENTRY = struct.Struct(">QQ")
_TRAILER = struct.Struct(">Q8s")
TRAILER_SIZE = _TRAILER.size
_STATE = struct.Struct(">QQQQ")  # then the checksum
STATE_SIZE = _STATE.size + 4


class TornBlock(Exception):
    """The bytes are not a whole header, block or trailer: the file ends here, or is damaged here.

    It does not leave this package: files.py and reader.py know the file and the offset, and raise ChangeLogDamaged.
    """


@dataclass(slots=True)
class Block:
    """A block of a segment."""

    kind: int  # MESSAGES, POSITION or INDEX
    flags: int  # BOUNDARY, RESTART, CONTINUES
    position: Lsn  # 0 without BOUNDARY
    transactions: int  # number of transactions that end in the block
    changes: int  # number of rows, truncated tables and logical messages
    body: bytes

    @property
    def boundary(self) -> bool:
        """True if no transaction is open at the end of the block."""
        return bool(self.flags & BOUNDARY)

    @property
    def restart(self) -> bool:
        """True if a reader can start at the block."""
        return bool(self.flags & RESTART)

    @property
    def size(self) -> int:
        """The size of the block in the file, in bytes."""
        return BLOCK_SIZE + len(self.body)


class BlockHead(NamedTuple):
    """A block without its body."""

    kind: int
    flags: int
    length: int  # of the body, in bytes
    position: Lsn
    transactions: int
    changes: int
    checksum: int  # of the body, which decode_body() compares


def encode_header(system_id: int, start: Lsn) -> bytes:
    """Encode the header of the segment that starts at `start`."""
    head = _HEADER.pack(MAGIC, VERSION, system_id, start)
    return head + zlib.crc32(head).to_bytes(4, "big")


def decode_header(data: bytes) -> tuple[int, Lsn]:
    """Return the system identifier and the start position in a header.

    Raises:
        TornBlock: the bytes are not a whole header.
        ChangeLogError: the format is unknown.
    """
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
    """Encode a block for `offset` of the segment that starts at `segment`."""
    numbers = (block.position, block.transactions, block.changes, zlib.crc32(block.body))
    head = _BLOCK.pack(block.kind, block.flags, len(block.body), *numbers)
    return head + _checksum(head, segment, offset) + block.body


def decode_head(data: bytes, segment: Lsn, offset: int) -> BlockHead:
    """Decode the head of a block from the BLOCK_SIZE bytes at `offset` of a segment.

    Raises:
        TornBlock: the bytes are not the head of a block that was written there.
    """
    packed = data[: _BLOCK.size]
    if len(data) != BLOCK_SIZE or data[_BLOCK.size :] != _checksum(packed, segment, offset):
        raise TornBlock
    kind, flags, length, position, transactions, changes, checksum = _BLOCK.unpack(packed)
    return BlockHead(kind, flags, length, Lsn(position), transactions, changes, checksum)


def decode_body(head: BlockHead, body: bytes) -> Block:
    """Return the block with this head and body. Raises TornBlock if the body is damaged."""
    if len(body) != head.length or zlib.crc32(body) != head.checksum:
        raise TornBlock
    return Block(head.kind, head.flags, head.position, head.transactions, head.changes, body)


def _checksum(head: bytes, segment: Lsn, offset: int) -> bytes:
    return zlib.crc32(head, zlib.crc32(_PLACE.pack(segment, offset))).to_bytes(4, "big")


def split_messages(body: bytes) -> Iterator[bytes]:
    """Yield the messages of a MESSAGES body. Raises TornBlock if a length is wrong."""
    pos, end = 0, len(body)
    while pos < end:
        length = int.from_bytes(body[pos : pos + 4], "big")
        pos += 4 + length
        if pos > end or not length:
            raise TornBlock
        yield body[pos - length : pos]


def encode_index(entries: list[tuple[int, Lsn]]) -> bytes:
    """Encode the body of an INDEX block. An entry is the offset of a RESTART block and the position before it."""
    return b"".join([_ENTRY.pack(offset, position) for offset, position in entries])


def decode_index(body: bytes) -> list[tuple[int, Lsn]]:
    """Decode the body of an INDEX block. Raises TornBlock if its length is wrong."""
    if len(body) % _ENTRY.size:
        raise TornBlock
    return [(offset, Lsn(position)) for offset, position in _ENTRY.iter_unpack(body)]


def encode_trailer(index_offset: int) -> bytes:
    """Encode the trailer of a sealed segment."""
    return _TRAILER.pack(index_offset, MAGIC)


def encode_end(places: list[tuple[int, Lsn]], position: Lsn, start: Lsn, offset: int) -> bytes:
    """Encode the index block and the trailer, with which a segment is sealed.

    Args:
        places: the offset of each RESTART block, and the position before it.
        position: the end of the segment.
        start: its start.
        offset: its size so far.
    """
    index = Block(INDEX, BOUNDARY, position, 0, 0, encode_index(places))
    return encode_block(index, start, offset) + encode_trailer(offset)


def decode_trailer(data: bytes) -> int:
    """Return the offset of the index block. Raises TornBlock if the bytes are not a trailer."""
    if len(data) != TRAILER_SIZE or not data.endswith(MAGIC):
        raise TornBlock
    offset: int = _TRAILER.unpack(data)[0]
    return offset


@dataclass(frozen=True, slots=True)
class Durable:
    """The durable end of the open segment: the transactions before `offset` are whole and on disk."""

    segment: Lsn  # start position of the open segment
    offset: int
    position: Lsn  # end of the last transaction before `offset`
    changes: int  # in the segment before `offset`

    def encode(self) -> bytes:
        """Encode the contents of the file "durable"."""
        packed = _STATE.pack(self.segment, self.offset, self.position, self.changes)
        return packed + zlib.crc32(packed).to_bytes(4, "big")

    @classmethod
    def decode(cls, data: bytes) -> Durable:
        """Decode the bytes of encode(). Raises TornBlock if they are damaged."""
        if len(data) != STATE_SIZE or zlib.crc32(data[: _STATE.size]) != int.from_bytes(data[_STATE.size :], "big"):
            raise TornBlock
        segment, offset, position, changes = _STATE.unpack_from(data)
        return cls(Lsn(segment), offset, Lsn(position), changes)
