"""Tables with as many columns as PostgreSQL allows."""

from __future__ import annotations

import pytest

from subscriber.comparison.comparison import verify
from subscriber.repair import repair
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import running_subscriber

COLUMNS = 1600


@pytest.mark.timeout(180)
@pytest.mark.parametrize("key", ["PRIMARY KEY", ""])
async def test_the_largest_number_of_columns(source_db: Database, target_db: Database, key: str) -> None:
    columns = ", ".join(f"c{number} int" for number in range(1, COLUMNS))
    for database in (source_db, target_db):
        await database.execute(f"CREATE TABLE wide (id int {key}, {columns})")
    await source_db.execute(
        "ALTER TABLE wide REPLICA IDENTITY FULL",
        "CREATE PUBLICATION p FOR TABLE wide",
        "INSERT INTO wide (id, c1, c1599) SELECT n, n, n FROM generate_series(1, 20) n",
    )
    async with running_subscriber(target_db) as there:
        await there.create(source_db, "p")
        await there.wait_for_ready(source_db)
        every = ", ".join(["n"] * COLUMNS)
        await source_db.execute(
            f"INSERT INTO wide SELECT {every} FROM generate_series(21, 60) n",
            "UPDATE wide SET c2 = c1",
            "DELETE FROM wide WHERE id = 60",
        )
        await target_db.wait_for("SELECT (count(*), sum(c2))::text FROM wide", "(59,1770)")
        (comparison,) = (await verify(target_db.dsn(), "s")).tables
        assert (comparison.rows, comparison.is_same, comparison.note) == (59, True, None)
        await target_db.execute("UPDATE wide SET c1599 = 0 WHERE id = 3", "DELETE FROM wide WHERE id = 4")
        (comparison,) = (await verify(target_db.dsn(), "s")).tables
        assert (comparison.is_same, comparison.note) == (False, None)
        await repair(target_db.dsn(), "s", delete_extra=True)
        (comparison,) = (await verify(target_db.dsn(), "s")).tables
        assert (comparison.is_same, comparison.note) == (True, None)
