"""Many moves there and back, with figures; servers that are killed; and servers of other versions."""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from time import monotonic

import anyio
import asyncpg
import pytest

from subscriber.catalog.worker_sessions import register_without_place
from subscriber.demo.servers import Server, Servers
from subscriber.errors import SubscriberError
from subscriber.failpoints import Point
from subscriber.migration.hooks import HookCall, HookEvent, MoveHook
from subscriber.migration.results import StepEvent
from tests.migration.scene import Command, admits, following, listen, moving, wait_for_writes
from tests.migration.writers import applications, check_nothing_is_lost, rows_of
from tests.plugins.fix_cluster import SETTINGS, Database, ServerOf, fresh_database

MOVES = int(os.environ.get("SUBSCRIBER_MOVES", "50"))
APPLICATIONS = 9


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("old", "new"), [(18, 18), (13, 18), (15, 19)])
async def test_fifty_moves_lose_nothing(
    publisher: Server, target: Server, server_of: ServerOf, processes: Path, old: int, new: int
) -> None:
    """All but the applications are processes of their own, as outside of tests."""
    pauses: list[float] = []
    servers = publisher if old == 18 else server_of("source", old), target if new == 18 else server_of("target", new)
    async with (
        fresh_database(servers[0]) as source_db,
        fresh_database(servers[1]) as target_db,
        following(source_db, target_db, processes=processes),
    ):
        command = Command(source_db, target_db)
        async with applications([source_db, target_db], APPLICATIONS, pause=0.0) as apps:
            await wait_for_writes(apps, source_db)
            began = monotonic()
            for number in range(MOVES):
                to = source_db if number % 2 else target_db
                status, output = await command.run("back" if number % 2 else "cutover", "--json")
                assert status == 0, output
                (moved,) = [
                    line
                    for line in map(json.loads, re.findall("^{.*", output, re.MULTILINE))
                    if line["event"] == "moved"
                ]
                assert moved["warnings"] == []
                pauses.append(moved["pause"])
                await wait_for_writes(apps, to)
            seconds = monotonic() - began
        serving, slot = (target_db, "s_back") if MOVES % 2 else (source_db, "s")
        await check_nothing_is_lost(apps, serving)
        await serving.wait_for_catchup(slot)
        assert await rows_of(source_db) == await rows_of(target_db)
        assert {len(application.moves) for application in apps} == {MOVES + 1}
    written = sum(len(application.acknowledged) for application in apps)
    print(
        f"\n{old} to {new}: {MOVES} moves, {written} acknowledged transactions, {written / seconds:.0f} a second, none"
        f" lost, none twice, no value of a sequence twice; pause of writes: median {statistics.median(pauses):.3f} s,"
        f" at most {max(pauses):.3f} s"
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("major", [13, 15, 17])
async def test_an_older_source_and_the_way_back(server_of: ServerOf, target_db: Database, major: int) -> None:
    """Publishers before 16 cannot filter changes by origin: the subscription starts in the pause of the way back."""
    async with fresh_database(server_of("source", major)) as source, following(source, target_db):
        async with applications([source, target_db], pause=0.0) as apps:
            await wait_for_writes(apps, source)
            for to in (target_db, source, target_db):
                async with moving(source, target_db) as move:
                    moved = await (move.back() if to is source else move.cutover())
                assert moved.warnings == ()
                await wait_for_writes(apps, to)
        await check_nothing_is_lost(apps, target_db)
        await target_db.wait_for_catchup("s_back")
        assert await rows_of(source) == await rows_of(target_db)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_target_that_filters_nothing(server_of: ServerOf, source_db: Database) -> None:
    """The way back starts in the pause. An interrupted move does not let changes return to the source."""
    async with fresh_database(server_of("target", 15)) as target:
        command = Command(source_db, target)
        async with following(source_db, target):
            async with applications([source_db, target], pause=0.0) as apps:
                await wait_for_writes(apps, source_db)
                for point in (Point.MIGRATE_TURN, Point.MIGRATE_SWITCH, Point.MIGRATE_STOP):
                    status, output = await command.run("cutover", point=point)
                    assert status == -9, output
                    status, output = await command.run("abort")
                    assert status == 0, output
                    await wait_for_writes(apps, source_db)
                for to in (target, source_db, target):
                    async with moving(source_db, target) as move:
                        moved = await (move.back() if to is source_db else move.cutover())
                    assert moved.warnings == ()
                    await wait_for_writes(apps, to)
            await check_nothing_is_lost(apps, target)
            await target.wait_for_catchup("s_back")
            assert await rows_of(source_db) == await rows_of(target)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["abort", "cutover"])
