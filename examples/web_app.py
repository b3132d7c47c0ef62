"""A web application that runs its subscription: Starlette, two replicas of which share the work.

    SHOP_TARGET=postgresql+asyncpg://… SHOP_SOURCE=postgresql+asyncpg://… uvicorn --factory examples.web_app:create

The lifespan of the application connects, creates the subscription if it is missing, and runs the launcher. One replica
runs the subscription, and the others are standbys. A restart of a server does not end the application: /health answers
503 meanwhile. shop/app.py is such an application on FastAPI and SQLAlchemy, litestar_app.py one on Litestar.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import subscriber

NAME = "shop"


@asynccontextmanager
async def replicated(application: Any) -> AsyncGenerator[None, None]:
    """Run the subscription while the application runs, as the lifespan of any ASGI framework."""
    async with subscriber.connect("$SHOP_TARGET") as db:
        await db.create_subscription(NAME, source="$SHOP_SOURCE", publications=["shop"], exist_ok=True)
        async with db.running():
            application.state.db = db
            yield


async def health(request: Request) -> JSONResponse:
    """Answer 200 if the subscription has no problem, else 503 with the next command for each problem."""
    db: subscriber.Database = request.app.state.db
    try:
        (status,) = await db.status(NAME)
    except subscriber.SubscriberError as error:
        return JSONResponse({"problems": [error.message]}, 503)
    problems = [" ".join(filter(None, [problem.message, problem.hint])) for problem in status.problems]
    return JSONResponse(
        {"state": status.state, "lag": status.lag_bytes, "problems": problems}, 503 if problems else 200
    )


def create() -> Starlette:
    """Return the application."""
    return Starlette(routes=[Route("/health", health)], lifespan=replicated)
