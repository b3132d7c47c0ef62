"""Hooks: commands, services and functions; PgBouncer, whose clients see no error; and the limit of the pause."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import asyncpg
import pytest

from subscriber.errors import SubscriberError
from subscriber.migration.hooks import HookCall, HookEvent, MoveHook, parse_hook, run_hooks
from subscriber.migration.pgbouncer import _change_entry, pgbouncer_hook, with_server
from tests.matrix import pgbouncer as bouncer
from tests.matrix.programs import NotAvailable
from tests.migration.scene import following, moving, wait_for_writes
from tests.migration.writers import WORK, applications, check_nothing_is_lost
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")

CALL = HookCall(HookEvent.SWITCH, "s", "cutover", "target", "new.example", 5433, "shop")


async def test_a_shell_command_gets_the_call(tmp_path: Path) -> None:
    hook = parse_hook(f"switch=cat > {tmp_path}/in; echo $SUBSCRIBER_MIGRATE_HOST > {tmp_path}/host")
    other = parse_hook("pause=false")
    assert await run_hooks([other, hook], CALL) == 1
    assert json.loads((tmp_path / "in").read_text())["serving"] == "target"
    assert (tmp_path / "host").read_text() == "new.example\n"
    with pytest.raises(SubscriberError, match="the hook for switch has failed: 'echo no >&2; exit 3'") as caught:
        await run_hooks([parse_hook("echo no >&2; exit 3")], CALL)
    assert caught.value.detail == "Exit status 3. no"


async def test_a_service_gets_the_call() -> None:
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        received.append(head.split()[0] + b" " + await reader.readexactly(length))
        status = b"200 OK" if len(received) == 1 else b"500 Broken"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        hook = parse_hook(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/moves?a=b")
        await run_hooks([hook], CALL)
        with pytest.raises(SubscriberError, match="Broken"):
            await run_hooks([hook], CALL)
    assert received[0].startswith(b"POST {")
    assert json.loads(received[0][5:])["port"] == 5433


def test_an_entry_of_pgbouncer_gets_the_new_server() -> None:
    entry = "shop = host=old port=5432 pool_size='5' \r\n"
    text = f"[databases]\n; shop = host=x\nother = host=a\n{entry}[users]\nshop = a=b\n"
    changed = text.replace("host=old port=5432 pool_size='5' ", "host=new.example port=5433 pool_size='5' dbname=shop")
    assert with_server(text, "shop", "new.example", 5433, "shop") == changed
    with pytest.raises(SubscriberError, match='no entry "missing"'):
        with_server(text, "missing", "h", 1, "d")


@pytest.mark.timeout(180)
async def test_a_pause_that_is_too_long_is_undone(source_db: Database, target_db: Database) -> None:
    """The target's worker waits for a lock that is taken when the pause begins."""
    lock: list[asyncpg.Connection[asyncpg.Record]] = []

    async def stop_the_worker(call: HookCall) -> None:
        if call.event is HookEvent.PAUSE:
            lock.append(await target_db.connect())
            await lock[0].execute("BEGIN; LOCK TABLE account")
            await source_db.execute("UPDATE account SET items = items")  # this is what the worker cannot apply

    async with following(source_db, target_db), applications([source_db, target_db]) as apps:
        await wait_for_writes(apps, source_db)
        async with moving(source_db, target_db, max_pause=1.5, hooks=(MoveHook(stop_the_worker),)) as move:
            with pytest.raises(SubscriberError, match=r"reached its limit of 1.5 s in step drain") as caught:
                await move.cutover()
            assert "can write to the source again" in str(caught.value.detail)
            await wait_for_writes(apps, source_db, 1)
            assert all(application.moves == [source_db.name] for application in apps)
            await lock[0].execute("ROLLBACK")
        async with moving(source_db, target_db) as move:
            await move.cutover()
        await wait_for_writes(apps, target_db)
    await check_nothing_is_lost(apps, target_db)


@asynccontextmanager
async def pooled(source: Database, role: str, directory: Path) -> AsyncIterator[tuple[str, int]]:
    """Run a PgBouncer with an entry "shop" for the source. Returns its console and its port."""
    entry = f"shop = host=127.0.0.1 port={source.server.port} dbname={source.name} user={role}"
    more = "admin_users = admin\nserver_lifetime = 3600\n[databases]\n" + entry
    async with bouncer.pgbouncer(directory, source.server.port, pool_mode="transaction", more=more) as port:
        yield f"postgresql://admin@127.0.0.1:{port}/pgbouncer", port


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_clients_of_pgbouncer_see_no_error(source_db: Database, target_db: Database, processes: Path) -> None:
    try:
        bouncer.program()
    except NotAvailable as reason:
        pytest.skip(str(reason))
    done: list[int] = []
    errors: list[str] = []

    async def write(dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        for number in itertools.count():
            try:
                await connection.execute(WORK.replace("$1", "9").replace("$2", f"'9-{number}'"))
            except Exception as error:
                errors.append(repr(error))
                return
            done.append(number)

    async def wait_for_more() -> None:
        count = len(done)
        with anyio.fail_after(60):
            while len(done) < count + 10 and not errors:
                await anyio.sleep(0.02)

    async with following(source_db, target_db):
        async with (
            applications([source_db, target_db], pause=0.0) as apps,
            pooled(source_db, apps[0].role, processes) as (console, port),
        ):
            task = asyncio.create_task(write(f"postgresql://{apps[0].role}@127.0.0.1:{port}/shop"))
            hooks = (MoveHook(pgbouncer_hook(console, processes / "pgbouncer.ini", "shop")),)
            await wait_for_more()
            async with moving(source_db, target_db, hooks=hooks) as move:
                moved = await move.cutover()
            assert moved.warnings == ()
            await wait_for_more()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert errors == []
        await check_nothing_is_lost(apps, target_db)
        there = {token for (token,) in await target_db.rows("SELECT token FROM item WHERE token LIKE '9-%'")}
        assert {f"9-{number}" for number in done} <= there


def test_the_new_file_of_pgbouncer_is_private_until_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries have passwords. A file that a killed command has left is not written to."""
    config, new, other = tmp_path / "pgbouncer.ini", tmp_path / ".pgbouncer.ini.new", tmp_path / "other"
    config.write_text("[databases]\nshop = host=a password=secret\n")
    config.chmod(0o640)
    new.symlink_to(other)
    before = os.umask(0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "chmod", lambda *_: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception, match="killed"):
                _change_entry(config, "shop", CALL)
        assert new.stat().st_mode & 0o777 == 0o600
        _change_entry(config, "shop", CALL)
    finally:
        os.umask(before)
    assert config.stat().st_mode & 0o777 == 0o640
    assert "password=secret" in config.read_text()
    assert not other.exists()
