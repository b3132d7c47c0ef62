"""Failover slots: the publisher's primary is killed or switched over under load, and the subscription follows."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import asyncpg
import pytest

from subscriber.check.check import collect
from subscriber.check.model import Finding, Level
from subscriber.check.rules import findings
from subscriber.cli.commands.status import status as show_status
from subscriber.demo.servers import Server, Servers
from tests.plugins.fix_cluster import SETTINGS, Database, ServerOf
from tests.scenarios.conftest import Pair
from tests.scenarios.standbys import promote, standby_of

WORKER = "subscriber.worker w JOIN subscriber.subscription s USING (subid) WHERE s.subname = 's' AND w.relid = 0"
ROWS = "SELECT id, n FROM t ORDER BY id"
END_OF_TIMELINE_1 = """
SELECT split_part(line, E'\\t', 2) FROM regexp_split_to_table(pg_read_file('pg_wal/00000002.history'), E'\\n') line
 WHERE line LIKE E'1\\t%'
"""
SYNCED = """
SELECT EXISTS (SELECT FROM pg_replication_slots
                WHERE slot_name = 's' AND synced AND NOT temporary AND invalidation_reason IS NULL)
"""


@dataclass
class Load:
    """A client that writes rows to the primary among the servers, and remembers its acknowledged transactions."""

    servers: tuple[Server, ...]
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    acknowledged: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Write until canceled, and connect again after an error."""
        for server in itertools.cycle(self.servers):
            with suppress(
                OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError
            ):
                connection = await asyncpg.connect(server.dsn(), timeout=5)
                try:
                    for number in self.numbers:
                        await connection.execute(f"INSERT INTO t VALUES ({number}, 0); UPDATE t SET n = n + 1")
                        self.acknowledged.append(number)
                finally:
                    connection.terminate()
            await anyio.sleep(0.05)

    async def wait_for(self, more: int) -> None:
        """Wait until `more` transactions were acknowledged."""
        wanted = len(self.acknowledged) + more
        with anyio.fail_after(20):
            while len(self.acknowledged) < wanted:
                await anyio.sleep(0.01)


@asynccontextmanager
async def writing(*servers: Server) -> AsyncIterator[Load]:
    """Run a Load in the block."""
    load = Load(servers)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        yield load
        tasks.cancel_scope.cancel()


@dataclass
class Cluster:
    """A primary that the subscription of `pair` follows, and its hot standby."""

    pair: Pair
    first: Server
    second: Server

    async def synchronized(self) -> None:
        """Wait until the standby has a permanent copy of the slot."""
        with anyio.fail_after(20):
            while not await Database(self.second, "postgres").value(SYNCED):
                # The copy becomes permanent when the slot has passed such a record. Otherwise one comes every 15 s.
                await Database(self.first, "postgres").execute("SELECT pg_log_standby_snapshot()")
                await anyio.sleep(0.05)

    async def promote(self) -> None:
        """Make the standby the primary, and the source of the pair."""
        await promote(self.second)
        self.pair.source = Database(self.second, "postgres")

    async def assert_same(self) -> None:
        await self.pair.caught_up()
        await self.pair.assert_same(ROWS)


class MakeCluster(Protocol):
    async def __call__(
        self,
        major: int = 18,
        *,
        session: str = "read-write",
        sync: bool = True,
        two_phase: bool = False,
        **settings: str,
    ) -> Cluster:
        """Create a cluster.

        Args:
            major: the version of both servers.
            session: target_session_attrs of the subscription's connection string.
            sync: the standby has sync_replication_slots = on; else ALTER SYSTEM can set it.
            two_phase: an option of the subscription.
            settings: of the primary. They apply once there is a standby.
        """


@pytest.fixture
def make_cluster(servers: Servers, pair: Pair, server_of: ServerOf) -> MakeCluster:
    """Return the function that creates the servers and the subscription."""

    async def make(
        major: int = 18,
        *,
        session: str = "read-write",
        sync: bool = True,
        two_phase: bool = False,
        **settings: str,
    ) -> Cluster:
        first = await servers.create("first", SETTINGS, bin=server_of("publisher", major).bin)
        await first.start(wal_level="logical")
        pair.source = Database(first, "postgres")
        await pair.both("CREATE TABLE t (id int PRIMARY KEY, n int)")
        programs = pair.target.server if major < 18 else first
        own = {"hot_standby_feedback": "on", **({"sync_replication_slots": "on"} if sync else {})}
        second = await standby_of(first, servers, "second", programs=programs, **own)
        for name, value in settings.items():
            await pair.source.execute(f"ALTER SYSTEM SET {name} = '{value}'", "SELECT pg_reload_conf()")
        await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
        dsn = (
            f"host=127.0.0.1,127.0.0.1 port={first.port},{second.port} dbname=postgres user=postgres"
            f" target_session_attrs={session}"
        )
        await pair.subscriber.create(dsn, "p", "s", failover=True, two_phase=two_phase)
        await pair.subscriber.wait_for_ready(pair.source)
        return Cluster(pair, first, second)

    return make


