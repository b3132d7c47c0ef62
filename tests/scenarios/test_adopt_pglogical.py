"""`subscriber adopt` takes over a subscription of pglogical while the publisher is written to.

Table log has no key, so duplicate rows are visible. pglogical has it in a replication set for INSERT only.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio.from_thread import BlockingPortal

from subscriber.cli.commands.adopt import adopt
from subscriber.demo.servers import Server, Servers
from subscriber.errors import SubscriberError
from subscriber.failpoints import Point, armed
from tests.matrix.debian import fetched
from tests.matrix.programs import NotAvailable
from tests.plugins.fix_cluster import SETTINGS, database_with_schema, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.test_adopt import Scene

SEED = int(os.environ.get("SUBSCRIBER_SOAK_SEED", random.randrange(10_000)))
ROUNDS = int(os.environ.get("SUBSCRIBER_SOAK_ROUNDS", "12"))
PUBLICATIONS = ("s_default", "s_default_insert_only")
# Debian's 18.6 permits only PostgreSQL's own plugins by default.
PGLOGICAL = {
    **SETTINGS,
    "shared_preload_libraries": "pglogical",
    "output_plugin_libraries": "pgoutput, pglogical_output",
}
POINTS = [
    Point.ADOPT_DISABLED,
    Point.ADOPT_STOPPED,
    Point.ADOPT_SLOT_COPIED,
    Point.ADOPT_READY,
    Point.ADOPT_COMMITTED,
    Point.ADOPTED,
]
QUICK = (Point.ADOPT_SLOT_COPIED, Point.ADOPT_COMMITTED)  # the other points are soak tests
SLOTS = "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
ENABLED = "SELECT sub_enabled FROM pglogical.subscription WHERE sub_name = 's'"
READY = "SELECT status FROM pglogical.show_subscription_status('s')"


def pglogical_programs() -> Path:
    """Return the programs of Debian's PostgreSQL 18 with pglogical. Skips the test without them."""
    try:
        bin = fetched(18)
    except NotAvailable as reason:
        pytest.skip(f"no pglogical: {reason}")
    if not list(bin.parent.glob("root/usr/lib/postgresql/18/lib/pglogical.so")):
        pytest.skip(f"no pglogical: {bin.parent} was fetched without it, remove it")
    return bin


@pytest.fixture(scope="session")
def pglogical_servers(portal: BlockingPortal, session_servers: Servers) -> list[Server]:
    bin = pglogical_programs()

    async def start(name: str) -> Server:
        server = await session_servers.create(f"pglogical {name}", PGLOGICAL, bin=bin)
        await server.start()
        return server

    return [portal.call(start, name) for name in ("publisher", "target")]


@dataclass
class PglogicalScene(Scene):
    """A provider with a writer, and a target whose subscription `s` is pglogical's."""

    async def prepare(self) -> None:
        for database in (self.source, self.target):
            await database.execute(
                "CREATE EXTENSION pglogical",
                "CREATE TABLE log (number int)",
                "CREATE TABLE other (number int PRIMARY KEY, note text)",
            )
        await self.source.execute(
            f"SELECT pglogical.create_node('provider', '{self.source.dsn()}')",
            "SELECT pglogical.replication_set_add_table('default_insert_only', 'log')",
            "SELECT pglogical.replication_set_add_table('default', 'other')",
        )

    async def publish(self) -> None:
        """Create the publications that the command asks for."""
        await self.source.execute(
            "CREATE PUBLICATION s_default FOR TABLE other",
            "CREATE PUBLICATION s_default_insert_only FOR TABLE log WITH (publish = 'insert, truncate')",
        )

    async def create_pglogical(self, options: str = "") -> None:
        """Create the subscription, and wait until its tables are ready."""
        await self.target.execute(
            f"SELECT pglogical.create_node('subscriber', '{self.target.dsn()}')",
            f"SELECT pglogical.create_subscription('s', '{self.source.dsn()}'{options})",
        )
        await self.target.wait_for(READY, "replicating", timeout=60)

    async def adopt(self, *publications: str) -> None:
        given = publications or PUBLICATIONS
        assert await adopt(self.target.dsn(), "s", json=True, publications=list(given)) == 0

    async def refuses_adopt(self, *expected: str, publications: tuple[str, ...] = PUBLICATIONS) -> str:
        """Check that the command refuses with an error that has these texts."""
        with pytest.raises(SubscriberError) as caught:
            await adopt(self.target.dsn(), "s", publications=list(publications))
        for text in expected:
            assert text in str(caught.value)
        return caught.value.hint or ""

    async def overwrite(self, number: int) -> None:
        """Check that an INSERT replaces a row of the target, which pglogical does by default."""
        await self.target.execute(f"INSERT INTO other VALUES ({number}, 'here')")
        await self.source.execute(f"INSERT INTO other VALUES ({number}, 'there')")
        await self.target.wait_for(f"SELECT note FROM other WHERE number = {number}", "there")

    async def assert_moved(self) -> None:
        """Check that the subscription is complete, and nothing but the node is left of pglogical's."""
        assert await self.target.value("SELECT count(*) FROM pglogical.subscription") == 0
        assert await self.source.rows(SLOTS) == [("s",)]
        assert (await self.ours() or {})["subenabled"] is True
        await self.assert_same()


