"""`subscriber adopt` and `subscriber hand-back` under kills at random moments: no row is lost or duplicated.

tests/scenarios/test_adopt.py kills them at each step.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from subscriber.demo.processes import Process
from subscriber.demo.servers import Servers
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.scenarios.test_adopt import scene_on

SEED = int(os.environ.get("SUBSCRIBER_SOAK_SEED", random.randrange(10_000)))
SECONDS = float(os.environ.get("SUBSCRIBER_SOAK_SECONDS", "120"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", ["streaming = on", "streaming = parallel, two_phase = true"])
async def test_moves_are_killed_at_random(
    servers: Servers, source_db: Database, processes: Path, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(SEED)
    server = await servers.create("target", SETTINGS)
    await server.start()
    target, counts = Database(server, "postgres"), Counter[str]()
    program = Process("run", [sys.executable, "-m", "subscriber", "run", "--target", target.dsn()], processes)

    async def move(command: str, fault: str = "") -> bool:
        """Run a command, with a fault after a random time. Returns True if the subscription has changed hands."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "subscriber", command, "s", "--target", target.dsn(), stdout=-1, stderr=-1
        )
        if fault:
            await asyncio.sleep(chance.uniform(0.2, 1.2))
        if fault == "command" and process.returncode is None:
            process.kill()
        elif fault == "target":
            await server.kill9()
            await server.start()
        elif fault == "run":
            await program.kill9()
            program.start()
        _, errors = await process.communicate()
        counts["commands"] += 1
        counts["command killed"] += process.returncode == -9
        if fault in ("target", "run"):
            counts[f"{fault} killed"] += 1
        counts["moved"] += process.returncode == 0
        assert process.returncode in (0, 3, -9), errors.decode()
        return process.returncode == 0

    async with scene_on(source_db, target) as scene:
        await scene.create_native(f"WITH ({options})")
        program.start()
        command, following = "adopt", "hand-back"
        try:
            async with scene.writing(), scene.preparing("two_phase" in options):
                async with asyncio.timeout(SECONDS + 60):
                    end = asyncio.get_running_loop().time() + SECONDS
                    while asyncio.get_running_loop().time() < end:
                        if await move(command, chance.choice(["command", "command", "target", "run", ""])):
                            command, following = following, command
            async with asyncio.timeout(60):
                while not await move(command):
                    await asyncio.sleep(0.5)
            await scene.assert_same()
        finally:
            await program.stop()
    with capsys.disabled():
        print(f"\nseed {SEED}, {options}: identical after {scene.written} transactions and {dict(counts)}")
