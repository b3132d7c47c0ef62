"""Reading the change log: by LSN range, in pieces that can be read independently, from any process.

    log = ChangeLog(directory)
    for piece in log.pieces(start, log.end()):      # start < committed <= end
        for change in read(log.directory, piece):
            …

A range (start, end] has the transactions whose commit record starts at or after `start` and before `end`; every
position that a transaction ends at, and every one that a server gives as its own, falls between two.

What is read is what is durable: sealed segments, and the open one as far as the file "durable" says. A
segment may be sealed, and so get another name, at any time; it is then looked for again. Removed by
retention it is gone, and that is an error: a reader that has fallen behind must hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from subscriber.errors import ChangeLogError, ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import (
    Begin,
    Delete,
    Insert,
    LogicalMessage,
    Relation,
    Truncate,
    Type,
    Update,
)
from subscriber.spool.logfiles import (
    DURABLE,
    Identity,
    SegmentFile,
    SegmentReader,
    open_path,
    segment_files,
)
from subscriber.spool.segment import (
    BLOCK_SIZE,
    BOUNDARY,
    HEADER_SIZE,
    INDEX,
    RESTART,
    STATE_SIZE,
    BlockHead,
    Durable,
    TornBlock,
    split_messages,
)

PIECE = 8 * 1024 * 1024  # bytes
_COMMIT = 0x43  # C
LOOKS = 10  # at a directory that seems to lack a segment, which may only be getting its other name


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one segment that can be read by itself, for the transactions of (after, upto] in it."""

    segment: Lsn  # where the segment starts
    offset: int
    stop: int
    after: Lsn
    upto: Lsn

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.offset


class Reach(NamedTuple):
    """A position and what there is to read up to it. `size` is in bytes."""

    position: Lsn
    changes: int
    size: int


@dataclass(slots=True)
class Change:
    """One change of a committed transaction. `number` counts from 0 within the transaction."""

    begin: Begin
    number: int
    relations: tuple[Relation, ...]  # one for a row, all of a truncate's, none for a message
    message: Insert | Update | Delete | Truncate | LogicalMessage


Scanned: TypeAlias = tuple[Begin, int, tuple[Relation, ...], bytes]