@asynccontextmanager
async def pglogical_scene(source: Server, target: Server) -> AsyncIterator[PglogicalScene]:
    async with fresh_database(source) as source_db, database_with_schema(target) as target_db:
        scene = PglogicalScene(source_db, target_db)
        await scene.prepare()
        try:
            yield scene
        finally:  # its worker would create its slot again
            if await target_db.value("SELECT to_regclass('pglogical.subscription') IS NOT NULL"):
                await target_db.execute("SELECT pglogical.drop_subscription(sub_name) FROM pglogical.subscription")


@pytest.fixture
async def scene(pglogical_servers: list[Server]) -> AsyncIterator[PglogicalScene]:
    async with pglogical_scene(*pglogical_servers) as scene:
        yield scene


@pytest.mark.soak
async def test_a_subscription_of_pglogical_is_adopted_under_load(
    scene: PglogicalScene, capsys: pytest.CaptureFixture[str]
) -> None:
    """The statements that the first attempt asks for are those that the second one needs."""
    await scene.create_pglogical()
    hint = await scene.refuses_adopt("in place of which subscriber needs publications", publications=())
    for statement in hint.splitlines()[1:-1]:
        await scene.source.execute(statement)
    assert hint.splitlines()[-1] == f"Then: subscriber adopt s --publication {' --publication '.join(PUBLICATIONS)}"
    await scene.overwrite(-1)
    origin = "SELECT roident FROM pg_replication_origin WHERE roname {}"
    before = await scene.target.value(origin.format("LIKE 'pgl%'"))
    async with running_subscriber(scene.target), scene.writing():
        await anyio.sleep(0.3)
        await scene.adopt()
        await scene.source.execute("UPDATE other SET note = 'subscriber'")
        captured = capsys.readouterr()
        assert "conflict_policy is 'insert_exists: apply_remote'" in captured.err
        assert "SELECT pglogical.drop_node('subscriber'); DROP EXTENSION pglogical;" in captured.err
        assert '"event": "dropped"' in captured.out
        assert await scene.target.value(origin.format("~ '^pg_[0-9]'")) == before
        await scene.adopt()  # nothing to do
    async with running_subscriber(scene.target):
        await scene.assert_moved()
        await scene.overwrite(-2)
        await scene.source.execute("TRUNCATE log", "INSERT INTO log VALUES (0)")
        await scene.assert_same()
    assert scene.written > 100
    await scene.target.execute("SELECT pglogical.drop_node('subscriber')", "DROP EXTENSION pglogical")


