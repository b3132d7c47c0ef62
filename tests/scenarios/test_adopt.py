"""`subscriber adopt` and `subscriber hand-back`: a subscription changes hands while the publisher is written to.

No table that is written to has a key, so duplicate rows are visible.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.native_subscription import Mark, Move
from subscriber.cli.commands.adopt import adopt, hand_back
from subscriber.demo.servers import Servers
from subscriber.errors import StatementError, SubscriberError
from subscriber.failpoints import Point
from subscriber.settings import Settings
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.model import SubscriptionStatus
from tests.plugins.fix_cluster import SETTINGS, Database, ServerOf, database_with_schema, fresh_database
from tests.plugins.fix_proxy import Proxies
from tests.plugins.fix_subscriber import Subscriber, Subscriptions, running_subscriber

ADOPT = [Point.ADOPT_DISABLED, Point.ADOPT_STOPPED, Point.ADOPT_READY, Point.ADOPTED]
HAND_BACK = [Point.HAND_BACK_CREATED, Point.HAND_BACK_STOPPED, Point.HAND_BACK_READY, Point.HANDED_BACK]

NATIVE = """
SELECT (to_jsonb(s) - 'oid' - 'subdbid')::text FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
 WHERE d.datname = current_database()
"""
NATIVE_NAMES = """
SELECT quote_ident(subname) FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid
 WHERE d.datname = current_database()
"""
COMMENT = "SELECT obj_description(oid, 'pg_subscription') FROM pg_subscription WHERE subname = 's'"
OURS = "SELECT (to_jsonb(s) - 'oid' - 'subdbid')::text FROM subscriber.pg_subscription s WHERE subname = 's'"
UNREADY = """
SELECT count(*) FROM {0}.pg_subscription_rel r JOIN {0}.pg_subscription s ON s.oid = r.srsubid
  JOIN pg_database d ON d.oid = s.subdbid WHERE d.datname = current_database() AND r.srsubstate <> 'r'
