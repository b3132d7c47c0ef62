"""The conditions before a pause, and their waivers."""

from __future__ import annotations

import re

import anyio
import pytest

from subscriber.catalog.worker_sessions import register_without_place
from subscriber.errors import StatementError, SubscriberError
from subscriber.migration.gates import check_waivers, is_waived
from subscriber.migration.hooks import HookCall, HookEvent, MoveHook
from subscriber.migration.plan import Side
from subscriber.migration.report.collect import collect_report
from subscriber.migration.report.document import of_kind
from subscriber.migration.results import StepEvent
from tests.migration.scene import following, listen, moving
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions

pytestmark = pytest.mark.usefixtures("with_schema")


def test_only_conditions_that_lose_nothing_unsaid_can_be_waived() -> None:
    check_waivers(["long_transaction", "prepared_transaction:one"])
    for name in ("table", "subscription:s", "sequence", "long_transactions"):
        with pytest.raises(StatementError, match=f'there is no condition "{name}" to waive'):
            check_waivers([name])
    assert is_waived("filter", "public.a", ["filter"])
    assert is_waived("filter", "public.a", ["filter:public.a"])
    assert not is_waived("filter", "public.b", ["filter:public.a", "verify"])


async def check_that_a_lag_is_waited_for(source_db: Database, target_db: Database) -> None:
    """One measurement fills the window. It is repeated if it exceeds the limit."""
    events: list[StepEvent] = []
    blocker = await target_db.connect()
    await register_without_place(blocker)  # the fence of the target does not end it
    await blocker.execute("BEGIN; LOCK TABLE account")
    await source_db.execute("UPDATE account SET items = items")

    async def release() -> None:
        while not events:
            await anyio.sleep(0.01)
        await anyio.sleep(1.5)
        await blocker.execute("ROLLBACK")

    def on_event(event: StepEvent) -> None:
        if event.step == "gates":
            events.append(event)

    async with anyio.create_task_group() as tasks, moving(source_db, target_db, max_lag=1.0) as move:
        tasks.start_soon(release)
        await listen(move, move.rehearse(), on_event)
    assert events[-1].detail["lag"] < 1.0


@pytest.mark.timeout(120)
async def test_waived_conditions_are_named_in_the_report(source_db: Database, target_db: Database) -> None:
    async with following(source_db, target_db):
        async with moving(source_db, target_db, verified_within=600.0) as move:
            # Changes of the target are not replicated to the source before the way back is armed.
            await target_db.execute("SET session_replication_role = replica; DELETE FROM account WHERE application = 9")
            with pytest.raises(SubscriberError, match=r"tables differ between both servers: public\.account"):
                await move.verify()
            await target_db.execute("SET session_replication_role = replica; INSERT INTO account VALUES (9, 0)")
            with pytest.raises(StatementError) as refused:
                await move.cutover()
            assert "were different: tables differ" in str(refused.value.detail)
            assert refused.value.hint == "subscriber migrate verify s"
            await move.verify()
        await check_that_a_lag_is_waited_for(source_db, target_db)
        # Its writes are rolled back, so nothing is lost although it stays on the source.
        await source_db.execute("BEGIN; INSERT INTO item DEFAULT VALUES; PREPARE TRANSACTION 'waiting'")
        try:
            async with moving(
                source_db, target_db, verified_within=600.0, waive=("prepared_transaction:other",)
            ) as move:
                with pytest.raises(StatementError, match="applications cannot move yet"):
                    await move.cutover()
            async with moving(
                source_db, target_db, verified_within=600.0, waive=("prepared_transaction:waiting",)
            ) as move:
                assert (await move.cutover()).serving is Side.TARGET
        finally:
            await source_db.execute("ROLLBACK PREPARED 'waiting'")
        report = await collect_report(source_db.dsn(), target_db.dsn(), "s", checksums=False)
        assert [entry["name"] for entry in of_kind(report, "waived")] == ["prepared_transaction:waiting"]


POISON = "INSERT INTO account VALUES (900, 5)"
NEW_TABLE = "CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1)"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (POISON, "Transactions in quarantine: 1"),
        (NEW_TABLE, r'Published tables that subscription "s" does not have: public\.late'),
    ],
)
async def test_a_condition_that_ends_after_the_gates_stops_the_move(
    source_db: Database, target_db: Database, change: str, reason: str
) -> None:
    """Sessions of applications still write between the gates and the pause."""
    async with following(source_db, target_db):
        await Subscriptions(target_db).execute("ALTER SUBSCRIPTION s SET (streaming = on, on_error = 'quarantine')")
        await target_db.execute("SET session_replication_role = replica; INSERT INTO account VALUES (900, 0)")

        async def write(_: HookCall) -> None:
            await source_db.execute(change)

        async with moving(source_db, target_db, hooks=(MoveHook(write, HookEvent.PAUSE),)) as move:
            with pytest.raises(SubscriberError, match="applications cannot move yet") as refused:
                await move.cutover()
        detail = str(refused.value.detail)
        assert re.search(reason, detail)
        assert "Applications can write to the source again." in detail
        await source_db.execute("UPDATE account SET items = items WHERE application = 1")
