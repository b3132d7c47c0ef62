"""A table that is locked on the publisher while others are copied by ranges."""

from __future__ import annotations

import anyio

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.ranges.copies import prepare, same, watch_snapshots


async def test_no_snapshot_waits_for_a_lock(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    """A query for the columns of t opens all tables of the publication."""
    await prepare(source_db, target_db, "t", "u", rows=100)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges", enabled=False)
    stop, ages = anyio.Event(), list[float]()
    async with source_db.connection() as locker, anyio.create_task_group() as tasks:
        await locker.execute("BEGIN")
        await locker.execute("LOCK TABLE u IN ACCESS EXCLUSIVE MODE")
        await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        tasks.start_soon(watch_snapshots, source_db, stop, ages)
        waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'u'::regclass"
        await source_db.wait_for(waits)
        await anyio.sleep(1)
        await source_db.wait_for(waits)
        stop.set()
        await locker.execute("COMMIT")
    assert max(ages) < 0.5
    await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, "t", "u")
    assert not subscriber.log.has("ERROR")
