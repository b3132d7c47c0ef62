"""The publisher's transactions for which a new slot waits are named, and the statements of the hint end them."""

from __future__ import annotations

import re
from contextlib import suppress

import asyncpg
import pytest

from subscriber.comparison import verify
from subscriber.errors import SubscriberError
from subscriber.publisher.connection import Publisher
from subscriber.publisher.open_transactions import open_transactions
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber


async def test_prepared_transactions_come_first(db: Database, walsender: Publisher) -> None:
    await db.execute("CREATE TABLE t (a int)")
    problem = await open_transactions(walsender.session, "compare again")
    assert problem.hint.endswith("in pg_prepared_xacts, then compare again.")
    async with db.connection() as other:
        await other.execute("BEGIN; INSERT INTO t VALUES (1)")
        problem = await open_transactions(walsender.session, "compare again")
        assert problem.detail.endswith(f"process {other.get_server_pid()} in database {db.name}.")
        (statement,) = re.findall(r"SELECT [^;]*", problem.hint)
        with suppress(asyncpg.PostgresError):
            await db.execute(statement)
    async with db.connection() as other:
        await other.execute("BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'it''s'")
    problem = await open_transactions(walsender.session, "compare again")
    assert f"prepared transaction 'it''s' in database {db.name}" in problem.detail
    assert f"in database {db.name}: COMMIT PREPARED 'it''s'; or ROLLBACK PREPARED 'it''s'; Then compare" in problem.hint
    (statement,) = re.findall(r"ROLLBACK [^;]*", problem.hint)
    await db.execute(statement)
    assert await db.value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_comparison_names_a_prepared_transaction(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    await subscriber.create(source_db, "p", "s")
    await subscriber.wait_for_sync(source_db)
    async with source_db.connection() as other:
        await other.execute("BEGIN; INSERT INTO other VALUES (2); PREPARE TRANSACTION 'pending'")
    try:
        with pytest.raises(SubscriberError, match="no snapshot of the publisher") as refused:
            await verify(target_db.dsn(), "s")
    finally:
        await source_db.execute("ROLLBACK PREPARED 'pending'")
    assert "ROLLBACK PREPARED 'pending'; Then repeat the command." in (refused.value.hint or "")
    assert (await verify(target_db.dsn(), "s")).is_same
