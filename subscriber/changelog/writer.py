"""LogWriter: appends blocks to the change log, syncs and seals segments, and resumes after a crash.

Purpose. The contract is that of PostgreSQL's archive modules: the sender keeps its data until the writer confirms that
it is stored. The confirmed position is `position`. A SegmentStore keeps the segments: files of a directory
(directory_segments.py), or objects (object_segments.py). Both describe what remains after a kill at any moment.

Invariants.

- `position` is the end of a transaction, and everything before it is stored. The file "durable" records it before it
  can be confirmed.
- A version of a table is stored before a segment that has changes of it, and so are the publisher's timelines.

Failure cases. The publisher sends all changes after `position` again.

- Error of the operating system or the object store: the writer closes itself, and has to be opened again.
- Damage: open() raises ChangeLogDamaged and changes no file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from subscriber.changelog.consumers import KEEP_ALL, LogRetention, expired
from subscriber.changelog.directory_segments import DirectorySegments
from subscriber.changelog.files import IDENTITY, Identity, damaged, segment_files
from subscriber.changelog.object_segments import ObjectSegments
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.open_segment import OpenSegment, SegmentStore
from subscriber.changelog.publisher_timeline import read_timeline, store_timeline
from subscriber.changelog.schema_history import SchemaHistory, TableVersion, store_versions
from subscriber.changelog.segment import Block, encode_block
from subscriber.changelog.storage import Location, location, remove_file
from subscriber.changelog.writer_lock import lease_lost
from subscriber.errors import ChangeLogError
from subscriber.lsn import Lsn
from subscriber.timeline_history import TimelineHistory

SEGMENT_SIZE = 64 * 1024 * 1024  # bytes


class LogWriter:
    """The writer of one log. A lock or a lease keeps others away. Methods block, and are not thread-safe.

    Attributes:
        location: the directory or the path of the log.
        identity: the contents of log.json. None: there is no log yet.
        position: can be confirmed to the publisher, because everything before it is stored.
        schema: the schema history of the log.
        timeline: the publisher's timelines that `position` belongs to. None: they are not known.
        store_interval: seconds after which wants_seal() may become True.
        lock: keeps other writers away. open() takes it, unless this process has it.
    """

    def __init__(
        self,
        store: SegmentStore,
        *,
        segment_size: int = SEGMENT_SIZE,
        segment_age: float | None = None,
        retention: LogRetention = KEEP_ALL,
    ) -> None:
        """Create a writer; open() opens it. log_writer() chooses the store.

        Args:
            store: keeps the segments.
            segment_size: bytes after which a segment is sealed.
            segment_age: seconds after its first change after which a segment is sealed. None: that of the store.
            retention: which sealed segments are removed.
        """
        self.location = store.location
        self.identity: Identity | None = None
        self.position = Lsn(0)
        self.schema = SchemaHistory()
        self.timeline: TimelineHistory | None = None
        self.store_interval = store.segment_age if segment_age is None else segment_age
        self.lock = store.lock
        self._store = store
        self._segment_size = segment_size
        self._retention = retention
        self._segment: OpenSegment | None = None  # None: the writer is not open, or there is no log yet

    # --- opening --------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock, and resume the log if there is one. A directory is created if it does not exist.

        Raises:
            ChangeLogDamaged: files of the log are damaged or missing. None has been changed.
            ChangeLogError: another process writes the log, or storage has failed.
        """
        with self._closing_on_error("open"):
            self.lock.acquire()
            self.identity = Identity.read(self.location)
            files = segment_files(self.location, self.identity)
            self.schema = SchemaHistory.read(self.location)
            self.timeline = read_timeline(self.location)
            if self.identity is not None:
                self._segment = self._store.resume(self.identity, files)
                self.position = self._store.sync(self._segment)
            elif files:
                raise damaged(
                    f'the change log in "{self.location}" has segments, but no {IDENTITY}',
                    detail=f'The first segment is "{files[0].path.name}".',
                )

    def create(self, identity: Identity) -> None:
        """Create a log where there is none, after open().

        Raises:
            ChangeLogError: storage has failed, and the writer has to be opened again.
        """
        with self._closing_on_error("begin"):
            self.lock.check()
            # Written first: without it the owner of a segment is unknown.
            identity.write(self.location)
            self.identity = identity
            self._begin_segment(identity.start)

    def close(self) -> None:
        """Release the lock. What was not synced may be lost."""
        self._segment = None
        self._store.close()

    def check_lock(self) -> None:
        """Raise ChangeLogError if another process may have taken the lock. May be called from any thread."""
        try:
            self.lock.check()
        except OSError as error:
            raise lease_lost(self.location, error.strerror) from error

    def check_tail(self, confirmed: Lsn) -> None:
        """Raise ChangeLogDamaged if the open segment has bytes after `position`, and these cannot be a torn tail.

        Args:
            confirmed: the position of the slot, which is greater than `position`. Blocks before it were synced, so a
                crash cannot have torn them.
        """
        self._store.check_tail(self._opened(), confirmed)

    # --- appending ------------------------------------------------------------------------------

    def append(self, blocks: list[Block]) -> None:
        """Write blocks of a BlockBuilder, without waiting for the storage. May seal the segment before a RESTART block.

        Raises:
            TransactionTooLarge: the storage cannot have a segment with this transaction.
            ChangeLogError: storage has failed, and the writer has to be opened again.
        """
        segment = self._opened()
        with self._closing_on_error("write"):
            for block in blocks:
                if block.restart and self.wants_seal():
                    segment = self._seal(segment)
                self._store.write(segment, encode_block(block, segment.start, segment.offset))
                segment.add(block)

    def describe(self, versions: Sequence[TableVersion]) -> None:
        """Store versions of tables. They must be stored before the changes that follow them are appended.

        Raises:
            ChangeLogError: storage has failed, and the writer has to be opened again.
        """
        self._opened()
        with self._closing_on_error("write"):
            self.lock.check()
            store_versions(self.location, versions)
        for version in versions:
            self.schema.add(version)

    def record_timeline(self, history: TimelineHistory | None) -> None:
        """Store the publisher's timelines, before changes of them are appended. None: they are not known.

        Raises:
            ChangeLogError: storage has failed, and the writer has to be opened again.
        """
        self._opened()
        if history == self.timeline:
            return
        with self._closing_on_error("write"):
            self.lock.check()
            store_timeline(self.location, history)
        self.timeline = history

    def sync(self) -> None:
        """Store all appended blocks, and set `position` to the end of their last transaction.

        An object store stores changes only when their segment is sealed. `position` then does not move.

        Raises:
            ChangeLogError: storage has failed, and the writer has to be opened again.
        """
        segment = self._opened()
        with self._closing_on_error("sync"):
            self.position = self._store.sync(segment)

    def wants_seal(self) -> bool:
        """Return True if the open segment has reached `segment_size` or `segment_age`. False if it has no changes."""
        segment = self._segment
        if segment is None or not segment.changes:
            return False
        return segment.offset >= self._segment_size or monotonic() - segment.first_change >= self.store_interval

    def seal(self) -> None:
        """End the open segment, which does not change afterwards, and start the next one.

        May be called only at a boundary. The next appended block must be a RESTART block. Old segments are removed
        according to `retention`.

        Raises:
            ChangeLogError: storage has failed, and the writer has to be opened again.
        """
        segment = self._opened()
        with self._closing_on_error("seal"):
            self._seal(segment)

    def _seal(self, segment: OpenSegment) -> OpenSegment:
        """Seal the segment, and return the next one."""
        self._store.seal(segment)
        following = self._begin_segment(segment.position)
        with contextlib.suppress(FileNotFoundError):  # a user has removed a segment; the next seal() retries
            for path in expired(self.location, self._retention, partial(self._store.sealed, following)):
                remove_file(path)
        return following

    def _begin_segment(self, start: Lsn) -> OpenSegment:
        assert self.identity is not None
        self._segment = segment = OpenSegment.at(start)
        self._store.begin(segment, self.identity.system_id)
        self.position = self._store.sync(segment)
        return segment

    def _opened(self) -> OpenSegment:
        if self._segment is None:
            raise ChangeLogError(
                f'the change log in "{self.location}" is not open for writing',
                hint="Open it again: its storage has failed, or it has been closed.",
            )
        return self._segment

    @contextlib.contextmanager
    def _closing_on_error(self, what: str) -> Iterator[None]:
        """Close the writer if the block raises an error, and turn an OSError into a ChangeLogError.

        Args:
            what: what the block does, as a verb.
        """
        try:
            yield
        except OSError as error:
            failure = self._store.failure(what, error, self._segment)
            self.close()
            raise failure from error
        except ChangeLogError:
            self.close()
            raise


def log_writer(
    path: Location | str,
    *,
    segment_size: int = SEGMENT_SIZE,
    segment_age: float | None = None,
    retention: LogRetention = KEEP_ALL,
    temporary: Path | None = None,
) -> LogWriter:
    """Return the writer for a directory or an object store.

    Args:
        path: the directory or the path of the log.
        segment_size, segment_age, retention: as in LogWriter().
        temporary: the directory of the open segment of an object store. None: that of temporary files.

    Raises:
        StatementError: storage of this kind is not supported.
    """
    where = location(path)
    store: SegmentStore
    store = ObjectSegments(where, temporary=temporary) if isinstance(where, ObjectPath) else DirectorySegments(where)
    return LogWriter(store, segment_size=segment_size, segment_age=segment_age, retention=retention)
