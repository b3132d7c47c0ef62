"""The report of a move: a file that is compared with both servers later."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from subscriber.catalog.store import migrations
from subscriber.cli.commands.migrate.report import report
from subscriber.errors import StatementError, SubscriberError
from subscriber.migration import record
from subscriber.migration.plan import Phase, Side, Standing
from subscriber.migration.report.collect import collect_report
from subscriber.migration.report.document import Entry, as_json, chained, damaged, of_kind, parse
from subscriber.migration.report.page import report_page
from tests.plugins.fix_cluster import Database, database_with_schema

pytestmark = pytest.mark.usefixtures("with_schema")

HOSTILE = "</script><script>alert(1)</script><!-- \u202e \x1b[31m"


@dataclass
class RecordedMove:
    source: Database
    target: Database

    async def collect(self) -> list[Entry]:
        return await collect_report(self.source.dsn(), self.target.dsn(), "move")


@pytest.fixture
async def move(source_db: Database, target_db: Database) -> AsyncIterator[RecordedMove]:
    """Two servers with equal rows, and the records of a move."""
    async with database_with_schema(source_db.server) as source, database_with_schema(target_db.server) as target:
        for number, database in enumerate((source, target)):
            await database.execute(
                "CREATE TABLE account (id int PRIMARY KEY, name text, rate float8, at timestamptz)",
                "INSERT INTO account SELECT i, 'n' || i, i / 7.0, timestamptz '2024-01-01Z' + i * interval '1 s'"
                f" FROM generate_series(1, 20) i ORDER BY i * {1 - 2 * number}",
                f"ALTER DATABASE {database.name} SET timezone = '{('Asia/Tokyo', 'America/Lima')[number]}'",
            )
            async with database.connection() as connection:
                side = (Side.SOURCE, Side.TARGET)[number]
                await record.save(connection, "move", side, Standing(Side.TARGET, Phase.FOLLOWING))
                for step, detail in (
                    ("preflight", {"waived": ["unlogged:public.cache"]}),
                    ("freeze", {"seconds": 0.25, "statements": [{"on": "source", "statement": "SELECT 1"}]}),
                    ("drain", {"seconds": 0.5, "lsn": "0/1", "told": HOSTILE}),
                    ("open", {"seconds": 0.125}),
                ):
                    if number == (step == "open"):
                        stepid = await migrations.begin_step(connection, "move", "cutover", step)
                        await migrations.end_step(connection, stepid, None, detail)
                await migrations.begin_step(connection, "move", "finish", "drop move")
        yield RecordedMove(source, target)


async def test_a_report_has_steps_rows_and_the_pause(move: RecordedMove) -> None:
    entries = await move.collect()
    assert entries[0]["pause"] == 0.875
    assert [entry["name"] for entry in of_kind(entries, "waived")] == ["unlogged:public.cache"]
    steps = [(entry["side"], entry["step"], entry["seconds"]) for entry in of_kind(entries, "step")]
    assert steps[1:3] == [("source", "freeze", 0.25), ("source", "drain", 0.5)]
    assert ("target", "open", 0.125) in steps
    (table,) = of_kind(entries, "table")
    assert table["same"]
    assert table["source"] == table["target"]
    assert table["source"]["rows"] == 20
    assert parse(as_json(entries)) == entries


class _Resources(HTMLParser):
    """Finds elements and attributes that load something, and scripts that are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag in ("link", "img", "iframe", "object") or {"src", "href", "onload"} & names.keys():
            self.found.append(tag)
        if tag == "script" and names.get("type") != "application/json":
            self.found.append("script")


async def test_a_page_loads_nothing_and_contains_the_report(move: RecordedMove) -> None:
    entries = await move.collect()
    page = report_page(entries)
    assert parse(page) == entries
    resources = _Resources()
    resources.feed(page)
    assert resources.found == []
    assert "\u202e" not in page
    assert "color-scheme: light dark" in page


async def test_file_and_servers_agree_or_not(
    move: RecordedMove, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, file = move.source.dsn(), move.target.dsn(), tmp_path / "move.html"
    assert await report(source, target, "move", output=file) == 0
    assert await report(source, target, "move", check=file) == 0
    assert "the file and both servers agree" in capsys.readouterr().out
    await move.target.execute("UPDATE account SET name = 'changed' WHERE id = 7")
    assert await report(source, target, "move", check=file) == 1
    assert "table public.account of the target has 20 rows with checksum" in capsys.readouterr().out
    await move.target.execute("UPDATE account SET name = 'n7' WHERE id = 7")
    assert await report(source, target, "move", check=file) == 0
    capsys.readouterr()
    file.write_text(file.read_text().replace("0.875", "0.075"))
    assert await report(source, target, "move", check=file) == 1
    assert "the file was changed: the hash of entry 1 of" in capsys.readouterr().out
    with pytest.raises(StatementError, match='the report is about move "move", not "other"'):
        await report(source, target, "other", check=file)
    with pytest.raises(StatementError, match='neither server has a move "other"'):
        await report(source, target, "other", rows=False)


def test_every_change_of_a_file_is_found() -> None:
    entries = chained([{"kind": "report", "format": "x"}, {"kind": "a", "n": 1}, {"kind": "b", "n": 2}])
    assert damaged(entries) is None
    assert damaged([entries[0], {**entries[1], "n": 3}, entries[2]]) == 1
    assert damaged([entries[0], entries[2]]) == 1
    assert damaged([entries[1], entries[0], entries[2]]) == 0
    for text in ("", "[]", "{}", "[1]", json.dumps(entries), "<html>"):
        with pytest.raises(SubscriberError, match="not a report of subscriber migrate"):
            parse(text)