@pytest.mark.parametrize(
    ("major", "synchronous"),
    [(18, "*"), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((17, "*"), (19, "*"), (19, "")))],
)
async def test_a_primary_is_killed_under_load(make_cluster: MakeCluster, major: int, synchronous: str) -> None:
    """The target has the rows of the new primary, and with a synchronous standby every acknowledged transaction."""
    cluster = await make_cluster(major, synchronized_standby_slots="second", synchronous_standby_names=synchronous)
    pair = cluster.pair
    await cluster.synchronized()
    async with writing(cluster.first, cluster.second) as load:
        await load.wait_for(100)
        await cluster.first.kill9()
        # The standby is not promoted yet. The worker retries.
        await pair.fails(f"port {cluster.second.port} failed: session is read-only")
        await cluster.promote()
        await load.wait_for(100)
        await pair.subscriber.restart()
        await load.wait_for(100)
    await cluster.assert_same()
    if synchronous:
        assert {id for (id, _) in await pair.rows(ROWS)} >= set(load.acknowledged)
    assert pair.subscriber.log.has("LOG:  the publisher continues on timeline 2; timeline 1 ended at [0-9A-F/]+")


async def test_a_primary_is_switched_over_under_load(make_cluster: MakeCluster) -> None:
    """The connection string accepts standbys. The worker waits for the promotion, and is restarted meanwhile."""
    cluster = await make_cluster(session="any", synchronized_standby_slots="second")
    pair = cluster.pair
    await cluster.synchronized()
    async with writing(cluster.first, cluster.second) as load:
        await load.wait_for(100)
        await cluster.first.stop()
        await pair.fails("ERROR:  the publisher is a standby that is not promoted")
        status = await pair.subscriber.wait_for_state("waiting to retry")
        assert "target_session_attrs=read-write" in status["error_hint"]
        await pair.subscriber.restart()
        await cluster.promote()
        await load.wait_for(100)
    await cluster.assert_same()
    # A clean stop waits until the standby has everything.
    assert {id for (id, _) in await pair.rows(ROWS)} >= set(load.acknowledged)


async def test_changes_that_an_asynchronous_standby_lost_under_load_are_named(make_cluster: MakeCluster) -> None:
    """The walsender does not wait for the standby, which stops receiving. A client writes to either primary."""
    cluster = await make_cluster()
    pair = cluster.pair
    await cluster.synchronized()
    async with writing(cluster.first, cluster.second) as load:
        await load.wait_for(50)
        await cluster.second.stop()
        await load.wait_for(50)
        await pair.target.wait_for(f"SELECT max(id) >= {load.acknowledged[-1]} FROM t")
        await cluster.first.kill9()
        await cluster.second.start()
        await cluster.promote()
        status = await pair.subscriber.wait_for_state("stopped")
        await load.wait_for(50)
        assert status["error"] == "the publisher has failed over to a server without all changes that were applied"
        named = await pair.subscriber.log.wait_for(
            "DETAIL:  Changes up to ([0-9A-F/]+) of timeline 1 were applied. The publisher, on timeline 2, has none of "
            "them after ([0-9A-F/]+)"
        )
        (end,) = {end for (end,) in await pair.source.rows(END_OF_TIMELINE_1)}
        assert named[2] == end
        there = {id for (id,) in await pair.source.rows("SELECT id FROM t")}
        only_here = {id for (id,) in await pair.rows("SELECT id FROM t")} - there
        assert only_here
        (accept,) = re.findall(r"ALTER SUBSCRIPTION [^;]*", status["error_hint"])
        await pair.subscriber.execute(accept)
        await load.wait_for(50)
    await pair.caught_up()
    published, here = dict(await pair.source.rows(ROWS)), dict(await pair.rows(ROWS))
    assert {id: here[id] for id in published} == published
    assert here.keys() - published.keys() == only_here


async def failover_warnings(pair: Pair) -> list[Finding]:
    facts = await collect(pair.target.dsn(), None, [], "s")
    return [
        finding
        for finding in findings(facts)
        if finding.level is not Level.OK and finding.subject.startswith(("publisher", "standby"))
    ]


