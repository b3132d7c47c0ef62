"""The files of a change log, for its writer and its readers.

log.json                                       the publisher, publications, slot and start of the log, and a checksum
0000000001A2B3C8-0000000001FFE010.changes      a sealed segment, named by its start and end positions
0000000001FFE010.open                          the open segment, which the writer appends to
durable                                        the offset up to which the open segment is on disk (segment.py:Durable)
timeline.json                                  the publisher's timelines (publisher_timeline.py)
schema.jsonl                                   what each table was, and from when on (schema_history.py)
lock                                           locked by the writer

In an object store, where a file cannot grow, all segments are sealed:

0000000001A2B3C8.segment                       a segment, named by its start position; its index block has its end
durable                                        a position after the last segment, with no changes in between
lease                                          in place of the lock (leases.py)

Invariants.

- The segments follow one another without gap or overlap.
- The header of each segment has the publisher of log.json and the start of its file name.
- Errors are ChangeLogErrors, which name the file and have a hint. Damage in a segment has the offset too.

Failure cases.

- Bit flipped in a segment, or the file truncated: ChangeLogDamaged, with the position from which changes are missing.
- Segment missing, or two segments overlap: ChangeLogDamaged, with the names of both neighbors. In an object store, the
  segment before the gap has an index block with another end, and cannot be read.
- Segment copied from another log, or renamed: ChangeLogDamaged, because its header differs from its name or log.json.
- log.json edited or damaged: ChangeLogDamaged, because the checksum differs.
- "durable" lost or damaged: readers and the writer check the blocks of the open segment instead.
- "durable" read while the writer changes it: its checksum differs, and it is read again.
- Segment sealed or removed while it is read: the reader keeps its descriptor.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from subscriber.changelog.directory_use import DirectoryUse
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.segment import (
    BLOCK_SIZE,
    BOUNDARY,
    HEADER_SIZE,
    INDEX,
    TRAILER_SIZE,
    Block,
    BlockHead,
    Durable,
    TornBlock,
    decode_body,
    decode_head,
    decode_header,
    decode_index,
    decode_trailer,
)
from subscriber.changelog.storage import Location, OpenFile, claim_file, open_file, read_file, storage_sqlstate
from subscriber.errors import ChangeLogDamaged, ChangeLogError
from subscriber.lsn import Lsn

IDENTITY = DirectoryUse.CHANGE_LOG.value
DURABLE = "durable"
LOCK = "lock"
SEALED = ".changes"
OPEN = ".open"
OBJECT = ".segment"
_NAME = re.compile(r"(?P<start>[0-9A-F]{16})(\.open|\.segment|-(?P<end>[0-9A-F]{16})\.changes)")
ATTEMPTS = 10  # number of attempts to read a directory or file that the writer may be changing

RESTORE = (
    "Restore the file from a copy. Without a copy, begin a new log with `subscriber archive` in another directory, "
    "and make a new copy of the tables for each reader of this log."
)


def damaged(message: str, *, detail: str, hint: str = RESTORE) -> ChangeLogDamaged:
    """Return the error for damage. Its hint says how to repair the log."""
    return ChangeLogDamaged(message, detail=detail, hint=hint)


def unreadable(path: Location, error: OSError, offset: int | None = None) -> ChangeLogError:
    """Return the error for a file or directory that this process cannot read. None for `offset`: not known."""
    return ChangeLogError(
        f'could not read file "{path}"{f" at offset {offset}" if offset is not None else ""}: {error.strerror}',
        hint="Check that the store answers, and the credentials in the environment of this process."
        if isinstance(path, ObjectPath)
        else "Check the file system, and that the user of this process may read the directory and its files.",
        sqlstate=storage_sqlstate(error),
    )


@contextlib.contextmanager
def reading(path: Location) -> Iterator[None]:
    """Turn an OSError of the block into a ChangeLogError. FileNotFoundError is raised as it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


