"""A program that uses every public entry point, as a type checker sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime

import subscriber
from subscriber import App, Conflict, Hook, Hooks, Lsn, Settings


async def fresh() -> str:
    return "postgresql://app@db.example/shop"


async def mine(conflict: Conflict) -> str | Mapping[str, object]:
    return "keep_local" if conflict.type == "update_missing" else {"id": 1}


application = App(hooks={"cities": Hooks({"person": Hook(drop=["password"])})}, resolvers={"mine": mine})


@asynccontextmanager
async def lifespan(_application: object) -> AsyncGenerator[None, None]:
    settings = Settings(status_interval=5)
    async with subscriber.connect(fresh, settings=settings) as db, db.running(only=["cities"], on_error="raise"):
        yield


async def statements(db: subscriber.Database) -> None:
    await db.create_subscription(
        "cities", source="$SHOP", publications=["atlas"], streaming="parallel", copy_engine="ranges", binary=True
    )
    await db.alter("cities", disable_on_error=True, publications=["atlas", "more"])
    await db.refresh("cities", copy_data="compare")
    await db.refresh_tables("cities", ["public.city", ("public", "city")], truncate=True)
    await db.enable("cities")
    await db.disable("cities")
    await db.skip("cities", Lsn.parse("0/10"))
    await db.wait_for_sync("cities", timeout=60)
    await db.wait_for_lsn("cities", Lsn(16))
    await db.execute("ALTER SUBSCRIPTION $1 RENAME TO $2", parameters=["cities", "towns"])
    await db.drop("cities", missing_ok=True)


async def answers(db: subscriber.Database) -> list[str]:
    lines: list[str] = []
    for status in await db.status():
        lag: int | None = status.lag_bytes
        lines += [status.name, str(status.state), str(lag), *(problem.message for problem in status.problems)]
    for finding in await db.check("cities"):
        lines += [finding.subject, finding.message, finding.fix or ""]
    for conflict in await db.conflicts(since=datetime(2026, 1, 1)):
        lines += [conflict.relation, str(conflict.finish_lsn)]
    lines += [table.name for table in (await db.verify("cities", jobs=2)).tables]
    async for event in db.events(lag_limit=30):
        match event:
            case subscriber.WorkerFailed(subscription=name, message=message, hint=hint):
                lines += [name, message, hint or ""]
            case subscriber.ConflictDetected(conflict=conflict):
                lines.append(conflict.relation)
            case _:
                pass
    return lines


async def changes() -> None:
    async with subscriber.stream("postgresql://repl@db.example/shop", publications=["atlas"]) as transactions:
        async for transaction in transactions:
            async for change in transaction:
                print(change)
            await transaction.ack()
