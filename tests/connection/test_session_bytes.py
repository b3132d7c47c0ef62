"""A server's bytes have the same meaning in pieces of any size. Also the effects of damaged bytes."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from subscriber.connection import session as session_module
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import LIMIT, Session
from subscriber.demo.servers import Server
from subscriber.errors import ConnectionLost, EndOfStream, ServerError, SubscriberError
from subscriber.protocol import frontend


class Transport(asyncio.Transport):
    """A transport without a connection. Records written bytes, and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


def unconnected() -> tuple[Session, Transport]:
    session = Session(1, {"server_version": "18.6"})
    session._transport = transport = Transport()
    return session, transport


def feed(session: Session, data: bytes, cuts: list[int] | None = None) -> None:
    """Give `data` to the session as an event loop does, cut at these places and where its buffer ends."""
    edges = sorted({0, len(data), *(cut for cut in cuts or () if cut < len(data))})
    for start, stop in pairwise(edges):
        while start < stop:
            buffer = session.get_buffer(-1)
            size = min(len(buffer), stop - start)
            assert size > 0
            buffer[:size] = data[start : start + size]
            session.buffer_updated(size)
            start += size


def error(**fields: str) -> bytes:
    return frontend.message(b"E", b"".join(f"{k}{v}\0".encode() for k, v in fields.items()) + b"\0")


def complete(tag: str) -> bytes:
    return frontend.message(b"C", tag.encode() + b"\0")


READY = frontend.message(b"Z", b"I")
COPY_BOTH = frontend.message(b"W", b"\0\0\0")
ROWS = (
    frontend.message(b"T", b"\0\2a\0" + b"\0" * 18 + b"b\0" + b"\0" * 18)
    + frontend.message(b"D", frontend.text_parameters(["1", None]))
    + frontend.message(b"S", b"TimeZone\0UTC\0")
    + frontend.message(b"N", b"VNOTICE\0Mhello\0\0")
    + frontend.message(b"A", b"\0\0\0\1x\0\0")
    + frontend.message(b"D", frontend.text_parameters(["2", "é" * 300]))
    + complete("SELECT 2")
    + frontend.message(b"I", b"")
    + complete("DO")
    + READY
)
cuts = st.lists(st.integers(0, len(ROWS)), max_size=8)


@given(cuts=cuts)
@example(cuts=list(range(len(ROWS))))
async def test_a_query_cut_anywhere(cuts: list[int]) -> None:
    session, transport = unconnected()
    notices: list[str] = []
    session.on_notice = lambda fields: notices.append(fields["M"])
    query = asyncio.ensure_future(session.query("SELECT …"))
    await asyncio.sleep(0)
    assert transport.written == frontend.query("SELECT …")
    feed(session, ROWS, cuts)
    results = await query
    assert [r.tag for r in results] == ["SELECT 2", "", "DO"]
    assert results[0].columns == ("a", "b")
    assert results[0].rows == [("1", None), ("2", "é" * 300)]
    assert notices == ["hello"]
    assert session.parameters["TimeZone"] == "UTC"


STREAM = [b"x" * n for n in (0, 1, 5, 4000, 17)]
STREAM_BYTES = (
    COPY_BOTH + b"".join(map(frontend.copy_data, STREAM)) + frontend.message(b"c", b"") + complete("COPY 0") + READY
)


@given(cuts=st.lists(st.integers(0, len(STREAM_BYTES)), max_size=8))
async def test_a_stream_cut_anywhere(cuts: list[int]) -> None:
    session, _ = unconnected()
    start = asyncio.ensure_future(session.start_copy_both("START_REPLICATION"))
    await asyncio.sleep(0)
    feed(session, STREAM_BYTES, cuts)
    await start
    received = await session.receive()
    with pytest.raises(EndOfStream):
        await session.receive()
    assert received == STREAM


@pytest.mark.parametrize("size", [1000, session_module.BUFFER, 3 * session_module.BUFFER + 7])
@pytest.mark.parametrize("piece", [1 << 10, 100_003, 1 << 30])
async def test_messages_larger_than_the_buffer(size: int, piece: int) -> None:
    session, _ = unconnected()
    start = asyncio.ensure_future(session.start_copy_both(""))
    await asyncio.sleep(0)
    payloads = [bytes([n]) * size for n in range(5)]
    data = COPY_BOTH + b"".join(map(frontend.copy_data, payloads))
    feed(session, data, list(range(0, len(data), piece)))
    await start
    assert await session.receive() == payloads


async def test_reading_stops_when_nobody_takes_what_has_come() -> None:
    session, transport = unconnected()
    start = asyncio.ensure_future(session.start_copy_both(""))
    await asyncio.sleep(0)
    feed(session, COPY_BOTH)
    await start
    payload = frontend.copy_data(b"x" * 100_000)
    while transport.reading:
        feed(session, payload)
    copied = await session.receive()
    assert LIMIT < sum(map(len, copied)) < LIMIT + 200_000
    assert transport.reading


