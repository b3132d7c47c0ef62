"""Table synchronization in one snapshot, beside statements and writers."""

from __future__ import annotations

from collections.abc import Iterator

from subscriber.failpoints import Point
from tests.interleavings.stage import Actor, Scenario, Stage

SYNCHRONIZING = frozenset(
    {
        Point.DATASYNC_STORED,
        Point.SLOT_CREATED,
        Point.COPY_COMMITTED,
        Point.SYNCWAIT,
        Point.CATCHUP,
        Point.CAUGHT_UP,
        Point.SYNCDONE_STORED,
        Point.SLOT_DROPPED,
        Point.READY_STORED,
        Point.RECORDED,
    }
)


async def copied(stage: Stage) -> None:
    """A table without a key that is going to be copied, and another table that is ready."""
    await stage.both("CREATE TABLE t (n int)", "CREATE TABLE other (id int PRIMARY KEY, n int)")
    await stage.source.execute(
        "INSERT INTO t SELECT generate_series(1, 10)",
        "INSERT INTO other VALUES (1, 0)",
        "CREATE PUBLICATION p FOR TABLE other",
    )
    stage.subscriber.start()
    await stage.target.execute("INSERT INTO other VALUES (1, 0)")
    await stage.subscriber.create(stage.source, "p", "s", copy_data=False)
    await stage.source.wait_for_catchup("s")
    await stage.source.execute("ALTER PUBLICATION p ADD TABLE t")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")


async def inserting(stage: Stage) -> None:
    """Add rows to the table that is copied."""
    for number in (11, 12):
        await stage.step(f"insert_{number}")
        await stage.source.execute(f"INSERT INTO t VALUES ({number})")


async def refreshing(stage: Stage) -> None:
    """Remove the table from the subscription, empty it, and add it again."""
    await stage.step("remove")
    await stage.source.execute("ALTER PUBLICATION p DROP TABLE t")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await stage.step("empty")
    await stage.target.execute("TRUNCATE t")
    await stage.source.execute("ALTER PUBLICATION p ADD TABLE t")
    await stage.step("add")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")


async def inserting_behind_a_lock(stage: Stage) -> None:
    """Add rows while the apply worker waits for another table's row."""
    async with stage.target.connection() as holder:
        await stage.step("lock")
        await holder.execute("BEGIN; SELECT FROM other FOR UPDATE")
        await stage.source.execute("UPDATE other SET n = n + 1")
        await stage.source.execute("INSERT INTO t VALUES (11)")
        await stage.step("unlock")
        await holder.execute("ROLLBACK")


async def altering(stage: Stage) -> None:
    """Change an option, which restarts the worker."""
    await stage.step("alter")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s SET (synchronous_commit = 'local')")
    await stage.step("alter_again")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s DISABLE", "ALTER SUBSCRIPTION s ENABLE")


def table_sync() -> Iterator[Scenario]:
    """Table synchronization in one snapshot, with statements and writers."""
    tables = ("t", "other")
    yield Scenario("sync-write", tables, SYNCHRONIZING, copied, {"writer": inserting})
    yield Scenario("sync-alter", tables, SYNCHRONIZING, copied, {"writer": inserting, "statement": altering})
    refreshes: dict[str, Actor] = {"writer": inserting_behind_a_lock, "statement": refreshing}
    points = SYNCHRONIZING - {Point.RECORDED} | {Point.TABLE_REMOVED}
    yield Scenario("sync-refresh", tables, points, copied, refreshes, may_fail=False)
