"""`must_use_password`: only servers that requested the password and got it are accepted."""

from __future__ import annotations

import asyncio
import os
import pwd
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from subscriber.connection.connect import connect, open_session
from subscriber.connection.session import Session
from subscriber.demo.servers import Server, Servers, embedded_bin
from subscriber.errors import PublisherError
from tests.connection.test_connect import NEW_KEY, make_certificates
from tests.plugins.fix_cluster import PUBLISHER_BIN

uvloop = pytest.importorskip("uvloop")

PASSWORD = "it's a secret"
REFUSED = "Non-superuser cannot connect if the server does not request a password."
HINT = (
    "Target server's authentication method must be changed, or set password_required=false in the subscription"
    " parameters."
)
# Role -> its line of pg_hba.conf for one kind of connection, and whether the password is used.
METHODS = {
    "trusted": ("trust", False),
    "hashed": ("md5", True),
    "plain": ("password", True),
    "salted": ("scram-sha-256", True),
}
SOCKET_METHODS = {"peer": ("peer map=me", False)}
TLS_METHODS = {"certified": ("cert map=me", False), "twice": ("scram-sha-256 clientcert=verify-ca", True)}

LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (asyncio.new_event_loop, uvloop.new_event_loop)


@dataclass
class Hosts:
    """A server by each kind of connection, as parameters of a connection string."""

    server: Server
    tls: dict[str, str] | None = None  # the client's files; None: the server has no TLS

    def parameters(self, role: str, **more: str) -> str:
        given = {"host": "127.0.0.1", "port": str(self.server.port), "user": role, "dbname": "postgres"}
        given |= {"password": PASSWORD, "sslmode": "disable", **more}
        return " ".join(f"{name}='{_escaped(value)}'" for name, value in given.items())

    @property
    def socket(self) -> dict[str, str]:
        return {"host": str(self.server.directory)}


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")


async def start(servers: Servers, programs: Path, certificates: Path | None) -> Hosts:
    """Start a server with a role for each method of authentication."""
    server = await servers.create("passwords", bin=programs)
    settings = {"unix_socket_directories": str(server.directory)}
    tls = None
    if certificates is not None:
        for name in ("server.key", "server.crt", "root.crt"):
            (server.data / name).write_bytes((certificates / name).read_bytes())
            (server.data / name).chmod(0o600)
            os.chown(server.data / name, server.account.uid, server.account.gid)
        settings |= {"ssl": "on", "ssl_ca_file": "root.crt"}
        tls = {"sslcert": str(certificates / "client.crt"), "sslkey": str(certificates / "client.key")}
    await server.start(**settings)
    root = await connect(server.dsn())
    for role, (method, _) in {**METHODS, **SOCKET_METHODS, **TLS_METHODS}.items():
        await root.execute(f"SET password_encryption = '{'md5' if method == 'md5' else 'scram-sha-256'}'")
        quoted = PASSWORD.replace("'", "''")
        await root.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{quoted}'")
    lines = [f"local all {role} {method}" for role, (method, _) in {**METHODS, **SOCKET_METHODS}.items()]
    lines += [f"host all {role} 127.0.0.1/32 {method}" for role, (method, _) in METHODS.items()]
    if certificates is not None:
        lines += [f"hostssl all {role} 127.0.0.1/32 {method}" for role, (method, _) in TLS_METHODS.items()]
        # The methods of the two attempts of sslmode prefer and allow.
        lines += ["hostssl all encrypted 127.0.0.1/32 scram-sha-256", "hostnossl all encrypted 127.0.0.1/32 trust"]
        await root.execute(f"CREATE ROLE encrypted LOGIN REPLICATION PASSWORD '{quoted}'")
    hba = server.data / "pg_hba.conf"
    hba.write_text("\n".join(["host all postgres 127.0.0.1/32 trust", *lines, ""]))
    me = pwd.getpwuid(os.geteuid()).pw_name
    (server.data / "pg_ident.conf").write_text(f"me {me} peer\nme client certified\n")
    await root.close()
    await server.restart()
    return Hosts(server, tls)


