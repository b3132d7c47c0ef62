"""The scenarios of the explorer: the states that one task loads and another one changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from subscriber.failpoints import Point
from tests.interleavings.stage import SETTINGS, Actor, Scenario, Stage

COPYING = frozenset(
    {
        Point.SETTLED,
        Point.RANGES_READ,
        Point.SNAPSHOT_TAKEN,
        Point.COPY_COMMITTED,
        Point.INDEX_BUILT,
        Point.LAST_INDEX_BUILT,
        Point.SYNCDONE_STORED,
        Point.CHANGE_DELAYED,
        Point.READY_STORED,
    }
)
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

# Changes of the first and of the last range.
CHANGES = {
    "insert": ("INSERT INTO t VALUES (0, 'new')", "INSERT INTO t VALUES (1000, 'new')"),
    "update": ("UPDATE t SET note = 'new' WHERE id IN (1, 40)",),
    "key": ("UPDATE t SET id = 1000 WHERE id = 1", "UPDATE t SET id = 0 WHERE id = 40"),
    "delete": ("DELETE FROM t WHERE id IN (1, 40)",),
    "truncate": ("TRUNCATE t", "INSERT INTO t VALUES (2, 'new'), (39, 'new')"),
}


async def divided(stage: Stage, *, is_indexed: bool) -> None:
    """A table of two ranges, with or without indexes on the target, and another table that is ready."""
    await stage.source.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t SELECT i, 'old' FROM generate_series(1, 40) i",
        "CREATE TABLE other (id int PRIMARY KEY, n int); INSERT INTO other VALUES (1, 0)",
        "CREATE PUBLICATION p FOR TABLE other",
    )
    key = "PRIMARY KEY" if is_indexed else ""
    await stage.target.execute(
        f"CREATE TABLE t (id int {key}, note text); CREATE TABLE other (id int PRIMARY KEY, n int)"
    )
    stage.subscriber.start()
    options = {"copy_engine": "ranges", "copy_data": False} | ({} if is_indexed else {"copy_indexes": "after"})
    await stage.target.execute("INSERT INTO other VALUES (1, 0)")
    await stage.subscriber.create(stage.source, "p", "s", **options)
    await stage.source.wait_for_catchup("s")
    await stage.source.execute("ALTER PUBLICATION p ADD TABLE t")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")


async def changing(stage: Stage, changes: tuple[str, ...]) -> None:
    """Change rows of both ranges, each in a transaction."""
    for number, change in enumerate(changes, 1):
        await stage.step(f"change_{number}")
        await stage.source.execute(change)


async def emptying_behind_a_lock(stage: Stage) -> None:
    """The apply worker waits for another table's row when the transaction that empties the table arrives."""
    async with stage.target.connection() as holder:
        await stage.step("lock")
        await holder.execute("BEGIN; SELECT FROM other FOR UPDATE")
        await stage.source.execute("UPDATE other SET n = n + 1")
        await stage.step("truncate")
        await stage.source.execute("BEGIN; TRUNCATE t; INSERT INTO t VALUES (2, 'new'), (39, 'new'); COMMIT")
        await stage.step("unlock")
        await holder.execute("ROLLBACK")


RANGES = replace(SETTINGS, range_rows=20, range_duration=0.02, range_wait_limit=2.0, max_sync_workers=1)


def ranges() -> Iterator[Scenario]:
    """Two ranges, the apply worker, the builder of indexes, and each kind of change."""
    prepare = partial(divided, is_indexed=False)
    for kind, changes in CHANGES.items():
        actors: dict[str, Actor] = {"writer": partial(changing, changes=changes)}
        yield Scenario(f"ranges-{kind}", ("t", "other"), COPYING, prepare, actors, settings=RANGES)
    actors, prepare = {"writer": emptying_behind_a_lock}, partial(divided, is_indexed=True)
    points = COPYING - {Point.INDEX_BUILT, Point.LAST_INDEX_BUILT}
    yield Scenario("ranges-truncate-behind-lock", ("t", "other"), points, prepare, actors, settings=RANGES)


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


SCENARIOS = {scenario.name: scenario for scenario in (*ranges(), *table_sync())}
