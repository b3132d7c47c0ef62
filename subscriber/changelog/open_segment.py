"""OpenSegment: the segment that the writer of a change log appends to. SegmentStore: what keeps its blocks.

LogWriter (writer.py) decides what is written and when a segment ends. A store makes it last: files of a directory
(directory_segments.py), or objects (object_segments.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from subscriber.changelog.consumers import StoredSegment
from subscriber.changelog.files import Identity, SegmentFile
from subscriber.changelog.segment import HEADER_SIZE, Block, encode_end
from subscriber.changelog.storage import Location
from subscriber.changelog.writer_lock import WriterLock
from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn


@dataclass(slots=True)
class OpenSegment:
    """The open segment.

    Attributes:
        start: its start position.
        position: the end of its last whole transaction.
        offset: its size, where the next block is written.
        boundary: the offset after its last whole transaction.
        changes: the number of its changes.
        places: the offset of each RESTART block, and the position before it.
        first_change: the time of its first change, or of open() if an earlier process has written it.
    """

    start: Lsn
    position: Lsn
    offset: int = HEADER_SIZE
    boundary: int = HEADER_SIZE
    changes: int = 0
    places: list[tuple[int, Lsn]] = field(default_factory=list)
    first_change: float = field(default_factory=monotonic)

    @classmethod
    def at(cls, start: Lsn) -> OpenSegment:
        """Return an empty segment."""
        return cls(start, start)

    def add(self, block: Block) -> None:
        """Count a block that was written at `offset`."""
        if block.restart:
            self.places.append((self.offset, self.position))
        if block.changes and not self.changes:
            self.first_change = monotonic()
        self.offset += block.size
        self.changes += block.changes
        if block.boundary:
            self.position, self.boundary = block.position, self.offset

    def end(self) -> bytes:
        """Return the bytes that seal the segment: the index block and the trailer."""
        return encode_end(self.places, self.position, self.start, self.offset)


class SegmentStore(Protocol):
    """Keeps the segments of one log. Methods block, and are not thread-safe. All but close() may raise OSError.

    Attributes:
        lock: keeps other writers away.
        segment_age: seconds between the first change of a segment and its end, unless the caller sets another age.
    """

    lock: WriterLock
    segment_age: float

    @property
    def location(self) -> Location:
        """The directory of the log, or its path in an object store."""

    def resume(self, identity: Identity, files: list[SegmentFile]) -> OpenSegment:
        """Continue the open segment, or start one. No file is changed before the log is known to be complete.

        Args:
            identity: the contents of log.json.
            files: the segments.

        Raises:
            ChangeLogDamaged: segments are damaged or missing.
        """

    def begin(self, segment: OpenSegment, system_id: int) -> None:
        """Start an empty segment of the publisher with this system identifier."""

    def write(self, segment: OpenSegment, data: bytes) -> None:
        """Write a block at the end of the segment, without waiting until it lasts.

        Raises:
            TransactionTooLarge: the segment would be too large for the store.
        """

    def sync(self, segment: OpenSegment) -> Lsn:
        """Make the written blocks last, and record their position, if the store can do this before seal().

        Returns:
            The position before which everything lasts.
        """

    def seal(self, segment: OpenSegment) -> None:
        """End the segment, and make it last."""

    def sealed(self, segment: OpenSegment) -> list[tuple[StoredSegment, Location]]:
        """Return the segments before the open one, oldest first, with their files."""

    def check_tail(self, segment: OpenSegment, confirmed: Lsn) -> None:
        """Raise ChangeLogDamaged for bytes after the last whole transaction that cannot be a torn tail.

        Args:
            segment: the open segment, as resume() has returned it.
            confirmed: the position of the slot. Blocks before it were synced, so a crash cannot have torn them.
        """

    def close(self) -> None:
        """Close files, and release the lock."""

    def failure(self, what: str, error: OSError, segment: OpenSegment | None) -> ChangeLogError:
        """Return the error for an OSError of another method.

        Args:
            what: what could not be done, as a verb.
            error: the error.
            segment: the open segment. None: there is none yet.
        """
