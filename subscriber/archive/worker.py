"""Archiver: stores the changes of a replication slot in a change log on disk. It needs no target database.

Purpose. A connection has these tasks:

    reader     reads messages into a queue; stops reading while `receive_queue_size` bytes are queued
    loop       builds blocks from the messages (changelog/encoder.py)
    storing    writes and syncs the blocks in a thread; blocks that are built in the meantime share the next sync
    feedback   confirms the stored position to the publisher (publisher/feedback.py)
    watch      ends the connection when another archiver may have taken the lease of the log

**Standby.** With `standby`, run() waits until no other process has the lock or the lease of the log, and then continues
it. Which process writes is decided by the log alone, never by the slot. So the two processes need not know each other.
A standby has no connection to the publisher. An archiver that cannot continue, for example because it does not reach
the publisher, closes the log before its next attempt. So a standby that can continue takes over.

Invariants.

- A position is confirmed only if the log records it. This includes the position of a keepalive between transactions. It
  is written to the log at each `status_interval`, and immediately if the publisher requests a reply.
- So the archiver never moves the slot past the end of the log.
- The slot has two_phase off, so a prepared transaction arrives when it is committed.
- The log's schema history has what the catalog says of a table before the log has its changes (schema_recorder.py).
- Large transactions are streamed while they are in progress. They are stored in a spool inside the log's directory
  until they commit (reassembly.py). If the log is in an object store, the spool is in a temporary directory.

Failure cases, in addition to those of the writer (changelog/writer.py).

- Process killed after the slot is created, before the log is: the log starts at the slot's position.
- Publisher has failed over to a server without all changes of the log, while an archiver ran or while none did: the
  archiver stops. The log has the timelines of its changes (changelog/publisher_timeline.py). Not noticed if the
  publisher of the last archiver was a standby.
- Slot confirmed past the end of the log: changes are missing, and the archiver stops. Bytes after the last whole
  transaction are damage in this case, and not a torn tail. The archiver stops before the writer cuts them off.
- Files of the log damaged: the archiver stops, because a retry cannot help. The publisher keeps all changes that are
  not stored.
- Disk full, object store not reachable, or another error of the operating system: the archiver retries at intervals.
  Each attempt opens the log as after a crash.

Failure cases of two archivers with one log. What keeps the second one from writing is described in
changelog/directory_segments.py for a directory, and in changelog/object_segments.py for an object store.

- Both start at the same time: the lock, or the store, gives the log to one process. The other one waits.
- First archiver killed: the standby has the log immediately, or after the lease has ended. It continues at the position
  that the log records, as a restarted archiver does.
- Its walsender is still active, because the publisher does not know yet that the client is gone: the standby waits for
  the slot. The log line names the process of the publisher. After `slot_release_timeout` it is an error, and the wait
  begins again. The standby does not terminate the process, which may belong to the archiver of another log.
- First archiver stopped (SIGSTOP), log in a directory: the standby waits until the process is killed or continues.
- The same, log in an object store: the standby takes the lease. The first archiver continues at some time, finds in
  the watch or at its next request that the lease is not its own, and closes its connection. It confirms only
  the changes that it had stored before.
- First archiver cut off from the store only: the same. The watch closes its connection while a request still hangs, so
  the slot is free for the standby.
- First archiver has stored and confirmed something after the standby has read the log: the slot is ahead of what the
  standby knows. It opens the log again before it says that changes are missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

import anyio
import anyio.lowlevel
import anyio.to_thread

from subscriber import server_features as features
from subscriber import telemetry
from subscriber.apply.progress import Positions
from subscriber.archive.reassembly import StreamReassembler
from subscriber.archive.schema_recorder import SchemaRecorder
from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import Identity, read_durable
from subscriber.changelog.storage import Location
from subscriber.changelog.writer import LogWriter
from subscriber.errors import ChangeLogError, EndOfStream, PublisherError, PublisherReplaced, SlotLost, SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.failpoints import Point, reached
from subscriber.formatting import in_seconds
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import Keepalive, XLogData, decode_from_publisher
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Relation
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher, SlotInfo, SystemIdentity
from subscriber.publisher.feedback import Feedback, limit_status_interval, read_sender_timeout
from subscriber.publisher.notices import NoticeLog
from subscriber.publisher.publications import check_publications
from subscriber.publisher.receive_queue import ReceiveQueue
from subscriber.publisher.replication_stream import (
    ReplicationStream,
    check_position,
)
from subscriber.publisher.timelines import check_history, read_history
from subscriber.remedy import Remedy
from subscriber.retry import Reaction, RetryDelay, reaction
from subscriber.settings import DEFAULTS, Settings
from subscriber.spool.spool import default_spool_root
from subscriber.sqlstate import OBJECT_IN_USE
from subscriber.timeline_history import TimelineHistory

SPOOL = "spool"  # the folder of streamed transactions, in the directory of the log
_RELATION = 0x52  # R
STOP_TIMEOUT = 2.0  # seconds for the publisher to end the stream
BEGIN_ANEW = "Begin a new log in another directory; what reads this one needs a new copy of the tables."
MIN_INTERVAL = 0.005  # seconds between two syncs; transactions that arrive closer together share one
_WAIT_REPORT = 60.0  # seconds between two log lines of a wait
_SLOT_POLL = 0.5  # seconds
_SLOT_PATIENCE = 1.0  # seconds in which the walsender of a connection that has just ended ends, too
_LOCK_CHECK = 1.0  # seconds


class Archiver:
    """Stores the changes of one slot in one change log.

    Attributes:
        error: the last error that run() retries, until whole transactions are stored again, there is nothing to store,
            or another process writes the log. None: there is none.
        failing_since: the time of the first such error, by monotonic(). None: there is none.
    """

    def __init__(
        self,
        source: str,
        slot: str,
        publications: Sequence[str],
        writer: LogWriter,
        until: Lsn | None = None,
        settings: Settings = DEFAULTS,
        *,
        standby: bool = False,
    ) -> None:
        """Create an archiver.

        Args:
            source: the connection string of the publisher.
            slot: the replication slot, which is created if it does not exist.
            publications: the names of publications.
            writer: the change log. It is open, unless `standby` is True.
            until: run() returns when the log has everything before this position. None: no end.
            settings: limits, intervals and time-outs.
            standby: wait while another process writes the log.
        """
        self._source = source
        self._slot = slot
        self._notices = NoticeLog(settings.notices_per_minute)
        self._publications = tuple(sorted(set(publications)))
        self._writer = writer
        self._until = until
        self._settings = settings
        self._standby = standby
        self.error: SubscriberError | None = None
        self.failing_since: float | None = None

    async def run(self) -> None:
        """Archive changes until `until`. Reconnects after all errors that a retry may solve.

        Raises:
            PublisherError: the slot is lost or cannot be used, changes are missing, or another publisher answers.
            ChangeLogDamaged: files of the log are damaged or missing.

        Cancellation: safe. Blocks that were not stored are sent again by the publisher.
        """
        backoff, is_open = RetryDelay(self._settings), not self._standby
        while not self._done():
            try:
                if not await self._archive(backoff, is_open=is_open):
                    return
            except SubscriberError as error:
                how = reaction(error)
                if how is Reaction.STOP:
                    raise
                level = telemetry.LOG if isinstance(error, EndOfStream) else telemetry.ERROR
                telemetry.log_error(error, level, slot=self._slot)
                self.error = error
                if self.failing_since is None:
                    self.failing_since = monotonic()
                if self._standby:  # another standby may succeed
                    await anyio.to_thread.run_sync(self._writer.close)
                await anyio.sleep(backoff.next(how))
            is_open = False

    def _recovered(self) -> None:
        self.error = self.failing_since = None

    async def run_once(self) -> None:
        """Archive changes until `until`, with one connection.

        Raises:
            SubscriberError: any error, including those that run() retries.

        Cancellation: safe, as for run().
        """
        if not self._done():
            await self._archive(RetryDelay(self._settings), is_open=not self._standby)

    async def _archive(self, backoff: RetryDelay, *, is_open: bool) -> bool:
        """Open the log if it is not, and archive changes with one connection.

        Returns:
            False: another process writes the log, and has stored everything before `until`.
        """
        if not is_open and self._standby:
            if not await self._wait_for_lock():
                return False
            await reached(Point.LOG_LOCKED)
            await anyio.to_thread.run_sync(self._writer.open)
            await reached(Point.LOG_OPENED)
        elif not is_open:
            await self._reopen()
        await self._session(backoff)
        return True

    async def _reopen(self) -> None:
        """Open the log again. The files may have changed, so this repeats all checks, as after a crash."""
        await anyio.to_thread.run_sync(self._writer.close)
        await anyio.to_thread.run_sync(self._writer.open)

    async def _wait_for_lock(self) -> bool:
        """Wait until no other process writes the log, and take its lock.

        Returns:
            False: the other process has stored everything before `until`.
        """
        log, lock, began = self._writer.location, self._writer.lock, monotonic()
        report = began  # when the next line is due
        while not await anyio.to_thread.run_sync(lock.attempt):
            self._recovered()
            now = monotonic()
            if now >= report or self._until is not None:
                durable = await anyio.to_thread.run_sync(read_durable, log)
                if self._until is not None and durable is not None and durable.position >= self._until:
                    return False
            if now >= report:
                waited = f", for {in_seconds(now - began)}" if report > began else ""
                stored = f" The log has everything before {durable.position}." if durable is not None else ""
                telemetry.log(
                    telemetry.LOG,
                    f'another archiver writes the change log in "{log}"; waiting as standby{waited}',
                    detail=f"{lock.describe_holder()}{stored}",
                    event="archive.standby",
                    slot=self._slot,
                )
                report = now + _WAIT_REPORT
            await anyio.sleep(self._settings.standby_poll_interval)
        if report > began:
            telemetry.log(
                telemetry.LOG,
                f'taking over the change log in "{log}"',
                detail=f"Waited as standby for {in_seconds(monotonic() - began)}.",
                event="archive.takeover",
                slot=self._slot,
            )
        return True

    def _done(self) -> bool:
        return self._until is not None and self._writer.identity is not None and self._writer.position >= self._until

    async def _session(self, backoff: RetryDelay) -> None:
        async with await Publisher.connect(self._source, application_name=self._slot) as publisher:
            # The log's values are text that other programs read later, so their format must not vary.
            await publisher.session.rows("SELECT pg_catalog.set_config('timezone', 'UTC', false)")
            await publisher.session.rows("SELECT pg_catalog.set_config('bytea_output', 'hex', false)")
            await self._prepare(publisher)
            settings = limit_status_interval(self._settings, await read_sender_timeout(publisher))
            start = self._writer.position
            options = StreamOptions(self._publications, messages=True, streaming="on")
            try:
                stream = await ReplicationStream.start(
                    publisher, self._slot, start, options, on_notice=self._notices, without_own_messages=True
                )
            except SlotLost as error:
                error.amend(hint=BEGIN_ANEW)  # in place of the hint for a subscription
                raise
            telemetry.log(telemetry.LOG, f"archiving from {start}", event="archive.started", slot=self._slot)
            backoff.reset()
            recorder = SchemaRecorder(
                self._source, self._slot, self._publications, self._writer.schema, settings.relation_cache_size
            )
            try:
                loop = ArchiveLoop(stream, self._writer, recorder, self._until, settings, on_success=self._recovered)
                await loop.run()
            finally:
                recorder.close()
                with anyio.CancelScope(shield=True):
                    await stream.stop(timeout=STOP_TIMEOUT)

    async def _prepare(self, publisher: Publisher) -> None:
        """Check that publisher, slot and log belong together. Creates the slot or the log if it does not exist."""
        writer, known = self._writer, self._writer.identity
        identity = await publisher.identify_system()
        if known is not None:
            _check_publisher(identity, known, writer.location, writer.position)
        history = await read_history(publisher, identity)
        end = self._check_history(history, identity)
        await check_publications(publisher, self._publications)
        info = await self._released_slot(publisher)
        if info is not None:
            _check_slot(info)
        if known is None:
            if info is None:
                start = await self._create_slot(publisher)
            else:
                start = info.confirmed_flush or Lsn(0)
            writer.create(Identity(identity.systemid, self._slot, self._publications, start))
        else:
            check_options(known, self._writer.location, self._slot, self._publications)
            await self._check_gap(info.confirmed_flush if info is not None else None)
            end = self._check_history(history, identity)  # the log may have been opened again
        if end is not None and writer.timeline is not None:
            telemetry.log(
                telemetry.LOG,
                f"the publisher continues on timeline {identity.timeline}; timeline {writer.timeline.timeline} ended at"
                f" {end}",
                event="publisher.timeline",
                slot=self._slot,
            )
        # A standby may be promoted while it streams.
        stored = None if identity.in_recovery else history
        await anyio.to_thread.run_sync(writer.record_timeline, stored)

    def _check_history(self, history: TimelineHistory, identity: SystemIdentity) -> Lsn | None:
        """Refuse a publisher without all changes of the log. Returns the end of the log's timeline; None: its own."""
        if self._writer.identity is None:
            return None
        position = self._writer.position
        return check_history(
            history, self._writer.timeline, position, in_recovery=identity.in_recovery, hint=BEGIN_ANEW
        )

    async def _create_slot(self, publisher: Publisher) -> Lsn:
        """Create the slot, and return its position.

        Raises:
            PublisherError: the publisher is a standby that cannot decode WAL.
        """
        if publisher.in_recovery and not features.DECODING_STANDBY.is_in(publisher.server_version):
            raise PublisherError(
                "the publisher is a standby",
                detail="A standby can have logical slots from PostgreSQL 16 on.",
                hint="Give the connection string of the primary.",
            )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._report_slot_creation, publisher.in_recovery)
                created = await publisher.create_slot(self._slot, snapshot="nothing")
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise root_cause(group) from None
        return created.consistent_point

    async def _report_slot_creation(self, in_recovery: bool) -> None:
        hint = Remedy(
            "list them on the publisher",
            "SELECT pid, xact_start, query FROM pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start;",
        )
        if in_recovery:
            hint = Remedy(
                "the primary reports its transactions to a standby only while it writes. Let it do that now, on the "
                "primary",
                "SELECT pg_log_standby_snapshot();",
            )
        await anyio.sleep(_SLOT_PATIENCE)
        while True:
            telemetry.log(
                telemetry.LOG,
                f'waiting for the creation of replication slot "{self._slot}"',
                detail="It needs the end of all transactions that were running when it began.",
                hint=hint,
                event="archive.slot_wait",
                slot=self._slot,
            )
            await anyio.sleep(_WAIT_REPORT)

    async def _released_slot(self, publisher: Publisher) -> SlotInfo | None:
        """Wait until no other walsender reads the slot, and return the slot. None: it does not exist.

        Raises:
            SubscriberError: a walsender still reads it after `slot_release_timeout`.
        """
        began = monotonic()
        report = began + _SLOT_PATIENCE
        while (info := await publisher.slot(self._slot)) is not None and info.active:
            waited = monotonic() - began
            if waited > self._settings.slot_release_timeout:
                raise SubscriberError(
                    f'replication slot "{self._slot}" is active for PID {info.active_pid}',
                    detail=f"Waited {in_seconds(waited)} for its release.",
                    hint=Remedy(
                        "the publisher ends the process of a client that is gone after wal_sender_timeout. If no "
                        "other program reads the slot, end the process on the publisher",
                        f"SELECT pg_terminate_backend({info.active_pid});",
                    ),
                    sqlstate=OBJECT_IN_USE,
                )
            if monotonic() >= report:
                telemetry.log(
                    telemetry.LOG,
                    f'replication slot "{self._slot}" is active for PID {info.active_pid}; waiting for its release',
                    detail=f"Waited {in_seconds(waited)}; the limit is "
                    f"{in_seconds(self._settings.slot_release_timeout)} (slot_release_timeout). The publisher ends the "
                    "process of a client that is gone after wal_sender_timeout.",
                    event="archive.slot_wait",
                    slot=self._slot,
                )
                report = monotonic() + _WAIT_REPORT
            await anyio.sleep(_SLOT_POLL)
        return info

    async def _check_gap(self, confirmed: Lsn | None) -> None:
        if confirmed is None:
            raise SlotLost(f'replication slot "{self._slot}" does not exist any more', hint=BEGIN_ANEW)
        if confirmed > self._writer.position:
            # A process that had the log before may have stored more since. Its confirmed changes are there by now.
            await self._reopen()
        if confirmed > self._writer.position:
            self._writer.check_tail(confirmed)
            raise SlotLost(
                "changes are missing between the change log and the slot",
                detail=f"The log ends at {self._writer.position}; the slot has been confirmed up to {confirmed}.",
                hint=f"Somebody else has read from the slot, or the log was restored from a copy. {BEGIN_ANEW}",
            )


