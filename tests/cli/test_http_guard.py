"""The requests that the status server answers, and the browser's rights on the responses."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from subscriber.cli.http import Address
from subscriber.cli.http_guard import HEADERS, host_name
from subscriber.connection.conninfo import Conninfo
from subscriber.display import printable
from tests.cli.test_http import served
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.processes import opened

PATHS = ("/", "/console/console.js", "/console.json", "/metrics", "/health", "/status.json", "/nowhere")


async def request(
    port: int, path: str = "/", *, host: str | None = None, method: str = "GET", to: str = "127.0.0.1"
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body; `host` None: the Host that a client of `to` sends."""

    def send() -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(to, port, timeout=20)
        try:
            connection.request(method, path, headers={} if host is None else {"Host": host})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(send)


async def raw(port: int, text: str) -> str:
    """Send a literal request. Returns the first line of the response."""

    def send() -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(text.encode())
            return connection.recv(4096).decode().split("\r\n")[0]

    return await asyncio.to_thread(send)


async def test_only_requests_that_name_this_server_are_answered(target_db: Database, subscriber: Subscriber) -> None:
    address = Address.parse("0.0.0.0:0", ["Status.Example", "10.1.2.3"])
    async with served(subscriber, target_db.dsn(), address) as client:
        port = client.port
        own = ["localhost", f"localhost:{port}", "LocalHost.:1", "127.0.0.1", "[::1]:8000", socket.gethostname()]
        for host in [*own, f"0.0.0.0:{port}", "status.example", "STATUS.example:443", "10.1.2.3:8000"]:
            assert (await request(port, "/health", host=host))[0] == 200, host
        foreign = ["evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example", "localhost.evil.example"]
        broken = ["localhost@evil.example", "evil.example@localhost", "localhost, evil.example", "localhost/", "[::1"]
        for host in [*foreign, *broken, "10.1.2.4", "127.0.0.2", "[::2]", "x.status.example", "localhost:80:80"]:
            for path in PATHS:
                status, headers, body = await request(port, path, host=host)
                assert (status, headers["content-type"]) == (421, "text/plain; charset=utf-8"), host
                assert body == "this host name is not answered; allow it with: subscriber run --http-host NAME\n"
        # The address that a client has connected to is one of this machine's.
        assert (await request(port, "/health", to="127.0.0.2"))[0] == 200
        assert (await raw(port, "GET /health HTTP/1.0\r\n\r\n")).split()[1] == "421"
        for empty in ("Host:", "Host: ", "Host: \t", "Host: :8000", "Host: .", "host:\r\nhost:"):
            for version in ("1.0", "1.1"):
                assert (await raw(port, f"GET /health HTTP/{version}\r\n{empty}\r\n\r\n")).split()[1] in ("421", "400")
        twice = "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        assert (await raw(port, twice)).split()[1] == "400"


async def test_a_stream_of_events_is_for_the_page_itself(target_db: Database, subscriber: Subscriber) -> None:
    async with served(subscriber, target_db.dsn()) as client:
        key = json.loads((await request(client.port, "/key.json"))[2])["key"]
        for site, query, expected in [
            ("same-origin", "", 200),
            ("none", "", 200),
            ("cross-site", "", 403),
            ("same-site", "", 403),
            ("cross-site", f"?key={key}", 403),
            (None, "", 403),
            (None, "?key=", 403),
            (None, "?key=%C3%A9", 403),
            (None, f"?key={key[:-1]}", 403),
            (None, f"?key={key}", 200),
            (None, f"?key={key}&subscription=nosuch", 200),
        ]:
            header = "" if site is None else f"Sec-Fetch-Site: {site}\r\n"
            line = await raw(client.port, f"HEAD /events{query} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n")
            assert line.split()[1] == str(expected), (site, query)
        for path in ("/key.json", "/events"):
            for headers in [(await request(client.port, path, method=method))[1] for method in ("GET", "OPTIONS")]:
                assert not any(name.lower().startswith("access-control") for name in headers)


async def test_only_get_and_head_are_answered(target_db: Database, subscriber: Subscriber) -> None:
    async with served(subscriber, target_db.dsn()) as client:
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            for path in PATHS:
                status, headers, _ = await request(client.port, path, method=method)
                assert (status, headers["allow"]) == (405, "GET, HEAD"), (method, path)
        for path in PATHS[:-1]:
            status, headers, body = await request(client.port, path, method="HEAD")
            assert (status, body) == (200, "")
            assert int(headers["content-length"]) > 0


