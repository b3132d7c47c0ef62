"""examples/embedded.py, run against real servers."""

from __future__ import annotations

import runpy
from pathlib import Path

from tests.plugins.fix_cluster import Database

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "embedded.py"


async def test_the_embedded_subscription_copies_and_resumes(source_db: Database, target_db: Database) -> None:
    follow = runpy.run_path(str(EXAMPLE))["follow"]
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY, name text)")
    await source_db.execute("INSERT INTO city VALUES (1, 'Ulm')", "CREATE PUBLICATION everything FOR ALL TABLES")

    await follow(source_db.dsn(), target_db.dsn(), "everything")
    assert await target_db.rows("SELECT * FROM city") == [(1, "Ulm")]

    await source_db.execute("INSERT INTO city VALUES (2, 'Brno')", "UPDATE city SET name = 'Pau' WHERE id = 1")
    await follow(source_db.dsn(), target_db.dsn(), "everything")
    assert await target_db.rows("SELECT * FROM city ORDER BY id") == [(1, "Pau"), (2, "Brno")]