@pytest.fixture(params=["wheel", "debian"])
async def hosts(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Hosts:
    if request.param == "wheel":  # built without TLS
        return await start(servers, Path(os.environ.get(PUBLISHER_BIN) or embedded_bin()), None)
    with_tls: Path = request.getfixturevalue("tls_bin")
    make_certificates(tmp_path)
    ask = ["req", *NEW_KEY, "-subj", "/CN=client", "-keyout", "client.key", "-out", "c.csr"]
    sign = ["x509", "-req", "-in", "c.csr", "-CA", "root.crt", "-CAkey", "root.key", "-CAcreateserial"]
    for command in (ask, [*sign, "-days", "2", "-out", "client.crt"]):
        subprocess.run(["openssl", *command], cwd=tmp_path, check=True, capture_output=True)
    return await start(servers, with_tls, tmp_path)


async def used(conninfo: str) -> bool:
    """Return True if the sessions accept the server's method of authentication. All kinds of sessions must agree."""
    refusals = {await refusal(open_session(conninfo, must_use_password=True)) is None}
    refusals.add(await refusal(open_session(conninfo, replication=True, must_use_password=True)) is None)
    try:
        connection = await connect(conninfo, must_use_password=True)
    except PublisherError:
        refusals.add(False)
    else:
        assert await connection.fetchval("SELECT $1::int", 1) == 1
        await connection.close()
        refusals.add(True)
    (answer,) = refusals
    return answer


async def refusal(opening: Coroutine[None, None, Session]) -> PublisherError | None:
    """Why a session is not opened; None if it is, and answers."""
    try:
        session = await opening
    except PublisherError as error:
        return error
    assert await session.rows("SELECT 1") == [("1",)]
    await session.close()
    return None


async def in_each_loop(function: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run `function` in an event loop of each kind, in a thread."""

    async def whole() -> None:
        await function()
        await asyncio.sleep(0.1)  # uvloop closes a connection with TLS later, and its loop cannot end before

    def run() -> None:
        for factory in LOOPS:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(whole())

    await anyio.to_thread.run_sync(run)


async def test_only_a_password_that_was_asked_for_counts(hosts: Hosts) -> None:
    async def check() -> None:
        for role, (method, expected) in METHODS.items():
            assert await used(hosts.parameters(role)) is expected, method
            assert await used(hosts.parameters(role, **hosts.socket)) is expected, f"{method} on a socket"
        for role, (method, expected) in SOCKET_METHODS.items():
            assert await used(hosts.parameters(role, **hosts.socket)) is expected, method
        if hosts.tls is None:
            for role, (method, expected) in METHODS.items():  # the server answers N
                assert await used(hosts.parameters(role, sslmode="prefer")) is expected, method
            return
        for mode in ("require", "prefer", "allow"):
            for role, (method, expected) in METHODS.items():
                assert await used(hosts.parameters(role, sslmode=mode)) is expected, f"{method} with sslmode={mode}"
        for role, (method, expected) in TLS_METHODS.items():
            assert await used(hosts.parameters(role, sslmode="require", **hosts.tls)) is expected, method

    await in_each_loop(check)


async def test_the_attempt_that_succeeds_counts(hosts: Hosts) -> None:
    """The password of an attempt with TLS that has failed does not cover an attempt without it."""
    if hosts.tls is None:
        pytest.skip("this server has no TLS")

    async def check() -> None:
        assert await used(hosts.parameters("encrypted", sslmode="prefer")) is True
        assert await used(hosts.parameters("encrypted", sslmode="allow")) is False
        wrong = hosts.parameters("encrypted", sslmode="prefer").replace("secret", "guess")
        assert await used(wrong) is False

    await in_each_loop(check)


async def test_a_password_is_required_over_direct_tls(hosts: Hosts, tmp_path: Path) -> None:
    """A program in front of the server handles TLS, because no PostgreSQL here has direct TLS."""
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.set_alpn_protocols(["postgresql"])

    async def check() -> None:
        async with front(hosts.server.port, context) as port:
            direct = {"port": str(port), "sslmode": "require", "sslnegotiation": "direct"}
            for role, (method, expected) in METHODS.items():
                assert await used(hosts.parameters(role, **direct)) is expected, method

    await in_each_loop(check)


@asynccontextmanager
async def front(server_port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Run a program that terminates TLS and forwards everything to a server. Yields its port."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)
        await asyncio.gather(carry(reader, to_server), carry(from_server, writer))

    async with listening(accept, context) as port:
        yield port


Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(accept: Accept, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Listen and call `accept` for each connection. Yields the port. All connections are closed at the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(OSError, asyncio.CancelledError):
            try:
                await accept(reader, writer)
            finally:
                writer.transport.abort()

    server = await asyncio.start_server(run, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.01)  # until the transports are closed


async def test_the_refusal_has_postgresqls_message(hosts: Hosts) -> None:
    error = await refusal(open_session(hosts.parameters("trusted"), must_use_password=True))
    assert error is not None
    assert (error.message, error.detail, error.hint) == ("password is required", REFUSED, HINT)
    assert error.sqlstate == "2F003"


async def test_a_password_from_elsewhere_is_none(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Passwords of the environment, a password file or a service do not count: they belong to another user."""
    file = tmp_path / "passwords"
    file.write_text(f"*:*:*:*:{PASSWORD}\n")
    file.chmod(0o600)
    services = tmp_path / "services"
    services.write_text(f"[other]\npassword={PASSWORD}\n")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    for more in ({"password": ""}, {"password": "", "passfile": str(file)}, {"password": "", "service": "other"}):
        (await connect(hosts.parameters("salted", **more))).terminate()
        with pytest.raises(PublisherError) as caught:
            await connect(hosts.parameters("salted", **more), must_use_password=True)
        assert caught.value.detail == "Non-superusers must provide a password in the connection string."


# --- servers that lie -----------------------------------------------------------------------------


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


def authentication(code: int, more: bytes = b"") -> bytes:
    return message(b"R", struct.pack(">I", code) + more)


WELCOME = (
    message(b"S", b"server_version\x0018.0\0")
    + message(b"S", b"client_encoding\0UTF8\0")
    + message(b"K", struct.pack(">II", 1, 2))
    + message(b"Z", b"I")
)
OK = authentication(0)
CLEARTEXT = authentication(3)
SASL = authentication(10, b"SCRAM-SHA-256\0\0")
NOTICE = message(b"N", b"SNOTICE\0C00000\0Ma password was used\0\0")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([OK + WELCOME], False),
        ([NOTICE + OK + WELCOME], False),
        ([SASL, OK + WELCOME], False),  # the password's proof was never sent
        ([OK + CLEARTEXT, WELCOME], False),  # the server was satisfied before
        ([message(b"N", b"SNOTICE\0M" + bytes(CLEARTEXT) + b"\0\0") + OK + WELCOME], False),  # not a request
        ([CLEARTEXT, OK + WELCOME], True),
    ],
    ids=["nothing", "notice", "half SASL", "too late", "inside of a notice", "asked"],
)
async def test_a_server_that_lies(steps: list[bytes], expected: bool) -> None:
    async def check() -> None:
        async with lying(steps) as port:
            conninfo = f"host=127.0.0.1 port={port} user=u dbname=d password=p sslmode=disable"
            try:
                (await open_session(conninfo, must_use_password=True)).abort()
            except PublisherError as error:
                detail = error.detail
            else:
                detail = None
            assert detail == (None if expected else REFUSED)

    await in_each_loop(check)


@pytest.mark.parametrize("pieces", [1, 3])
async def test_requests_come_in_pieces(pieces: int) -> None:
    async with lying([NOTICE + CLEARTEXT, OK + WELCOME], pieces) as port:
        conninfo = f"host=127.0.0.1 port={port} user=u dbname=d password=p sslmode=disable"
        (await open_session(conninfo, must_use_password=True)).abort()


SET = message(b"C", b"SET\0") + message(b"Z", b"I")  # settings that connect() sends once it knows the version


@asynccontextmanager
async def lying(steps: list[bytes], pieces: int | None = None) -> AsyncIterator[int]:
    """Run a server that sends each of `steps` after a message of the client, in pieces of that size.

    Yields its port.
    """

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for step in (*steps, SET):
            await reader.read(4096)
            for start in range(0, len(step), pieces or len(step)):
                writer.write(step[start : start + (pieces or len(step))])
                await writer.drain()
                await asyncio.sleep(0.001 if pieces else 0)
        await reader.read()

    async with listening(accept) as port:
        yield port