@pytest.mark.parametrize("point", [pytest.param(p, marks=() if p in QUICK else pytest.mark.soak) for p in POINTS])
async def test_a_command_killed_at_each_step_continues(scene: PglogicalScene, point: Point) -> None:
    await scene.create_pglogical()
    await scene.publish()
    async with scene.writing():
        options = [argument for name in PUBLICATIONS for argument in ("--publication", name)]
        await scene.killed("adopt", point, options=options)
        enabled = await scene.target.value(ENABLED)
        ours = await scene.ours() or {}
        if point in (Point.ADOPT_COMMITTED, Point.ADOPTED):
            assert ours["subenabled"] is True
            assert enabled is (False if point is Point.ADOPT_COMMITTED else None)
        else:
            assert enabled is ours["subenabled"] is False
            (status,) = await scene.status()
            assert [(problem.kind, problem.hint) for problem in status.problems] == [
                ("adopted in part", "If it was killed, run it again: subscriber adopt s")
            ]
        assert await adopt(scene.target.dsn(), "s", json=True) == 0
    async with running_subscriber(scene.target):
        await scene.assert_moved()


async def test_an_error_leaves_the_subscription_as_it_was(
    scene: PglogicalScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in the last step, and once before it: pglogical may not have executed DDL that it sends meanwhile."""
    await scene.create_pglogical()
    await scene.publish()
    await scene.target.execute("ALTER TABLE other RENAME TO another")  # it has no changes
    slots = await scene.source.rows(SLOTS)

    async def assert_unchanged() -> None:
        assert await scene.target.value(ENABLED) is True
        assert await scene.ours() is None
        assert await scene.source.rows(SLOTS) == slots

    async with scene.writing():
        await scene.refuses_adopt('relation "public.other" does not exist')
        await assert_unchanged()
    await scene.target.execute("ALTER TABLE another RENAME TO other")

    def send() -> None:
        command = "SELECT pglogical.replicate_ddl_command('CREATE TABLE public.third (id int)')"
        subprocess.run([scene.source.server.bin / "psql", scene.source.dsn(), "-Xqc", command], check=True)

    with monkeypatch.context() as patched:
        patched.setitem(armed, Point.ADOPT_STOPPED, send)
        await scene.refuses_adopt("pglogical has sent commands while the subscription was taken over")
    await assert_unchanged()
    await scene.target.wait_for("SELECT to_regclass('public.third') IS NOT NULL")
    await scene.adopt()
    async with running_subscriber(scene.target):
        await scene.assert_moved()


async def test_a_slot_of_another_program_is_not_dropped(
    scene: PglogicalScene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with the name of the subscription is created while the command runs, and after it was killed."""
    await scene.create_pglogical()
    await scene.publish()
    create = "SELECT pg_create_logical_replication_slot('s', 'pgoutput')"

    def create_slot() -> None:
        subprocess.run([scene.source.server.bin / "psql", scene.source.dsn(), "-Xqc", create], check=True)

    with monkeypatch.context() as patched:
        patched.setitem(armed, Point.ADOPT_STOPPED, create_slot)
        await scene.refuses_adopt('replication slot "s" already exists')
    assert ("s",) in await scene.source.rows(SLOTS)
    assert await scene.target.value(ENABLED) is True
    assert 'replication slot "s" was not copied by this command, and stays' in capsys.readouterr().err
    await scene.source.execute("SELECT pg_drop_replication_slot('s')")
    options = [argument for name in PUBLICATIONS for argument in ("--publication", name)]
    await scene.killed("adopt", Point.ADOPT_STOPPED, options=options)
    await scene.source.execute(create)
    await scene.refuses_adopt('The publisher has a replication slot "s" already.')
    assert ("s",) in await scene.source.rows(SLOTS)
    await scene.source.execute("SELECT pg_drop_replication_slot('s')")
    await scene.adopt()
    async with running_subscriber(scene.target):
        await scene.assert_moved()


async def test_adopt_refuses_by_name_what_it_cannot_replicate_exactly(scene: PglogicalScene) -> None:
    """Each statement that an error proposes removes its obstacle."""
    await scene.source.execute(
        "CREATE SEQUENCE numbers",
        "CREATE TABLE part (id int PRIMARY KEY, secret text)",
        "SELECT pglogical.replication_set_add_sequence('default', 'numbers')",
        "SELECT pglogical.replication_set_add_table('default', 'part', row_filter := 'id > 0')",
    )
    await scene.target.execute("CREATE SEQUENCE numbers", "CREATE TABLE part (id int PRIMARY KEY, secret text)")
    await scene.create_pglogical(", apply_delay := '1 ms'")
    await scene.publish()
    await scene.target.execute(
        "SELECT pglogical.alter_subscription_disable('s')",
        f"ALTER DATABASE {scene.target.name} SET pglogical.conflict_resolution = first_update_wins"
        if await scene.target.value("SHOW track_commit_timestamp") == "on"
        else "SELECT 1",
    )
    hint = await scene.refuses_adopt(
        "It is disabled",
        "contain sequences, which no publication carries: public.numbers",
        "row filters on other rows than publications do: public.part in default",
        "It has an apply_delay",
        "SELECT pglogical.replication_set_remove_sequence('default', '\"public\".\"numbers\"');",
        "SELECT pglogical.alter_subscription_enable('s');",
    )
    for line in hint.splitlines():
        if line.startswith("UPDATE") or "alter_subscription_enable" in line:
            await scene.target.execute(line)
        elif "remove_sequence" in line:
            await scene.source.execute(line[line.index("SELECT") : line.index(";")])
    await scene.source.execute(
        "SELECT pglogical.replication_set_remove_table('default', 'part')",
        "SELECT pglogical.replication_set_add_table('default', 'part', columns := '{id}')",
        "ALTER PUBLICATION s_default ADD TABLE part",
        "ALTER PUBLICATION s_default_insert_only SET (publish = 'insert')",
    )
    hint = await scene.refuses_adopt(
        "contain these columns of public.part: secret",
        "publish other actions of public.log than the publications: insert, truncate",
        'CREATE PUBLICATION "s_default" FOR TABLE "public"."other", "public"."part" ("id") WITH',
    )
    await scene.source.execute("DROP PUBLICATION s_default, s_default_insert_only")
    await scene.refuses_adopt("The publisher does not have: s_default, s_default_insert_only.")
    for line in dict.fromkeys(hint.splitlines()):
        if line.startswith("CREATE PUBLICATION"):
            await scene.source.execute(line)
    await scene.source.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    hint = await scene.refuses_adopt('The publisher has a replication slot "s" already.')
    await scene.source.execute(hint[hint.index("SELECT") :])
    await scene.adopt()
    async with running_subscriber(scene.target):
        await scene.assert_moved()


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_adopt_loses_nothing_when_command_and_servers_are_killed_at_random(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each round takes over a subscription, while the command and both servers are killed."""
    chance, counts, bin = random.Random(SEED), Counter[str](), pglogical_programs()
    source, target = [await servers.create(name, PGLOGICAL, bin=bin) for name in ("publisher", "target")]
    for server in (source, target):
        await server.start()
    for _ in range(ROUNDS):
        async with pglogical_scene(source, target) as scene:
            await scene.create_pglogical()
            await scene.publish()
            options = [argument for name in PUBLICATIONS for argument in ("--publication", name)]
            arguments = ["-m", "subscriber", "adopt", "s", "--target", scene.target.dsn(), *options]
            faults = [chance.choice(["command", "target", "publisher"]) for _ in range(chance.randint(1, 3))]
            for fault in [*faults, ""]:
                async with scene.writing() if fault != "publisher" else nullcontext():
                    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=-1, stderr=-1)
                    if fault:
                        await asyncio.sleep(chance.uniform(0.5, 2.0))
                        counts[fault] += process.returncode is None
                    if fault == "command" and process.returncode is None:
                        process.kill()
                    elif fault in ("target", "publisher"):
                        server = target if fault == "target" else source
                        await server.kill9()
                        await server.start()
                    _, errors = await process.communicate()
                    assert process.returncode in ((0, 3, -9) if fault else (0, 3)), errors.decode()
            async with asyncio.timeout(120):
                while await scene.target.value("SELECT count(*) FROM pglogical.subscription"):
                    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=-1, stderr=-1)
                    await process.communicate()
            async with running_subscriber(scene.target):
                await scene.assert_moved()
            counts["rows"] += scene.written
    with capsys.disabled():
        print(f"\nseed {SEED}: identical after {dict(counts)} in {ROUNDS} rounds")
