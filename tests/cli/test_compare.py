from __future__ import annotations

from subscriber.demo.compare import TableResult, compare
from tests.plugins.fix_cluster import Database

SAME = [
    "CREATE TABLE same (a int, b text, c float8)",
    r"INSERT INTO same SELECT i % 7, E'tab\t\\ line\n' || i % 5, 0.1 * i FROM generate_series(1, 1000) i",
    "CREATE TABLE nothing ()",
    "INSERT INTO nothing DEFAULT VALUES",
]


async def results(source: Database, target: Database) -> dict[str, TableResult]:
    return {result.name: result async for result in compare(source.dsn(), target.dsn())}


async def test_the_order_of_rows_and_columns_does_not_matter(source_db: Database, target_db: Database) -> None:
    await source_db.execute(*SAME, "CREATE TABLE t (a int, b text)", "INSERT INTO t VALUES (1, 'x'), (2, NULL)")
    await target_db.execute(*SAME, "CREATE TABLE t (b text, a int)", "INSERT INTO t VALUES (NULL, 2), ('x', 1)")
    tables = await results(source_db, target_db)
    assert {name: result.same for name, result in tables.items()} == {"same": 1000, "nothing": 1, "t": 2}
    assert not any(result.differs for result in tables.values())


async def test_differences_are_counted(source_db: Database, target_db: Database) -> None:
    await source_db.execute(*SAME, "INSERT INTO same SELECT * FROM same LIMIT 3")
    await target_db.execute(*SAME, r"UPDATE same SET b = E'a\\b' WHERE ctid IN (SELECT ctid FROM same LIMIT 2)")
    result = (await results(source_db, target_db))["same"]
    assert (result.only_source, result.only_target) == (5, 2)
    assert result.same == 998


async def test_null_is_not_an_empty_string_and_minus_zero_not_zero(source_db: Database, target_db: Database) -> None:
    await source_db.execute("CREATE TABLE t (a text, b float8)", "INSERT INTO t VALUES (NULL, 0), ('x', '-0')")
    await target_db.execute("CREATE TABLE t (a text, b float8)", "INSERT INTO t VALUES ('', 0), ('x', 0)")
    result = (await results(source_db, target_db))["t"]
    assert (result.same, result.only_source, result.only_target) == (0, 2, 2)


async def test_a_table_of_one_side_only_is_a_difference(source_db: Database, target_db: Database) -> None:
    await source_db.execute("CREATE TABLE a (x int)", "CREATE TABLE c (x int)")
    await target_db.execute("CREATE TABLE b (x int)", "CREATE TABLE c (x int, y int)")
    tables = await results(source_db, target_db)
    assert {name: result.note for name, result in tables.items()} == {
        "a": "does not exist on the target",
        "b": "does not exist on the source",
        "c": "has other columns on the target",
    }
    assert all(result.differs for result in tables.values())
