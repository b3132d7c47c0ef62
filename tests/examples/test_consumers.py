"""The examples of the change stream, each run against a real server."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from subscriber import Lsn
from tests.plugins.fix_cluster import Database

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


async def here(db: Database) -> Lsn:
    return Lsn.parse(await db.value("SELECT pg_current_wal_lsn()::text"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_names_its_command_and_has_a_test(path: Path) -> None:
    by_module = path.stem in ("live_page", "litestar_app", "web_app")  # uvicorn imports it
    assert f"examples{'.' if by_module else '/'}{path.stem}" in path.read_text()
    assert any(path.stem in test.read_text() for test in Path(__file__).parent.glob("test_*.py"))


async def test_the_cache_follows_the_table(source_db: Database) -> None:
    await source_db.execute(
        "CREATE TABLE city (id int PRIMARY KEY, name text)",
        "CREATE PUBLICATION p FOR TABLE city",
        "INSERT INTO city VALUES (1, 'Ulm'), (2, 'Brno')",
    )
    cache = example("cache_invalidation")["Cache"](source_db.dsn())
    ready = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: cache.follow("p", ready=ready))
        with anyio.fail_after(20):
            await ready.wait()
            assert (await cache.get("public.city", id=1))["name"] == "Ulm"
            assert (await cache.get("public.city", id=2))["name"] == "Brno"
            await source_db.execute("UPDATE city SET name = 'Pau' WHERE id = 1")
            while (await cache.get("public.city", id=1))["name"] != "Pau":
                await anyio.sleep(0.01)
            assert list(cache._rows["public.city"]) == [(2,), (1,)]
            await source_db.execute("TRUNCATE city")
            while await cache.get("public.city", id=2) is not None:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def test_the_outbox_sends_each_message_after_an_outage(source_db: Database) -> None:
    outbox = example("outbox")
    await source_db.execute("CREATE PUBLICATION outbox")
    sent: list[tuple[str, str]] = []
    down = True

    async def send(topic: str, payload: str) -> None:
        if down and payload == "second":
            raise ConnectionError("nobody takes it")
        sent.append((topic, payload))

    await outbox["run"](source_db.dsn(), "outbox", send, until=await here(source_db))
    emit = "SELECT pg_logical_emit_message(true, 'outbox.orders', '{}')"
    await source_db.execute(
        emit.format("first"),
        f"BEGIN; {emit.format('rolled back')}; ROLLBACK",
        emit.format("second"),
        "SELECT pg_logical_emit_message(true, 'other', 'not ours')",
    )
    end = await here(source_db)
    with pytest.raises(ConnectionError):
        await outbox["run"](source_db.dsn(), "outbox", send, until=end)
    down = False
    await outbox["run"](source_db.dsn(), "outbox", send, until=end)
    assert sent == [("orders", "first"), ("orders", "second")]


async def test_the_search_index_follows_the_table(source_db: Database, tmp_path: Path) -> None:
    module = example("search_index")
    await source_db.execute(
        "CREATE TABLE article (id int PRIMARY KEY, title text, body text)",
        "ALTER TABLE article ALTER body SET STORAGE EXTERNAL",
        "CREATE PUBLICATION p FOR TABLE article",
        "INSERT INTO article VALUES (1, 'Ulm', 'a minster' || repeat(' word', 1000)), (2, 'Pau', 'a castle')",
    )
    index = module["Index"](tmp_path / "index")

    async def catch_up() -> None:
        await module["run"](source_db.dsn(), "p", "search", index, until=await here(source_db))

    await catch_up()
    assert index.search("minster") == [1]
    await source_db.execute(
        "UPDATE article SET title = 'Ulm on the Danube' WHERE id = 1",  # the body was not touched and is not sent
        "UPDATE article SET id = 3 WHERE id = 2",
        "INSERT INTO article VALUES (4, 'Brno', 'a castle')",
        "DELETE FROM article WHERE id = 4",
    )
    await catch_up()
    assert index.search("danube minster") == [1]
    assert index.search("castle") == [3]
    index.database.close()


async def test_the_hourly_job_prints_the_changes_since_its_last_run(
    source_db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    run = example("catch_up")["run"]
    await source_db.execute("CREATE TABLE city (id int PRIMARY KEY, name text)", "CREATE PUBLICATION p FOR TABLE city")
    lines: list[str] = []
    assert await run(source_db.dsn(), "p", "hourly", lines.append) == 0
    await source_db.execute("INSERT INTO city VALUES (1, NULL)", "UPDATE city SET id = 2", "DELETE FROM city")
    assert await run(source_db.dsn(), "p", "hourly", lines.append) == 3
    assert await run(source_db.dsn(), "p", "hourly", lines.append) == 0
    document = [json.loads(line) for line in lines]
    assert [(line["op"], line["old"], line["new"]) for line in document] == [
        ("insert", None, {"id": "1", "name": None}),
        ("update", {"id": "1"}, {"id": "2", "name": None}),
        ("delete", {"id": "2"}, None),
    ]
    await source_db.execute("INSERT INTO city VALUES (5, 'Ulm')")
    command = [sys.executable, str(EXAMPLES / "catch_up.py"), source_db.dsn(), "p", "hourly"]
    printed = await anyio.run_process(command, cwd=ROOT)
    assert json.loads(printed.stdout)["new"] == {"id": "5", "name": "Ulm"}


async def test_the_live_page_shows_changes_in_a_browser(source_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the server it is made for, and a socket for a browser."""
    uvicorn = pytest.importorskip("uvicorn")
    await source_db.execute("CREATE TABLE city (id int PRIMARY KEY, name text)", "CREATE PUBLICATION p FOR TABLE city")
    monkeypatch.setenv("SOURCE_DSN", source_db.dsn())
    monkeypatch.setenv("PUBLICATION", "p")
    app = example("live_page")["app"]
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve)
            while not server.started:
                await anyio.sleep(0.02)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with await anyio.connect_tcp("127.0.0.1", port) as browser:
                await browser.send(b"GET /changes?table=public.city HTTP/1.1\r\nHost: x\r\n\r\n")
                heard = b""
                while b": connected" not in heard:
                    heard += await browser.receive()
                await source_db.wait_for(
                    "SELECT count(*) FROM pg_stat_replication JOIN pg_stat_activity USING (pid)"
                    " WHERE datname = current_database()",
                    1,
                )
                await source_db.execute("INSERT INTO city VALUES (1, 'Ulm')")
                while b'"Ulm"' not in heard:
                    heard += await browser.receive()
            assert b"event: insert" in heard
            server.should_exit = True
    await source_db.wait_for("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)


def test_an_example_is_run_without_its_tests() -> None:
    """As its first lines say, by its path."""
    done = subprocess.run([sys.executable, "examples/outbox.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "IndexError" in done.stderr