async def test_every_answer_has_the_headers(target_db: Database, subscriber: Subscriber) -> None:
    async with served(subscriber, target_db.dsn()) as client:
        answers = [await request(client.port, path) for path in PATHS]
        answers.append(await request(client.port, host="evil.example"))
        answers.append(await request(client.port, method="POST"))
    async with served(subscriber, target_db.server.dsn("nowhere")) as client:
        answers += [await request(client.port, path) for path in PATHS]
    assert {status for status, _, _ in answers} == {200, 404, 405, 421, 503}
    for _, headers, _ in answers:
        assert {name: headers[name.lower()] for name in HEADERS} == HEADERS
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


# As names of 63 bytes at most, and as the text of an error.
HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;{0}%s</title><script>"
TABLE = "</td></table><script>alert(2)</script>'\"&lt;{x}\\\n#"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


async def test_hostile_names_and_errors_are_text(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    create = f"CREATE TABLE {quoted(TABLE)} (a int PRIMARY KEY)"
    await source_db.execute(create, "CREATE PUBLICATION p FOR ALL TABLES", f"INSERT INTO {quoted(TABLE)} VALUES (1)")
    await target_db.execute(create, f"INSERT INTO {quoted(TABLE)} VALUES (1)")  # so that its copy fails
    await subscriber.create(source_db, "p", quoted(HOSTILE), slot_name="s")
    nowhere = str(Conninfo.parse(source_db.dsn()).with_(dbname=HOSTILE)).replace("'", "''")
    await subscriber.create(nowhere, "p", "other", connect=False, slot_name="other")
    await subscriber.execute("ALTER SUBSCRIPTION other ENABLE")
    await target_db.wait_for("SELECT count(*) FROM subscriber.worker WHERE relid = 0 AND error LIKE '%<script>%'", 1)
    await target_db.wait_for("SELECT count(*) > 0 FROM subscriber.worker WHERE relid <> 0 AND error IS NOT NULL")
    async with served(subscriber, target_db.dsn()) as client:
        _, headers, page = await request(client.port)
        _, _, overview = await request(client.port, "/console.json")
        _, _, metrics = await request(client.port, "/metrics")
        _, _, document = await request(client.port, "/status.json")
    # The page has no data: its modules insert all text as text, which the policy enforces.
    assert "alert(" not in page
    assert "require-trusted-types-for 'script'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert [subscription["name"] for subscription in json.loads(overview)["subscriptions"]] == [HOSTILE, "other"]
    assert printable(TABLE) in overview.replace("\\\\", "\\").replace('\\"', '"')
    labels = {
        sample.labels["subscription"]
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if "subscription" in sample.labels
    }
    assert labels == {HOSTILE, "other"}
    assert [subscription["name"] for subscription in json.loads(document)["subscriptions"]] == [HOSTILE, "other"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a.example", "a.example"),
        ("A.example.:80", "a.example"),
        ("[::1]:80", "::1"),
        ("[0:0::1]", "::1"),
        ("1.2.3.4:", "1.2.3.4"),
        ("::1", None),
        (":80", None),
        ("a b", None),
        ("a:b", None),
        ("", None),
    ],
)
def test_a_host_header_is_reduced_to_its_name(text: str, name: str | None) -> None:
    assert host_name(text) == name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--http", "8000", "--http-host", "http://a"], "'http://a' is not a host name or an address"),
        (["--http-host", "a.example"], "--http-host needs --http"),
    ],
)
def test_names_that_cannot_be_answered_are_refused(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "subscriber", "run", "--target", "postgresql:///x", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


async def test_the_command_takes_names(target_db: Database) -> None:
    options = ["--http", "0", "--http-host", "a.example", "--http-host", "::5", "--log-format", "postgres"]
    command = [sys.executable, "-m", "subscriber", "run", "--target", target_db.dsn(), *options]
    async with opened(command, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stderr is not None
            said = ""
            with anyio.fail_after(20):
                while "status is served at http://127.0.0.1:" not in said or not said.endswith("\n"):
                    said += (await process.stderr.receive()).decode()
            port = int(said.partition("http://127.0.0.1:")[2].partition("/")[0])
            answers = [(await request(port, "/health", host=host))[0] for host in ("a.example", "[::5]", "b.example")]
        finally:
            process.terminate()
    assert answers == [200, 200, 421]
