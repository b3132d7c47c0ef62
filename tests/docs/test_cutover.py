"""The commands of docs/cutover.md, unchanged, while applications open a connection for every transaction."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread
import asyncpg
import pytest

from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.worker_sessions import register_without_place
from tests.docs.test_tutorials import bash
from tests.migration.writers import check_acknowledged
from tests.plugins.fix_cluster import Database
from tools.docs.documents import blocks

CUTOVER = Path("docs/cutover.md")
APPLICATIONS = 4
PAUSE = "sleep 1\n"  # for the applications to write
# The other server has something to catch up on when this one is fenced.
LAG = "psql -q \"$SUBSCRIBER_{}_DSN\" -o lag -c 'BEGIN; LOCK TABLE account; SELECT pg_sleep(4); COMMIT' & sleep 0.5\n"

SCHEMA = (
    "CREATE SEQUENCE ticket CACHE 5",
    'CREATE SEQUENCE "Down ""and"" down" INCREMENT -1',
    "CREATE SEQUENCE rare; SELECT setval('rare', 1000, false)",  # not used before the database has moved
    "CREATE TABLE item (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, token text, ticket bigint, down bigint)",
    "CREATE TABLE account (application int PRIMARY KEY, items int)",
    f"INSERT INTO account SELECT n, 0 FROM generate_series(1, {APPLICATIONS}) n",
)
WORK = """
WITH done AS (UPDATE account SET items = items + 1 WHERE application = $1)
INSERT INTO item (token, ticket, down)
VALUES ($2, nextval('ticket'), nextval('"Down ""and"" down"')) RETURNING id, ticket, down
"""

# Errors that asyncpg raises when a session ends at any moment.
LOST = (asyncpg.ConnectionDoesNotExistError, asyncpg.InterfaceError, asyncpg.InternalClientError)


@dataclass
class Application:
    """Writes to whichever server admits it, with a connection for every transaction."""

    number: int
    servers: Sequence[Database]
    role: str
    acknowledged: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # token: id, ticket, down
    written_to: list[str] = field(default_factory=list)  # the names of the databases, each time another one
    last: list[str] = field(default_factory=list)  # tokens written to the last server
    unexpected: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Write until canceled. A transaction whose end is unknown has a token that is not acknowledged."""
        for attempt in range(1_000_000):
            database = random.choice(self.servers)
            token = f"{self.number}-{attempt}"
            try:
                async with asyncio.timeout(60):
                    connection = await asyncpg.connect(database.dsn(user=self.role))
                    try:
                        row = await connection.fetchrow(WORK, self.number, token)
                    finally:
                        connection.terminate()
            except asyncpg.TooManyConnectionsError:
                await asyncio.sleep(0.02)
                continue
            # Ended while it connects or works; the new server has no tables yet.
            except (asyncpg.AdminShutdownError, OSError, *LOST, asyncpg.UndefinedTableError):
                continue
            except Exception as error:
                self.unexpected.append(repr(error))
                continue
            assert row is not None
            self.acknowledged[token] = tuple(row)
            if self.written_to[-1:] != [database.name]:
                self.written_to.append(database.name)
                self.last.clear()
            self.last.append(token)


@asynccontextmanager
async def applications(servers: Sequence[Database]) -> AsyncIterator[list[Application]]:
    """Run applications during the block, as a role that is not a superuser."""
    role = f"app_{secrets.token_hex(4)}"
    for database in servers:
        await database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        await servers[0].execute(
            f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}",
        )
        writers = [Application(number, servers, role) for number in range(1, APPLICATIONS + 1)]
        tasks = [asyncio.create_task(application.run()) for application in writers]
        yield writers
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for database in servers:
            await database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def script(old: Database, new: Database) -> dict[str, str]:
    """Return the commands of the page by its parts, for these databases."""
    text = (Path(__file__).parent.parent.parent / CUTOVER).read_text()
    commands: dict[str, str] = {}
    every = iter(blocks(CUTOVER, "sh"))
    for title, part in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        commands[title] = "".join(next(every) for _ in range(part.count("```sh")))
    assert next(every, None) is None
    for name, database in (("old", old), ("new", new)):
        commands["The tools"], count = re.subn(
            rf"postgresql://postgres@{name}.example/shop", database.dsn(), commands["The tools"]
        )
        assert count == 1
    commands["Before"] = "".join(
        line for line in commands["Before"].splitlines(True) if "subscriber verify" not in line
    )
    return commands


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "returns",
    [
        pytest.param(False, id="there", marks=pytest.mark.soak),
        pytest.param(True, id="there and back and there", marks=pytest.mark.soak),
    ],
)
async def test_no_acknowledged_commit_is_lost(
    source_db: Database, target_db: Database, processes: Path, returns: bool
) -> None:
    for database in (source_db, target_db):
        await database.needs(16, "a publisher knows origins")
    await source_db.execute(*SCHEMA)
    parts = script(source_db, target_db)
    way = [LAG.format("TARGET") + parts["The moment"]]
    if returns:
        way += [LAG.format("SOURCE") + parts["The way back"], way[0]]
    commands = parts["The tools"] + parts["Before"] + PAUSE + PAUSE.join(way) + PAUSE + parts["The end"]
    async with applications([source_db, target_db]) as apps:
        await anyio.to_thread.run_sync(bash, commands, processes, source_db.server.bin)
    acknowledged = {token: row for application in apps for token, row in application.acknowledged.items()}
    assert [error for application in apps for error in application.unexpected] == []
    moves = [source_db.name, target_db.name] * len(way)
    assert {tuple(application.written_to) for application in apps} == {tuple(moves[: len(way) + 1])}
    there = await check_acknowledged(acknowledged, target_db)
    # The old server has followed to the end: it has all rows written on the new one, and no others.
    followed = {token: tuple(row) for token, *row in await source_db.rows("SELECT token, id, ticket, down FROM item")}
    assert followed.items() <= there.items()
    assert any(token in followed for application in apps for token in application.last)
    assert await target_db.value("SELECT nextval('rare')") == 1000
    for database in (source_db, target_db):
        slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        assert await database.value(slots) == 0


