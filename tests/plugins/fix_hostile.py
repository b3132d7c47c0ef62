"""A hostile publisher: a proxy in front of a real server that rewrites one field of the server's messages.

hostile                 await hostile.to(port) gives a Liar in front of that port; all end with the test

liar.seen               the names of all fields that the server has sent so far, in order
liar.field              the field to rewrite; None: all fields are forwarded unchanged
liar.lie                the text that is appended to a text, and that replaces NULL

Fields are found when they are sent, so a new query of ours is automatically a new field:

    parameter server_version      a ParameterStatus
    SELECT … WHERE a = ?[2]       column 2 of the result of such a query
    SELECT … WHERE a = ? tag      its command tag
    SELECT … WHERE a = ? error    an error in place of the result, every part of it a lie
    Relation.name                 a text in a message of the change stream; for a time, an invalid one
    notice                        a notice before each result
    notice in the stream          a notice before each message of the change stream
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from subscriber.protocol import copy_data
from subscriber.protocol.copy_data import Keepalive, XLogData
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode

CANARY = "canary"
# Leaves a string, a name and a statement, and would leave a line, a terminal's text, a shell's word and rich's markup.
SQL = f"CREATE TABLE public.{CANARY} (); CREATE ROLE {CANARY};"
UNSEEN = (
    "\x1b]0;title\x07\x1b[31m\r\n2030-01-01 00:00:00.000 UTC [1] ERROR:  forged\t\x7f\x85\u202e\u2028[red]$(touch x)`"
)
LIES: tuple[str | bytes, ...] = (
    f"'); {SQL} --",
    f"'); {SQL} --{UNSEEN}",
    f'"; {SQL} --{UNSEEN}',
    f"; {SQL} --{UNSEEN}",
    f"\xff\\{CANARY}".encode("latin-1"),  # no UTF-8
)
NO_TIME = 2**63 - 1

_HEADER = struct.Struct(">cI")


def message(kind: bytes, body: bytes) -> bytes:
    return _HEADER.pack(kind, len(body) + 4) + body


def fingerprint(sql: str) -> str:
    """Return a query without the parts that differ between runs."""
    text = re.sub(r"'(?:[^']|'')*'", "?", " ".join(sql.split()))
    return re.sub(r'"(?:[^"]|"")*"|\b[0-9]+\b', "?", text)[:160]


class Liar:
    def __init__(self, port: int) -> None:
        self.port = 0
        self.seen: dict[str, None] = {}
        self.field: str | None = None
        self.lie = b""
        self._server_port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def dsn(self, dsn: str) -> str:
        """Return the URI with this proxy's address."""
        parts = urlsplit(dsn)
        query = f"{parts.query}&sslmode=disable".lstrip("&")
        return urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{self.port}", query=query))

    def tell(self, field: str | None, lie: str | bytes = "") -> None:
        """Lie in this field from now on; None: in none."""
        self.field, self.lie = field, lie.encode() if isinstance(lie, str) else lie

    @asynccontextmanager
    async def honestly(self) -> AsyncIterator[None]:
        """Forward everything unchanged in the block, and record no field."""
        field, seen, self.field, self.seen = self.field, self.seen, None, {}
        try:
            yield
        finally:
            self.field, self.seen = field, seen

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        with suppress(asyncio.CancelledError):  # the end of the test
            try:
                await _Conversation(self, writer).run(reader, from_server, to_server)
            except* (OSError, asyncio.IncompleteReadError):  # one side has closed the connection
                pass
            finally:
                for each in (writer, to_server):
                    each.transport.abort()
        self._tasks.discard(task)

    # --- lying ----------------------------------------------------------------------------------

    def is_lie(self, field: str) -> bool:
        """Record that the server sent this field. Returns True if it is to be rewritten."""
        self.seen[field] = None
        return field == self.field

    def text(self, field: str, said: bytes) -> bytes:
        return said + self.lie if self.is_lie(field) else said

    def string(self, field: str, said: str) -> str:
        return self.text(field, said.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def rewritten(self, found: Any, name: str) -> Any:
        """Return a message, or a part of one, with the field rewritten if it contains it."""
        changes: dict[str, Any] = {}
        for field in fields(found):
            value, label = getattr(found, field.name), f"{name}.{field.name}"
            if type(value) is str:
                changes[field.name] = self.string(label, value)
            elif field.name.endswith("time") and isinstance(value, int):
                changes[field.name] = NO_TIME if self.is_lie(label) else value
            elif isinstance(value, tuple) and value and is_dataclass(value[0]):
                changes[field.name] = tuple(self.rewritten(part, label) for part in value)
        return replace(found, **changes) if changes else found

    def error(self) -> bytes:
        """Return an ErrorResponse, or a NoticeResponse, without its first byte."""
        text = self.lie.replace(b"\0", b"")
        parts = dict.fromkeys("SMDHWsctdnFLRpPq", b"said" + text) | {"C": b"XX000", "V": b"ERROR"}
        return b"".join(letter.encode() + part + b"\0" for letter, part in parts.items()) + b"\0"


class _Conversation:
    """One connection; understands as much of the protocol as is needed to lie."""

    def __init__(self, liar: Liar, writer: asyncio.StreamWriter) -> None:
        self._liar = liar
        self._to_client = writer
        self._queries: list[str] = []  # that wait for their end, oldest first
        self._statements: dict[bytes, str] = {}
        self._decoder = Decoder()
        self._streaming = False
        self._swallowing = False  # the answer that an error was given in place of

    async def run(
        self, from_client: asyncio.StreamReader, from_server: asyncio.StreamReader, to_server: asyncio.StreamWriter
    ) -> None:
        size = await from_client.readexactly(4)
        to_server.write(size + await from_client.readexactly(int.from_bytes(size, "big") - 4))
        async with asyncio.TaskGroup() as both:
            both.create_task(self._questions(from_client, to_server))
            both.create_task(self._answers(from_server))

    async def _questions(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            kind, body = await self._read(reader)
            if kind == b"Q":
                self._queries.append(fingerprint(body[:-1].decode("utf-8", "surrogateescape")))
            elif kind == b"P":
                name, sql, _ = body.split(b"\0", 2)
                self._statements[name] = fingerprint(sql.decode("utf-8", "surrogateescape"))
            elif kind == b"B":
                self._queries[:] = [self._statements.get(body.split(b"\0", 2)[1], "?")]
            writer.write(message(kind, body))
            await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader) -> None:
        while True:
            kind, body = await self._read(reader)
            self._to_client.write(self._answer(kind, body))
            await self._to_client.drain()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        kind, length = _HEADER.unpack(await reader.readexactly(5))
        return kind, await reader.readexactly(length - 4)

    def _answer(self, kind: bytes, body: bytes) -> bytes:
        liar, query = self._liar, self._queries[0] if self._queries else "?"
        if self._swallowing:
            self._swallowing = kind != b"Z"
            if kind == b"Z":
                self._queries[:1] = []
                return message(kind, body)
            return b""
        match kind:
            case b"S":
                name, value, _ = body.split(b"\0")
                body = name + b"\0" + liar.text(f"parameter {name.decode()}", value) + b"\0"
            case b"T" | b"W" | b"H" if liar.is_lie(f"{query} error"):
                self._swallowing = True
                end = b"" if kind == b"T" else message(b"Z", b"I")
                return message(b"E", liar.error()) + end
            case b"W":
                self._streaming = True
            case b"D":
                body = self._row(query, body)
            case b"C":
                body = liar.text(f"{query} tag", body[:-1]) + b"\0"
            case b"d" if self._streaming:
                body = self._frame(body)
                if liar.is_lie("notice in the stream"):
                    return message(b"N", liar.error()) + message(kind, body)
            case b"Z":
                self._queries[:1] = []
                if liar.is_lie("notice"):
                    return message(b"N", liar.error()) + message(kind, body)
        return message(kind, body)

    def _row(self, query: str, body: bytes) -> bytes:
        (number,) = struct.unpack_from(">H", body)
        parts, at = [body[:2]], 2
        for column in range(number):
            (length,) = struct.unpack_from(">i", body, at)
            at += 4
            field = f"{query}[{column}]"
            if self._liar.is_lie(field):
                value = (body[at : at + length] if length > 0 else b"") + self._liar.lie
                parts += (struct.pack(">i", len(value)), value)
            else:
                parts += (struct.pack(">i", length), body[at : at + max(length, 0)])
            at += max(length, 0)
        return b"".join(parts)

    def _frame(self, frame: bytes) -> bytes:
        rewritten = copy_data.decode_from_publisher(frame)
        if rewritten is None:
            return frame
        rewritten = self._liar.rewritten(rewritten, type(rewritten).__name__)
        if isinstance(rewritten, XLogData):
            told = self._decoder.decode(rewritten.payload)
            rewritten = replace(rewritten, payload=encode(self._liar.rewritten(told, type(told).__name__)))
        assert isinstance(rewritten, XLogData | Keepalive)
        return copy_data.encode(rewritten)


class Hostile:
    """All liars of one test."""

    def __init__(self) -> None:
        self._liars: list[Liar] = []

    async def to(self, port: int) -> Liar:
        """Create a liar in front of a port of 127.0.0.1."""
        liar = Liar(port)
        await liar.start()
        self._liars.append(liar)
        return liar

    async def close(self) -> None:
        for liar in self._liars:
            await liar.close()


@pytest.fixture
async def hostile() -> AsyncIterator[Hostile]:
    opened = Hostile()
    yield opened
    await opened.close()