"""
ROWS = ("SELECT number FROM log ORDER BY number", "SELECT number FROM other ORDER BY number")


@dataclass
class Scene:
    """A publisher with a writer, and a target with a launcher, between which subscription `s` changes hands."""

    source: Database
    target: Database
    written: int = 0
    marks: int = 0

    async def prepare(self) -> None:
        for database in (self.source, self.target):
            await database.execute("CREATE TABLE log (number int)", "CREATE TABLE other (number int)")
        await self.source.execute("CREATE PUBLICATION p FOR TABLE log, other")

    async def create_native(self, options: str = "", conninfo: str = "") -> None:
        """CREATE SUBSCRIPTION in PostgreSQL, and wait until its tables are ready."""
        conninfo = conninfo or self.source.dsn()
        await self.target.execute(f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p {options}")
        await self.source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        await self.target.wait_for(UNREADY.format("pg_catalog"), 0)

    async def create_ours(self, options: str = "", conninfo: str = "") -> None:
        """CREATE SUBSCRIPTION in subscriber, and wait until its tables are ready."""
        subscriptions = Subscriptions(self.target)
        conninfo = conninfo or self.source.dsn()
        await subscriptions.execute(f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p {options}")
        await subscriptions.wait_for_ready(self.source)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write a transaction of two rows every few milliseconds."""

        async def write(stop: asyncio.Event) -> None:
            async with self.source.connection() as connection:
                while not stop.is_set():
                    self.written += 1
                    await connection.execute("INSERT INTO log VALUES ($1), (-$1)".replace("$1", str(self.written)))
                    await asyncio.sleep(0.002)

        async with meanwhile(write):
            yield

    @asynccontextmanager
    async def preparing(self, wanted: bool = True) -> AsyncIterator[None]:
        """Prepare transactions, and commit or roll back each."""

        async def prepare(stop: asyncio.Event) -> None:
            async with self.source.connection() as connection:
                for number in itertools.count(1):
                    if stop.is_set():
                        return
                    statements = "BEGIN", "INSERT INTO log VALUES (0)", f"PREPARE TRANSACTION 'gid {number}'"
                    end = "ROLLBACK" if number % 3 == 0 else "COMMIT"
                    for statement in (*statements, f"{end} PREPARED 'gid {number}'"):
                        await connection.execute(statement)
                    await asyncio.sleep(0.1)

        async with meanwhile(*[prepare] * wanted):
            yield

    async def assert_same(self) -> None:
        """Write a mark, wait until it arrives, and compare all rows."""
        self.marks += 1
        await self.source.execute(f"INSERT INTO other VALUES ({self.marks})")
        await self.target.wait_for(f"SELECT count(*) FROM other WHERE number = {self.marks}", 1)
        for query in ROWS:
            assert await self.target.rows(query) == await self.source.rows(query)

    async def adopt(self) -> None:
        assert await adopt(self.target.dsn(), "s", json=True) == 0

    async def hand_back(self) -> None:
        assert await hand_back(self.target.dsn(), "s", json=True) == 0

    async def killed(
        self, command: str, point: Point, how: str = "kill", options: Sequence[str] = ()
    ) -> asyncio.subprocess.Process:
        """Run the command as a process that kills or stops itself at the point."""
        arguments = [point.name, how, "1", command, "s", "--target", self.target.dsn(), *options]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.faults.failpoint_cli", *arguments, stdout=asyncio.subprocess.DEVNULL
        )
        if how == "kill":
            assert await process.wait() == -signal.SIGKILL
        return process

    async def refuses(self, command: str, *expected: str) -> str:
        """Check that the command refuses with an error that has these texts."""
        run = adopt if command == "adopt" else hand_back
        with pytest.raises(SubscriberError) as caught:
            await run(self.target.dsn(), "s", json=False)
        for text in expected:
            assert text in str(caught.value)
        return str(caught.value)

    async def status(self) -> list[SubscriptionStatus]:
        """Return what `subscriber status s` finds."""
        async with CatalogConnection.open(self.target.dsn(), "test") as catalog:
            return await assess_all(await read_catalog(catalog, ["s"]))

    async def native(self) -> dict[str, Any] | None:
        """Return the row of PostgreSQL's subscription."""
        text = await self.target.value(NATIVE)
        return None if text is None else json.loads(text)

    async def ours(self) -> dict[str, Any] | None:
        """Return the row of subscriber's subscription."""
        text = await self.target.value(OURS)
        return None if text is None else json.loads(text)