@pytest.mark.parametrize("killed", ["source", "target"])
async def test_a_server_is_killed_during_the_pause(servers: Servers, killed: str, end: str) -> None:
    """The command is killed with the server, so nothing undoes the pause. Both fences outlive the crash."""
    both = {name: await servers.create(name, SETTINGS) for name in ("source", "target")}
    for server in both.values():
        await server.start()
    async with fresh_database(both["source"]) as source, fresh_database(both["target"]) as target:
        command = Command(source, target)
        async with following(source, target), applications([source, target], pause=0.0) as apps:
            await wait_for_writes(apps, source)
            for point in (Point.MIGRATE_QUIET, Point.MIGRATE_SWITCH):
                status, output = await command.run("cutover", point=point)
                assert status == -9, output
                await both[killed].kill9()
                if killed == "target" and end == "abort" and point is Point.MIGRATE_QUIET:
                    status, output = await command.run("abort")
                    assert status == 0, output
                    await wait_for_writes(apps, source)
                    await both[killed].start()
                    continue
                if killed == "target" and point is Point.MIGRATE_SWITCH:
                    status, output = await command.run("abort")
                    assert status == 3, output  # the target may be open
                await both[killed].start()
                for database in (source, target):
                    assert not await admits(database, apps[0].role)
                status, output = await command.run("abort")
                assert status == 0, output
                await wait_for_writes(apps, source)
            if end == "cutover":
                status, output = await command.run("cutover")
                assert status == 0, output
                await wait_for_writes(apps, target)
            serving = target if end == "cutover" else source
        await check_nothing_is_lost(apps, serving)


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_the_old_server_serves_within_a_second_after_an_undo(source_db: Database, target_db: Database) -> None:
    """The target is locked, so the pause reaches its limit. The applications do not wait for the target."""
    delays: list[float] = []
    failed: list[float] = []

    def on_event(event: StepEvent) -> None:
        if event.state == "failed":
            failed.append(monotonic())

    async with following(source_db, target_db), applications([source_db, target_db], pause=0.0) as apps:
        await wait_for_writes(apps, source_db)
        for _ in range(10):
            # Registered sessions are not ended by the fence of the target.
            blocker = await target_db.connect()
            await register_without_place(blocker)

            async def lock(call: HookCall, blocker: asyncpg.Connection[asyncpg.Record] = blocker) -> None:
                await blocker.execute("BEGIN; LOCK TABLE account")

            async def measure() -> None:
                while not failed:
                    await anyio.sleep(0.005)
                before = sum(len(application.acknowledged) for application in apps)
                while sum(len(application.acknowledged) for application in apps) == before:
                    await anyio.sleep(0.005)
                delays.append(monotonic() - failed[0])

            failed.clear()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(measure)
                hooks = (MoveHook(lock, HookEvent.PAUSE),)
                async with moving(source_db, target_db, max_pause=1.0, hooks=hooks) as move:
                    with pytest.raises(SubscriberError, match="the pause has reached its limit of 1 s in step drain"):
                        await listen(move, move.cutover(), on_event)
                await blocker.execute("ROLLBACK")
            await wait_for_writes(apps, source_db)
        await check_nothing_is_lost(apps, source_db)
    print(
        f"\n{len(delays)} undone pauses: a write after {statistics.median(delays):.3f} s, at most {max(delays):.3f} s"
    )
    assert max(delays) < 1