async def test_messages_before_the_end_of_a_stream_are_received_first() -> None:
    for ending, kind in [
        (complete("COPY 0"), EndOfStream),
        (error(S="ERROR", V="ERROR", C="XX000", M="no"), ServerError),
        (error(S="FATAL", V="FATAL", C="57P01", M="bye"), ServerError),
        (None, ConnectionLost),
    ]:
        session, _ = unconnected()
        start = asyncio.ensure_future(session.start_copy_both(""))
        await asyncio.sleep(0)
        feed(session, COPY_BOTH + frontend.copy_data(b"last") + (ending or b""))
        await start
        if ending is None:
            session.eof_received()
            session.connection_lost(None)
        assert await session.receive() == [b"last"]
        for _ in range(2):
            with pytest.raises(kind):
                await session.receive()


async def test_a_cancelled_wait_loses_nothing() -> None:
    session, _ = unconnected()
    start = asyncio.ensure_future(session.start_copy_both(""))
    await asyncio.sleep(0)
    feed(session, COPY_BOTH)
    await start
    waiting = asyncio.ensure_future(session.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    feed(session, frontend.copy_data(b"kept"))
    assert await session.receive() == [b"kept"]


async def test_a_stream_that_we_end() -> None:
    session, transport = unconnected()
    start = asyncio.ensure_future(session.start_copy_both(""))
    await asyncio.sleep(0)
    feed(session, COPY_BOTH)
    await start
    finish = asyncio.ensure_future(session.finish_copy_both())
    await asyncio.sleep(0)
    assert transport.written.endswith(frontend.COPY_DONE)
    feed(session, frontend.copy_data(b"x") + frontend.message(b"c", b"") + frontend.copy_data(b"too late"))
    await asyncio.sleep(0)
    assert not finish.done()
    feed(session, complete("COPY 0") + complete("START_REPLICATION") + READY)
    await finish


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(b"T\0\0\0\5\0", id="a row description cut short"),
        pytest.param(b"D\0\0\0\6\0\1", id="a row cut short"),
        pytest.param(b"E\0\0\0\6Mx", id="an error without an end"),
        pytest.param(b"C\0\0\0\0", id="a length that does not count itself"),
        pytest.param(b"C\0\0\0\3", id="a length that is too small"),
        pytest.param(b"Z\xff\xff\xff\xff", id="a length beyond all messages"),
    ],
)
async def test_damage_ends_the_session_with_an_error_of_ours(damage: bytes) -> None:
    session, transport = unconnected()
    query = asyncio.ensure_future(session.query("SELECT 1"))
    await asyncio.sleep(0)
    feed(session, damage)
    with anyio.fail_after(1), pytest.raises(SubscriberError) as caught:
        await query
    assert caught.value.sqlstate == "08P01"
    assert transport.aborted
    with pytest.raises(SubscriberError):
        await session.query("SELECT 1")


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4))
async def test_nothing_but_errors_of_ours_come_of_any_bytes(data: bytes, cuts: list[int]) -> None:
    session, _ = unconnected()
    query = asyncio.ensure_future(session.query("SELECT 1"))
    await asyncio.sleep(0)
    feed(session, data, cuts)
    session.connection_lost(None)
    with suppress(SubscriberError):
        await query


async def test_a_bug_in_a_callback_is_not_taken_for_a_lost_connection() -> None:
    session, transport = unconnected()
    pipeline = Pipeline(session)

    def broken() -> None:
        raise ZeroDivisionError("secret")

    pipeline.queue_sync(broken)
    feed(session, READY)
    with pytest.raises(SubscriberError, match="could not be handled") as caught:
        await pipeline.watch()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "secret" not in str(caught.value)
    assert transport.aborted


# --- recordings -----------------------------------------------------------------------------------


def run(pipeline: Pipeline, number: int, results: list[object]) -> None:
    pipeline.execute(
        "SELECT $1::int, repeat('é', $1::int)" if number % 3 else "SELECT FROM (VALUES (1)) v WHERE $1::int = 0",
        parameters=frontend.text_parameters([str(number)]),
        note=number,
        expect=b"SELECT 0\0",
        on_result=lambda note, tag, rows: results.append((note, tag, rows)),
    )


async def test_a_recorded_pipeline_cut_anywhere(target: Server) -> None:
    session = await open_session(target.dsn())
    pipeline = Pipeline(session)
    recorded = bytearray()
    updated = session.buffer_updated

    def record(nbytes: int) -> None:
        recorded.extend(memoryview(session._buffer)[session._end : session._end + nbytes])
        updated(nbytes)

    session.buffer_updated = record  # type: ignore[method-assign]
    results: list[object] = []
    for number in range(40):
        run(pipeline, number, results)
    pipeline.queue_sync(lambda: results.append("synced"))
    while not pipeline.idle:
        await anyio.sleep(0.01)
    session.abort()
    assert len(results) == 28
    for seed in range(60):
        chance = random.Random(seed)
        again, _ = unconnected()
        pipeline = Pipeline(again)
        replayed: list[object] = []
        for number in range(40):
            run(pipeline, number, replayed)
        pipeline.queue_sync(partial(replayed.append, "synced"))
        feed(again, bytes(recorded), [chance.randrange(len(recorded)) for _ in range(chance.randrange(12))])
        assert replayed == results
        assert pipeline.idle
