"""Format of a record in a changes file: length, xid, message. No I/O.

    u32 length of the message · u32 xid of the (sub)transaction · the message without the xid that it has
                                                                  inside a stream block

A record is identified by the offset at which it starts. The next record starts at `end(record)`.

Source: stream_write_change() in worker.c. It leaves the xid out, because PostgreSQL reads its files after the last cut.
A parallel apply worker reads ours while the transaction is still being streamed, and needs the xid to set savepoints.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct(">II")
HEADER_SIZE = HEADER.size

Record = tuple[int, int, bytes]  # offset, xid, message


def end(record: Record) -> int:
    """Return the offset after a record."""
    return record[0] + HEADER_SIZE + len(record[2])


def first(data: bytes) -> tuple[int, int]:
    """Return message length and xid of the first record of `data`; zeros if `data` is shorter than a header."""
    return HEADER.unpack_from(data) if len(data) >= HEADER_SIZE else (0, 0)


def split(data: bytes, offset: int) -> list[Record]:
    """Split `data`, read at `offset` of its file, into whole records. A partial record at the end is left out."""
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
