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


def size_of_first(data: bytes) -> int:
    """The bytes that the record at the front of `data` takes; `data` may hold less than all of them.

    At least the size of a header, which is what it takes to know more.
    """
    return HEADER_SIZE + (HEADER.unpack_from(data)[0] if len(data) >= HEADER_SIZE else 0)


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
