"""A monitor's view of a failing subscription: /health, the exit status of `subscriber status`, and metrics agree.

Each failure is real. From the first alarm to the end of the failure, no check reports a healthy subscription.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import pytest

from tests.cli.test_http import Client, served
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, Program, Subscriptions, running_subscriber
from tests.scenarios.conftest import Pair

TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
ALARM = 30.0  # seconds until an alarm at most
LOOK = 0.4  # seconds between two requests, which are otherwise a third of the work of these tests


@dataclass
class Monitor:
    """The three places where a monitor sees the same."""

    client: Client
    target: Database

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Query /health. Returns its status code, and its part about subscription s."""
        code, document = await self.client.json("/health")
        return code, document["subscriptions"].get("s", {})

    async def command(self) -> tuple[int, dict[str, Any]]:
        """Run `subscriber status`. Returns its exit status, and its part about subscription s."""
        command = [sys.executable, "-m", "subscriber", "status", "--json", "--target", self.target.dsn()]
        done = await anyio.run_process(command, check=False)
        (document,) = json.loads(done.stdout)["subscriptions"]
        return done.returncode, document

    async def raised(self, problem: str) -> None:
        """Wait until /health raises the alarm with `problem`."""
        health: dict[str, Any] = {}
        with anyio.move_on_after(ALARM):
            while True:
                code, health = await self.health()
                if code == 503 and any(re.search(problem, text) for text in health.get("problems", ())):
                    break
                await anyio.sleep(LOOK)
        assert any(re.search(problem, text) for text in health.get("problems", ())), health

    async def alarm(self, problem: str) -> dict[str, Any]:
        """Wait until /health raises the alarm with `problem`. The other two places must agree."""
        await self.raised(problem)
        status, said = await self.command()
        assert (status, said["ok"]) == (1, False)
        assert any(re.search(problem, text) for text in said["problems"])
        figures = await self.client.figures()
        assert figures["subscriber_subscription_ok", "s"] == 0
        assert sum(value for name, value in figures.items() if name[0] == "subscriber_subscription_problem") >= 1
        return said

    async def stays(self, seconds: float) -> None:
        """Check for `seconds` that the subscription is never reported as healthy."""
        end = monotonic() + seconds
        looks: list[int] = []
        while monotonic() < end or len(looks) < 4:  # an answer of a busy machine takes long
            looks.append((await self.client.get("/health"))[0])
            await anyio.sleep(LOOK)
        assert set(looks) == {503}

    async def ends(self) -> None:
        """Wait until all is well again."""
        health: dict[str, Any] = {}
        said: tuple[object, ...] = ()
        with anyio.move_on_after(ALARM):
            while True:
                code, health = await self.health()
                if code == 200:  # only then, because a command takes a third of a second of a processor
                    status, figures = await self.command()
                    said = status, figures["ok"], figures["problems"], figures["error"]
                    if said == (0, True, [], None):
                        break
                await anyio.sleep(LOOK)
        assert health["ok"], health
        assert said == (0, True, [], None)
        assert (await self.client.figures())["subscriber_subscription_ok", "s"] == 1


@asynccontextmanager
async def watched(pair: Pair) -> AsyncIterator[Monitor]:
    async with served(pair.subscriber, pair.target.dsn()) as client:
        yield Monitor(client, pair.target)


