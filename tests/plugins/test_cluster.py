"""Databases that are copies of one with the schema."""

from __future__ import annotations

from subscriber.demo.servers import Servers
from tests.plugins.fix_cluster import SETTINGS, database_with_schema

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
