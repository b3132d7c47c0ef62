"""Cutover of a move, beside an application that writes to the server that admits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import anyio
import asyncpg

from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.worker_sessions import register_without_place
from subscriber.errors import SubscriberError
from subscriber.failpoints import Point
from subscriber.migration.migration import move_database
from subscriber.migration.plan import Side
from tests.interleavings.stage import SETTINGS, Actor, Scenario, Stage
from tests.migration.scene import QUICK
from tests.migration.writers import REFUSED
from tests.plugins.fix_cluster import NO_TLS, Database
from tests.plugins.fix_subscriber import running_subscriber

MOVING = frozenset(
    {
        Point.MIGRATE_GATES,
        Point.MIGRATE_FREEZE,
        Point.MIGRATE_QUIET,
        Point.MIGRATE_DRAIN,
        Point.MIGRATE_SEQUENCES,
        Point.MIGRATE_STOP,
        Point.MIGRATE_SWITCH,
        Point.MIGRATE_OPEN,
        Point.MIGRATE_SETTLE,
    }
)
ATTEMPTS = 5  # of a command that meets an error
TRANSACTIONS = 3
LIMITS = replace(QUICK, lag_window=0.01)
# Two subscriptions in a circle: each record of a position is a change that the other side confirms.
CONFIRMING = replace(SETTINGS, confirm_interval=5.0)
APPLICATION = "explored_application"  # a role that is not a superuser
# The traces of a move that may have ended anywhere.
REMOVE = (
    "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE database = current_database()",
    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()",
    "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin, subscriber.subscription"
    " WHERE roname LIKE format('pg\\_%s%%', subid)",
    "DROP SCHEMA subscriber CASCADE; DROP PUBLICATION IF EXISTS s_back",
    f"DROP OWNED BY {APPLICATION}; DROP ROLE {APPLICATION}",
)


async def followed(stage: Stage) -> None:
    """A table with a sequence, which the target replicates, and launchers for both servers."""
    stage.kept["acknowledged"] = []
    stage.closing.push_async_callback(remove, stage)
    await stage.both(
        "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, token text)",
        f"CREATE ROLE {APPLICATION} LOGIN",
        f"GRANT USAGE ON SCHEMA public TO {APPLICATION}; GRANT ALL ON t TO {APPLICATION}",
    )
    await stage.source.execute("CREATE PUBLICATION p FOR ALL TABLES")
    for database, side in zip((stage.source, stage.target), stage.sides, strict=True):
        async with database.connection() as connection:
            await ensure_schema(connection)
        await register_without_place(side)  # a fence ends other sessions
    stage.subscriber.start()
    await stage.closing.enter_async_context(running_subscriber(stage.source, settings=replace(CONFIRMING)))
    await stage.subscriber.create(stage.source, "p", "s", origin="none")
    await stage.subscriber.wait_for_ready(stage.source)


async def remove(stage: Stage) -> None:
    """Remove what a move leaves on both servers."""
    await stage.subscriber.stop()
    for database in (stage.source, stage.target):
        await database.execute(*REMOVE, f"GRANT CONNECT ON DATABASE {database.name} TO PUBLIC")
    async with stage.target.connection() as connection:
        await ensure_schema(connection)


async def moving(stage: Stage) -> None:
    """Move the application to the target. A command that fails is repeated."""
    for _ in range(ATTEMPTS):
        await stage.step("cutover")
        with suppress(SubscriberError):
            servers = stage.source.dsn(), stage.target.dsn()
            async with move_database(*servers, "s", options=LIMITS, run=False) as move:
                result = await move.cutover()
                assert result.serving is Side.TARGET
                return
    raise AssertionError(f"the database has not moved after {ATTEMPTS} attempts")


async def writing(stage: Stage) -> None:
    """Commit transactions of two rows on the server that admits them, in one session for as long as it lives."""
    servers, acknowledged = [stage.source, stage.target], stage.kept["acknowledged"]
    connection: asyncpg.Connection[asyncpg.Record] | None = None
    try:
        for number in range(1, TRANSACTIONS + 1):
            for attempt in ("", "_again"):
                await stage.step(f"begin_{number}{attempt}")
                try:
                    connection = connection or await connect(servers[0])
                    await connection.execute(f"BEGIN; INSERT INTO t (token) VALUES ('{number}')")
                    await stage.step(f"commit_{number}{attempt}")
                    await connection.execute(f"INSERT INTO t (token) VALUES ('{number}'); COMMIT")
                except REFUSED:
                    servers.reverse()
                    if connection is not None:
                        connection.terminate()
                    connection = None
                    continue
                acknowledged.append(str(number))
                break
    finally:
        if connection is not None:
            connection.terminate()


async def connect(database: Database) -> asyncpg.Connection[asyncpg.Record]:
    """Connect as the application."""
    connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
        database.dsn(user=APPLICATION), ssl=NO_TLS, timeout=10
    )
    return connection


async def moved(stage: Stage) -> None:
    """Write to the target as the application, and wait until the source has everything."""
    connection = await connect(stage.target)
    await connection.execute("INSERT INTO t (token) VALUES ('last')")
    connection.terminate()
    with anyio.fail_after(20):
        await stage.target.wait_for_catchup("s_back")


async def wrong(stage: Stage) -> Sequence[object]:
    """Return tokens without both rows, and acknowledged ones without any."""
    rows_read = await stage.target.rows(
        "SELECT token, count(*) FROM t WHERE token <> 'last' GROUP BY token ORDER BY token"
    )
    there = {token for token, _ in rows_read}
    return [row for row in rows_read if row[1] != 2] + [
        token for token in stage.kept["acknowledged"] if token not in there
    ]


def known(stage: Stage) -> object:
    """Return what the application knows."""
    return stage.kept["acknowledged"]


def cutover() -> Iterator[Scenario]:
    """A cutover, the workers of both launchers, and an application."""
    actors: dict[str, Actor] = {"move": moving, "writer": writing}
    yield Scenario(
        "cutover", ("t",), MOVING, followed, actors, finish=moved, check=wrong, memory=known, settings=CONFIRMING
    )
