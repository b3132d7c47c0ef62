"""Writing the change log: appended, synced, sealed, and found whole again after any end.

The contract is that of PostgreSQL's archive modules: whoever hands data over keeps it until it is told
that it is stored, and it is told so only after fsync() of the file and, for a new name, of its directory.
What is told is `position`.

Kill points considered. After each of them open() finds the log as it was at a boundary between
transactions that is at or after `position`, and the publisher sends what follows:

- before a block is written, or in the middle: the torn block fails its checksum and is cut off, with the
  pieces of its transaction before it.
- after the write, before fsync(): the block may be there. It is kept and synced before anybody hears of it.
- index written, not renamed: the index is cut off, and the segment goes on.
- renamed, no new segment yet: there is no open segment; one is begun where the last one ends.
- new segment made, not named yet: it is made again. Its header torn all the same: the name says where it
  starts; it is begun again.
- the disk is full, or fsync() fails: what the kernel says of those pages cannot be believed any more, so the
  file is cut back to what is known to be durable, and the error ends this writer. The publisher has it all.
- the file "durable" is written after each fsync() and never synced: it is for readers in other processes. One
  that is behind only hides what came last; one that is damaged makes them check the blocks themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from time import monotonic, time

from subscriber import telemetry
from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from subscriber.spool.logfiles import (
    DURABLE,
    LOCK,
    Identity,
    SegmentFile,
    SegmentReader,
    open_path,
    sealed_path,
    segment_files,
    sync_directory,
)
from subscriber.spool.segment import (
    BOUNDARY,
    HEADER_SIZE,
    INDEX,
    Block,
    Durable,
    TornBlock,
    encode_block,
    encode_header,
    encode_index,
    encode_trailer,
)

SEGMENT_SIZE = 64 * 1024 * 1024  # bytes
SEGMENT_AGE = 300.0  # seconds


class ChangeLogWriter:
    """The one writer of a directory. Blocking, and not for two threads at once.

    `position` is what may be confirmed to the publisher: everything before it is on disk.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segment_size: int = SEGMENT_SIZE,
        segment_age: float = SEGMENT_AGE,
        keep_size: int | None = None,
        keep_age: float | None = None,
    ) -> None:
        """A segment is sealed at `segment_size` bytes or `segment_age` seconds, whichever comes first.

        Sealed segments are removed, oldest first, while all of them together are larger than `keep_size` bytes,
        and when they are older than `keep_age` seconds; None keeps them.
        """
        self.directory = directory
        self.identity: Identity | None = None  # None: there is no log here yet
        self.position = Lsn(0)
        self._segment_size, self._segment_age = segment_size, segment_age
        self._keep_size, self._keep_age = keep_size, keep_age
        self._lock = -1
        self._fd = -1
        self._durable_fd = -1
        self._start = Lsn(0)  # of the open segment
        self._offset = 0  # its length
        self._boundary = 0  # of that, up to the last end of a transaction
        self._durable_offset = 0  # of that, on disk
        self._last = Lsn(0)  # position of the last boundary written
        self._changes = 0  # in the open segment
        self._index: list[tuple[int, Lsn]] = []
        self._opened = monotonic()

    # --- opening --------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the directory, which is made if need be, and go on where the log in it ends.

        Raises ChangeLogError when another process writes it, what is there cannot be a whole log, or it cannot be used.
        """
        try:
            self._open()
        except OSError as error:
            raise self._failed("open", error) from error

    def _open(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows are nobody else's business
        self._take_lock()
        self._durable_fd = os.open(self.directory / DURABLE, os.O_RDWR | os.O_CREAT, 0o640)
        self.identity = Identity.read(self.directory)
        files = segment_files(self.directory)
        if self.identity is None:
            if files:
                raise ChangeLogError(f'"{self.directory}" has segments of a change log, but not its log.json')
            return
        if files and files[-1].end is None:
            self._recover(files[-1])
        else:
            self._begin_segment(files[-1].end or self.identity.start if files else self.identity.start)
        self.sync()

    def _take_lock(self) -> None:
        self._lock = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ChangeLogError(
                f'another process writes the change log in "{self.directory}"', sqlstate="55006"
            ) from None

    def create(self, identity: Identity) -> None:
        """Begin a log where there is none."""
        try:
            identity.write(self.directory)  # first: a segment without it belongs to nobody
            self.identity = identity
            self._begin_segment(identity.start)
        except OSError as error:
            raise self._failed("begin", error) from error
        self.sync()

    def close(self) -> None:
        """Let go of everything; what was not synced is cut off by the next open(), or kept if it is whole."""
        for fd in (self._fd, self._durable_fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._durable_fd = self._lock = -1

    def _recover(self, file: SegmentFile) -> None:
        """Find the last boundary of the open segment, and cut off what is behind it."""
        try:
            with SegmentReader(file.path) as reader:
                if reader.start != file.start:
                    raise TornBlock
                self._scan(reader)
        except TornBlock:
            file.path.unlink()
            self._begin_segment(file.start)
            return
        self._start = file.start
        self._fd = os.open(file.path, os.O_RDWR)
        size = os.fstat(self._fd).st_size
        if size > self._offset:
            os.ftruncate(self._fd, self._offset)
            telemetry.log(
                telemetry.LOG,
                f"cut {size - self._offset} bytes of an unfinished transaction off the change log at {self._last}",
                event="archive.recovered",
            )

    def _scan(self, reader: SegmentReader) -> None:
        """Set _offset, _last, _changes and _index to what is whole."""
        offset = self._offset = HEADER_SIZE
        self._last, self._changes, self._index = reader.start, 0, []
        changes, restarts = 0, []
        with contextlib.suppress(TornBlock):
            while (block := reader.block(offset)).kind != INDEX:
                if block.restart:
                    restarts.append((offset, self._last))
                offset += block.size
                changes += block.changes
                if block.boundary:
                    self._offset, self._last, self._changes = offset, block.position, changes
                    self._index += restarts
                    restarts = []
        self._boundary = self._offset

    def _begin_segment(self, start: Lsn) -> None:
        assert self.identity is not None
        path = open_path(self.directory, start)
        begun = path.with_suffix(".new")  # a reader never sees it without its header
        self._fd = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
        self._write(encode_header(self.identity.system_id, start), 0)
        os.fsync(self._fd)
        begun.rename(path)
        sync_directory(self.directory)
        self._start = self._last = start
        self._offset = self._boundary = self._durable_offset = HEADER_SIZE
        self._changes, self._index = 0, []
        self._opened = monotonic()

    # --- appending ------------------------------------------------------------------------------

    def append(self, blocks: list[Block]) -> None:
        """Write blocks, which BlockBuilder made, without waiting for the disk."""
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

    def sync(self) -> None:
        """Make durable what was appended, and `position` what it says of itself."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed("sync", error) from error
        self._durable_offset = self._boundary
        self.position = self._last
        self._tell_readers()

    def wants_seal(self) -> bool:
        """Whether the open segment is large or old enough; never when it has no changes."""
        if not self._changes:
            return False
        return self._offset >= self._segment_size or monotonic() - self._opened >= self._segment_age

    def seal(self) -> None:
        """End the open segment, which nobody changes afterwards, and begin the next.

        Only at a boundary; the next block to be appended must be a RESTART block.
        """
        try:
            self._seal()
        except OSError as error:
            raise self._failed("seal", error) from error

    def _seal(self) -> None:
        index = Block(INDEX, BOUNDARY, self._last, 0, 0, encode_index(self._index))
        end = encode_block(index, self._start, self._offset) + encode_trailer(self._offset)
        self._write(end, self._offset)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        start, end_lsn = self._start, self._last
        open_path(self.directory, start).rename(sealed_path(self.directory, start, end_lsn))
        self._begin_segment(end_lsn)
        self.position = end_lsn
        self._tell_readers()
        self._retain()

    def _write(self, data: bytes, offset: int) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._fd, left, offset)
            left, offset = left[written:], offset + written

    def _failed(self, what: str, error: OSError) -> ChangeLogError:
        """The error of a failed write or sync; leaves in the file what is known to be durable."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._durable_offset)
        return ChangeLogError(
            f'could not {what} the change log in "{self.directory}": {error.strerror}',
            hint="The publisher keeps what is not stored yet. It is tried again.",
            sqlstate="53100" if error.errno == 28 else "58030",  # disk_full, io_error
        )

    def _tell_readers(self) -> None:
        state = Durable(self._start, self._durable_offset, self.position, self._changes)
        with contextlib.suppress(OSError):  # readers then look at the blocks themselves
            os.pwrite(self._durable_fd, state.encode(), 0)

    # --- retention ------------------------------------------------------------------------------

    def _retain(self) -> None:
        sealed = [file for file in segment_files(self.directory) if file.end is not None]
        sizes = [file.path.stat().st_size for file in sealed]
        total, oldest = sum(sizes), None if self._keep_age is None else time() - self._keep_age
        for file, size in zip(sealed, sizes, strict=True):
            too_much = self._keep_size is not None and total > self._keep_size
            too_old = oldest is not None and file.path.stat().st_mtime < oldest
            if not too_much and not too_old:
                break
            file.path.unlink()
            total -= size
            telemetry.log(telemetry.LOG, f'removed segment "{file.path.name}" of the change log')
