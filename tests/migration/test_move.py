"""cutover, back, abort and finish, with writers that check each acknowledged transaction."""

from __future__ import annotations

import anyio
import asyncpg
import pytest

from subscriber.errors import StatementError, SubscriberError
from subscriber.migration.hooks import HookCall, HookEvent, MoveHook
from subscriber.migration.migration import Migration
from subscriber.migration.plan import Side
from subscriber.migration.results import MoveResult
from tests.migration.scene import following, moving, wait_for_writes
from tests.migration.writers import applications, check_nothing_is_lost, rows_of
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import running_subscriber

pytestmark = pytest.mark.usefixtures("with_schema")


@pytest.mark.timeout(180)
async def test_applications_move_there_and_back_and_there(source_db: Database, target_db: Database) -> None:
    async with following(source_db, target_db):
        async with applications([source_db, target_db]) as apps:
            await wait_for_writes(apps, source_db)
            async with moving(source_db, target_db) as move:
                events: list[tuple[str, str]] = []
                async with move.running(move.cutover()) as running:
                    async for event in running:
                        events.append((event.step, event.state))
                        if events[-1] == ("freeze", "done"):
                            running.cancel()
                assert events[-1] == ("undo", "done")
                assert running.canceled
                with pytest.raises(RuntimeError, match="has no result"):
                    running.result  # noqa: B018
                assert (await move.standing()).serving is Side.SOURCE
                async with move.running(move.cutover()) as running:
                    assert (await anext(running)).step == "guard"
                assert running.canceled
            for to in (target_db, source_db, target_db):
                async with moving(source_db, target_db) as move:
                    moved = await (move.cutover() if to is target_db else move.back())
                assert moved.warnings == ()
                assert moved.pause is not None
                await wait_for_writes(apps, to)
        assert {tuple(application.moves) for application in apps} == {
            (source_db.name, target_db.name, source_db.name, target_db.name)
        }
        async with moving(source_db, target_db) as move:
            assert await move.cutover() == MoveResult(Side.TARGET, None, None)
            status = await move.status()
            assert [server.fence for server in status.servers] == ["closed", "open"]
            assert [(server.launcher, server.standby) for server in status.servers] == [(True, False)] * 2
            async with running_subscriber(source_db):
                with anyio.fail_after(20):
                    while not (await move.status()).servers[0].standby:
                        await anyio.sleep(0.05)
            with pytest.raises(StatementError, match="already write to the target"):
                await move.abort()
            await target_db.wait_for_catchup("s_back")
            assert await rows_of(source_db) == await rows_of(target_db)
            await finish_after_an_interruption(move)
        assert await source_db.rows("SELECT pubname FROM pg_publication") == [("p",)]
        assert await target_db.rows("SELECT pubname FROM pg_publication") == []
        await check_nothing_is_lost(apps, target_db)
        assert await target_db.value("SELECT nextval('rare')") == 1000
        for database in (source_db, target_db):
            slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
            assert await database.value(slots) == 0
        fence = "SELECT count(*) FROM pg_trigger WHERE tgname = 'subscriber_fence'"
        assert await target_db.value(fence) == 0
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError, match="the database has another server"):
            await source_db.execute("TRUNCATE part_2")


async def finish_after_an_interruption(move: Migration) -> None:
    """End a move whose first `finish` is canceled when a subscription is dropped."""
    async with move.running(move.finish()) as running:
        async for event in running:
            if (event.step, event.state) == ("drop s", "done"):
                break
    assert (await move.status()).commands == ("finish",)
    with pytest.raises(StatementError, match="the move ends, and its way back may be gone"):
        await move.back()
    await move.finish()
    assert (await move.status()).commands == ()


@pytest.mark.timeout(120)
async def test_an_undo_does_not_open_a_server_that_another_command_has_left(
    source_db: Database, target_db: Database
) -> None:
    """Both sessions of the first command are lost, and a second command moves the applications before the undo."""

    async def lose_both_sessions(call: HookCall) -> None:
        if call.event is HookEvent.PAUSE:
            for database in (source_db, target_db):
                await database.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name = 'subscriber migrate'"
                )
            async with moving(source_db, target_db) as second:
                await second.cutover()

    async with following(source_db, target_db):
        async with moving(source_db, target_db, hooks=(MoveHook(lose_both_sessions),)) as first:
            with pytest.raises(SubscriberError, match="source may still be fenced: applications already write to"):
                await first.cutover()
        async with moving(source_db, target_db) as move:
            assert [server.fence for server in (await move.status()).servers] == ["closed", "open"]
