"""A PostgreSQL session on a transport that asyncpg opened and authenticated.

Purpose:
    asyncpg is not sufficient for two kinds of sessions. A walsender speaks the simple query protocol only and answers
    START_REPLICATION with CopyBoth, which asyncpg does not support. An apply session sends each value as the bytes
    that the publisher sent, in text or binary, for any type, and queues many statements before the first result;
    asyncpg's prepared statements do not do that. asyncpg still opens the connection (DSN, TLS, SCRAM, passfile,
    several hosts), and this module takes its transport over.

Theory of operation:
    Bytes are received into one buffer and split into messages. Each message is passed to the current conversation: a
    simple query (simple_query.py) or a pipeline (pipeline.py). A session has one conversation at a time, which ends
    with ReadyForQuery. CopyData is the exception: the session queues it for copy_out() and receive(). When LIMIT
    bytes are queued, reading from the socket stops until they are taken. This is the back-pressure of a change stream
    and of a table copy alike. After a large message, reading resumes when the next message is awaited, or when the
    large message is the last one in the buffer.

    Output is passed to the transport immediately. The transport copies the part that the network does not accept, so
    large data stays in this session's queue, followed by later output, and is passed on in slices.

A session whose connection is lost stays lost: every waiter and every later call gets the same
ConnectionLost, whose message is the server's last word when it said one.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import asyncpg

from subscriber.connection.simple_query import Conversation, Query, Result
from subscriber.errors import ConnectionLost, EndOfStream, ProtocolError, ServerError, SubscriberError
from subscriber.protocol import encodings, frontend

BUFFER = 256 * 1024  # bytes; one read from the socket; grows for a message that is larger
SLICE = 256 * 1024  # bytes of large data that the transport may copy
LIMIT = 4 * 1024 * 1024  # bytes of CopyData waiting before reading stops
MAX_MESSAGE = 0x3FFFFFFF + 4  # bytes; no server sends more (MaxAllocSize)
CLOSE_TIMEOUT = 2.0  # seconds to let a Terminate message leave before the socket is dropped

# Parameters that this package uses. Reports of others are not stored: a server can make up names.
_VERSION = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,4}))?")
_PARAMETERS = ("server_version", "server_encoding", "client_encoding", "in_hot_standby", "is_superuser", "TimeZone")


class Session(asyncio.BufferedProtocol):
    """One session; see the top of the file. Two tasks must not use it concurrently.

    An `async with` block drops the connection at its end.
    """

    def __init__(self, pid: int, parameters: dict[str, str]) -> None:
        self.pid = pid  # of the server's backend
        self.parameters = parameters  # as the server reports them: server_version, TimeZone, …
        # Of texts, as PostgreSQL calls it; asyncpg asks for UTF8 in words that PgBouncer repeats.
        self.encoding = "SQL_ASCII" if parameters.get("client_encoding") == "SQL_ASCII" else "UTF8"
        self.codec = encodings.codec(self.encoding)  # the same, as Python does
        self.on_notice: Callable[[dict[str, str]], None] | None = None
        self.error: SubscriberError | None = None  # set once the session is lost
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(BUFFER)
        self._start = self._end = 0
        self._conversation: Conversation | None = None
        self._copied: list[bytes] = []
        self._copied_bytes = 0
        self._reading = True
        self._wake: asyncio.Future[None] | None = None  # set while a task waits for CopyData
        self._writable: asyncio.Future[None] | None = None  # set while the transport's buffer is full
        self._unsent: deque[memoryview] = deque()  # output that waits for it, in order; only while a large one does
        self._closed = self._loop.create_future()

    @classmethod
    def take_over(cls, connection: Any) -> Session:
        """Continue an idle asyncpg.Connection as a raw session; the connection is unusable afterwards.

        asyncpg has no public way to hand its transport over. Its version is pinned, and a missing private
        attribute is reported as such.
        """
        try:
            transport = connection._transport
            settings = connection.get_settings()
            parameters = {name: getattr(settings, name) for name in _PARAMETERS if hasattr(settings, name)}
            session = cls(connection.get_server_pid(), parameters)
            transport.set_protocol(session)
        except AttributeError as error:
            raise SubscriberError(
                f"asyncpg {asyncpg.__version__} keeps its transport elsewhere than expected",
                detail=str(error),
                hint="Install a version of asyncpg that this release names in its dependencies.",
            ) from error
        session._transport = transport
        connection._aborted, connection._protocol = True, None  # its finalizer must not close our socket
        return session

    @property
    def server_version(self) -> int:
        """Version in the form of server_version_num: 180006 for 18.6, 190000 for 19devel. Raises ProtocolError."""
        match = _VERSION.match(self.parameters.get("server_version", ""))
        if match is None:
            raise ProtocolError("the server did not report its version")
        return int(match[1]) * 10000 + int(match[2] or 0)

    async def set_encoding(self, encoding: str) -> None:
        """Set the client encoding to `encoding`, an encoding of databases. Raises ServerError if that fails."""
        await self.query(f"SET client_encoding = '{encoding}'")
        self.encoding, self.codec = encoding, encodings.codec(encoding)

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    # --- simple queries -------------------------------------------------------------------------

    async def query(self, sql: str) -> list[Result]:
        """Run one or more statements and return all results.

        Raises:
            ServerError: a statement failed; has the server's fields.
            ConnectionLost: the connection broke.

        Cancellation: the session remains within the query until its result has arrived.
        """
        query = self._start_query(sql)
        await asyncio.shield(query.ready)
        return query.results

    async def rows(self, sql: str) -> list[tuple[str | None, ...]]:
        """The rows of the last statement in `sql`."""
        return (await self.query(sql))[-1].rows

    def _start_query(self, sql: str) -> Query:
        query = Query(self._loop, self.codec)
        self.begin(query)
        self.write(frontend.query(sql, self.codec))
        return query

    def begin(self, conversation: Conversation) -> None:
        """Make `conversation` the current one. The previous conversation must have ended."""
        if self.error is not None:
            raise self.error
        if self._conversation is not None and not self._conversation.idle:
            raise RuntimeError("the session is in the middle of a query")
        self._conversation = conversation

    # --- COPY -----------------------------------------------------------------------------------

    async def copy_out(self, sql: str) -> AsyncGenerator[list[bytes], None]:
        """The data of a COPY … TO STDOUT: lists of CopyData payloads, one row each, more or less.

        Their boundaries mean nothing to COPY FROM, so they may be put together: see joined().
        """
        query = self._start_query(sql)
        await asyncio.shield(query.copying)
        while True:
            if self._copied:
                yield self._take()
            elif query.ready.done():
                break
            else:
                await self._wait(query.ready)
        await asyncio.shield(query.ready)

    async def copy_in(self, sql: str, chunks: AsyncIterable[bytes]) -> str:
        """Feed a COPY … FROM STDIN; the command tag. An error in `chunks` fails the COPY and is raised."""
        query = self._start_query(sql)
        await asyncio.shield(query.copying)
        try:
            async for chunk in chunks:
                if query.error is not None:
                    break
                self.send_copy_data(chunk)
                del chunk  # a large one is not kept while the next one is on its way
                await self.drain()
            else:
                self.write(frontend.COPY_DONE)
        except BaseException as error:
            if self.error is None:
                self.write(frontend.copy_fail(type(error).__name__))
            if isinstance(error, Exception):  # a cancelled caller does not wait for the server
                with suppress(SubscriberError):
                    await asyncio.shield(query.ready)
            raise
        await asyncio.shield(query.ready)
        return query.results[-1].tag

    async def start_copy_both(self, sql: str) -> None:
        """Send START_REPLICATION; from here on receive() and send_copy_data() carry the stream."""
        query = self._start_query(sql)
        await asyncio.shield(query.copying)

    async def receive(self) -> list[bytes]:
        """All CopyData payloads that have arrived since the last call, in order.

        Waits for at least one. Raises EndOfStream when the server ended the stream, ServerError when it
        reported an error in it, ConnectionLost when it went away; only after everything that arrived before
        was returned.
        """
        query = self._conversation
        assert isinstance(query, Query)
        while not self._copied:
            if query.error is not None:
                raise query.error
            if query.copy_ended:
                raise EndOfStream("data stream from publisher has ended")
            if self.error is not None:
                raise self.error
            await self._wait(query.ready)
        return self._take()

    def send_copy_data(self, payload: bytes) -> None:
        if len(payload) > frontend.LARGE:
            self.write(frontend.copy_data_head(payload))
            self.write(payload)
        else:
            self.write(frontend.copy_data(payload))

    async def finish_copy_both(self) -> None:
        """Send CopyDone, discard the remaining CopyData, and wait for ReadyForQuery."""
        query = self._conversation
        assert isinstance(query, Query)
        self.write(frontend.COPY_DONE)
        while not query.ready.done():
            self._take()
            await self._wait(query.ready)
        self._take()

    def _take(self) -> list[bytes]:
        copied, self._copied = self._copied, []
        size, self._copied_bytes = self._copied_bytes, 0
        if size <= 2 * LIMIT or self._conversation is None or self._conversation.idle:
            self._read_on()
        return copied

    def _read_on(self) -> None:
        if not self._reading and self.error is None:
            self._reading = True
            self._transport.resume_reading()

    async def _wait(self, ready: asyncio.Future[None]) -> None:
        """Until CopyData has arrived, or something happened to the query."""
        self._read_on()
        self._wake = self._loop.create_future()
        if ready.done():
            return
        try:
            await self._wake
        finally:
            self._wake = None

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # --- writing --------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send `data` behind everything that was written before; it is not copied if it is large."""
        if self.error is not None:
            raise self.error
        if len(data) <= frontend.LARGE and not self._unsent:
            self._transport.write(data)
        else:
            self._unsent.append(memoryview(data))
            self._send_slices()

    def _send_slices(self) -> None:
        """Pass queued output to the transport until its buffer is full."""
        unsent = self._unsent
        while unsent and self._writable is None and not self._transport.is_closing():
            data = unsent.popleft()
            if len(data) > SLICE:
                unsent.appendleft(data[SLICE:])
            self._transport.write(data[:SLICE])

    async def drain(self) -> None:
        """Wait until the transport's buffer has room and all queued output has been passed to it."""
        while self._writable is not None:
            await asyncio.shield(self._writable)
        if self.error is not None:
            raise self.error

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None
        self._send_slices()

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """End the session politely, or drop it if that takes longer than `timeout` seconds."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    while self._unsent and self._writable is not None:  # Terminate must not cut a message in two
                        await asyncio.shield(self._writable)
                    if self.error is None:
                        self._transport.write(frontend.TERMINATE)
                        self._lose(ConnectionLost("the session was closed"))
                        self._transport.close()
                    await asyncio.shield(self._closed)
        finally:
            self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Drop the connection now."""
        self._lose(ConnectionLost("the session was closed"))
        self._transport.abort()

    # --- asyncio.BufferedProtocol ---------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._start == self._end:
            self._start = self._end = 0
        free = len(self._buffer) - self._end
        if free < BUFFER // 4:
            waiting = self._end - self._start
            need = BUFFER
            if waiting >= 5:  # a message larger than the buffer: reserve room for all of it
                need = max(need, frontend.HEADER.unpack_from(self._buffer, self._start)[1] + 1)
            fresh = bytearray(need + BUFFER // 2)
            fresh[:waiting] = memoryview(self._buffer)[self._start : self._end]
            self._buffer, self._start, self._end = fresh, 0, waiting
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        try:
            self._cut()
        except Exception as error:  # the event loop would take it for a lost connection
            self._lose(error if isinstance(error, SubscriberError) else _bug(error))
            self._transport.abort()

    def _cut(self) -> None:
        """Hand on every message that is complete."""
        buffer, start, end = self._buffer, self._start, self._end
        view = memoryview(buffer)
        unpack = frontend.HEADER.unpack_from
        copied = self._copied
        while end - start >= 5:
            start, size = frontend.cut_copy_data(buffer, start, end, copied)
            self._copied_bytes += size
            if end - start < 5:
                break
            kind, length = unpack(buffer, start)
            if not 4 <= length <= MAX_MESSAGE:
                raise ProtocolError(f"the server sent a message of {length} bytes")
            stop = start + 1 + length
            if stop > end:
                break
            body = bytes(view[start + 5 : stop])
            start = self._start = stop
            self._received(kind.decode("latin-1"), body)
        self._start = start
        if len(buffer) > 4 * BUFFER and start and end - start <= BUFFER // 2:
            # The room of a large message is released before the message is processed.
            self._buffer = bytearray(BUFFER)
            self._buffer[: end - start] = view[start:end]
            self._start, self._end = 0, end - start
        if copied:
            self._notify()
            if self._copied_bytes > LIMIT and self._reading:
                self._reading = False
                self._transport.pause_reading()

    def _received(self, kind: str, body: bytes) -> None:
        if kind == "N":
            if self.on_notice is not None:
                self.on_notice(frontend.read_fields(body, self.codec))
        elif kind == "S":
            name, value = frontend.read_parameter_status(body)
            if name in _PARAMETERS:
                self.parameters[name] = value
        elif kind == "A":
            pass  # NOTIFY; we never LISTEN on a raw session
        elif self._conversation is not None:
            if kind == "E":
                fields = frontend.read_fields(body, self.codec)
                if fields.get("V", fields.get("S")) in ("FATAL", "PANIC"):
                    error = ServerError(fields)
                    self._lose(error)
                    return
            self._conversation.received(kind, body)
            self._notify()
        elif kind == "E":  # a FATAL while idle: the connection ends next
            self._lose(ServerError(frontend.read_fields(body, self.codec)))

    def eof_received(self) -> None:
        self._lose(ConnectionLost("server closed the connection unexpectedly"))

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc else ""
        self._lose(ConnectionLost(f"server closed the connection unexpectedly{reason}"))
        if not self._closed.done():
            self._closed.set_result(None)

    def _lose(self, error: SubscriberError) -> None:
        if self.error is not None:
            return
        self.error = error
        self._unsent.clear()
        if self._conversation is not None:
            self._conversation.lost(error)
        self._notify()
        self.resume_writing()


@asynccontextmanager
async def savepoint(session: Session) -> AsyncIterator[None]:
    """Roll the block back if it raises, so that the transaction of the session can be continued. Blocks do not nest."""
    await session.query("SAVEPOINT block")
    try:
        yield
    except SubscriberError:
        if session.error is None:
            await session.query("ROLLBACK TO SAVEPOINT block")
        raise
    await session.query("RELEASE SAVEPOINT block")


def joined(payloads: list[bytes]) -> Iterator[bytes]:
    """Yield the payloads of copy_out() joined, and remove them from the list. Large payloads are yielded singly."""
    if sum(map(len, payloads)) <= 2 * LIMIT:
        yield b"".join(payloads)
        return
    rest = deque(payloads)
    payloads.clear()
    while rest:
        yield _first_of(rest)


async def joined_chunks(lists: AsyncIterable[list[bytes]]) -> AsyncGenerator[bytes, None]:
    """Yield the payloads of the lists that copy_out() yields, as chunks for copy_in(): see joined()."""
    async for payloads in lists:
        for chunk in joined(payloads):
            yield chunk
            # A large chunk must not stay in memory while the next one is received.
            del chunk


def _first_of(rest: deque[bytes]) -> bytes:
    first = [rest.popleft()]
    size = len(first[0])
    while rest and (size := size + len(rest[0])) <= frontend.LARGE:
        first.append(rest.popleft())
    return b"".join(first)  # of one piece it is the piece


def _bug(error: Exception) -> SubscriberError:
    """Convert an unexpected error of a conversation into the session's error, so that its user receives it."""
    failure = SubscriberError(
        "what the server sent could not be handled",
        detail=f"{type(error).__name__} in the program.",
        hint="This is a bug; please report it.",
    )
    failure.__cause__ = error
    return failure
