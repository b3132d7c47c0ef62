"""The mistakes of mistakes.py: the exact error, which says what, where and what to do, and a way on that works.

Commands run in this process, with `subscriber run` as `db.running()`. The soak runs services as processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

import subscriber
from subscriber.cli import main
from subscriber.connection.conninfo import Conninfo
from subscriber.settings import Settings
from tests.cli.mistakes import MISTAKES, Mistake
from tests.plugins.fix_cluster import Database

ERROR = 2  # the least exit status of an error
EXAMPLE = "postgresql://user@host/database"  # the user writes another one
SERVICES = ("subscriber run", "subscriber archive")  # they run until they are stopped
COMMAND = re.compile(r"(?:HINT:  |[a-z]: )((?:subscriber|SELECT|CREATE|ALTER|DROP|GRANT|pg_dump|chmod|\(umask) [^\n]+)")
TO_BE_FILLED_IN = re.compile(r"\b(DSN|NAME|FILE)\b(?!=)|…")


def commands(shown: str) -> list[str]:
    """Return the commands of an error that can be run as they are."""
    matches = [
        command if command.startswith("(") else re.sub(";.*", ";", command) for command in COMMAND.findall(shown)
    ]
    return [command for command in matches if not TO_BE_FILLED_IN.search(command)]


def run_here(words: list[str]) -> tuple[int, str]:
    """Run the command line in a thread of this process. Returns its exit status and its stderr."""
    shown, before, sys.argv = io.StringIO(), sys.argv, words
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(shown):
            main.main()
    except SystemExit as ended:
        return int(ended.code or 0), shown.getvalue()
    finally:
        sys.argv = before
    return 0, shown.getvalue()


async def opened(stream: Any) -> None:
    async with stream:
        pass


@dataclass
class Newcomer:
    """A person with both servers.

    Attributes:
        source: the publisher's database.
        target: the target's database.
        db: the target in a program.
        values: what the mistakes name in braces.
    """

    source: Database
    target: Database
    db: subscriber.Database
    values: dict[str, str] = field(default_factory=dict)

    async def type(self, text: str) -> tuple[int, str]:
        """Type a text. Returns the exit status and the error."""
        text = text.format(**self.values)
        if text.startswith(">>> "):
            try:
                await eval(text[4:], {"subscriber": subscriber, "db": self.db, "opened": opened, **self.values})
            except Exception as error:
                return ERROR, str(error)
            return 0, ""
        if text.startswith("env -u "):
            _, _, name, text = text.split(" ", 3)
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv(name)
                return await asyncio.to_thread(run_here, shlex.split(text))
        if text.startswith("subscriber "):
            return await asyncio.to_thread(run_here, shlex.split(text))
        if text.startswith(("CREATE SUB", "ALTER SUB", "DROP SUB", "SELECT 1")):
            return await asyncio.to_thread(run_here, ["subscriber", "exec", text])
        path = f"{self.target.server.bin}:{os.environ['PATH']}"
        process = await anyio.run_process(text, env={**os.environ, "PATH": path}, stderr=None, check=False)
        return process.returncode, ""

    async def run(self, command: str, on: str) -> None:
        """Run a command of an error as it is."""
        if command.startswith(("subscriber", "ALTER SUBSCRIPTION", "pg_dump", "chmod", "(umask")):
            command = command.replace(EXAMPLE, self.target.dsn()).removesuffix(";")
            status, shown = await self.type(command.replace("{", "{{").replace("}", "}}"))
            assert status < ERROR, shown
        else:
            await {"source": self.source, "target": self.target}[on].execute(command)

    async def prepare(self, before: tuple[tuple[str, str], ...]) -> None:
        for where, statement in before:
            await (self.db.execute(statement) if where == "subscription" else getattr(self, where).execute(statement))


@pytest.fixture
async def newcomer(
    source_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_app: None
) -> AsyncIterator[Newcomer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SUBSCRIBER_SOURCE_DSN", source_db.dsn())
    monkeypatch.setenv("SUBSCRIBER_TARGET_DSN", target_db.dsn())
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION atlas FOR ALL TABLES")

    def pairs(database: Database) -> str:
        return str(Conninfo.parse(database.server.dsn(database.name)))

    (tmp_path / "open.dsn").write_text(target_db.dsn())
    (tmp_path / "open.dsn").chmod(0o644)
    (tmp_path / ".pg_service.conf").write_text("[atlas]\n" + pairs(target_db).replace(" ", "\n"))
    (tmp_path / "shop.toml").write_text(f'[targets.shop]\ndsn = "{pairs(target_db)}"\n')
    (tmp_path / "shop.py").write_text("import subscriber\n\napp = subscriber.App()\n")
    settings = Settings(retry_interval=0.2, empty_database_poll_interval=0.1)
    async with subscriber.connect(target_db.dsn(), settings=settings) as db:
        yield Newcomer(
            source_db,
            target_db,
            db,
            {
                "source": pairs(source_db),
                "target": target_db.dsn(),
                "pairs": pairs(target_db),
                "uri": target_db.server.dsn(target_db.name),
                "database": target_db.name,
                "port": str(target_db.server.port),
                "source_port": str(source_db.server.port),
                "folder": str(tmp_path),
            },
        )
        await source_db.execute(
            'DROP DATABASE IF EXISTS "atlas"',
            "DROP ROLE IF EXISTS reader",
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name IN ('mine', 'new')",
        )
        await target_db.execute('DROP DATABASE IF EXISTS "shop"')


def errors_of(mistake: Mistake, shown: str) -> list[str]:
    """Rate an error: name each of its parts that is missing, and each command that the test would not run."""
    missing = [part for part in (mistake.where, mistake.next) if part not in mistake.shown]
    unknown = {command for command in commands(mistake.shown) if command != mistake.next}
    what = [] if shown.startswith(("ERROR:  ", "WARNING:  ")) or mistake.where in shown else ["what"]
    return [*missing, *unknown, *what]


async def test_each_error_says_what_where_and_what_to_do(newcomer: Newcomer) -> None:
    assert len(MISTAKES) >= 40
    for mistake in MISTAKES:
        await newcomer.prepare(mistake.before)
        _, shown = await newcomer.type(mistake.typed)
        shown = (shown.partition("\n\nError: ")[2] or shown).strip()
        assert shown == mistake.shown.format(**newcomer.values)
        assert not errors_of(mistake, shown), mistake.typed
        if mistake.works.startswith(SERVICES):
            continue
        async with contextlib.AsyncExitStack() as running:
            if mistake.next == "subscriber run":
                await running.enter_async_context(newcomer.db.running())
            elif mistake.next in commands(mistake.shown):
                await newcomer.run(mistake.next, mistake.on)
            status, shown = await newcomer.type(mistake.works or mistake.typed)
            assert status < ERROR, f"{mistake.works or mistake.typed}\n{shown}"


@pytest.mark.soak
@pytest.mark.parametrize("typed", [mistake.works for mistake in MISTAKES if mistake.works.startswith(SERVICES)])
async def test_services_that_errors_suggest(newcomer: Newcomer, typed: str) -> None:
    words = shlex.split(typed.format(**newcomer.values))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = await process.stdout.readline()
        assert b"LOG" in line, line
        process.send_signal(signal.SIGTERM)
        assert await process.wait() in (0, -signal.SIGTERM)  # it may not have begun to wait for one
