"""The databases of tests: how they are made, and dropped."""

from __future__ import annotations

import asyncpg

from subscriber.demo.servers import Server, Servers
from tests.plugins.fix_cluster import SETTINGS, database_with_schema, fresh_database

IS_ITS_OWN = "SELECT database_name = pg_catalog.current_database() FROM subscriber.identity"


async def test_a_copy_is_its_own_database_after_a_crash(servers: Servers) -> None:
    server = await servers.create("target", SETTINGS)
    await server.start()
    for _ in range(2):
        async with database_with_schema(server) as database:
            assert await database.value(IS_ITS_OWN)
            assert await database.value("SELECT EXISTS (SELECT FROM subscriber.complete)")
        await server.stop("immediate")
        await server.start()


async def test_a_session_whose_statement_is_no_utf8_ends_with_its_database(target: Server) -> None:
    """The session that ends it has the encoding UTF8."""
    async with fresh_database(target, "LATIN1") as database:
        session = await asyncpg.connect(database.dsn())
        await session.execute("SELECT 'é'")
    assert session.is_closed()
