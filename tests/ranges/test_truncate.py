"""A TRUNCATE on the publisher while a table is copied by ranges."""

from __future__ import annotations

import anyio

from subscriber.catalog import pause_requests, worker_sessions
from subscriber.lsn import Lsn
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.ranges.copies import (
    FILL,
    between_ranges,
    prepare,
    prepare_table,
    same,
)

WAITS = "SELECT count(*) > 0 FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT granted AND query ~ '{}'"


async def test_a_truncate_of_a_table_that_the_publisher_compares(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    table = 'CREATE TABLE t (id text COLLATE "C.utf8" PRIMARY KEY, n int, note text)'
    await source_db.execute(table, FILL.format("t", 1500), "CREATE PUBLICATION p FOR ALL TABLES")
    await target_db.execute(table)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    for rows in (700, 50):
        # On a busy machine, all ranges may be copied before the second TRUNCATE.
        await target_db.wait_for(
            "SELECT count(*) > 2 OR (SELECT bool_and(srsubstate IN ('s', 'r')) FROM subscriber.subscription_rel)"
            " FROM subscriber.copied_range"
        )
        await source_db.execute("TRUNCATE t", FILL.format("t", rows))
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert not subscriber.log.has("ERROR")


async def test_a_truncate_that_later_ranges_contain(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The apply worker stands before the TRUNCATE, while ranges are read that contain it."""
    await prepare(source_db, target_db, "t")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    subid = await target_db.value("SELECT oid::bigint FROM subscriber.pg_subscription")
    async with target_db.connection() as holder:
        async with between_ranges(source_db, target_db) as transaction:
            assert await worker_sessions.register_own(holder, subid, pause_requests.HOLDER)
            await pause_requests.request(holder, subid, Lsn(0))
            await target_db.wait_for("SELECT held_at IS NOT NULL FROM subscriber.hold")
            await transaction.execute("TRUNCATE t")
            await transaction.execute(FILL.format("t", 2000))
        await target_db.wait_for("SELECT bool_or(high IS NULL) FROM subscriber.copied_range")
        await pause_requests.release(holder, subid)
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert not subscriber.log.has("ERROR")


async def test_a_truncate_that_is_not_executed_when_the_copy_starts_again(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """A range that contains the TRUNCATE must not be read before it, also by another run of the copy."""
    await prepare(source_db, target_db, "other", rows=10)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await subscriber.wait_for_ready(source_db)
    await prepare_table(source_db, target_db, "t", rows=1500)
    await subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    async with target_db.connection() as holder, target_db.connection() as locker:
        async with between_ranges(source_db, target_db) as transaction:
            await holder.execute("BEGIN")
            await holder.execute("SELECT FROM other WHERE id = 1 FOR UPDATE")
            await source_db.execute("UPDATE other SET n = n + 1 WHERE id = 1")
            await target_db.wait_for(WAITS.format("other"))
            await source_db.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 's t'"
            )
            await subscriber.log.wait_for(r'(?s)(table "t" has started.*){2}')
            # The next run of the copy waits before it loads the ranges.
            await locker.execute("BEGIN")
            await locker.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            await transaction.execute("TRUNCATE t")
            await transaction.execute("INSERT INTO t SELECT i FROM generate_series(5001, 5050) i")
        await target_db.wait_for(WAITS.format("t") + " AND relation = 't'::regclass")
        await anyio.sleep(0.5)  # the TRUNCATE is queued behind the UPDATE
        await locker.execute("ROLLBACK")
        await anyio.sleep(1)
        await holder.execute("ROLLBACK")
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "other")
