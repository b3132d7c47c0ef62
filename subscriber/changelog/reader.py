"""ChangeLog reads a range of LSNs from the change log, in pieces that any process can read independently.

    log = ChangeLog(directory)
    for piece in log.pieces(start, log.end()):      # start < committed <= end
        for change in read(log.directory, piece):
            …

A range (start, end] has the transactions whose commit record starts at or after `start` and before `end`. The end of a
transaction and the current position of a server always lie between two transactions.

Invariants.

- Readers see durable transactions only: sealed segments, and the open one up to the offset in the file "durable".
- A segment is renamed when it is sealed, which can happen at any time. The reader then searches for the other name.
- A piece is read from its first block to its last. All pieces of a range together have all blocks of the range. A
  reader raises ChangeLogError if it cannot read them, and does not end early.
- A piece begins and ends between transactions. Only a transaction that is larger than a piece is divided. Each of its
  pieces has the BEGIN, and the number of the changes before it.

Failure cases, in addition to those of changelog/files.py.

- Segment renamed while the directory is listed, so that the list has it twice or not at all: the directory is listed
  again.
- Segment removed by retention before it is opened: ChangeLogError, because changes are missing for this reader.
- Segment sealed or removed while a piece is read: the piece is read to its end from the open descriptor.
- "durable" records more than the files have, because the newest are missing: ChangeLogDamaged.
- "durable" is older than the newest sealed segment, after a crash of the machine: the log ends with that segment.
- "durable" lost, and the open segment has bytes after the last whole transaction: ChangeLogDamaged. The bytes may be an
  unfinished write or damage. `subscriber archive` decides that by the position of its slot, and writes "durable" again.
- Trailer, index or file name of a sealed segment damaged: ChangeLogDamaged. The segment is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
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
    object_path,
    open_path,
    read_durable,
    segment_files,
)
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.row_columns import FoundRows, GatheredRows, Transaction, find_rows, gather_columns
from subscriber.changelog.schema_history import SchemaHistory
from subscriber.changelog.segment import (
    BLOCK_SIZE,
    BOUNDARY,
    CONTINUES,
    HEADER_SIZE,
    RESTART,
    Durable,
    TornBlock,
    split_messages,
)
from subscriber.changelog.storage import Location, for_each, location
from subscriber.display import shell_word
from subscriber.errors import ChangeLogDamaged, ChangeLogError, ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Relation,
    Truncate,
    Type,
    Update,
)
from subscriber.redaction import redact
from subscriber.remedy import Remedy
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE
from subscriber.timestamps import to_unix

PIECE = 8 * 1024 * 1024  # bytes
BODY = 1024 * 1024  # bytes of messages whose rows a reader gathers together
_COMMIT = 0x43  # C
_TRUNCATE = 0x54  # T
_CHANGES = b"IUDM"


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


class Reach(NamedTuple):
    """A position, and the changes and bytes that a reader reads before it."""

    position: Lsn
    changes: int
    size: int

    def has(self, changes: int | None, size: int | None) -> bool:
        """Return True if one of the limits is reached. None: no limit."""
        return (changes is not None and self.changes >= changes) or (size is not None and self.size >= size)

    def exceeds(self, changes: int | None, size: int | None) -> bool:
        """Return True if one of the limits is exceeded. None: no limit."""
        return (changes is not None and self.changes > changes) or (size is not None and self.size > size)


@dataclass(slots=True)
class LoggedChange:
    """One change of a committed transaction."""

    begin: Begin
    number: int  # position of the change in its transaction, from 0; a truncate has one for each of its tables
    relations: tuple[Relation, ...]  # one for a row, all tables of a TRUNCATE, none for a logical message
    message: Insert | Update | Delete | Truncate | LogicalMessage


Scanned: TypeAlias = tuple[Begin, int, tuple[Relation, ...], bytes]


@dataclass(frozen=True, slots=True)
class LoggedRows:
    """Rows of a piece, with their values in `body`."""

    directory: Location
    piece: Piece
    body: bytes
    found: FoundRows

    def payload(self, start: int) -> bytes:
        """Return the message that starts at an offset of the body."""
        return self.body[start : start + int.from_bytes(self.body[start - 4 : start], "big")]

    def gather(self, kind: int, width: int, sources: Sequence[int], fills: Sequence[bytes | None]) -> GatheredRows:
        """Return the values of the rows of a kind. Args are those of gather_columns().

        Raises:
            ChangeLogDamaged: a row is damaged.
        """
        with _readable(self.directory, self.piece):
            found, wanted = self.found, list(sources)
            rows = gather_columns(self.body, found.starts, found.kinds, kind, width, wanted, list(fills))
        return GatheredRows(*rows)


class ChangeLog:
    """A change log. Methods block, and keep no file open between two calls.

    Attributes:
        directory: the directory of the log, or its path in an object store.
        identity: the contents of log.json.
    """

    def __init__(self, directory: Location | str) -> None:
        """Open a log for reading.

        Args:
            directory: the directory of the log, or its URL in an object store.

        Raises:
            StatementError: storage of this kind is not supported.
            ChangeLogDamaged: log.json is damaged.
            ChangeLogError: there is no log, or it cannot be read.
        """
        self.directory = location(directory)
        identity = Identity.read(self.directory)
        if identity is None:
            raise ChangeLogError(
                f'there is no change log in "{self.directory}"',
                hint=Remedy(
                    "correct the directory.",
                    alternative=Remedy(
                        "write a log there: subscriber archive --source DSN --publication NAME"
                        f" --directory {shell_word(redact(str(self.directory)))}"
                    ),
                ),
                sqlstate=UNDEFINED_FILE,
            )
        self.identity = identity

    def files(self) -> list[SegmentFile]:
        """Return all segments, oldest first.

        Raises:
            ChangeLogDamaged: segments are missing or damaged.
            ChangeLogError: the log cannot be read.
        """
        return self._state()[0]

    def start(self) -> Lsn:
        """Return the start of the oldest segment that retention has left. Raises as files()."""
        files = self.files()
        return files[0].start if files else self.identity.start

    def end(self) -> Lsn:
        """Return the position before which the log has all transactions on disk. Raises as files()."""
        return self._state()[1].position

    def _state(self) -> tuple[list[SegmentFile], Durable]:
        """Return the segments, and the durable end of the open one. Retries, because a segment may be renamed."""
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
        """Return the durable end of `files`, and check it against the file "durable"."""
        last = files[-1] if files else None
        if last is not None and last.end is None:
            if recorded is None:
                return self._unrecorded(last)
            if recorded.segment == last.start:
                return recorded
            end = last.start
        else:
            end = self.identity.start if last is None or last.end is None else last.end
            if recorded is not None and (recorded.segment, recorded.offset) == (end, HEADER_SIZE):
                return recorded  # in an object store: there are no changes after the last segment
        check_recorded(self.directory, end, recorded)
        return Durable(end, HEADER_SIZE, end, 0)

    def _unrecorded(self, file: SegmentFile) -> Durable:
        """Return the durable end from the blocks of the open segment, in place of a missing file "durable"."""
        with SegmentReader(file.path) as reader:
            extent = reader.extent()
            if extent.torn is not None:
                error = reader.damage(extent.torn, extent.position)
                error.hint = f"Start `subscriber archive`, which asks its slot whether that is all. If not: {RESTORE}"
                raise error
        return Durable(file.start, extent.offset, extent.position, extent.changes)

    def schema(self) -> SchemaHistory:
        """Return what each table was, and from when on. Empty if an earlier version of the archiver wrote the log.

        Raises:
            ChangeLogDamaged: the schema history is damaged.
            ChangeLogError: it cannot be read.
        """
        return SchemaHistory.read(self.directory)

    # --- ranges ---------------------------------------------------------------------------------

    def check(self, start: Lsn) -> None:
        """Raise ChangeLogError if the log does not have all changes after `start`."""
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
        """Return the pieces that have the transactions of (start, end], in order.

        Args:
            start: the reader has everything before this position.
            end: at most end().
            size: bytes of a piece, approximately.

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

        def cut(file: SegmentFile) -> list[Piece]:
            with self._opened(file) as reader:
                places, stop = _index(reader, file, durable)
                pieces = _cut(file.start, places, stop, start, end, size)
                return [part for piece in pieces for part in _divided(reader, piece, size)]

        needed = [file for file in files if file.start < end and (file.end is None or file.end > start)]
        return [piece for pieces in for_each(self.directory, cut, needed) for piece in pieces]

    def _opened(self, file: SegmentFile) -> SegmentReader:
        reader = _opened(self.directory, file.start, file.end)
        try:
            reader.check_publisher(self.identity.system_id)
        except BaseException:
            reader.close()
            raise
        return reader

    def reach(self, start: Lsn, *, changes: int | None = None, size: int | None = None, exceed: bool = True) -> Reach:
        """Return the position that a reader reaches from `start` with this number of changes or bytes.

        It is the end of the transaction with which one of the limits is reached, or end().

        Args:
            start: the reader has everything before this position.
            changes: number of changes. None: no limit.
            size: bytes. None: no limit.
            exceed: False to end before a transaction that exceeds a limit, unless it is the first one.

        Raises:
            ChangeLogDamaged: the files cannot be read.
            ChangeLogError: the log cannot be read.
        """
        files, durable = self._state()
        found = Reach(durable.position, 0, 0)
        last = Reach(start, 0, 0)  # the end of the last transaction
        for file in files:
            if file.end is not None and file.end <= start:
                continue
            with self._opened(file) as reader:
                begin, stop = (HEADER_SIZE, file.start), _stop(file, durable)
                if file.end is not None:
                    places, stop = reader.index()
                    begin = max((place for place in places if place[1] <= start), default=begin)
                for offset, before, head in reader.heads(*begin, stop):
                    if before < start and head.position <= start:
                        continue
                    total = Reach(durable.position, found.changes + head.changes, found.size + head.length)
                    is_end = bool(head.flags & BOUNDARY)
                    if is_end and (before < start or total.has(changes, size)):
                        skipped = 0, 0  # changes and bytes of transactions that end before `start`
                        for end, number, length in _ends(reader, offset, offset + BLOCK_SIZE + head.length):
                            if end <= start:
                                skipped = number, length
                                continue
                            changed, read_size = number - skipped[0], length - skipped[1]
                            reached = Reach(end, found.changes + changed, found.size + read_size)
                            if reached.has(changes, size):
                                is_over = not exceed and last.changes and reached.exceeds(changes, size)
                                return last if is_over else reached
                            last = reached
                        total = Reach(durable.position, total.changes - skipped[0], total.size - skipped[1])
                    if is_end:
                        last = total._replace(position=head.position)
                    found = total
        return found

    def relation(self, table: str) -> Relation | None:
        """Return the newest description of a table. None: the log has no change of this table.

        Searches from the end of the log backwards, and reads the whole log in the worst case.

        Args:
            table: `schema.name`.

        Raises:
            ChangeLogError: the log cannot be read.
        """
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

    def damage(self, on_segment: Callable[[int, int], None] = lambda _done, _total: None) -> list[ChangeLogDamaged]:
        """Read the whole log, and return the first damage in each segment and in the schema history.

        Args:
            on_segment: called before each segment, with the number of those that were read, and of all.

        Raises:
            ChangeLogDamaged: the segments do not follow one another, or the newest are missing.
            ChangeLogError: the log cannot be read.
        """
        files, durable = self._state()
        found: list[ChangeLogDamaged] = []
        for number, file in enumerate(files):
            on_segment(number, len(files))
            try:
                self._verify(file, durable)
            except ChangeLogDamaged as error:
                found.append(error)
            except ChangeLogError:
                if file.start >= self.start():  # otherwise retention has removed the segment
                    raise
        try:
            self.schema()
        except ChangeLogDamaged as error:
            found.append(error)
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


