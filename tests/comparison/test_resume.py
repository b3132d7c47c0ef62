"""A comparison that is killed continues with the tables that it has not compared."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from subscriber.cli.commands.verify import as_json, describe
from subscriber.comparison.comparison import verify
from subscriber.comparison.progress import ComparisonProgress
from subscriber.comparison.state_file import ComparisonState
from subscriber.errors import StatementError
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber


class Killed(Exception):
    """Stands for the end of the process in the middle of a comparison."""


@pytest.fixture
async def subscribed(source_db: Database, target_db: Database, subscriber: Subscriber) -> Database:
    """Three tables. One has a difference."""
    for database in (source_db, target_db):
        await database.execute(
            *(f"CREATE TABLE t{n} (id int PRIMARY KEY, a text)" for n in range(3)),
            *(f"INSERT INTO t{n} SELECT i, 'x' FROM generate_series(1, 100) i" for n in range(3)),
        )
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_data=False)
    await subscriber.wait_for_ready(source_db)
    await target_db.execute("UPDATE t0 SET a = NULL WHERE id = 7", "DELETE FROM t0 WHERE id = 8")
    return target_db


async def test_a_killed_comparison_continues(subscribed: Database, source_db: Database, tmp_path: Path) -> None:
    file = tmp_path / "state"

    def kill(progress: ComparisonProgress) -> None:
        if progress.phase.startswith("comparing at") and progress.done and file.exists():
            raise Killed

    with pytest.raises((Killed, ExceptionGroup)):
        await verify(subscribed.dsn(), "s", resume=file, group_bytes=1, on_progress=kill)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # A table that is compared is not read again, and has its own position.
    await subscribed.execute("UPDATE t0 SET a = 'x'", "INSERT INTO t1 VALUES (101)")
    await source_db.execute("SELECT pg_logical_emit_message(true, 'test', '')")
    comparison = await verify(subscribed.dsn(), "s", resume=file, group_bytes=1)
    tables = {table.name: table for table in comparison.tables}
    assert tables["public.t0"].changed == {("7",): ("a",)}
    assert tables["public.t0"].missing == [("8",)]
    assert tables["public.t1"].extra == [("101",)]
    assert tables["public.t2"].is_same
    assert not comparison.is_at_one_position
    assert f"at {tables['public.t0'].lsn}" in "\n".join(describe(comparison))
    assert len({table["lsn"] for table in as_json(comparison)["tables"]}) == 3
    assert not file.exists()


async def test_files_that_cannot_be_resumed(subscribed: Database, tmp_path: Path) -> None:
    file = tmp_path / "state"
    for content in (
        "",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": "x", "oid": 1, "subscription": "s", "source_tag": "", "tables": []}',
    ):
        file.write_text(content)
        with pytest.raises(StatementError, match="cannot be resumed"):
            await verify(subscribed.dsn(), "s", resume=file)
    with pytest.raises(StatementError, match="cannot be read"):
        await verify(subscribed.dsn(), "s", resume=tmp_path)
    with pytest.raises(StatementError, match="cannot be written"):
        ComparisonState(tmp_path / "missing" / "state", (1, "s", "")).add([])
