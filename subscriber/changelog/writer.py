"""ChangeLogWriter: appends blocks to the change log, syncs and seals segments, and resumes after a crash.

Purpose. The contract is that of PostgreSQL's archive modules: the sender keeps its data until the writer confirms that
it is stored. The writer confirms after fsync() of the file, and of the directory if the name is new. The confirmed
position is `position`.

Invariants.

- `position` is the end of a transaction, and everything before it is on disk. The file "durable" records it before it
  can be confirmed.
- open() cuts nothing. Bytes after the last whole transaction are cut off when the first block is written. "durable"
  records no such bytes.

Failure cases. The publisher sends all changes after `position` again.

- Process killed before a block is written, or during the write: the torn block fails its checksum. It is cut off with
  the blocks of its transaction, when the next block is written.
- Process killed after the write, before fsync(): the file may have the block. The next writer keeps it, writes it again
  and syncs it before `position` includes it. The reason is a failed fsync(), after which the kernel may show pages as
  clean that never reached the disk.
- Process killed after the index is written, before the rename: the index is cut off, and the segment is continued.
- Process killed after the rename, before the next segment exists: a new segment starts where the last one ends.
- Process killed before a new segment has its name: the segment is created again. Header and name are synced first, so a
  crash does not leave a damaged header.
- Process killed between two removals of old segments: the oldest are removed, because the directory is synced after
  each removal.
- Disk full, or another error of the operating system: the writer closes itself, and no file is cut.
- Machine crashed: "durable" is never synced and may be old. Damage in the last synced blocks then resembles a torn
  tail. Nothing is cut until the archiver has compared `position` with its slot (worker/archive/worker.py).
- Damage before the recorded position, or a recorded segment is missing: open() raises ChangeLogDamaged and changes no
  file.
- "durable" damaged or lost: the log ends at its last whole transaction. The archiver's slot shows whether the log is
  complete.
- Process stopped (SIGSTOP), or it hangs: it keeps the lock, because the kernel cannot know whether it will write again.
  A standby waits, and its log names the process. Kill that process to let the standby take over.
- File system of several machines: whether the lock of a machine that has disappeared ends is up to the file system. A
  standby on another machine belongs to a log in an object store (object_writer.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Protocol

from subscriber import telemetry
from subscriber.changelog.consumers import KEEP_ALL, LogRetention, StoredSegment, expired
from subscriber.changelog.files import (
    DURABLE,
    IDENTITY,
    LOCK,
    Identity,
    SegmentFile,
    SegmentReader,
    check_recorded,
    damaged,
    open_path,
    read_durable,
    sealed_path,
    segment_files,
)
from subscriber.changelog.publisher_timeline import read_timeline, store_timeline
from subscriber.changelog.schema_history import SCHEMA, SchemaHistory, TableVersion, store_versions
from subscriber.changelog.segment import (
    BOUNDARY,
    HEADER_SIZE,
    Block,
    Durable,
    encode_block,
    encode_end,
    encode_header,
)
from subscriber.changelog.storage import Location, cut_unfinished_line, sync_directory
from subscriber.changelog.writer_lock import WriterLock
from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from subscriber.sqlstate import DISK_FULL, IO_ERROR
from subscriber.timeline_history import TimelineHistory

SEGMENT_SIZE = 64 * 1024 * 1024  # bytes
SEGMENT_AGE = 300.0  # seconds
_CHUNK = 1024 * 1024  # bytes of one write when blocks are written again


class LogWriter(Protocol):
    """The methods of a writer that the archiver uses: ChangeLogWriter, or ObjectLogWriter in an object store.

    Its methods are described there. They block, and are not thread-safe.
    """

    identity: Identity | None
    position: Lsn
    schema: SchemaHistory
    timeline: TimelineHistory | None
    store_interval: float  # seconds after which wants_seal() may become True
    lock: WriterLock

    @property
    def location(self) -> Location: ...
    def open(self) -> None: ...
    def create(self, identity: Identity) -> None: ...
    def close(self) -> None: ...
    def check_lock(self) -> None: ...
    def check_tail(self, confirmed: Lsn) -> None: ...
    def append(self, blocks: list[Block]) -> None: ...
    def describe(self, versions: Sequence[TableVersion]) -> None: ...
    def record_timeline(self, history: TimelineHistory | None) -> None: ...
    def sync(self) -> None: ...
    def wants_seal(self) -> bool: ...
    def seal(self) -> None: ...


class ChangeLogWriter:
    """The writer of a directory. A lock keeps other writers away. Methods block, and are not thread-safe.

    Attributes:
        directory: the directory of the log.
        identity: the contents of log.json. None: the directory has no log yet.
        position: can be confirmed to the publisher, because everything before it is on disk.
        schema: the schema history of the log.
        timeline: the publisher's timelines that `position` belongs to. None: they are not known.
        store_interval: `segment_age`.
        lock: keeps other writers away. open() takes it, unless this process has it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segment_size: int = SEGMENT_SIZE,
        segment_age: float = SEGMENT_AGE,
        retention: LogRetention = KEEP_ALL,
    ) -> None:
        """Create a writer; open() opens it.

        Args:
            directory: the directory of the log.
            segment_size: bytes after which a segment is sealed.
            segment_age: seconds after which a segment is sealed, if it has changes.
            retention: which sealed segments are removed.
        """
        self.directory = directory
        self.identity: Identity | None = None
        self.position = Lsn(0)
        self.schema = SchemaHistory()
        self.timeline: TimelineHistory | None = None
        self._segment_size, self._segment_age = segment_size, segment_age
        self.store_interval = segment_age
        self._retention = retention
        self.lock = WriterLock(directory, LOCK)
        self._fd = -1
        self._durable_fd = -1
        # The open segment:
        self._start = Lsn(0)
        self._offset = 0  # its end, where the next block is written
        self._boundary = 0  # offset of the last end of a transaction
        self._torn = 0  # bytes after `_offset`, to be cut off before the next write
        self._last = Lsn(0)  # position of the last written boundary
        self._changes = 0
        self._index: list[tuple[int, Lsn]] = []  # offset of each RESTART block, and the position before it
        self._opened = monotonic()

    @property
    def location(self) -> Path:
        """The directory of the log."""
        return self.directory

    # --- opening --------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the directory, which is created if it does not exist, and resume its log if it has one.

        Raises:
            ChangeLogDamaged: files of the log are damaged or missing. No file has been changed.
            ChangeLogError: another process writes the log, or a system call has failed.
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
        self.identity = Identity.read(self.directory)
        files = segment_files(self.directory, self.identity)
        if self.identity is not None:
            self._resume(self.identity, files)
        elif files:
            raise damaged(
                f'the change log in "{self.directory}" has segments, but no {IDENTITY}',
                detail=f'The first segment is "{files[0].path.name}".',
            )
        cut_unfinished_line(self.directory / SCHEMA)
        self.schema = SchemaHistory.read(self.directory)
        self.timeline = read_timeline(self.directory)
        self._durable_fd = os.open(self.directory / DURABLE, os.O_RDWR | os.O_CREAT, 0o640)
        # A killed writer may not have synced the directory.
        sync_directory(self.directory)
        if self.identity is not None:
            self.sync()

    def create(self, identity: Identity) -> None:
        """Create a log in a directory without one, after open().

        Raises:
            ChangeLogError: a system call has failed, and the writer has to be opened again.
        """
        try:
            # Written first: without it the owner of a segment is unknown.
            identity.write(self.directory)
            self.identity = identity
            self._begin_segment(identity.start)
        except OSError as error:
            raise self._failed("begin", error) from error
        self.sync()

    def close(self) -> None:
        """Release the directory. The next writer keeps unsynced whole transactions and cuts off a torn tail."""
        for fd in (self._fd, self._durable_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._durable_fd = -1
        self.lock.release()

    def _resume(self, identity: Identity, files: list[SegmentFile]) -> None:
        """Continue the open segment, or start one. No file is changed before the log is known to be complete."""
        recorded = read_durable(self.directory)
        last = files[-1] if files else None
        if last is not None and last.end is None:
            with SegmentReader(last.path) as reader:
                reader.check_publisher(identity.system_id)
                self._recover(reader, recorded)
            return
        end = identity.start if last is None or last.end is None else last.end
        check_recorded(self.directory, end, recorded)
        self._begin_segment(end)

    def check_lock(self) -> None:
        """Do nothing: the kernel keeps the lock as long as the process has the log open."""

    def check_tail(self, confirmed: Lsn) -> None:
        """Raise ChangeLogDamaged if the open segment has bytes after `position`, and these cannot be a torn tail.

        Args:
            confirmed: the position of the slot, which is greater than `position`. Blocks before it were synced, so a
                crash cannot have torn them.
        """
        if self._torn:
            with SegmentReader(open_path(self.directory, self._start)) as reader:
                detail = f" The publisher knows everything before {confirmed} to be stored."
                raise reader.damage(self._offset, self.position, detail)

    def _recover(self, reader: SegmentReader, recorded: Durable | None) -> None:
        """Continue the open segment after its last whole transaction. _write() cuts off the bytes that follow."""
        extent, size = reader.extent(), reader.size
        synced = HEADER_SIZE
        if recorded is not None and recorded.segment == reader.start:
            synced = recorded.offset
            if synced > extent.offset:
                offset = size if extent.torn is None else extent.torn
                detail = f' The file has {size} bytes, and "{DURABLE}" records {synced} as stored.'
                raise reader.damage(offset, extent.position, detail)
        check_recorded(self.directory, extent.position, recorded)
        self._start, self._offset = reader.start, extent.offset
        self._boundary, self._last = extent.offset, extent.position
        self._changes, self._index = extent.changes, extent.places
        self._torn = 0
        self._fd = os.open(reader.file.local_path, os.O_RDWR)
        for offset in range(synced, extent.offset, _CHUNK):
            self._write(os.pread(self._fd, min(_CHUNK, extent.offset - offset), offset), offset)
        self._torn = size - extent.offset
        self._opened = monotonic()

    def _begin_segment(self, start: Lsn) -> None:
        assert self.identity is not None
        path = open_path(self.directory, start)
        begun = path.with_suffix(".new")  # readers ignore it until it has its header
        self._start = self._last = start
        self._offset = self._boundary = HEADER_SIZE
        self._torn = self._changes = 0
        self._index = []
        self._opened = monotonic()
        self._fd = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
        self._write(encode_header(self.identity.system_id, start), 0)
        os.fsync(self._fd)
        begun.rename(path)
        sync_directory(self.directory)

    # --- appending ------------------------------------------------------------------------------

    def append(self, blocks: list[Block]) -> None:
        """Write blocks of a BlockBuilder, without waiting for the disk. May seal the segment before a RESTART block.

        Raises:
            ChangeLogError: a system call has failed, and the writer has to be opened again.
        """
        self._check_usable()
        try:
            for block in blocks:
                if block.restart and self.wants_seal():
                    self._seal()
                if block.restart:
                    self._index.append((self._offset, self._last))
                self._write(encode_block(block, self._start, self._offset), self._offset)
                self._offset += block.size
                self._changes += block.changes
                if block.flags & BOUNDARY:
                    self._last = block.position
                    self._boundary = self._offset
        except OSError as error:
            raise self._failed("write", error) from error

    def describe(self, versions: Sequence[TableVersion]) -> None:
        """Store versions of tables. They must be stored before the changes that follow them are synced.

        Raises:
            ChangeLogError: a system call has failed, and the writer has to be opened again.
        """
        self._check_usable()
        try:
            store_versions(self.directory, versions)
        except OSError as error:
            raise self._failed("write", error) from error
        for version in versions:
            self.schema.add(version)

    def record_timeline(self, history: TimelineHistory | None) -> None:
        """Store the publisher's timelines, before changes of them are appended. None: they are not known.

        Raises:
            ChangeLogError: a system call has failed, and the writer has to be opened again.
        """
        self._check_usable()
        if history == self.timeline:
            return
        try:
            store_timeline(self.directory, history)
        except OSError as error:
            raise self._failed("write", error) from error
        self.timeline = history

    def sync(self) -> None:
        """Sync all appended blocks, and set `position` to the end of their last transaction.

        Raises:
            ChangeLogError: a system call has failed, and the writer has to be opened again.
        """
        self._check_usable()
        try:
            os.fsync(self._fd)
            self._record(self._last)
        except OSError as error:
            raise self._failed("sync", error) from error

    def wants_seal(self) -> bool:
        """Return True if the open segment has reached `segment_size` or `segment_age`. False if it has no changes."""
        if not self._changes:
            return False
        return self._offset >= self._segment_size or monotonic() - self._opened >= self._segment_age

    def seal(self) -> None:
        """End the open segment, which does not change afterwards, and start the next one.

        May be called only at a boundary. The next appended block must be a RESTART block. Old segments are removed
        according to `retention`.

        Raises:
            ChangeLogError: a system call has failed, and the writer has to be opened again.
        """
        self._check_usable()
        try:
            self._seal()
        except OSError as error:
            raise self._failed("seal", error) from error

    def _seal(self) -> None:
        self._write(encode_end(self._index, self._last, self._start, self._offset), self._offset)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        start, end_lsn = self._start, self._last
        open_path(self.directory, start).rename(sealed_path(self.directory, start, end_lsn))
        # Synced before the next segment exists, so that a crash leaves no gap.
        sync_directory(self.directory)
        self._begin_segment(end_lsn)
        self._record(end_lsn)
        self._retain()

    def _write(self, data: bytes, offset: int) -> None:
        if self._torn:
            self._cut()
        left = memoryview(data)
        while left:
            written = os.pwrite(self._fd, left, offset)
            left, offset = left[written:], offset + written

    def _cut(self) -> None:
        """Cut off the torn tail and sync the file, so that no old block follows a new one after a crash."""
        os.ftruncate(self._fd, self._offset)
        os.fsync(self._fd)
        telemetry.log(
            telemetry.LOG,
            f"cut {self._torn} bytes of an unfinished transaction off the change log at {self._last}",
            event="archive.recovered",
        )
        self._torn = 0

    def _check_usable(self) -> None:
        if self._fd < 0:
            raise ChangeLogError(
                f'the change log in "{self.directory}" is not open for writing',
                hint="Open it again: a call of the system has failed, or it has been closed.",
            )

    def _failed(self, what: str, error: OSError) -> ChangeLogError:
        """Close the writer, which has to be opened again, and return the error for a failed system call."""
        self.close()
        file = error.filename or open_path(self.directory, self._start)
        return ChangeLogError(
            f'could not {what} the change log in "{self.directory}": {error.strerror}',
            detail=f'The file is "{file}", whose last whole transaction ends at offset {self._boundary}.',
            hint="Make room, or correct what the system refuses; `subscriber archive` then continues the log. "
            "The publisher keeps everything that is not stored.",
            sqlstate=DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else IO_ERROR,
        )

    def _record(self, position: Lsn) -> None:
        """Write `position` to the file "durable", then set it. Everything before it must be on disk."""
        os.pwrite(self._durable_fd, Durable(self._start, self._boundary, position, self._changes).encode(), 0)
        self.position = position

    # --- retention ------------------------------------------------------------------------------

    def _retain(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # a user has removed a segment; the next seal() retries
            for file in expired(self.directory, self._retention, self._stored_segments):
                file.path.unlink()
                # Synced after each removal, so that a crash leaves no gap between segments.
                sync_directory(self.directory)

    def _stored_segments(self) -> list[tuple[StoredSegment, SegmentFile]]:
        return [(_stored(file), file) for file in segment_files(self.directory) if file.end is not None]


def _stored(file: SegmentFile) -> StoredSegment:
    assert file.end is not None
    status = file.local_path.stat()
    return StoredSegment(file.end, status.st_size, status.st_mtime)
