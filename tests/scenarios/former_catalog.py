"""Schema "subscriber" of a former version: permanent tables, which FOR ALL TABLES publishes."""

from __future__ import annotations

import anyio
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, StaticPool, text
from sqlalchemy.ext.asyncio import create_async_engine

from subscriber.catalog import schema
from tests.plugins.fix_cluster import Database

REVISION = "0010"  # the last one whose tables are permanent

SUBSCRIPTION = """
INSERT INTO subscriber.subscription (subname, subowner, subenabled, subconninfo, subslotname, subsynccommit,
       subpublications, subbinary, substream, subtwophasestate, subdisableonerr, subpasswordrequired,
       subrunasowner, suborigin, subfailover)
VALUES ($1, current_user::regrole, true, $2, $1, 'off', $3, false, 'p', 'd', false, false, false, 'any', false)
RETURNING subid
"""


async def install_former_catalog(database: Database) -> None:
    """Run the migration scripts up to REVISION as the former version did, in one transaction."""

    def install(connection: Connection) -> None:
        connection.execute(text("CREATE SCHEMA subscriber"))
        connection.execute(text("CREATE TABLE subscriber.alembic_version (version_num varchar(32) PRIMARY KEY)"))
        connection.execute(text("SET LOCAL search_path = pg_catalog"))
        with Operations.context(MigrationContext.configure(connection)):
            directory = ScriptDirectory(str(schema.scripts()))
            for script in reversed(list(directory.iterate_revisions(REVISION, "base"))):
                script.module.upgrade()
        connection.execute(text("INSERT INTO subscriber.alembic_version VALUES (:revision)"), {"revision": REVISION})

    async with database.connection() as given:

        async def same() -> object:
            return given

        engine = create_async_engine("postgresql+asyncpg://", async_creator=same, poolclass=StaticPool)
        while not schema._upgrading.acquire(blocking=False):  # a launcher of this process upgrades its database
            await anyio.sleep(schema.UPGRADE_POLL)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(install)
        finally:
            schema._upgrading.release()


async def add_former_subscription(database: Database, name: str, conninfo: str, publication: str, reached: str) -> int:
    """Insert a subscription that has its own name as slot name, and whose tables are ready. `reached` is its position.

    All tables of schema "public" belong to it. Returns its OID.
    """
    async with database.connection() as connection, connection.transaction():
        subid: int = await connection.fetchval(SUBSCRIPTION, name, conninfo, [publication])
        await connection.execute(
            "INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srsublsn)"
            " SELECT $1, c.oid, 'r', $2::text::pg_lsn FROM pg_class c"
            "  WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'",
            subid,
            reached,
        )
        await connection.execute("SELECT subscriber.create_origin('pg_' || $1::oid)", subid)
        await connection.execute(
            "INSERT INTO subscriber.progress (subid, relid, remote_lsn) VALUES ($1, 0, $2::text::pg_lsn)",
            subid,
            reached,
        )
        await connection.execute(
            "INSERT INTO subscriber.confirmed (subid, confirmed_lsn) VALUES ($1, $2::text::pg_lsn)", subid, reached
        )
        await connection.execute("INSERT INTO subscriber.subscription_stats (subid) VALUES ($1)", subid)
    return subid
