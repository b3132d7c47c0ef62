"""Large data: sent in slices without a copy, received into a reused buffer, and never joined."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import BEHIND, Pipeline
from subscriber.connection.session import BUFFER, LIMIT, SLICE, Session, joined
from subscriber.demo.servers import Server
from subscriber.errors import ConnectionLost, ServerError
from subscriber.protocol import frontend
from tests.connection.test_session_bytes import COPY_BOTH, READY, complete, feed

COPY_OUT = frontend.message(b"H", b"\0\0\0")
HIGH_WATER = 64 * 1024
LARGE = bytes(range(256)) * (5 * frontend.LARGE // 256) + b"end"


class Slow(asyncio.Transport):
    """A transport whose network accepts only the bytes that take() allows."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.sent = b""
        self.kept = b""
        self.most = 0  # bytes it has ever kept
        self._reads = True
        self.closing = self.aborted = False
        self._session = session

    def write(self, data: Any) -> None:
        assert not self.closing
        self.kept += data
        self.most = max(self.most, len(self.kept))
        if len(self.kept) > HIGH_WATER:
            self._session.pause_writing()

    def take(self, size: int) -> None:
        self.sent, self.kept = self.sent + self.kept[:size], self.kept[size:]
        if not self.kept:
            self._session.resume_writing()
        if self.closing and not self.kept:
            self._session.connection_lost(None)

    async def take_all(self, piece: int = 100_000) -> None:
        while self.kept:
            self.take(piece)
            await asyncio.sleep(0)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True
        if not self.kept:
            self._session.connection_lost(None)

    def abort(self) -> None:
        self.closing = self.aborted = True

    def is_reading(self) -> bool:
        return self._reads

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True


def slow() -> tuple[Session, Slow]:
    session = Session(1, {"server_version": "18.6"})
    session._transport = transport = Slow(session)
    return session, transport


# --- sending --------------------------------------------------------------------------------------

sizes = st.lists(st.sampled_from([0, 5, 70_000, frontend.LARGE, frontend.LARGE + 1, 1_000_000]), max_size=6)


@given(sizes=sizes, takes=st.lists(st.integers(1, 600_000), max_size=8))
async def test_written_data_is_sent_in_order_and_the_transport_buffers_little(
    sizes: list[int], takes: list[int]
) -> None:
    session, transport = slow()
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, piece in enumerate(pieces):
        session.write(piece)
        for size in takes[number : number + 1]:
            transport.take(size)
    await transport.take_all()
    assert transport.sent == b"".join(pieces)
    small = sum(size for size in sizes if size <= frontend.LARGE)
    assert transport.most <= small + HIGH_WATER + SLICE


async def test_large_data_is_not_copied_ahead_of_the_network() -> None:
    session, transport = slow()
    session.write(b"before")
    session.write(LARGE)
    session.write(b"behind")
    assert transport.most <= 6 + SLICE
    await transport.take_all()
    assert transport.sent == b"before" + LARGE + b"behind"
    assert transport.most <= HIGH_WATER + SLICE


async def test_drain_waits_until_all_data_is_sent() -> None:
    session, transport = slow()
    await session.drain()
    session.write(LARGE)
    waiting = asyncio.ensure_future(session.drain())
    while len(transport.sent) + SLICE + HIGH_WATER < len(LARGE):
        await asyncio.sleep(0)
        assert not waiting.done()
        transport.take(100_000)
    await transport.take_all()
    with anyio.fail_after(1):
        await waiting
    assert transport.sent == LARGE


async def test_a_cancelled_drain_loses_nothing() -> None:
    session, transport = slow()
    session.write(LARGE)
    waiting = asyncio.ensure_future(session.drain())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    session.write(b"behind")
    await transport.take_all()
    assert transport.sent == LARGE + b"behind"


