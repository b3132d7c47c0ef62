"""Transactions that a snapshot sees earlier or later than their place in the stream suggests."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from subscriber.catalog import pause_requests, worker_sessions
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.ranges import is_flushed, request_flush
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.ranges.copies import (
    between_ranges,
    prepare,
    prepare_table,
    same,
    writing,
)
from tests.synchronous import block_commits, release_commits


async def test_a_commit_that_waits_for_a_standby(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The apply worker receives the change before a snapshot of the publisher sees it."""
    await prepare(source_db, target_db, "t", rows=3000)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    last = "SELECT coalesce(bool_or(high IS NULL), false) FROM subscriber.copied_range"
    async with source_db.connection() as root:
        async with between_ranges(source_db, target_db):
            pass
        try:
            await block_commits(root)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source_db.execute, "UPDATE t SET n = 9 WHERE id = 3000")
                await anyio.sleep(1)
                assert not await target_db.value(last)
                assert await target_db.value("SELECT srsubstate = 'd' FROM subscriber.subscription_rel")
                await release_commits(root)
        finally:
            await release_commits(root)
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert await target_db.value("SELECT n FROM t WHERE id = 3000") == 9


async def test_a_range_is_committed_after_the_publisher_has_flushed_its_transactions(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """A crash of the publisher would undo transactions that a snapshot sees, and use their numbers again."""
    await source_db.execute(f"ALTER DATABASE {source_db.name} SET synchronous_commit = off")
    await prepare(source_db, target_db, "t", rows=300)
    unflushed = "SELECT pg_current_wal_flush_lsn()::text"
    async with writing(source_db, "t"):
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        seen = 0
        while await target_db.value("SELECT bool_or(srsubstate IN ('i', 'd')) FROM subscriber.subscription_rel"):
            copied = await target_db.value("SELECT max(lsn)::text FROM subscriber.copied_range")
            flushed = await source_db.value(unflushed)
            if copied is not None:
                assert Lsn.parse(copied) <= Lsn.parse(flushed)
                seen += 1
    assert seen > 2
    await subscriber.wait_for_ready(source_db)
    await source_db.flush_wal()
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")


async def test_a_transaction_that_was_received_before_the_table_was_added(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """Nothing has recorded that its change was skipped. No snapshot sees it while it waits for a standby."""
    await prepare(source_db, target_db, "t", rows=100)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await subscriber.wait_for_ready(source_db)
    await prepare_table(source_db, target_db, "u")
    state = "SELECT srsubstate::text FROM subscriber.subscription_rel WHERE srrelid = 'u'::regclass"
    async with source_db.connection() as root:
        try:
            await block_commits(root)
            await anyio.sleep(0.2)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source_db.execute, "UPDATE u SET n = 9 WHERE id = 50")
                await source_db.wait_for("SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
                await source_db.wait_for_catchup("s")
                await subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
                await target_db.wait_for(state, "d")
                await anyio.sleep(0.5)
                assert await target_db.value("SELECT count(*) FROM u") == 0
                await release_commits(root)
        finally:
            await release_commits(root)
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u")


async def test_a_commit_that_precedes_a_snapshot_which_does_not_see_it(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """It waits for a standby when its range is read, and the apply worker receives it later."""
    await prepare(source_db, target_db, "t", rows=3000)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    subid = await target_db.value("SELECT subid FROM subscriber.subscription")
    async with source_db.connection() as root, target_db.connection() as holder:
        async with between_ranges(source_db, target_db):
            assert await worker_sessions.register_own(holder, subid, pause_requests.HOLDER)
            await pause_requests.request(holder, subid, Lsn(0))
            await target_db.wait_for("SELECT held_at IS NOT NULL FROM subscriber.hold")
        try:
            async with anyio.create_task_group() as tasks:
                await block_commits(root)
                tasks.start_soon(source_db.execute, "UPDATE t SET n = 9 WHERE id = 3000")
                await target_db.wait_for("SELECT bool_or(high IS NULL) FROM subscriber.copied_range")
                assert await target_db.value("SELECT n FROM t WHERE id = 3000") == 0
                await release_commits(root)
            await pause_requests.release(holder, subid)
        finally:
            await release_commits(root)
        await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")


async def test_wal_that_no_commit_requires_is_flushed_at_once(source_db: Database) -> None:
    """Otherwise a range waits until the publisher logs its running transactions, up to 15 s."""
    await source_db.execute("BEGIN; SELECT pg_logical_emit_message(false, 'test', ''); ROLLBACK")
    position = Lsn.parse(await source_db.value("SELECT pg_current_wal_insert_lsn()::text"))
    publisher = await Publisher.connect(source_db.dsn(), application_name="test")
    try:
        await request_flush(publisher)
        with anyio.fail_after(2):
            while not await is_flushed(publisher, position):
                await anyio.sleep(0.02)
    finally:
        await publisher.close()
