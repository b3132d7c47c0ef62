"""Connections to real servers, and to closed ports."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import anyio
import asyncpg
import pytest

from subscriber.connection.connect import connect, open_session
from subscriber.connection.errors import ConnectError, libpq_message
from subscriber.connection.password_command import password_from_command
from subscriber.connection.password_function import (
    PasswordFunction,
    PasswordRequest,
    password_from_function,
    set_password_function,
)
from subscriber.connection.settings import NO_TIMEOUTS, known
from subscriber.demo.servers import Server, Servers
from subscriber.errors import ConnectionLost, ServerError
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database

FIRST, SECOND = f"{MARK}-first", f"{MARK}-second"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 on which no process listens during the test."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def pairs(server: Server, **parameters: str) -> str:
    given = {"host": "127.0.0.1", "port": str(server.port), "user": "postgres", "dbname": "postgres", **parameters}
    return " ".join(f"{keyword}='{value}'" for keyword, value in given.items())


async def test_key_value_pairs_connect(publisher: Server) -> None:
    connection = await connect(
        pairs(publisher, options="-c work_mem=5MB -c datestyle=German"),
        application_name="mine",
        settings={"datestyle": "ISO"},
    )
    assert await connection.fetchval("SELECT current_setting('application_name')") == "mine"
    assert await connection.fetchval("SELECT current_setting('work_mem')") == "5MB"
    assert await connection.fetchval("SELECT current_setting('datestyle')") == "ISO, DMY"
    await connection.close()


async def test_arrays_of_the_servers_types_are_known(publisher: Server) -> None:
    """Otherwise each session asks the server for each of them, which takes longer than most of its queries."""
    elements = {
        "bool": True, "bytea": b"x", '"char"': b"x", "name": "n", "int2": 2, "int4": 4, "text": "t", "varchar": "v",
        "int8": 8, "float8": 0.5, "oid": 9, "timestamptz": datetime(2026, 1, 2, tzinfo=UTC), "uuid": UUID(int=1),
        "jsonb": '{"a": 1}', "pg_lsn": 7,
    }  # fmt: skip
    connection = await connect(pairs(publisher))
    executed: list[str] = []
    connection.add_query_logger(lambda record: executed.append(record.query))
    queries = {name: f"SELECT $1::{name}[], '{{}}'::{name}[]" for name in elements}
    for name, element in elements.items():
        row = await connection.fetchrow(queries[name], [element, None])
        assert row is not None
        assert list(row) == [[element, None], []]
    await connection.close()
    assert executed == list(queries.values())


async def test_the_connection_strings_own_application_name_wins(source_db: Database) -> None:
    session = await open_session(source_db.dsn(application_name="theirs"), application_name="mine")
    assert await session.rows("SELECT current_setting('application_name')") == [("theirs",)]
    await session.close()


async def test_a_walsender_answers_replication_commands_and_queries(source_db: Database) -> None:
    session = await open_session(source_db.dsn(), replication=True)
    ((_, timeline, _, dbname),) = await session.rows("IDENTIFY_SYSTEM")
    assert (timeline, dbname) == ("1", source_db.name)
    assert await session.rows("SELECT NULL, 'é'") == [(None, "é")]
    await session.close()


async def test_nobody_listening_is_a_lost_connection(closed_port: int) -> None:
    with pytest.raises(ConnectionLost) as caught:
        await connect(f"host=127.0.0.1 port={closed_port}")
    assert caught.value.message == (
        f'connection to server at "127.0.0.1", port {closed_port} failed: Connection refused'
    )
    assert caught.value.hint == "Is the server running on that host and accepting TCP/IP connections?"


async def test_no_socket_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost) as caught:
        await connect("host=/no/such/directory")
    assert caught.value.message == (
        'connection to server on socket "/no/such/directory/.s.PGSQL.5432" failed: No such file or directory'
    )


async def test_an_unknown_name_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost) as caught:
        await connect("host=nosuchhost.invalid")
    assert caught.value.message.startswith('could not translate host name "nosuchhost.invalid" to address: ')


async def test_a_silent_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionLost) as caught:
            await connect(f"host=127.0.0.1 port={port}", timeout=0.2)
    assert caught.value.message == f'connection to server at "127.0.0.1", port {port} failed: timeout expired'


async def test_a_connection_that_is_not_handed_out_is_closed(
    source_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a cancellation during its checks, or an error of the operating system about an option."""
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'not handed out'"
    dsn = source_db.dsn(application_name="not handed out")
    monkeypatch.setattr("subscriber.connection.connect._check_session", lambda *_: anyio.sleep_forever())
    with anyio.move_on_after(5) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connect, dsn)
            await source_db.wait_for(ours, 1)
            tasks.cancel_scope.cancel()
    assert not scope.cancelled_caught
    await source_db.wait_for(ours, 0)
    monkeypatch.undo()
    with pytest.raises(ConnectionLost):
        await connect(dsn + "&keepalives_idle=2000000000")
    await source_db.wait_for(ours, 0)