@pytest.mark.parametrize("how", ["lost", "ended", "aborted"])
async def test_waiters_are_woken_and_buffers_are_freed_when_the_session_ends(how: str) -> None:
    session, transport = slow()
    pipeline = Pipeline(session)
    session.write(LARGE)
    waiting = [asyncio.ensure_future(waiter) for waiter in (session.drain(), pipeline.drain(), pipeline.sync())]
    await asyncio.sleep(0)
    if how == "lost":
        session.connection_lost(OSError("cable"))
    elif how == "ended":
        session.eof_received()
    else:
        session.abort()
        assert transport.aborted
    for waiter in waiting:
        with anyio.fail_after(1), pytest.raises(ConnectionLost):
            await waiter
    assert not session._unsent
    with pytest.raises(ConnectionLost):
        session.write(LARGE)
    sent = transport.sent + transport.kept
    session.resume_writing()
    assert transport.sent + transport.kept == sent


async def test_nothing_is_given_to_a_transport_that_is_closing() -> None:
    session, transport = slow()
    session.write(LARGE)
    transport.closing = True
    kept = transport.kept
    session.resume_writing()
    assert transport.kept == kept


async def test_terminate_comes_behind_large_data() -> None:
    session, transport = slow()
    session.write(LARGE)
    closing = asyncio.ensure_future(session.close())
    await asyncio.sleep(0)
    await transport.take_all()
    with anyio.fail_after(1):
        await closing
    assert transport.sent == LARGE + frontend.TERMINATE


async def test_close_gives_up_when_the_network_takes_nothing() -> None:
    session, transport = slow()
    session.write(LARGE)
    with anyio.fail_after(1):
        await session.close(timeout=0.01)
    assert transport.aborted
    assert not session._unsent
    assert frontend.TERMINATE not in transport.sent + transport.kept


async def test_copy_data_has_its_head_before_it() -> None:
    session, transport = slow()
    session.send_copy_data(LARGE)
    session.send_copy_data(b"small")
    await transport.take_all()
    assert transport.sent == frontend.copy_data(LARGE) + frontend.copy_data(b"small")


# --- receiving ------------------------------------------------------------------------------------


async def streaming() -> tuple[Session, Slow]:
    session, transport = slow()
    start = asyncio.ensure_future(session.start_copy_both(""))
    await asyncio.sleep(0)
    feed(session, COPY_BOTH)
    await start
    return session, transport


@pytest.mark.parametrize("behind", [0, 3, 5, 100, 70_000])
async def test_the_buffer_is_given_back_as_soon_as_the_message_is_cut_off(behind: int) -> None:
    session, _ = await streaming()
    follower = frontend.copy_data(b"y" * 80_000)
    feed(session, frontend.copy_data(LARGE) + follower[:behind])
    assert len(session._buffer) == BUFFER
    feed(session, follower[behind:])
    assert await session.receive() == [LARGE, b"y" * 80_000]


