"""The processes the demo runs beside its servers: the real command, and pgbench.

Each is in a session of its own, so that Ctrl-C at a terminal reaches the demo alone, which then ends
them in order. Should the demo itself be killed, the servers' watchdog ends whatever left its process
id in a file `*.pid` beside the servers.
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
    """One process, started again at will; what it prints is appended to `log`."""

    def __init__(self, name: str, command: list[str], directory: Path) -> None:
        self.name = name
        self.command = command
        self.log = directory / f"{name}.log"
        self._pid_file = directory / f"{name}.pid"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
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
        """End it as the kernel would: it gets to do nothing about it."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is still there after STOP_TIMEOUT."""
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
        """Wait for its end; the exit status."""
        assert self._process is not None
        await self._ended(self._process)
        return self._process.returncode

    async def _ended(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            await anyio.sleep(POLL)

    def last_lines(self, number: int = 15) -> str:
        """The end of what it printed."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-number:])


def launcher(target_dsn: str, directory: Path) -> Process:
    """`subscriber run`, as a person would start it."""
    command = [sys.executable, "-m", "subscriber", "run", "--target", target_dsn, "--log-format", "postgres"]
    return Process("run", command, directory)


def pgbench(server: Server, seconds: int, rate: int, directory: Path) -> Process:
    """pgbench's own transactions from two clients, `rate` of them a second at most."""
    options = ["--client=2", f"--time={seconds}", f"--rate={rate}", "--no-vacuum", "--username=postgres"]
    where = ["--host=127.0.0.1", f"--port={server.port}", "postgres"]
    return Process("pgbench", [str(server.bin / "pgbench"), *options, *where], directory)


async def execute(target_dsn: str, statement: str) -> None:
    """`subscriber exec`. Raises SubscriberError with what it printed when it fails."""
    command = [sys.executable, "-m", "subscriber", "exec", "--target", target_dsn, statement]
    done = await anyio.run_process(command, check=False, start_new_session=True)
    if done.returncode:
        raise SubscriberError("subscriber exec failed", detail=done.stderr.decode().strip())


async def copy_schema(source: Server, target: Server) -> None:
    """Make the source's tables on the target, empty."""
    dump = await source.program("pg_dump", "--schema-only", "--no-publications")
    await target.program("psql", "-Xq", "-v", "ON_ERROR_STOP=1", stdin=dump)


def transactions_of(pgbench_log: str) -> int:
    """How many transactions pgbench says it has done. Raises ServersError if it does not say."""
    for line in pgbench_log.splitlines():
        if line.startswith("number of transactions actually processed:"):
            return int(line.split(":")[1].split("/")[0])
    raise ServersError("pgbench failed", detail=pgbench_log.strip()[-500:])