def _ends(reader: SegmentReader, offset: int, stop: int) -> Iterator[tuple[Lsn, int, int]]:
    """Yield the end of each transaction in a block, and the changes and bytes of the block up to there."""
    decode = Decoder().decode
    changes = size = 0
    for _, block in reader.blocks(offset, stop):
        for payload in split_messages(block.body):
            size += len(payload) + 4
            if payload[0] == _TRUNCATE:
                message = decode(payload)
                assert isinstance(message, Truncate)
                changes += len(message.relids)
            elif payload[0] in _CHANGES:
                changes += 1
            elif payload[0] == _COMMIT:
                message = decode(payload)
                assert isinstance(message, Commit)
                yield message.end_lsn, changes, size


def _stop(file: SegmentFile, durable: Durable) -> int:
    """Return the offset up to which the blocks of an open segment are durable."""
    return durable.offset if file.start == durable.segment else HEADER_SIZE


def _index(reader: SegmentReader, file: SegmentFile, durable: Durable) -> Index:
    """Return the index of a sealed segment, or build that of the open one from its block heads."""
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


def _divided(reader: SegmentReader, piece: Piece, size: int) -> Iterator[Piece]:
    """Divide a piece that has a large transaction, at its RESTART and CONTINUES blocks."""
    if piece.size < 2 * size:
        yield piece
        return
    found = piece
    opened, number = piece.offset, 0  # of the open transaction: its first block, and the number of changes so far
    for offset, _, head in reader.heads(piece.offset, piece.after, piece.stop):
        if head.flags & (RESTART | CONTINUES) and offset - found.offset >= size:
            is_cut = offset != opened
            yield replace(found, stop=offset, is_cut=is_cut)
            found = replace(piece, offset=offset, begin=_begin(reader, opened) if is_cut else None, number=number)
        number += head.changes
        if head.flags & BOUNDARY:
            opened, number = offset + BLOCK_SIZE + head.length, 0
    yield found


