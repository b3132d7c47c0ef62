"""A web application on Litestar that shows the state of its subscription.

    SHOP_TARGET=postgresql+asyncpg://… SHOP_SOURCE=postgresql+asyncpg://… uvicorn --factory examples.litestar_app:create

The lifespan connects, creates the subscription if it is missing, and runs the launcher. With SHOP_RUN=no it runs none,
because `subscriber run` does so in another process. While no launcher runs anywhere, /health answers 503 and names that
command.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from litestar import Litestar, Response, get
from litestar.datastructures import State

import subscriber

NAME = "shop"


@asynccontextmanager
async def replicated(app: Litestar) -> AsyncGenerator[None, None]:
    """Run the subscription while the application runs."""
    async with AsyncExitStack() as stack:
        db = app.state.db = await stack.enter_async_context(subscriber.connect("$SHOP_TARGET"))
        await db.create_subscription(NAME, source="$SHOP_SOURCE", publications=["shop"], exist_ok=True)
        if os.environ.get("SHOP_RUN") != "no":
            await stack.enter_async_context(db.running())
        yield


@get("/health")
async def health(state: State) -> Response[dict[str, Any]]:
    """Answer 200 if the subscription has no problem, else 503 with the next step for each problem."""
    db: subscriber.Database = state.db
    try:
        (status,) = await db.status(NAME)
    except subscriber.SubscriberError as error:
        return Response({"problems": [error.message]}, status_code=503)
    problems = [" ".join(filter(None, [problem.message, problem.hint])) for problem in status.problems]
    return Response({"state": status.state, "problems": problems}, status_code=503 if problems else 200)


def create() -> Litestar:
    """Return the application."""
    return Litestar([health], lifespan=[replicated])
