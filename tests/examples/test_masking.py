"""examples/masking.py as a separate process, killed in the middle: no unmasked value reaches the target."""

from __future__ import annotations

import sys
from pathlib import Path

from subscriber.demo.processes import Process
from tests.plugins.fix_cluster import Database

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "masking.py"

SOURCE = """
CREATE TABLE person (id int PRIMARY KEY, name text, email text, phone text, password text, notes text);
CREATE TABLE invoice (tenant text, number int, sum numeric, PRIMARY KEY (tenant, number));
INSERT INTO person SELECT i, 'Ada Secret', 'ada@secret.org', '1', 'secret', 'Ada Secret called'
  FROM generate_series(1, 50) i;
INSERT INTO invoice VALUES ('demo', 1, 1), ('other', 1, 1);
CREATE PUBLICATION p FOR ALL TABLES
"""
TARGET = """
CREATE SCHEMA staging;
CREATE TABLE staging.person (id int PRIMARY KEY, name text, email text, phone text, notes text);
CREATE TABLE invoice (tenant text, number int, sum numeric, PRIMARY KEY (tenant, number))
"""
MASKED = "SELECT count(*) FROM staging.person p WHERE p::text !~ 'ecret' AND email ~ '^[0-9a-f]{12}@example.org$'"


async def test_names_do_not_come_through(source_db: Database, target_db: Database, tmp_path: Path) -> None:
    await source_db.execute(SOURCE)
    await target_db.execute(TARGET)
    program = Process("masking", [sys.executable, str(EXAMPLE), source_db.dsn(), target_db.dsn(), "p"], tmp_path)
    program.start()
    await target_db.wait_for(MASKED, 50)
    await source_db.execute("INSERT INTO person SELECT i, 'Ada Secret' FROM generate_series(51, 2000) i")
    await program.kill9()
    program.start()
    await source_db.execute(
        "UPDATE person SET notes = 'Ada Secret wrote', email = 'b@secret.org'",
        "UPDATE invoice SET tenant = CASE tenant WHEN 'demo' THEN 'x' ELSE 'demo' END",
    )
    await target_db.wait_for(MASKED + " AND notes = 'N. N. wrote' AND phone IS NULL", 2000)
    await target_db.wait_for("SELECT string_agg(i::text, ';') FROM invoice i", "(demo,1,1)")
    await program.kill9()
    assert await target_db.value("SELECT count(*) FROM staging.person") == 2000
