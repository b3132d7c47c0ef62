"""Row filters and column lists of publications."""

from __future__ import annotations

import pytest

from subscriber.errors import SubscriberError
from tests.scenarios.conftest import Pair


async def test_a_row_filter(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.source.execute("INSERT INTO t VALUES (1, 'a'), (5, 'b'), (9, 'c')")
    await pair.subscribe("FOR TABLE t WHERE (id > 4)")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(5,), (9,)]
    await pair.change(
        "INSERT INTO t VALUES (2, 'x'), (6, 'y')",
        "UPDATE t SET id = 7 WHERE id = 1",  # enters the filter: an INSERT
        "UPDATE t SET id = 3 WHERE id = 9",  # leaves: a DELETE
        "UPDATE t SET v = 'z' WHERE id = 5",
    )
    assert await pair.rows("SELECT id, v FROM t ORDER BY 1") == [(5, "z"), (6, "y"), (7, "a")]


async def test_filters_of_several_publications_are_alternatives(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute(
        "INSERT INTO t SELECT generate_series(1, 9)",
        "INSERT INTO u SELECT generate_series(1, 3)",
        "CREATE PUBLICATION q FOR TABLE t WHERE (id > 7), u WHERE (id = 1)",
        "CREATE PUBLICATION r FOR TABLE u",
        "CREATE PUBLICATION p FOR TABLE t WHERE (id < 3)",
    )
    await pair.subscriber.create(pair.source, "p, q, r")
    await pair.caught_up()
    await pair.change("INSERT INTO t VALUES (0), (10)")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(0,), (1,), (2,), (8,), (9,), (10,)]
    assert await pair.rows("SELECT id FROM u ORDER BY 1") == [(1,), (2,), (3,)]


async def test_a_row_filter_of_a_partitioned_table(pair: Pair) -> None:
    await pair.source.execute(
        "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t_2 PARTITION OF t DEFAULT",
        "INSERT INTO t VALUES (1), (9), (11), (19)",
    )
    await pair.target.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t WHERE (id % 10 = 9) WITH (publish_via_partition_root)")
    await pair.change("INSERT INTO t VALUES (29), (30)")
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(9,), (19,), (29,)]


async def test_a_column_list(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY, a int, secret text, b int)")
    await pair.target.execute("CREATE TABLE t (b int, id int PRIMARY KEY, a int DEFAULT 5)")
    await pair.source.execute("INSERT INTO t VALUES (1, 1, 'secret', 1)")
    await pair.subscribe("FOR TABLE t (id, b)")
    await pair.change("INSERT INTO t VALUES (2, 2, 'secret', 2)", "UPDATE t SET a = 7, b = 8 WHERE id = 1")
    assert await pair.rows("SELECT id, a, b FROM t ORDER BY 1") == [(1, 5, 8), (2, 5, 2)]
    await pair.source.execute("ALTER PUBLICATION p SET TABLE t (id, a)")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.change("UPDATE t SET a = 9, b = 9 WHERE id = 1")
    assert await pair.rows("SELECT id, a, b FROM t ORDER BY 1") == [(1, 9, 8), (2, 5, 2)]


async def test_column_lists_that_disagree_are_refused(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, a int, b int)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t (id, a)", "CREATE PUBLICATION q FOR TABLE t (id, b)")
    with pytest.raises(
        SubscriberError, match=r'cannot use different column lists for table "public\.t" in different publications'
    ):
        await pair.subscriber.create(pair.source, "p, q")
    await pair.subscriber.create(pair.source, "p")
    await pair.caught_up()
    await pair.subscriber.execute("ALTER SUBSCRIPTION s ADD PUBLICATION q WITH (refresh = false)")
    await pair.source.execute("INSERT INTO t VALUES (1, 1, 1)")
    await pair.fails("cannot use different column lists for table")
    await pair.source.execute("DROP PUBLICATION q")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DROP PUBLICATION q WITH (refresh = false)")
    await pair.source.execute("INSERT INTO t VALUES (2, 2, 2)")
    # The publication list is evaluated as of the insert, so that transaction fails as long as q is requested. Without q
    # it is sent.
    await pair.caught_up()
    assert await pair.rows("SELECT id, a, b FROM t ORDER BY 1") == [(1, 1, None), (2, 2, None)]
