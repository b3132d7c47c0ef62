"""Names with quotes, line breaks, escape sequences and shell syntax: they are replicated, and fixes can be pasted."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from subscriber.cli.commands.check import check
from subscriber.cli.commands.tail import tail
from tests.plugins.fix_cluster import Database
from tests.scenarios.conftest import Pair

NAME = "a\"b'c\\d\n\x1b[31m$(touch x)`e`[red]%s{0};--\u202e"
SCHEMA, TABLE, COLUMN, TYPE = (f"{kind} {NAME}" for kind in "stcm")


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


FULL = f"{quoted(SCHEMA)}.{quoted(TABLE)}"
MOOD = f"{quoted(SCHEMA)}.{quoted(TYPE)}"
SETUP = (
    f"CREATE SCHEMA {quoted(SCHEMA)}",
    f"CREATE TYPE {MOOD} AS ENUM ('sad', 'ok')",
    f"CREATE TABLE {FULL} ({quoted(COLUMN)} int PRIMARY KEY, v text, feels {MOOD})",
)
ROWS = f"SELECT * FROM {FULL} ORDER BY 1"


async def test_objects_with_odd_names_are_replicated(pair: Pair) -> None:
    await pair.both(*SETUP)
    await pair.source.execute(f"INSERT INTO {FULL} VALUES (1, 'a', 'ok'), (2, 'b', 'sad')")
    await pair.subscribe(f"FOR TABLE {FULL}")
    await pair.change(f"UPDATE {FULL} SET v = 'c' WHERE {quoted(COLUMN)} = 1", f"DELETE FROM {FULL} WHERE v = 'b'")
    await pair.change(f"TRUNCATE {FULL}", f"INSERT INTO {FULL} SELECT i, 'many', 'ok' FROM generate_series(1, 500) i")
    await pair.change(f"UPDATE {FULL} SET v = 'more'")
    await pair.assert_same(ROWS)


async def test_fixes_printed_by_check_can_be_pasted(
    pair: Pair, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a shell, and in psql: each fix has its described effect and no other."""
    source, target = pair.source, pair.target
    await source.execute(*SETUP, f"CREATE PUBLICATION p FOR TABLE {FULL}")
    await target.execute(*SETUP[:2])
    (dump,) = [fix for fix in await fixes(pair, capfd) if "pg_dump" in fix]
    variables = {"SUBSCRIBER_SOURCE_DSN": source.dsn(), "SUBSCRIBER_TARGET_DSN": target.dsn()}
    await paste(dump, source, tmp_path, **variables, PGOPTIONS="-c client_min_messages=warning")
    assert await fixes(pair, capfd) == []

    await target.execute(f"ALTER TABLE {FULL} DROP COLUMN feels, ADD COLUMN {quoted('here ' + COLUMN)} int NOT NULL")
    printed = await fixes(pair, capfd)
    assert len(printed) == 2
    statements = [fix.removeprefix("On the target: ") for fix in printed]
    await paste(f"psql -qX -d '{target.dsn()}'", source, tmp_path, stdin="\n".join(statements))
    assert await fixes(pair, capfd) == []
    assert list(tmp_path.iterdir()) == []


async def fixes(pair: Pair, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the fixes of `subscriber check` as a user sees them. Those in JSON must be the same."""
    capfd.readouterr()
    await check(pair.target.dsn(), None, pair.source.dsn(), ["p"], json=False)
    out = capfd.readouterr().out
    assert not set(out) & {"\x1b", "\u202e"}
    await check(pair.target.dsn(), None, pair.source.dsn(), ["p"], json=True)
    text = capfd.readouterr().out
    assert not set(text) & {"\x1b", "\u202e"}
    document = [finding["fix"] for finding in json.loads(text) if finding["fix"]]
    assert [line.removeprefix("         fix: ") for line in out.splitlines() if line.startswith("  ")] == document
    return document


async def paste(command: str, source: Database, directory: Path, stdin: str = "", **variables: str) -> None:
    """Run a line in a shell, in that directory and with these environment variables."""
    path = f"{source.server.bin}:{os.environ['PATH']}"
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        cwd=directory,
        env={"PATH": path, **variables},
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, complaint = await shell.communicate(stdin.encode())
    assert complaint == b""


@pytest.mark.parametrize("as_json", [False, True])
async def test_tail_has_a_line_for_each_change(pair: Pair, capfd: pytest.CaptureFixture[str], as_json: bool) -> None:
    await pair.source.execute(*SETUP, f"CREATE PUBLICATION p FOR TABLE {FULL}")
    await pair.source.execute("SELECT pg_create_logical_replication_slot('mine', 'pgoutput')")
    async with pair.source.connection() as connection:
        await connection.execute(f"INSERT INTO {FULL} VALUES (1, $1)", NAME)
        await connection.execute("SELECT pg_logical_emit_message(true, $1, $2)", NAME, "\x1b[31m\n\u202e")
    await tail(pair.source.dsn(), ["p"], slot="mine", limit=2, json=as_json)
    await pair.source.execute("SELECT pg_drop_replication_slot('mine')")
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 6
    assert not set("".join(lines)) & {"\x1b", "\u202e"}
    if as_json:
        document = [json.loads(line) for line in lines]
        assert document[1]["table"] == f"{SCHEMA}.{TABLE}"
        assert document[1]["new"] == {COLUMN: "1", "v": NAME, "feels": None}
        assert (document[4]["prefix"], document[4]["content"]) == (NAME, "\x1b[31m\n\u202e")
    else:
        assert "\\n\\x1B[31m$(touch x)" in lines[1]
        assert lines[4].endswith(": '\\x1B[31m\\n\\u202E'")
