"""A change stream that is printed, one line for each change.

The confirmed position is the end of a transaction whose last line has been written to stdout and flushed. If the reader
of stdout stops, the stream stops; the publisher still gets its status updates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import anyio
import anyio.to_thread

from subscriber.cli.change_lines import ChangeLines, Line, is_change
from subscriber.errors import ProtocolError
from subscriber.exception_groups import root_cause
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import Keepalive, XLogData, decode_from_publisher
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Commit
from subscriber.publisher.replication_stream import ReplicationStream


class ChangePrinter:
    """A stream that is being printed. `confirmed` is the position up to which all changes have been printed."""

    def __init__(
        self,
        stream: ReplicationStream,
        limit: int | None,
        render: Callable[[Line], str],
        *,
        confirm: bool,
        status_interval: float,
    ) -> None:
        """Create the printer.

        Args:
            stream: the stream.
            limit: the number of changes to print. None: without end. With `confirm`, the transaction that reaches the
                limit is printed to its end. Otherwise it would be sent again.
            render: formats a line.
            confirm: confirm the transactions that are printed. False: the slot is temporary.
            status_interval: seconds between two messages with the position.
        """
        self.confirmed = Lsn(0)
        self._stream = stream
        self._left = limit
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
            await anyio.to_thread.run_sync(_to_stdout, "\n".join([*text, ""]))
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


def _to_stdout(text: str) -> None:
    """Write the whole text to stdout. Raises BrokenPipeError if the reader is gone.

    sys.stdout.write() is no alternative: under PYTHONUNBUFFERED it silently drops the part that a full pipe did not
    accept.
    """
    left = memoryview(text.encode(errors="replace"))
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]