@dataclass(frozen=True, slots=True)
class Identity:
    """The contents of log.json: the source of a change log, and its start position."""

    system_id: int
    slot: str
    publications: tuple[str, ...]
    start: Lsn

    def write(self, directory: Location) -> None:
        """Write log.json atomically, and sync it. Raises OSError; FileExistsError as claim_file()."""
        fields = {**asdict(self), "start": str(self.start), "system_id": str(self.system_id)}
        claim_file(directory / IDENTITY, json.dumps({**fields, "checksum": json_checksum(fields)}, indent=2).encode())

    @classmethod
    def read(cls, directory: Location) -> Identity | None:
        """Read log.json. Returns None if the directory has no log.

        Raises:
            ChangeLogDamaged: the file was changed or damaged.
            ChangeLogError: the file cannot be read.
        """
        path = directory / IDENTITY
        try:
            with reading(path):
                stored = json.loads(read_file(path))
            if stored.pop("checksum") != json_checksum(stored):
                raise ValueError("the checksum differs")
            return cls(
                int(stored["system_id"]), stored["slot"], tuple(stored["publications"]), Lsn.parse(stored["start"])
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(
                f'change log file "{path}" is damaged', detail=f"It cannot be understood: {error}."
            ) from error


def json_checksum(fields: dict[str, Any]) -> str:
    """Return the checksum of a JSON object, which is stored beside its other fields."""
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


@dataclass(frozen=True, slots=True, order=True)
class SegmentFile:
    """A segment, by its file name. `end` is None for the open segment, and where an object's name does not have it."""

    start: Lsn
    end: Lsn | None
    path: Location

    @property
    def local_path(self) -> Path:
        """The path of a segment that is not in an object store."""
        assert isinstance(self.path, Path)
        return self.path

    @classmethod
    def of(cls, path: Location) -> SegmentFile | None:
        """Return the segment with this path. None: the file is not a segment."""
        if match := _NAME.fullmatch(path.name):
            start, end = match["start"], match["end"]
            return cls(Lsn(int(start, 16)), Lsn(int(end, 16)) if end else None, path)
        return None


def sealed_path(directory: Path, start: Lsn, end: Lsn) -> Path:
    """Return the path of a sealed segment."""
    return directory / f"{start:016X}-{end:016X}{SEALED}"


def open_path(directory: Path, start: Lsn) -> Path:
    """Return the path of an open segment."""
    return directory / f"{start:016X}{OPEN}"


def object_path(directory: ObjectPath, start: Lsn) -> ObjectPath:
    """Return the path of a segment in an object store."""
    return directory / f"{start:016X}{OBJECT}"


def segment_files(directory: Location, identity: Identity | None = None) -> list[SegmentFile]:
    """Return all segments, oldest first. The open segment is the last one, if there is one.

    Args:
        directory: the directory of the log.
        identity: the contents of log.json. None: the start of the log is not checked.

    Raises:
        ChangeLogDamaged: segments are missing, overlap, or start before the log does.
        ChangeLogError: the directory cannot be read.
    """
    with reading(directory):
        segments = sorted(
            (segment for path in directory.iterdir() if (segment := SegmentFile.of(path)) is not None),
            key=lambda segment: (segment.start, segment.end is None),
        )
        if isinstance(directory, ObjectPath):
            segments = _with_ends(segments)
    if segments and identity is not None and segments[0].start < identity.start:
        raise damaged(
            f'change log file "{segments[0].path}" starts before the log',
            detail=f'The log starts at {identity.start}, says "{directory / IDENTITY}".',
        )
    for before, after in pairwise(segments):
        if before.end != after.start:
            gap = before.end is not None and before.end < after.start
            raise damaged(
                f'the change log in "{directory}" has '
                + (f"a gap after {before.end}" if gap else f"segments that overlap after {before.start}"),
                detail=f'"{before.path.name}" is followed by "{after.path.name}".',
                hint=RESTORE if gap else "Move the segment that the archiver did not write out of the directory.",
            )
    return segments


def _with_ends(objects: list[SegmentFile]) -> list[SegmentFile]:
    """Return segments of an object store with their ends: the start of the next one, or the end in the index block."""
    ends = [segment.start for segment in objects[1:]] + [_end_of(segment.path) for segment in objects[-1:]]
    return [replace(segment, end=end) for segment, end in zip(objects, ends, strict=True)]


@lru_cache
def _end_of(path: ObjectPath) -> Lsn:
    """Return the end of a segment, which never changes."""
    with SegmentReader(path) as reader:
        return reader.end()


def read_durable(directory: Location) -> Durable | None:
    """Read the file "durable". Returns None if it is missing, empty or damaged."""
    path = directory / DURABLE
    for _ in range(ATTEMPTS):
        with contextlib.suppress(TornBlock), reading(path):
            try:
                return Durable.decode(read_file(path))
            except FileNotFoundError:
                break
    return None


def check_recorded(directory: Location, end: Lsn, recorded: Durable | None) -> None:
    """Raise ChangeLogDamaged if the log ends at `end`, although the file "durable" records a later position."""
    if recorded is not None and recorded.position > end:
        raise damaged(
            f'the change log in "{directory}" ends at {end}, but had everything before {recorded.position}',
            detail=f'"{DURABLE}" says so; changes that were committed after {end} are missing.',
        )


class Place(NamedTuple):
    """A block in a segment. `before` is the end of the last transaction before the block."""

    offset: int
    before: Lsn
    head: BlockHead


class Index(NamedTuple):
    """The places in a segment at which a reader can start, in ascending order, and the end of its blocks."""

    places: list[tuple[int, Lsn]]  # offset of a RESTART block, and the position before it
    stop: int  # offset after the last block, not counting the index block


@dataclass(slots=True)
class Extent:
    """The whole transactions at the start of an open segment."""

    offset: int  # after the last whole transaction
    position: Lsn  # end of the last whole transaction
    changes: int
    places: list[tuple[int, Lsn]]  # as in Index
    torn: int | None  # offset of the first bytes that are not a whole block; None: all blocks are whole


class SegmentReader:
    """Reads the blocks of one segment by their offsets.

    Methods that read the file raise ChangeLogError if a system call fails, in addition to the errors they document.

    Attributes:
        file: the segment's name.
        start: its start position.
        system_id: the publisher's system identifier in its header.
    """

    def __init__(self, path: Location, end: Lsn | None = None) -> None:
        """Open a segment.

        Args:
            path: the path of a segment, see SegmentFile.of().
            end: the end of a segment whose name does not have it.

        Raises:
            FileNotFoundError: the file does not exist, for example because the segment has been sealed and renamed.
            ChangeLogDamaged: the header is damaged, or belongs to another segment.
            ChangeLogError: the segment has an unknown format.
        """
        file = SegmentFile.of(path)
        assert file is not None
        self.file = replace(file, end=file.end or end)
        self.start = file.start
        with reading(path):
            self._open: OpenFile = open_file(path)
        try:
            self.system_id = self._header()
        except BaseException:
            self._open.close()
            raise

    def _header(self) -> int:
        try:
            system_id, start = decode_header(self._read(HEADER_SIZE, 0))
        except TornBlock:
            raise self.damage(0, self.start) from None
        except ChangeLogError as error:  # the format is unknown
            error.context.append(f'reading "{self.file.path}"')
            raise
        if start != self.start:
            raise damaged(
                f'change log file "{self.file.path}" is another segment than its name says',
                detail=f"Its header says that it starts at {start}.",
            )
        return system_id

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        with reading(self.file.path):
            return self._open.size()

    def _read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset` on, or fewer at the end of the file."""
        try:
            return self._open.read(size, offset)
        except OSError as error:
            raise unreadable(self.file.path, error, offset) from error

    def check_publisher(self, system_id: int) -> None:
        """Raise ChangeLogDamaged if the segment has another publisher than log.json, `system_id`."""
        if self.system_id != system_id:
            raise damaged(
                f'change log file "{self.file.path}" is of another publisher than the log',
                detail=f'Its header has system identifier {self.system_id}, "{IDENTITY}" has {system_id}.',
            )

    def damage(self, offset: int, before: Lsn | None = None, detail: str = "") -> ChangeLogDamaged:
        """Return the error for damaged bytes at `offset`.

        Args:
            offset: the offset of the damage.
            before: the end of the last whole transaction before `offset`. None: read it from the block heads.
            detail: more sentences for the error's detail, with a space first.
        """
        end = f" and before {self.file.end}" if self.file.end is not None else ""
        before = self._position(offset) if before is None else before
        return damaged(
            f'change log file "{self.file.path}" is damaged at offset {offset}',
            detail=f"Changes that were committed after {before}{end} cannot be read.{detail}",
        )

    def _position(self, offset: int) -> Lsn:
        """Return the end of the last whole transaction before `offset`, up to the first damaged head."""
        position = self.start
        with contextlib.suppress(ChangeLogDamaged):
            for place in self.heads(HEADER_SIZE, self.start, offset):
                position = place.head.position if place.head.flags & BOUNDARY else place.before
        return position

    def _head(self, offset: int) -> BlockHead:
        return decode_head(self._read(BLOCK_SIZE, offset), self.start, offset)

    def block(self, offset: int) -> Block:
        """Return the block at an offset. Raises ChangeLogDamaged."""
        try:
            return self._block(offset)
        except TornBlock:
            raise self.damage(offset) from None

    def _block(self, offset: int) -> Block:
        head = self._head(offset)
        return decode_body(head, self._read(head.length, offset + BLOCK_SIZE))

    def heads(self, offset: int, before: Lsn, stop: int) -> Iterator[Place]:
        """Yield each block from `offset` to `stop`, without its body.

        Args:
            offset: the offset of a block.
            before: the end of the last transaction before that block.
            stop: the offset after the last block.

        Raises:
            ChangeLogDamaged: a head is damaged, or no block ends at `stop`.
        """
        while offset < stop:
            try:
                head = self._head(offset)
            except TornBlock:
                raise self.damage(offset, before) from None
            end = offset + BLOCK_SIZE + head.length
            if end > stop or head.kind == INDEX:
                raise self.damage(offset, before)
            yield Place(offset, before, head)
            offset = end
            if head.flags & BOUNDARY:
                before = head.position

    def blocks(self, offset: int, stop: int, *, is_cut: bool = False) -> Iterator[tuple[int, Block]]:
        """Yield the offset of each block from `offset` to `stop`, and the block.

        Args:
            offset: the offset of a block.
            stop: the offset after the last block.
            is_cut: a transaction is open at `stop`.

        Raises:
            ChangeLogDamaged: a block is damaged, no block ends at `stop`, or a transaction is open there and not cut.
        """
        boundary = not is_cut
        while offset < stop:
            try:
                block = self._block(offset)
            except TornBlock:
                raise self.damage(offset) from None
            if offset + block.size > stop or block.kind == INDEX:
                break
            yield offset, block
            offset += block.size
            boundary = block.boundary
        if offset != stop or boundary == is_cut:
            raise self.damage(offset)

    def index(self) -> Index:
        """Return the index of a sealed segment.

        Raises:
            ChangeLogDamaged: trailer, index and file name do not agree, or another segment follows than `end` says.
        """
        block, size = self._index_block()
        if block.position != self.file.end:
            detail = f" It ends at {block.position}." if isinstance(self.file.path, ObjectPath) else ""
            raise self.damage(max(0, self.size - TRAILER_SIZE), self.start, detail)
        # The first place is the header, so that a wrong index cannot make a reader skip the first blocks.
        return Index([(HEADER_SIZE, self.start), *decode_index(block.body)[1:]], size)

    def end(self) -> Lsn:
        """Return the end in the index block of a sealed segment. Raises ChangeLogDamaged."""
        return self._index_block()[0].position

    def _index_block(self) -> tuple[Block, int]:
        """Return the index block and its offset."""
        size = self.size
        offset = size - TRAILER_SIZE
        try:
            offset_of_index = decode_trailer(self._read(TRAILER_SIZE, max(0, offset)))
            if not HEADER_SIZE <= offset_of_index <= offset:
                raise TornBlock
            block = self._block(offset_of_index)
            if block.kind != INDEX or offset_of_index + block.size != offset:
                raise TornBlock
            decode_index(block.body)
            return block, offset_of_index
        except TornBlock:
            raise self.damage(max(0, offset), self.start) from None

    def extent(self) -> Extent:
        """Read all blocks of an open segment, and return its whole transactions."""
        offset, changes, places = HEADER_SIZE, 0, list[tuple[int, Lsn]]()
        extent = Extent(offset, self.start, 0, [], None)
        size = self.size
        try:
            # The segment has an index if the writer was killed before it renamed the file.
            while offset < size and (block := self._block(offset)).kind != INDEX:
                if block.restart:
                    places.append((offset, extent.position))
                offset += block.size
                changes += block.changes
                if block.boundary:
                    extent.offset, extent.position, extent.changes = offset, block.position, changes
                    extent.places += places
                    places.clear()
        except TornBlock:
            extent.torn = offset
        return extent
