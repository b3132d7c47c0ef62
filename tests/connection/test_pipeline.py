"""Pipelined statements against a real server: order, the first error, and lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import anyio
import asyncpg
import pytest

from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.demo.servers import Server
from subscriber.errors import ConnectionLost, ServerError
from subscriber.protocol import frontend


@pytest.fixture
async def pipeline(target: Server) -> AsyncIterator[Pipeline]:
    session = await open_session(target.dsn(), application_name="raw")
    await session.query("CREATE TEMP TABLE t (a int PRIMARY KEY, b text)")
    pipeline = Pipeline(session)
    yield pipeline
    session.abort()


class Collected:
    """The results, in order."""

    def __init__(self) -> None:
        self.answers: list[tuple[object, str, list[tuple[str | None, ...]]]] = []
        self.syncs: list[int] = []

    def result(self, note: object, tag: str, rows: list[tuple[str | None, ...]]) -> None:
        self.answers.append((note, tag, rows))


def insert(pipeline: Pipeline, value: str) -> None:
    pipeline.execute(
        "INSERT INTO t VALUES ($1, $2)",
        parameters=frontend.text_parameters([value, value]),
        note=f"insert {value}",
        expect=b"INSERT 0 1\0",
    )


async def test_answers_come_in_order(pipeline: Pipeline) -> None:
    collected = Collected()
    for number in range(100):
        pipeline.execute(
            "SELECT $1, NULL",
            parameters=frontend.text_parameters([str(number)]),
            note=number,
            on_result=collected.result,
        )
    await pipeline.sync()
    assert collected.answers == [(n, "SELECT 1", [(str(n), None)]) for n in range(100)]
    assert pipeline.idle


async def test_only_unexpected_answers_are_reported(pipeline: Pipeline) -> None:
    collected = Collected()
    for number in (1, 2):
        insert(pipeline, str(number))
    for key in ("1", "3", "2"):
        pipeline.execute(
            "DELETE FROM t WHERE a = $1",
            parameters=frontend.text_parameters([key]),
            note=key,
            expect=b"DELETE 1\0",
            on_result=collected.result,
        )
    pipeline.execute("", note="empty", on_result=lambda note, tag, rows: None)
    await pipeline.sync()
    assert collected.answers == [("3", "DELETE 0", [])]


async def test_values_go_in_binary_as_well(pipeline: Pipeline) -> None:
    rows: list[object] = []
    pipeline.execute(
        "SELECT $1::int + 1, $2::text",
        b"\0\2\0\1\0\0",
        b"\0\2\0\0\0\4\0\0\1\0" + b"\0\0\0\2\xc3\xa9",
        on_result=lambda note, tag, found: rows.extend(found),
    )
    await pipeline.sync()
    assert rows == [("257", "é")]


async def test_nothing_waits_for_an_answer(pipeline: Pipeline) -> None:
    pipeline.execute("SELECT pg_sleep(0.2)")
    for number in range(1000):
        insert(pipeline, str(number))
    pipeline.queue_sync()
    await pipeline.drain()
    assert not pipeline.idle
    assert await pipeline.rows("SELECT count(*) FROM t") == [("1000",)]


async def test_syncs_are_told_of_in_order(pipeline: Pipeline) -> None:
    collected = Collected()
    for number in range(5):
        insert(pipeline, str(number))
        pipeline.queue_sync(lambda number=number: collected.syncs.append(number))  # type: ignore[misc]
    await pipeline.sync()
    assert collected.syncs == [0, 1, 2, 3, 4]


async def test_statements_after_an_error_do_not_run_before_the_next_sync(pipeline: Pipeline) -> None:
    collected = Collected()
    insert(pipeline, "1")
    pipeline.queue_sync(lambda: collected.syncs.append(1))
    insert(pipeline, "2")
    insert(pipeline, "1")  # fails
    insert(pipeline, "3")
    pipeline.queue_sync(lambda: collected.syncs.append(2))
    insert(pipeline, "4")
    pipeline.queue_sync(lambda: collected.syncs.append(3))
    with pytest.raises(ServerError) as caught:
        await pipeline.sync()
    assert caught.value.sqlstate == "23505"
    assert pipeline.failed_note == "insert 1"
    assert collected.syncs == [1]
    assert not pipeline.idle
    with pytest.raises(ServerError) as again:
        insert(pipeline, "5")
    assert again.value is caught.value
    with pytest.raises(ServerError):
        pipeline.queue_sync()
    with pytest.raises(ServerError):
        await pipeline.drain()
    with anyio.fail_after(1), pytest.raises(ServerError):
        await pipeline.watch()


async def test_a_statement_that_cannot_be_parsed(pipeline: Pipeline) -> None:
    insert(pipeline, "1")
    pipeline.execute("SELECT missing", note="wrong")
    with pytest.raises(ServerError) as caught:
        await pipeline.sync()
    assert (caught.value.sqlstate, pipeline.failed_note) == ("42703", "wrong")


async def test_a_value_that_cannot_be_read(pipeline: Pipeline) -> None:
    insert(pipeline, "x")
    with pytest.raises(ServerError) as caught:
        await pipeline.sync()
    assert (caught.value.sqlstate, pipeline.failed_note) == ("22P02", "insert x")


async def test_notices_do_not_disturb_the_order(pipeline: Pipeline) -> None:
    notices: list[str] = []
    pipeline.session.on_notice = lambda fields: notices.append(fields["M"])
    pipeline.execute("DROP TABLE IF EXISTS missing")
    insert(pipeline, "1")
    pipeline.execute("SET timezone = 'UTC'")
    assert await pipeline.rows("SELECT a FROM t") == [("1",)]
    assert notices == ['table "missing" does not exist, skipping']


async def test_statements_are_prepared_once_and_the_oldest_go(pipeline: Pipeline) -> None:
    pipeline = Pipeline(pipeline.session, statements=20)
    prepared = "SELECT count(*) FROM pg_prepared_statements"
    for _ in range(50):
        insert(pipeline, "1")
        pipeline.execute("DELETE FROM t")
    assert await pipeline.rows(prepared) == [("3",)]
    for number in range(60):
        pipeline.execute(f"SELECT {number}")
        insert(pipeline, str(number))  # in use, so it stays
    assert await pipeline.rows(prepared) == [("20",)]
    assert await pipeline.rows("SELECT 0") == [("0",)]
    assert await pipeline.rows("SELECT count(*) FROM pg_prepared_statements WHERE statement ~ '^INSERT'") == [("1",)]


async def test_the_session_is_lent_for_a_query_and_taken_back(pipeline: Pipeline) -> None:
    insert(pipeline, "1")
    with pytest.raises(RuntimeError, match="in the middle of a query"):
        await pipeline.session.query("SELECT 1")
    await pipeline.sync()
    assert await pipeline.session.rows("SELECT a FROM t") == [("1",)]
    pipeline.attach()
    assert await pipeline.rows("SELECT b FROM t") == [("1",)]


async def test_a_cancelled_wait_leaves_the_pipeline_in_order(pipeline: Pipeline) -> None:
    with anyio.move_on_after(0.05):
        await pipeline.rows("SELECT 'first' FROM pg_sleep(0.2)")
    assert await pipeline.rows("SELECT 'second'") == [("second",)]


# --- the end --------------------------------------------------------------------------------------


async def kill(server: Server, pid: int, *, asleep: bool = False) -> None:
    """End a session, with `asleep` when it sleeps."""
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.dsn())
    sleeps = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1"
    while asleep and not await connection.fetchval(sleeps, pid):
        await anyio.sleep(0.01)
    assert await connection.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
    await connection.close()


async def test_an_idle_pipeline_reports_the_termination_of_its_backend(target: Server, pipeline: Pipeline) -> None:
    watching = asyncio.ensure_future(pipeline.watch())
    await kill(target, pipeline.session.pid)
    with anyio.fail_after(5), pytest.raises(ServerError, match="terminating connection due to administrator command"):
        await watching
    assert pipeline.failed_note is None
    with pytest.raises(ServerError):
        pipeline.queue_sync()


async def test_a_running_statement_reports_the_termination_of_its_backend(target: Server, pipeline: Pipeline) -> None:
    synced: list[int] = []
    insert(pipeline, "1")
    pipeline.execute("SELECT pg_sleep(10)", note="asleep")
    pipeline.queue_sync(lambda: synced.append(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(kill, target, pipeline.session.pid, asleep=True))
        with anyio.fail_after(20), pytest.raises(ServerError) as caught:
            await pipeline.sync()
    assert caught.value.sqlstate == "57P01"
    assert pipeline.failed_note == "asleep"
    assert synced == []


async def test_a_pipeline_that_sends_reports_the_termination_of_its_backend_once(
    target: Server, pipeline: Pipeline
) -> None:
    """Either the server's last message or the broken connection arrives first. It raises one of our errors, once."""
    value = "x" * 100_000

    async def send() -> None:
        for number in range(100_000):
            pipeline.execute(
                "INSERT INTO t VALUES ($1, $2)", parameters=frontend.text_parameters([str(number), value]), note=number
            )
            pipeline.queue_sync()
            await pipeline.drain()
            if number == 200:
                await kill(target, pipeline.session.pid)

    with anyio.fail_after(20), pytest.raises((ServerError, ConnectionLost)):
        await send()


async def test_a_connection_that_breaks(pipeline: Pipeline) -> None:
    pipeline.execute("SELECT pg_sleep(10)", note="asleep")
    pipeline.queue_sync()
    asyncio.get_running_loop().call_later(0.05, pipeline.session.transport.abort)
    with anyio.fail_after(5), pytest.raises(ConnectionLost, match="server closed the connection unexpectedly"):
        await pipeline.watch()
    assert pipeline.failed_note == "asleep"


async def test_a_server_that_is_stuck_holds_us_up_and_not_our_memory(pipeline: Pipeline) -> None:
    value = "x" * 100_000
    sent = 0

    async def send() -> None:
        nonlocal sent
        pipeline.execute("SELECT pg_sleep(10)")
        while True:
            pipeline.execute("SELECT $1", parameters=frontend.text_parameters([value]))
            pipeline.queue_sync()
            await pipeline.drain()
            sent += len(value)

    with anyio.move_on_after(0.5):
        await send()
    assert sent < 20_000_000  # the size of the kernel's buffers
    assert pipeline.session.transport.get_write_buffer_size() < 1_000_000
