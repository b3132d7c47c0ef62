"""The check of waits in all tests: a wait without a report fails the test."""

from __future__ import annotations

import anyio
import pytest

from tests.plugins import unsaid_waits
from tests.plugins.fix_cluster import Database
from tests.plugins.unsaid_waits import watched_for_waits

TABLES = (
    "CREATE TABLE t ()",
    "CREATE SCHEMA subscriber",
    "CREATE TABLE subscriber.worker (waiting_for text)",
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsaid_waits, "INTERVAL", 0.1)
    monkeypatch.setattr(unsaid_waits, "LONGEST", 0.2)


async def wait_for_a_lock(database: Database, seconds: float) -> None:
    """Wait for a lock as a session of ours would."""
    holder = await database.connect()
    waiter = await database.connect(application_name="subscriber: s")
    async with holder.transaction():
        await holder.execute("LOCK TABLE t")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiter.execute, "SELECT * FROM t")
            await anyio.sleep(seconds)
            tasks.cancel_scope.cancel()


async def test_a_wait_without_a_report_is_found(target_db: Database) -> None:
    await target_db.needs(14, "servers tell since when a lock is waited for")
    await target_db.execute(*TABLES)
    with pytest.raises(pytest.fail.Exception, match=r'nobody was told of:\nprocess \d+ \("subscriber: s"\) for Access'):
        async with watched_for_waits(target_db, lambda: False):
            await wait_for_a_lock(target_db, 1.5)


@pytest.mark.parametrize("how", ["log", "status"])
async def test_a_wait_with_a_report_is_accepted(target_db: Database, how: str) -> None:
    await target_db.execute(*TABLES)
    if how == "status":
        await target_db.execute("INSERT INTO subscriber.worker VALUES ('process 1 (\"psql\")')")
    async with watched_for_waits(target_db, lambda: how == "log"):
        await wait_for_a_lock(target_db, 1.0)
