"""Dry runs: their statements are those that the servers log, and nothing changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import pytest

from subscriber.migration.migration import move_database
from subscriber.migration.results import StepEvent
from tests.migration.scene import QUICK, Command, following, listen, moving
from tests.plugins.fix_cluster import Database

# Statements with the same text in a plan and in the log of a server. Those about subscriptions change the catalog of
# subscriber, and sessions have other numbers every time.
LOGGED = re.compile(
    r"(CREATE (OR REPLACE FUNCTION|TRIGGER|PUBLICATION)|DROP (TRIGGER|FUNCTION|PUBLICATION)|GRANT|REVOKE"
    r"|SELECT pg_catalog\.pg_logical_emit_message)\b"
)
ENTRY = re.compile(r"LOG:  (?:statement|execute [^:]*): (.*)", re.DOTALL)
ENDS_SESSIONS = "SELECT pg_catalog.pg_terminate_backend"


class ServerLog:
    """The statements that a server logs from now on, of sessions that log all."""

    def __init__(self, database: Database) -> None:
        self._path = database.server.log
        self._start = self._path.stat().st_size

    def statements(self) -> list[str]:
        text = self._path.read_bytes()[self._start :].decode(errors="replace")
        entries = (ENTRY.search(entry) for entry in re.split(r"\n(?!\t)", text))
        return chosen(entry[1].replace("\n\t", "\n") for entry in entries if entry)


def chosen(statements: Iterable[str]) -> list[str]:
    """Return the statements that can be compared. A marker may be repeated."""
    return [kept for kept, _ in groupby(statement for statement in statements if LOGGED.match(statement))]


def statements(events: Iterable[StepEvent], state: str) -> list[tuple[str, str, str]]:
    """Return step, server and text of all statements."""
    return [
        (event.step, noted["on"], noted["statement"])
        for event in events
        if event.state == state
        for noted in event.detail["statements"]
        if not noted["statement"].startswith(ENDS_SESSIONS)
    ]


@pytest.mark.timeout(180)
async def test_a_dry_run_prints_what_the_servers_log(source_db: Database, target_db: Database) -> None:
    databases: Mapping[str, Database] = {"source": source_db, "target": target_db}
    servers = [database.dsn(options="-c log_statement=all") for database in databases.values()]

    async def run(command: str, dry_run: bool, **options: Any) -> list[StepEvent]:
        events: list[StepEvent] = []
        async with move_database(servers[0], servers[1], "s", options=QUICK, run=False, dry_run=dry_run) as move:
            await listen(move, getattr(move, command)(**options), events.append)
        return events

    async with following(source_db, target_db):
        await source_db.execute(
            "SELECT setval('ticket', 100)", "GRANT CONNECT ON DATABASE " + source_db.name + " TO public"
        )
        for command, options in (("cutover", {}), ("back", {}), ("cutover", {}), ("finish", {"release": True})):
            planned = statements(await run(command, True, **options), "planned")
            logs = {side: ServerLog(database) for side, database in databases.items()}
            assert statements(await run(command, False, **options), "done") == planned, command
            for side, log in logs.items():
                assert log.statements() == chosen(text for _, on, text in planned if on == side), (command, side)


async def test_a_dry_run_reports_refusals_and_changes_nothing(source_db: Database, target_db: Database) -> None:
    events: list[StepEvent] = []
    async with following(source_db, target_db):
        await source_db.execute("BEGIN; INSERT INTO item DEFAULT VALUES; PREPARE TRANSACTION 'waiting'")
        async with move_database(source_db.dsn(), target_db.dsn(), "s", options=QUICK, dry_run=True) as move:
            await listen(move, move.cutover(), events.append)
        refused = {event.step: event.error for event in events if event.error}
        assert set(refused) == {"gates"}
        assert "Transaction 'waiting' is prepared on the source." in str(refused["gates"])
        status, output = await Command(source_db, target_db).run("plan")
        assert (status, "REFUSED: applications cannot move yet" in output) == (0, True), output
        await source_db.execute("ROLLBACK PREPARED 'waiting'")
        async with moving(source_db, target_db) as move:
            assert [server.fence for server in (await move.status()).servers] == ["none", "none"]
        for database in (source_db, target_db):
            assert await database.value("SELECT count(*) FROM subscriber.migration") == 0
