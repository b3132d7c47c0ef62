"""The owner of a table locks it until a superuser's session waits, and replaces the table with a view."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace

import anyio
import asyncpg
import pytest

from subscriber.check.collect import read_target_table
from subscriber.check.model import CheckedSourceTable
from subscriber.demo.servers import Server
from subscriber.errors import SubscriberError
from subscriber.migration import sequences
from subscriber.migration.report import collect
from subscriber.protocol.messages import Relation, ReplicaIdentity
from subscriber.publisher.connection import Publisher
from subscriber.publisher.published_rows import read_values
from subscriber.worker.tablesync.comparison import SyncComparison
from tests.plugins.fix_cluster import Database

OWNER = "swapper"
CODE = """
CREATE FUNCTION app.attack() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('role', 'none', false);
    RAISE EXCEPTION 'code of another role, is_superuser = %', current_setting('is_superuser');
END $$
"""
WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation IS NOT NULL)"
Read = Callable[[Database], Awaitable[object]]


async def read_for_report(database: Database) -> object:
    return await collect._read(await database.connect(), {("app", "t"): ["id", "v"]})


async def read_for_check(database: Database) -> object:
    source = CheckedSourceTable("app", "t", "d", False, (), (), True)
    return await read_target_table(await database.connect(), source, rows=True, ownership=None, has_schema=False)


async def read_sequences(database: Database) -> object:
    connection = await database.connect()
    return await sequences.read_values(connection, await sequences.list_sequences(connection))


async def read_published(database: Database) -> object:
    """Read a row that a change names. Nothing has looked at the table before."""
    publisher = await Publisher.connect(database.dsn(), application_name="subscriber")
    relation = Relation(None, 1, "app", "t", ReplicaIdentity.DEFAULT, ())
    try:
        return await read_values(publisher, relation, {"id": "1"}, ["v"])
    finally:
        publisher.session.abort()


@dataclass
class Swapped:
    """Table app.t and sequence app.s of a role that is no superuser."""

    database: Database

    async def during(self, read: Callable[[], Awaitable[object]], name: str) -> str:
        """Call `read`, and replace the relation when it waits for the lock of the relation. Returns its error."""
        connection = await self.database.connect()
        await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}; BEGIN; ALTER TABLE app.{name} RENAME TO hidden")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._swap, connection, name)
            try:
                await read()
            except (SubscriberError, asyncpg.PostgresError) as error:
                return str(error)
        return "no error"

    async def _swap(self, connection: asyncpg.Connection[asyncpg.Record], name: str) -> None:
        await self.database.wait_for(WAITS, True)
        columns = "id, v" if name == "t" else "last_value, is_called"
        await connection.execute(f"CREATE VIEW app.{name} AS SELECT {columns} FROM app.hidden, app.attack(); COMMIT")


async def read_for_resync(database: Database) -> object:
    subscription = SimpleNamespace(owner="postgres", run_as_owner=False)
    context = SimpleNamespace(apply_target=database.dsn())
    return await SyncComparison(subscription, context, None).has_rows("app", "t")  # type: ignore[arg-type]


READS: dict[str, tuple[str, Read]] = {
    "report": ("t", read_for_report),
    "check": ("t", read_for_check),
    "sequences": ("s", read_sequences),
    "published": ("t", read_published),
    "resync": ("t", read_for_resync),
}


@pytest.fixture(params=[18])
def target(publisher: Server) -> Server:
    """The server of the source has room for both databases."""
    return publisher


@pytest.fixture
async def swapped(source_db: Database) -> AsyncIterator[Swapped]:
    await source_db.execute(f"CREATE ROLE {OWNER}", f"CREATE SCHEMA app AUTHORIZATION {OWNER}")
    try:
        await source_db.execute(
            f"SET SESSION AUTHORIZATION {OWNER}", CODE, "CREATE TABLE app.t (id int, v int)", "CREATE SEQUENCE app.s"
        )
        yield Swapped(source_db)
    finally:
        await source_db.execute(f"DROP OWNED BY {OWNER} CASCADE", f"DROP ROLE {OWNER}")


@pytest.mark.parametrize("read", READS)
async def test_no_view_is_read_in_the_place_of_a_relation(swapped: Swapped, read: str) -> None:
    name, function = READS[read]
    message = await swapped.during(lambda: function(swapped.database), name)
    assert message.startswith(f'access to non-system view "{name}" is restricted')
