"""kill -9 at random moments: of the command, of `subscriber run`, of either server. A third is in the pause."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import anyio
import pytest

from subscriber.demo.servers import Server, Servers
from tests.migration.scene import Command, admits, following, wait_for_writes
from tests.migration.watcher import watched
from tests.migration.writers import Application, applications, check_nothing_is_lost, rows_of
from tests.plugins.fix_cluster import SETTINGS, Database, fresh_database
from tests.plugins.fix_subscriber import Program

ROUNDS = int(os.environ.get("SUBSCRIBER_KILLS", "20"))
SEED = int(os.environ.get("SUBSCRIBER_SEED", "0")) or random.randrange(1, 10**6)
VICTIMS = ("command", "run on source", "run on target", "source", "target")
LIMITS = ("--max-pause", "15")


class RunningMove:
    """A command that moves applications, as a process. It prints each step that has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.ends: dict[str, float] = {}  # by step: when it has ended
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode())
            self.ends.setdefault(self.lines[-1].partition(" ")[0], monotonic())

    @property
    def is_paused(self) -> bool:
        return "hold" in self.ends and "open" not in self.ends

    async def wait_for_pause(self) -> None:
        """Wait until the fence of the serving server closes, or the command has ended."""
        while "hold" not in self.ends and not self._reader.done():
            await anyio.sleep(0.002)

    async def wait(self) -> str:
        """Wait for the end. Returns the output."""
        with anyio.fail_after(300):
            await self._reader
            await self.process.wait()
        return "".join(self.lines)


@dataclass
class Rounds:
    """Rounds of one kill each: `status` is compared with the servers after it, and the move continues."""

    servers: dict[str, Server]
    sides: dict[str, Database]
    programs: dict[str, Program]
    applications: list[Application]
    choice: random.Random
    served: list[str] = field(default_factory=lambda: ["source"])  # the serving server, after each move
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    usual: float = 6.0  # seconds of the last command that was not disturbed
    pause: float = 0.5  # seconds between the steps hold and open of the last command that has done both
    in_pause: int = 0  # kills in a pause

    def __post_init__(self) -> None:
        self.command = Command(self.sides["source"], self.sides["target"])

    async def run(self, number: int) -> None:
        serving = self.served[-1]
        move, other = ("cutover", "target") if serving == "source" else ("back", "source")
        victim = self.choice.choice(VICTIMS)
        is_aimed, delay = self.choice.random() < 1 / 3, self.choice.uniform(0, 1)
        process = await self.command.start(move, *LIMITS)
        running = RunningMove(process)
        if is_aimed:
            await running.wait_for_pause()
        await anyio.sleep(delay * self.pause if is_aimed else (0.3 + 0.7 * delay) * self.usual)
        in_pause = running.is_paused and process.returncode is None
        self.in_pause += in_pause
        match victim.split():
            case ["command"] if process.returncode is None:
                process.kill()
            case ["run", "on", side]:
                self.programs[side].kill()
            case ["source" | "target" as side]:
                await self.servers[side].kill9()
                await anyio.sleep(self.choice.uniform(0, 3))
                await self.servers[side].start()
        said = await running.wait()
        if "open" in running.ends:
            self.pause = running.ends["open"] - running.ends["hold"]
        ended = {0: "done", -9: "killed"}.get(process.returncode or 0, "failed")
        where = await self.check(said)
        if ended == "done":
            assert where["serving"] == other, said
        way = await self.go_on(where, move, said)
        if way == move:
            self.served.append(other)
        for program in self.programs.values():
            if program.pid is None:
                await program.start("launcher started|waiting as standby")
        await wait_for_writes(self.applications, self.sides[self.served[-1]])
        self.counts[f"{victim}: {ended}, {where['phase']}, then {way}"] += 1
        moment = "in the pause" if in_pause else "outside of the pause"
        print(f"{number}: {move}, {victim} killed {moment}: {ended}, {where['phase']}, then {way}", flush=True)

    async def check(self, said: str) -> dict[str, object]:
        """Compare what `status` says with the server that admits an application."""
        status, output = await self.command.run("status", "--json")
        assert status in (0, 1), output
        where: dict[str, object] = json.loads(output)
        admitted = [side for side, database in self.sides.items() if await admits(database, self.applications[0].role)]
        assert admitted == ([] if where["paused"] else [where["serving"]]), (where, said)
        return where

    async def go_on(self, where: dict[str, object], move: str, said: str) -> str:
        """Run one of the commands that end an interrupted move. Returns its name."""
        can_abort = "abort" in str(where["commands"]) and where["serving"] == self.served[-1]
        way = self.choice.choice(("abort", move)) if can_abort else move
        began = monotonic()
        status, output = await self.command.run(way, *(LIMITS if way == move else ()))
        assert status == 0, (where, said, output)
        if way == move and where["serving"] == self.served[-1]:
            self.usual = monotonic() - began
        return way


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_processes_and_servers_are_killed_at_random(servers: Servers, processes: Path) -> None:
    """After each kill, `status` is right, and `abort` or another attempt ends well."""
    print(f"\nSUBSCRIBER_SEED={SEED} SUBSCRIBER_KILLS={ROUNDS}")
    both = {name: await servers.create(name, SETTINGS) for name in ("source", "target")}
    for server in both.values():
        await server.start()
    async with AsyncExitStack() as stack:
        sides = {name: await stack.enter_async_context(fresh_database(server)) for name, server in both.items()}
        programs = await stack.enter_async_context(following(sides["source"], sides["target"], processes=processes))
        async with (
            applications(list(sides.values()), pause=0.0) as apps,
            watched(sides, apps[0].role, pause=0.004) as watcher,
        ):
            await wait_for_writes(apps, sides["source"])
            rounds = Rounds(both, sides, programs, apps, random.Random(SEED))
            for number in range(ROUNDS):
                await rounds.run(number)
        serving = rounds.served[-1]
        await check_nothing_is_lost(apps, sides[serving])
        gap = watcher.check(rounds.served)
        await sides[serving].wait_for_catchup("s" if serving == "source" else "s_back", timeout=60)
        assert await rows_of(sides["source"]) == await rows_of(sides["target"])
    print(*(f"{count} x {what}" for what, count in sorted(rounds.counts.items())), sep="\n")
    print(
        f"{ROUNDS} kills, {rounds.in_pause} in a pause, {len(rounds.served) - 1} moves;"
        f" {len(watcher.writes)} writes of the watcher, {watcher.refused} refused, at least {gap * 1000:.1f} ms between"
        " the last write on a server and the first one on the other"
    )
