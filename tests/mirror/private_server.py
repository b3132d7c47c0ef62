"""A private server of MariaDB from the installed programs, for one process of a run."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subscriber.demo.object_store import free_ports
from subscriber.demo.servers import Account, watched_directory
from tests.passwords import MARK

PASSWORD = f"{MARK}-mariadb"
MISSING = "MariaDB is not installed (Debian: apt-get install mariadb-server-core mariadb-client-core)"
START_TIMEOUT = 60.0  # seconds
# With these, no commit waits for the disk. The tests kill no server.
_OPTIONS = (
    "--skip-name-resolve",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=96M",
)


def find_program(name: str) -> str:
    """Return the path of an installed program; empty if there is none."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") or ""


def is_installed() -> bool:
    """Return True if a server can be started."""
    return all(map(find_program, ("mariadbd", "mariadb-install-db", "my_print_defaults")))


@contextmanager
def private_server() -> Iterator[str]:
    """Run a server during the block. Yields its URL, of an account that may create databases."""
    account = Account.current()
    with watched_directory() as place:
        data, log, sql = place / "data", place / "log", place / "accounts.sql"
        data.mkdir()
        # One statement in a line.
        sql.write_text(
            f"CREATE USER admin@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            "GRANT ALL ON *.* TO admin@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        for path in (place, data, sql):
            os.chown(path, account.uid, account.gid)
        run: dict[str, Any] = {"cwd": "/", **account.keywords}
        install = [find_program("mariadb-install-db"), "--no-defaults", f"--datadir={data}", "--skip-test-db"]
        # Accounts log in with passwords; a superuser of the machine has none here.
        subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True, **run)
        (port,) = free_ports(1)
        command = [find_program("mariadbd"), "--no-defaults", f"--datadir={data}", f"--socket={place}/socket"]
        command += [
            f"--port={port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            f"--init-file={sql}",
            *_OPTIONS,
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **run)
        (place / "server.pid").write_text(f"{process.pid}\n")
        try:
            _wait(port, process, log)
            yield f"mysql+aiomysql://admin:{PASSWORD}@127.0.0.1:{port}/mysql"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server accepts connections, which it does after the file of accounts."""
    until = time.monotonic() + START_TIMEOUT
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"MariaDB has not started: {log.read_text()[-2000:]}") from None
            time.sleep(0.05)
        else:
            return