@pytest.mark.parametrize("settings", [replace(QUICK, retry_interval=2)])  # an attempt takes a while
@pytest.mark.parametrize("streaming", [pytest.param("off", marks=pytest.mark.soak), "parallel"])
async def test_a_large_transaction_that_fails_at_its_end(pair: Pair, streaming: str) -> None:
    await pair.both(TABLE)
    if streaming != "off":
        await pair.source.execute(f"ALTER DATABASE {pair.source.name} SET logical_decoding_work_mem = '64kB'")
    await pair.subscribe("FOR TABLE t", streaming=streaming)
    await pair.target.execute("INSERT INTO t VALUES (20000)")
    async with watched(pair) as monitor:
        assert (await monitor.health())[0] == 200
        await pair.source.execute("INSERT INTO t SELECT generate_series(1, 20000)")
        failing = await monitor.alarm('conflict detected on relation "public.t"')
        await monitor.stays(6)
        status, said = await monitor.command()
        assert (status, "conflict detected" in said["error"]) == (1, True)
        assert said["lag_seconds"] > max(5, failing["lag_seconds"])
        await pair.target.execute("DELETE FROM t")
        await pair.caught_up()
        await monitor.ends()
        assert (await monitor.command())[1]["lag_seconds"] < 5


@pytest.mark.parametrize("settings", [replace(QUICK, retry_interval=2)])
async def test_a_row_that_the_target_does_not_survive(target_of_its_own: Pair) -> None:
    """The backend that gets the row is killed, as by a kernel that is out of memory, and takes the server down."""
    pair = target_of_its_own
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute(
        "CREATE FUNCTION kill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " COPY (SELECT) TO PROGRAM 'kill -9 $PPID'; RETURN NEW; END $$",
        "CREATE TRIGGER kill BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION kill()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER kill",
    )
    async with watched(pair) as monitor:
        await pair.source.execute("INSERT INTO t VALUES (1)")
        await monitor.raised("server closed the connection unexpectedly|lost its connection")
        pair.subscriber.log.clear()
        await monitor.stays(10)
        assert pair.subscriber.log.text().count("apply worker for subscription") <= 10
        with anyio.fail_after(20):
            while True:
                try:
                    await pair.target.execute("ALTER TABLE t DISABLE TRIGGER kill")
                    break
                except Exception:
                    await anyio.sleep(0.05)
        await monitor.ends()
    await pair.caught_up()
    await pair.assert_same("SELECT id FROM t")


async def test_a_row_that_ends_its_session(pair: Pair) -> None:
    """Each attempt streams for a moment; waits between attempts grow all the same."""
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute(
        "CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid()); RETURN NEW; END $$",
        "CREATE TRIGGER leave BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION leave()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER leave",
    )
    async with watched(pair) as monitor:
        await pair.source.execute("INSERT INTO t VALUES (1)")
        await monitor.alarm("terminating connection due to administrator command|closed the connection")
        await monitor.stays(5)
        await pair.target.execute("ALTER TABLE t DISABLE TRIGGER leave")
        await monitor.ends()
    await pair.assert_same("SELECT id FROM t")


async def test_a_target_whose_disk_is_full(target_of_its_own: Pair) -> None:
    """The table's file is /dev/full, where writes fail because the kernel reports no space."""
    pair = target_of_its_own
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    server = pair.target.server
    file = server.data / await pair.target.value("SELECT pg_relation_filepath('t')")
    await server.stop()
    file.unlink()
    file.symlink_to("/dev/full")
    await server.start()
    async with watched(pair) as monitor:
        await pair.source.execute("INSERT INTO t VALUES (1)")
        await monitor.alarm("No space left on device")
        await monitor.stays(5)
        await server.stop()
        file.unlink()
        file.touch()
        os.chown(file, server.account.uid, server.account.gid)
        await server.start()
        await monitor.ends()
    await pair.assert_same("SELECT id FROM t")


