"""How a change lies in a changes file: its length, who made it, the message. No I/O.

    u32 length of the message · u32 xid of the (sub)transaction · the message without the xid that it has
                                                                  inside a stream block

A record is named by the offset at which it starts; the next one starts at `end(record)`. Source:
stream_write_change() in worker.c, which leaves the xid out: its files are read when nothing can be cut
from them any more, ours also while the transaction is under way, by somebody who sets savepoints.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct(">II")
HEADER_SIZE = HEADER.size

Record = tuple[int, int, bytes]  # offset, xid, message


def end(record: Record) -> int:
    """The offset behind a record."""
    return record[0] + HEADER_SIZE + len(record[2])


def first(data: bytes) -> tuple[int, int]:
    """Length of the message, and xid, of the record at the front of `data`; 0 where it has less than a header."""
    return HEADER.unpack_from(data) if len(data) >= HEADER_SIZE else (0, 0)


def split(data: bytes, offset: int) -> list[Record]:
    """The whole records at the front of `data`, which lies at `offset` in its file; a rest is left out."""
    records: list[Record] = []
    header = HEADER.unpack_from
    at, last = 0, len(data) - HEADER_SIZE
    while at <= last:
        length, xid = header(data, at)
        start = at + HEADER_SIZE
        stop = start + length
        if stop > len(data):
            break
        records.append((offset + at, xid, data[start:stop]))
        at = stop
    return records
