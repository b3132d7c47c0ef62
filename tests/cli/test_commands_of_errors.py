"""The command of an error works: each case makes an error, runs its command as it is, and then succeeds.

Errors of one step are in mistakes.py.

The cases share two databases. A case leaves them as it has found them, except for table city.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shlex
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import subscriber
from subscriber import names
from subscriber.cli import main
from subscriber.comparison.comparison import verify
from subscriber.connection.connect import connect
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.dsn import resolve_dsn
from subscriber.errors import SubscriberError, SubscriptionFailed
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database

QUICK = Settings(retry_interval=0.2, empty_database_poll_interval=0.1)
OWN = ("CREATE SUBSCRIPTION", "ALTER SUBSCRIPTION", "DROP SUBSCRIPTION")
SQL = ("SELECT", "CREATE", "ALTER", "GRANT", "DROP")
WORKER = "SELECT error_remedy->>'command' FROM subscriber.worker WHERE relid = 0"


@dataclass
class Servers:
    """Both servers, and the target's subscriptions."""

    source: Database
    target: Database
    db: subscriber.Database

    async def create(self, name: str = "s", publications: tuple[str, ...] = ("atlas",), **options: object) -> None:
        await self.db.create_subscription(name, source=self.source.dsn(), publications=publications, **options)  # type: ignore[arg-type]

    async def run(self, command: str | None, on: Database | None = None) -> None:
        """Run a command as a user does: a statement on its server, the others in a shell."""
        assert command is not None
        if command.startswith(OWN):
            await self.db.execute(command)
        elif command.startswith(SQL):
            assert command.endswith(";")
            await (on or self.target).execute(command)
        elif command.startswith("subscriber "):
            assert await asyncio.to_thread(run_here, shlex.split(command)) == 0
        else:
            path = f"{self.target.server.bin}:{os.environ['PATH']}"
            process = await asyncio.create_subprocess_shell(command, env={**os.environ, "PATH": path})
            assert await process.wait() == 0

    async def error(self, call: Callable[[], Awaitable[object]]) -> SubscriberError:
        with pytest.raises(SubscriberError) as raised:
            await call()
        assert raised.value.command is not None, raised.value
        assert raised.value.command in str(raised.value)
        return raised.value


