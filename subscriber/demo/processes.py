"""The processes that the demo runs in addition to its servers: the real command, and pgbench.

Each process has its own session, so that Ctrl-C at a terminal reaches only the demo, which then ends the processes in
order. If the demo itself is killed, the servers' watchdog ends every process that has written its process id to a file
`*.pid` next to the servers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from subscriber.demo.servers import Server, ServersError
from subscriber.errors import SubscriberError

STOP_TIMEOUT = 10.0  # seconds for an orderly end before a process is killed
POLL = 0.05  # seconds


class Process:
    """A process that can be restarted. Its output is appended to `log`."""

    def __init__(self, name: str, command: list[str], directory: Path) -> None:
        self.name = name
        self.command = command
        self.log = directory / f"{name}.log"
        self._pid_file = directory / f"{name}.pid"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id; None if the process does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self._pid_file.write_text(f"{self._process.pid}\n")

    async def kill9(self) -> None:
        """Kill the process with SIGKILL, which it cannot handle."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL to processes that have not ended after STOP_TIMEOUT."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with anyio.CancelScope(shield=True):
            if self.pid is not None:
                self._process.send_signal(number)
            with anyio.move_on_after(STOP_TIMEOUT):
                await self._ended(self._process)
            if self.pid is not None:
                self._process.kill()
                await self._ended(self._process)
        self._pid_file.unlink(missing_ok=True)

    async def wait(self) -> int:
        """Wait for the end of the process. Returns its exit status."""
        assert self._process is not None
        await self._ended(self._process)
        return self._process.returncode

    async def _ended(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            await anyio.sleep(POLL)

    def lines(self) -> list[str]:
        """Return the lines of the output."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def last_lines(self, number: int = 15) -> str:
        """Return the last lines of the output."""
        return "\n".join(self.lines()[-number:])


def launcher(target_dsn: str, directory: Path, name: str = "run") -> Process:
    """Return a process of `subscriber run`, with the command line that a user would type."""
    command = [sys.executable, "-m", "subscriber", "run", "--target", target_dsn, "--log-format", "postgres"]
    return Process(name, command, directory)


def pgbench(server: Server, seconds: int, rate: int, directory: Path) -> Process:
    """Return a process of pgbench with its own transactions: two clients, at most `rate` transactions per second."""
    options = ["--client=2", f"--time={seconds}", f"--rate={rate}", "--no-vacuum", "--username=postgres"]
    where = ["--host=127.0.0.1", f"--port={server.port}", "postgres"]
    return Process("pgbench", [str(server.bin / "pgbench"), *options, *where], directory)


async def execute(target_dsn: str, statement: str) -> None:
    """Run `subscriber exec`. Raises SubscriberError with its output if it fails."""
    command = [sys.executable, "-m", "subscriber", "exec", "--target", target_dsn, statement]
    done = await anyio.run_process(command, check=False, start_new_session=True)
    if done.returncode:
        raise SubscriberError("subscriber exec failed", detail=done.stderr.decode().strip())


async def copy_schema(source: Server, target: Server) -> None:
    """Create the source's tables on the target, without rows."""
    dump = await source.program("pg_dump", "--schema-only", "--no-publications")
    await target.program("psql", "-Xq", "-v", "ON_ERROR_STOP=1", stdin=dump)


def transactions_of(pgbench_log: str) -> int:
    """Return the number of transactions in pgbench's output. Raises ServersError if it has none."""
    for line in pgbench_log.splitlines():
        if line.startswith("number of transactions actually processed:"):
            return int(line.split(":")[1].split("/")[0])
    raise ServersError("pgbench failed", detail=pgbench_log.strip()[-500:])