@pytest.mark.parametrize("major", [pytest.param(17, marks=pytest.mark.soak), 19])
async def test_check_and_status_explain_a_failover_slot(
    make_cluster: MakeCluster, major: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The statements of `subscriber check` are enough. With the standby stopped, both name its slot."""
    cluster = await make_cluster(major, sync=False)
    pair = cluster.pair
    standby = f"standby 127.0.0.1:{cluster.second.port}"
    warnings = await failover_warnings(pair)
    assert [(finding.subject, finding.message.split(":")[0]) for finding in warnings] == [
        ("publisher", "synchronized_standby_slots is empty"),
        (standby, 'replication slot "s" is not synchronized; after a promotion the subscription would stop'),
        (standby, "sync_replication_slots is off"),
    ]
    for warning in warnings:
        if warning.fix is not None and warning.fix.startswith("ALTER SYSTEM"):
            server = cluster.first if warning.subject == "publisher" else cluster.second
            await Database(server, "postgres").execute(*warning.fix.split("; "))
    await cluster.synchronized()
    assert await failover_warnings(pair) == []
    await cluster.second.stop()
    await pair.source.execute("INSERT INTO t VALUES (1, 1)")
    with anyio.fail_after(20):
        waits = 'standby +the walsender waits for synchronized_standby_slots: "second", which is inactive'
        while re.search(waits, capsys.readouterr().out) is None:
            await show_status(pair.target.dsn())
    inactive, unreachable = await failover_warnings(pair)
    assert inactive.message == 'the walsender waits for standby slot "second", which is inactive: no changes are sent'
    assert (unreachable.subject, unreachable.message.split(":")[0]) == (standby, "cannot be checked")
    assert await pair.rows(ROWS) == []
    await cluster.second.start()
    await cluster.assert_same()


async def test_a_slot_that_was_not_synchronized_is_made_again(make_cluster: MakeCluster) -> None:
    """The hint of the error has the statements. The changes before them are missing."""
    cluster = await make_cluster(sync=False)
    pair = cluster.pair
    await cluster.first.kill9()
    await cluster.promote()
    await pair.source.execute("INSERT INTO t VALUES (1, 1)")
    status = await pair.subscriber.wait_for_state("stopped")
    assert status["error"] == 'could not start WAL streaming: ERROR:  replication slot "s" does not exist'
    create, alter = re.findall(
        r"(SELECT pg_create[^;]*); Then (ALTER SUBSCRIPTION … SET \([^)]*\))", status["error_hint"]
    )[0]
    await pair.source.execute(create)
    await pair.subscriber.execute(alter.replace("…", "s"))
    await pair.change("INSERT INTO t VALUES (2, 2)")
    assert await pair.rows(ROWS) == [(2, 2)]
    assert await pair.source.value("SELECT failover FROM pg_replication_slots WHERE slot_name = 's'")


async def test_changes_that_an_asynchronous_standby_lost_are_accepted(make_cluster: MakeCluster) -> None:
    """The walsender does not wait for the standby, so the target has transactions that the new primary lacks.

    The statement of the hint continues with everything that the new primary has. Its first transactions are at
    positions that the target had reached before.
    """
    cluster = await make_cluster(two_phase=True)
    pair = cluster.pair
    await cluster.synchronized()
    position = await pair.source.value("SELECT pg_current_wal_lsn()::text")
    await Database(cluster.second, "postgres").wait_for(f"SELECT pg_last_wal_replay_lsn() >= '{position}'")
    await cluster.second.stop()
    await pair.change("INSERT INTO t SELECT id, 0 FROM generate_series(1, 1000) id")
    await pair.change("BEGIN; INSERT INTO t VALUES (1001, 0); PREPARE TRANSACTION 'lost'")
    await cluster.first.kill9()
    await cluster.second.start()
    await cluster.promote()
    await pair.source.execute("INSERT INTO t VALUES (2001, 1)", "INSERT INTO t VALUES (2002, 1)")
    status = await pair.subscriber.wait_for_state("stopped")
    assert status["error"] == "the publisher has failed over to a server without all changes that were applied"
    (accept,) = re.findall(r"ALTER SUBSCRIPTION [^;]*", status["error_hint"])
    await pair.subscriber.execute(accept)
    await pair.target.wait_for(f"SELECT error_hint LIKE '%on the target: ROLLBACK PREPARED%' FROM {WORKER}")
    hint = (await pair.subscriber.worker())["error_hint"]
    (rollback,) = re.findall(r"ROLLBACK PREPARED [^;]*", hint)
    await pair.target.execute(rollback)
    assert f"Then: {accept};" in hint
    await pair.subscriber.execute(accept)
    await pair.change("INSERT INTO t VALUES (2003, 1)")
    assert await pair.rows("SELECT id FROM t WHERE n = 1 ORDER BY 1") == [(2001,), (2002,), (2003,)]
    assert await pair.rows("SELECT count(*), min(id), max(id) FROM t WHERE n = 0") == [(1000, 1, 1000)]
    await pair.fails("WARNING:  the publisher continues on timeline 2; timeline 1 ended at [0-9A-F/]+")
    assert pair.subscriber.log.has("DETAIL:  The target has changes of timeline 1 between [0-9A-F/]+ and [0-9A-F/]+")
    # The consent was for this failover only.
    assert await pair.rows("SELECT subacceptloss, subtimeline FROM subscriber.subscription") == [(False, 2)]
