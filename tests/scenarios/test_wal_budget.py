"""A subscription over its wal_budget is given up: slot dropped, disabled, and repaired by `subscriber reseed` alone."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from subscriber import failpoints
from subscriber.catalog.connection import CatalogConnection
from subscriber.errors import StatementError, SubscriberError
from subscriber.failpoints import Point
from subscriber.repair import reseed
from subscriber.settings import Settings
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.model import SubscriptionStatus, assess
from subscriber.status.slot_wal import SlotLimits
from tests.cli.test_status_report import NOW, PUBLISHER, SUBSCRIPTION, look
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, Subscriber

SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
GIVEN_UP = "SELECT subgaveup IS NOT NULL AND NOT subenabled FROM subscriber.subscription"
ROWS = "SELECT coalesce(sum(hashtext(t::text)), 0) FROM t"


@pytest.fixture
def settings() -> Settings:
    return replace(QUICK, wal_budget_interval=0.1)


async def prepare(source: Database, target: Database, subscriber: Subscriber) -> None:
    for database in (source, target):
        await database.execute("CREATE TABLE t (a int PRIMARY KEY, v text)")
    await source.execute(
        "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 100) g", "CREATE PUBLICATION p FOR TABLE t"
    )
    await subscriber.create(source, "p", wal_budget="'4MB'")
    await subscriber.wait_for_ready(source)


async def write(source: Database) -> None:
    """Write more WAL than the budget, and change rows."""
    await source.execute(
        "UPDATE t SET v = 'y' WHERE a < 50",
        "DELETE FROM t WHERE a > 90",
        "INSERT INTO t VALUES (1001, 'new')",
        "SELECT pg_logical_emit_message(false, 'test', repeat('x', 6000000))",
    )


async def status_of(target: Database) -> SubscriptionStatus:
    async with CatalogConnection.open(target.dsn(), "test") as catalog:
        (status,) = await assess_all(await read_catalog(catalog))
    return status


@pytest.mark.parametrize("cause", ["disabled", "failing", "copied"])
async def test_a_subscription_over_its_budget_is_given_up_and_reseeded(
    source_db: Database, target_db: Database, subscriber: Subscriber, cause: str
) -> None:
    await prepare(source_db, target_db, subscriber)
    if cause == "failing":
        await target_db.execute("INSERT INTO t VALUES (1001, 'in the way')")
    else:
        await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        await source_db.wait_for(f"{SLOTS} AND active", 0)
    if cause == "copied":  # a table whose copy has ended, and that has not caught up: its own slot is lost too
        await target_db.execute("UPDATE subscriber.subscription_rel SET srsubstate = 'f'")
    await write(source_db)
    await subscriber.log.wait_for('subscription "s" has been given up')
    await source_db.wait_for(SLOTS, 0)
    assert await target_db.value(GIVEN_UP) is True

    status = await status_of(target_db)
    (problem,) = status.problems
    assert problem.message.startswith('given up: replication slot "s" kept ')
    assert problem.message.endswith("of WAL on the publisher, more than the wal_budget 4MB")
    assert problem.command == "subscriber reseed s"
    assert (status.error or "?") in problem.message

    if cause == "disabled":
        # Neither ENABLE alone nor a slot made by hand continues it silently.
        await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        report = await subscriber.wait_for_state("stopped")
        assert json.loads(report["error_remedy"])["command"] == "subscriber reseed s"
        await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        await source_db.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await subscriber.wait_for_state("stopped")
        assert await target_db.value("SELECT count(*) FROM t WHERE a = 1001") == 0

    result = await reseed(target_db.dsn(), "s", delete_extra=True)
    assert result.is_complete
    await source_db.execute("INSERT INTO t VALUES (1002, 'later')")
    await target_db.wait_for("SELECT count(*) FROM t WHERE a = 1002", 1)
    assert await target_db.value(ROWS) == await source_db.value(ROWS)
    assert (await status_of(target_db)).problems == ()


async def test_a_launcher_that_is_killed_between_mark_and_drop(
    source_db: Database, target_db: Database, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    await prepare(source_db, target_db, subscriber)
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await source_db.wait_for(f"{SLOTS} AND active", 0)
    reached = anyio.Event()

    def fail() -> None:
        reached.set()
        raise SubscriberError("killed")

    monkeypatch.setitem(failpoints.armed, Point.GAVE_UP, fail)
    await write(source_db)
    with anyio.fail_after(20):
        await reached.wait()
    await target_db.wait_for(GIVEN_UP, True)
    assert await source_db.value(SLOTS) == 1
    assert [problem.kind for problem in (await status_of(target_db)).problems] == ["given up"]
    monkeypatch.delitem(failpoints.armed, Point.GAVE_UP)
    await source_db.wait_for(SLOTS, 0)


async def test_a_budget_that_cannot_be_enforced_is_reported_and_nothing_is_given_up(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, subscriber)
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await source_db.wait_for(f"{SLOTS} AND active", 0)
    # Another server answers at the address.
    await target_db.execute("UPDATE subscriber.subscription SET subsystemid = '1'")
    await write(source_db)
    await subscriber.log.wait_for('wal_budget of subscription "s" cannot be enforced now')
    assert await target_db.value(GIVEN_UP) is False
    # The status has the alarm, with a statement that works.
    (problem,) = (await status_of(target_db)).problems
    assert (problem.kind, problem.hint) == (
        "wal",
        "Remove the cause of the lag. Or raise the budget: ALTER SUBSCRIPTION \"s\" SET (wal_budget = '8MB');",
    )
    await subscriber.execute("ALTER SUBSCRIPTION s SET (wal_budget = '8MB')")
    await target_db.execute("UPDATE subscriber.subscription SET subsystemid = NULL")
    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await source_db.wait_for_catchup("s")
    assert await target_db.value(ROWS) == await source_db.value(ROWS)
    for wrong in ("200", "-1GB", "much", "1 PB", ""):
        with pytest.raises(StatementError, match=r"invalid value for parameter"):
            await subscriber.execute(f"ALTER SUBSCRIPTION s SET (wal_budget = '{wrong}')")
    await subscriber.execute("ALTER SUBSCRIPTION s SET (wal_budget = 0)")


def test_a_slot_without_a_connection_is_a_problem_in_time() -> None:
    disabled = replace(SUBSCRIPTION, enabled=False)

    def problems(idle: float) -> list[str]:
        limits = SlotLimits(idle_timeout=3600.0, inactive_since=datetime.now(UTC) - timedelta(seconds=idle))
        publisher = replace(PUBLISHER, now=datetime.now(UTC), limits=limits)
        snapshot = replace(look(), subscriptions=[disabled])
        return [problem.message for problem in assess(disabled, snapshot, publisher).problems]

    assert problems(1700) == []
    (message,) = problems(2400)
    assert message == (
        "the slot has no connection, and idle_replication_slot_timeout of the publisher invalidates it in 20 min"
    )
    lost = replace(PUBLISHER, now=NOW, wal_status="lost", limits=SlotLimits(invalidation_reason="idle_timeout"))
    (problem,) = assess(disabled, replace(look(), subscriptions=[disabled]), lost).problems
    assert problem.message.endswith("has been invalidated on the publisher: idle_timeout")
