"""Transactions applied in parallel in several sessions of the target (apply_sessions)."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from subscriber.settings import Settings
from tests.plugins.fix_subscriber import QUICK
from tests.scenarios.conftest import Pair

SESSIONS = "SELECT count(*) FROM subscriber.worker WHERE worker_type = 'parallel apply' AND state = 'applying'"
ORIGINS = """
SELECT count(*) FROM pg_replication_origin, subscriber.subscription WHERE roname LIKE 'pg\\_' || subid || '\\_8%'
"""
TABLE = "CREATE TABLE t (id numeric PRIMARY KEY, v int)"
ROWS = 100


@pytest.fixture
def settings() -> Settings:
    return replace(QUICK, parallel_batch_min_rows=1)


@pytest.fixture
async def side_by_side(pair: Pair) -> Pair:
    """Table t with a hundred rows, and a subscription with three sessions, all of which get batches."""
    await pair.both(TABLE)
    await pair.source.execute(
        f"INSERT INTO t SELECT i, 0 FROM generate_series(1, {ROWS}) i", "CREATE PUBLICATION p FOR TABLE t"
    )
    await pair.subscriber.create(pair.source, "p", apply_sessions=3)
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.target.wait_for(SESSIONS, 2)
    return pair


async def test_a_lock_that_a_later_one_holds_is_given_back(side_by_side: Pair) -> None:
    """A session holds a row of the first transaction, so the second one is applied before it.

    That session then waits for a row of the second transaction.
    """
    pair = side_by_side
    async with pair.target.connection() as other:
        await other.execute("BEGIN; UPDATE t SET v = -1 WHERE id = 1")
        await pair.source.execute("UPDATE t SET v = v + 1 WHERE id <= 20")
        await anyio.sleep(0.3)
        await pair.source.execute("UPDATE t SET v = v + 2 WHERE id > 20 AND id <= 60")
        await pair.source.execute("UPDATE t SET v = v + 3 WHERE id > 60")
        await anyio.sleep(0.3)
        with anyio.fail_after(10):
            await other.execute("UPDATE t SET v = -1 WHERE id = 30")
        await other.execute("ROLLBACK")
    await pair.source.wait_for_catchup("s")
    await pair.target.wait_for("SELECT (one_by_one->>'deadlock')::int >= 20 FROM subscriber.worker WHERE relid = 0")
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    assert await pair.rows("SELECT v, count(*) FROM t GROUP BY v ORDER BY v") == [(1, 20), (2, 40), (3, 40)]


async def test_the_number_of_sessions_follows_apply_sessions(side_by_side: Pair) -> None:
    """Origins are few on a server, so those of sessions that are no more are dropped."""
    pair = side_by_side
    assert await pair.target.value(ORIGINS) == 2
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (apply_sessions = 1)")
    await pair.target.wait_for(ORIGINS, 0)
    await pair.target.wait_for(SESSIONS, 0)
    await pair.source.execute("UPDATE t SET v = 1")
    await pair.source.wait_for_catchup("s")
    await pair.assert_same("SELECT * FROM t ORDER BY id")


async def test_a_target_without_free_origins_gets_fewer_sessions(side_by_side: Pair) -> None:
    pair = side_by_side
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (apply_sessions = 64)")
    await pair.subscriber.log.wait_for("transactions are applied in [0-9]+ sessions instead of 64")
    await pair.source.execute("UPDATE t SET v = 1")
    await pair.source.wait_for_catchup("s")
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (apply_sessions = 1)")
    await pair.target.wait_for(ORIGINS, 0)
