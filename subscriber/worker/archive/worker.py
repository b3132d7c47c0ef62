"""The archiver: from a slot of the publisher to the change log on disk, and to nowhere else.

Four tasks for one connection:

    reader     takes what the walsender sent and queues it; stops reading while `receive_queue_size` bytes wait
    loop       cuts the messages into blocks (changelog/encoder.py)
    storing    writes and syncs them, in a thread: whatever has come meanwhile shares the next sync
    feedback   tells the publisher what is on disk (publisher/feedback.py)

A position is confirmed only when the log itself says so. So a keepalive's, between transactions, is written
to the log too before it is confirmed: at each `status_interval`, at once when the publisher asks. Then the
slot can never stand behind the end of the log by our doing; where it does, changes are missing, and the
archiver says so instead of going on.

Prepared transactions arrive when they are committed: the slot is one without two_phase. Large ones are streamed
while they go on, and wait in a spool beside the log (reassembly.py) until they commit.

Failure cases, besides those of changelog/writer.py:

- Killed after the slot is created, before the log is: the log begins where the slot stands.
- Slot confirmed behind the end of the log: changes are missing. Bytes behind that end are damage then, not a torn tail;
  the archiver stops before the writer cuts them off.
- Files of the log damaged: the archiver stops, as retrying cannot help. The publisher keeps all changes that are not
  stored.
- Disk full, or any other error of the system: the archiver opens the log again, as after a crash, until it can write.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread

from subscriber import telemetry
from subscriber.apply.progress import Positions
from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import Identity
from subscriber.changelog.writer import ChangeLogWriter
from subscriber.errors import EndOfStream, PublisherError, SlotLost, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import Keepalive, XLogData, decode_from_publisher
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import Feedback, limit_status_interval, read_sender_timeout
from subscriber.publisher.receive_queue import ReceiveQueue
from subscriber.publisher.replication_stream import (
    ReplicationStream,
    check_publications,
    check_publisher,
    check_timeline,
)
from subscriber.settings import DEFAULTS, Settings
from subscriber.worker.apply.worker import log_notice
from subscriber.worker.archive.reassembly import StreamReassembler
from subscriber.worker.exception_groups import root_cause
from subscriber.worker.retry import Reaction, RetryDelay, reaction

SPOOL = "spool"  # the folder, in the log's, for streamed transactions
STOP_TIMEOUT = 2.0  # seconds for the publisher to finish what it is sending when we stop
MIN_INTERVAL = 0.005  # seconds between two syncs: transactions that come closer together share one


class Archiver:
    """One change log and the slot it is fed from; run() connects again after errors that pass."""

    def __init__(
        self,
        source: str,
        slot: str,
        publications: Sequence[str],
        writer: ChangeLogWriter,
        until: Lsn | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        """`writer` is open; `until` ends run() when everything before that position is in the log, None never."""
        self._source = source
        self._slot = slot
        self._publications = tuple(sorted(set(publications)))
        self._writer = writer
        self._timeline: int | None = None  # of the publisher, in this run
        self._until = until
        self._settings = settings

    async def run(self) -> None:
        """Until `until`, an error that trying again cannot help, or cancelled."""
        backoff, failed = RetryDelay(self._settings), False
        while not self._done():
            try:
                if failed:  # the files are looked at anew, as after a crash
                    self._writer.close()
                    self._writer.open()
                await self._session(backoff)
            except SubscriberError as error:
                how = reaction(error)
                if how is Reaction.STOP:
                    raise
                level = telemetry.LOG if isinstance(error, EndOfStream) else telemetry.ERROR
                telemetry.log_error(error, level, slot=self._slot)
                await anyio.sleep(backoff.next(how))
                failed = True

    def _done(self) -> bool:
        return self._until is not None and self._writer.identity is not None and self._writer.position >= self._until

    async def _session(self, backoff: RetryDelay) -> None:
        publisher = await Publisher.connect(self._source, application_name=self._slot)
        try:
            # Text that other programs will read, whenever that may be.
            await publisher.session.rows("SELECT pg_catalog.set_config('timezone', 'UTC', false)")
            await publisher.session.rows("SELECT pg_catalog.set_config('bytea_output', 'hex', false)")
            await self._prepare(publisher)
            settings = limit_status_interval(self._settings, await read_sender_timeout(publisher))
            start = self._writer.position
            options = StreamOptions(self._publications, messages=True, streaming="on")
            stream = await ReplicationStream.start(
                publisher, self._slot, start, options, on_notice=log_notice, without_own=True
            )
            telemetry.log(telemetry.LOG, f"archiving from {start}", event="archive.started", slot=self._slot)
            backoff.reset()
            try:
                await ArchiveLoop(stream, self._writer, self._until, settings).run()
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.stop(timeout=STOP_TIMEOUT)
        finally:
            publisher.session.abort()

    async def _prepare(self, publisher: Publisher) -> None:
        """Make sure that slot and log go together; make what is not there yet."""
        writer, known = self._writer, self._writer.identity
        identity = await publisher.identify_system()
        check_publisher(identity, known.system_id if known else None, writer.position)
        await check_timeline(publisher, identity, self._timeline, writer.position)
        self._timeline = identity.timeline
        await check_publications(publisher, self._publications)
        info = await publisher.slot(self._slot)
        if info is not None and info.two_phase:
            raise PublisherError(
                f'replication slot "{self._slot}" has two_phase on',
                detail="The change log has transactions when they are committed, prepared ones too.",
                hint="Give another slot; one that does not exist is created.",
            )
        if known is None:
            if info is None:
                start = (await publisher.create_slot(self._slot, snapshot="nothing")).consistent_point
            else:
                start = info.confirmed_flush or Lsn(0)
            writer.create(Identity(identity.systemid, self._slot, self._publications, start))
        else:
            self._check_gap(known, info.confirmed_flush if info is not None else None)

    def _check_gap(self, known: Identity, confirmed: Lsn | None) -> None:
        if (known.slot, known.publications) != (self._slot, self._publications):
            raise PublisherError(
                f'the change log in "{self._writer.directory}" is of another slot or other publications',
                detail=f'It is of slot "{known.slot}" and publications {", ".join(known.publications)}.',
                hint="Give those, or another directory.",
            )
        begin_anew = "Begin a new log in another directory; what reads this one needs a new copy of the tables."
        if confirmed is None:
            raise SlotLost(f'replication slot "{self._slot}" does not exist any more', hint=begin_anew)
        if confirmed > self._writer.position:
            self._writer.check_tail(confirmed)
            raise SlotLost(
                "changes are missing between the change log and the slot",
                detail=f"The log ends at {self._writer.position}; the slot has been confirmed up to {confirmed}.",
                hint=f"Somebody else has read from the slot, or the log was restored from a copy. {begin_anew}",
            )


class ArchiveLoop:
    """One stream into one log; see the top of the file."""

    def __init__(
        self, stream: ReplicationStream, writer: ChangeLogWriter, until: Lsn | None, settings: Settings
    ) -> None:
        self._stream = stream
        self._writer = writer
        self._until = until
        self._settings = settings
        self._builder = BlockBuilder(writer.position)
        self._unstreaming = StreamReassembler(writer.directory / SPOOL)
        self._received = writer.position
        self._inbox = ReceiveQueue(stream, settings.receive_queue_size)
        self._due = anyio.Event()  # something is to be stored now
        self._stored = anyio.Event()
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
        """Until `until`, the stream ends, or an error; the publisher is told at the end what is stored."""
        await self._unstreaming.open()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._inbox.read_loop, self._feedback)
                tasks.start_soon(self._loop)
                tasks.start_soon(self._feedback.run)
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
        """Have what was added stored, and wait for that if it is much."""
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
            self._builder.add(payload)
            return
        async for plain in self._unstreaming.receive(payload):
            self._builder.add(plain)
            await self._make_room()

    async def _storing(self) -> None:
        while self._until is None or self._writer.position < self._until:
            with anyio.move_on_after(self._settings.status_interval):
                await self._due.wait()
            self._due = anyio.Event()
            await self._store()
            self._stored.set()
            self._feedback.positions_changed()
            await anyio.sleep(MIN_INTERVAL)

    async def _store(self) -> None:
        # Not cancelled in the middle: the thread goes on, and nobody else may write meanwhile.
        with anyio.CancelScope(shield=True):
            if blocks := self._builder.take():
                await anyio.to_thread.run_sync(self._writer.append, blocks)
                if any(block.boundary for block in blocks):
                    await anyio.to_thread.run_sync(self._writer.sync)
            if self._writer.wants_seal():
                idle = not self._builder.size and not self._builder.in_transaction
                self._builder.restart()
                if idle:
                    await anyio.to_thread.run_sync(self._writer.seal)
