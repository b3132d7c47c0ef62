"""Actions over HTTP: their effects, their rows in the audit, and the requests that are refused."""

from __future__ import annotations

import asyncio
import http.client
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.cli.commands.verify import ComparisonStart, verify_
from subscriber.cli.http import serve_targets
from subscriber.console.access import ATTEMPTS, Tokens
from subscriber.errors import SubscriberError
from subscriber.status.collect import read_catalog
from tests.cli.test_http import FREE, FRESH, SERVED, Client, prepare, served
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber, Subscriptions

TOKEN = "correct-horse-battery-staple-2030"
TOKENS = Tokens.parse(f"ada:{TOKEN}", "test")
ENABLED = "SELECT subenabled FROM subscriber.subscription"


@dataclass
class Page:
    """A browser's page on the console, or another program that imitates one."""

    port: int
    key: str | None = None
    headers: dict[str, str | None] = field(default_factory=dict)

    async def post(self, path: str, content: Any, **headers: str | None) -> tuple[int, dict[str, Any]]:
        """Send a request. A header with value None is left out."""
        given = {
            "Host": f"127.0.0.1:{self.port}",
            "Origin": f"http://127.0.0.1:{self.port}",
            "Sec-Fetch-Site": "same-origin",
            "Content-Type": "application/json",
            "Authorization": None if self.key is None else f"Bearer {self.key}",
            **self.headers,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        body = content if isinstance(content, str) else json.dumps(content)

        def send() -> tuple[int, dict[str, Any]]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            try:
                connection.request(
                    "POST", path, body, {name: value for name, value in given.items() if value is not None}
                )
                answer = connection.getresponse()
                assert not [name for name, _ in answer.getheaders() if name.startswith("access-control")]
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith("{") else {"text": text}
            finally:
                connection.close()

        return await asyncio.to_thread(send)

    async def sign_in(self) -> None:
        status, document = await self.post("/session", {"token": TOKEN})
        assert (status, document["label"]) == (200, "ada")
        self.key = document["session"]

    async def act(self, action: str, **arguments: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/actions", {"action": action, "subscription": "s", **arguments})


async def compare_by_command(target: Database) -> None:
    """Compare as `subscriber verify` does. The status has the last comparison that has ended."""
    compare = partial(verify_, target.dsn(), "s", jobs=1, json=True)
    assert await compare() == 0
    with pytest.raises(SubscriberError):
        await compare(since=ComparisonStart.LAST)
    async with CatalogConnection.open(target.dsn(), "test") as catalog:
        (comparison,) = (await read_catalog(catalog)).comparisons.values()
    assert (comparison.tables, comparison.different, comparison.complete) == (1, 0, True)


async def test_actions_and_their_audit(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    await prepare(source_db, target_db)
    await subscriber.create(source_db, "p")
    await subscriber.wait_for_ready(source_db)
    async with served(subscriber, target_db.dsn(), FREE, tokens=TOKENS) as client:
        page = Page(client.port)
        assert (await page.act("disable"))[0] == 401
        await page.sign_in()

        assert await page.act("disable") == (200, {"messages": []})
        await target_db.wait_for(ENABLED, False)
        assert (await page.act("refresh"))[0] == 422  # of a disabled subscription
        assert await page.act("enable") == (200, {"messages": []})
        await target_db.wait_for(ENABLED, True)
        await subscriber.wait_for_state("streaming")

        # A conflict is skipped.
        await target_db.execute("INSERT INTO t VALUES (200)")
        await source_db.execute("INSERT INTO t VALUES (200)")
        await target_db.wait_for("SELECT count(*) FROM subscriber.conflict_history", 1)
        _, document = await client.json("/console.json?subscription=s")
        (conflict,) = document["conflicts"]
        assert (await page.act("skip", lsn=conflict["finish_lsn"]))[0] == 200
        await source_db.execute("INSERT INTO t VALUES (201)")
        await target_db.wait_for("SELECT count(*) FROM t WHERE a = 201", 1)

        # A comparison finds a difference, and a repair removes it.
        await target_db.execute("DELETE FROM t WHERE a = 7")
        assert await page.act("verify") == (202, {"messages": []})
        task = await wait_for_task(client)
        assert (task["result"], task["summary"]["different"], task["summary"]["shown"][0]["missing"]) == ("done", 1, 1)
        assert (await page.act("repair", tables=["public.t"]))[0] == 202
        task = await wait_for_task(client)
        assert (task["result"], task["summary"]["repaired"], task["who"]) == ("done", 1, "ada")
        assert await value(target_db, "SELECT count(*) FROM t WHERE a = 7") == 1
        assert (await page.act("repair", tables=["public.nowhere"]))[0] == 202
        task = await wait_for_task(client)
        assert task["result"] == 'table "public.nowhere" is not part of subscription "s"'
        assert (await page.act("cancel"))[1]["error"] == "no comparison or repair runs"

        status, refusal = await page.post("/actions", {"action": "enable", "subscription": "nobody"})
        assert (status, refusal["error"]) == (404, 'subscription "nobody" does not exist')
        assert (await page.post("/actions", {"action": "enable", "subscription": "s", "target": "2"}))[0] == 404

        await compare_by_command(target_db)
        _, document = await client.json("/console.json?subscription=s")
        assert [(action["action"], action["result"]) for action in reversed(document["actions"])] == [
            ("disable", "done"),
            ("refresh", "ALTER SUBSCRIPTION ... REFRESH is not allowed for disabled subscriptions"),
            ("enable", "done"),
            ("skip", "done"),
            ("verify", "done"),
            ("repair", "done"),
            ("repair", 'table "public.nowhere" is not part of subscription "s"'),
            ("cancel", "no comparison or repair runs"),
            ("verify", "done"),
            ("verify", 'subscription "s" does not record the ranges that the stream changes'),
        ]
        assert [(repair["table"], repair["rows"]) for repair in document["repaired"]] == [("public.t", 1)]
        async with target_db.connection() as connection:
            rows = await connection.fetch("SELECT who, address, ended IS NOT NULL, subname FROM subscriber.audit")
        assert {tuple(row) for row in rows} == {
            ("ada", "127.0.0.1", True, "s"),
            ("command line", "127.0.0.1", True, "s"),
        }

        await page.post("/session", {})
        assert (await page.act("disable"))[0] == 401
        texts = [(await client.get(path))[1] for path in ("/console.json", "/status.json", "/metrics")]
    assert page.key is not None
    assert TOKEN not in subscriber.log.text() + str(texts)
    assert page.key not in subscriber.log.text() + str(texts) + json.dumps(document)
    assert '"ada" at 127.0.0.1: disable of subscription "s": done' in subscriber.log.text()


async def value(database: Database, query: str) -> Any:
    async with database.connection() as connection:
        return await connection.fetchval(query)


async def wait_for_task(client: Any) -> dict[str, Any]:
    with anyio.fail_after(60):
        while True:
            _, document = await client.json("/console.json?subscription=s")
            if document["task"]["result"] is not None:
                return dict(document["task"])
            await anyio.sleep(0.05)


async def test_requests_of_other_sites_are_refused(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await subscriber.create("host=127.0.0.1 port=1", "p", connect=False, slot_name="s")
    async with served(subscriber, target_db.dsn(), FREE) as client:
        page = Page(client.port, key="x")
        assert (await page.act("enable"))[0] == 405  # a console without tokens is read-only
        assert (await page.post("/session", {"token": TOKEN}))[0] == 405
    async with served(subscriber, target_db.dsn(), FREE, tokens=TOKENS) as client:
        page = Page(client.port)
        await page.sign_in()
        own = f"127.0.0.1:{client.port}"
        attacks: list[tuple[int, dict[str, str | None]]] = [
            (403, {"Origin": "http://evil.example"}),
            (403, {"Origin": "null"}),
            (403, {"Origin": None}),
            (403, {"Origin": f"http://127.0.0.1:{client.port + 1}"}),
            (403, {"Origin": f"http://{own}.evil.example"}),
            (403, {"Origin": f"http://evil.example@{own}"}),
            (403, {"Origin": f"http://evil.example/{own}"}),
            (403, {"Origin": "http://localhost"}),
            (403, {"Sec_Fetch_Site": "cross-site"}),
            (403, {"Sec_Fetch_Site": "same-site"}),
            (403, {"Sec_Fetch_Site": "none"}),
            (415, {"Content_Type": "text/plain"}),
            (415, {"Content_Type": "application/x-www-form-urlencoded"}),
            (415, {"Content_Type": "multipart/form-data; boundary=application/json"}),
            (415, {"Content_Type": None}),
            # DNS rebinding: the page's own name is Host and Origin.
            (421, {"Host": "evil.example", "Origin": "http://evil.example"}),
            (421, {"Host": f"evil.example:{client.port}", "Origin": f"http://evil.example:{client.port}"}),
            (401, {"Authorization": None}),
            (401, {"Authorization": f"Bearer {TOKEN}"}),
            (401, {"Authorization": f"Basic {page.key}"}),
            (401, {"Authorization": None, "Cookie": f"session={page.key}"}),
        ]
        for status, headers in attacks:
            assert (await page.post("/actions", {"action": "enable", "subscription": "s"}, **headers))[0] == status
        for path in (f"/actions?session={page.key}", f"/actions?token={TOKEN}"):
            post = await page.post(path, {"action": "enable", "subscription": "s"}, Authorization=None)
            assert post[0] == 401
        for content in ("", "[]", '"x"', "{", "[" * 60_000, '{"action": "enable"}', "x" * 70_000):
            assert (await page.post("/actions", content))[0] in (400, 413)
        assert await value(target_db, ENABLED) is False
        assert await value(target_db, "SELECT count(*) FROM subscriber.audit") == 0
        # A request that was recorded does not work after a restart.
        assert (await page.act("enable"))[0] == 200
        await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    async with served(subscriber, target_db.dsn(), FREE, tokens=TOKENS) as client:
        page = Page(client.port, key=page.key)
        assert (await page.act("enable"))[0] == 401
        assert await value(target_db, ENABLED) is False
        # Wrong tokens are limited. The right one is not, because many people share an address.
        page.key = None
        tokens = [TOKEN[:-1], TOKEN + " ", "ada", "", 7]
        assert len(tokens) == ATTEMPTS
        for token in tokens:
            assert (await page.post("/session", {"token": token}))[0] == 401
        logged = len(subscriber.log.records)
        for _ in range(3):
            assert (await page.post("/session", {"token": "wrong"}))[0] == 429
        assert len(subscriber.log.records) == logged
        assert (await page.post("/session", {"token": TOKEN}))[0] == 200
    assert "wrong token from 127.0.0.1" in subscriber.log.text()


async def test_a_comparison_is_canceled_and_only_one_runs(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db)
    await subscriber.create(source_db, "p")
    await subscriber.wait_for_ready(source_db)
    async with served(subscriber, target_db.dsn(), FREE, tokens=TOKENS) as client, source_db.connection() as other:
        page = Page(client.port)
        await page.sign_in()
        await other.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")  # the comparison waits
        for end in ("canceled", "canceled: the process of the console has ended"):
            assert (await page.act("verify"))[0] == 202
            assert (await page.act("repair"))[0] == 409
            if end == "canceled":
                assert (await page.act("cancel"))[0] == 200
                assert (await wait_for_task(client))["result"] == "canceled"
    results = "SELECT array_agg(result ORDER BY id) FROM subscriber.audit"
    assert await value(target_db, results) == ["canceled", "done", end]


async def test_actions_reach_each_of_several_targets_while_one_is_down(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for target in (source_db, target_db):
        await Subscriptions(target).create("host=127.0.0.1 port=1", "p", connect=False, slot_name="s")
    nowhere = f"host=127.0.0.1 port=1 dbname=gone user=u password={MARK}"
    targets = [source_db.dsn(), nowhere, target_db.dsn()]
    subscriber.log.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_targets, FREE, targets, TOKENS, FRESH)
        client = Client(int((await subscriber.log.wait_for(SERVED))[1]))
        status, document = await client.json("/console.json")
        assert status == 200
        seen = [
            (each["key"], [s["name"] for s in each["subscriptions"]], bool(each["error"]))
            for each in document["targets"]
        ]
        assert seen == [("1", ["s"], False), ("2", [], True), ("3", ["s"], False)]
        assert MARK not in json.dumps(document)
        status, document = await client.json("/console.json?target=3&subscription=s")
        assert (status, document["target"]) == (200, f"{target_db.name} at 127.0.0.1")
        assert (await client.json("/tables.json?target=3&subscription=s"))[0] == 200
        for address in ("/console.json?target=2&subscription=s", "/console.json?target=4", "/tables.json?target=4"):
            assert (await client.get(address))[0] in (404, 503)
        page = Page(client.port)
        await page.sign_in()
        assert (await page.act("enable", target="3"))[0] == 200
        assert (await page.act("enable", target="2"))[0] == 422
        assert (await value(source_db, ENABLED), await value(target_db, ENABLED)) == (False, True)
        tasks.cancel_scope.cancel()
