"""Errors name the next command, and that command works: each test makes a mistake, runs the command, and succeeds."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import subscriber
from subscriber.check.model import Level
from subscriber.connection.connect import connect
from subscriber.connection.conninfo import Conninfo
from subscriber.demo.servers import Servers
from subscriber.errors import SubscriberError
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")


@pytest.fixture
async def two(source_db: Database, target_db: Database) -> tuple[Database, Database]:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION atlas FOR ALL TABLES", "INSERT INTO city VALUES (1)")
    return source_db, target_db


def statement(hint: str | None, start: str) -> str:
    """Return the statement of a hint that begins with `start`."""
    match = re.search(rf"{start}[^;]*;", hint or "")
    assert match is not None, hint
    return match[0]


async def run_shell(command: str, source: Database, target: Database) -> None:
    """Run a shell command of a hint, with the programs of the target's version, and the README's variables."""
    variables = {"SUBSCRIBER_SOURCE_DSN": source.dsn(), "SUBSCRIBER_TARGET_DSN": target.dsn()}
    path = f"{target.server.bin}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_shell(command, env={**os.environ, **variables, "PATH": path})
    assert await process.wait() == 0


async def test_a_lost_slot_and_drop(two: tuple[Database, Database]) -> None:
    source, target = two
    notices: list[str] = []
    async with subscriber.connect(target.dsn()) as db:
        await db.create_subscription("s", source=source.dsn(), publications=["atlas"], enabled=False)
        await source.execute("SELECT pg_drop_replication_slot('s')")
        await db.drop("s", notice=lambda _severity, message, _detail, _hint: notices.append(message))
        assert await db.subscriptions() == []
    assert notices == ['replication slot "s" does not exist on publisher, skipping']


async def test_a_mistyped_statement_names_the_closest_keyword(two: tuple[Database, Database]) -> None:
    _, target = two
    mistakes = {
        "CREATE SUBSCRIPTON s": "SUBSCRIPTION",
        "CREAT SUBSCRIPTION s": "CREATE",
        "ALTER SUBSCRIPTION s ENABEL": "ENABLE",
        "ALTER SUBSCRIPTION s REFRESH PUBLICATIONS": "PUBLICATION",
        "CREATE SUBSCRIPTION s CONECTION ''": "CONNECTION",
        "ALTER SUBSCRIPTION s OWNER ROLE x": None,
    }
    async with subscriber.connect(target.dsn()) as db:
        for text, word in mistakes.items():
            with pytest.raises(subscriber.StatementError, match="syntax error at or near") as raised:
                await db.execute(text)
            assert raised.value.hint == (word and f'Perhaps you meant "{word}".')
        with pytest.raises(subscriber.StatementError, match="only CREATE, ALTER and DROP SUBSCRIPTION"):
            await db.execute("CREATE PUBLICATION p")


async def test_a_mistyped_publication_names_the_closest_publication(two: tuple[Database, Database]) -> None:
    source, target = two
    hints: list[str | None] = []

    def notice(_severity: str, _message: str, _detail: str | None, hint: str | None) -> None:
        hints.append(hint)

    async with subscriber.connect(target.dsn()) as db:
        await db.create_subscription("s", source=source.dsn(), publications=["atlsa"], notice=notice)
        assert hints[0] == 'Perhaps you meant "atlas".'
        (finding,) = [problem for problem in await db.check("s") if problem.subject == "publication atlsa"]
        assert (finding.level, finding.fix) == (Level.ERROR, 'Perhaps you meant "atlas".')
        hints.clear()
        await db.alter("s", publications=["other"], notice=notice)
        assert (hints[0] or "").startswith('The publisher has: "atlas". Or on the publisher: ')
        await source.execute(statement(hints[0], "CREATE PUBLICATION"))
        hints.clear()
        await db.refresh("s", notice=notice)
        assert not any(hints)
        await db.drop("s")
    with pytest.raises(subscriber.PublisherError) as raised:
        async with subscriber.stream(source.dsn(), publications=["atals"]):
            pass
    assert raised.value.hint == 'Perhaps you meant "atlas".'


async def test_tables_that_are_missing_on_the_target(two: tuple[Database, Database]) -> None:
    source, target = two
    await source.execute(
        'CREATE SCHEMA "it\'s"',
        'CREATE TABLE "it\'s"."Table" (id int PRIMARY KEY)',
        "CREATE TABLE new (id int PRIMARY KEY)",
    )
    async with subscriber.connect(target.dsn()) as db:
        for _ in range(2):
            with pytest.raises(subscriber.StatementError, match="does not exist") as raised:
                await db.create_subscription("s", source=source.dsn(), publications=["atlas"])
            assert "On the target" in (raised.value.hint or "")
            await run_shell((raised.value.hint or "").partition("create it there: ")[2], source, target)
        await db.create_subscription("s", source=source.dsn(), publications=["atlas"])
        await target.execute("DROP TABLE new")
        (finding,) = [problem for problem in await db.check("s") if problem.message == "does not exist on the target"]
        await run_shell(finding.fix or "", source, target)
        assert not [problem for problem in await db.check("s") if problem.message == "does not exist on the target"]
        await db.drop("s")


@pytest.mark.soak
async def test_sessions_that_a_server_refuses(servers: Servers) -> None:
    """The lines and statements of the hints, in their order, let the role in."""
    server = await servers.create("server", {"wal_level": "logical"})
    await server.start()
    root: asyncpg.Connection[Any] = await asyncpg.connect(server.dsn())
    await root.execute("CREATE ROLE locked NOLOGIN")
    hba = Path(await root.fetchval("SHOW hba_file"))
    hba.write_text("local all postgres trust\nhost all postgres 127.0.0.1/32 trust\n")
    await root.fetchval("SELECT pg_reload_conf()")
    common = {"host": "127.0.0.1", "port": Conninfo.parse(server.dsn()).get("port"), "dbname": "new"}
    steps = {
        "pg_hba.conf": {"user": "locked"},
        "passfile=": {"user": "locked"},
        "PASSWORD": {"user": "locked", "password": "wrong"},
        "LOGIN": {"user": "locked", "password": "…"},
        "CREATE DATABASE": {"user": "locked", "password": "…"},
        "REPLICATION": {"user": "locked", "password": "…"},
    }
    for word, parameters in steps.items():
        with pytest.raises(SubscriberError) as raised:
            await connect(Conninfo({**common, **parameters}), replication=word == "REPLICATION")
        hint = raised.value.hint or ""
        assert word in hint, hint
        if word == "pg_hba.conf":
            line = hint.partition("reject it: ")[2].partition(". Then")[0]
            hba.write_text(f"{line}\n{hba.read_text()}")
            await root.execute(statement(f"{hint};", r"SELECT pg_reload_conf"))
            continue
        if word != "passfile=":
            await root.execute(statement(hint, "(?:ALTER ROLE|CREATE)"))
    (await connect(Conninfo({**common, **steps["REPLICATION"]}), replication=True)).terminate()
    await root.close()
