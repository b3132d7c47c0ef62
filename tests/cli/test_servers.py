from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import subscriber.demo.servers as module
from subscriber.demo.servers import Servers, ServersError, embedded_bin, temporary_servers
from subscriber.demo.servers import _free_port as free_port
from tests.plugins.fix_cluster import Database
from tests.processes import opened, runs


async def test_a_server_keeps_port_settings_and_rows_over_a_crash(servers: Servers) -> None:
    server = await servers.create("one")
    await server.start(work_mem="8MB")
    port = server.port
    await server.program("psql", "-c", "CREATE TABLE t AS SELECT generate_series(1, 10) AS a")
    await server.kill9()
    assert server.pid is None
    await server.start()
    shown = await server.program("psql", "-Atc", "SELECT count(*), current_setting('work_mem') FROM t")
    assert (server.port, shown) == (port, "10|8MB\n")


async def test_another_port_is_taken_when_the_first_is_lost(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await servers.create("one")
    with socket.socket() as winner:
        winner.bind(("127.0.0.1", 0))
        winner.listen()
        lost = winner.getsockname()[1]
        ports = [lost]
        monkeypatch.setattr(module, "_free_port", lambda: ports.pop() if ports else free_port())
        await server.start()
        assert server.port != lost
    monkeypatch.undo()
    broken = await servers.create("two", {"work_mem": "nonsense"})
    with pytest.raises(ServersError, match="did not start"):  # not four times
        await broken.start()
    assert broken.log.read_text().count("work_mem") == 1


def segments() -> set[str]:
    """Return the numbers of the System V shared memory segments in the kernel."""
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


@pytest.mark.parametrize("killed", [False, True])
async def test_nothing_is_left_behind(killed: bool) -> None:
    async with temporary_servers() as servers:
        server = await servers.create("one")
        await server.start()
        pid = server.pid
        assert pid is not None
        shared = (server.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
        assert shared in segments()
        assert await server.program("psql", "-Atc", "SHOW dynamic_shared_memory_type") == "mmap\n"
        if killed:
            await server.kill9()
    assert not servers.directory.exists()
    assert shared not in segments()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_nothing_is_left_behind_by_a_killed_process() -> None:
    script = (
        "import anyio, subprocess\n"
        "from subscriber.demo.servers import temporary_servers\n"
        "async def main():\n"
        "    async with temporary_servers() as servers:\n"
        "        await (await servers.create('one')).start()\n"
        "        (servers.directory / 'more').mkdir()\n"
        "        beside = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "        (servers.directory / 'more' / 'run.pid').write_text(str(beside.pid))\n"
        "        print(servers.directory, flush=True)\n"
        "        await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    async with opened([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        directory = Path((await process.stdout.receive()).decode().strip())
        assert (directory / "one" / "data").exists()
        beside = int((directory / "more" / "run.pid").read_text())
        assert runs(beside)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    with anyio.fail_after(20):
        while directory.exists() or runs(beside):
            await anyio.sleep(0.05)


async def test_a_program_in_a_watched_directory_ends_with_its_parent() -> None:
    script = (
        "import subprocess, time\n"
        "from subscriber.demo.servers import watched_directory\n"
        "with watched_directory() as directory:\n"
        "    program = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "    (directory / 'program.pid').write_text(str(program.pid))\n"
        "    print(directory, flush=True)\n"
        "    time.sleep(600)\n"
    )
    async with opened([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        directory = Path((await process.stdout.receive()).decode().strip())
        program = int((directory / "program.pid").read_text())
        assert runs(program)
        process.send_signal(signal.SIGTERM)  # which Python does not handle
        await process.wait()
    with anyio.fail_after(20):
        while directory.exists() or runs(program):
            await anyio.sleep(0.05)


async def test_an_unusable_setting_says_what_the_server_said(servers: Servers) -> None:
    server = await servers.create("one")
    with pytest.raises(ServersError, match=r'unrecognized configuration parameter "no_such_thing"'):
        await server.start(no_such_thing="1")


async def test_databases_are_fresh_and_logical(source_db: Database, target_db: Database) -> None:
    assert await source_db.value("SHOW wal_level") == "logical"
    assert await source_db.rows("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace") == []
    await source_db.execute("CREATE TABLE t (a int)", "INSERT INTO t VALUES (1), (2)")
    await source_db.value("SELECT slot_name FROM pg_create_logical_replication_slot($1, 'pgoutput')", source_db.name)
    await source_db.wait_for("SELECT count(*) FROM t", 2)
    assert source_db.server.port != target_db.server.port


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs servers as somebody else")
async def test_programs_that_the_servers_account_cannot_reach_are_copied(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    wheel = embedded_bin().parent.parent
    for part in (wheel, wheel.with_name(f"{wheel.name}.libs")):
        shutil.copytree(part, closed / part.name, symlinks=True)
    async with temporary_servers(closed / wheel.name / "pginstall" / "bin") as servers:
        server = await servers.create("one")
        await server.start()
        assert await server.program("psql", "-Atc", "SELECT 1") == "1\n"
        assert closed not in server.bin.parents
