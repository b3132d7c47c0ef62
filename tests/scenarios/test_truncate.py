"""TRUNCATE: tables truncated together stay together, and identity columns restart as on the publisher."""

from __future__ import annotations

from tests.scenarios.conftest import Pair


async def test_truncate_and_its_options(pair: Pair) -> None:
    await pair.both(
        "CREATE SEQUENCE numbers",
        "CREATE TABLE t (id int PRIMARY KEY DEFAULT nextval('numbers'))",
        "ALTER SEQUENCE numbers OWNED BY t.id",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)",
    )
    await pair.source.execute(
        "INSERT INTO parent VALUES (1)", "INSERT INTO child VALUES (1, 1)", "INSERT INTO t VALUES (1)"
    )
    await pair.subscribe("FOR ALL TABLES")
    await pair.target.execute("SELECT setval('numbers', 100)")
    await pair.change("TRUNCATE t", "INSERT INTO t VALUES (2)")
    await pair.assert_same("SELECT * FROM t")
    assert await pair.rows("SELECT nextval('numbers')") == [(101,)]
    await pair.change("TRUNCATE t RESTART IDENTITY")
    assert await pair.rows("SELECT count(*), nextval('numbers') FROM t") == [(0, 1)]
    await pair.change("TRUNCATE parent CASCADE")
    assert await pair.rows("SELECT (SELECT count(*) FROM parent), (SELECT count(*) FROM child)") == [(0, 0)]
    await pair.change(
        "BEGIN; INSERT INTO parent VALUES (2); TRUNCATE parent, child; INSERT INTO parent VALUES (3); COMMIT"
    )
    await pair.assert_same("SELECT * FROM parent")


async def test_truncate_is_not_cascaded_to_unpublished_tables(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE parent (id int PRIMARY KEY)")
    await pair.target.execute(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)",
    )
    await pair.source.execute("INSERT INTO parent VALUES (1)")
    await pair.subscribe("FOR TABLE parent")
    await pair.target.execute("INSERT INTO child VALUES (1, 1)")
    await pair.source.execute("TRUNCATE parent CASCADE")
    await pair.fails("ERROR:  cannot truncate a table referenced in a foreign key constraint")
    await pair.target.execute("DROP TABLE child")
    await pair.caught_up()
    assert await pair.rows("SELECT count(*) FROM parent") == [(0,)]


async def test_truncate_that_is_not_published(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute(
        "INSERT INTO t VALUES (1)",
        "INSERT INTO u VALUES (1)",
        "CREATE PUBLICATION q FOR TABLE u WITH (publish = 'insert, truncate')",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish = 'insert')",
    )
    await pair.subscriber.create(pair.source, "p, q")
    await pair.caught_up()
    await pair.change("TRUNCATE t, u")
    assert await pair.rows("SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM u)") == [(1, 0)]


async def test_inheritance_children_are_tables_of_their_own(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE kid (x int) INHERITS (t)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE ONLY t", "INSERT INTO t VALUES (1)")
    await pair.subscriber.create(pair.source, "p")
    await pair.caught_up()
    await pair.target.execute("INSERT INTO kid VALUES (1, 1), (2, 2)")
    await pair.change("UPDATE t SET id = 2")
    assert await pair.rows("SELECT id FROM ONLY t") == [(2,)]
    assert await pair.rows("SELECT id FROM kid ORDER BY 1") == [(1,), (2,)]
    await pair.change("TRUNCATE ONLY t")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]


async def test_truncate_of_a_table_whose_index_was_built_over_updated_rows(pair: Pair) -> None:
    """TRUNCATE rebuilds the index and writes its row of pg_index. The table's shape does not change."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v int)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    async with pair.target.connection() as connection:
        await connection.execute("INSERT INTO t VALUES (1, 1); INSERT INTO t VALUES (2, 1)")
        await connection.execute("BEGIN; UPDATE t SET v = 2; CREATE INDEX made_late ON t (v); COMMIT")
        late = "SELECT indcheckxmin FROM pg_index WHERE indexrelid = 'made_late'::regclass"
        assert await connection.fetchval(late)
    await pair.change("INSERT INTO t VALUES (3, 3)")
    started = pair.subscriber.log.text().count("apply worker for subscription")
    await pair.change("BEGIN; TRUNCATE t; INSERT INTO u VALUES (1); INSERT INTO t VALUES (4, 4); COMMIT")
    assert not await pair.target.value(late)
    await pair.assert_same("SELECT * FROM t")
    assert pair.subscriber.log.text().count("apply worker for subscription") == started
    await pair.target.execute("DROP INDEX made_late", "CREATE UNIQUE INDEX ON t (v)")  # that is another shape
    await pair.change("INSERT INTO t VALUES (5, 5)")
    assert pair.subscriber.log.text().count("apply worker for subscription") == started + 1