async def test_a_lock_of_somebody_else(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t")
    stranger = await pair.target.connect(application_name="night report")
    async with watched(pair) as monitor, stranger.transaction():
        await stranger.execute("LOCK TABLE t")
        pid = await stranger.fetchval("SELECT pg_backend_pid()")
        await pair.source.execute("INSERT INTO t VALUES (1)")
        await monitor.alarm(
            r"no answer from the target for \d+ s, waiting for a lock held by process " + rf'{pid} \("night report"\)'
        )
        await monitor.stays(1)
    async with watched(pair) as monitor:
        await monitor.ends()
    await pair.assert_same("SELECT id FROM t")


@pytest.mark.parametrize("settings", [replace(QUICK, lock_wait_log_delay=1)])
async def test_a_wait_for_something_else_than_a_lock(pair: Pair) -> None:
    """Such a wait may be normal, and raises no alarm. The log and the status report it."""
    await pair.both(TABLE)
    await pair.target.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_catalog.pg_sleep(4); RETURN NEW; END $$",
        "CREATE TRIGGER slow BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION slow()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER slow",
    )
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.subscriber.log.wait_for(
        r"WARNING:  no answer from the target for 1 s\n.*DETAIL:  Process \d+ of the target waits for no lock"
    )
    await pair.target.wait_for(
        "SELECT waiting_for LIKE 'an answer of the target, for _ s' FROM subscriber.worker WHERE relid = 0"
    )
    await pair.caught_up()
    await pair.subscriber.log.wait_for("LOG:  the target answers again, after [45] s")
    await pair.target.wait_for("SELECT waiting_for IS NULL FROM subscriber.worker WHERE relid = 0")
    async with pair.target.connection() as connection, connection.transaction():
        await connection.execute("LOCK TABLE t")
        await pair.source.execute("DELETE FROM t")
        await pair.subscriber.log.wait_for(r"DETAIL:  Process \d+ of the target waits for process \d+ \(")
    await pair.caught_up()


async def test_a_lock_of_somebody_else_on_a_table_to_be_copied(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    stranger = await pair.target.connect(application_name="night report")
    async with watched(pair) as monitor:
        async with stranger.transaction():
            await stranger.execute("LOCK TABLE t")
            await pair.subscriber.create(pair.source, "p")
            await monitor.alarm(r'waiting for a lock held by process \d+ \("night report"\)')
        await pair.caught_up()
        await monitor.ends()


async def test_a_table_whose_copy_fails_again_and_again(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.source.execute("INSERT INTO t SELECT generate_series(1, 20000)", "CREATE PUBLICATION p FOR TABLE t")
    await pair.target.execute("INSERT INTO t VALUES (20000)")
    async with watched(pair) as monitor:
        await pair.subscriber.create(pair.source, "p")
        await monitor.alarm("duplicate key value")
        await monitor.stays(3)
        await pair.target.execute("DELETE FROM t")
        await pair.caught_up()
        await monitor.ends()


async def test_a_subscription_that_an_error_has_disabled(pair: Pair) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR TABLE t", disable_on_error=True)
    await pair.target.execute("INSERT INTO t VALUES (1)")
    async with watched(pair) as monitor:
        await pair.source.execute("INSERT INTO t VALUES (1)")
        await monitor.alarm("disabled because of an error: conflict detected")
        await pair.target.execute("DELETE FROM t")
        await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await pair.caught_up()
        await monitor.ends()


async def test_a_launcher_that_is_frozen(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions
) -> None:
    for database in (source_db, target_db):
        await database.execute(TABLE)
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    program = Program(target_db.dsn(), processes / "run.log")
    try:
        await program.start()
        await subscriptions.create(source_db, "p")
        await subscriptions.wait_for_sync(source_db)
        async with running_subscriber(target_db) as standby:
            await standby.log.wait_for("waiting as standby")
            assert standby.launcher is not None
            async with served(standby, target_db.dsn()) as client:
                monitor = Monitor(client, target_db)
                await monitor.ends()
                assert program.pid is not None
                os.kill(program.pid, signal.SIGSTOP)
                await source_db.execute("INSERT INTO t VALUES (1)")
                said = await monitor.alarm("the launcher has not renewed its lease for [23]. s")
                assert said["state"] == "not responding"
                assert said["lag_seconds"] > 10
                os.kill(program.pid, signal.SIGCONT)
                await monitor.ends()
    finally:
        program.kill()
