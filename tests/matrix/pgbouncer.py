"""A real PgBouncer: the installed one, or Debian's package, downloaded by apt and run without installation.

python -m tests.matrix.pgbouncer            ensures that it is available, and prints its path
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from subscriber.demo.servers import Account
from tests.cache import cache_directory, fill
from tests.matrix.programs import NotAvailable

_LIBRARIES = ("libc-ares", "libcares", "libevent-")  # which the machine may lack; all others are everywhere


def program() -> tuple[str, dict[str, str]]:
    """Return the command and its environment. Raises NotAvailable."""
    if (which := shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")) is not None:
        return which, {}
    try:
        root = fill(cache_directory("pgbouncer") / "root", _fetch)
    except NotAvailable as reason:
        raise NotAvailable(f"{reason} (Debian: apt-get install pgbouncer)") from None
    libraries = ":".join(str(path) for path in (root / "usr/lib").glob("*-linux-gnu"))
    return str(root / "usr/sbin/pgbouncer"), {"LD_LIBRARY_PATH": libraries}


def version() -> tuple[int, int]:
    """Major and minor version of program()."""
    command, environment = program()
    environment = {**os.environ, **environment}
    done = subprocess.run([command, "--version"], check=True, capture_output=True, text=True, env=environment)
    major, minor = done.stdout.split()[1].split(".")[:2]
    return int(major), int(minor)


def _fetch(root: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NotAvailable("there is no apt-get to fetch PgBouncer with")
    depends = _run(["apt-cache", "depends", "--important", "pgbouncer"], root)
    names = [line.split()[-1] for line in depends.splitlines() if line.split()[0].endswith("Depends:")]
    wanted = ["pgbouncer", *(name for name in names if name.startswith(_LIBRARIES))]
    _run(["apt-get", "download", *wanted], root)
    for package in list(root.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(root)], root)
        package.unlink()


def _run(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=directory)
    if done.returncode != 0:
        raise NotAvailable(f"PgBouncer could not be fetched: {done.stderr.strip()[-300:]}")
    return done.stdout


@asynccontextmanager
async def pgbouncer(
    directory: Path, server_port: int, *, pool_mode: str = "session", more: str = ""
) -> AsyncIterator[int]:
    """Run a PgBouncer in front of a server of this machine during the block. Returns its port.

    Args:
        directory: a new directory for its configuration; a file *.pid in it has its process ID.
        pool_mode: session, transaction or statement.
        more: further lines of its configuration.
    """
    command, environment = program()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    configuration = directory / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n* = host=127.0.0.1 port={server_port} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {pool_mode}\n{more}\n"
    )
    configuration.chmod(0o644)
    for parent in (directory, directory.parent):
        parent.chmod(0o755)
    with (directory / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [command, str(configuration)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            **Account.current().keywords,
        )
    (directory / "pgbouncer.pid").write_text(f"{process.pid}\n")
    try:
        with anyio.fail_after(10):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    if process.poll() is not None:
                        raise NotAvailable((directory / "pgbouncer.log").read_text()[-500:]) from None
                    await anyio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(10)
        (directory / "pgbouncer.pid").unlink()


if __name__ == "__main__":
    try:
        print(program()[0])
    except NotAvailable as reason:
        sys.exit(str(reason))
