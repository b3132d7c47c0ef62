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
- All pieces of a range (pieces.py) together have all blocks of the range. A reader raises ChangeLogError if it cannot
  read them, and does not end early.

Failure cases, in addition to those of changelog/files.py.

- Segment renamed while the directory is listed, so that the list has it twice or not at all: the directory is listed
  again.
- Segment removed by retention before it is opened: ChangeLogError, because changes are missing for this reader.
- "durable" records more than the files have, because the newest are missing: ChangeLogDamaged.
- "durable" is older than the newest sealed segment, after a crash of the machine: the log ends with that segment.
- "durable" lost, and the open segment has bytes after the last whole transaction: ChangeLogDamaged. The bytes may be an
  unfinished write or damage. `subscriber archive` decides that by the position of its slot, and writes "durable" again.
- Trailer, index or file name of a sealed segment damaged: ChangeLogDamaged. The segment is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

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
    read_durable,
    segment_files,
)
from subscriber.changelog.pieces import Piece, cut_segment, divided_piece, open_segment
from subscriber.changelog.schema_history import SchemaHistory
from subscriber.changelog.segment import (
    BLOCK_SIZE,
    BOUNDARY,
    HEADER_SIZE,
    RESTART,
    Durable,
    split_messages,
)
from subscriber.changelog.storage import Location, for_each, location
from subscriber.display import shell_word
from subscriber.errors import ChangeLogDamaged, ChangeLogError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import (
    Commit,
    Truncate,
)
from subscriber.redaction import redact
from subscriber.remedy import Remedy
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE

PIECE = 8 * 1024 * 1024  # bytes
_COMMIT = 0x43  # C
_TRUNCATE = 0x54  # T
_CHANGES = b"IUDM"


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
                error.amend(
                    hint=f"Start `subscriber archive`, which asks its slot whether that is all. If not: {RESTORE}"
                )
                raise error
        return Durable(file.start, extent.offset, extent.position, extent.changes)

    def schema(self) -> SchemaHistory:
        """Return what each table was, and from when on. Empty before the first change.

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
                pieces = cut_segment(file.start, places, stop, start, end, size)
                return [part for piece in pieces for part in divided_piece(reader, piece, size)]

        needed = [file for file in files if file.start < end and (file.end is None or file.end > start)]
        return [piece for pieces in for_each(self.directory, cut, needed) for piece in pieces]

    def _opened(self, file: SegmentFile) -> SegmentReader:
        reader = open_segment(self.directory, file.start, file.end)
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
        reach = Reach(durable.position, 0, 0)
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
                    total = Reach(durable.position, reach.changes + head.changes, reach.size + head.length)
                    is_end = bool(head.flags & BOUNDARY)
                    if is_end and (before < start or total.has(changes, size)):
                        skipped = 0, 0  # changes and bytes of transactions that end before `start`
                        for end, number, length in _ends(reader, offset, offset + BLOCK_SIZE + head.length):
                            if end <= start:
                                skipped = number, length
                                continue
                            changed, read_size = number - skipped[0], length - skipped[1]
                            reached = Reach(end, reach.changes + changed, reach.size + read_size)
                            if reached.has(changes, size):
                                is_over = not exceed and last.changes and reached.exceeds(changes, size)
                                return last if is_over else reached
                            last = reached
                        total = Reach(durable.position, total.changes - skipped[0], total.size - skipped[1])
                    if is_end:
                        last = total._replace(position=head.position)
                    reach = total
        return reach

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
        errors: list[ChangeLogDamaged] = []
        for number, file in enumerate(files):
            on_segment(number, len(files))
            try:
                self._verify(file, durable)
            except ChangeLogDamaged as error:
                errors.append(error)
            except ChangeLogError:
                if file.start >= self.start():  # otherwise retention has removed the segment
                    raise
        try:
            self.schema()
        except ChangeLogDamaged as error:
            errors.append(error)
        return errors

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
