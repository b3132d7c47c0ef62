"""examples/litestar_app.py: its lifespan runs the subscription, or leaves that to `subscriber run`."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from litestar.testing import AsyncTestClient

from examples import litestar_app
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")


async def wait_for(client: AsyncTestClient[Any], status_code: int, state: str) -> dict[str, Any]:
    with anyio.fail_after(60):
        while True:
            answer = await client.get("/health")
            json: dict[str, Any] = answer.json()
            if (answer.status_code, json.get("state")) == (status_code, state):
                return json
            await anyio.sleep(0.1)


async def test_the_application_runs_with_and_without_a_launcher(
    source_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION shop FOR ALL TABLES", "INSERT INTO item VALUES (1)")
    monkeypatch.setenv("SHOP_TARGET", target_db.dsn().replace("postgresql:", "postgresql+asyncpg:"))
    monkeypatch.setenv("SHOP_SOURCE", source_db.dsn().replace("postgresql:", "postgresql+asyncpg:"))

    monkeypatch.setenv("SHOP_RUN", "no")
    async with AsyncTestClient(litestar_app.create()) as reader:
        health = await wait_for(reader, 503, "no launcher")
        assert health["problems"] == ["no launcher is running Start one: subscriber run"]
        assert await target_db.value("SELECT count(*) FROM item") == 0

        monkeypatch.setenv("SHOP_RUN", "yes")
        async with AsyncTestClient(litestar_app.create()) as runner:
            for client in (runner, reader):
                assert (await wait_for(client, 200, "streaming"))["problems"] == []
            await target_db.wait_for("SELECT count(*) FROM item", 1)
        assert await wait_for(reader, 503, "no launcher")
