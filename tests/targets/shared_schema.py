"""A shared database with schema "subscriber" for many tests: creating the schema alone takes a second."""

from __future__ import annotations

import asyncpg
from anyio.from_thread import BlockingPortal

from subscriber.catalog.schema import ensure_schema
from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import Database, numbers

_LEAVE = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid();
SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin WHERE roname LIKE 'pg\\_{subid}%';
"""
_CLEAN = """
SET client_min_messages = error;
DROP SCHEMA IF EXISTS public, s, ext CASCADE;
CREATE SCHEMA public;
DELETE FROM subscriber.subscription;
INSERT INTO subscriber.subscription (subid, subname, subowner, subenabled, subconninfo, subslotname, subsynccommit,
       subpublications, subbinary, substream, subtwophasestate, subdisableonerr, subpasswordrequired, subrunasowner,
       suborigin, subfailover)
VALUES ({subid}, 's', current_user::regrole, true, 'dbname=x', 's', 'off', '{{p}}', false, 'p', 'd', false, true,
        false, 'any', false);
SELECT subscriber.set_progress({subid}, 0, '0/0')
"""


def make(portal: BlockingPortal, server: Server, prefix: str) -> str:
    """Create a database with the schema. It is removed with the server. Returns its name."""
    name = f"{prefix}_{next(numbers)}"

    async def create() -> None:
        root: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.dsn())
        await root.execute(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY file_copy")
        await root.close()
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.dsn(name))
        await ensure_schema(connection)
        await connection.close()

    portal.call(create)
    return name


async def clean(database: Database, subid: int) -> None:
    """Leave subscription `s` in it, with that number, and nothing else."""
    await database.execute(f"ALTER DATABASE {database.name} RESET ALL", _CLEAN.format(subid=subid))


async def leave(database: Database, subid: int) -> None:
    """End the sessions of the database, and remove the subscription's origins, which are global to the server."""
    for connection in database._connections:
        connection.terminate()
    await database.execute(_LEAVE.format(subid=subid))