def check_options(log: Identity, location: Location, slot: str, publications: Sequence[str]) -> None:
    """Raise PublisherError if a log has another slot, or other publications."""
    if (log.slot, log.publications) != (slot, tuple(sorted(set(publications)))):
        raise PublisherError(
            f'the change log in "{location}" is of another slot or other publications',
            detail=f'It is of slot "{log.slot}" and publications {", ".join(log.publications)}.',
            hint="Give those, or another directory.",
        )


def _check_slot(info: SlotInfo) -> None:
    """Raise PublisherError if the archiver cannot read a slot."""
    hint = "Give another slot; one that does not exist is created."
    problem, detail = None, None
    if info.plugin is None:
        problem = "is a physical slot"
    elif info.plugin != "pgoutput":
        problem = f"is for {info.plugin}, not pgoutput"
    elif not info.in_this_database:
        problem = f'is of database "{info.database}"'
    elif info.two_phase:
        problem = "has two_phase on"
        detail = "The change log has transactions when they are committed, prepared ones too."
    if problem is not None:
        raise PublisherError(f'replication slot "{info.name}" {problem}', detail=detail, hint=hint)


def _check_publisher(identity: SystemIdentity, log: Identity, location: Location, position: Lsn) -> None:
    """Refuse a publisher that is another one than that of the log, or lacks its changes. Raises as check_position()."""
    if identity.systemid != log.system_id:
        raise PublisherReplaced(
            f'the change log in "{location}" is of another publisher',
            detail=f"The log is of system {log.system_id}; the connection leads to {identity.systemid}.",
            hint="Correct the connection string, or choose another directory for the log.",
        )
    if position > identity.position and not identity.in_recovery:
        raise PublisherReplaced(
            f'the publisher is behind the change log in "{location}"',
            detail=f"The log ends at {position}; the publisher's write-ahead log ends at {identity.position} "
            f"(timeline {identity.timeline}).",
            hint=f"The publisher was restored from a backup, or is a standby that lacked changes. {BEGIN_ANEW}",
        )
    check_position(identity, position)


