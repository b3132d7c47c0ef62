"""kill -9 of the command at each step: `status` says where it stands, and both ways out of there end well."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from subscriber.demo.servers import embedded_bin
from subscriber.failpoints import Point
from subscriber.migration import plan
from tests.migration.scene import Command, admits, following, wait_for_writes
from tests.migration.test_start import INDEXES
from tests.migration.watcher import PAUSE, watched
from tests.migration.writers import SCHEMA, applications, check_nothing_is_lost, rows_of
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import running_subscriber

pytestmark = pytest.mark.usefixtures("with_schema")


def points(names: Sequence[str]) -> list[Point]:
    return [Point[f"MIGRATE_{name.upper()}"] for name in names]


STEPS = points([step.name for step in plan.STEPS])
PAUSED = STEPS[STEPS.index(Point.MIGRATE_FREEZE) : STEPS.index(Point.MIGRATE_OPEN)]
OPENED = STEPS[STEPS.index(Point.MIGRATE_OPEN) :]
DECISIVE = [(Point.MIGRATE_OPEN, "continue")]
ALL = [(point, end) for point in STEPS for end in ("abort", "continue")]


async def said(command: Command) -> dict[str, Any]:
    """Return what `status` says, whose exit status agrees."""
    status, output = await command.run("status", "--json")
    document: dict[str, Any] = json.loads(output)
    assert status == (1 if document["paused"] else 0), output
    return document


async def succeed(command: Command, name: str, *options: str) -> None:
    status, output = await command.run(name, *options)
    assert status == 0, output


async def die(command: Command, name: str, *options: str, point: Point | None = None, times: int = 1) -> None:
    status, output = await command.run(name, *options, point=point, times=times)
    assert status == -signal.SIGKILL, output


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [DECISIVE, pytest.param(ALL, marks=pytest.mark.soak)], ids=["decisive", "all"])
async def test_the_command_is_killed(source_db: Database, target_db: Database, kills: list[tuple[Point, str]]) -> None:
    command = Command(source_db, target_db)
    sides = {"source": source_db, "target": target_db}
    serving, served = "source", ["source"]
    pause = PAUSE if kills == DECISIVE else 0.004
    async with following(source_db, target_db):
        async with (
            applications([source_db, target_db]) as apps,
            watched(sides, apps[0].role, pause=pause) as watcher,
        ):
            await wait_for_writes(apps, source_db)
            for point, end in kills:
                move = "cutover" if serving == "source" else "back"
                await die(command, move, point=point)
                admitted = [side for side, database in sides.items() if await admits(database, apps[0].role)]
                other = "target" if serving == "source" else "source"
                now = other if point in OPENED else serving
                assert admitted == ([] if point in PAUSED else [now]), point
                where = await said(command)
                assert (where["serving"], where["paused"]) == (now, point in PAUSED), point
                if end == "abort" and point not in OPENED and not (point not in PAUSED and serving == "target"):
                    await succeed(command, "abort")
                else:
                    await succeed(command, move)
                    now = other
                if now != serving:
                    serving = now
                    served.append(now)
                await wait_for_writes(apps, sides[serving])
        await check_nothing_is_lost(apps, sides[serving])
        assert max(len(application.moves) for application in apps) == len(served)
        gap = watcher.check(served)
        await sides[serving].wait_for_catchup("s" if serving == "source" else "s_back")
        assert await rows_of(source_db) == await rows_of(target_db)
    print(
        f"\n{len(kills)} kills, {len(served) - 1} moves; {len(watcher.writes)} writes of the watcher, {watcher.refused}"
        f" refused; at least {gap * 1000:.1f} ms between the last write on a server and the first on the other"
    )


# A command that kills `subscriber`, which is the parent of the hook's shell, the first time that the event happens.
KILL = "echo $SUBSCRIBER_MIGRATE_EVENT >> {log}; test -e {log}.{event} || {{ touch {log}.{event}; kill -9 $PPID; }}"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["abort", "continue"])
async def test_a_hook_dies_with_its_command(source_db: Database, target_db: Database, tmp_path: Path, end: str) -> None:
    """The hooks that are due are called by the next command: to hold applications, to lead them, and to resume."""
    command = Command(source_db, target_db)
    sides = {"source": source_db, "target": target_db}
    log = tmp_path / "hooks"
    record = f"echo $SUBSCRIBER_MIGRATE_EVENT >> {log}"

    def killing(event: str) -> list[str]:
        return ["--hook", f"{event}={KILL.format(log=log, event=event)}"]

    async def hooks_of(work: Any) -> list[str]:
        log.write_text("")
        await work
        return log.read_text().split()

    async with following(source_db, target_db):
        async with (
            applications([source_db, target_db], pause=0.0) as apps,
            watched(sides, apps[0].role, pause=0.004) as watcher,
        ):
            await wait_for_writes(apps, source_db)
            assert await hooks_of(die(command, "cutover", *killing("pause"))) == ["pause"]
            where = await said(command)
            assert (where["serving"], where["paused"]) == ("source", False)
            if end == "abort":
                await die(command, "abort", *killing("resume"))
                assert not (await said(command))["paused"]
                assert await hooks_of(succeed(command, "abort", "--hook", record)) == ["resume"]
                assert await hooks_of(succeed(command, "abort", "--hook", record)) == []
                for event in ("pause", "resume"):
                    (tmp_path / f"hooks.{event}").unlink()
            for event in ("switch", "resume"):
                if event == "resume":
                    await succeed(command, "back")
                    await wait_for_writes(apps, source_db)
                expected = ["switch"] if event == "switch" else ["resume"]
                assert await hooks_of(die(command, "cutover", *killing(event))) == expected
                where = await said(command)
                assert (where["serving"], where["paused"]) == ("target", False)
                called = await hooks_of(succeed(command, "cutover", "--hook", record))
                assert called == ["switch", "resume"]
                assert await hooks_of(succeed(command, "cutover", "--hook", record)) == []
                await wait_for_writes(apps, target_db)
        await check_nothing_is_lost(apps, target_db)
        watcher.check(["source", "target", "source", "target"])


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_an_undo_is_killed(source_db: Database, target_db: Database) -> None:
    """`abort` dies at its steps, after a command that has died in the pause. Each way out of there ends well."""
    command = Command(source_db, target_db)
    sides = {"source": source_db, "target": target_db}
    async with following(source_db, target_db):
        async with (
            applications([source_db, target_db], pause=0.0) as apps,
            watched(sides, apps[0].role, pause=0.004) as watcher,
        ):
            for point in points(["undo", "abort"]):
                for end in ("abort", "cutover"):
                    await wait_for_writes(apps, source_db)
                    await die(command, "cutover", point=Point.MIGRATE_STOP)
                    assert (await said(command))["paused"]
                    await die(command, "abort", point=point)
                    where = await said(command)
                    assert (where["serving"], where["paused"]) == ("source", False)
                    await wait_for_writes(apps, source_db)
                    await succeed(command, end)
                    if end == "cutover":
                        await wait_for_writes(apps, target_db)
                        await succeed(command, "back")
            await wait_for_writes(apps, source_db)
        await check_nothing_is_lost(apps, source_db)
        watcher.check(["source", "target"] * 2 + ["source"])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("release", [False, True])
async def test_the_end_is_killed(source_db: Database, target_db: Database, moves: int, release: bool) -> None:
    """`finish` dies at each of its steps. The next one ends the move, on both servers."""
    command = Command(source_db, target_db)
    sides = {"source": source_db, "target": target_db}
    options = ["--release"] if release else []
    kills = [(Point.MIGRATE_DROP, 1), (Point.MIGRATE_DROP, 2)]
    kills += [(Point.MIGRATE_RELEASE, 1)] if release else []
    async with following(source_db, target_db):
        async with applications([source_db, target_db], pause=0.0) as apps:
            await wait_for_writes(apps, source_db)
            await succeed(command, "cutover")
            if not moves:
                await succeed(command, "back")
            serving = "target" if moves else "source"
            await wait_for_writes(apps, sides[serving])
        for point, times in kills:
            await die(command, "finish", *options, point=point, times=times)
            where = await said(command)
            assert (where["serving"], where["paused"]) == (serving, False)
            assert (where["phase"], where["commands"]) == ("finishing", ["finish"])
        await die(command, "finish", *options, point=Point.MIGRATE_END)
        assert (await said(command))["phase"] == "finished"
        await succeed(command, "finish", *options)
        await check_nothing_is_lost(apps, sides[serving])
        for side, database in sides.items():
            slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
            assert await database.value(slots) == 0
            is_open = await database.value("SELECT to_regprocedure('subscriber.fence()') IS NULL")
            assert is_open == (release or side == serving)
            publications = await database.rows("SELECT pubname FROM pg_publication")
            assert publications == ([("p",)] if side == "source" else [])


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_start_is_killed_at_each_step(source_db: Database, target_db: Database) -> None:
    """`status` names the step that is left, `cutover` refuses a target that lacks indexes, and `start` continues."""
    if not (embedded_bin() / "pg_dump").exists():
        pytest.skip("the servers have no pg_dump beside them")
    await source_db.execute(*SCHEMA, *INDEXES)
    command = Command(source_db, target_db)
    programs = ["--programs", str(embedded_bin())]
    names = [step.name for step in plan.START]
    async with running_subscriber(target_db):
        async with applications([source_db], pause=0.0) as apps:
            await wait_for_writes(apps, source_db)
            for name, point in zip(names, points(names), strict=True):
                await die(command, "start", *programs, point=point)
                where = await said(command)
                assert (where["start_step"], where["serving"], where["paused"]) == (name, "source", False)
                assert where["commands"] == ["start", "abort"]
                if names.index(name) >= names.index("subscribe"):
                    status, output = await command.run("cutover")
                    assert status == 3, output
                    assert f"start has not ended: its step {name} is left" in output
            await succeed(command, "abort")
            await wait_for_writes(apps, source_db)
            await succeed(command, "start", *programs)
            where = await said(command)
            assert (where["start_step"], where["commands"]) == (None, ["cutover", "abort"])
            await wait_for_writes(apps, source_db)
        await source_db.wait_for_catchup("s")
    assert await rows_of(source_db) == await rows_of(target_db)
    indexes = "SELECT count(*) FROM pg_index WHERE indrelid >= 16384"
    assert await source_db.value(indexes) == await target_db.value(indexes)
