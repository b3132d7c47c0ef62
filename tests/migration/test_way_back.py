"""The way back replicates every table that the move replicates, or the move does not begin."""

from __future__ import annotations

import pytest

from subscriber.errors import StatementError
from tests.migration.scene import following, moving
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions

pytestmark = pytest.mark.usefixtures("with_schema")


async def refusal(source: Database, target: Database) -> StatementError:
    async with moving(source, target) as move:
        with pytest.raises(StatementError) as refused:
            await move.cutover()
        assert [server.fence for server in (await move.status()).servers] != ["closed", "closed"]
    return refused.value


def statement(error: StatementError) -> str:
    where, command = str(error.hint).split(": ", 1)
    assert where == "On the target"
    return command


@pytest.mark.timeout(120)
async def test_a_publication_of_the_way_back_that_lacks_tables(source_db: Database, target_db: Database) -> None:
    """It was there before the move."""
    async with following(source_db, target_db):
        await target_db.execute("CREATE PUBLICATION s_back FOR TABLE account, part_1")
        error = await refusal(source_db, target_db)
        assert 'publication "s_back"' in error.message
        assert "item" in str(error.detail)
        assert "part_2" in str(error.detail)
        assert "account" not in str(error.detail)
        await target_db.execute(statement(error))
        async with moving(source_db, target_db) as move:
            await move.cutover()
        await target_db.execute("INSERT INTO item (token) VALUES ('a')", "INSERT INTO part VALUES (1, 2)")
        await target_db.wait_for_catchup("s_back")
        assert await source_db.rows("SELECT token FROM item") == [("a",)]
        assert await source_db.rows("SELECT id, day FROM part") == [(1, 2)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("publication", "lacking"),
    [
        ("FOR TABLE account, part, item WHERE (id > 1)", ["item"]),
        ("FOR TABLE account, part_1, part_2 (id, day), item (id)", ["item", "part_2"]),
        ("FOR TABLE account, part, item WITH (publish = 'insert, update, delete')", []),
        ("FOR ALL TABLES WITH (publish = 'insert')", []),
    ],
)
async def test_a_publication_of_the_way_back_that_leaves_out_changes(
    source_db: Database, target_db: Database, publication: str, lacking: list[str]
) -> None:
    """Rows, columns, or kinds of changes. The statement of the hint mends it."""
    async with following(source_db, target_db):
        await target_db.execute(f"CREATE PUBLICATION s_back {publication}")
        error = await refusal(source_db, target_db)
        assert 'publication "s_back"' in error.message
        assert all(table in str(error.detail) for table in lacking)
        assert "account" not in str(error.detail)
        await target_db.execute(*statement(error).split("; "))
        async with moving(source_db, target_db) as move:
            await move.cutover()
        await target_db.execute("INSERT INTO item (token) VALUES ('a')", "TRUNCATE account")
        await target_db.wait_for_catchup("s_back")
        assert await source_db.rows("SELECT token FROM item") == [("a",)]
        assert await source_db.rows("SELECT FROM account") == []


@pytest.mark.timeout(120)
async def test_a_table_that_is_added_when_the_way_back_exists(source_db: Database, target_db: Database) -> None:
    async with following(source_db, target_db):
        async with moving(source_db, target_db) as move:
            await move.cutover()
            await move.back()
        for database in (source_db, target_db):
            await database.execute("CREATE TABLE late (id int PRIMARY KEY)")
        there = Subscriptions(target_db)
        await there.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        await there.wait_for_ready(source_db)
        error = await refusal(source_db, target_db)
        assert 'publication "s_back"' in error.message
        await target_db.execute(statement(error))
        async with moving(source_db, target_db) as move:
            await move.cutover()
        await target_db.execute("INSERT INTO late VALUES (1)")
        await target_db.wait_for_catchup("s_back")
        assert await source_db.rows("SELECT id FROM late") == [(1,)]


@pytest.mark.timeout(120)
async def test_the_end_of_a_move_keeps_a_publication_that_somebody_has_created(
    source_db: Database, target_db: Database
) -> None:
    """It has the name of one that the move had created."""
    async with following(source_db, target_db), moving(source_db, target_db) as move:
        await move.cutover()
        await target_db.execute("DROP PUBLICATION s_back", "CREATE PUBLICATION s_back FOR TABLE account")
        await move.finish()
        assert await target_db.rows("SELECT pubname FROM pg_publication") == [("s_back",)]
