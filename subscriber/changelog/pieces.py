"""A piece of the change log: a part of one segment that any process can read by itself.

A piece is read from its first block to its last. It begins and ends between transactions. Only a transaction that is
larger than a piece is divided. Each of its pieces has the BEGIN, and the number of the changes before it.

ChangeLog.pieces() returns the pieces of a range, and piece_reader.py reads one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from subscriber.changelog.files import ATTEMPTS, SegmentReader, object_path, open_path
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.segment import BLOCK_SIZE, BOUNDARY, CONTINUES, RESTART, split_messages
from subscriber.changelog.storage import Location
from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin
from subscriber.sqlstate import UNDEFINED_FILE


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one segment that can be read by itself. A reader yields its transactions in (after, upto]."""

    segment: Lsn  # start position of the segment
    offset: int  # of the first block
    stop: int  # offset after the last block
    after: Lsn
    upto: Lsn
    begin: Begin | None = None  # of the transaction that is open before the first block
    number: int = 0  # of its changes before the first block
    is_cut: bool = False  # a transaction is open after the last block

    @property
    def transaction(self) -> Begin | None:
        """The transaction that is open before the first block, if its changes are wanted."""
        return self.begin if self.begin is not None and self.has(self.begin) else None

    def has(self, begin: Begin) -> bool:
        """Return True if the changes of a transaction are wanted."""
        return self.after <= begin.final_lsn < self.upto

    @property
    def size(self) -> int:
        """The size of the part in bytes."""
        return self.stop - self.offset


def cut_segment(segment: Lsn, places: list[tuple[int, Lsn]], stop: int, start: Lsn, end: Lsn, size: int) -> list[Piece]:
    """Cut a segment at its RESTART blocks into pieces that together hold (start, end]."""
    bounds = [*places, (stop, end)]
    pieces: list[Piece] = []
    begin: int | None = None
    for (offset, before), (next_offset, after) in pairwise(bounds):
        if after <= start and next_offset != stop:
            continue
        if before >= end:
            break
        begin = offset if begin is None else begin
        if next_offset - begin >= size or next_offset == stop or after >= end:
            pieces.append(Piece(segment, begin, next_offset, start, end))
            begin = None
    return pieces


def divided_piece(reader: SegmentReader, piece: Piece, size: int) -> Iterator[Piece]:
    """Divide a piece that has a large transaction, at its RESTART and CONTINUES blocks."""
    if piece.size < 2 * size:
        yield piece
        return
    divided = piece
    opened, number = piece.offset, 0  # of the open transaction: its first block, and the number of changes so far
    for offset, _, head in reader.heads(piece.offset, piece.after, piece.stop):
        if head.flags & (RESTART | CONTINUES) and offset - divided.offset >= size:
            is_cut = offset != opened
            yield replace(divided, stop=offset, is_cut=is_cut)
            divided = replace(piece, offset=offset, begin=_begin(reader, opened) if is_cut else None, number=number)
        number += head.changes
        if head.flags & BOUNDARY:
            opened, number = offset + BLOCK_SIZE + head.length, 0
    yield divided


def _begin(reader: SegmentReader, offset: int) -> Begin:
    """Return the BEGIN message with which a block begins."""
    begin = Decoder().decode(next(split_messages(reader.block(offset).body)))
    if not isinstance(begin, Begin):
        raise reader.damage(offset)
    return begin


def open_segment(directory: Location, segment: Lsn, end: Lsn | None = None) -> SegmentReader:
    """Open a segment by its start position, under the name of a sealed or of an open segment."""
    for _ in range(ATTEMPTS):
        with suppress(FileNotFoundError):
            if isinstance(directory, ObjectPath):
                return SegmentReader(object_path(directory, segment), end)
            sealed = next(directory.glob(f"{segment:016X}-*.changes"), None)
            return SegmentReader(sealed or open_path(directory, segment))
    raise ChangeLogError(
        f'the segment that starts at {segment} is not in the change log in "{directory}" any more',
        detail=f"Changes that were committed after {segment} are missing.",
        hint="Keep more of the log (--keep-size, --keep-age), and make a new copy of the tables for this reader.",
        sqlstate=UNDEFINED_FILE,
    )
