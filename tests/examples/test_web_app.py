"""examples/web_app.py: two replicas on one database, and a server that drops its connections."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from examples import web_app
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")


async def health(application: Starlette) -> tuple[int, dict[str, Any]]:
    answer = await web_app.health(Request({"type": "http", "app": application}))
    return answer.status_code, json.loads(bytes(answer.body))


async def healthy(application: Starlette) -> dict[str, Any]:
    """Wait until the application is healthy."""
    with anyio.fail_after(60):
        while True:
            status, answer = await health(application)
            if status == 200 and answer["state"] == "streaming":
                return answer
            await anyio.sleep(0.1)


async def test_two_replicas_of_the_application_share_a_subscription(
    source_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION shop FOR ALL TABLES", "INSERT INTO item VALUES (1)")
    monkeypatch.setenv("SHOP_TARGET", target_db.dsn().replace("postgresql:", "postgresql+asyncpg:"))
    monkeypatch.setenv("SHOP_SOURCE", source_db.dsn().replace("postgresql:", "postgresql+asyncpg:"))
    one, two = web_app.create(), web_app.create()
    async with one.router.lifespan_context(one), two.router.lifespan_context(two):
        for replica in (one, two):
            assert (await healthy(replica))["problems"] == []
        await target_db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await source_db.execute("INSERT INTO item VALUES (2)")
        for replica in (one, two):
            await healthy(replica)
        await target_db.wait_for("SELECT count(*) FROM item", 2, timeout=60)
