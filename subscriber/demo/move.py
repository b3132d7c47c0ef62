"""`subscriber demo --migrate`: move a database between two temporary servers, and back, while applications write.

    applications ──▶ old server            new server, empty
                        │  subscriber migrate start, verify, rehearse
                        ├───────────────────▶ follows the old one
                        │  subscriber migrate cutover
                        ◀───────────────────┤ has the applications

The commands are those that a user types, as processes. `back` follows, and `cutover` once more. The demo
ends with a proof: each order that a server has acknowledged is there once.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import anyio

from subscriber import formatting
from subscriber.connection.connect import connect
from subscriber.demo import processes
from subscriber.demo.demo import DIFFERENT, start_servers
from subscriber.demo.servers import Server, Servers, temporary_servers
from subscriber.demo.shop import APPLICATIONS, MOVE, ROLE, SCHEMA, Proof, Shop, prove, timeline
from subscriber.demo.view import View, open_view
from subscriber.errors import SubscriberError

STATIONS = 3  # times that the applications write undisturbed: after each move
LAG_WINDOW = 1.0  # seconds; the command waits for 30 by default
READ_INTERVAL = 0.1  # seconds between two readings of the output of a command
LATER = 0.8  # seconds after a move, for the timeline
NAMES = ("old", "new")


class MoveDemo:
    """One run of the demo."""

    def __init__(self, old: Server, new: Server, view: View, servers: Servers, seconds: int) -> None:
        self.old, self.new, self.view = old, new, view
        self.seconds = seconds / STATIONS
        self.directory = servers.directory
        self.shop = Shop([old.dsn(user=ROLE), new.dsn(user=ROLE)])
        self.launchers = [
            processes.launcher(server.dsn(), servers.directory, f"run-{name}")
            for name, server in zip(NAMES, (old, new), strict=True)
        ]
        self.pauses: list[float] = []
        self.report = Path(tempfile.mkstemp(prefix="subscriber-move-", suffix=".html")[1])
        self._commands = 0

    async def run(self, *, finish: bool) -> Proof:
        """Move there, back, and there again. Returns the proof that nothing is lost."""
        for launcher in self.launchers:
            launcher.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.shop.run)
            await self.shop.wait_for_writes(0)
            self.view.event(f"{APPLICATIONS} applications write to the old server")
            await self._migrate("start", "--programs", str(self.old.bin))
            await self._command("verify", MOVE, "--target", self.new.dsn())
            await self._migrate("rehearse", "--lag-window", f"{LAG_WINDOW:g}")
            for command, server in (("cutover", 1), ("back", 0), ("cutover", 1)):
                await self._move(command, server)
                await anyio.sleep(self.seconds)
            self.shop.stopped = True
        await self._migrate("report", "--output", str(self.report))
        if finish:
            await self._migrate("finish")
        return await prove(self.shop, self.new.dsn())

    async def stop(self) -> None:
        for launcher in self.launchers:
            await launcher.stop()

    async def _move(self, command: str, server: int) -> None:
        await self._migrate(command, "--lag-window", f"{LAG_WINDOW:g}", "--max-pause", "30")
        await self.shop.wait_for_writes(server)
        await anyio.sleep(LATER)
        last, first = self.shop.pause()
        self.pauses.append(first - last)
        said = f"no application could write for {formatting.in_seconds(first - last)}"
        self.view.event(f"{said}; orders in 3 s:", style="bold green")
        for line in timeline(self.shop, NAMES, around=(first + last) / 2):
            self.view.event(f"  {line}")

    async def _migrate(self, command: str, *options: str) -> None:
        servers = ("--source", self.old.dsn(), "--target", self.new.dsn())
        subject = () if command == "preflight" else (MOVE,)
        await self._command("migrate", command, *subject, *servers, *options)

    async def _command(self, *arguments: str) -> None:
        """Run a command and show each line of its output."""
        addresses = {self.old.dsn(): "OLD", self.new.dsn(): "NEW", str(self.old.bin): "DIRECTORY"}
        self.view.event(f"subscriber {' '.join(addresses.get(word, word) for word in arguments)}", style="bold")
        self._commands += 1
        command = [sys.executable, "-m", "subscriber", *arguments]
        process = processes.Process(f"command-{self._commands}", command, self.directory)
        process.start()
        shown = 0
        try:
            ended = False
            while not ended:
                ended = process.pid is None
                lines = process.lines() if ended else process.lines()[:-1]  # the last one may be incomplete
                for line in lines[shown:]:
                    self.view.event(f"  {line}")
                shown = max(shown, len(lines))
                self.view.progress(self._written())
                await anyio.sleep(0 if ended else READ_INTERVAL)
            if await process.wait():
                raise SubscriberError(
                    f"subscriber {arguments[0]} has failed",
                    detail="\n".join([*process.lines(), *(launcher.last_lines() for launcher in self.launchers)]),
                )
        finally:
            await process.stop()

    def _written(self) -> str:
        counts = [sum(order.server == server for order in self.shop.acknowledged) for server in range(len(NAMES))]
        return "orders: " + ", ".join(
            f"{count:,} on the {name} server" for count, name in zip(counts, NAMES, strict=True)
        )


async def run_move_demo(*, seconds: int, scale: int, keep: bool) -> int:
    """Run the demo and print its result. Returns DIFFERENT if an acknowledged order is not there once."""
    async with temporary_servers() as servers:
        with open_view() as view:
            old, new = await start_servers(servers, view, NAMES)
            await _prepare(old, scale, view)
            demo = MoveDemo(old, new, view, servers, seconds)
            try:
                proof = await demo.run(finish=not keep)
            except BaseException:
                await demo.stop()
                demo.report.unlink(missing_ok=True)
                raise
        try:
            _print_result(demo, proof)
            if keep:
                await _keep(demo)
        finally:
            await demo.stop()
        return 0 if proof.is_whole else DIFFERENT


async def _prepare(old: Server, scale: int, view: View) -> None:
    await old.program("pgbench", "--initialize", "--quiet", f"--scale={scale}")
    connection = await connect(old.dsn(), application_name="subscriber demo")
    try:
        await connection.execute(f"CREATE ROLE {ROLE} LOGIN")
        await connection.execute(SCHEMA)
        size = await connection.fetchval("SELECT pg_database_size(current_database())")
    finally:
        connection.terminate()
    view.event(f"a shop of {formatting.in_bytes(size)} on the old server; the new one is empty")


def _print_result(demo: MoveDemo, proof: Proof) -> None:
    print()
    moves = f"{len(demo.pauses)} moves"
    if proof.is_whole:
        print(f"{moves}: {formatting.count(proof.acknowledged, 'acknowledged order')}, none lost, none twice")
    else:
        print(
            f"WRONG after {moves}: of {formatting.count(proof.acknowledged, 'acknowledged order')},"
            f" {proof.lost} lost, {proof.twice} twice; {proof.repeated} numbers given twice"
        )
    print(f"  pause of writes: {', '.join(formatting.in_seconds(pause) for pause in demo.pauses)}")
    print(f"  {formatting.count(demo.shop.refused, 'attempt')} refused meanwhile, and repeated on the other server")
    print(f"  report: {demo.report}")


async def _keep(demo: MoveDemo) -> None:
    """Print the addresses, and wait for an interrupt."""
    servers = f"--source {demo.old.dsn()} --target {demo.new.dsn()}"
    print(
        f"\nThe servers run until Ctrl-C (or: kill {os.getpid()}).\nTry:\n"
        f"  subscriber migrate status {MOVE} {servers}\n"
        f"  subscriber migrate back {MOVE} {servers}",
        flush=True,
    )
    await anyio.sleep_forever()
