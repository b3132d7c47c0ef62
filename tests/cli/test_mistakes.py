"""Mistakes of a newcomer. Each error says what is wrong, where, and what to do next.

tests/cli/test_next_commands.py has those whose next command needs servers of its own, or several steps.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import subscriber
from subscriber.cli import main
from subscriber.cli.commands import resync
from subscriber.errors import SubscriberError
from tests.plugins.fix_cluster import Database

NOWHERE = "host=127.0.0.1 port=1"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command, and its error.

    Attributes:
        arguments: of the command.
        what: is in the message.
        where: is anywhere in the error: the option, the server, the file or the object.
        next: is in the message or the hint.
    """

    arguments: list[str]
    what: str
    where: str
    next: str


USAGE = [
    Mistake(["status"], "Missing option", "SUBSCRIBER_TARGET_DSN", "--target postgresql://user@host/database"),
    Mistake(["tail", "-p", "a"], "Missing option", "SUBSCRIBER_SOURCE_DSN", "--source postgresql://"),
    Mistake(["statsu"], "No such command", "statsu", "Did you mean 'status'?"),
    Mistake(["run", "--htpp", "80"], "No such option", "--htpp", "--http"),
    Mistake(["run", "--target", NOWHERE, "--http", "web"], "'web' is not [HOST:]PORT", "--http", "such as 8080"),
    Mistake(["run", "--target", NOWHERE, "--log-format", "xml"], "'xml' is not one of", "--log-format", "'json'"),
    Mistake(["run", "--target", NOWHERE, "--app", "shop"], "not of the form", '"shop"', "package.module:name"),
    Mistake(["run", "--target", NOWHERE, "--app", "shop:app"], "no module", '"shop"', "Run the command in"),
    Mistake(
        ["status", "--target", NOWHERE, "--setting", "statsu_interval=5"],
        "unrecognized setting",
        "statsu_interval",
        'Perhaps you meant "status_interval"',
    ),
    Mistake(
        ["status", "--target", NOWHERE, "--setting", "status_interval=5x"],
        "invalid value",
        'setting "status_interval"',
        "valid units are s, us, ms, min, h, d",
    ),
    Mistake(["check", "--target", NOWHERE], "give the NAME", "NAME", "--source and --publication"),
    Mistake(["status", "--target", "mysql://a@b/c"], '"mysql" is not supported', "URI", "Use postgresql://"),
    Mistake(["status", "--target", "@missing"], "could not open", '"missing"', "umask 077; echo"),
    Mistake(["status", "--target", NOWHERE], "Connection refused", '"127.0.0.1", port 1', "Is the server running"),
    Mistake(["exec", "--target", NOWHERE, "SELECT 1"], "only CREATE, ALTER and DROP", "SUBSCRIPTION", "Use psql"),
    Mistake(["exec", "--target", NOWHERE, "DROP SUBSCRIPTON s"], "syntax error", '"SUBSCRIPTON"', '"SUBSCRIPTION"'),
    Mistake(["lake", "--log", "nowhere", "--to", "x"], "no change log", '"nowhere"', "subscriber archive"),
    Mistake(["archive", "--source", NOWHERE, "-p", "a"], "Missing option", "--directory", "subscriber archive -h"),
]


@pytest.mark.parametrize("mistake", USAGE, ids=lambda mistake: " ".join(mistake.arguments)[:60])
def test_wrong_usage(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUBSCRIBER_TARGET_DSN", raising=False)
    monkeypatch.setattr(sys, "argv", ["subscriber", *mistake.arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code in (2, 3)
    shown = " ".join(capsys.readouterr().err.split())  # without the breaks of lines
    for part in (mistake.what, mistake.where, mistake.next):
        assert part in shown


async def test_mistakes_with_servers(source_db: Database, target_db: Database) -> None:
    """The suggested command is run after each mistake, and the statement then works."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION atlas FOR ALL TABLES")
    source = source_db.dsn()

    async with subscriber.connect(target_db.dsn()) as db:

        async def refused(statement: str | Callable[[], Any], what: str, where: str) -> str:
            with pytest.raises(SubscriberError) as raised:
                await (db.execute(statement) if isinstance(statement, str) else statement())
            assert re.search(what, raised.value.message)
            assert where in str(raised.value)
            return raised.value.hint or ""

        nowhere = source_db.server.dsn("no_database")
        create = f"CREATE SUBSCRIPTION cities CONNECTION '{source}' PUBLICATION atlas"
        # The database of the publisher, and then of the target
        port = str(source_db.server.port)
        hint = await refused(create.replace(source, nowhere), "could not connect to the publisher", port)
        await source_db.execute(re.findall("CREATE DATABASE.*;", hint)[0], 'DROP DATABASE "no_database"')

        async def connect_to_no_database() -> None:
            async with subscriber.connect(target_db.server.dsn("no_database")):
                pass

        hint = await refused(connect_to_no_database, "does not exist", str(target_db.server.port))
        await target_db.execute(re.findall("CREATE DATABASE.*;", hint)[0], 'DROP DATABASE "no_database"')

        async def connect_to_no_host() -> None:
            async with subscriber.connect("host=no-host.invalid dbname=x"):
                pass

        assert "getent hosts no-host.invalid" in await refused(connect_to_no_host, "could not translate", "no-host")

        # Options
        hint = await refused(f"{create} WITH (streaming = onn)", "requires a Boolean value", "streaming")
        assert "on, off, parallel" in hint
        hint = await refused(f"{create} WITH (copy_dta = off)", "unrecognized subscription parameter", "copy_dta")
        assert hint == 'Perhaps you meant "copy_data".'
        hint = await refused(f"{create} WITH (two_phase = maybe)", "requires a Boolean value", "two_phase")
        await db.execute(f"{create} WITH (two_phase = {hint.rpartition(' ')[2].rstrip('.')}, enabled = off)")

        # Names
        assert "ALTER SUBSCRIPTION" in await refused(create, "already exists", '"cities"')
        for call in (
            lambda: db.execute("ALTER SUBSCRIPTION citeis ENABLE"),
            lambda: db.status("citeis"),
            lambda: db.check("citeis"),
            lambda: db.verify("citeis"),
            lambda: db.wait_for_sync("citeis", timeout=1),
        ):
            assert await refused(call, "does not exist", '"citeis"') == 'Perhaps you meant "cities".'
        assert await refused("DROP SUBSCRIPTION x", "does not exist", '"x"') == 'This database has: "cities".'

        # States
        hint = await refused("ALTER SUBSCRIPTION cities REFRESH PUBLICATION", "disabled", "REFRESH")
        assert "ENABLE or DISABLE" in await refused(
            "ALTER SUBSCRIPTION cities SET (enabled = on)", "unrecognized", '"enabled"'
        )
        await db.execute(re.findall("ALTER .*;", hint)[0])
        await db.execute("ALTER SUBSCRIPTION cities REFRESH PUBLICATION")
        assert "16/B374D848" in await refused("ALTER SUBSCRIPTION cities SKIP (lsn = 'abc')", "pg_lsn", '"abc"')

        async def resync_a_mistyped_table() -> None:
            await resync.run_resync(target_db.dsn(), "cities", ["ctiy"], truncate=False, wait=False)

        hint = await refused(resync_a_mistyped_table, "not part of subscription", '"ctiy"')
        assert hint == 'Perhaps you meant "city".'

        await db.drop("cities")
