"""The application.

    export SHOP_DATABASE=postgresql+asyncpg://… SHOP_SOURCE=postgresql+asyncpg://…
    uvicorn --factory examples.shop.app:from_environment --reload

The lifespan of the application creates the subscription if it is missing, runs the launcher, and waits for the first
copy. Start as many processes as you like: one runs the subscription, and the others are standbys. The tables of
models.py must exist in both databases, and publication `shop` in the company's.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from sqlalchemy import URL, make_url, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import subscriber
from examples.shop.models import Product
from subscriber import Lsn

NAME = "shop"
FIRST_COPY = 60  # seconds
PATIENCE = 2  # seconds that a request waits for a position

router = APIRouter()


class ProductOut(BaseModel):
    """A product in an answer."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    name: str
    price: Decimal


def create(database: URL, source: URL) -> FastAPI:
    """Return the application.

    Args:
        database: the shop's own database, the target.
        source: the company's database, the publisher.
    """
    engine = create_async_engine(database, pool_pre_ping=True)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with subscriber.connect(engine.url) as db:
            await db.create_subscription(NAME, source=source, publications=["shop"], exist_ok=True)
            async with db.running():
                # A failed table, or a copy that takes longer, does not keep the shop closed: /health shows it.
                with suppress(subscriber.WaitTimeout, subscriber.SubscriptionFailed):
                    await db.wait_for_sync(NAME, timeout=FIRST_COPY)
                app.state.db = db
                app.state.engine = engine
                yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)
    app.include_router(router)
    app.add_exception_handler(subscriber.WaitTimeout, too_late)
    return app


def from_environment() -> FastAPI:
    """Return the application of a process."""
    return create(make_url(os.environ["SHOP_DATABASE"]), make_url(os.environ["SHOP_SOURCE"]))


def replication(request: Request) -> subscriber.Database:
    """Return the target with its subscription."""
    db: subscriber.Database = request.app.state.db
    return db


async def session(request: Request) -> AsyncGenerator[AsyncSession, None]:
    """Open a session for a request."""
    async with AsyncSession(request.app.state.engine) as opened:
        yield opened


async def too_late(_request: Request, error: Exception) -> JSONResponse:
    """Answer 504 to a request whose wait has ended without success."""
    return JSONResponse({"detail": str(error)}, 504)


@router.get("/products")
async def products(
    opened: Annotated[AsyncSession, Depends(session)],
    db: Annotated[subscriber.Database, Depends(replication)],
    after: str | None = None,
) -> list[ProductOut]:
    """Return all products. With `after`, wait for that position of the company's database first."""
    if after is not None:
        await db.wait_for_lsn(NAME, Lsn.parse(after), timeout=PATIENCE)
    found = await opened.scalars(select(Product).order_by(Product.id))
    return [ProductOut.model_validate(product) for product in found]


@router.get("/health")
async def health(db: Annotated[subscriber.Database, Depends(replication)]) -> JSONResponse:
    """Answer 200 if the subscription has no problem, else 503 with the next step for each problem."""
    try:
        (status,) = await db.status(NAME)
    except subscriber.SubscriberError as error:
        return JSONResponse({"problems": [error.message]}, 503)
    problems = [" ".join(filter(None, [problem.message, problem.hint])) for problem in status.problems]
    return JSONResponse({"state": status.state, "problems": problems}, 503 if problems else 200)
