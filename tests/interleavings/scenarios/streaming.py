"""Streamed transactions in parallel workers, that are rolled back as a whole or in part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from subscriber.failpoints import Point
from tests.interleavings.stage import Actor, Scenario, Stage

STREAMING = frozenset(
    {
        Point.SPOOL_CUT,
        Point.LEADER_SYNCED,
        Point.PARALLEL_WOKEN,
        Point.PARALLEL_ROLLED_BACK,
        Point.PARALLEL_DONE,
    }
)
STEPS = {
    "savepoint": (
        "BEGIN; INSERT INTO t VALUES (3, 0); SAVEPOINT a",
        "INSERT INTO log VALUES (3), (4); UPDATE t SET n = n + 1 WHERE id = 1",
        "ROLLBACK TO a; INSERT INTO log VALUES (5)",
        "COMMIT",
    ),
    "rollback": (
        "BEGIN; UPDATE t SET n = n + 1; INSERT INTO log VALUES (6)",
        "SAVEPOINT b; INSERT INTO log VALUES (7)",
        "ROLLBACK",
    ),
    "commit": (
        "BEGIN; DELETE FROM log WHERE n = 1",
        "INSERT INTO log VALUES (8)",
        "COMMIT",
    ),
}


async def streamed(stage: Stage) -> None:
    """Tables with and without a key, and a publisher that streams each change."""
    await stage.both("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 0), (2, 0)")
    await stage.both(
        "CREATE TABLE log (n int)", "ALTER TABLE log REPLICA IDENTITY FULL", "INSERT INTO log VALUES (1), (1)"
    )
    await stage.source.execute("CREATE PUBLICATION p FOR TABLE t, log")
    await stage.source.stream_everything()
    stage.subscriber.start()
    await stage.subscriber.create(stage.source, "p", "s", copy_data=False, streaming="parallel")
    await stage.source.wait_for_catchup("s")


async def writing(stage: Stage, name: str) -> None:
    """Run a transaction in steps."""
    async with stage.source.connection() as connection:
        for number, statements in enumerate(STEPS[name], 1):
            await stage.step(f"statement_{number}")
            await connection.execute(statements)
            # Walsenders read flushed records only.
            await stage.source.execute("SELECT pg_logical_emit_message(false, 'explorer', '', true)")


async def writing_small(stage: Stage) -> None:
    """Commit a transaction that is not streamed, because another session is open."""
    await stage.step("small")
    await stage.source.execute("INSERT INTO log VALUES (2)")


def streaming() -> Iterator[Scenario]:
    """Parallel workers, and transactions of one or two sessions of the publisher."""
    for names in (("savepoint",), ("rollback", "commit"), ("savepoint", "rollback"), ("savepoint", "commit")):
        actors: dict[str, Actor] = {f"writer_{name}": partial(writing, name=name) for name in names}
        if len(names) == 1:
            actors["small"] = writing_small
        yield Scenario(f"streaming-{'-'.join(names)}", ("t", "log"), STREAMING, streamed, actors)