class ChangeLog:
    """A change log as it is on disk. Blocking; keeps nothing open between two calls."""

    def __init__(self, directory: Path | str) -> None:
        """Raises ChangeLogError where there is no log."""
        self.directory = Path(directory)
        identity = Identity.read(self.directory) if self.directory.is_dir() else None
        if identity is None:
            raise ChangeLogError(
                f'there is no change log in "{self.directory}"',
                hint="Let `subscriber archive` write one there.",
                sqlstate="58P01",
            )
        self.identity = identity

    def files(self) -> list[SegmentFile]:
        """All segments, oldest first."""
        return self._state()[0]

    def start(self) -> Lsn:
        """Where the oldest segment starts that retention has left."""
        files = self.files()
        return files[0].start if files else self.identity.start

    def end(self) -> Lsn:
        """The log has everything before this position, durably."""
        return self._state()[1].position

    def _state(self) -> tuple[list[SegmentFile], Durable]:
        """The segments, and how far they may be read; listed again if a segment was renamed meanwhile."""
        for _ in range(LOOKS):
            durable = self._told()
            try:
                files = segment_files(self.directory)
            except ChangeLogError as error:
                gap = error
                continue
            if durable is None or not files:
                return files, self._look(files)
            last = files[-1]
            if last.start >= durable.segment if last.end is None else last.end >= durable.position:
                return files, durable
            gap = ChangeLogError(f"the newest segments of the change log, after {last.start}, are missing")
        raise gap

    def _told(self) -> Durable | None:
        """What the file "durable" says; None if it says nothing."""
        try:
            return Durable.decode((self.directory / DURABLE).read_bytes()[:STATE_SIZE])
        except (FileNotFoundError, TornBlock):
            return None

    def _look(self, files: list[SegmentFile]) -> Durable:
        """What the file "durable" should say: from the blocks of the open segment themselves."""
        if not files or files[-1].end is not None:
            end = files[-1].end or self.identity.start if files else self.identity.start
            return Durable(end, HEADER_SIZE, end, 0)
        file = files[-1]
        offset, position, changes = HEADER_SIZE, file.start, 0
        found = Durable(file.start, offset, position, changes)
        try:
            with SegmentReader(file.path) as reader:
                while (block := reader.block(offset)).kind != INDEX:
                    offset += block.size
                    changes += block.changes
                    if block.boundary:
                        found = Durable(file.start, offset, block.position, changes)
        except (TornBlock, FileNotFoundError):
            pass
        return found

    # --- ranges ---------------------------------------------------------------------------------

    def check(self, start: Lsn) -> None:
        """Raises ChangeLogError when something after `start` has been removed, or was never there."""
        first = self.start()
        if start < first:
            raise ChangeLogError(
                f"the change log has nothing before {first}",
                detail=f"Changes after {start} were asked for.",
                hint="Keep more of the log (--keep-size, --keep-age), or begin with a new copy of the tables.",
                sqlstate="58P01",
            )

    def pieces(self, start: Lsn, end: Lsn, *, size: int = PIECE) -> list[Piece]:
        """What to read for the transactions of (start, end], in order; pieces of about `size` bytes.

        `end` must not be after end(). Raises ChangeLogError when the log does not reach back to `start`.
        """
        self.check(start)
        files, durable = self._state()
        pieces: list[Piece] = []
        for file in files:
            if file.start < end and (file.end is None or file.end > start):
                places, stop = self._places(file, durable)
                pieces += _cut(file.start, places, stop, start, end, size)
        return pieces

    def _places(self, file: SegmentFile, durable: Durable) -> tuple[list[tuple[int, Lsn]], int]:
        """Where reading can begin in a segment, and where it ends."""
        with _opened(self.directory, file.start) as reader:
            stop = _stop(reader, file, durable)
            try:
                return [place for place in reader.index() if place[0] < stop], stop
            except TornBlock:
                heads = self._heads(reader, HEADER_SIZE, file.start, stop)
                return [(offset, before) for offset, before, head in heads if head.flags & RESTART], stop

    def reach(self, start: Lsn, *, changes: int | None = None, size: int | None = None) -> Reach:
        """How far a reader gets from `start` with so many changes, or bytes: to the first end of a transaction by which
        they have come, or to end().

        Positions are those of blocks, which hold up to some hundred kilobytes of small transactions. One in which
        `start` lies counts as a whole.
        """
        files, durable = self._state()
        found = Reach(durable.position, 0, 0)
        for file in files:
            if file.end is not None and file.end <= start:
                continue
            with _opened(self.directory, file.start) as reader:
                stop = _stop(reader, file, durable)
                begin = self._nearest(reader, file, start)
                for _, before, head in self._heads(reader, *begin, stop):
                    if before < start and head.position <= start:
                        continue
                    found = Reach(durable.position, found.changes + head.changes, found.size + head.length)
                    enough = (changes is not None and found.changes >= changes) or (
                        size is not None and found.size >= size
                    )
                    if enough and head.flags & BOUNDARY:
                        return found._replace(position=head.position)
        return found

    def relation(self, table: str) -> Relation | None:
        """The newest description of schema.name; None if the log has no change of it. Looks from the end backwards."""
        for piece in reversed(self.pieces(self.start(), self.end(), size=1)):
            found: list[Relation] = []

            def remember(relation: Relation, found: list[Relation] = found) -> bool:
                if f"{relation.schema}.{relation.name}" == table:
                    found.append(relation)
                return False

            for _ in read(self.directory, piece, wanted=remember):
                pass
            if found:
                return found[-1]
        return None

    def _heads(
        self, reader: SegmentReader, offset: int, before: Lsn, stop: int
    ) -> Iterator[tuple[int, Lsn, BlockHead]]:
        """(offset, position before it, head) of each block from `offset` to `stop`."""
        while offset < stop:
            try:
                head = reader.head(offset)
            except TornBlock:
                raise damaged(self.directory, reader.start, offset) from None
            yield offset, before, head
            offset += BLOCK_SIZE + head.length
            if head.flags & BOUNDARY:
                before = head.position

    def _nearest(self, reader: SegmentReader, file: SegmentFile, start: Lsn) -> tuple[int, Lsn]:
        """The last place at or before `start` where reading can begin."""
        try:
            places = [place for place in reader.index() if place[1] <= start]
        except TornBlock:
            places = []
        return places[-1] if places else (HEADER_SIZE, file.start)