def _begin(reader: SegmentReader, offset: int) -> Begin:
    """Return the BEGIN message with which a block begins."""
    begin = Decoder().decode(next(split_messages(reader.block(offset).body)))
    if not isinstance(begin, Begin):
        raise reader.damage(offset)
    return begin


def _opened(directory: Location, segment: Lsn, end: Lsn | None = None) -> SegmentReader:
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


def read(
    directory: Location, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True
) -> Iterator[LoggedChange]:
    """Yield the changes of a piece's transactions in commit order.

    Args:
        directory: the directory of the log.
        piece: from ChangeLog.pieces().
        wanted: returns False to skip the row changes of a relation. Truncates and logical messages are not skipped.

    Raises:
        ChangeLogDamaged: the piece is damaged. The changes before the damage have been yielded.
        ChangeLogError: the piece cannot be read, or retention has removed its segment.
    """
    decode = Decoder().decode
    with _readable(directory, piece):
        for begin, number, relations, payload in scan(directory, piece, wanted=wanted):
            message = decode(payload)
            assert isinstance(message, Insert | Update | Delete | Truncate | LogicalMessage)
            yield LoggedChange(begin, number, relations, message)


def scan(
    directory: Location, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True
) -> Iterator[Scanned]:
    """Yield (begin, number, relations, payload) of each change, for readers that decode few changes.

    Row changes are not decoded and not checked. Consecutive changes of a relation have the same tuple object, until the
    log describes the relation again. Args and errors are those of read().
    """
    relations: dict[int, Relation] = {}
    rows: dict[int, tuple[Relation]] = {}  # the wanted relations, by OID
    decode = Decoder().decode
    begin, number = piece.transaction, piece.number
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
                    begin = message if piece.has(message) else None
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
                    number += len(message.relids)
                case LogicalMessage():
                    if begin is not None:
                        yield begin, number, (), payload
                    number += 1
                case Type():
                    pass


