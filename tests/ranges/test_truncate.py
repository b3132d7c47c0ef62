"""A TRUNCATE on the publisher while a table is copied by ranges."""

from __future__ import annotations

from subscriber.catalog import pause_requests, worker_sessions
from subscriber.lsn import Lsn
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.ranges.copies import (
    FILL,
    between_ranges,
    prepare,
    same,
)


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