async def test_a_refusal_carries_the_servers_words(publisher: Server) -> None:
    with pytest.raises(ServerError) as caught:
        await connect(pairs(publisher, dbname="doesnotexist"))
    error = caught.value
    assert (error.sqlstate, error.message) == ("3D000", 'database "doesnotexist" does not exist')
    assert error.fields["V"] == "FATAL"
    assert libpq_message(error) == (
        f'connection to server at "127.0.0.1", port {publisher.port} failed: '
        'FATAL:  database "doesnotexist" does not exist'
    )


async def test_the_next_host_is_tried(publisher: Server, closed_port: int) -> None:
    connection = await connect(
        pairs(publisher, host="127.0.0.1,127.0.0.1", port=f"{closed_port},{publisher.port}"), replication=True
    )
    connection.terminate()
    with pytest.raises(ConnectionLost) as caught:
        await connect(f"host=127.0.0.1,127.0.0.2 port={closed_port}")
    assert caught.value.message.count("Connection refused") == 2


async def test_hostaddr_is_dialled(publisher: Server) -> None:
    connection = await connect(pairs(publisher, host="nosuchhost.invalid", hostaddr="127.0.0.1"))
    connection.terminate()


async def test_keepalives_reach_the_socket(publisher: Server) -> None:
    given = {"keepalives_idle": "31", "keepalives_interval": "7", "keepalives_count": "3", "tcp_user_timeout": "5000"}
    session = await open_session(pairs(publisher, **given))
    sock = session.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 31
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 7
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
    await session.close()


async def test_the_database_does_not_decide_what_our_sessions_need(source_db: Database) -> None:
    connection = await connect(source_db.dsn())
    major = connection.get_server_version().major
    connection.terminate()
    database, timeouts = f"ALTER DATABASE {source_db.name}", known(NO_TIMEOUTS, major * 10000)
    await source_db.execute(f"{database} SET search_path = evil, pg_catalog", f"{database} SET jit = on")
    await source_db.execute(*(f"{database} SET {name} = '1min'" for name in timeouts))
    dsn = source_db.dsn(options="-c jit=on")
    connection = await connect(dsn, settings=NO_TIMEOUTS)  # also settings that the server does not know
    assert await connection.fetchval("SHOW jit") == "off"
    assert await connection.fetchval("SHOW search_path") == '""'
    assert {await connection.fetchval(f"SHOW {name}") for name in timeouts} == {"0"}
    connection.terminate()
    connection = await connect(dsn, settings={"jit": "on"})
    assert await connection.fetchval("SHOW jit") == "on"
    connection.terminate()
    session = await open_session(dsn, replication=True)  # has the same settings as the built-in worker's
    assert await session.rows("SHOW jit") == [("on",)]
    await session.close()


@pytest.mark.parametrize("replication", [False, True])
async def test_the_session_is_what_was_asked_for(publisher: Server, replication: bool) -> None:
    for attribute in ("any", "read-write", "primary", "prefer-standby"):
        connection = await connect(pairs(publisher, target_session_attrs=attribute), replication=replication)
        connection.terminate()
    where = f'connection to server at "127.0.0.1", port {publisher.port} failed: '
    for attribute, complaint in (
        ("read-only", "session is not read-only"),
        ("standby", "server is not in hot standby mode"),
    ):
        with pytest.raises(ConnectionLost) as caught:
            await connect(pairs(publisher, target_session_attrs=attribute), replication=replication)
        assert caught.value.message == where + complaint
    options = "-c default_transaction_read_only=on"
    with pytest.raises(ConnectionLost) as caught:
        await connect(pairs(publisher, target_session_attrs="read-write", options=options), replication=replication)
    assert caught.value.message == where + "session is read-only"


