"""Clients of the HTTP server that send nothing, half of a request, or do not read: replication and monitors go on."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from subscriber.cli.http_limits import FOR_MONITORED
from subscriber.settings import Settings
from tests.cli.test_http import FREE, SERVED, Client, prepare, served
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriber, Subscriptions

pytestmark = pytest.mark.usefixtures("with_schema")

CLIENTS = 1000
DESCRIPTORS = 128  # of the launcher, which is far fewer than there are clients
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
STREAM = b"GET /events HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\n\r\n"
WHOLE = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Let this process open the sockets of all clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * CLIENTS:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * CLIENTS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Clients:
    """Connections whose other end is the server. Half of some send the beginning of a request, the others nothing."""

    def __init__(self) -> None:
        self.all: list[socket.socket] = []

    def open(self, port: int, text: bytes = b"") -> socket.socket:
        """Connect without waiting for that, and send `text`."""
        client = socket.socket()
        client.setblocking(False)
        self.all.append(client)
        client.connect_ex(("127.0.0.1", port))
        if text:
            with suppress(OSError):
                client.send(text)
        return client

    @asynccontextmanager
    async def attack(self, port: int) -> AsyncIterator[None]:
        """Keep CLIENTS connections open: each that the server closes is replaced."""

        async def replace() -> None:
            while True:
                for client in [client for client in self.all if is_closed(client)]:
                    client.close()
                    self.all.remove(client)
                for number in range(CLIENTS - len(self.all)):
                    self.open(port, HALF if number % 2 else b"")
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replace)
            yield
            tasks.cancel_scope.cancel()

    async def wait_for_end(self) -> None:
        """Wait until the server has ended all connections."""
        with anyio.fail_after(20):
            while not all(map(is_closed, self.all)):
                await anyio.sleep(0.05)

    def close(self) -> None:
        for client in self.all:
            client.close()
        self.all.clear()


@pytest.fixture
def clients() -> Iterator[Clients]:
    opened = Clients()
    yield opened
    opened.close()


def is_closed(client: socket.socket) -> bool:
    """Return True if the server has ended the connection."""
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.ENOTCONN


async def test_a_thousand_idle_clients_do_not_stop_replication(
    source_db: Database,
    target_db: Database,
    subscriptions: Subscriptions,
    program: Program,
    clients: Clients,
    descriptors: None,
) -> None:
    await prepare(source_db, target_db)
    await subscriptions.create(source_db, "p")
    program._command += ["--http", "127.0.0.1:0"]
    await program.start()
    port = int((await program.wait_for(SERVED))[1])
    assert program.pid is not None
    resource.prlimit(program.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    await subscriptions.wait_for_ready(source_db)
    monitor = Client(port)
    async with clients.attack(port):
        await program.wait_for("connections without a request are dropped")
        for number in range(3):
            await source_db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_replication WHERE application_name = 's'",
                f"INSERT INTO t VALUES ({1000 + number})",
            )
            await target_db.wait_for(f"SELECT count(*) FROM t WHERE a = {1000 + number}", 1)
            await source_db.wait_for_catchup("s")
            _, document = await monitor.json("/health")
            assert document["target"] == "up"  # as a subscription without a worker may be a problem
    assert "Too many open files" not in program.text


QUICK = Settings(http_max_age=0, http_max_connections=4, http_idle_timeout=1, http_request_timeout=2)


async def test_half_a_request_has_a_time_limit(target_db: Database, subscriber: Subscriber, clients: Clients) -> None:
    async with served(subscriber, target_db.dsn(), FREE, QUICK) as client:
        for text in (HALF, b"") * 4:
            clients.open(client.port, text)
        await clients.wait_for_end()
        assert (await client.get("/health"))[0] == 200


async def test_a_client_that_does_not_read_has_a_time_limit(
    target_db: Database, subscriber: Subscriber, clients: Clients
) -> None:
    async with served(subscriber, target_db.dsn(), FREE, QUICK) as client:
        reader = clients.open(client.port)
        await anyio.sleep(0.1)
        with suppress(BlockingIOError):
            while True:  # until the server does not read any more, either
                reader.send(WHOLE % b"/console/console.js")
        assert (await client.get("/health"))[0] == 200
        with anyio.fail_after(20), suppress(ConnectionError):
            while True:
                with suppress(BlockingIOError):
                    reader.send(b" ")
                await anyio.sleep(0.05)


async def test_health_is_answered_beside_as_many_requests_as_the_server_takes(
    target_db: Database, subscriber: Subscriber, clients: Clients
) -> None:
    settings = Settings(http_max_age=0, http_max_connections=4)
    async with served(subscriber, target_db.dsn(), FREE, settings) as client:
        for _ in range(4):
            clients.open(client.port, STREAM)
        with anyio.fail_after(20):
            while (await client.get("/"))[0] != 503:
                await anyio.sleep(0.05)
        assert [(await client.get(path))[0] for path in ("/health", "/metrics", "/")] == [200, 200, 503]
        for _ in range(FOR_MONITORED + 33):
            clients.open(client.port, HALF)
        assert [(await client.get(path))[0] for path in ("/health", "/metrics", "/")] == [200, 200, 503]
        clients.close()
        with anyio.fail_after(20):
            while (await client.get("/"))[0] != 200:
                await anyio.sleep(0.05)