def scan_rows(
    directory: Location,
    piece: Piece,
    kind_of: Callable[[Relation, Lsn], int],
    *,
    message_kind: int | None = None,
) -> Iterator[LoggedRows]:
    """Yield the row changes and truncates of a piece in parts, for readers that need values by column.

    A truncate is a row of each of its tables, with the operation t, a number of its own and without values. A logical
    message is a row with the operation m. Row changes are not decoded and not checked before LoggedRows.gather().

    Args:
        directory: the directory of the log.
        piece: from ChangeLog.pieces().
        kind_of: returns a number for a relation, as of a commit; negative: its rows are not wanted. Called again when
            the log describes the relation again.
        message_kind: the number of logical messages. None: they are skipped.

    Raises:
        The errors of read().
    """
    search = _RowSearch(piece, kind_of, message_kind)
    with _readable(directory, piece):
        for body in _bodies(directory, piece):
            yield LoggedRows(directory, piece, body, search.rows(body))
            if search.is_over:
                return


class _RowSearch:
    """Finds the rows of a piece, across its bodies."""

    def __init__(self, piece: Piece, kind_of: Callable[[Relation, Lsn], int], message_kind: int | None) -> None:
        self._piece = piece
        self._kind_of = kind_of
        self._message_kind = message_kind
        self._relations: dict[int, Relation] = {}
        self._kinds: dict[int, int] = {}  # by the OIDs of described relations that had rows
        begin = piece.transaction
        self._transaction: Transaction | None = None
        if begin is not None:
            self._transaction = int(begin.final_lsn), to_unix(begin.commit_time), begin.xid, piece.number
        self._decode = Decoder().decode
        self.is_over = False

    def rows(self, body: bytes) -> FoundRows:
        """Return the rows of the next body."""
        found = FoundRows.none()
        position, piece = 0, self._piece
        while not self.is_over:
            position, self._transaction = find_rows(
                body, position, self._transaction, self._kinds, piece.after, piece.upto, found
            )
            if position == len(body):
                break
            start = position + 4
            end = start + int.from_bytes(body[position:start], "big")
            if start == end or end > len(body):
                raise ProtocolError("a message does not end where its block ends")
            if self._handle(start, body[start:end], found):
                position = end
        return found

    def _handle(self, start: int, payload: bytes, found: FoundRows) -> bool:
        """Handle a message that find_rows() does not. Returns False if it has to see the message again."""
        match self._decode(payload):
            case Insert(relid=relid) | Update(relid=relid) | Delete(relid=relid):
                self._kinds[relid] = self._kind(relid)
                return False
            case Begin():  # those of the range have been handled
                self.is_over = True
            case Relation() as relation:
                self._relations[relation.relid] = relation
                self._kinds.pop(relation.relid, None)
            case Truncate(relids=relids) if self._transaction is not None:
                for relid in relids:
                    if (kind := self._kind(relid)) >= 0:
                        found.add(-1, kind, b"t", self._transaction)
                    self._count()
            case LogicalMessage():
                if self._message_kind is not None and self._transaction is not None:
                    found.add(start, self._message_kind, b"m", self._transaction)
                self._count()
            case _:
                pass
        return True

    def _kind(self, relid: int) -> int:
        if relid not in self._relations:
            raise ProtocolError(f"no relation with OID {relid} has been described")
        assert self._transaction is not None
        return self._kind_of(self._relations[relid], Lsn(self._transaction[0]))

    def _count(self) -> None:
        if self._transaction is not None:
            self._transaction = (*self._transaction[:3], self._transaction[3] + 1)


