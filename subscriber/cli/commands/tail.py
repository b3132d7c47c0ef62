"""`subscriber tail`: print the decoded change stream of a publisher, one line for each change.

Without --slot the command creates a temporary slot, which the server drops with the connection; the stream starts now.
With --slot the stream starts at that slot's position, and printed transactions are confirmed. The confirmed position is
the end of a transaction whose last line has been written to stdout and flushed. If the reader of stdout stops, the
stream stops; the publisher still gets its status updates.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread

from subscriber.cli.change_lines import ChangeLines, Line, as_json, as_text, is_change
from subscriber.display import sql_literal
from subscriber.errors import ProtocolError, PublisherError
from subscriber.exception_groups import root_cause
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import Keepalive, XLogData, decode_from_publisher
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Commit
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import limit_status_interval, read_sender_timeout
from subscriber.publisher.publications import check_publications
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import UNDEFINED_OBJECT

Write = Callable[[str], None]


async def follow(
    source_dsn: str,
    publications: Sequence[str],
    *,
    slot: str | None,
    limit: int | None,
    json: bool,
    settings: Settings = DEFAULTS,
) -> int:
    """Print changes until `limit` (None: without end), read from `slot` (None: a temporary one).

    With a slot, the transaction that reaches the limit is printed to its end. Otherwise it would be sent again.
    """
    publisher = await Publisher.connect(source_dsn, application_name="subscriber tail")
    try:
        await _check(publisher, publications, slot)
        if slot is None:
            name = f"subscriber_tail_{secrets.token_hex(4)}"
            start = (await publisher.create_slot(name, snapshot="nothing", temporary=True)).consistent_point
        else:
            name, start = slot, Lsn(0)
        settings = limit_status_interval(settings, await read_sender_timeout(publisher))
        options = StreamOptions(tuple(publications), messages=True)
        stream = await ReplicationStream.start(publisher, name, start, options, without_own_messages=True)
        tail = Tail(
            stream,
            limit,
            _to_stdout,
            as_json if json else as_text,
            confirm=slot is not None,
            status_interval=settings.status_interval,
        )
        try:
            await tail.run()
        finally:
            with anyio.CancelScope(shield=True):
                tail.send_status()
                await stream.stop(timeout=settings.stream_stop_timeout)
    finally:
        publisher.session.abort()
    return 0


async def _check(publisher: Publisher, publications: Sequence[str], slot: str | None) -> None:
    await check_publications(publisher, publications)
    if slot is not None and await publisher.slot(slot) is None:
        raise PublisherError(
            f'replication slot "{slot}" does not exist on the publisher',
            hint=Remedy(
                "create it there", f"SELECT pg_create_logical_replication_slot({sql_literal(slot)}, 'pgoutput');"
            ),
            sqlstate=UNDEFINED_OBJECT,
        )


def _to_stdout(text: str) -> None:
    """Write the whole text to stdout. Raises BrokenPipeError if the reader is gone.

    sys.stdout.write() is no alternative: under PYTHONUNBUFFERED it silently drops the part that a full pipe did not
    accept.
    """
    left = memoryview(text.encode(errors="replace"))
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]


class Tail:
    """A stream that is being printed. `confirmed` is the position up to which all changes have been printed."""

    def __init__(
        self,
        stream: ReplicationStream,
        limit: int | None,
        write: Write,
        render: Callable[[Line], str],
        *,
        confirm: bool,
        status_interval: float = DEFAULTS.status_interval,
    ) -> None:
        """Create the printer. `write` gets whole lines and returns when they are flushed.

        It may block, and runs in a thread.
        """
        self.confirmed = Lsn(0)
        self._stream = stream
        self._left = limit
        self._write = write
        self._render = render
        self._confirm = confirm
        self._status_interval = status_interval
        self._decoder = Decoder()
        self._lines = ChangeLines()
        self._in_transaction = False
        self._received = Lsn(0)
        self._status_wanted = anyio.Event()

    async def run(self) -> None:
        """Print until the limit, an error, or cancellation."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_statuses)
                while not await self._print(await self._stream.receive()):
                    pass
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise root_cause(group) from group

    def send_status(self) -> None:
        """Send the printed position to the publisher. With a temporary slot, send the received position."""
        flushed = self.confirmed if self._confirm else self._received
        if self._stream.session.error is None:
            self._stream.send_status(self._received, flushed, flushed)

    async def _send_statuses(self) -> None:
        while True:
            with anyio.move_on_after(self._status_interval):
                await self._status_wanted.wait()
            self._status_wanted = anyio.Event()
            self.send_status()

    async def _print(self, frames: list[bytes]) -> bool:
        """Print some frames. Returns True if the limit is reached."""
        text: list[str] = []
        confirmed, done = self.confirmed, False
        for frame in frames:
            envelope = decode_from_publisher(frame)
            if isinstance(envelope, XLogData):
                end, done = self._message(envelope, text)
                confirmed = max(confirmed, end)
            elif isinstance(envelope, Keepalive):
                self._received = max(self._received, envelope.end)
                if not self._in_transaction:
                    confirmed = max(confirmed, envelope.end)
                if envelope.reply_requested:
                    self._status_wanted.set()
            if done:
                break
        if text:
            await anyio.to_thread.run_sync(self._write, "\n".join([*text, ""]))
        if confirmed > self.confirmed:
            self.confirmed = confirmed
            self._status_wanted.set()
        return done

    def _message(self, envelope: XLogData, text: list[str]) -> tuple[Lsn, bool]:
        """Add a message's line.

        Returns the position that the message completes (0: none), and whether the limit is reached.
        """
        self._received = max(self._received, envelope.start)
        try:
            message = self._decoder.decode(envelope.payload)
            line = self._lines.line(message)
        except ProtocolError as error:
            error.context.append(f"reading the message at {envelope.start}")
            raise
        end = Lsn(0)
        if isinstance(message, Begin):
            self._in_transaction = True
        elif isinstance(message, Commit):
            self._in_transaction = False
            end = message.end_lsn
        if line is None:
            return end, False
        text.append(self._render(line))
        if self._left is not None and is_change(line):
            self._left -= 1
        reached = self._left is not None and self._left <= 0
        return end, reached and not (self._confirm and self._in_transaction)
