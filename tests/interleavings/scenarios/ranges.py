"""Copies by ranges beside the apply worker, the builder of indexes, and each kind of change."""

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
FILL = "INSERT INTO t SELECT i, 'old' FROM generate_series(1, 40) i"
# Changes of the first and of the last range.
CHANGES = {
    "insert": ("INSERT INTO t VALUES (0, 'new')", "INSERT INTO t VALUES (1000, 'new')"),
    "update": ("UPDATE t SET note = 'new' WHERE id IN (1, 40)",),
    "key": ("UPDATE t SET id = 1000 WHERE id = 1", "UPDATE t SET id = 0 WHERE id = 40"),
    "delete": ("DELETE FROM t WHERE id IN (1, 40)",),
    "truncate": ("TRUNCATE t", "INSERT INTO t VALUES (2, 'new'), (39, 'new')"),
}


async def divided(stage: Stage) -> None:
    """A table of two ranges, without indexes on the target, and another table that is ready."""
    await stage.source.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        FILL,
        "CREATE TABLE other (id int PRIMARY KEY, n int); INSERT INTO other VALUES (1, 0)",
        "CREATE PUBLICATION p FOR TABLE other",
    )
    await stage.target.execute(
        "CREATE TABLE t (id int, note text)",
        "CREATE TABLE other (id int PRIMARY KEY, n int); INSERT INTO other VALUES (1, 0)",
    )
    stage.subscriber.start()
    options = {"copy_engine": "ranges", "copy_indexes": "after", "copy_data": False}
    await stage.subscriber.create(stage.source, "p", "s", **options)
    await stage.source.wait_for_catchup("s")
    await added(stage)


async def known(stage: Stage) -> None:
    """Two tables that the apply worker has changed. One of them is copied again, by ranges.

    The worker decides the next change of a table without a query of the target, which would wait for a lock.
    """
    await stage.both(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "CREATE TABLE other (id int PRIMARY KEY, n int); INSERT INTO other VALUES (1, 0)",
    )
    await stage.source.execute("CREATE PUBLICATION p FOR TABLE t, other")
    stage.subscriber.start()
    await stage.subscriber.create(stage.source, "p", "s", copy_engine="ranges", copy_data=False)
    await stage.source.execute("INSERT INTO t VALUES (0, 'removed')", "DELETE FROM t")
    await stage.source.wait_for_catchup("s")
    await stage.source.execute("ALTER PUBLICATION p DROP TABLE t")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await stage.source.execute(FILL)
    await added(stage)


async def added(stage: Stage) -> None:
    """Begin to copy the table."""
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
    for kind, changes in CHANGES.items():
        actors: dict[str, Actor] = {"writer": partial(changing, changes=changes)}
        yield Scenario(f"ranges-{kind}", ("t", "other"), COPYING, divided, actors, settings=RANGES)
    actors = {"writer": emptying_behind_a_lock}
    points = COPYING - {Point.INDEX_BUILT, Point.LAST_INDEX_BUILT}
    yield Scenario("ranges-truncate-behind-lock", ("t", "other"), points, known, actors, settings=RANGES)
