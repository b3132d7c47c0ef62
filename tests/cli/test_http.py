from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from subscriber.cli.http import Address, serve
from subscriber.console.access import Tokens
from subscriber.settings import Settings
from subscriber.status.metrics import GENERAL, METRICS
from subscriber.worker.supervision.launcher import Launcher
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_proxy import Proxies
from tests.plugins.fix_subscriber import Program, Subscriber, Subscriptions, running_subscriber

pytestmark = pytest.mark.usefixtures("with_schema")

FRESH = Settings(http_max_age=0)  # no response is reused
FREE = Address("127.0.0.1", 0)
SERVED = r"status is served at http://[\d.]+:(\d+)/"
NAME = "a<b"


@dataclass
class Client:
    port: int

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(self._get, path)

    def _get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    async def json(self, path: str) -> tuple[int, dict[str, Any]]:
        status, text = await self.get(path)
        return status, json.loads(text)

    async def figures(self) -> dict[tuple[str, ...], float]:
        """Return the value of each sample, by its name, the subscription and the other label's value."""
        status, text = await self.get("/metrics")
        assert status == 200
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sorted(sample.labels.items(), key=lambda item: item[0] != "subscription")
                samples[sample.name, *(value for _, value in labels)] = sample.value
        return samples


@asynccontextmanager
async def served(
    subscriber: Subscriber,
    target: str,
    address: Address = FREE,
    settings: Settings = FRESH,
    *,
    tokens: Tokens | None = None,
) -> AsyncIterator[Client]:
    """Serve `target` with the launcher of `subscriber`, if that was started."""
    subscriber.log.clear()
    async with anyio.create_task_group() as tasks:
        console = partial(serve, tokens=tokens)
        tasks.start_soon(console, address, target, subscriber.launcher or Launcher(target), settings)
        match = await subscriber.log.wait_for(SERVED)
        yield Client(int(match[1]))
        tasks.cancel_scope.cancel()


async def prepare(source_db: Database, target_db: Database) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await source_db.execute("INSERT INTO t SELECT generate_series(1, 100)", "CREATE PUBLICATION p FOR ALL TABLES")


async def test_a_subscription_that_streams_and_then_fails(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db)
    await subscriber.create(source_db, "p", f'"{NAME}"', slot_name="s")
    await subscriber.wait_for_ready(source_db, NAME)
    await source_db.execute("INSERT INTO t VALUES (101)")
    await source_db.wait_for_catchup(NAME)
    async with served(subscriber, target_db.dsn()) as client:
        await target_db.wait_for("SELECT sum(transactions) > 0 FROM subscriber.worker")
        status, text = await client.get("/metrics")
        figures = await client.figures()
        assert figures["subscriber_target_up",] == figures["subscriber_launcher_up",] == 1
        assert figures["subscriber_launcher_standby",] == 0
        assert figures["subscriber_subscription_ok", NAME] == figures["subscriber_publisher_up", NAME] == 1
        assert figures["subscriber_subscription_state", NAME, "streaming"] == 1
        assert figures["subscriber_subscription_state", NAME, "disabled"] == 0
        assert figures["subscriber_tables", NAME, "ready"] == 1
        assert figures["subscriber_tables", NAME, "failed"] == 0
        assert figures["subscriber_transactions_total", NAME] >= 1
        assert figures["subscriber_changes_total", NAME] >= 1
        assert figures["subscriber_publisher_lsn_bytes", NAME] >= figures["subscriber_confirmed_lsn_bytes", NAME] > 0
        assert figures["subscriber_prepared_transactions", NAME] == 0
        assert figures["process_resident_memory_bytes",] > 0
        for name in [*GENERAL, *(metric.name for metric in METRICS)]:
            assert f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n" in text

        status, health = await client.json("/health")
        assert (status, health["ok"], health["target"], health["standby"]) == (200, True, "up", False)
        assert health["subscriptions"] == {NAME: {"ok": True, "state": "streaming", "problems": []}}
        status, document = await client.json("/status.json")
        assert (status, document["subscriptions"][0]["tables"]) == (200, {"ready": 1})
        status, document = await client.json("/console.json")
        assert (status, document["subscriptions"][0]["name"]) == (200, NAME)
        assert (await client.get("/nowhere"))[0] == 404

        await target_db.execute("INSERT INTO t VALUES (987654)")
        await source_db.execute("INSERT INTO t VALUES (987654)")
        await target_db.wait_for("SELECT sum(confl_insert_exists) > 0 FROM subscriber.subscription_stats")
        with anyio.fail_after(20):
            while (await client.json("/health"))[0] == 200:
                pass
            while (figures := await client.figures())["subscriber_subscription_ok", NAME]:
                pass
        assert figures["subscriber_apply_errors_total", NAME] >= 1
        assert figures["subscriber_conflicts_total", NAME, "insert_exists"] >= 1
        assert figures["subscriber_conflicts_total", NAME, "update_missing"] == 0
        for path in ("/metrics", "/health", "/status.json", "/console.json", "/console.json?subscription=a%3Cb"):
            _, text = await client.get(path)
            assert "987654" not in text
            assert source_db.dsn() not in text


async def test_simultaneous_requests_share_one_query_of_the_target(target_db: Database, subscriber: Subscriber) -> None:
    async with served(subscriber, target_db.dsn(), settings=Settings(http_max_age=60)) as client:
        answers: list[tuple[int, dict[str, Any]]] = []

        async def ask() -> None:
            answers.append(await client.json("/status.json"))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
        assert {status for status, _ in answers} == {200}
        assert len({document["time"] for _, document in answers}) == 1


