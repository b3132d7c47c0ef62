"""Repair of rows, and REFRESH TABLE, beside the apply worker."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from subscriber.errors import SubscriberError
from subscriber.failpoints import Point
from subscriber.repair.tables import repair
from tests.interleavings.scenarios.table_sync import SYNCHRONIZING, altering
from tests.interleavings.stage import Actor, Scenario, Stage

REPAIRING = frozenset(
    {
        Point.PAUSE_SETTLED,
        Point.WORKER_HELD,
        Point.ROWS_COMPARED,
        Point.REPAIR_PAUSED,
        Point.REPAIR_READ,
        Point.REPAIR_COMMITTED,
    }
)
ATTEMPTS = 6  # of a repair that meets an error, or a table that is not ready

# On the target, row 1 differs, row 2 is missing, and row 9 is extra.
CHANGES = {
    "rows": ("UPDATE t SET note = 'new' WHERE id IN (1, 2, 3)", "INSERT INTO t VALUES (5, 'new')"),
    "key": ("UPDATE t SET id = 20 WHERE id = 2", "UPDATE t SET id = 2 WHERE id = 3"),
    "delete": ("DELETE FROM t WHERE id IN (1, 2)", "INSERT INTO t VALUES (2, 'new')"),
    "truncate": ("TRUNCATE t", "INSERT INTO t VALUES (2, 'new')"),
}


async def different(stage: Stage) -> None:
    """A table whose rows differ between both sides, and another table."""
    await stage.both(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "CREATE TABLE other (id int PRIMARY KEY, n int); INSERT INTO other VALUES (1, 0)",
        "INSERT INTO t SELECT i, 'old' FROM generate_series(1, 4) i",
    )
    await stage.target.execute(
        "UPDATE t SET note = 'wrong' WHERE id = 1; DELETE FROM t WHERE id = 2; INSERT INTO t VALUES (9, 'extra')"
    )
    await stage.source.execute("CREATE PUBLICATION p FOR TABLE t, other")
    stage.subscriber.start()
    await stage.subscriber.create(stage.source, "p", "s", copy_data=False)
    await stage.source.wait_for_catchup("s")


async def repairing(stage: Stage) -> None:
    """Repair the rows. A repair that ends with an error, or leaves a table out, is repeated."""
    for _ in range(ATTEMPTS):
        await stage.step("repair")
        try:
            result = await repair(stage.target.dsn(), "s", delete_extra=True)
        except SubscriberError:
            continue
        if not any(table.note for table in result.tables) and len(result.tables) == 2 and not result.compare_again:
            return
    raise AssertionError(f"the table is not repaired after {ATTEMPTS} attempts")


async def changing(stage: Stage, changes: tuple[str, ...]) -> None:
    """Change rows that differ, and others."""
    for number, change in enumerate(changes, 1):
        await stage.step(f"change_{number}")
        await stage.source.execute(change)


async def changing_behind_a_lock(stage: Stage, changes: tuple[str, ...]) -> None:
    """Change rows while the apply worker waits for another table's row."""
    async with stage.target.connection() as holder:
        await stage.step("lock")
        await holder.execute("BEGIN; SELECT FROM other FOR UPDATE")
        await stage.source.execute("UPDATE other SET n = n + 1", *changes)
        await stage.step("unlock")
        await holder.execute("ROLLBACK")


async def refreshing(stage: Stage, options: str) -> None:
    """Synchronize the table again."""
    await stage.step("refresh")
    await stage.subscriber.execute(f"ALTER SUBSCRIPTION s REFRESH TABLE t WITH ({options})")


def repairs() -> Iterator[Scenario]:
    """A repair, the apply worker, a writer, and statements that restart workers."""
    tables = ("t", "other")
    for kind, changes in CHANGES.items():
        actors: dict[str, Actor] = {"repair": repairing, "writer": partial(changing, changes=changes)}
        yield Scenario(f"repair-{kind}", tables, REPAIRING, different, actors)
    writer = partial(changing, changes=CHANGES["rows"])
    statements: dict[str, Actor] = {"refresh": partial(refreshing, options="truncate"), "alter": altering}
    for name, statement in statements.items():
        actors = {"repair": repairing, "writer": writer, "statement": statement}
        yield Scenario(f"repair-{name}", tables, REPAIRING, different, actors, may_fail=False)


def resyncs() -> Iterator[Scenario]:
    """REFRESH TABLE, the apply worker, and a writer."""
    tables, compared = ("t", "other"), {Point.ROWS_COMPARED, Point.REPAIR_READ, Point.REPAIR_COMMITTED}
    points = SYNCHRONIZING - {Point.RECORDED} | {Point.TRANSACTION_BEGUN}
    for options in ("truncate", "delete_extra"):
        writers: dict[str, Actor] = {
            "rows": partial(changing, changes=CHANGES["rows"]),
            "truncate": partial(changing, changes=CHANGES["truncate"]),
            "lock": partial(changing_behind_a_lock, changes=CHANGES["delete"]),
        }
        for kind, writer in writers.items():
            actors: dict[str, Actor] = {"statement": partial(refreshing, options=options), "writer": writer}
            where = points | compared if options != "truncate" else points
            yield Scenario(f"resync-{options}-{kind}", tables, frozenset(where), different, actors)