class ArchiveLoop:
    """Stores one replication stream in the log."""

    def __init__(
        self,
        stream: ReplicationStream,
        writer: LogWriter,
        recorder: SchemaRecorder,
        until: Lsn | None,
        settings: Settings,
        *,
        on_success: Callable[[], None],
    ) -> None:
        """Create the loop. `on_success` is called when the log is up to date, or has got transactions."""
        self._on_success = on_success
        self._stream = stream
        self._writer = writer
        self._recorder = recorder
        self._decoder = Decoder()
        self._until = until
        self._settings = settings
        self._builder = BlockBuilder(writer.position)
        self._unstreaming = StreamReassembler(_spool_folder(writer.location, settings))
        self._received = self._appended = writer.position  # the latter: the end of the last appended transaction
        self._inbox = ReceiveQueue(stream, settings.receive_queue_size)
        self._due = anyio.Event()  # requests the next write
        self._stored = anyio.Event()  # set after a write
        self._feedback = Feedback(
            stream,
            self._positions,
            reading=self._inbox.has_room,
            settings=settings,
        )

    def _positions(self) -> Positions:
        stored = self._writer.position
        return Positions(max(self._received, stored), stored, stored)

    async def run(self) -> None:
        """Store the stream until `until`. At the end, confirm the stored position to the publisher.

        Raises:
            SubscriberError: the stream has ended, or an error of the publisher, the log or the spool.
        """
        await self._unstreaming.open()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._inbox.read_loop, self._feedback)
                tasks.start_soon(self._loop)
                tasks.start_soon(self._feedback.run)
                tasks.start_soon(self._watch_lock)
                await self._storing()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise root_cause(group) from None
        finally:
            self._last_words()
            await self._unstreaming.close()

    def _last_words(self) -> None:
        if self._stream.session.error is None:
            at = self._positions()
            self._stream.send_status(at.write, at.flush, at.apply)

    async def _watch_lock(self) -> None:
        """End the session when another process may have taken the log, even if a request to the store hangs."""
        while True:
            try:
                self._writer.check_lock()
            except ChangeLogError:
                self._stream.session.abort()  # releases the slot for the process that takes over
                raise
            await anyio.sleep(_LOCK_CHECK)

    async def _loop(self) -> None:
        while True:
            for _ in range(min(self._settings.messages_per_turn, len(self._inbox.payloads))):
                await self._take()
            await self._make_room()
            if self._inbox.payloads:
                await anyio.lowlevel.checkpoint()
            else:
                await self._inbox.wait()

    async def _make_room(self) -> None:
        """Request a write of the added messages. Wait for it while they exceed `archive_queue_size`."""
        if self._builder.size:
            self._due.set()
        while self._builder.size > self._settings.archive_queue_size:
            self._stored = anyio.Event()
            await self._stored.wait()

    async def _take(self) -> None:
        payload = self._inbox.payloads.popleft()
        self._inbox.release(len(payload))
        envelope = decode_from_publisher(payload)
        if isinstance(envelope, XLogData):
            try:
                await self._add(envelope.payload)
            except SubscriberError as error:
                error.context.append(f"archiving the message at {envelope.start}")
                raise
            self._received = max(self._received, envelope.start, self._builder.position)
        elif isinstance(envelope, Keepalive):
            self._builder.note(envelope.end)
            self._received = max(self._received, envelope.end)
            if envelope.reply_requested or (self._until is not None and envelope.end >= self._until):
                self._due.set()

    async def _add(self, payload: bytes) -> None:
        if self._unstreaming.passes(payload):
            await self._add_plain(payload)
            return
        async for plain in self._unstreaming.receive(payload, self._builder.state):
            await self._add_plain(plain)
            await self._make_room()

    async def _add_plain(self, payload: bytes) -> None:
        self._builder.add(payload)
        if payload[0] == _RELATION:  # add() writes it with the next change of the table
            relation = self._decoder.decode(payload)
            assert isinstance(relation, Relation)
            await self._recorder.describe(relation, self._builder.finish_lsn)

    async def _storing(self) -> None:
        began = monotonic()
        while self._until is None or self._writer.position < self._until:
            with anyio.move_on_after(min(self._settings.status_interval, self._writer.store_interval)):
                await self._due.wait()
            self._due = anyio.Event()
            before = self._writer.position
            is_idle = not await self._store()
            if self._writer.position > before or (is_idle and monotonic() - began > self._settings.status_interval):
                self._on_success()
            self._stored.set()
            self._feedback.positions_changed()
            await anyio.sleep(MIN_INTERVAL)

    async def _store(self) -> bool:
        """Store what was added. Returns False if there is nothing."""
        # Taken together, so that no block has changes of a version that is not stored.
        blocks, versions = self._builder.take(), self._recorder.take()
        if blocks or versions:
            versions = await self._recorder.check_types(versions, self._appended)
            self._appended = max([self._appended, *(block.position for block in blocks if block.boundary)])
        # Shielded, because a cancellation does not stop the thread, and no other task may use the writer beside it.
        with anyio.CancelScope(shield=True):
            if versions:
                await anyio.to_thread.run_sync(self._writer.describe, versions)
            if blocks:
                await anyio.to_thread.run_sync(self._writer.append, blocks)
                if any(block.boundary for block in blocks):
                    await anyio.to_thread.run_sync(self._writer.sync)
            if self._writer.wants_seal() or self._is_last():
                idle = not self._builder.size and not self._builder.in_transaction
                self._builder.restart()
                if idle:
                    await anyio.to_thread.run_sync(self._writer.seal)
        await reached(Point.LOG_STORED)
        return bool(blocks)

    def _is_last(self) -> bool:
        """Return True if a segment in an object store is to be stored before it is full, to reach `until`."""
        return self._until is not None and self._writer.position < self._until <= self._builder.position


def _spool_folder(log: Location, settings: Settings) -> Path:
    """Return the folder of streamed transactions: that of the log, or one of this machine for a log elsewhere."""
    if isinstance(log, Path):
        return log / SPOOL
    name = hashlib.sha256(str(log).encode()).hexdigest()[:16]
    return (settings.spool_dir or default_spool_root()) / f"subscriber-archive-{name}"