async def test_sequences_only_move_forward_and_none_is_skipped(
    source_db: Database, target_db: Database, processes: Path
) -> None:
    tools = script(source_db, target_db)["The tools"]
    for database in (source_db, target_db):
        await database.execute(
            "CREATE SEQUENCE up", "CREATE SEQUENCE down INCREMENT -1", "CREATE SEQUENCE same", "CREATE SEQUENCE behind"
        )
    await source_db.execute(
        "SELECT setval('up', 20), setval('down', -20), setval('same', 7), setval('behind', 7, false)"
    )
    await target_db.execute(
        "SELECT setval('up', 10), setval('down', -10), setval('same', 7, false), setval('behind', 9, true)"
    )
    move = tools + 'sequences "$SUBSCRIBER_SOURCE_DSN" "$SUBSCRIBER_TARGET_DSN"\n'
    await anyio.to_thread.run_sync(bash, move, processes, source_db.server.bin)
    values = "SELECT nextval('up'), nextval('down'), nextval('same'), nextval('behind')"
    assert await target_db.rows(values) == [(21, -21, 8, 10)]

    await source_db.execute("SELECT setval('up', 100)", "CREATE SEQUENCE missing")
    with pytest.raises(AssertionError, match=r'relation "public\.missing" does not exist'):
        await anyio.to_thread.run_sync(bash, move, processes, source_db.server.bin)
    await target_db.execute("CREATE SEQUENCE missing")
    await anyio.to_thread.run_sync(bash, move, processes, source_db.server.bin)
    assert await target_db.value("SELECT nextval('up')") == 101

    role = f"reader_{secrets.token_hex(4)}"
    await source_db.execute(f"CREATE ROLE {role} LOGIN")
    try:
        unreadable = tools.replace(source_db.dsn(), source_db.dsn(user=role)) + move.removeprefix(tools)
        with pytest.raises(AssertionError, match="permission denied for sequence"):
            await anyio.to_thread.run_sync(bash, unreadable, processes, source_db.server.bin)
    finally:
        await source_db.execute(f"DROP ROLE {role}")


async def test_a_fence_reports_prepared_transactions_and_lets_subscriber_work(
    source_db: Database, target_db: Database, processes: Path
) -> None:
    tools = script(source_db, target_db)["The tools"]
    fence = tools + 'fence "$SUBSCRIBER_SOURCE_DSN"\n'
    await source_db.execute("CREATE TABLE t (id int)")
    connection = await asyncpg.connect(source_db.dsn())
    await connection.execute("INSERT INTO t VALUES (1)")
    ours, pretender = await source_db.connect(), await source_db.connect(application_name="subscriber: s")
    await ensure_schema(ours)
    await register_without_place(ours)
    await source_db.execute("BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'waiting'")
    with pytest.raises(AssertionError, match="prepared transactions: waiting"):
        await anyio.to_thread.run_sync(bash, fence, processes, source_db.server.bin)
    assert await ours.fetchval("SELECT 1") == 1
    for ended in (connection, pretender):
        with pytest.raises((asyncpg.AdminShutdownError, asyncpg.InterfaceError)):
            await ended.execute("INSERT INTO t VALUES (3)")
    await source_db.execute("COMMIT PREPARED 'waiting'")
    await anyio.to_thread.run_sync(bash, fence, processes, source_db.server.bin)
    await ours.close()