async def test_reading_resumes_after_a_very_large_message_when_the_next_is_awaited() -> None:
    session, transport = await streaming()
    payload = b"x" * (2 * LIMIT + 1)
    feed(session, frontend.copy_data(payload))
    assert not transport.is_reading()
    assert await session.receive() == [payload]
    assert not transport.is_reading()
    waiting = asyncio.ensure_future(session.receive())
    await asyncio.sleep(0)
    assert transport.is_reading()
    feed(session, frontend.copy_data(b"next"))
    assert await waiting == [b"next"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_copy_whose_last_row_is_very_large_leaves_a_session_that_is_read(at_once: bool) -> None:
    session, transport = slow()
    rows: list[bytes] = []

    async def copy() -> None:
        async for payloads in session.copy_out("COPY t TO STDOUT"):
            rows.extend(payloads)

    copying = asyncio.ensure_future(copy())
    await asyncio.sleep(0)
    feed(session, COPY_OUT)
    await asyncio.sleep(0)
    row = b"x" * (2 * LIMIT + 1)
    end = frontend.message(b"c", b"") + complete("COPY 1") + READY
    feed(session, frontend.copy_data(row) + end * at_once)
    while not rows:
        await asyncio.sleep(0)
    if not at_once:
        await asyncio.sleep(0)
        assert transport.is_reading()
        feed(session, end)
    await copying
    assert rows == [row]
    assert transport.is_reading()


@given(
    st.lists(
        st.sampled_from([0, 1, 1000, frontend.LARGE // 2, frontend.LARGE, frontend.LARGE + 1, 2 * LIMIT]), max_size=5
    )
)
def test_small_payloads_are_joined_and_large_payloads_are_not(sizes: list[int]) -> None:
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    given = list(payloads)
    chunks = list(joined(given))
    assert b"".join(chunks) == b"".join(payloads)
    if sum(sizes) > 2 * LIMIT:
        assert not given
        assert all(any(chunk is payload for payload in payloads) for chunk in chunks if len(chunk) > frontend.LARGE)
    else:
        assert len(chunks) == 1


# --- statements -----------------------------------------------------------------------------------

parameters = st.lists(st.one_of(st.none(), st.binary(max_size=20), st.just(LARGE)), max_size=4)


@given(name=st.binary(max_size=5), formats=st.sampled_from([frontend.ALL_TEXT, b"\0\1\0\1"]), values=parameters)
def test_a_statement_in_parts_is_the_same(name: bytes, formats: bytes, values: list[bytes | None]) -> None:
    parts = [len(values).to_bytes(2, "big")]
    for value in values:
        parts += [frontend.NULL] if value is None else [len(value).to_bytes(4, "big"), value]
    whole = frontend.bind_execute(name, formats, b"".join(parts))
    assert b"".join(frontend.bind_execute_parts(name, formats, parts)) == whole


def insert(pipeline: Pipeline, number: int, value: bytes) -> None:
    parts = [b"\0\2", b"\0\0\0\1", b"%d" % number, len(value).to_bytes(4, "big"), value]
    pipeline.execute("INSERT INTO t VALUES ($1, $2)", parameters=parts, note=number, expect=b"INSERT 0 1\0")


async def test_large_values_reach_the_server_in_their_place(target: Server) -> None:
    session = await open_session(target.dsn(), application_name="large")
    try:
        await session.query("CREATE TEMP TABLE t (a int PRIMARY KEY, b text)")
        pipeline = Pipeline(session)
        value = b"0123456789abcdef" * (BEHIND // 8)  # twice as much as may be unanswered
        insert(pipeline, 1, value)
        pipeline.execute("UPDATE t SET a = 7")
        insert(pipeline, 2, value[: frontend.LARGE + 5])
        await pipeline.drain()
        assert pipeline.idle  # it was waited for
        insert(pipeline, 3, value[: frontend.LARGE + 5])
        await pipeline.drain()
        rows_read = await pipeline.rows(
            "SELECT a, length(b), b = repeat('0123456789abcdef', length(b) / 16) FROM t ORDER BY 1"
        )
        large = str(frontend.LARGE + 5)
        assert rows_read == [("2", large, "f"), ("3", large, "f"), ("7", str(len(value)), "t")]
        insert(pipeline, 7, value)
        insert(pipeline, 8, value)
        with pytest.raises(ServerError, match="duplicate key"):
            await pipeline.drain()
    finally:
        session.abort()


async def test_a_large_statement_in_a_pipeline_does_not_wait_for_its_answer(target: Server) -> None:
    session = await open_session(target.dsn(), application_name="large")
    try:
        await session.query("CREATE TEMP TABLE t (a int PRIMARY KEY, b text)")
        pipeline = Pipeline(session)
        with pipeline.attempt():
            insert(pipeline, 1, b"x" * (BEHIND + 1))
            insert(pipeline, 1, b"x" * (BEHIND + 1))
        with anyio.fail_after(60):
            await pipeline.drain()
        assert not pipeline.idle
        error, note = await pipeline.recover()
        assert isinstance(error, ServerError)
        assert note == 1
        insert(pipeline, 1, b"x" * (BEHIND + 1))
        await pipeline.drain()
        assert pipeline.idle
    finally:
        session.abort()


async def test_answers_are_read_while_large_values_are_sent(target: Server) -> None:
    """A server does not read while its own answers are not read."""
    session = await open_session(target.dsn(), application_name="large")
    try:
        await session.query("CREATE TEMP TABLE t (a int PRIMARY KEY, b text)")
        pipeline = Pipeline(session)
        sizes: deque[int] = deque()
        for number in range(3):
            pipeline.execute(
                "SELECT repeat('x', 20000000)", on_result=lambda _note, _tag, rows: sizes.append(len(rows[0][0] or ""))
            )
            insert(pipeline, number, b"y" * 20_000_000)
        with anyio.fail_after(60):
            await pipeline.sync()
        assert list(sizes) == [20_000_000] * 3
    finally:
        session.abort()
