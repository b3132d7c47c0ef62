"""Partitioned tables on either side."""

from __future__ import annotations

import secrets

import pytest

from subscriber.comparison.comparison import verify
from tests.scenarios.conftest import Pair

BY_RANGE = (
    "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
)
OTHERWISE = (
    "CREATE TABLE t (v text, id int PRIMARY KEY) PARTITION BY HASH (id)",
    "CREATE TABLE h_1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE h_2 (junk int, id int NOT NULL, v text)",
    "ALTER TABLE h_2 DROP junk",
    "ALTER TABLE t ATTACH PARTITION h_2 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
)
CHANGES = (
    "INSERT INTO t VALUES (3, 'new'), (13, 'new')",
    "UPDATE t SET v = v || '!' WHERE id IN (1, 13)",
    "UPDATE t SET id = 15 WHERE id = 3",  # moves to another partition
    "DELETE FROM t WHERE id = 2",
)


async def test_partitions_to_partitions_of_the_same_name(pair: Pair) -> None:
    await pair.both(*BY_RANGE)
    await pair.source.execute("INSERT INTO t VALUES (1, 'copied'), (2, 'copied'), (11, 'copied')")
    await pair.subscribe("FOR TABLE t")
    assert await pair.rows("SELECT srrelid::regclass::text FROM subscriber.subscription_rel ORDER BY 1") == [
        ("t_1",),
        ("t_2",),
    ]
    await pair.change(*CHANGES)
    await pair.assert_same("SELECT tableoid::regclass::text, id, v FROM t ORDER BY id")
    await pair.change("TRUNCATE t_1")
    await pair.assert_same("SELECT id FROM t ORDER BY id")


async def test_a_root_to_other_partitions(pair: Pair) -> None:
    await pair.source.execute(*BY_RANGE, "INSERT INTO t VALUES (1, 'copied'), (2, 'copied'), (11, 'copied')")
    await pair.target.execute(*OTHERWISE)
    await pair.subscribe("FOR TABLE t WITH (publish_via_partition_root)")
    await pair.change(*CHANGES)
    await pair.assert_same("SELECT id, v FROM t ORDER BY id")
    await pair.target.execute("DELETE FROM t WHERE id = 1")
    await pair.change("UPDATE t SET v = 'nobody' WHERE id = 1", "DELETE FROM t WHERE id = 1")
    await pair.fails(r'conflict detected on relation "public.h_\d": conflict=update_missing')
    await pair.fails(r'conflict detected on relation "public.h_\d": conflict=delete_missing')
    await pair.change("TRUNCATE t")
    assert await pair.rows("SELECT count(*) FROM t") == [(0,)]


async def test_a_root_to_a_plain_table_and_a_plain_table_to_partitions(pair: Pair) -> None:
    plain = "CREATE TABLE {} (id int PRIMARY KEY, v text)"
    await pair.source.execute(*BY_RANGE, plain.format("u"))
    await pair.target.execute(plain.format("t"))
    await pair.target.execute(
        "CREATE TABLE u (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE u_1 PARTITION OF u FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE u_2 PARTITION OF u FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id)",
        "CREATE TABLE u_2_1 PARTITION OF u_2 DEFAULT",
    )
    await pair.source.execute(
        "INSERT INTO t VALUES (1, 'copied'), (2, 'c'), (11, 'c')", "INSERT INTO u SELECT * FROM t"
    )
    await pair.subscribe("FOR TABLE t, u WITH (publish_via_partition_root)")
    await pair.change(*CHANGES)
    await pair.change(*[statement.replace(" t ", " u ") for statement in CHANGES])
    await pair.assert_same("SELECT id, v FROM t ORDER BY id")
    await pair.assert_same("SELECT id, v FROM u ORDER BY id")
    await pair.source.execute("INSERT INTO u VALUES (99, 'nowhere')")
    await pair.fails('ERROR:  no partition of relation "u" found for row')
    await pair.target.execute("CREATE TABLE u_3 PARTITION OF u DEFAULT")
    await pair.caught_up()
    await pair.assert_same("SELECT id, v FROM u ORDER BY id")


async def test_partitions_are_added_and_detached_while_changes_arrive(pair: Pair) -> None:
    await pair.both(*BY_RANGE)
    await pair.subscribe("FOR TABLE t")
    await pair.both("CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM (20) TO (30)")
    await pair.source.execute("INSERT INTO t VALUES (21, 'before refresh')")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    await pair.change("INSERT INTO t VALUES (22, 'after')")
    await pair.assert_same("SELECT id, v FROM t ORDER BY id")
    await pair.both("ALTER TABLE t DETACH PARTITION t_3")
    await pair.change("INSERT INTO t_3 VALUES (23, 'not published')", "INSERT INTO t VALUES (1, 'is')")
    assert await pair.rows("SELECT count(*) FROM t_3") == [(2,)]
    assert await pair.rows("SELECT id FROM t") == [(1,)]


@pytest.mark.parametrize("engine", ["snapshot", "ranges"])
async def test_a_foreign_table_is_a_partition_of_the_publisher(pair: Pair, engine: str) -> None:
    """Its rows are copied with the root, as by PostgreSQL, and compared. Its changes are not in the publisher's WAL."""
    database, there = pair.source, f"host '127.0.0.1', port '{pair.source.server.port}', dbname '{pair.source.name}'"
    root = "CREATE TABLE t (id int, v text) PARTITION BY RANGE (id)"
    await database.execute(
        root,
        BY_RANGE[1],
        "CREATE EXTENSION postgres_fdw",
        f"CREATE SERVER there FOREIGN DATA WRAPPER postgres_fdw OPTIONS ({there})",
        "CREATE USER MAPPING FOR CURRENT_USER SERVER there OPTIONS (user 'postgres', password_required 'false')",
        "CREATE TABLE far (id int, v text)",
        "CREATE FOREIGN TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20) SERVER there OPTIONS (table_name 'far')",
        "INSERT INTO t SELECT n, 'copied' FROM generate_series(1, 15) n",
    )
    await pair.target.execute(root, *BY_RANGE[1:])
    await pair.subscribe("FOR TABLE t WITH (publish_via_partition_root)", copy_engine=engine)
    await pair.change("INSERT INTO t VALUES (0, 'new')")
    await pair.assert_same("SELECT id, v FROM t ORDER BY id")
    comparison = await verify(pair.target.dsn(), "s")
    assert [(table.name, table.rows, table.is_same) for table in comparison.tables] == [("public.t", 16, True)]
    await pair.target.execute("UPDATE t SET v = 'other' WHERE id = 12")
    assert [table.is_same for table in (await verify(pair.target.dsn(), "s")).tables] == [False]


async def test_a_foreign_partition_of_another_role_is_refused(pair: Pair) -> None:
    """Its rows would be read with the user mapping of the role that copies them."""
    role = f"owner_{secrets.token_hex(4)}"
    root = "CREATE TABLE t (id int, v text) PARTITION BY RANGE (id)"
    await pair.target.execute(root, *BY_RANGE[1:])
    await pair.source.execute(
        f"CREATE ROLE {role}",
        root,
        "CREATE EXTENSION postgres_fdw",
        "CREATE SERVER there FOREIGN DATA WRAPPER postgres_fdw OPTIONS (dbname 'nosuch')",
        "CREATE FOREIGN TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20) SERVER there",
        f"ALTER FOREIGN TABLE t_2 OWNER TO {role}",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
    )
    try:
        await pair.subscriber.create(pair.source, "p")
        await pair.fails(f'partition public.t_2 of table "public.t" is a foreign table, which role "{role}" controls')
    finally:
        await pair.source.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