@asynccontextmanager
async def role_with_password(publisher: Server, password: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Create role password_test, whose password the server checks. Yields a session of a superuser."""
    root = await connect(pairs(publisher))
    await root.execute(f"CREATE ROLE password_test LOGIN REPLICATION PASSWORD '{password}'")
    hba = publisher.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text("host all password_test all scram-sha-256\n" + before)
    try:
        await publisher.reload()
        await root.fetchval("SELECT pg_sleep(0.2)")  # until the postmaster has read it
        yield root
    finally:
        hba.write_text(before)
        await publisher.reload()
        await root.execute("DROP ROLE password_test")
        await root.close()


async def test_a_password_is_checked_and_shown_to_nobody(
    publisher: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with role_with_password(publisher, "right"):
        with pytest.raises(ConnectError) as caught:
            await connect(pairs(publisher, user="password_test", password="hunter2"))
        assert caught.value.sqlstate == "28P01"
        assert "hunter2" not in str(caught.value)
        (await connect(pairs(publisher, user="password_test", password="right"), replication=True)).terminate()
        file = tmp_path / "passwords"
        file.write_text(f"127.0.0.1:{publisher.port}:*:password_test:right\n")
        file.chmod(0o600)
        (await connect(pairs(publisher, user="password_test", passfile=str(file)))).terminate()
        check = f'[ "$PGHOST:$PGPORT:$PGUSER:$PGDATABASE" = "127.0.0.1:{publisher.port}:password_test:postgres" ]'
        monkeypatch.setenv("SUBSCRIBER_PASSWORD_COMMAND", f"{check} && echo right")
        (await connect(pairs(publisher, user="password_test"), replication=True)).terminate()
        with pytest.raises(ConnectError):  # a given password takes precedence
            await connect(pairs(publisher, user="password_test", password="wrong"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo no token for password=hunter2 >&2; exit 3", "failed with exit status 3: no token for password=********"),
        ("exit 1", "failed with exit status 1"),
        ("echo", "printed nothing"),
        ("sleep 100; echo never", "did not end within 0.2 s"),
    ],
)
async def test_a_password_command_that_fails(monkeypatch: pytest.MonkeyPatch, command: str, message: str) -> None:
    monkeypatch.setenv("SUBSCRIBER_PASSWORD_COMMAND", command)
    with pytest.raises(ConnectionLost) as caught:
        await password_from_command({"user": "it's", "dbname": "d"}, "h", 1, timeout=0.2 if "sleep" in command else 30)
    assert caught.value.message == f'password command for server "h", port 1 {message}'
    assert caught.value.hint is not None
    monkeypatch.setenv("SUBSCRIBER_PASSWORD_COMMAND", "echo $PGUSER >&2; exit 1")
    hint = caught.value.command
    assert hint is not None
    assert subprocess.run(["sh", "-c", hint], capture_output=True, text=True, check=False).stderr == "it's\n"


# --- a function of the program ---


@pytest.fixture
def set_function() -> Iterator[Callable[[PasswordFunction], object]]:
    before = set_password_function(None)
    yield set_password_function
    set_password_function(before)


@pytest.mark.prints_password("the user's command for passwords prints them")
async def test_a_function_gives_the_password_of_each_connection_that_has_none(
    publisher: Server, set_function: Callable[[PasswordFunction], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBSCRIBER_PASSWORD_COMMAND", f"echo {FIRST}")
    asked: list[PasswordRequest] = []
    answers: list[str | None] = [FIRST, SECOND, None]

    async def answer(request: PasswordRequest) -> str | None:
        asked.append(request)
        return answers.pop(0)

    async with role_with_password(publisher, FIRST) as root:
        set_function(answer)
        given = pairs(publisher, user="password_test")
        (await connect(given, replication=True)).terminate()
        await root.execute(f"ALTER ROLE password_test PASSWORD '{SECOND}'")
        (await connect(given)).terminate()
        assert asked == [PasswordRequest("127.0.0.1", publisher.port, "password_test", "postgres")] * 2
        with pytest.raises(ConnectError):  # the function has none, and the command's has expired
            await connect(given)
        (await connect(pairs(publisher, user="password_test", password=SECOND))).terminate()
        assert len(asked) == 3


async def _never(_request: PasswordRequest) -> str:
    await asyncio.sleep(60)
    return ""


def _raises(_request: PasswordRequest) -> str:
    raise ValueError(f"no token after {FIRST}")


@pytest.mark.parametrize(
    ("function", "reason"), [(_never, "did not end within 0.05 s"), (_raises, "has raised ValueError")]
)
async def test_a_password_function_that_fails(
    set_function: Callable[[PasswordFunction], object], function: PasswordFunction, reason: str
) -> None:
    set_function(function)
    with pytest.raises(ConnectionLost) as caught:
        await password_from_function({"user": "u", "dbname": "d"}, "h", 1, timeout=0.05)
    assert str(caught.value) == f'password function for server "h", port 1 {reason}'


# --- TLS ------------------------------------------------------------------------------------------


# OpenSSL needs a hundred times the time for an RSA key.
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(folder: Path) -> None:
    """Create a certificate authority, an untrusted one, and a server certificate for db.example.org."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for authority in ("root", "stranger"):
        openssl(
            *("req", "-x509", *NEW_KEY, "-days", "2", "-subj", f"/CN={authority}"),
            *("-keyout", f"{authority}.key", "-out", f"{authority}.crt"),
        )
    openssl(
        *("req", *NEW_KEY, "-subj", "/CN=db.example.org"),
        *("-keyout", "server.key", "-out", "server.csr"),
    )
    (folder / "names").write_text("subjectAltName=DNS:db.example.org\n")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "root.crt", "-CAkey", "root.key", "-CAcreateserial"),
        *("-days", "2", "-extfile", "names", "-out", "server.crt"),
    )


