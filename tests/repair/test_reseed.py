"""A subscription with a new slot: the tables become the publisher's without a copy, and nothing is lost or repeated."""

from __future__ import annotations

import random
import sys

import anyio
import pytest

from subscriber.cli.commands.verify import as_json
from subscriber.comparison import ComparisonProgress, verify
from subscriber.errors import StatementError
from subscriber.repair import reseed
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.repair.test_repair import (
    DAMAGE,
    ROWS,
    SHAPES,
    TYPES,
    assert_nothing_left,
    assert_same,
    damage,
    prepare,
    run_for,
    written,
)


async def lose_slot(source: Database, subscriber: Subscriber) -> str:
    """Drop the slot of the subscription. Returns the hint of the status."""
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await source.execute("SELECT pg_drop_replication_slot('s')")
    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    status = await subscriber.wait_for_state("stopped")
    return str(status["error_hint"])


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.soak), {"two_phase": True, "streaming": "parallel"}],
    ids=["plain", "two_phase"],
)
async def test_a_lost_slot_needs_no_copy(
    source_db: Database, target_db: Database, subscriber: Subscriber, options: dict[str, object]
) -> None:
    await prepare(source_db, target_db, subscriber, **options)
    hint = await lose_slot(source_db, subscriber)
    assert hint.startswith("Make a new slot, and repair only the rows that differ: subscriber reseed s\n")
    await source_db.execute(
        "INSERT INTO same SELECT i FROM generate_series(2001, 2100) i",
        "DELETE FROM same WHERE id < 50",
        "UPDATE types SET big = repeat('z', 5000) WHERE id % 9 = 0",
        "TRUNCATE child",
    )
    async with written(source_db):
        result = await reseed(target_db.dsn(), "s")
        assert result.is_complete
        await subscriber.wait_for_state("streaming")
        comparison = await verify(target_db.dsn(), "s")
        assert comparison.is_same, as_json(comparison)
    counts = {table.name: (table.inserted, table.updated, table.deleted) for table in result.tables}
    assert (counts["public.same"], counts["public.circle"]) == ((100, 0, 49), (0, 0, 0))
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)
    assert not subscriber.log.has("conflict detected")
    if options:
        two_phase = "SELECT two_phase FROM pg_replication_slots WHERE slot_name = 's'"
        assert await source_db.value(two_phase) is True


async def test_tables_that_were_copied_by_other_means(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for statement in (*TYPES, *SHAPES):
        await source_db.execute(statement)
        await target_db.execute(statement)
    await source_db.execute(*ROWS)
    await target_db.execute(*ROWS)
    await damage(target_db, *DAMAGE)
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)")
    await subscriber.create(source_db, "p", "s", enabled=False, copy_data=False)
    async with written(source_db):
        result = await reseed(target_db.dsn(), "s", delete_extra=True)
        assert result.is_complete
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)


async def test_a_killed_reseed_is_repeated_and_never_skipped(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The command is killed at any time. The new slot is not streamed from before the rows are there."""
    await prepare(source_db, target_db, subscriber)
    await lose_slot(source_db, subscriber)
    await damage(target_db, *DAMAGE)
    command = [sys.executable, "-m", "subscriber", "reseed", "s", "--target", target_db.dsn()]
    chance = random.Random(5)
    killed = 0
    async with written(source_db):
        for _ in range(3):
            if await run_for(command, chance.uniform(0.4, 1.2)):
                killed += 1
                slots = await source_db.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 's'")
                enabled = await target_db.value("SELECT subenabled FROM subscriber.pg_subscription")
                if slots and not enabled:
                    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
                    with anyio.fail_after(20):
                        status = await subscriber.worker("s")
                        while status.get("state") not in ("stopped", "streaming"):
                            await anyio.sleep(0.1)
                            status = await subscriber.worker("s")
                    if status.get("state") == "streaming":  # it was killed after it had stored the position
                        comparison = await verify(target_db.dsn(), "s")
                        assert comparison.is_same, as_json(comparison)
                    else:
                        assert status["error"] == 'the target is behind replication slot "s"'
        assert killed
        result = await reseed(target_db.dsn(), "s")
        assert result.is_complete
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)


async def test_a_second_reseed_waits_for_the_first(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The launcher compares the tables after the end of the command. The slot is not replaced again."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE same (id int PRIMARY KEY, v text)", "CREATE TABLE other (id int)")
    await source_db.execute("INSERT INTO same VALUES (1), (2)", "CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s")
    await subscriber.wait_for_sync(source_db)
    await lose_slot(source_db, subscriber)
    await damage(target_db, "DELETE FROM same WHERE id = 1")
    async with target_db.connection() as other, other.transaction():
        await other.execute("LOCK TABLE same IN ROW EXCLUSIVE MODE")
        with anyio.fail_after(60), anyio.CancelScope() as scope:

            def cancel(progress: ComparisonProgress) -> None:
                if progress.phase.startswith("public.same: waiting for transactions that write"):
                    scope.cancel()

            await reseed(target_db.dsn(), "s", on_progress=cancel)
        assert scope.cancelled_caught
    notices: list[str] = []
    result = await reseed(target_db.dsn(), "s", on_notice=lambda _, message, *__: notices.append(message))
    assert (result.is_complete, notices) == (True, [])
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db, "same")


async def test_reseed_refuses_by_name(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE same (id int PRIMARY KEY, v text)")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", two_phase=True)
    await subscriber.wait_for_sync(source_db)
    async with source_db.connection() as connection:
        await connection.execute("BEGIN; INSERT INTO same VALUES (1); PREPARE TRANSACTION 'reseed_test'")
    await target_db.wait_for("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()", 1)
    with pytest.raises(StatementError, match="are prepared on the target") as refused:
        await reseed(target_db.dsn(), "s")
    assert "ROLLBACK PREPARED" in (refused.value.hint or "")
    await source_db.execute("COMMIT PREPARED 'reseed_test'")
    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await subscriber.wait_for_sync(source_db)
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (slot_name = NONE)")
    with pytest.raises(StatementError, match="has no replication slot") as refused:
        await reseed(target_db.dsn(), "s")
    assert "SET (slot_name = 's')" in (refused.value.hint or "")
    await subscriber.execute("ALTER SUBSCRIPTION s SET (slot_name = 's')")
    assert (await reseed(target_db.dsn(), "s")).is_complete
    with pytest.raises(StatementError, match="does not exist"):
        await reseed(target_db.dsn(), "none")
