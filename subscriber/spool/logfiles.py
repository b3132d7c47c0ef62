"""The files of a change log, as its writer and its readers find them.

log.json                                       what the log is of: publisher, publications, slot
0000000001A2B3C8-0000000001FFE010.changes      a sealed segment: it starts after the one, ends at the other
0000000001FFE010.open                          the segment being written
durable                                        how far that one may be read (segment.Durable)
lock                                           held by the process that writes
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from subscriber.spool.segment import (
    BLOCK_SIZE,
    HEADER_SIZE,
    INDEX,
    TRAILER_SIZE,
    Block,
    BlockHead,
    TornBlock,
    decode_body,
    decode_head,
    decode_header,
    decode_index,
    decode_trailer,
)

IDENTITY = "log.json"
DURABLE = "durable"
LOCK = "lock"
SEALED = ".changes"
OPEN = ".open"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a log is of. `start` is where it begins, in the publisher's WAL."""

    system_id: int
    slot: str
    publications: tuple[str, ...]
    start: Lsn

    def write(self, directory: Path) -> None:
        """Put it there, whole or not at all, durably."""
        fields = {**asdict(self), "start": str(self.start), "system_id": str(self.system_id)}
        temporary = directory / f"{IDENTITY}.tmp"
        with temporary.open("w") as file:
            json.dump(fields, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(directory / IDENTITY)
        sync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Identity | None:
        """None where there is no log. Raises ChangeLogError for a file that is not one of ours."""
        try:
            found = json.loads((directory / IDENTITY).read_text())
            return cls(int(found["system_id"]), found["slot"], tuple(found["publications"]), Lsn.parse(found["start"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ChangeLogError(f'"{directory / IDENTITY}" does not describe a change log') from error


@dataclass(frozen=True, slots=True, order=True)
class SegmentFile:
    """A segment as its name tells. `end` is None for the open one."""

    start: Lsn
    end: Lsn | None
    path: Path

    @classmethod
    def of(cls, path: Path) -> SegmentFile | None:
        """None for a file that is no segment."""
        first, _, last = path.stem.partition("-")
        with contextlib.suppress(ValueError):
            if path.suffix == SEALED:
                return cls(Lsn(int(first, 16)), Lsn(int(last, 16)), path)
            if path.suffix == OPEN and not last:
                return cls(Lsn(int(first, 16)), None, path)
        return None


def sealed_path(directory: Path, start: Lsn, end: Lsn) -> Path:
    return directory / f"{start:016X}-{end:016X}{SEALED}"


def open_path(directory: Path, start: Lsn) -> Path:
    return directory / f"{start:016X}{OPEN}"


def segment_files(directory: Path) -> list[SegmentFile]:
    """All segments, oldest first; the open one, if there is one, last.

    Raises ChangeLogError where one is missing between two others.
    """
    found = sorted(
        (segment for path in directory.iterdir() if (segment := SegmentFile.of(path)) is not None),
        key=lambda segment: (segment.start, segment.end is None),
    )
    for before, after in pairwise(found):
        if before.end != after.start:
            raise ChangeLogError(
                f"the change log has a gap after {before.start}",
                detail=f'"{before.path.name}" is followed by "{after.path.name}".',
                hint="A segment was removed by hand, or by something else than the log's own retention.",
            )
    return found


def sync_directory(directory: Path) -> None:
    """Make what was created, renamed or removed in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class SegmentReader:
    """Reads one segment's blocks by their offsets; a sealed one, or the part of the open one that is durable."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError; TornBlock when the file does not begin as a segment."""
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.system_id, self.start = decode_header(os.pread(self._fd, HEADER_SIZE, 0))
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def head(self, offset: int) -> BlockHead:
        """Raises TornBlock when there is none."""
        return decode_head(os.pread(self._fd, BLOCK_SIZE, offset), self.start, offset)

    def block(self, offset: int) -> Block:
        """Raises TornBlock when the file ends in it, or it is not what was written there."""
        head = self.head(offset)
        return decode_body(head, os.pread(self._fd, head.length, offset + BLOCK_SIZE))

    def index(self) -> list[tuple[int, Lsn]]:
        """Of a sealed segment: (offset, position before it) of each RESTART block. Raises TornBlock."""
        offset = decode_trailer(os.pread(self._fd, TRAILER_SIZE, max(0, self.size - TRAILER_SIZE)))
        block = self.block(offset)
        if block.kind != INDEX:
            raise TornBlock
        return decode_index(block.body)

    def index_offset(self) -> int:
        """Of a sealed segment: where its last block of messages ends. Raises TornBlock."""
        return decode_trailer(os.pread(self._fd, TRAILER_SIZE, max(0, self.size - TRAILER_SIZE)))
