"""The tutorials, run unchanged on separate servers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import Database
from tools.docs.documents import ROOT, blocks

TUTORIAL = Path("docs/tutorial.md")
EMBEDDING = Path("docs/embedding.md")
SECONDS = 100


def bash(script: str, folder: Path, programs: Path, *, seconds: float = SECONDS, **more: object) -> str:
    """Run a script to its end, then kill the processes that it started. Returns its stdout."""
    environment = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "LC_ALL": "C",
    }
    options = {"cwd": folder, "env": environment, "text": True, "start_new_session": True, **more}
    command = ["bash", "-euo", "pipefail", "-c", script]
    log = folder / "stderr"
    with log.open("a") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
        (folder / "bash.pid").write_text(f"{process.pid}\n")
        try:
            out: str = process.communicate(timeout=seconds)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = "".join(file.read_text() for file in [log, *folder.glob("*run.log")] if file.exists())
    assert process.returncode == 0, f"{script}\nends with {process.returncode}:\n{out}\n{said[-5000:]}"
    return out


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_the_first_subscription(publisher: Server, processes: Path) -> None:
    """Its servers run as the account that servers can run as, and all else as ourselves."""
    ports = {"54321": free_port(), "54322": free_port()}
    install, servers, *rest, stop = [
        re.sub("5432[12]", lambda port: ports[port[0]], block) for block in blocks(TUTORIAL, "sh")
    ]
    assert "make venv" in install
    account = publisher.account
    home = processes / "servers"  # the account's own
    home.mkdir()
    os.chown(home, account.uid, account.gid)
    for server in ("publisher", "target"):  # ended with the others, however we end
        (processes / f"{server}.pid").symlink_to(home / server / "postmaster.pid")
    bash(servers, home, publisher.bin, **account.keywords)
    try:
        out = bash("".join(rest), processes, publisher.bin)
    finally:
        bash(stop, home, publisher.bin, **account.keywords)
    (promised,) = blocks(TUTORIAL, "text")
    assert promised in out
    assert "0 errors, 0 warnings" in out
    assert re.search(r"tables +1 ready", out)


async def test_a_subscription_in_a_program(
    source_db: Database, target_db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY, name text)")
    await source_db.execute("INSERT INTO city VALUES (1, 'Ulm')", "CREATE PUBLICATION atlas FOR TABLE city")
    program, *others = blocks(EMBEDDING, "python")
    (lifespan,) = [block for block in others if "FastAPI" in block]
    names: dict[str, Any] = {}
    exec(program.partition("asyncio.run(")[0], names)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(names["main"], source_db.dsn(), target_db.dsn())
        with anyio.fail_after(30):
            while "all tables are copied" not in capsys.readouterr().out:
                await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert await target_db.rows("SELECT name FROM city") == [("Ulm",)]

    dsns = {"SOURCE_DSN": source_db.dsn(), "TARGET_DSN": target_db.dsn()}
    given = {**names, **dsns, "FastAPI": lambda lifespan: lifespan}
    exec(lifespan, given)
    async with given["application"](None):
        await source_db.execute("INSERT INTO city VALUES (2, 'Brno')")
        await target_db.wait_for("SELECT count(*) FROM city", 2)


@pytest.mark.parametrize("page", [TUTORIAL, Path("docs/cutover.md"), Path("docs/moving.md")])
def test_every_shell_block_of_a_tutorial_is_run(page: Path) -> None:
    assert (ROOT / page).read_text().count("```sh") == len(blocks(page, "sh"))
