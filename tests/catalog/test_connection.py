"""The catalog's connection, which tasks share."""

from __future__ import annotations

import anyio
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.errors import ServerError
from tests.plugins.fix_cluster import Database


@pytest.mark.parametrize("after", [0.0, 0.0005, 0.002, 0.01, 0.05])
async def test_a_task_that_is_cancelled_leaves_no_transaction_to_others(target_db: Database, after: float) -> None:
    """Wherever in its transaction it is: in BEGIN, in a statement, between two, or in COMMIT."""
    await target_db.execute("CREATE TABLE t (i int)")
    async with CatalogConnection.open(target_db.dsn(), "test") as catalog:

        async def work() -> None:
            while True:
                async with catalog.use() as connection, connection.transaction():
                    await connection.execute("INSERT INTO public.t VALUES (1)")
                    await connection.execute("SELECT pg_sleep(0.003)")

        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                await anyio.sleep(after)
                tasks.cancel_scope.cancel()
            async with catalog.use() as connection:
                assert not connection.is_in_transaction()
                first = await connection.fetchval("SELECT now()")  # the start of the transaction
                assert await connection.fetchval("SELECT now()") != first


async def test_an_error_is_ours(target_db: Database) -> None:
    async with CatalogConnection.open(target_db.dsn(), "test") as catalog:
        with pytest.raises(ServerError, match="division by zero"):
            async with catalog.use() as connection:
                await connection.execute("SELECT 1/0")
