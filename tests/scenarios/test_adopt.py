"""`subscriber adopt` and `subscriber hand-back`: a subscription changes hands while the publisher is written to.

No table has a key, so duplicate rows are visible.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from subscriber.cli.commands.adopt import run_adopt, run_hand_back
from subscriber.errors import StatementError, SubscriberError
from subscriber.settings import DEFAULTS
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber

PREPARE = """
SELECT format('ALTER SUBSCRIPTION %I DISABLE; ALTER SUBSCRIPTION %I SET (slot_name = NONE); DROP SUBSCRIPTION %I;',
              subname, subname, subname)
  FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid WHERE d.datname = current_database()
"""
NATIVE = """
SELECT to_jsonb(s) - 'oid' - 'subconninfo' - 'subdbid' FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
 WHERE d.datname = current_database()
"""
ROWS = "SELECT number FROM log ORDER BY number"


@dataclass
class Scene:
    """A publisher with a writer, and a target with a launcher whose subscription `s` changes hands."""

    source: Database
    target: Database
    written: int = 0
    steps: list[str] = field(default_factory=list)

    async def prepare(self) -> None:
        for database in (self.source, self.target):
            await database.execute("CREATE TABLE log (number int)", "CREATE TABLE other (number int)")
        await self.source.execute("CREATE PUBLICATION p FOR TABLE log, other")

    async def create_native(self, **options: object) -> None:
        """CREATE SUBSCRIPTION in PostgreSQL, until its tables are ready."""
        given = ", ".join(f"{name} = {value}" for name, value in options.items())
        await self.target.execute(
            f"CREATE SUBSCRIPTION s CONNECTION '{self.source.dsn()}' PUBLICATION p"
            + (f" WITH ({given})" if given else "")
        )
        await self.ready("pg_catalog")

    async def ready(self, schema: str) -> None:
        await self.source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        await self.target.wait_for(
            f"SELECT bool_and(srsubstate = 'r') FROM {schema}.pg_subscription_rel r"
            f" JOIN {schema}.pg_subscription s ON s.oid = r.srsubid JOIN pg_database d ON d.oid = s.subdbid"
            " WHERE d.datname = current_database()"
        )

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write a transaction of two rows every few milliseconds."""

        async def write() -> None:
            async with self.source.connection() as connection:
                while True:
                    self.written += 2
                    await connection.execute(
                        "INSERT INTO log VALUES ($1), ($1 + 1)".replace("$1", str(self.written - 1))
                    )
                    await asyncio.sleep(0.002)

        task = asyncio.create_task(write())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()

    async def assert_same(self) -> None:
        """Wait until the target has as many rows as the source, and compare them."""
        expected = await self.source.rows(ROWS)
        await self.target.wait_for("SELECT count(*) FROM log", len(expected))
        await anyio.sleep(0.1)  # for a row that arrives twice
        assert await self.target.rows(ROWS) == expected

    async def adopt(self) -> None:
        assert await run_adopt(self.target.dsn(), "s", json=True, settings=DEFAULTS) == 0

    async def hand_back(self) -> None:
        assert await run_hand_back(self.target.dsn(), "s", json=True, settings=DEFAULTS) == 0

    async def refuses(self, command: str, *expected: str) -> StatementError:
        """Check that the command refuses, with these texts in its error, and that the subscription runs as before."""
        run = run_adopt if command == "adopt" else run_hand_back
        with pytest.raises(SubscriberError) as caught:
            await run(self.target.dsn(), "s", json=False, settings=DEFAULTS)
        for text in expected:
            assert text in str(caught.value)
        return caught.value

    async def native(self) -> dict[str, Any] | None:
        """Return the row of PostgreSQL's subscription."""
        found = await self.target.value(NATIVE)
        return None if found is None else json.loads(found)


async def remove_native(database: Database) -> None:
    """Drop PostgreSQL's subscriptions of the database, which could not be dropped with them."""
    for (statements,) in await database.rows(PREPARE):
        await database.execute(*[one for one in statements.split(";") if one.strip()])


@pytest.fixture
async def scene(source_db: Database, target_db: Database, subscriber: Subscriber) -> AsyncIterator[Scene]:
    scene = Scene(source_db, target_db)
    await scene.prepare()
    try:
        yield scene
    finally:
        await remove_native(target_db)


async def test_back_and_forth_under_load(scene: Scene) -> None:
    await scene.create_native()
    async with scene.writing():
        for _ in range(3):
            await scene.adopt()
            assert await scene.native() is None
            await anyio.sleep(0.3)
            await scene.hand_back()
            assert await scene.target.rows("SELECT FROM subscriber.pg_subscription") == []
            await anyio.sleep(0.3)
    await scene.assert_same()
