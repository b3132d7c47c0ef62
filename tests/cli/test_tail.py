from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import anyio
import pytest

from subscriber.cli.change_lines import ChangeLines, as_json, as_text
from subscriber.cli.commands.tail import tail
from subscriber.errors import ProtocolError, PublisherError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import (
    Delete,
    Insert,
    LogicalMessage,
    OldPart,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Update,
)
from subscriber.protocol.tuple_data import TupleData
from tests.plugins.fix_cluster import Database

COLUMNS = (
    RelationColumn(True, "id", 23, -1),
    RelationColumn(False, "note", 25, -1),
    RelationColumn(False, "big", 25, -1),
)
RELATION = Relation(None, 7, "", "t", ReplicaIdentity.DEFAULT, COLUMNS)


@pytest.fixture
def lines() -> ChangeLines:
    lines = ChangeLines()
    assert lines.line(RELATION) is None
    return lines


def row(status: bytes, *values: bytes | None) -> TupleData:
    return TupleData.join(status, values)


def test_null_unchanged_and_unsent_values_are_printed_differently(lines: ChangeLines) -> None:
    update = Update(None, 7, OldPart.KEY, row(b"tnn", b"1", None, None), row(b"tnu", b"2", None, None))
    line = lines.line(update)
    assert line == {
        "op": "update",
        "xid": None,
        "table": "pg_catalog.t",
        "key": {"id": "1"},
        "new": {"id": "2", "note": None},
        "unchanged": ["big"],
    }
    assert as_text(line) == "UPDATE pg_catalog.t [id='1'] id='2' note=NULL big=(unchanged)"


def test_a_whole_old_row_has_its_nulls(lines: ChangeLines) -> None:
    line = lines.line(Delete(None, 7, OldPart.ROW, row(b"tnt", b"1", None, b"it's\n\\")))
    assert line is not None
    assert line["old"] == {"id": "1", "note": None, "big": "it's\n\\"}
    assert "new" not in line
    assert as_text(line) == r"DELETE pg_catalog.t [id='1' note=NULL big='it''s\n\\']"


def test_json_is_one_line(lines: ChangeLines) -> None:
    line = lines.line(Insert(None, 7, row(b"ttt", b"1", "ü\n".encode(), b"\xff")))
    assert line is not None
    assert json.loads(as_json(line))["new"] == {"id": "1", "note": "ü\n", "big": "\ufffd"}
    assert "\n" not in as_json(line)


def test_messages_that_are_no_text_come_as_hex(lines: ChangeLines) -> None:
    line = lines.line(LogicalMessage(None, False, Lsn(1), "p", b"\xff\x00"))
    assert line is not None
    assert line["content_hex"] == "ff00"
    assert as_text(line) == r"MESSAGE p: '\\xff00'"


def test_a_row_that_does_not_fit_its_table_is_damage(lines: ChangeLines) -> None:
    with pytest.raises(ProtocolError, match="2 columns instead of 3"):
        lines.line(Insert(None, 7, row(b"nn", None, None)))
    with pytest.raises(ProtocolError, match="no relation with OID 8"):
        lines.line(Insert(None, 8, row(b"nnn", None, None, None)))


# --- with a server --------------------------------------------------------------------------------


@pytest.fixture
async def source(source_db: Database) -> Database:
    await source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    await source_db.value("SELECT pg_create_logical_replication_slot($1, 'pgoutput')::text", source_db.name)
    return source_db


def printed(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


async def test_changes_are_printed_and_confirmed_by_whole_transactions(
    source: Database, capfd: pytest.CaptureFixture[str]
) -> None:
    await source.execute(
        "INSERT INTO t VALUES (1, NULL, repeat('x', 10000))",
        "UPDATE t SET id = 2; UPDATE t SET note = 'n'",
        "DELETE FROM t",
        "TRUNCATE t",
    )
    with anyio.fail_after(20):
        await tail(source.dsn(), ["p"], slot=source.name, limit=2, json=True)
    first = printed(capfd)
    assert [line["op"] for line in first] == ["begin", "insert", "commit", "begin", "update", "update", "commit"]
    assert first[1]["new"] == {"id": "1", "note": None, "big": "x" * 10000}
    assert first[4]["key"] == {"id": "1"}
    assert (first[5]["new"], first[5]["unchanged"]) == ({"id": "2", "note": "n"}, ["big"])
    with anyio.fail_after(20):
        await tail(source.dsn(), ["p"], slot=source.name, limit=2, json=True)
    again = printed(capfd)
    assert [line["op"] for line in again if line["op"] not in ("begin", "commit")] == ["delete", "truncate"]
    confirmed = await source.value(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", source.name
    )
    assert Lsn.parse(confirmed) >= Lsn.parse(again[2]["end_lsn"])


async def test_a_temporary_slot_begins_now_and_is_gone_afterwards(
    source: Database, capfd: pytest.CaptureFixture[str]
) -> None:
    async def write() -> None:
        await source.wait_for("SELECT count(*) FROM pg_replication_slots WHERE temporary AND active", 1)
        await source.execute("INSERT INTO t VALUES (5)", "SELECT pg_logical_emit_message(false, 'p', 'hello')")

    await source.execute("INSERT INTO t VALUES (1)")
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await tail(source.dsn(), ["p"], slot=None, limit=1, json=False)
    out = capfd.readouterr().out
    assert "INSERT public.t id='5' note=NULL big=NULL" in out
    assert "id='1'" not in out
    await source.wait_for("SELECT count(*) FROM pg_replication_slots WHERE temporary", 0)


async def test_a_missing_publication_or_slot_is_an_error_with_its_statement(source: Database) -> None:
    with pytest.raises(PublisherError, match='publication "q" does not exist') as error:
        await tail(source.dsn(), ["p", "q"], slot=None, limit=None, json=True)
    assert 'CREATE PUBLICATION "q" FOR ALL TABLES;' in (error.value.hint or "")
    with pytest.raises(PublisherError, match='replication slot "none" does not exist'):
        await tail(source.dsn(), ["p"], slot="none", limit=None, json=True)


async def test_a_reader_that_leaves_early_confirms_nothing_it_did_not_get(source: Database) -> None:
    await source.execute("INSERT INTO t SELECT i, repeat('y', 2000), NULL FROM generate_series(1, 2000) i")
    tail = f"{sys.executable} -m subscriber tail --source {source.dsn()} -p p --slot {source.name}"
    command = f"PYTHONUNBUFFERED=1 {tail} | head -n 3"
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    )
    assert len(done.stdout.splitlines()) == 3
    assert "Traceback" not in done.stderr
    await source.wait_for(f"SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{source.name}'")
    position = Lsn.parse(json.loads(done.stdout.splitlines()[0])["lsn"])
    confirmed = await source.value(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", source.name
    )
    assert Lsn.parse(confirmed) <= position