@pytest.fixture
def certificates(tls_bin: Path, tmp_path: Path) -> Path:
    make_certificates(tmp_path)
    return tmp_path


async def test_tls_is_verified_as_libpq_verifies_it(servers: Servers, certificates: Path, tls_bin: Path) -> None:
    server = await servers.create("tls", bin=tls_bin)
    for name in ("server.key", "server.crt"):
        (server.data / name).write_bytes((certificates / name).read_bytes())
        (server.data / name).chmod(0o600)
        subprocess.run(["chown", f"{server.account.uid}:{server.account.gid}", server.data / name], check=True)
    await server.start(ssl="on")

    async def encrypted(**parameters: str) -> bool:
        session = await open_session(pairs(server, **parameters), replication=True)
        used = session.transport.get_extra_info("ssl_object") is not None
        assert used == ((await session.rows("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")) == [("t",)])
        await session.close()
        return used

    root, stranger = str(certificates / "root.crt"), str(certificates / "stranger.crt")
    assert not await encrypted(sslmode="disable")
    assert await encrypted(sslmode="prefer")
    assert await encrypted(sslmode="require")
    assert await encrypted(sslmode="verify-ca", sslrootcert=root)
    by_name = {"host": "db.example.org", "hostaddr": "127.0.0.1"}
    assert await encrypted(sslmode="verify-full", sslrootcert=root, **by_name)

    with pytest.raises(ConnectionLost, match="certificate verify failed"):
        await encrypted(sslmode="verify-ca", sslrootcert=stranger)
    with pytest.raises(ConnectionLost, match="certificate verify failed"):  # with a root, require verifies too
        await encrypted(sslmode="require", sslrootcert=stranger)
    with pytest.raises(ConnectionLost, match="certificate verify failed"):  # right authority, wrong name
        await encrypted(sslmode="verify-full", sslrootcert=root)
    with pytest.raises(ConnectionLost, match="certificate verify failed"):
        await encrypted(sslmode="verify-full", sslrootcert="system", **by_name)


async def test_a_server_without_tls_is_refused_when_tls_is_required(publisher: Server) -> None:
    with pytest.raises(ConnectionLost) as caught:
        await connect(pairs(publisher, sslmode="require"))
    assert caught.value.message.endswith("failed: server does not support SSL, but SSL was required")
