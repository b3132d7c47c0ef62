"""ObjectSegments: the segments of a change log as objects of an object store, which are stored whole.

**Purpose.** An object cannot grow, and has no fsync(). So the open segment stays in a temporary file of this machine
until it is sealed, and is then stored by one conditional PUT. Its position is confirmed after that. The publisher keeps
everything after it, so a segment that was not stored is sent again. `segment_size` and `segment_age` therefore decide
how much WAL the publisher keeps, and how soon readers see a change.

**Invariants.**

- A segment is named by its start alone, and created only if there is none. So one process can continue the log at a
  position, even if another one still believes that it has the lease.
- "durable" is replaced only if no other process has replaced it. It is replaced before its position is confirmed, and
  records a position after the last segment if no changes follow it.
- The lease is checked before each request.

**Failure cases.** The publisher sends all changes after the confirmed position again.

- Process killed before a segment is stored, or its request interrupted: the log ends with the segment before. Stores
  show an object when it is complete.
- Process killed after the segment is stored, before "durable" is: the log ends with this segment.
- Process killed while it has the lease: another one can take it after some seconds (leases.py).
- Process stopped (SIGSTOP), and continued after another one has taken over: the lease is checked before each request,
  and check_lock() shows it to a process that has nothing to store. A request that was under way is conditional. It can
  add the segment that continues the log, or it fails.
- Machine cut off from the store, but not from the publisher: the writer cannot store anything, so the archiver confirms
  nothing. The lease ends, and the archiver leaves the slot to the process that takes over.
- Two processes that both believe to have the lease: the second one to store a segment, or to replace "durable", fails,
  and its writer closes itself. Both segments would have the same transactions.
- Segment stored by such a process after the other one has opened the log: the other one fails when it stores its own
  segment, opens the log again, and continues after the segment that it finds.
- Less in the store than "durable" records: resume() raises ChangeLogDamaged.
- Transaction larger than LARGEST: it cannot be stored by one conditional PUT, and the archiver stops there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import tempfile
from pathlib import Path
from typing import IO

from subscriber.changelog.consumers import StoredSegment
from subscriber.changelog.files import DURABLE, Identity, SegmentFile, check_recorded, object_path, read_durable
from subscriber.changelog.objects import ObjectPath, Version
from subscriber.changelog.open_segment import OpenSegment
from subscriber.changelog.segment import HEADER_SIZE, Durable, encode_header
from subscriber.changelog.storage import Location
from subscriber.changelog.writer_lock import WriterLock, lease_lost, other_writer
from subscriber.errors import ChangeLogError, TransactionTooLarge
from subscriber.lsn import Lsn
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, IO_ERROR

LEASE = "lease"
LARGEST = 5 * 1024**3 - 64 * 1024**2  # bytes of the blocks of a segment: a PUT of S3 has at most 5 GiB, with the index


class ObjectSegments:
    """The segments of a log in an object store. Methods are described in SegmentStore."""

    segment_age = 10.0

    def __init__(self, path: ObjectPath, *, temporary: Path | None = None, largest: int = LARGEST) -> None:
        """Create the store of a path.

        Args:
            path: the path of the log.
            temporary: the directory of the open segment, created if it is missing. None: that of temporary files.
            largest: bytes of the blocks of a segment that can be stored.
        """
        self.lock = WriterLock(path, LEASE)
        self._path = path
        self._temporary = temporary
        self._largest = largest
        self._file: IO[bytes] | None = None  # the open segment
        self._durable: Version | None = None  # the version of "durable" that this process has written
        self._recorded: Lsn | None = None  # the position in it. None: this process has written none for the segment

    @property
    def location(self) -> ObjectPath:
        return self._path

    def resume(self, identity: Identity, files: list[SegmentFile]) -> OpenSegment:
        end = (files[-1].end if files else None) or identity.start
        recorded, segment = read_durable(self._path), OpenSegment.at(end)
        if recorded is not None and recorded.segment == end:
            segment.position = recorded.position
        else:
            check_recorded(self._path, end, recorded)
        self.begin(segment, identity.system_id)
        with contextlib.suppress(FileNotFoundError):
            self._durable = (self._path / DURABLE).read()[1]
        return segment

    def begin(self, segment: OpenSegment, system_id: int) -> None:
        self._close_file()
        if self._temporary is not None:
            self._temporary.mkdir(0o700, parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._temporary, prefix="subscriber-segment-")  # noqa: SIM115
        self._file.write(encode_header(system_id, segment.start))
        self._recorded = None  # sync() replaces "durable", so that another process cannot

    def write(self, segment: OpenSegment, data: bytes) -> None:
        if segment.offset + len(data) > self._largest:
            raise TransactionTooLarge(
                f'a transaction after {segment.position} is too large for the change log in "{self._path}"',
                detail=f"A segment is stored by one request of at most {self._largest} bytes, and has whole "
                "transactions.",
                hint="Archive to a directory, which has no limit: `subscriber archive --directory /srv/log` with the "
                "same slot. Readers that need earlier changes read the log in the store up to this position first.",
            )
        assert self._file is not None
        self._file.write(data)

    def sync(self, segment: OpenSegment) -> Lsn:
        """Replace "durable" if the segment has no changes. It records the position after the last stored segment."""
        if self._recorded is None or (not segment.changes and segment.position > self._recorded):
            data = Durable(segment.start, HEADER_SIZE, segment.position, 0).encode()
            path = self._path / DURABLE
            self.lock.check()
            self._durable = path.create(data) if self._durable is None else path.replace(data, self._durable)
            self._recorded = segment.position
        return self._recorded

    def seal(self, segment: OpenSegment) -> None:
        assert self._file is not None
        self._file.write(segment.end())
        self._file.flush()
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self.lock.check()
            object_path(self._path, segment.start).create(data)

    def sealed(self, segment: OpenSegment) -> list[tuple[StoredSegment, Location]]:
        """Return the stored segments. Each one ends where the next one starts."""
        files = [(SegmentFile.of(stored.path), stored) for stored in sorted(self._path.objects())]
        segments = [(file.start, stored) for file, stored in files if file is not None]
        ends = [*(start for start, _ in segments[1:]), segment.start]
        return [
            (StoredSegment(end, stored.size, stored.modified), stored.path)
            for end, (_, stored) in zip(ends, segments, strict=True)
        ]

    def check_tail(self, segment: OpenSegment, confirmed: Lsn) -> None:
        """Do nothing: the log has no bytes after its last whole transaction."""

    def close(self) -> None:
        """End the lease. A segment that is not stored is forgotten."""
        self._durable = None
        self._close_file()
        self.lock.release()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def failure(self, what: str, error: OSError, segment: OpenSegment | None) -> ChangeLogError:
        if error.errno == errno.ESTALE:
            return lease_lost(self._path, error.strerror)
        if error.errno == errno.EEXIST:
            return other_writer(self._path)
        return ChangeLogError(
            f'could not {what} the change log in "{self._path}": {error.strerror}',
            hint="Correct what the store refuses; `subscriber archive` then continues the log. The publisher keeps "
            "everything that is not stored.",
            sqlstate=INSUFFICIENT_PRIVILEGE if error.errno == errno.EACCES else IO_ERROR,
        )
