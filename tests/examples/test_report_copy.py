"""examples/report_copy.py: it copies, resumes, and waits for an unreachable publisher."""

from __future__ import annotations

import runpy
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from subscriber import Lsn
from tests.plugins.fix_cluster import Database

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "report_copy.py"


async def test_the_report_copies_and_resumes(
    source_db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(EXAMPLE))
    file = tmp_path / "report.db"

    async def run() -> list[tuple[Any, ...]]:
        end = Lsn.parse(await source_db.value("SELECT pg_current_wal_insert_lsn()::text"))
        with anyio.fail_after(20):
            await names["run"](source_db.dsn(), "p", file, until=end)
        with closing(sqlite3.connect(file)) as connection:
            return connection.execute("SELECT * FROM customer ORDER BY id").fetchall()

    await source_db.execute(
        "CREATE TABLE customer (id int PRIMARY KEY, name text, city text, since date)",
        "INSERT INTO customer VALUES (1, 'Ada', 'Ulm', '2030-01-02')",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    assert await run() == [(1, "Ulm", "2030-01-02")]
    await source_db.execute("UPDATE customer SET city = 'Pau'", "INSERT INTO customer VALUES (2, 'Bob')")
    assert await run() == [(1, "Pau", "2030-01-02"), (2, None, None)]
    with anyio.move_on_after(1):
        await names["run"]("host=127.0.0.1 port=1 dbname=x user=x", "p", file)
    assert "again in 5 s" in capsys.readouterr().err
