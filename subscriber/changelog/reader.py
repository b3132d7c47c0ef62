"""Reading the change log: by LSN range, in pieces that can be read independently, from any process.

    log = ChangeLog(directory)
    for piece in log.pieces(start, log.end()):      # start < committed <= end
        for change in read(log.directory, piece):
            …

A range (start, end] has the transactions whose commit record starts at or after `start` and before `end`; every
position that a transaction ends at, and every one that a server gives as its own, falls between two.

What is read is what is durable: sealed segments, and the open one as far as the file "durable" says. A
segment may be sealed, and so get another name, at any time; it is then looked for again.

Invariants: a piece is read from its first block to its last, and the last one ends a transaction. All pieces of a range
together have every block of the range. A reader raises ChangeLogError where it cannot read them; it never ends early.

Failure cases, besides those of changelog/files.py:

- Segment renamed while the directory is listed, so that the listing has it twice or not at all: it is listed again.
- Segment removed by retention before it is opened: an error, as changes are missing for this reader.
- Segment sealed or removed while a piece is read: the piece is read to its end from the open descriptor.
- "durable" records more than the files have, as the newest are missing: ChangeLogDamaged.
- "durable" older than the newest sealed segment, after a crash of the machine: the log ends with that segment.
- "durable" lost, and bytes behind the last whole transaction: ChangeLogDamaged, as these may be an unfinished write or
  damage. `subscriber archive` knows from its slot which, and records again how far the log goes.
- Trailer, index or file name of a sealed segment damaged: ChangeLogDamaged; the segment is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from subscriber.changelog.files import (
    ATTEMPTS,
    DURABLE,
    RESTORE,
    Identity,
    Index,
    SegmentFile,
    SegmentReader,
    check_recorded,
    damaged,
    open_path,
    read_durable,
    segment_files,
)
from subscriber.changelog.segment import (
    BOUNDARY,
    HEADER_SIZE,
    RESTART,
    Durable,
    TornBlock,
    split_messages,
)
from subscriber.errors import ChangeLogDamaged, ChangeLogError, ProtocolError
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
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE

PIECE = 8 * 1024 * 1024  # bytes
_COMMIT = 0x43  # C


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
class LoggedChange:
    """One change of a committed transaction. `number` counts from 0 within the transaction."""

    begin: Begin
    number: int
    relations: tuple[Relation, ...]  # one for a row, all of a truncate's, none for a message
    message: Insert | Update | Delete | Truncate | LogicalMessage


Scanned: TypeAlias = tuple[Begin, int, tuple[Relation, ...], bytes]


class ChangeLog:
    """A change log as it is on disk. Blocking; keeps nothing open between two calls."""

    def __init__(self, directory: Path | str) -> None:
        """Open a log for reading.

        Raises:
            ChangeLogDamaged: log.json is damaged.
            ChangeLogError: there is no log, or it cannot be read.
        """
        self.directory = Path(directory)
        identity = Identity.read(self.directory)
        if identity is None:
            raise ChangeLogError(
                f'there is no change log in "{self.directory}"',
                hint="Let `subscriber archive` write one there.",
                sqlstate=UNDEFINED_FILE,
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
        """The segments, and how far they may be read; listed again while a segment may be getting its other name."""
        for _ in range(ATTEMPTS):
            recorded = read_durable(self.directory)
            try:
                files = segment_files(self.directory, self.identity)
                return files, self._durable(files, recorded)
            except ChangeLogDamaged as error:
                damage = error
            except FileNotFoundError as error:
                damage = damaged(f'the change log in "{self.directory}" is not there any more', detail=f"{error}.")
        raise damage

    def _durable(self, files: list[SegmentFile], recorded: Durable | None) -> Durable:
        """How far `files` may be read."""
        last = files[-1] if files else None
        if last is not None and last.end is None:
            if recorded is None:
                return self._unrecorded(last)
            if recorded.segment == last.start:
                return recorded
            end = last.start
        else:
            end = self.identity.start if last is None or last.end is None else last.end
        check_recorded(self.directory, end, recorded)
        return Durable(end, HEADER_SIZE, end, 0)

    def _unrecorded(self, file: SegmentFile) -> Durable:
        """What the file "durable" should say, from the blocks of the open segment."""
        with SegmentReader(file.path) as reader:
            extent = reader.extent()
            if extent.torn is not None:
                error = reader.damage(extent.torn, extent.position)
                error.hint = f"Start `subscriber archive`, which asks its slot whether that is all. If not: {RESTORE}"
                raise error
        return Durable(file.start, extent.offset, extent.position, extent.changes)

    # --- ranges ---------------------------------------------------------------------------------

    def check(self, start: Lsn) -> None:
        """Raises ChangeLogError when something after `start` has been removed, or was never there."""
        self._check_start(self.files(), start)

    def _check_start(self, files: list[SegmentFile], start: Lsn) -> None:
        first = files[0].start if files else self.identity.start
        if start < first:
            raise ChangeLogError(
                f"the change log has nothing before {first}",
                detail=f"Changes after {start} were asked for.",
                hint="Keep more of the log (--keep-size, --keep-age), or begin with a new copy of the tables.",
                sqlstate=UNDEFINED_FILE,
            )

    def pieces(self, start: Lsn, end: Lsn, *, size: int = PIECE) -> list[Piece]:
        """What to read for the transactions of (start, end], in order; pieces of about `size` bytes.

        Raises:
            ChangeLogDamaged: the files cannot be read up to `end`.
            ChangeLogError: the log does not reach back to `start`, or ends before `end`.
        """
        files, durable = self._state()
        self._check_start(files, start)
        if end > max(start, durable.position):
            raise ChangeLogError(
                f"the change log ends at {durable.position}",
                detail=f"Changes up to {end} were asked for.",
                hint="Start `subscriber archive`, which continues the log, and try again.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        pieces: list[Piece] = []
        for file in files:
            if file.start < end and (file.end is None or file.end > start):
                with self._opened(file) as reader:
                    places, stop = _index(reader, file, durable)
                pieces += _cut(file.start, places, stop, start, end, size)
        return pieces

    def _opened(self, file: SegmentFile) -> SegmentReader:
        reader = _opened(self.directory, file.start)
        try:
            reader.check_publisher(self.identity.system_id)
        except BaseException:
            reader.close()
            raise
        return reader

    def reach(self, start: Lsn, *, changes: int | None = None, size: int | None = None) -> Reach:
        """Return the position that a reader reaches from `start` with so many changes or bytes.

        It is the first end of a transaction that completes them, or end().

        Positions are those of blocks, which hold up to some hundred kilobytes of small transactions. One in which
        `start` lies counts as a whole.
        """
        files, durable = self._state()
        found = Reach(durable.position, 0, 0)
        for file in files:
            if file.end is not None and file.end <= start:
                continue
            with self._opened(file) as reader:
                begin, stop = (HEADER_SIZE, file.start), _stop(file, durable)
                if file.end is not None:
                    places, stop = reader.index()
                    begin = max((place for place in places if place[1] <= start), default=begin)
                for _, before, head in reader.heads(*begin, stop):
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

    # --- checking -------------------------------------------------------------------------------

    def damage(self) -> list[ChangeLogDamaged]:
        """Read the whole log, and return the first damage in each of its segments.

        Raises:
            ChangeLogDamaged: the segments do not follow one another, or the newest are missing.
            ChangeLogError: the log cannot be read.
        """
        files, durable = self._state()
        found: list[ChangeLogDamaged] = []
        for file in files:
            try:
                self._verify(file, durable)
            except ChangeLogDamaged as error:
                found.append(error)
            except ChangeLogError:
                if file.start >= self.start():  # otherwise retention has removed it meanwhile
                    raise
        return found

    def _verify(self, file: SegmentFile, durable: Durable) -> None:
        with self._opened(file) as reader:
            index = _index(reader, file, durable)
            position, places = file.start, []
            for offset, block in reader.blocks(HEADER_SIZE, index.stop):
                if block.restart:
                    places.append((offset, position))
                if block.boundary:
                    position = block.position
            if places[1:] != index.places[1:] or position != (file.end or position):
                raise reader.damage(index.stop, file.start, " Its index does not name its blocks.")


def _stop(file: SegmentFile, durable: Durable) -> int:
    """The offset up to which an open segment may be read."""
    return durable.offset if file.start == durable.segment else HEADER_SIZE


def _index(reader: SegmentReader, file: SegmentFile, durable: Durable) -> Index:
    """The index of a segment, also of the open one."""
    if file.end is not None:
        return reader.index()
    stop, position = _stop(file, durable), file.start
    places = []
    for offset, before, head in reader.heads(HEADER_SIZE, file.start, stop):
        if head.flags & RESTART:
            places.append((offset, before))
        position = head.position
    if stop > HEADER_SIZE and position != durable.position:
        raise reader.damage(stop, file.start, f' "{DURABLE}" says that {durable.position} is there.')
    return Index(places, stop)


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
    for _ in range(ATTEMPTS):
        with suppress(FileNotFoundError):
            sealed = next(directory.glob(f"{segment:016X}-*.changes"), None)
            return SegmentReader(sealed or open_path(directory, segment))
    raise ChangeLogError(
        f'the segment that starts at {segment} is not in the change log in "{directory}" any more',
        detail=f"Changes that were committed after {segment} are missing.",
        hint="Keep more of the log (--keep-size, --keep-age), and make a new copy of the tables for this reader.",
        sqlstate=UNDEFINED_FILE,
    )


def read(
    directory: Path, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True
) -> Iterator[LoggedChange]:
    """The changes of a piece's transactions in commit order; rows only of relations that are `wanted`.

    Raises ChangeLogError for damage; what came before it has been given out, as whole changes.
    """
    decode = Decoder().decode
    with _readable(directory, piece):
        for begin, number, relations, payload in scan(directory, piece, wanted=wanted):
            message = decode(payload)
            assert isinstance(message, Insert | Update | Delete | Truncate | LogicalMessage)
            yield LoggedChange(begin, number, relations, message)


def scan(directory: Path, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True) -> Iterator[Scanned]:
    """As read(), for readers that look into few changes: (begin, number, relations, payload), with rows as they came.

    They have not been checked. Row after row of one relation has the very same tuple of it.
    """
    relations: dict[int, Relation] = {}
    rows: dict[int, tuple[Relation]] = {}  # of relations that are wanted
    decode = Decoder().decode
    begin: Begin | None = None
    number = 0
    with _readable(directory, piece):
        for payload in _messages(directory, piece):
            if payload[0] in b"IUD":
                number += 1
                if begin is not None:
                    relid = int.from_bytes(payload[1:5], "big")
                    relation = rows.get(relid)
                    if relation is not None:
                        yield begin, number - 1, relation, payload
                    elif relid not in relations:
                        raise ProtocolError(f"no relation with OID {relid} has been described")
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
def _readable(directory: Path, piece: Piece) -> Iterator[None]:
    try:
        yield
    except (ProtocolError, KeyError) as error:
        raise damaged(
            f'the change log in "{directory}" has a message that cannot be decoded',
            detail=f"It is in the segment that starts at {piece.segment}, between offsets {piece.offset} and "
            f"{piece.stop}: {error}.",
        ) from error


def _messages(directory: Path, piece: Piece) -> Iterator[bytes]:
    with _opened(directory, piece.segment) as reader:
        for offset, block in reader.blocks(piece.offset, piece.stop):
            try:
                yield from split_messages(block.body)
            except TornBlock:
                raise reader.damage(offset) from None