async def test_a_subscription_that_does_not_exist_costs_the_target_nothing(
    target_db: Database, subscriber: Subscriber
) -> None:
    async with served(subscriber, target_db.dsn(), settings=Settings(http_max_age=60)) as client:
        times = [(await client.json("/status.json"))[1]["time"]]
        for _ in range(3):
            assert await client.json("/console.json?subscription=nosuch") == (404, {"unknown": "nosuch"})
            times.append((await client.json("/status.json"))[1]["time"])
        assert len(set(times)) == 1


async def test_a_target_that_is_gone_and_comes_back(target_db: Database, proxies: Proxies) -> None:
    settings = replace(FRESH, http_target_timeout=0.5)
    proxy = await proxies.to(target_db.server.port)
    target = proxy.dsn(target_db.dsn())
    async with running_subscriber(target_db) as subscriber, served(subscriber, target, settings=settings) as client:
        assert (await client.json("/health"))[0] == 200
        await proxy.cut()
        status, health = await client.json("/health")
        assert (status, health["ok"], health["target"], health["subscriptions"]) == (503, False, "down", {})
        assert health["error"]
        assert (await client.json("/status.json")) == (503, {"error": health["error"]})
        status, document = await client.json("/console.json")
        assert (status, document["error"]) == (503, health["error"])
        figures = await client.figures()
        assert {name: value for (name, *_), value in figures.items() if name.startswith("subscriber_")} == {
            "subscriber_target_up": 0
        }
        await proxy.restore()
        proxy.stall()
        assert (await client.json("/health"))[1]["error"].startswith("no answer within")
        await proxy.restore()
        assert (await client.json("/health"))[0] == 200


async def test_a_cancelled_status_server_leaves_no_task_and_no_session(target_db: Database, proxies: Proxies) -> None:
    proxy = await proxies.to(target_db.server.port)
    proxy.stall()
    before = asyncio.all_tasks()
    async with (
        running_subscriber(target_db, start=False) as subscriber,
        served(subscriber, proxy.dsn(target_db.dsn()), settings=Settings(http_target_timeout=3600)) as client,
    ):
        idle = socket.create_connection(("127.0.0.1", client.port))
        asking = socket.create_connection(("127.0.0.1", client.port))
        asking.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not proxy.accepted:
            await anyio.sleep(0.01)
    for connection in (idle, asking):
        connection.settimeout(1)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", client.port))
    await proxy.close()
    assert asyncio.all_tasks() <= before


async def test_a_port_in_use_is_reported_once_and_tried_again(target_db: Database, subscriber: Subscriber) -> None:
    settings = Settings(retry_interval=0.05)
    assert subscriber.launcher is not None
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve, Address("127.0.0.1", port), target_db.dsn(), subscriber.launcher, settings)
        message = f"could not listen on 127.0.0.1:{port}: Address already in use"
        await subscriber.log.wait_for(message)
        await anyio.sleep(0.3)
        assert [parts.message for parts in subscriber.log.parts()].count(message) == 1
        taken.close()
        await subscriber.log.wait_for(SERVED)
        assert (await Client(port).json("/health"))[0] == 200
        tasks.cancel_scope.cancel()


async def test_the_program_and_its_standby(
    target_db: Database, source_db: Database, processes: Path, subscriptions: Subscriptions
) -> None:
    await prepare(source_db, target_db)
    options = ["--http", "0", "--setting", "http_idle_timeout=1h", "--setting", "http_request_timeout=1h"]
    program = Program(target_db.dsn(), processes / "run.log", options=options)
    try:
        await program.start(SERVED)
        client = Client(int((await program.wait_for(SERVED))[1]))
        await subscriptions.create(source_db, "p")
        await subscriptions.wait_for_state("streaming")
        async with running_subscriber(target_db) as standby:
            await standby.log.wait_for("waiting as standby")
            async with served(standby, target_db.dsn()) as waiting:
                assert (await waiting.json("/health"))[1]["standby"]
                assert (await waiting.figures())["subscriber_launcher_standby",] == 1
                assert not (await client.json("/health"))[1]["standby"]
        with socket.create_connection(("127.0.0.1", client.port)):  # a client without a request blocks nothing
            assert await program.stop() == 0
    finally:
        program.kill()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("8000", "127.0.0.1:8000"),
        (":8000", "127.0.0.1:8000"),
        ("0.0.0.0:8000", "0.0.0.0:8000"),
        ("localhost:0", "localhost:0"),
        ("[::1]:8000", "[::1]:8000"),
    ],
)
def test_the_address_of_the_status_server_is_parsed(text: str, shown: str) -> None:
    assert str(Address.parse(text)) == shown


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", "1:65536", "a:b", "user@h:80", "http://h:80", "h:80/x", "-5"]
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        Address.parse(text)


def test_the_status_server_is_not_imported_without_the_option_http() -> None:
    script = "import sys, subscriber.cli.main, subscriber.cli.commands.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {"uvicorn", "starlette", "prometheus_client", "subscriber.cli.http"}.isdisjoint(done.stdout.split())


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, "run", "--target", "postgresql:///x", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_option_http_without_the_extra_names_the_package_to_install() -> None:
    hide = "import sys; sys.modules['uvicorn'] = None; from subscriber.cli.main import main; main()"
    done = _run(hide, "--http", "8000")
    assert done.returncode == 3
    assert (
        done.stderr == "ERROR:  uvicorn is not installed\nHINT:  Install it with: pip install 'pgsubscriber[status]'\n"
    )


def test_a_wrong_address_is_refused() -> None:
    done = _run("from subscriber.cli.main import main; main()", "--http", "nowhere")
    assert done.returncode == 2
    assert "'nowhere' is not [HOST:]PORT" in done.stderr
