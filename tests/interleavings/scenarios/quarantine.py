"""Quarantine: transactions that are parked, retried, edited or discarded, beside later ones that depend on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from subscriber.errors import StatementError
from subscriber.failpoints import Point
from tests.interleavings.stage import Actor, Scenario, Stage, ready

PARKING = frozenset(
    {
        Point.QUARANTINE_READ,
        Point.TRANSACTION_EXAMINED,
        Point.RETRY_CHOSEN,
        Point.COMMIT_READY,
        Point.RETRIED,
    }
)
PARKED = "SELECT finish_lsn::text FROM subscriber.quarantine ORDER BY finish_lsn"


async def poisoned(stage: Stage) -> None:
    """A table whose constraint on the target refuses a value, and a log that has a row of each transaction."""
    await stage.both(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t VALUES (1, 0), (2, 0)",
        "CREATE TABLE log (tag text)",
    )
    await stage.target.execute("ALTER TABLE t ADD CONSTRAINT poison CHECK (n <> 13)")
    await stage.source.execute("CREATE PUBLICATION p FOR TABLE t, log")
    stage.subscriber.start()
    await stage.subscriber.create(stage.source, "p", "s", copy_data=False, on_error="quarantine")
    await stage.source.wait_for_catchup("s")
    await stage.source.execute(_transaction("refused", "UPDATE t SET n = 13 WHERE id = 1"))
    await stage.target.wait_for("SELECT count(*) FROM subscriber.quarantine", 1)
    await stage.source.wait_for_catchup("s")


def _transaction(tag: str, change: str) -> str:
    return f"BEGIN; INSERT INTO log VALUES ('{tag}'); {change}; COMMIT"


async def depending(stage: Stage) -> None:
    """Change the row of the parked transaction, another row, and the first row again."""
    for tag, change in (
        ("dependent", "UPDATE t SET n = 14 WHERE id = 1"),
        ("other", "UPDATE t SET n = 1 WHERE id = 2"),
        ("later", "DELETE FROM t WHERE id = 1"),
    ):
        await stage.step(tag)
        await stage.source.execute(_transaction(tag, change))


async def curing(stage: Stage) -> None:
    """Remove the cause, and retry."""
    await stage.step("retry_in_vain")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s QUARANTINE RETRY")
    await stage.step("cure")
    await stage.target.execute("ALTER TABLE t DROP CONSTRAINT IF EXISTS poison")
    await stage.step("retry")
    await stage.subscriber.execute("ALTER SUBSCRIPTION s QUARANTINE RETRY")


async def altering(stage: Stage, action: str) -> None:
    """Discard or edit the first transaction, unless the worker has applied it or is retrying it."""
    await stage.step(action)
    lsn = (await stage.target.value(PARKED + " LIMIT 1")) or "0/1"
    options = f"lsn = '{lsn}'" + (", change = 2, column = 'n', value = '12'" if action == "edit" else "")
    try:
        await stage.subscriber.execute(f"ALTER SUBSCRIPTION s QUARANTINE {action.upper()} ({options})")
    except StatementError:
        return


async def discarding(stage: Stage) -> None:
    """Discard the first parked transaction."""
    await altering(stage, "discard")


async def editing(stage: Stage) -> None:
    """Edit the first parked transaction, so that the constraint admits it."""
    await altering(stage, "edit")


async def emptied(stage: Stage) -> None:
    """Retry until the quarantine is empty."""
    await stage.target.execute("ALTER TABLE t DROP CONSTRAINT IF EXISTS poison")
    await ready(stage)
    for _ in range(5):
        if not await stage.target.rows(PARKED):
            return
        await stage.subscriber.execute("ALTER SUBSCRIPTION s QUARANTINE RETRY")
        await stage.target.wait_for("SELECT count(*) FROM subscriber.quarantine WHERE retry", 0)
    raise AssertionError("transactions stay in quarantine")


async def repeated(stage: Stage) -> Sequence[object]:
    """Return transactions that are applied twice, or that are missing and were not discarded."""
    there = [tag for (tag,) in await stage.target.rows("SELECT tag FROM log")]
    sent = [tag for (tag,) in await stage.source.rows("SELECT tag FROM log")]
    missing = [tag for tag in sent if tag not in there]
    return [tag for tag in set(there) if there.count(tag) > 1] + (missing if len(missing) > 1 else [])


def quarantine() -> Iterator[Scenario]:
    """A parked transaction, later ones that depend on it, and a retry, a DISCARD or an EDIT."""
    for name, statement in {"retry": None, "discard": discarding, "edit": editing}.items():
        actors: dict[str, Actor] = {"cure": curing, "writer": depending}
        if statement is not None:
            actors["statement"] = statement
        tables = ("t",) if name == "discard" else ("t", "log")
        yield Scenario(
            f"quarantine-{name}",
            tables,
            PARKING,
            poisoned,
            actors,
            may_fail=statement is None,
            check=repeated,
            finish=emptied,
        )