def run_here(arguments: list[str]) -> int:
    """Run the command line in a thread of this process. Returns its exit status."""
    before, sys.argv = sys.argv, arguments
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.fixture
async def servers(source_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    monkeypatch.setenv("SUBSCRIBER_SOURCE_DSN", source_db.dsn())
    monkeypatch.setenv("SUBSCRIBER_TARGET_DSN", target_db.dsn())
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION atlas FOR TABLE city", "INSERT INTO city VALUES (1)")
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        yield Servers(source_db, target_db, db)


# --- statements -----------------------------------------------------------------------------------


async def table_is_missing(at: Servers) -> None:
    await at.create()
    await at.source.execute("CREATE SCHEMA geo", "CREATE TABLE geo.river (id int PRIMARY KEY)")
    await at.source.execute("ALTER PUBLICATION atlas ADD TABLE geo.river")
    error = await at.error(lambda: at.db.refresh("s"))
    assert "On the target" in (error.hint or "")
    await at.run(error.command)
    await at.db.refresh("s")
    await at.db.drop("s")
    await at.source.execute("DROP TABLE geo.river")


async def subscription_is_disabled(at: Servers) -> None:
    await at.create(enabled=False)
    for statement in ("REFRESH PUBLICATION", "REFRESH SEQUENCES", "REFRESH TABLE city"):
        error = await at.error(lambda statement=statement: at.db.execute(f"ALTER SUBSCRIPTION s {statement}"))  # type: ignore[misc]
        await at.run(error.command)
        await at.db.execute(f"ALTER SUBSCRIPTION s {statement}")
        await at.db.disable("s")
    await at.db.enable("s")
    error = await at.error(lambda: at.db.execute("ALTER SUBSCRIPTION s REFRESH TABLE lake"))
    await at.run(error.command)
    error = await at.error(lambda: at.db.execute("ALTER SUBSCRIPTION s QUARANTINE RETRY (lsn = '0/1')"))
    await at.run(error.command)
    await at.db.drop("s")


async def database_and_role_are_refused(at: Servers) -> None:
    parameters = dict(Conninfo.parse(at.source.dsn()).parameters)
    no_database = Conninfo({**parameters, "dbname": "no_database_yet"})
    error = await at.error(lambda: connect(no_database))
    await at.run(error.command, at.source)
    (await connect(no_database)).terminate()
    await at.source.execute('DROP DATABASE "no_database_yet" WITH (FORCE)', 'CREATE ROLE "a b" NOLOGIN')
    role = Conninfo({**parameters, "user": "a b"})
    for replication in (False, True):
        error = await at.error(lambda replication=replication: connect(role, replication=replication))  # type: ignore[misc]
        await at.run(error.command, at.source)
        (await connect(role, replication=replication)).terminate()
    await at.source.execute('DROP ROLE "a b"')


async def names_are_mistyped(at: Servers) -> None:
    """PostgreSQL has a subscription that is not taken over yet, and a user mistypes its name."""
    await at.target.execute(
        f"CREATE SUBSCRIPTION native CONNECTION '{at.source.dsn()}' PUBLICATION atlas WITH (copy_data = false)"
    )
    error = await at.error(lambda: at.db.status("native"))
    assert error.command == "subscriber adopt native"
    from subscriber.cli.commands.adopt import adopt  # prints, and raises the error

    mistyped = await at.error(lambda: adopt(at.target.dsn(), "nativ"))
    assert mistyped.command == error.command
    await at.run(mistyped.command)
    await at.db.status("native")
    await at.db.drop("native")


async def connection_string_is_elsewhere(at: Servers, folder: Path) -> None:
    file = folder / "a dsn"
    file.write_text("host=h")
    file.chmod(0o644)
    error = await at.error(lambda: resolve_dsn(f"@{file}"))
    await at.run(error.command)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    await resolve_dsn(f"@{file}")
    file.unlink()
    error = await at.error(lambda: resolve_dsn(f"@{file}"))
    await at.run(error.command)
    await resolve_dsn(f"@{file}")


async def test_commands_of_statements(servers: Servers, tmp_path: Path) -> None:
    await table_is_missing(servers)
    await subscription_is_disabled(servers)
    await database_and_role_are_refused(servers)
    await names_are_mistyped(servers)
    await connection_string_is_elsewhere(servers, tmp_path)


# --- running subscriptions ------------------------------------------------------------------------


@asynccontextmanager
async def held_origin(at: Servers) -> AsyncIterator[None]:
    """Have the origin of the apply worker in another session, as a worker whose death nobody has noticed."""
    (subscription,) = await at.db.subscriptions()
    session = await at.target.connect()
    await session.execute("SELECT pg_replication_origin_session_setup($1)", names.apply_origin(subscription.oid))
    try:
        yield
    finally:
        await session.close()


async def origin_is_active(at: Servers) -> None:
    async with held_origin(at), at.db.running():
        await at.target.wait_for(f"SELECT ({WORKER}) LIKE 'SELECT pg_terminate_backend(%'", True)
        assert "replication origin" in await at.target.value("SELECT error FROM subscriber.worker WHERE relid = 0")
        await at.run(await at.target.value(WORKER))
        await at.db.wait_for_sync("s", timeout=60)


async def change_conflicts(at: Servers) -> None:
    await at.target.execute("INSERT INTO city VALUES (7)")
    await at.source.execute("INSERT INTO city VALUES (7)")
    with pytest.raises(SubscriptionFailed) as raised:
        await at.db.wait_for_lsn("s", await position(at), timeout=60)
    (status,) = [report for report in await at.db.status() if report.name == "s"]
    assert status.error_command == raised.value.command
    await at.run(raised.value.command)
    await at.db.wait_for_lsn("s", await position(at), timeout=60)


async def copy_conflicts(at: Servers) -> None:
    for database in (at.source, at.target):
        await database.execute("CREATE TABLE lake (id int PRIMARY KEY)", "INSERT INTO lake VALUES (1)")
    await at.source.execute("ALTER PUBLICATION atlas ADD TABLE lake")
    await at.db.refresh("s")
    with pytest.raises(SubscriptionFailed) as raised:
        await at.db.wait_for_sync("s", timeout=60)
    assert raised.value.table == "public.lake"
    await at.run(raised.value.command)
    await at.db.wait_for_sync("s", timeout=60)


async def ranges_are_not_tracked(at: Servers) -> None:
    comparison = await at.error(lambda: verify(at.target.dsn(), "s", since_last=True))
    assert comparison.remedy is not None
    for command in comparison.remedy.commands:
        await at.run(command)
    await verify(at.target.dsn(), "s", since_last=True)


async def slot_is_lost(at: Servers) -> None:
    await at.db.disable("s")
    await at.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await at.source.execute("SELECT pg_drop_replication_slot('s')", "DELETE FROM city WHERE id = 1")
    await at.db.enable("s")
    await at.target.wait_for(f"SELECT ({WORKER}) LIKE 'subscriber reseed %'", True)
    command = await at.target.value(WORKER)
    assert command in [finding.command for finding in await at.db.check("s")]
    await at.run(command)
    await at.db.wait_for_sync("s", timeout=60)
    assert await at.target.value("SELECT count(*) FROM city WHERE id = 1") == 0


async def position(at: Servers) -> subscriber.Lsn:
    return subscriber.Lsn.parse(await at.source.value("SELECT pg_current_wal_lsn()::text"))


async def test_commands_of_running_subscriptions(servers: Servers) -> None:
    await servers.create(copy_data=True, source_tag="all")  # a local row is extra
    async with servers.db.running():
        await servers.db.wait_for_sync("s", timeout=60)
    await origin_is_active(servers)
    async with servers.db.running():
        await change_conflicts(servers)
        await copy_conflicts(servers)
        await ranges_are_not_tracked(servers)
        await slot_is_lost(servers)
    await servers.db.drop("s")
