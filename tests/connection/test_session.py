"""Raw sessions against a real server: queries, COPY, and every kind of failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from subscriber.connection import session as session_module
from subscriber.connection.connect import open_session
from subscriber.connection.session import LIMIT, Session
from subscriber.connection.simple_query import Result
from subscriber.demo.servers import Server
from subscriber.errors import ConnectionLost, ServerError, SubscriberError
from subscriber.protocol import frontend


@pytest.fixture
async def session(target: Server) -> AsyncIterator[Session]:
    session = await open_session(target.dsn(), application_name="raw")
    yield session
    session.abort()


async def kill(server: Server, pid: int) -> None:
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.dsn())
    assert await connection.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
    await connection.close()


async def cancel_query(server: Server, pid: int) -> None:
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.dsn())
    query = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep'"
    while not await connection.fetchval(query, pid):  # an idle session would ignore the cancel request
        await anyio.sleep(0.01)
    await connection.close()


# --- queries --------------------------------------------------------------------------------------


async def test_several_statements_have_several_results(session: Session) -> None:
    results = await session.query(
        "CREATE TEMP TABLE t (a int, b text); INSERT INTO t VALUES (1, NULL), (2, 'é'), (3, '');"
        ' SELECT a, b AS "Ü" FROM t ORDER BY a; SELECT FROM t LIMIT 0'
    )
    assert results == [
        Result("CREATE TABLE"),
        Result("INSERT 0 3"),
        Result("SELECT 3", ("a", "Ü"), [("1", None), ("2", "é"), ("3", "")]),
        Result("SELECT 0"),
    ]
    assert await session.query(" ; ") == [Result()]
    assert await session.rows("SELECT 1; SELECT 2") == [("2",)]


async def test_an_error_has_the_servers_fields_and_the_session_goes_on(session: Session) -> None:
    with pytest.raises(ServerError) as caught:
        await session.query("SELECT 1; SELECT 1/0; SELECT 2")
    assert (caught.value.sqlstate, caught.value.message) == ("22012", "division by zero")
    assert caught.value.fields["V"] == caught.value.severity == "ERROR"
    assert await session.rows("SELECT 3") == [("3",)]


async def test_the_server_says_what_it_is(session: Session) -> None:
    ((number,),) = await session.rows("SELECT current_setting('server_version_num')")
    assert session.server_version == int(number or 0)
    assert await session.rows("SELECT pg_backend_pid()") == [(str(session.pid),)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18.6", 180006),
        ("18beta1", 180000),
        ("19devel", 190000),
        ("15.18 (Debian 15.18-0+deb12u1)", 150018),
        ("10.23", 100023),
    ],
)
async def test_the_server_version_is_parsed(text: str, number: int) -> None:
    assert Session(1, {"server_version": text}).server_version == number


async def test_settings_that_change_are_noticed(session: Session) -> None:
    await session.query("SET timezone = 'Asia/Kathmandu'")
    assert session.parameters["TimeZone"] == "Asia/Kathmandu"


async def test_notices_are_handed_on(session: Session) -> None:
    await session.query("DO $$ BEGIN RAISE WARNING 'nobody listens'; END $$")
    notices: list[dict[str, str]] = []
    session.on_notice = notices.append
    await session.query("DO $$ BEGIN RAISE WARNING 'é' USING detail = 'd'; END $$")
    assert [(n["V"], n["M"], n["D"]) for n in notices] == [("WARNING", "é", "d")]


async def test_a_notification_is_nobodys(session: Session) -> None:
    await session.query("LISTEN x; NOTIFY x")
    assert await session.rows("SELECT 1") == [("1",)]


async def test_a_value_of_twenty_megabytes(session: Session) -> None:
    ((value,),) = await session.rows("SELECT repeat('abcde', 4000000)")
    assert value == "abcde" * 4_000_000
    big = "x" * 20_000_000
    assert await session.rows(f"SELECT length('{big}')") == [("20000000",)]
    assert await session.rows("SELECT 1") == [("1",)]
    assert len(session._buffer) < 2_000_000  # room for a large message is given back


async def test_only_one_query_at_a_time(session: Session) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.query, "SELECT pg_sleep(0.1)")
        await anyio.lowlevel.checkpoint()
        with pytest.raises(RuntimeError, match="in the middle of a query"):
            await session.query("SELECT 1")
    assert await session.rows("SELECT 1") == [("1",)]


async def test_the_answer_to_a_cancelled_query_is_never_taken_for_anothers(session: Session) -> None:
    with anyio.move_on_after(0.02):
        await session.rows("SELECT 'first' FROM pg_sleep(0.2)")
    with pytest.raises(RuntimeError, match="in the middle of a query"):
        await session.rows("SELECT 'second'")
    await anyio.sleep(0.3)
    assert await session.rows("SELECT 'third'") == [("third",)]


async def test_a_query_cancelled_on_the_server_is_an_error_like_any_other(target: Server, session: Session) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_query, target, session.pid)
        with pytest.raises(ServerError) as caught:
            await session.query("SELECT pg_sleep(10)")
    assert caught.value.sqlstate == "57014"
    assert await session.rows("SELECT 1") == [("1",)]


# --- COPY -----------------------------------------------------------------------------------------


async def collect(session: Session, sql: str) -> bytes:
    return b"".join([b"".join(payloads) async for payloads in session.copy_out(sql)])


async def pieces(*chunks: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


async def test_copy_out_and_in(session: Session) -> None:
    await session.query("CREATE TEMP TABLE t (a int, b text)")
    data = b"".join(b"%d\tvalue %d\n" % (n, n) for n in range(5000))
    cuts = [data[n : n + 777] for n in range(0, len(data), 777)]
    assert await session.copy_in("COPY t FROM STDIN", pieces(*cuts)) == "COPY 5000"
    assert await collect(session, "COPY t TO STDOUT") == data
    assert await collect(session, "COPY (SELECT WHERE false) TO STDOUT") == b""
    assert await session.copy_in("COPY t FROM STDIN", pieces()) == "COPY 0"


async def test_an_error_of_the_server_ends_a_copy_in(session: Session) -> None:
    await session.query("CREATE TEMP TABLE t (a int)")
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        yield b"x\n"
        while True:
            taken += 1
            await anyio.sleep(0.001)
            yield b"1\n"

    with pytest.raises(ServerError) as caught:
        await session.copy_in("COPY t FROM STDIN", endless())
    assert caught.value.sqlstate == "22P02"
    assert taken < 1000
    assert await session.rows("SELECT count(*) FROM t") == [("0",)]


async def test_an_error_at_the_end_of_a_copy_in(session: Session) -> None:
    await session.query("CREATE TEMP TABLE t (a int)")
    with pytest.raises(ServerError):
        await session.copy_in("COPY t FROM STDIN", pieces(b"x\n"))
    with pytest.raises(ServerError, match='relation "missing" does not exist'):
        await session.copy_in("COPY missing FROM STDIN", pieces(b"x\n"))
    assert await session.rows("SELECT 1") == [("1",)]


async def test_an_error_of_ours_ends_a_copy_in_without_its_text(session: Session) -> None:
    logged: list[dict[str, str]] = []
    session.on_notice = logged.append
    await session.query("CREATE TEMP TABLE t (a int)")
    with pytest.raises(ValueError, match="secret"):
        await session.copy_in("COPY t FROM STDIN", pieces(b"1\n", error=ValueError("secret")))
    assert await session.rows("SELECT count(*) FROM t") == [("0",)]


async def test_a_cancelled_copy_in_copies_nothing(session: Session) -> None:
    await session.query("CREATE TEMP TABLE t (a int)")

    async def stuck() -> AsyncIterator[bytes]:
        yield b"1\n"
        await anyio.sleep_forever()

    with anyio.move_on_after(0.05):
        await session.copy_in("COPY t FROM STDIN", stuck())
    await anyio.sleep(0.05)  # the server's answer is not waited for
    assert await session.rows("SELECT count(*) FROM t") == [("0",)]


async def test_an_error_of_the_server_ends_a_copy_out(session: Session) -> None:
    with pytest.raises(ServerError) as caught:
        await collect(session, "COPY (SELECT 1000 / (n - 1000) FROM generate_series(1, 2000) n) TO STDOUT")
    assert caught.value.sqlstate == "22012"
    with pytest.raises(ServerError, match='relation "missing" does not exist'):
        await collect(session, "COPY missing TO STDOUT")
    assert await session.rows("SELECT 1") == [("1",)]


async def test_a_reader_that_pauses_holds_up_the_server_and_not_our_memory(session: Session) -> None:
    rows = 0
    longest = 0
    async for payloads in session.copy_out("COPY (SELECT repeat('x', 1000) FROM generate_series(1, 30000)) TO STDOUT"):
        rows += len(payloads)
        longest = max(longest, sum(map(len, payloads)))
        if rows < 20000:
            await anyio.sleep(0.05)
    assert rows == 30000
    assert longest < LIMIT + 2 * session_module.BUFFER  # the limit, and the size of one read


async def test_a_copy_out_given_up_in_the_middle_does_not_mix_with_what_follows(session: Session) -> None:
    async for _ in session.copy_out("COPY (SELECT repeat('x', 1000) FROM generate_series(1, 30000)) TO STDOUT"):
        break
    with pytest.raises(RuntimeError, match="in the middle of a query"):
        await session.query("SELECT 1")
    await session.close()


# --- the end --------------------------------------------------------------------------------------


async def test_a_terminated_backend_is_what_its_last_word_says(target: Server, session: Session) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill, target, session.pid)
        with pytest.raises(ServerError) as caught:
            await session.query("SELECT pg_sleep(10)")
    assert caught.value.sqlstate == "57P01"
    for _ in range(2):
        with pytest.raises(ServerError, match="terminating connection due to administrator command"):
            await session.query("SELECT 1")
    await session.close()


async def test_a_backend_terminated_while_idle(target: Server, session: Session) -> None:
    await session.query("SELECT 1")
    await kill(target, session.pid)
    with pytest.raises(ServerError, match="terminating connection due to administrator command"):
        await session.query("SELECT 1")


async def test_a_backend_terminated_in_the_middle_of_a_copy(target: Server, session: Session) -> None:
    rows = "SELECT repeat('x', 9000), pg_sleep(0.001) FROM generate_series(1, 9999)"

    async def copy() -> None:
        async for _ in session.copy_out(f"COPY ({rows}) TO STDOUT"):
            if session.error is None:
                await kill(target, session.pid)

    with pytest.raises(ServerError, match="terminating connection due to administrator command"):
        await copy()


async def test_a_backend_terminated_while_it_copies_in(target: Server, session: Session) -> None:
    await session.query("CREATE TEMP TABLE t (a int)")

    async def endless() -> AsyncIterator[bytes]:
        yield b"1\n"
        await kill(target, session.pid)
        while True:
            yield b"1\n" * 10000
            await anyio.lowlevel.checkpoint()

    with pytest.raises((ServerError, ConnectionLost)):
        await session.copy_in("COPY t FROM STDIN", endless())


async def test_a_connection_that_breaks(session: Session) -> None:
    async with anyio.create_task_group() as tasks:

        async def breaks() -> None:
            await anyio.sleep(0.05)
            session.transport.abort()

        tasks.start_soon(breaks)
        with pytest.raises(ConnectionLost, match="server closed the connection unexpectedly"):
            await session.query("SELECT pg_sleep(10)")
    with pytest.raises(ConnectionLost):
        session.write(frontend.SYNC)


async def test_closing_is_polite_and_can_be_repeated(target: Server, session: Session) -> None:
    await session.close()
    await session.close()
    session.abort()
    with pytest.raises(ConnectionLost, match="the session was closed"):
        await session.query("SELECT 1")


async def test_closing_does_not_wait_for_a_server_that_does_not_read(session: Session) -> None:
    query = asyncio.ensure_future(session.query("SELECT pg_sleep(10)"))
    await asyncio.sleep(0.05)
    for _ in range(40):
        session.write(frontend.query("SELECT 1" + " " * 1_000_000))
    with anyio.fail_after(1):
        await session.close(timeout=0.1)
    with pytest.raises(ConnectionLost, match="the session was closed"):
        await query


async def test_a_query_that_waits_ends_with_its_session(session: Session) -> None:
    query = asyncio.ensure_future(session.query("SELECT pg_sleep(10)"))
    await asyncio.sleep(0.05)
    session.abort()
    with pytest.raises(ConnectionLost, match="the session was closed"):
        await query


async def test_an_asyncpg_that_keeps_its_transport_elsewhere_is_reported(
    target: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(target.dsn())
    with monkeypatch.context() as patch:
        patch.delattr(connection, "_transport")
        with pytest.raises(SubscriberError, match="keeps its transport elsewhere than expected"):
            Session.take_over(connection)
    await connection.close()
