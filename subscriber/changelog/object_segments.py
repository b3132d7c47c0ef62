"""ObjectLogWriter: writes the change log to an object store, in segments that are stored whole.

**Purpose.** An object cannot grow, and has no fsync(). So the open segment stays in a temporary file of this machine
until it is sealed, and is then stored by one conditional PUT. `position` moves when the store has confirmed it. The
publisher keeps everything after that, so a segment that was not stored is sent again. `segment_size` and `segment_age`
therefore decide how much WAL the publisher keeps, and how soon readers see a change.

**Invariants.**

- A segment is named by its start alone, and created only if there is none. So one process can continue the log at a
  position, even if another one still believes that it has the lease.
- "durable" is replaced only if no other process has replaced it. It is replaced before `position` moves, and records a
  position after the last segment if no changes follow it.
- A version of a table is stored before a segment that has changes of it.

**Failure cases.** The publisher sends all changes after `position` again.

- Process killed before a segment is stored, or its request interrupted: the log ends with the segment before. Stores
  show an object when it is complete.
- Process killed after the segment is stored, before "durable" is: the log ends with this segment.
- Process killed while it has the lease: another one can take it after some seconds (leases.py).
- Process stopped (SIGSTOP), and continued after another one has taken over: the lease is checked before each request,
  and check_lock() shows it to a process that has nothing to store. A request that was under way is conditional. It can
  add the segment that continues the log, or it fails.
- Machine cut off from the store, but not from the publisher: the writer cannot store anything, so the archiver confirms
  nothing. The lease ends, and the archiver leaves the slot to the process that takes over.
- Two processes that both believe to have the lease: the second one to store a segment, or to replace "durable", fails
  and closes itself. Both segments would have the same transactions.
- Segment stored by such a process after the other one has opened the log: the other one fails when it stores its own
  segment, opens the log again, and continues after the segment that it finds.
- Less in the store than "durable" records: open() raises ChangeLogDamaged.
- Transaction larger than LARGEST: it cannot be stored by one conditional PUT, and the archiver stops there.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import IO

from subscriber.changelog import writer
from subscriber.changelog.consumers import KEEP_ALL, LogRetention, StoredSegment, expired
from subscriber.changelog.files import (
    DURABLE,
    IDENTITY,
    Identity,
    SegmentFile,
    check_recorded,
    damaged,
    object_path,
    read_durable,
    segment_files,
)
from subscriber.changelog.objects import ObjectPath, StoredObject, Version
from subscriber.changelog.publisher_timeline import read_timeline, store_timeline
from subscriber.changelog.schema_history import SchemaHistory, TableVersion, store_versions
from subscriber.changelog.segment import (
    BOUNDARY,
    HEADER_SIZE,
    Block,
    Durable,
    encode_block,
    encode_end,
    encode_header,
)
from subscriber.changelog.storage import Location, location
from subscriber.changelog.writer import SEGMENT_SIZE, ChangeLogWriter, LogWriter
from subscriber.changelog.writer_lock import WriterLock, lease_lost, other_writer
from subscriber.errors import ChangeLogError, TransactionTooLarge
from subscriber.lsn import Lsn
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, IO_ERROR
from subscriber.timeline_history import TimelineHistory

SEGMENT_AGE = 10.0  # seconds
LEASE = "lease"
LARGEST = 5 * 1024**3 - 64 * 1024**2  # bytes of the blocks of a segment: a PUT of S3 has at most 5 GiB, with the index


class ObjectLogWriter:
    """The writer of a log in an object store. A lease keeps other writers away. Methods block, and are not thread-safe.

    Attributes:
        location: the path of the log.
        identity: the contents of log.json. None: the path has no log yet.
        position: can be confirmed to the publisher, because everything before it is stored.
        schema: the schema history of the log.
        timeline: the publisher's timelines that `position` belongs to. None: they are not known.
        store_interval: `segment_age`.
        lock: the lease. open() takes it, unless this process has it.
    """

    def __init__(
        self,
        path: ObjectPath,
        *,
        segment_size: int = SEGMENT_SIZE,
        segment_age: float = SEGMENT_AGE,
        retention: LogRetention = KEEP_ALL,
        temporary: Path | None = None,
        largest: int = LARGEST,
    ) -> None:
        """Create a writer; open() opens it.

        Args:
            path: the path of the log.
            segment_size: bytes after which a segment is stored.
            segment_age: seconds after its first change after which a segment is stored.
            retention: which segments are removed.
            temporary: the directory of the open segment, created if it is missing. None: that of temporary files.
            largest: bytes of the blocks of a segment that can be stored.
        """
        self.location = path
        self.identity: Identity | None = None
        self.position = Lsn(0)
        self.schema = SchemaHistory()
        self.timeline: TimelineHistory | None = None
        self._segment_size, self._segment_age = segment_size, segment_age
        self.store_interval = segment_age
        self._retention = retention
        self._temporary = temporary
        self._largest = largest
        self.lock = WriterLock(path, LEASE)
        self._durable: Version | None = None  # the version of "durable" that this process has written
        # The open segment:
        self._file: IO[bytes] | None = None
        self._start = Lsn(0)
        self._offset = 0
        self._last = Lsn(0)  # position of the last appended boundary
        self._changes = 0
        self._index: list[tuple[int, Lsn]] = []  # offset of each RESTART block, and the position before it
        self._first_change = 0.0

    # --- opening --------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lease, and resume the log if there is one.

        Raises:
            ChangeLogDamaged: objects of the log are damaged or missing. None has been changed.
            ChangeLogError: another process writes the log, or the store cannot be read or written.
        """
        try:
            self._open()
        except OSError as error:
            raise self._failed("open", error) from error
        except ChangeLogError:
            self.close()
            raise

    def _open(self) -> None:
        self.lock.acquire()
        self.identity = Identity.read(self.location)
        files = segment_files(self.location, self.identity)
        self.schema = SchemaHistory.read(self.location)
        self.timeline = read_timeline(self.location)
        if self.identity is None:
            if files:
                raise damaged(
                    f'the change log in "{self.location}" has segments, but no {IDENTITY}',
                    detail=f'The first segment is "{files[0].path.name}".',
                )
            return
        end = files[-1].end if files else None
        self._resume(self.identity.start if end is None else end)

    def _resume(self, end: Lsn) -> None:
        """Continue the log, whose last segment ends at `end`."""
        recorded, position = read_durable(self.location), end
        if recorded is not None and recorded.segment == end:
            position = recorded.position
        else:
            check_recorded(self.location, end, recorded)
        self._begin_segment(end)
        self._last = position
        with contextlib.suppress(FileNotFoundError):
            self._durable = (self.location / DURABLE).read()[1]
        self._record()  # from here on, another process cannot replace it

    def create(self, identity: Identity) -> None:
        """Create a log where there is none, after open().

        Raises:
            ChangeLogError: the store cannot be written, and the writer has to be opened again.
        """
        try:
            self.lock.check()
            identity.write(self.location)
            self.identity = identity
            self._begin_segment(identity.start)
            self._record()
        except OSError as error:
            raise self._failed("begin", error) from error

    def close(self) -> None:
        """End the lease. A segment that is not stored is forgotten."""
        self._durable = None
        self._close_file()
        self.lock.release()

    def check_lock(self) -> None:
        """Raise ChangeLogError if another process may have taken the lease. May be called from any thread."""
        try:
            self.lock.check()
        except OSError as error:
            raise lease_lost(self.location, error.strerror) from error

    def check_tail(self, confirmed: Lsn) -> None:
        """Do nothing: the log has no bytes after `position`."""

    def _begin_segment(self, start: Lsn) -> None:
        assert self.identity is not None
        self._start = self._last = start
        self._changes = 0
        self._index = []
        self._close_file()
        if self._temporary is not None:
            self._temporary.mkdir(0o700, parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._temporary, prefix="subscriber-segment-")  # noqa: SIM115
        self._offset = 0
        self._write(encode_header(self.identity.system_id, start))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._offset += len(data)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- appending ------------------------------------------------------------------------------

    def append(self, blocks: list[Block]) -> None:
        """Add blocks of a BlockBuilder to the open segment. May store the segment before a RESTART block.

        Raises:
            TransactionTooLarge: the segment would be larger than `largest`. It cannot be stored.
            ChangeLogError: the store or a temporary file cannot be written, and the writer has to be opened again.
        """
        self._check_usable()
        try:
            for block in blocks:
                if block.restart and self.wants_seal():
                    self._seal()
                if block.restart:
                    self._index.append((self._offset, self._last))
                if block.changes and not self._changes:
                    self._first_change = monotonic()
                encoded = encode_block(block, self._start, self._offset)
                if self._offset + len(encoded) > self._largest:
                    raise self._too_large()
                self._write(encoded)
                self._changes += block.changes
                if block.flags & BOUNDARY:
                    self._last = block.position
        except OSError as error:
            raise self._failed("write", error) from error

    def describe(self, versions: Sequence[TableVersion]) -> None:
        """Store versions of tables. They must be stored before the changes that follow them are appended.

        Raises:
            ChangeLogError: the store cannot be written, and the writer has to be opened again.
        """
        self._check_usable()
        try:
            self.lock.check()
            store_versions(self.location, versions)
        except OSError as error:
            raise self._failed("write", error) from error
        for version in versions:
            self.schema.add(version)

    def record_timeline(self, history: TimelineHistory | None) -> None:
        """Store the publisher's timelines, before changes of them are appended. None: they are not known.

        Raises:
            ChangeLogError: the store cannot be written, and the writer has to be opened again.
        """
        self._check_usable()
        if history == self.timeline:
            return
        try:
            self.lock.check()
            store_timeline(self.location, history)
        except OSError as error:
            raise self._failed("write", error) from error
        self.timeline = history

    def sync(self) -> None:
        """Store the position of the appended blocks, if they have no changes.

        Raises:
            ChangeLogError: the store cannot be written, and the writer has to be opened again.
        """
        self._check_usable()
        if self._changes or self._last <= self.position:
            return
        try:
            self._record()
        except OSError as error:
            raise self._failed("write", error) from error

    def wants_seal(self) -> bool:
        """Return True if the segment has reached `segment_size` or `segment_age`. False if it has no changes."""
        if not self._changes:
            return False
        return self._offset >= self._segment_size or monotonic() - self._first_change >= self._segment_age

    def seal(self) -> None:
        """Store the segment, and start the next one. Old segments are removed according to `retention`.

        May be called only at a boundary. The next appended block must be a RESTART block.

        Raises:
            ChangeLogError: the store cannot be written, and the writer has to be opened again.
        """
        self._check_usable()
        try:
            self._seal()
        except OSError as error:
            raise self._failed("write", error) from error

    def _seal(self) -> None:
        assert self._file is not None
        self._write(encode_end(self._index, self._last, self._start, self._offset))
        self._file.flush()
        self.lock.check()
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            object_path(self.location, self._start).create(data)
        self._begin_segment(self._last)
        self._record()
        self._retain()

    def _record(self) -> None:
        """Store the position in "durable", then set it."""
        data = Durable(self._start, HEADER_SIZE, self._last, 0).encode()
        path = self.location / DURABLE
        self.lock.check()
        self._durable = path.create(data) if self._durable is None else path.replace(data, self._durable)
        self.position = self._last

    def _check_usable(self) -> None:
        if not self.lock.is_held:
            raise ChangeLogError(
                f'the change log in "{self.location}" is not open for writing',
                hint="Open it again: a request to the store has failed, or it has been closed.",
            )

    def _too_large(self) -> TransactionTooLarge:
        """Close the writer, and return the error for a transaction that no segment can have."""
        position = self._last
        self.close()
        return TransactionTooLarge(
            f'a transaction after {position} is too large for the change log in "{self.location}"',
            detail=f"A segment is stored by one request of at most {self._largest} bytes, and has whole transactions.",
            hint="Archive to a directory, which has no limit: `subscriber archive --directory /srv/log` with the same "
            "slot. Readers that need earlier changes read the log in the store up to this position first.",
        )

    def _failed(self, what: str, error: OSError) -> ChangeLogError:
        """Close the writer, which has to be opened again, and return the error for a failed request."""
        self.close()
        if error.errno == errno.ESTALE:
            return lease_lost(self.location, error.strerror)
        if error.errno == errno.EEXIST:
            return other_writer(self.location)
        return ChangeLogError(
            f'could not {what} the change log in "{self.location}": {error.strerror}',
            hint="Correct what the store refuses; `subscriber archive` then continues the log. The publisher keeps "
            "everything that is not stored.",
            sqlstate=INSUFFICIENT_PRIVILEGE if error.errno == errno.EACCES else IO_ERROR,
        )

    # --- retention ------------------------------------------------------------------------------

    def _retain(self) -> None:
        for found in expired(self.location, self._retention, self._stored_segments):
            found.path.unlink()

    def _stored_segments(self) -> list[tuple[StoredSegment, StoredObject]]:
        """Return the segments with their objects, oldest first. Each one ends where the next one starts."""
        files = [(SegmentFile.of(found.path), found) for found in sorted(self.location.objects())]
        segments = [(file.start, found) for file, found in files if file is not None]
        ends = [*(start for start, _ in segments[1:]), self._start]
        return [
            (StoredSegment(end, found.size, found.modified), found)
            for end, (_, found) in zip(ends, segments, strict=True)
        ]


def log_writer(
    path: Location | str,
    *,
    segment_size: int = SEGMENT_SIZE,
    segment_age: float | None = None,
    retention: LogRetention = KEEP_ALL,
    temporary: Path | None = None,
) -> LogWriter:
    """Return the writer for a directory or an object store. Arguments are those of the writers.

    Raises:
        StatementError: storage of this kind is not supported.
    """
    where = location(path)
    if isinstance(where, ObjectPath):
        age = SEGMENT_AGE if segment_age is None else segment_age
        return ObjectLogWriter(
            where,
            segment_size=segment_size,
            segment_age=age,
            retention=retention,
            temporary=temporary,
        )
    age = writer.SEGMENT_AGE if segment_age is None else segment_age
    return ChangeLogWriter(where, segment_size=segment_size, segment_age=age, retention=retention)