def _bodies(directory: Location, piece: Piece) -> Iterator[bytes]:
    """Yield the messages of a piece, each after its length, in parts of about BODY bytes."""
    waiting: list[bytes] = []
    size = 0
    with _opened(directory, piece.segment) as reader:
        for _, block in reader.blocks(piece.offset, piece.stop, is_cut=piece.is_cut):
            if waiting and size + len(block.body) > BODY:
                yield b"".join(waiting)
                waiting, size = [], 0
            waiting.append(block.body)
            size += len(block.body)
    if waiting:
        yield b"".join(waiting)


@contextmanager
def _readable(directory: Location, piece: Piece) -> Iterator[None]:
    try:
        yield
    except (ProtocolError, KeyError) as error:
        raise damaged(
            f'the change log in "{directory}" has a message that cannot be decoded',
            detail=f"It is in the segment that starts at {piece.segment}, between offsets {piece.offset} and "
            f"{piece.stop}: {error}.",
        ) from error


def _messages(directory: Location, piece: Piece) -> Iterator[bytes]:
    with _opened(directory, piece.segment) as reader:
        for offset, block in reader.blocks(piece.offset, piece.stop, is_cut=piece.is_cut):
            try:
                yield from split_messages(block.body)
            except TornBlock:
                raise reader.damage(offset) from None
