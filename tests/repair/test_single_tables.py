"""A table or row that cannot be repaired leaves the others repaired, and keys may be equal and have another text."""

from __future__ import annotations

import json

import pytest

from subscriber.cli.commands.repair import describe, repair_
from subscriber.cli.commands.resync import resync
from subscriber.comparison import verify
from subscriber.repair import repair
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.repair.test_repair import assert_same, damage, prepare_tables

TABLES = [f"t{number:02}" for number in range(8)]


@pytest.fixture
async def damaged(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    """Tables that have lost rows. Two tables refuse some rows."""
    made = [f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in TABLES]
    rows = [f"INSERT INTO {name} SELECT i, 'v' || i FROM generate_series(1, 20) i" for name in TABLES]
    await prepare_tables(source_db, target_db, subscriber, made, rows)
    await damage(target_db, *(f"DELETE FROM {name} WHERE id > 5" for name in TABLES))
    await target_db.execute(
        "ALTER TABLE t02 ADD CHECK (v <> 'v7')",
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not here'; END $$",
        "CREATE TRIGGER refuse BEFORE INSERT ON t05 FOR EACH ROW EXECUTE FUNCTION refuse()",
        "ALTER TABLE t05 ENABLE ALWAYS TRIGGER refuse",
    )


@pytest.mark.usefixtures("damaged")
async def test_a_table_that_is_refused_does_not_end_the_repair(
    source_db: Database, target_db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _repair(target_db) == 1
    document = {table["table"]: table for table in json.loads(capsys.readouterr().out)["tables"]}
    await assert_same(source_db, target_db, *(name for name in TABLES if name not in ("t02", "t05")))
    assert document["public.t00"]["inserted"] == 15
    # All rows that the table accepts are repaired.
    assert document["public.t02"]["inserted"] == 14
    assert 'violates check constraint "t02_v_check"' in document["public.t02"]["note"]
    assert await target_db.rows("SELECT id FROM t02 WHERE id > 5 ORDER BY id") == [
        (number,) for number in range(6, 21) if number != 7
    ]
    assert "not here" in document["public.t05"]["note"]
    assert document["public.t05"]["inserted"] == 0
    differing = {table.name for table in (await verify(target_db.dsn(), "s")).tables if not table.is_same}
    assert differing == {"public.t02", "public.t05"}


async def _repair(target: Database) -> int:
    return await repair_(target.dsn(), "s", jobs=2, json=True)


NUMBERS = (
    "CREATE TABLE names (name numeric PRIMARY KEY, v int)",
    "CREATE TABLE pairs (a numeric, b int, v int, PRIMARY KEY (a, b))",
)
NUMBER_ROWS = (
    "INSERT INTO names SELECT i, i FROM generate_series(1, 30) i",
    "INSERT INTO pairs SELECT i % 5, i, i FROM generate_series(1, 30) i",
)
SCALED = (
    "UPDATE names SET name = name + 0.00 WHERE v % 3 = 0",
    "UPDATE names SET v = -v WHERE abs(v) % 6 = 0",
    "DELETE FROM names WHERE v = 7",
    "UPDATE pairs SET a = a + 0.0 WHERE b % 4 = 0",
)


async def test_a_key_that_is_equal_and_has_another_text(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The row is the same one. tests/vendor/test_collations.py has the texts that a collation considers equal."""
    await prepare_tables(source_db, target_db, subscriber, NUMBERS, NUMBER_ROWS)
    await damage(target_db, *SCALED)
    await assert_spelling_is_repaired(source_db, target_db)


async def test_the_statements_of_a_dry_run_change_an_equal_key_with_another_text(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare_tables(source_db, target_db, subscriber, NUMBERS, NUMBER_ROWS)
    await damage(target_db, *SCALED)
    planned = await repair(target_db.dsn(), "s", dry_run=True)
    await damage(target_db, *planned.statements)
    assert (await verify(target_db.dsn(), "s")).is_same


async def assert_spelling_is_repaired(source: Database, target: Database) -> None:
    """Check that each row is repaired once: 1 is missing, 10 and 7 have another text of their key."""
    planned = await repair(target.dsn(), "s", dry_run=True)
    rows = [line for line in planned.statements if not line.startswith("SET")]
    assert len(rows) == len(set(rows)) == 10 + 1 + 7
    counts = [(1, 10, 0), (0, 7, 0)]
    assert [(table.inserted, table.updated, table.deleted) for table in planned.tables] == counts
    result = await repair(target.dsn(), "s")
    assert result.is_complete
    assert [(table.inserted, table.updated, table.deleted) for table in result.tables] == counts
    for query in ("SELECT name::text, v FROM names ORDER BY v", "SELECT a::text, b, v FROM pairs ORDER BY b"):
        assert await target.rows(query) == await source.rows(query)
    assert (await verify(target.dsn(), "s")).is_same


async def test_an_extra_row_has_a_unique_value_of_the_publisher(
    source_db: Database, target_db: Database, subscriber: Subscriber, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row is kept, so the publisher's cannot be inserted. The hint deletes it, and then works."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE)", "CREATE TABLE other (id int)")
    await source_db.execute(
        "INSERT INTO t SELECT i, i FROM generate_series(1, 5) i", "CREATE PUBLICATION p FOR TABLE t"
    )
    await target_db.execute("INSERT INTO t SELECT i, i FROM generate_series(1, 4) i", "INSERT INTO t VALUES (9, 5)")
    await subscriber.create(source_db, "p", "s", copy_data="compare")
    await subscriber.log.wait_for("1 row of the publisher may have unique values that other rows of the target have")
    hint = "If no application needs the extra rows: subscriber resync s public.t --delete-extra"
    assert subscriber.log.has(hint)
    assert await target_db.rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,), (4,), (9,)]
    assert await resync(target_db.dsn(), "s", ["public.t"], delete_extra=True) == 0
    await subscriber.wait_for_ready(source_db)
    assert await target_db.rows("SELECT id FROM t ORDER BY id") == [(number,) for number in range(1, 6)]
    await damage(target_db, "UPDATE t SET id = 9 WHERE id = 5")
    assert await _repair(target_db) == 1
    capsys.readouterr()
    result = await repair(target_db.dsn(), "s")
    hint = "If no application needs the extra rows: subscriber repair s public.t --delete-extra"
    assert f"HINT:  {hint}" in list(describe(result, dry_run=False))
    assert (await repair(target_db.dsn(), "s", delete_extra=True)).is_complete
    await assert_same(source_db, target_db, "t")
