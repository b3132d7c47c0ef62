"""A publisher lies in one field after another: neither the target nor a terminal executes any of its text."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.cli.commands.check import check
from subscriber.cli.commands.exec import execute_statements
from subscriber.cli.commands.status import status as show_status
from subscriber.cli.commands.tail import tail
from subscriber.cli.logs import JsonFormatter, PostgresFormatter, RichHandler
from subscriber.cli.messages import print_error
from subscriber.console import documents
from subscriber.console.facts import SubscriptionFacts
from subscriber.console.observer import Seen
from subscriber.display import json_text
from subscriber.errors import SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.status.collect import assess_all, read_catalog
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_hostile import CANARY, LIES, Hostile, Liar
from tests.plugins.fix_subscriber import Subscriber

TABLES = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE t (id int PRIMARY KEY, note text, feels mood);
CREATE TABLE bag (a int, b text);
ALTER TABLE bag REPLICA IDENTITY FULL;
"""
CREATE = "CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION p WITH ({options})"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028\udc80-\udcff]")
# The start of an entry in the target server's log; the text of a statement follows.
ENTRY = re.compile(r"^[0-9-]+ [0-9:.]+ UTC \[[0-9]+\] (\w+):  ", re.M)
STATEMENT = re.compile(r"(?:statement|execute [^:]*): ")


@dataclass
class Scene:
    source: Database
    target: Database
    liar: Liar
    subscriber: Subscriber
    capfd: pytest.CaptureFixture[str]
    outputs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    read: int = 0  # bytes of the server's log

    @property
    def dsn(self) -> str:
        return self.liar.dsn(self.source.dsn())

    async def execute(self, *statements: str) -> None:
        """Run SUBSCRIPTION statements as `subscriber exec` does, and ignore their errors."""
        for statement in statements:
            output = io.StringIO()
            try:
                await execute_statements(self.target.dsn(), statement, output)
            except SubscriberError as error:
                print_error(error, statement, output)
            self.outputs.append(output.getvalue())

    async def attempt(self, function: Callable[[], Awaitable[object]]) -> None:
        """Run a command; its error is printed as the command line prints it."""
        try:
            await function()
        except BaseException as error:  # a group, one member of which has the cause
            cause = root_cause(error) if isinstance(error, BaseExceptionGroup) else error
            if not isinstance(cause, SubscriberError):
                raise
            output = io.StringIO()
            print_error(cause, "", output)
            self.outputs.append(output.getvalue())

    async def look(self) -> None:
        """Collect all output about the subscription that users see."""
        for json in (False, True):
            await self.attempt(lambda json=json: show_status(self.target.dsn(), json=json))  # type: ignore[misc]
            await self.attempt(lambda json=json: check(self.target.dsn(), "s", json=json))  # type: ignore[misc]
        async with CatalogConnection.open(self.target.dsn(), "test") as catalog:
            look = await read_catalog(catalog)
        seen = Seen(look, await assess_all(look))
        target = documents.overview("1", "", seen, "active", {})
        self.outputs.append(json_text(target))
        for status in seen.statuses:
            self.outputs.append(json_text(documents.detail(target, look, status, SubscriptionFacts(), ())))

    async def check(self, what: str) -> None:
        """Check the effects of this lie."""
        self.outputs += self.capfd.readouterr()
        self.outputs += self.logged()
        for output in self.outputs:
            if match := RAW.search(output):
                self.wrong.append(f"{what}: raw {match[0]!r} in {output[max(0, match.start() - 80) :][:200]!r}")
            if "\n2030-01-01 00:00:00.000 UTC" in f"\n{output}":
                self.wrong.append(f"{what}: a forged line in {output!r}")
        self.outputs.clear()
        self.subscriber.log.clear()
        if await self.target.value(f"SELECT to_regclass('public.{CANARY}') IS NOT NULL"):
            self.wrong.append(f"{what}: it has made a table")
            await self.target.execute(f"DROP TABLE public.{CANARY}")
        if await self.target.value(f"SELECT to_regrole('{CANARY}') IS NOT NULL"):
            self.wrong.append(f"{what}: it has made a role")
            await self.target.execute(f"DROP ROLE {CANARY}")
        for text in self.statements():
            if CANARY in re.sub(r'"(?:[^"]|"")*"', "", text):  # but as a name, of an index, it is in its place
                self.wrong.append(f"{what}: part of a statement: {text!r:.300}")

    def logged(self) -> list[str]:
        """Return the launcher's log in each format, and in that of other handlers."""
        records = self.subscriber.log.records
        rich = io.StringIO()
        handler = RichHandler(rich)
        for record in records:
            handler.emit(record)
        texts = [formatter.format(record) for formatter in (PostgresFormatter(), JsonFormatter()) for record in records]
        return [*texts, rich.getvalue(), *(record.getMessage() for record in records)]

    def statements(self) -> list[str]:
        """Return the statements that the target's server has run since the last call, without parameters."""
        with self.target.server.log.open("rb") as log:
            log.seek(self.read)
            text = log.read().decode(errors="replace")
            self.read = log.tell()
        parts = ENTRY.split(text)[1:]
        entries = zip(parts[::2], parts[1::2], strict=True)
        of_check = re.compile(r"(?:statement|execute [^:]*): (?:SELECT to_reg|DROP (?:TABLE|ROLE) )")
        return [
            said
            for label, said in entries
            if (label == "STATEMENT" or (label == "LOG" and STATEMENT.match(said))) and not of_check.match(said)
        ]

    async def clear(self) -> None:
        """Remove all traces of the subscription."""
        self.liar.tell(None)
        await self.subscriber.stop()
        async with self.target.connection() as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid()"
            )
            query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            for (gid,) in await connection.fetch(query):
                await connection.execute(f"ROLLBACK PREPARED '{gid}'")
            await connection.execute(
                "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin, subscriber.subscription"
                " WHERE roname = 'pg_' || subid::text OR roname LIKE 'pg_' || subid::text || '\\_%'"
            )
            await connection.execute("DELETE FROM subscriber.subscription; TRUNCATE t, bag")
        async with self.source.connection() as connection:
            slots = "FROM pg_replication_slots WHERE database = current_database()"
            await connection.execute(f"SELECT pg_terminate_backend(active_pid, 5000) {slots} AND active")
            await connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {slots}")


