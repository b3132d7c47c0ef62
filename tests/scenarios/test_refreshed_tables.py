"""REFRESH PUBLICATION removes, adds and renames tables while changes arrive."""

from __future__ import annotations

import anyio
import pytest

from tests.scenarios.conftest import Pair

LOCKS = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"


async def test_a_removed_table_gets_no_change_after_the_statement(pair: Pair) -> None:
    """The changes wait behind a lock. After the statement the table is emptied, added and copied again."""
    await pair.both("CREATE TABLE t (n int)", "CREATE TABLE other (id int PRIMARY KEY, n int)")
    await pair.source.execute("INSERT INTO t SELECT generate_series(1, 10)", "INSERT INTO other VALUES (1, 0)")
    await pair.subscribe("FOR TABLE t, other")
    await pair.subscriber.wait_for_ready(pair.source)
    async with pair.target.connection() as holder:
        await holder.execute("BEGIN; SELECT FROM other FOR UPDATE")
        await pair.source.execute("UPDATE other SET n = 1", "INSERT INTO t VALUES (11), (12)")
        await pair.target.wait_for(LOCKS)
        await anyio.sleep(0.3)  # the next transaction is received
        await pair.source.execute("ALTER PUBLICATION p DROP TABLE t")
        await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        await pair.target.execute("TRUNCATE t")
        await pair.source.execute("ALTER PUBLICATION p ADD TABLE t")
        await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        await anyio.sleep(0.3)
        await holder.execute("ROLLBACK")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.assert_same("SELECT n FROM t ORDER BY 1")


@pytest.mark.parametrize("key", ["", "PRIMARY KEY"])
@pytest.mark.parametrize(
    "rename",
    [
        "ALTER TABLE t RENAME TO moved",
        "ALTER TABLE t SET SCHEMA elsewhere",
        "ALTER SCHEMA public RENAME TO p2",
        "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t",
    ],
)
@pytest.mark.parametrize("published", ["FOR ALL TABLES", "FOR TABLE t"])
async def test_tables_that_are_renamed_on_both_sides_keep_their_states(
    pair: Pair, key: str, rename: str, published: str
) -> None:
    await pair.both("CREATE SCHEMA elsewhere", f"CREATE TABLE t (id int {key})", f"CREATE TABLE t_new (id int {key})")
    await pair.source.execute("INSERT INTO t SELECT generate_series(1, 10)", "INSERT INTO t_new VALUES (100)")
    await pair.subscribe(published)
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.both(rename)
    schema = "p2" if "p2" in rename else "elsewhere" if "elsewhere" in rename else "public"
    moved = "moved" if "moved" in rename else "t_old" if "t_old" in rename else "t"
    new = "t" if "t_old" in rename else "t_new"
    await pair.source.execute(f"INSERT INTO {schema}.{moved} VALUES (11)")
    await pair.caught_up()
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.subscriber.restart()
    await pair.source.execute(f"INSERT INTO {schema}.{moved} VALUES (12)")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.assert_same(f"SELECT id FROM {schema}.{moved} ORDER BY 1")
    if published == "FOR ALL TABLES":
        where = "public" if schema == "elsewhere" else schema
        await pair.source.execute(f"INSERT INTO {where}.{new} VALUES (101)")
        await pair.caught_up()
        await pair.assert_same(f"SELECT id FROM {where}.{new} ORDER BY 1")
    assert not pair.subscriber.log.has("ERROR")


async def test_a_table_that_the_target_swaps_first_is_compared(pair: Pair) -> None:
    """Changes in between go to the table that has the name. So the former table lacks them."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE t_new (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t SELECT generate_series(1, 10)")
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.wait_for_ready(pair.source)
    swap = "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t"
    await pair.target.execute(swap)
    await pair.change("INSERT INTO t VALUES (11)")
    assert await pair.rows("SELECT id FROM t") == [(11,)]
    await pair.source.execute(swap, "INSERT INTO t_old VALUES (12)")
    await pair.fails('table "public.t_old" is published under a new name, and table "public.t" has got its changes')
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.assert_same("SELECT id FROM t_old ORDER BY 1")
    await pair.change("INSERT INTO t_old VALUES (13)")
    await pair.assert_same("SELECT id FROM t_old ORDER BY 1")