@asynccontextmanager
async def meanwhile(*works: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run functions during the block. Each ends soon after the event is set."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work(stop))
        try:
            yield
        finally:
            stop.set()


@asynccontextmanager
async def scene_on(source: Database, target: Database) -> AsyncIterator[Scene]:
    """Create a scene. A database cannot be dropped while it has subscriptions, so PostgreSQL's are dropped first."""
    scene = Scene(source, target)
    await scene.prepare()
    try:
        yield scene
    finally:
        for (name,) in await target.rows(NATIVE_NAMES):
            await target.execute("DROP EVENT TRIGGER IF EXISTS refuse", f"ALTER SUBSCRIPTION {name} DISABLE")
            await target.execute(f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)", f"DROP SUBSCRIPTION {name}")


@pytest.fixture
async def scene(source_db: Database, target_db: Database, subscriber: Subscriber) -> AsyncIterator[Scene]:
    async with scene_on(source_db, target_db) as scene:
        yield scene


async def test_back_and_forth_under_load(scene: Scene) -> None:
    await scene.create_native()
    definition = await scene.native()
    async with scene.writing():
        for _ in range(3):
            await scene.adopt()
            assert await scene.native() is None
            assert await scene.ours() == definition
            await anyio.sleep(0.2)
            await scene.hand_back()
            assert await scene.ours() is None
            assert await scene.native() == definition
            await anyio.sleep(0.2)
    await scene.assert_same()
    assert scene.written > 100


@pytest.mark.parametrize("major", [14, pytest.param(15, marks=pytest.mark.soak), 19])
async def test_back_and_forth_on_other_versions(server_of: ServerOf, source_db: Database, major: int) -> None:
    async with (
        database_with_schema(server_of("target", major)) as target,
        running_subscriber(target),
        scene_on(source_db, target) as scene,
    ):
        await scene.create_native()
        before = await scene.native()
        async with scene.writing():
            await scene.adopt()
            await anyio.sleep(0.2)
            await scene.hand_back()
        await scene.assert_same()
        assert await scene.native() == before


async def test_a_command_killed_at_each_step_continues(scene: Scene) -> None:
    await scene.create_native()
    await scene.target.execute("COMMENT ON SUBSCRIPTION s IS 'of the shop'")
    async with scene.writing():
        for point in ADOPT:
            await scene.killed("adopt", point)
            native, ours = await scene.native(), await scene.ours()
            if point is Point.ADOPTED:
                assert native is None
                assert (ours or {})["subenabled"] is True
            else:
                assert (native or {})["subenabled"] is False
                assert ours is None
                assert await scene.target.value(COMMENT) == str(Mark(Move.ADOPT, True, "of the shop"))
                with pytest.raises(StatementError) as caught:
                    await scene.status()
                assert caught.value.hint == "PostgreSQL has one. To take it over: subscriber adopt s"
        await scene.adopt()  # nothing to do
        for point in HAND_BACK:
            await scene.killed("hand-back", point)
            native, ours = await scene.native(), await scene.ours()
            if point is Point.HANDED_BACK:
                assert (native or {})["subenabled"] is True
                assert ours is None
                assert await scene.target.value(COMMENT) is None
            else:
                assert (native or {})["subslotname"] is None
                assert (ours or {})["subenabled"] is False
                assert await scene.target.value(COMMENT) == str(Mark(Move.HAND_BACK, True))
                (status,) = await scene.status()
                assert [(problem.kind, problem.hint) for problem in status.problems] == [
                    ("handed back", "If it was killed, run it again: subscriber hand-back s")
                ]
        await scene.hand_back()  # nothing to do
    await scene.assert_same()


async def test_a_killed_command_can_be_given_up(scene: Scene) -> None:
    """The subscription is enabled by hand in place of the next run."""
    await scene.create_native()
    async with scene.writing():
        await scene.killed("adopt", Point.ADOPT_READY)
        await scene.target.execute("ALTER SUBSCRIPTION s ENABLE")
        await anyio.sleep(0.2)
        await scene.adopt()
        await scene.killed("hand-back", Point.HAND_BACK_READY)
        await scene.target.execute("DROP SUBSCRIPTION s")
        await Subscriptions(scene.target).execute("ALTER SUBSCRIPTION s ENABLE")
    await scene.assert_same()
    assert await scene.native() is None


async def test_the_target_crashes_around_the_commit(servers: Servers, source_db: Database) -> None:
    """Once while the command waits before its commit, and once immediately after it."""
    server = await servers.create("target", SETTINGS)
    await server.start()
    async with scene_on(source_db, Database(server, "postgres")) as scene:
        await scene.create_native()
        for command, ready in (("adopt", Point.ADOPT_READY), ("hand-back", Point.HAND_BACK_READY)):
            async with scene.writing():
                process = await scene.killed(command, ready, "stop")
                while await asyncio.to_thread(_state_of, process.pid) != "T":
                    await anyio.sleep(0.02)
                await server.kill9()
                process.kill()
                await process.wait()
                await server.start()
                await (scene.adopt() if command == "adopt" else scene.hand_back())
                await server.kill9()
                await server.start()
            if command == "adopt":
                async with running_subscriber(scene.target):
                    await scene.assert_same()
        await scene.assert_same()


async def test_the_position_is_that_of_the_target_and_not_of_the_slot(
    servers: Servers, proxies: Proxies, source_db: Database
) -> None:
    """A target that flushes late has applied more than PostgreSQL's worker has confirmed."""
    server = await servers.create("target", SETTINGS | {"wal_writer_delay": "10s"})
    await server.start()
    proxy = await proxies.to(source_db.server.port)
    async with scene_on(source_db, Database(server, "postgres")) as scene, running_subscriber(scene.target):
        await scene.create_native(conninfo=proxy.dsn(scene.source.dsn()))
        await scene.source.execute("INSERT INTO log VALUES (1)")
        end = await scene.source.value("SELECT pg_current_wal_lsn()::text")
        await scene.target.wait_for("SELECT count(*) FROM log", 1)
        await proxy.cut()
        await scene.target.execute("ALTER SUBSCRIPTION s DISABLE")
        await scene.target.wait_for("SELECT count(*) FROM pg_stat_subscription WHERE pid IS NOT NULL", 0)
        slot = f"SELECT confirmed_flush_lsn < '{end}' FROM pg_replication_slots WHERE slot_name = 's'"
        assert await scene.source.value(slot)
        await proxy.restore()
        await scene.adopt()
        await Subscriptions(scene.target).execute("ALTER SUBSCRIPTION s ENABLE")
        await scene.assert_same()


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_an_error_leaves_the_subscription_as_it_was(scene: Scene) -> None:
    await scene.create_native()
    await scene.target.execute(
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$",
        "CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('DROP SUBSCRIPTION') EXECUTE FUNCTION refuse()",
        "COMMENT ON SUBSCRIPTION s IS 'of the shop'",
    )
    before = await scene.native()
    async with scene.writing():
        await scene.refuses("adopt", "no")
        assert await scene.native() == before
        assert await scene.target.value(COMMENT) == "of the shop"
    await scene.assert_same()
    await scene.target.execute("DROP EVENT TRIGGER refuse")
    await scene.adopt()
    await scene.target.execute(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$"
        " BEGIN IF NOT EXISTS (SELECT FROM subscriber.subscription WHERE subenabled) THEN RAISE 'no'; END IF; END $$",
        "CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('ALTER SUBSCRIPTION') EXECUTE FUNCTION refuse()",
    )
    before = await scene.ours()
    async with scene.writing():
        await scene.refuses("hand-back", "no")
        assert await scene.ours() == before
        assert await scene.native() is None
    await scene.assert_same()


async def test_options_and_the_origin_are_kept(scene: Scene) -> None:
    """Every option has another value than its default. The origin's id marks rows as the subscription's own."""
    await scene.target.execute("CREATE ROLE owner_of_s", f"GRANT ALL ON DATABASE {scene.target.name} TO owner_of_s")
    try:
        await scene.create_native(
            "WITH (binary = true, streaming = on, synchronous_commit = local, disable_on_error = true, origin = none,"
            " run_as_owner = true, password_required = false, failover = true)"
        )
        await scene.target.execute("ALTER SUBSCRIPTION s OWNER TO owner_of_s", "GRANT ALL ON log, other TO owner_of_s")
        await scene.target.execute("ALTER SUBSCRIPTION s SKIP (lsn = 'FF/0')", "ALTER SUBSCRIPTION s DISABLE")
        await scene.source.execute("INSERT INTO log VALUES (1)")
        before = await scene.native()
        origin = await scene.target.value("SELECT roident FROM pg_replication_origin ORDER BY roident DESC LIMIT 1")
        await scene.adopt()
        assert await scene.ours() == before
        assert await scene.target.value(
            "SELECT roname ~ '^pg_35' FROM pg_replication_origin WHERE roident = $1", origin
        )
        await scene.refuses("hand-back", "role owner_of_s may not", 'ALTER ROLE "owner_of_s" LOGIN')
        await scene.target.execute("ALTER ROLE owner_of_s LOGIN")
        await scene.hand_back()
        assert await scene.native() == before
        name = await scene.target.value("SELECT 'pg_' || oid FROM pg_subscription WHERE subname = 's'")
        assert await scene.target.value("SELECT roname FROM pg_replication_origin WHERE roident = $1", origin) == name
        await scene.target.execute("ALTER SUBSCRIPTION s SKIP (lsn = NONE)", "ALTER SUBSCRIPTION s ENABLE")
        await scene.assert_same()
    finally:
        await scene.target.execute("REASSIGN OWNED BY owner_of_s TO postgres", "DROP OWNED BY owner_of_s")
        await scene.target.execute("DROP ROLE owner_of_s")


async def test_two_phase_stays_enabled(scene: Scene) -> None:
    await scene.create_native("WITH (two_phase = true)")
    await scene.target.wait_for("SELECT subtwophasestate::text FROM pg_subscription WHERE subname = 's'", "e")
    connection = await scene.source.connect()
    for statement in ("BEGIN", "INSERT INTO log VALUES (1)", "PREPARE TRANSACTION 'a'"):
        await connection.execute(statement)
    prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
    await scene.target.wait_for(prepared, 1)
    await scene.refuses("adopt", "Transactions are prepared on the target: pg_gid_", "COMMIT PREPARED")
    await connection.execute("COMMIT PREPARED 'a'")
    await scene.target.wait_for(prepared, 0)
    await scene.adopt()
    assert (await scene.ours() or {})["subtwophasestate"] == "e"
    for statement in ("BEGIN", "INSERT INTO log VALUES (2)", "PREPARE TRANSACTION 'b'"):
        await connection.execute(statement)
    await scene.target.wait_for(prepared, 1)
    await scene.refuses("hand-back", "Transactions are prepared on the target", "COMMIT PREPARED")
    await connection.execute("COMMIT PREPARED 'b'")
    await scene.target.wait_for(prepared, 0)
    await scene.target.wait_for("SELECT count(*) FROM subscriber.prepared", 0)
    await scene.hand_back()
    await scene.target.wait_for("SELECT subtwophasestate::text FROM pg_subscription WHERE subname = 's'", "e")
    await scene.assert_same()


async def test_adopt_refuses_by_name(scene: Scene) -> None:
    # Another role's view is not read in the place of the extension's table.
    await scene.target.execute("CREATE SCHEMA pglogical CREATE VIEW subscription AS SELECT 1 / 0 AS sub_name")
    await scene.refuses("adopt", 'subscription "s" does not exist in this database')
    await scene.target.execute("ALTER TABLE log ADD CHECK (number < 10)")
    await scene.source.execute("INSERT INTO log VALUES (10)")
    await scene.target.execute(f"CREATE SUBSCRIPTION s CONNECTION '{scene.source.dsn()}' PUBLICATION p")
    await scene.refuses("adopt", "Tables are not synchronized: public.log (", "until all tables are ready")
    await scene.target.execute("ALTER TABLE log DROP CONSTRAINT log_number_check")
    await scene.source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
    await scene.target.wait_for(UNREADY.format("pg_catalog"), 0)

    slot = "ALTER SUBSCRIPTION s SET (slot_name = {0})"
    await scene.target.execute("ALTER SUBSCRIPTION s DISABLE", slot.format("NONE"))
    await scene.refuses("adopt", "It has no replication slot.", 'ALTER SUBSCRIPTION "s" SET (slot_name')
    await scene.target.execute(slot.format("elsewhere"))
    await scene.refuses("adopt", 'replication slot "elsewhere" does not exist on the publisher', "CONNECTION '…'")
    await scene.target.execute(slot.format("s"), "ALTER SUBSCRIPTION s ENABLE")

    await scene.target.execute("CREATE ROLE someone LOGIN")
    try:
        with pytest.raises(SubscriberError, match="must be superuser to run subscriber adopt"):
            await adopt(scene.target.dsn(user="someone"), "s", json=False)
    finally:
        await scene.target.execute("DROP ROLE someone")

    assert (await scene.native() or {})["subenabled"]
    await scene.assert_same()


async def test_adopt_refuses_another_server_at_the_same_address(
    scene: Scene, servers: Servers, proxies: Proxies
) -> None:
    """It has a slot of the same name, but PostgreSQL's worker streams from the first server."""
    proxy = await proxies.to(scene.source.server.port)
    await scene.create_native(conninfo=proxy.dsn(scene.source.dsn()))
    other = await servers.create("other", SETTINGS)
    await other.start()
    await Database(other, "postgres").execute(f"CREATE DATABASE {scene.source.name}")
    there = Database(other, scene.source.name)
    await there.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    proxy.server_port = other.port
    await scene.refuses("adopt", 'the connection string of subscription "s" leads to another server from here')
    await scene.assert_same()


async def test_hand_back_refuses_by_name(scene: Scene, subscriber: Subscriber) -> None:
    await scene.create_ours("WITH (sequences = follow, conflict_policy = 'skip', retain_dead_tuples = true)")
    everything = await scene.refuses(
        "hand-back",
        "PostgreSQL does not know the deleted rows",
        "does not have the option conflict_policy",
        "does not keep sequences ahead",
        "(conflict_policy = '')",
    )
    for line in everything.splitlines():
        if "SET (" in line:
            await subscriber.execute(line.removeprefix("HINT:  "))
    await scene.source.execute("CREATE TABLE late (number int)", "ALTER PUBLICATION p ADD TABLE late")
    await scene.refuses("hand-back", 'relation "public.late" does not exist')
    await scene.target.execute("CREATE TABLE late (number int)")
    await scene.refuses(
        "hand-back", "not in the subscription: public.late.", 'ALTER SUBSCRIPTION "s" REFRESH PUBLICATION'
    )
    await subscriber.execute('ALTER SUBSCRIPTION "s" REFRESH PUBLICATION')
    await subscriber.wait_for_ready(scene.source)
    await scene.target.execute(
        "INSERT INTO subscriber.conflict_history (subid, relid, relation, conflict_type, remote_xid,"
        " remote_finish_lsn, policy, resolution)"
        " SELECT subid, 1, 'public.log', 'insert_exists', 1, '0/1', 'skip', 'skipped' FROM subscriber.subscription"
    )
    error = await scene.refuses("hand-back", "A record of subscriber.conflict_history would be deleted.")
    await scene.target.execute(error[error.index("DELETE FROM") :])
    assert await scene.native() is None
    assert (await scene.ours() or {})["subenabled"]
    await scene.hand_back()
    await scene.assert_same()


async def test_hand_back_refuses_hooks(scene: Scene) -> None:
    await scene.create_native()
    await scene.adopt()
    await scene.target.execute("UPDATE subscriber.subscription_rel SET srsource = '{public,log}'")
    await scene.refuses("hand-back", "Hooks change the rows of: public.log")


async def test_no_log_has_the_password(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    log = scene.target.server.log
    await scene.create_ours(conninfo=scene.source.dsn(password="hidden-password"))
    await scene.target.execute(f"ALTER DATABASE {scene.target.name} SET log_statement = 'all'")
    start = log.stat().st_size
    await scene.hand_back()
    await scene.adopt()
    written = log.read_bytes()[start:].decode()
    assert "ALTER SUBSCRIPTION" in written
    assert "hidden-password" not in written
    printed = capsys.readouterr()
    assert '"event": "done"' in printed.out
    assert "hidden-password" not in printed.out + printed.err


async def test_a_transaction_that_is_open_during_the_moves_arrives_once(scene: Scene) -> None:
    """The publisher streams it while it is open, to each side from its beginning."""
    await scene.source.stream_everything()
    await scene.create_native("WITH (streaming = parallel)")
    connection = await scene.source.connect()
    await connection.execute("BEGIN; INSERT INTO log SELECT generate_series(1, 1000)")
    await scene.source.flush_wal()
    await scene.adopt()
    await connection.execute("INSERT INTO log SELECT generate_series(1001, 2000)")
    await scene.source.flush_wal()
    async with scene.writing():
        await anyio.sleep(0.2)
        await scene.hand_back()
        await connection.execute("INSERT INTO log SELECT generate_series(2001, 3000); SAVEPOINT a")
        await connection.execute("INSERT INTO log SELECT generate_series(3001, 4000); ROLLBACK TO a")
        # PostgreSQL's worker may not notice that it is disabled while it streams small transactions.
        assert await adopt(scene.target.dsn(), "s", json=True, setting=["worker_shutdown_grace=300ms"]) == 0
        await connection.execute("COMMIT")
    await scene.assert_same()
    assert await scene.target.value("SELECT count(*) FROM log WHERE number IN (1, 1001, 2001, 3001)") >= 3


async def test_a_worker_that_waits_for_a_lock_is_ended(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    await scene.create_native()
    connection = await scene.target.connect()
    await connection.execute("BEGIN; LOCK TABLE log IN ACCESS EXCLUSIVE MODE")
    await scene.source.execute("INSERT INTO log VALUES (1)")
    await scene.target.wait_for("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'log'::regclass)")
    # DROP SUBSCRIPTION and the rows of the tables do not need a lock on the table.
    assert await adopt(scene.target.dsn(), "s", setting=["worker_shutdown_grace=100ms"]) == 0
    assert "ending workers of PostgreSQL that have not stopped" in capsys.readouterr().err
    await connection.execute("COMMIT")
    await scene.assert_same()


async def test_ctrl_c_leaves_the_subscription_as_it_was(scene: Scene) -> None:
    await scene.create_native()
    before = await scene.native()
    connection = await scene.target.connect()
    await connection.execute("BEGIN; LOCK TABLE log IN ACCESS EXCLUSIVE MODE")
    await scene.source.execute("INSERT INTO log VALUES (1)")
    await scene.target.wait_for("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'log'::regclass)")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "subscriber", "adopt", "s", "--target", scene.target.dsn(), stdout=PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"PostgreSQL's subscription s is disabled\n"
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    assert await scene.native() == before
    assert await scene.target.value(COMMENT) is None
    await connection.execute("COMMIT")
    await scene.assert_same()


async def test_a_missing_launcher_is_reported(
    source_db: Database, target_db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scene_on(source_db, target_db) as scene:
        await scene.create_native()
        await scene.adopt()
        assert "WARNING:  no launcher is running\nHINT:  Start one on this database: subscriber run\n" in (
            capsys.readouterr().err
        )
        await scene.hand_back()
        async with running_subscriber(target_db, settings=Settings(empty_database_linger=0.1)) as subscriber:
            await subscriber.log.wait_for("launcher started")
            await anyio.sleep(0.3)  # it has found no subscription
            await scene.adopt()
            assert capsys.readouterr().err == ""
            await scene.assert_same()


async def test_two_commands_at_the_same_time(scene: Scene) -> None:
    """One of them does the work. The other one finds it done, because it waits."""
    await scene.create_native()
    async with scene.writing():
        for move in (adopt, hand_back):
            both = [move(scene.target.dsn(), "s", json=True) for _ in range(2)]
            outcomes = await asyncio.gather(*both, return_exceptions=True)
            assert outcomes == [0, 0]
            native, ours = await scene.native(), await scene.ours()
            assert (native is None, ours is None) == (move is adopt, move is hand_back)
            assert (native or ours or {})["subenabled"] is True
    await scene.assert_same()


async def test_hand_back_refuses_a_slot_that_is_ahead(scene: Scene, subscriber: Subscriber) -> None:
    """PostgreSQL would continue without the changes in between."""
    await scene.create_native()
    await scene.adopt()
    await scene.assert_same()
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await scene.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    await scene.source.execute("INSERT INTO log VALUES (1)")
    await scene.source.execute("SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())")
    before = await scene.ours()
    await scene.refuses("hand-back", 'the target is behind replication slot "s"')
    assert await scene.ours() == before
    assert await scene.native() is None


async def test_the_command_prints_its_steps_and_errors(scene: Scene) -> None:
    async def run(*arguments: str) -> tuple[int | None, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "subscriber", *arguments, "--target", scene.target.dsn(), stdout=PIPE, stderr=PIPE
        )
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    status, out, err = await run("hand-back", "s")
    assert (status, out) == (3, "")
    assert err == (
        'ERROR:  subscription "s" does not exist in this database\n'
        "HINT:  This database has none that can be moved. See the subscriptions: subscriber status\n"
    )
    await scene.create_native()
    assert (await run("hand-back", "s"))[:2] == (0, "s is a subscription of PostgreSQL already\n")
    status, out, err = await run("adopt", "s")
    assert (status, err) == (0, "")
    *steps, result = out.splitlines()
    assert steps == ["PostgreSQL's subscription s is disabled", "its workers have ended"]
    assert re.fullmatch(
        r"s is a subscription of subscriber now, at [0-9A-F]+/[0-9A-F]+ with slot s and 2 tables; it is enabled", result
    )
    status, out, _ = await run("hand-back", "s", "--json")
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["disabled", "stopped", "done"]
    done = json.loads(out.splitlines()[-1])
    assert {key: done[key] for key in ("subscription", "slot", "tables", "sequences", "enabled")} == {
        "subscription": "s", "slot": "s", "tables": 2, "sequences": 0, "enabled": True
    }  # fmt: skip


@asynccontextmanager
async def scene_of(server_of: ServerOf, publisher: int, target: int) -> AsyncIterator[tuple[Scene, Subscriber]]:
    """Create a scene on servers of these major versions."""
    async with (
        fresh_database(server_of("publisher", publisher)) as source,
        database_with_schema(server_of("target", target)) as database,
        running_subscriber(database) as subscriber,
        scene_on(source, database) as scene,
    ):
        yield scene, subscriber


async def test_sequences_and_a_foreign_server_of_19(server_of: ServerOf) -> None:
    async with scene_of(server_of, 19, 19) as (scene, _):
        for database in (scene.source, scene.target):
            await database.execute("CREATE SEQUENCE number")
        await scene.source.execute("SELECT setval('number', 77)", "CREATE PUBLICATION q FOR ALL SEQUENCES")
        server = scene.source.server
        await scene.target.execute(
            "CREATE EXTENSION postgres_fdw",
            "CREATE SERVER shop FOREIGN DATA WRAPPER postgres_fdw"
            f" OPTIONS (host '127.0.0.1', port '{server.port}', dbname '{scene.source.name}')",
            "CREATE USER MAPPING FOR postgres SERVER shop OPTIONS (user 'postgres', password 'unused')",
            "CREATE SUBSCRIPTION s SERVER shop PUBLICATION p, q WITH (wal_receiver_timeout = '7s')",
        )
        await scene.source.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        await scene.target.wait_for(UNREADY.format("pg_catalog"), 0)
        before = await scene.native()
        states = "SELECT srrelid::regclass::text, srsubstate::text, srsublsn FROM {}.pg_subscription_rel ORDER BY 1"
        tables = await scene.target.rows(states.format("pg_catalog"))
        assert [name for name, *_ in tables] == ["log", "number", "other"]
        await scene.adopt()
        assert await scene.ours() == before
        assert await scene.target.rows(states.format("subscriber")) == tables
        assert await scene.target.value("SELECT last_value FROM number") == 77
        await scene.assert_same()
        await scene.hand_back()
        assert await scene.native() == before
        assert [name for name, *_ in await scene.target.rows(states.format("pg_catalog"))] == ["log", "number", "other"]
        await scene.assert_same()


async def test_adopt_refuses_retain_dead_tuples(server_of: ServerOf) -> None:
    async with scene_of(server_of, 19, 19) as (scene, _):
        await scene.create_native("WITH (retain_dead_tuples = true)")
        error = await scene.refuses("adopt", "With retain_dead_tuples the server keeps deleted rows")
        statements = error[error.index("HINT:") :].removeprefix("HINT:  ").split(";")
        await scene.target.execute(*[statement for statement in statements if statement.strip()][:1])
        await scene.target.wait_for("SELECT count(*) FROM pg_stat_subscription WHERE pid IS NOT NULL", 0)
        await scene.target.execute(*[statement for statement in statements if statement.strip()][1:])
        await scene.adopt()
        await scene.assert_same()


async def test_hand_back_refuses_what_an_old_version_lacks(server_of: ServerOf) -> None:
    async with scene_of(server_of, 18, 14) as (scene, subscriber):
        await scene.create_ours("WITH (two_phase = true, origin = none, failover = true, disable_on_error = true)")
        await scene.target.wait_for("SELECT subtwophasestate::text FROM subscriber.subscription", "e")
        await subscriber.execute("ALTER SUBSCRIPTION s SKIP (lsn = 'FF/0')")
        error = await scene.refuses(
            "hand-back", "PostgreSQL 14 always applies changes as the owner of the subscription"
        )
        for option in ("two_phase", "origin", "failover", "disable_on_error"):
            assert f"PostgreSQL 14 does not have the option {option}." in error
        await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        await scene.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
        await scene.target.wait_for("SELECT count(*) FROM subscriber.session JOIN pg_stat_activity USING (pid)", 0)
        for statement in error[error.index("HINT:") :].removeprefix("HINT:  ").splitlines():
            await subscriber.execute(statement.partition(";")[0])
        await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await scene.assert_same()
        await scene.hand_back()
        await scene.assert_same()