@pytest.fixture
async def scene(
    source_db: Database,
    target_db: Database,
    hostile: Hostile,
    subscriber: Subscriber,
    capfd: pytest.CaptureFixture[str],
) -> AsyncIterator[Scene]:
    await subscriber.stop()
    await subscriber.execute()  # which makes schema subscriber
    for database in (source_db, target_db):
        await database.execute(TABLES)
    await source_db.execute("INSERT INTO t VALUES (1, 'a', 'ok')", "INSERT INTO bag VALUES (1, 'x')")
    await source_db.execute(
        "CREATE INDEX t_note ON t (lower(note)) WHERE id > 0",
        "CREATE PUBLICATION p FOR TABLE t, bag",
        "SELECT pg_replication_origin_create('elsewhere')",
    )
    await target_db.execute(f"ALTER DATABASE {target_db.name} SET log_statement = 'all'")
    liar = await hostile.to(source_db.server.port)
    scene = Scene(source_db, target_db, liar, subscriber, capfd)
    scene.statements()
    yield scene
    await scene.clear()
    await source_db.execute("SELECT pg_replication_origin_drop('elsewhere')")


# --- actions of subscriptions ---------------------------------------------------------------------


async def statements(scene: Scene) -> None:
    await scene.execute(
        CREATE.format(dsn=scene.dsn, options="origin = none"),
        "ALTER SUBSCRIPTION s REFRESH PUBLICATION",
        "ALTER SUBSCRIPTION s DISABLE",
        "ALTER SUBSCRIPTION s SET (failover = true)",
    )
    await scene.look()
    await scene.execute("DROP SUBSCRIPTION s")