def _stop(reader: SegmentReader, file: SegmentFile, durable: Durable) -> int:
    """The offset up to which a segment may be read."""
    if file.end is not None:
        return reader.index_offset()
    return durable.offset if file.start == durable.segment else HEADER_SIZE


def _cut(segment: Lsn, places: list[tuple[int, Lsn]], stop: int, start: Lsn, end: Lsn, size: int) -> list[Piece]:
    """Cut a segment at its places into pieces that together hold (start, end]."""
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


def _opened(directory: Path, segment: Lsn) -> SegmentReader:
    """The segment that starts there, under whichever of its two names it has at the moment."""
    for _ in range(3):
        sealed = next(directory.glob(f"{segment:016X}-*.changes"), None)
        try:
            return SegmentReader(sealed or open_path(directory, segment))
        except FileNotFoundError:
            continue
        except TornBlock:
            raise damaged(directory, segment, 0) from None
    raise ChangeLogError(
        f"the segment of the change log that starts at {segment} is not there any more",
        hint="Retention has removed it: keep more of the log (--keep-size, --keep-age).",
        sqlstate="58P01",
    )


def damaged(directory: Path, segment: Lsn, offset: int) -> ChangeLogError:
    """The error for bytes that are not what was written."""
    return ChangeLogError(
        f"the change log is damaged at offset {offset} of the segment that starts at {segment}",
        detail=f'The checksum of a block in "{directory}" does not fit.',
        hint="Restore the segment from a copy; or begin a new log, and with a new copy of the tables.",
    )


def read(directory: Path, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True) -> Iterator[Change]:
    """The changes of a piece's transactions in commit order; rows only of relations that are `wanted`.

    Raises ChangeLogError for damage; what came before it has been given out, as whole changes.
    """
    decode = Decoder().decode
    with _readable(piece):
        for begin, number, relations, payload in scan(directory, piece, wanted=wanted):
            message = decode(payload)
            assert isinstance(message, Insert | Update | Delete | Truncate | LogicalMessage)
            yield Change(begin, number, relations, message)


def scan(directory: Path, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True) -> Iterator[Scanned]:
    """As read(), for readers that look into few changes: (begin, number, relations, payload), with rows as they came.

    They have not been checked. Row after row of one relation has the very same tuple of it.
    """
    relations: dict[int, Relation] = {}
    rows: dict[int, tuple[Relation]] = {}  # of relations that are wanted
    decode = Decoder().decode
    begin: Begin | None = None
    number = 0
    with _readable(piece):
        for payload in _messages(directory, piece):
            if payload[0] in b"IUD":
                number += 1
                relation = rows.get(int.from_bytes(payload[1:5], "big"))
                if begin is not None and relation is not None:
                    yield begin, number - 1, relation, payload
                continue
            if payload[0] == _COMMIT:
                begin = None
                continue
            message = decode(payload)
            match message:
                case Begin():
                    begin = message if piece.after <= message.final_lsn < piece.upto else None
                    number = 0
                    if message.final_lsn >= piece.upto:
                        return
                case Relation():
                    relations[message.relid] = message
                    rows.pop(message.relid, None)
                    if wanted(message):
                        rows[message.relid] = (message,)
                case Truncate():
                    if begin is not None:
                        yield begin, number, tuple(relations[relid] for relid in message.relids), payload
                    number += 1
                case LogicalMessage():
                    if begin is not None:
                        yield begin, number, (), payload
                    number += 1
                case Type():
                    pass


@contextmanager
def _readable(piece: Piece) -> Iterator[None]:
    try:
        yield
    except (ProtocolError, KeyError) as error:
        raise ChangeLogError(
            f"the change log has a message in the segment that starts at {piece.segment} that cannot be read",
            detail=str(error),
        ) from error


def _messages(directory: Path, piece: Piece) -> Iterator[bytes]:
    with _opened(directory, piece.segment) as reader:
        offset = piece.offset
        while offset < piece.stop:
            try:
                block = reader.block(offset)
            except TornBlock:
                raise damaged(directory, piece.segment, offset) from None
            offset += block.size
            yield from split_messages(block.body)
