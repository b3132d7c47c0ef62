"""DirectorySegments: the segments of a change log as files of a directory.

Invariants.

- A position is confirmed after fsync() of the file, and of the directory if the name is new. The file "durable" records
  the position before it can be confirmed.
- resume() cuts nothing. Bytes after the last whole transaction are cut off when the first block is written. "durable"
  records no such bytes.

Failure cases. The publisher sends all changes after the confirmed position again.

- Process killed before a block is written, or during the write: the torn block fails its checksum. It is cut off with
  the blocks of its transaction, when the next block is written.
- Process killed after the write, before fsync(): the file may have the block. The next writer keeps it, writes it again
  and syncs it before its position is confirmed. The reason is a failed fsync(), after which the kernel may show pages
  as clean that never reached the disk.
- Process killed after the index is written, before the rename: the index is cut off, and the segment is continued.
- Process killed after the rename, before the next segment exists: a new segment starts where the last one ends.
- Process killed before a new segment has its name: the segment is created again. Header and name are synced first, so a
  crash does not leave a damaged header.
- Process killed between two removals of old segments: the oldest are removed, because the directory is synced after
  each removal.
- Disk full, or another error of the operating system: no file is cut.
- Machine crashed: "durable" is never synced and may be old. Damage in the last synced blocks then resembles a torn
  tail. Nothing is cut until the archiver has compared the position with its slot (archive/worker.py).
- Damage before the recorded position, or a recorded segment is missing: resume() raises ChangeLogDamaged and changes no
  file.
- "durable" damaged or lost: the log ends at its last whole transaction. The archiver's slot shows whether the log is
  complete.
- Process stopped (SIGSTOP), or it hangs: it keeps the lock, because the kernel cannot know whether it will write again.
  A standby waits, and its log names the process. Kill that process to let the standby take over.
- File system of several machines: whether the lock of a machine that has disappeared ends is up to the file system. A
  standby on another machine belongs to a log in an object store (object_segments.py).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from subscriber import telemetry
from subscriber.changelog.consumers import StoredSegment
from subscriber.changelog.files import (
    DURABLE,
    LOCK,
    Identity,
    SegmentFile,
    SegmentReader,
    check_recorded,
    open_path,
    read_durable,
    sealed_path,
    segment_files,
)
from subscriber.changelog.open_segment import OpenSegment
from subscriber.changelog.schema_history import SCHEMA
from subscriber.changelog.segment import HEADER_SIZE, Durable, encode_header
from subscriber.changelog.storage import Location, create_file, cut_unfinished_line, open_regular, sync_directory
from subscriber.changelog.writer_lock import WriterLock
from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from subscriber.sqlstate import DISK_FULL, IO_ERROR

_CHUNK = 1024 * 1024  # bytes of one write when blocks are written again


class DirectorySegments:
    """The segments of a log in a directory. Methods are described in SegmentStore."""

    segment_age = 300.0

    def __init__(self, directory: Path) -> None:
        """Create the store of a directory, which need not exist yet."""
        self.lock = WriterLock(directory, LOCK)
        self._directory = directory
        self._fd = -1
        self._durable_fd = -1
        self._torn = 0  # bytes after the open segment, to be cut off before the next write

    @property
    def location(self) -> Path:
        return self._directory

    def resume(self, identity: Identity, files: list[SegmentFile]) -> OpenSegment:
        recorded = read_durable(self._directory)
        last = files[-1] if files else None
        if last is not None and last.end is None:
            with SegmentReader(last.path) as reader:
                reader.check_publisher(identity.system_id)
                return self._recover(reader, recorded)
        end = identity.start if last is None or last.end is None else last.end
        check_recorded(self._directory, end, recorded)
        segment = OpenSegment.at(end)
        self.begin(segment, identity.system_id)
        return segment

    def _recover(self, reader: SegmentReader, recorded: Durable | None) -> OpenSegment:
        """Continue the open segment after its last whole transaction. write() cuts off the bytes that follow."""
        extent, size = reader.extent(), reader.size
        synced = HEADER_SIZE
        if recorded is not None and recorded.segment == reader.start:
            synced = recorded.offset
            if synced > extent.offset:
                offset = size if extent.torn is None else extent.torn
                detail = f' The file has {size} bytes, and "{DURABLE}" records {synced} as stored.'
                raise reader.damage(offset, extent.position, detail)
        check_recorded(self._directory, extent.position, recorded)
        self._fd = open_regular(reader.file.local_path, os.O_RDWR)
        for offset in range(synced, extent.offset, _CHUNK):
            self._write(os.pread(self._fd, min(_CHUNK, extent.offset - offset), offset), offset)
        self._torn = size - extent.offset
        self._prepare()
        return OpenSegment(reader.start, extent.position, extent.offset, extent.offset, extent.changes, extent.places)

    def begin(self, segment: OpenSegment, system_id: int) -> None:
        path = open_path(self._directory, segment.start)
        begun = path.with_suffix(".new")  # readers ignore it until it has its header
        self._torn = 0
        self._fd = create_file(begun)
        self._write(encode_header(system_id, segment.start), 0)
        os.fsync(self._fd)
        begun.rename(path)
        self._prepare()

    def _prepare(self) -> None:
        """Open "durable" if it is not open, and sync the directory. A killed writer may not have done it."""
        if self._durable_fd < 0:
            cut_unfinished_line(self._directory / SCHEMA)
            self._durable_fd = open_regular(self._directory / DURABLE, os.O_RDWR | os.O_CREAT)
        sync_directory(self._directory)

    def write(self, segment: OpenSegment, data: bytes) -> None:
        if self._torn:
            self._cut(segment)
        self._write(data, segment.offset)

    def _write(self, data: bytes, offset: int) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._fd, left, offset)
            left, offset = left[written:], offset + written

    def _cut(self, segment: OpenSegment) -> None:
        """Cut off the torn tail and sync the file, so that no old block follows a new one after a crash."""
        os.ftruncate(self._fd, segment.offset)
        os.fsync(self._fd)
        telemetry.log(
            telemetry.LOG,
            f"cut {self._torn} bytes of an unfinished transaction off the change log at {segment.position}",
            event="archive.recovered",
        )
        self._torn = 0

    def sync(self, segment: OpenSegment) -> Lsn:
        os.fsync(self._fd)
        durable = Durable(segment.start, segment.boundary, segment.position, segment.changes)
        os.pwrite(self._durable_fd, durable.encode(), 0)
        return segment.position

    def seal(self, segment: OpenSegment) -> None:
        self.write(segment, segment.end())
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        path = sealed_path(self._directory, segment.start, segment.position)
        open_path(self._directory, segment.start).rename(path)
        # Synced before the next segment exists, so that a crash leaves no gap.
        sync_directory(self._directory)

    def sealed(self, segment: OpenSegment) -> list[tuple[StoredSegment, Location]]:
        return [(_stored(file, file.end), file.path) for file in segment_files(self._directory) if file.end is not None]

    def check_tail(self, segment: OpenSegment, confirmed: Lsn) -> None:
        if self._torn:
            with SegmentReader(open_path(self._directory, segment.start)) as reader:
                detail = f" The publisher knows everything before {confirmed} to be stored."
                raise reader.damage(segment.offset, segment.position, detail)

    def close(self) -> None:
        """Release the directory. The next writer keeps unsynced whole transactions and cuts off a torn tail."""
        for fd in (self._fd, self._durable_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._durable_fd = -1
        self.lock.release()

    def failure(self, what: str, error: OSError, segment: OpenSegment | None) -> ChangeLogError:
        file = error.filename or (segment and open_path(self._directory, segment.start))
        ends = segment and f", whose last whole transaction ends at offset {segment.boundary}"
        return ChangeLogError(
            f'could not {what} the change log in "{self._directory}": {error.strerror}',
            detail=f'The file is "{file}"{ends or ""}.' if file else None,
            hint="Make room, or correct what the system refuses; `subscriber archive` then continues the log. "
            "The publisher keeps everything that is not stored.",
            sqlstate=DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else IO_ERROR,
        )


def _stored(file: SegmentFile, end: Lsn) -> StoredSegment:
    status = file.local_path.stat()
    return StoredSegment(end, status.st_size, status.st_mtime)