async def worker(scene: Scene) -> None:
    """Copies, then changes of every kind, then a restart."""
    async with scene.liar.honestly():
        options = "two_phase, streaming = parallel, copy_engine = snapshot"
        await scene.execute(CREATE.format(dsn=scene.dsn, options=options))
    scene.subscriber.start()
    await settled(scene)
    async with scene.source.connection() as connection:
        await connection.execute("SELECT pg_replication_origin_session_setup('elsewhere')")
        await connection.execute("INSERT INTO t VALUES (2, 'b', 'sad')")
    await scene.source.execute(
        "UPDATE bag SET b = 'y'; DELETE FROM t WHERE id = 1",
        "BEGIN; INSERT INTO bag VALUES (2, 'z'); PREPARE TRANSACTION 'its own'",
        "COMMIT PREPARED 'its own'",
        "TRUNCATE t, bag; INSERT INTO t VALUES (1, 'a', 'ok'); INSERT INTO bag VALUES (1, 'x')",
    )
    await settled(scene)
    async with scene.liar.honestly():
        await scene.look()
    await scene.subscriber.stop()


async def settled(scene: Scene) -> None:
    """Wait until everything is applied, or an error has occurred."""
    position = await scene.source.value("SELECT pg_current_wal_lsn()::text")
    with anyio.move_on_after(3):
        while not scene.subscriber.log.has("ERROR:  "):
            reached = await scene.target.value(
                "SELECT count(*) = 1 FROM subscriber.worker WHERE relid = 0 AND latest_end_lsn >= $1::text::pg_lsn"
                " AND NOT EXISTS (SELECT FROM subscriber.subscription_rel WHERE srsubstate NOT IN ('r', 's'))",
                position,
            )
            if reached:
                return
            await anyio.sleep(0.05)


async def indexes(scene: Scene) -> None:
    """Copies by ranges, and indexes after them."""
    async with scene.liar.honestly():
        options = "copy_engine = ranges, copy_indexes = after"
        await scene.execute(CREATE.format(dsn=scene.dsn, options=options))
    scene.subscriber.start()
    await settled(scene)
    await scene.subscriber.stop()
    assert scene.liar.field or await scene.target.value("SELECT to_regclass('t_note') IS NOT NULL")
    await scene.target.execute("DROP INDEX IF EXISTS t_note")


async def new(scene: Scene) -> None:
    """Create a new subscription, and read the change stream."""
    for json in (False, True):
        await scene.attempt(lambda json=json: check(scene.target.dsn(), None, scene.dsn, ["p", "q"], json=json))  # type: ignore[misc]
        with anyio.move_on_after(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_write, scene)
                await scene.attempt(lambda json=json: tail(scene.dsn, ["p"], slot=None, limit=4, json=json))  # type: ignore[misc]
                tasks.cancel_scope.cancel()


async def _write(scene: Scene) -> None:
    while True:
        await anyio.sleep(0.1)
        await scene.source.execute("SELECT pg_logical_emit_message(true, 'prefix', 'content')", "UPDATE bag SET b = b")


DONE: set[str] = set()  # lies that another test of this run has used


def is_quick(name: str) -> bool:
    """Tags and errors all take the same way, and most parameters none: one of each will do, but at length."""
    if name.startswith("parameter "):
        return name in ("parameter server_version", "parameter client_encoding", "parameter in_hot_standby")
    return not name.endswith((" tag", " error")) or name.startswith(("IDENTIFY_SYSTEM", "SELECT pubname"))


@pytest.mark.parametrize("at_length", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "play", [statements, worker, *(pytest.param(play, marks=pytest.mark.soak) for play in (indexes, new))]
)
@pytest.mark.xdist_group("lies")
@pytest.mark.timeout(1800)
async def test_a_lie_in_each_field(scene: Scene, play: Callable[[Scene], Awaitable[None]], at_length: bool) -> None:
    await play(scene)
    assert "ERROR:  " not in "".join([*scene.outputs, *scene.logged()])
    await scene.check("no lie")
    await scene.clear()
    assert not scene.wrong
    told = [name for name in scene.liar.seen if at_length or (is_quick(name) and name not in DONE)]
    if not at_length:
        told = told[::16]
    DONE.update(told)
    assert len(scene.liar.seen) > 20
    for number, name in enumerate(told):
        for lie in LIES if at_length else [LIES[number % len(LIES)]]:
            scene.liar.tell(name, lie)
            await play(scene)
            await scene.check(f"{name}: {lie!r:.20}")
            await scene.clear()
    assert not scene.wrong, "\n".join(scene.wrong)
