"""kill -9 of the command at each step: `status` says where it stands, and both ways out of there end well."""

from __future__ import annotations

import json
import signal

import pytest

from subscriber.failpoints import Point
from tests.migration.scene import Command, admits, following, wait_for_writes
from tests.migration.writers import applications, check_nothing_is_lost, rows_of
from tests.plugins.fix_cluster import Database

STEPS = [point for point in Point if point.name.startswith("MIGRATE_")]
PAUSED = STEPS[STEPS.index(Point.MIGRATE_FREEZE) : STEPS.index(Point.MIGRATE_OPEN)]
OPENED = STEPS[STEPS.index(Point.MIGRATE_OPEN) :]
DECISIVE = [(Point.MIGRATE_OPEN, "continue")]
ALL = [(point, end) for point in STEPS for end in ("abort", "continue")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [DECISIVE, pytest.param(ALL, marks=pytest.mark.soak)], ids=["decisive", "all"])
async def test_the_command_is_killed(source_db: Database, target_db: Database, kills: list[tuple[Point, str]]) -> None:
    command = Command(source_db, target_db)
    sides = {"source": source_db, "target": target_db}
    serving, moves = "source", 1
    async with following(source_db, target_db):
        async with applications([source_db, target_db]) as found:
            await wait_for_writes(found, source_db)
            for point, end in kills:
                move = "cutover" if serving == "source" else "back"
                status, output = await command.run(move, point=point)
                assert status == -signal.SIGKILL, output
                admitted = [side for side, database in sides.items() if await admits(database, found[0].role)]
                other = "target" if serving == "source" else "source"
                now = other if point in OPENED else serving
                assert admitted == ([] if point in PAUSED else [now]), point
                status, output = await command.run("status", "--json")
                assert status == (1 if point in PAUSED else 0), output
                said = json.loads(output)
                assert (said["serving"], said["paused"]) == (now, point in PAUSED), point
                if end == "abort" and point not in OPENED and not (point not in PAUSED and serving == "target"):
                    status, output = await command.run("abort")
                else:
                    status, output = await command.run(move)
                    now = other
                assert status == 0, output
                if now != serving:
                    serving, moves = now, moves + 1
                await wait_for_writes(found, sides[serving])
        await check_nothing_is_lost(found, sides[serving])
        assert max(len(application.moves) for application in found) == moves
        await sides[serving].wait_for_catchup("s" if serving == "source" else "s_back")
        assert await rows_of(source_db) == await rows_of(target_db)
