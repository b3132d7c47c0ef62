"""Pipeline of the extended query protocol: statements are sent before the results of earlier ones arrive.

Purpose:
    A pipeline belongs to one session and has its lifetime. Statements are prepared once, under a name, and then bound
    with parameters that are the bytes a publisher sent. No call but sync() waits for a result: over a connection with
    20 ms of latency, 10,000 statements take one round trip.

Invariants:
    - The first error ends the pipeline. The server skips all statements up to the next Sync, but it would execute the
      statements after that Sync. So those must be safe whether or not the earlier ones succeeded
      (targets/postgres/session/progress.py explains why ours are), and the pipeline refuses calls once an error has
      arrived.
    - While `unnamed` is set, no statement is prepared under a name: code of other users may run in the session, and
      could prepare another statement under one of our names. Call forget() with any statement that drops all
      prepared statements.
    - While `attempting` is set, statements may fail without ending the pipeline. The first error is kept in
      `refused`, and no callback is called for statements that the server skips after it. The caller must send no
      other statement before it has awaited recover().
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NoReturn

from subscriber.connection.session import Session
from subscriber.errors import ServerError, SubscriberError
from subscriber.protocol import frontend
from subscriber.protocol.encodings import decode

CHUNK = 32 * 1024  # bytes of statements gathered before they are given to the transport
BEHIND = 4 * 1024 * 1024  # bytes of large values that wait for their answers
STATEMENTS = 1000  # prepared statements kept on the server; the least recently used one goes

Rows = list[tuple[str | None, ...]]
Statement = tuple[str, tuple[int, ...]]  # its text, and the OIDs of parameters' types, as frontend.parse() takes them
OnResult = Callable[[object, str, Rows], None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Pending:
    """One result that has not arrived. `sync` is called at ReadyForQuery; the others at CommandComplete."""

    note: object = None  # what the caller was doing; goes with an error and to on_result
    expect: bytes | None = None  # the command tag that needs no attention, with its NUL
    on_result: OnResult | None = None
    on_sync: Callable[[], None] | None = None
    is_sync: bool = False
    is_attempt: bool = False
    prepares: Statement | None = None  # the statement that this answer says is prepared


class Pipeline:
    def __init__(self, session: Session, statements: int = STATEMENTS) -> None:
        """`statements`: how many prepared statements the session keeps."""
        self.session = session
        self._max_statements = statements
        self.error: SubscriberError | None = None
        self.failed_note: object = None  # the note of the statement that failed
        self.attempting = False  # statements queued from now on may fail
        self.unnamed = False  # each statement is parsed when it is used
        # A block in which each statement is parsed, under a name that it loses after its use.
        self.parsing: Callable[[object], AbstractContextManager[None]] | None = None
        self.refused: SubscriberError | None = None  # the error of an attempt, until recover()
        self.refused_note: object = None
        self.on_trouble: Callable[[], None] = lambda: None  # an attempt was refused, or the pipeline has failed
        self._skipping = False  # the server skips everything up to the next Sync
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._names: OrderedDict[Statement, bytes] = OrderedDict()
        self._serial = 0
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._large_bytes = 0  # of large values, not answered as far as we know
        self._flush_is_due = False
        self._pending: deque[_Pending] = deque()
        self._rows: Rows = []
        self._settled: asyncio.Future[None] | None = None
        self.attach()

    @property
    def codec(self) -> str:
        """The codec of the session's texts (protocol/encodings.py)."""
        return self.session.codec

    def attach(self) -> None:
        """Take the session back after a simple query or a COPY was run on it."""
        self.session.begin(self)

    # --- sending --------------------------------------------------------------------------------

    def execute(
        self,
        sql: str,
        formats: bytes = frontend.ALL_TEXT,
        parameters: frontend.Parameters = b"\0\0",
        *,
        note: object = None,
        types: tuple[int, ...] = (),
        expect: bytes | None = None,
        on_result: OnResult | None = None,
    ) -> None:
        """Queue one statement; see frontend.bind_execute() for the parameters' form, frontend.parse() for `types`.

        `on_result(note, tag, rows)` is called unless the command tag is `expect`, or the statement has failed or was
        skipped by the server because of one before it.
        """
        if self.error is not None:
            raise self.error
        statement = (sql, types)
        if self.parsing is not None:
            with self.parsing(note):
                name = self._parse(statement, note)
        elif self.unnamed:
            name = b""
            self._send(frontend.parse(name, *statement, self.codec))
            self._pending.append(_Pending(note, is_attempt=self.attempting))
        elif (known := self._names.get(statement)) is not None:
            name = known
            self._names.move_to_end(statement)
        else:
            name = self._prepare(statement, note)
        if isinstance(parameters, bytes):
            self._send(frontend.bind_execute(name, formats, parameters))
        else:
            self._send_parts(frontend.bind_execute_parts(name, formats, parameters))
        self._pending.append(_Pending(note, expect, on_result, is_attempt=self.attempting))
        if self.parsing is not None:
            self._close(name, note)

    def copy(self, sql: str, chunks: Iterable[bytes], *, note: object = None) -> None:
        """Queue a COPY … FROM STDIN with all of its data, which the server drops if it gets no further than here."""
        self.execute(sql, note=note)
        for chunk in chunks:
            self._send(frontend.copy_data(chunk))
        self._send(frontend.COPY_DONE)

    def execute_once(self, sql: str, *, note: object = None) -> None:
        """Queue a statement without parameters that is used once and is not kept prepared."""
        before, self.unnamed = self.unnamed, True
        try:
            self.execute(sql, note=note)
        finally:
            self.unnamed = before

    def forget(self) -> None:
        """No statement is prepared any more: DISCARD ALL was queued just before."""
        self._names.clear()

    def ask(self) -> None:
        """Have the server send what answers there are, without ending anything as a Sync would."""
        self._send(frontend.FLUSH)
        self.flush()

    def queue_sync(self, on_sync: Callable[[], None] | None = None) -> None:
        """Queue a Sync; `on_sync` is called when all before it has succeeded.

        Everything is sent before this task waits for anything, so that syncs queued in a row leave together:
        a system call for each small transaction costs more than the transaction.
        """
        if self.error is not None:
            raise self.error
        self._send(frontend.SYNC)
        self._pending.append(_Pending(on_sync=on_sync, is_sync=True, is_attempt=self.attempting))
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush_now)

    def flush(self) -> None:
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._out_bytes = 0
            self.session.write(data)

    def _send_parts(self, parts: list[bytes]) -> None:
        """Send the parts of a statement with large values without joining them."""
        for part in parts:
            if len(part) > frontend.LARGE:
                self.flush()
                self._large_bytes += len(part)
                self.session.write(part)
            else:
                self._send(part)

    def _flush_now(self) -> None:
        self._flush_is_due = False
        if self.error is None:
            self.flush()

    async def drain(self) -> None:
        """Wait until the server has caught up. Raises the pipeline's error.

        After many bytes of large values, this waits for their results: until then the values are kept with their
        notes, to report them in an error. Results of attempts are excepted, since another session may have to act
        before they can arrive.
        """
        if self._large_bytes > BEHIND and not self.awaits_attempts:
            await self.sync()
        await self.session.drain()
        if self.error is not None:
            raise self.error

    async def sync(self) -> None:
        """Queue a Sync and wait until every result has arrived. Raises the pipeline's error."""
        self.queue_sync()
        self._settled = asyncio.get_running_loop().create_future()
        await self._settled
        self._large_bytes = 0
        if self.error is not None:
            raise self.error

    async def recover(self) -> tuple[SubscriberError | None, object]:
        """After an attempt was refused: wait until the server skips nothing any more; the error and its note.

        The session's transaction is as the error has left it.
        """
        await self.sync()
        error, note = self.refused, self.refused_note
        self.refused = self.refused_note = None
        return error, note

    async def rows(self, sql: str, *values: str | None) -> Rows:
        """Run one statement with text parameters and wait for its rows."""
        result: Rows = []
        parameters = self.texts(values)
        self.execute(
            sql, frontend.ALL_TEXT, parameters, note=sql, on_result=lambda _note, _tag, rows: result.extend(rows)
        )
        await self.sync()
        return result

    def texts(self, values: Sequence[str | None]) -> bytes:
        """The parameters of execute() for values that are all text or NULL."""
        return frontend.text_parameters(values, self.codec)

    async def watch(self) -> NoReturn:
        """Wait until the pipeline fails, and raise its error. Run it in a task beside the pipeline's user."""
        await asyncio.shield(self._failed)
        assert self.error is not None
        raise self.error

    @property
    def idle(self) -> bool:
        """True if every answer has arrived, and none was an error."""
        return not self._pending and self.error is None

    @contextmanager
    def attempt(self, attempting: bool = True) -> Iterator[None]:
        """Allow the statements that are queued in the block to fail."""
        before, self.attempting = self.attempting, attempting
        try:
            yield
        finally:
            self.attempting = before

    @property
    def awaits_attempts(self) -> bool:
        """True if one of the outstanding results belongs to an attempt."""
        return any(pending.is_attempt for pending in self._pending)

    @property
    def only_attempts(self) -> bool:
        """True if all outstanding results belong to attempts."""
        return all(pending.is_attempt for pending in self._pending)

    @property
    def waits_for(self) -> weakref.ref[object] | None:
        """Return a token for the next expected answer; None if every answer has arrived.

        Two equal tokens mean that no answer arrived between the calls. A token does not keep the statement, which may
        contain a large value.
        """
        return weakref.ref(self._pending[0]) if self._pending else None

    def _prepare(self, statement: Statement, note: object) -> bytes:
        name = self._parse(statement, note, keeps=True)
        self._names[statement] = name
        if len(self._names) > self._max_statements:
            _, oldest = self._names.popitem(last=False)
            self._close(oldest, note)
        return name

    def _parse(self, statement: Statement, note: object, *, keeps: bool = False) -> bytes:
        """Queue a Parse under a new name. `keeps`: the name is kept for its next use."""
        self._serial += 1
        name = b"s%d" % self._serial
        self._send(frontend.parse(name, *statement, self.codec))
        self._pending.append(_Pending(note, is_attempt=self.attempting, prepares=statement if keeps else None))
        return name

    def _close(self, name: bytes, note: object) -> None:
        self._send(frontend.close_statement(name))
        self._pending.append(_Pending(note, is_attempt=self.attempting))

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= CHUNK:
            self.flush()

    # --- receiving ------------------------------------------------------------------------------

    def received(self, kind: str, body: bytes) -> None:
        if self.error is not None:
            return
        if kind == "2":
            return
        if kind == "D":
            if self._pending[0].on_result is not None:
                self._rows.append(frontend.read_row(body, self.codec))
        elif kind in "C13I":
            self._answered(self._pending.popleft(), body)
        elif kind == "Z":
            if self._skipping:
                self._skip()
            done = self._pending.popleft()
            if done.on_sync is not None and not self._skipping:
                done.on_sync()
            self._skipping = False
            if not self._pending and self._settled is not None and not self._settled.done():
                self._settled.set_result(None)
        elif kind == "E" and self._pending and self._pending[0].is_attempt:
            self._refuse(ServerError(frontend.read_fields(body, self.codec)))
        elif kind == "E":
            self.failed_note = self._pending[0].note if self._pending else None
            self._fail(ServerError(frontend.read_fields(body, self.codec)))

    def _refuse(self, error: ServerError) -> None:
        self._skipping = True
        self._rows = []
        if self.refused is None:
            self.refused, self.refused_note = error, self._pending[0].note
            self.on_trouble()

    def _skip(self) -> None:
        """Drop the statements that the server skipped. Those it should have prepared are not prepared."""
        while not self._pending[0].is_sync:
            skipped = self._pending.popleft()
            if skipped.prepares is not None:
                self._names.pop(skipped.prepares, None)

    def _answered(self, pending: _Pending, body: bytes) -> None:
        rows, self._rows = self._rows, []
        if pending.on_result is not None and body != pending.expect:
            pending.on_result(pending.note, decode(body[:-1]), rows)

    def lost(self, error: SubscriberError) -> None:
        if self.error is None:
            self.failed_note = self._pending[0].note if self._pending else None
            self._fail(error)

    def _fail(self, error: SubscriberError) -> None:
        self.error = error
        self._pending.clear()
        self.on_trouble()
        for future in (self._failed, self._settled):
            if future is not None and not future.done():
                future.set_result(None)
