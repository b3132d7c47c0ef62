"""Tests of the application, with the fixture `subscriber_pair` of the package's plugin for pytest.

pytest --asyncio-mode=auto examples/shop
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from sqlalchemy import make_url

from examples.shop.app import create
from subscriber.pytest_plugin import Pair, PairDatabase

PRODUCT = "CREATE TABLE product (id int PRIMARY KEY, name text NOT NULL, price numeric NOT NULL)"


def url(database: PairDatabase) -> str:
    return database.dsn.replace("postgresql:", "postgresql+asyncpg:")


async def prepare(pair: Pair) -> FastAPI:
    for database in (pair.source, pair.target):
        await database.execute(PRODUCT)
    await pair.source.execute("CREATE PUBLICATION shop FOR TABLE product", "INSERT INTO product VALUES (1, 'tea', 4)")
    return create(make_url(url(pair.target)), make_url(url(pair.source)))


@asynccontextmanager
async def client(app: FastAPI) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as opened:
            yield opened


async def test_products_are_there_when_the_application_has_started(subscriber_pair: Pair) -> None:
    async with client(await prepare(subscriber_pair)) as shop:
        assert (await shop.get("/products")).json() == [{"id": 1, "name": "tea", "price": "4"}]
        assert (await shop.get("/health")).json() == {"state": "streaming", "problems": []}


async def test_a_table_that_cannot_be_copied_does_not_keep_the_shop_closed(subscriber_pair: Pair) -> None:
    app = await prepare(subscriber_pair)
    await subscriber_pair.target.execute("INSERT INTO product VALUES (1, 'mine', 1)")
    async with client(app) as shop:
        assert (await shop.get("/products")).json()[0]["name"] == "mine"
        health = await shop.get("/health")
        assert health.status_code == 503
        assert "subscriber resync shop public.product" in health.json()["problems"][0]


async def test_a_request_waits_for_a_position(subscriber_pair: Pair) -> None:
    async with client(await prepare(subscriber_pair)) as shop:
        await subscriber_pair.source.execute("UPDATE product SET price = 5")
        ((position,),) = await subscriber_pair.source.fetch("SELECT pg_current_wal_lsn()::text")
        assert (await shop.get("/products", params={"after": position})).json()[0]["price"] == "5"
        late = await shop.get("/products", params={"after": "FFFF/0"})
        assert late.status_code == 504
        assert "FFFF/0" in late.json()["detail"]


async def test_a_restart_of_the_target(subscriber_pair: Pair) -> None:
    async with client(await prepare(subscriber_pair)) as shop:
        await subscriber_pair.restart_target()
        await subscriber_pair.source.execute("INSERT INTO product VALUES (2, 'jam', 3)")
        async with asyncio.timeout(60):
            while len((await shop.get("/products")).json()) < 2:
                await asyncio.sleep(0.1)
            while (await shop.get("/health")).status_code != 200:
                await asyncio.sleep(0.1)
