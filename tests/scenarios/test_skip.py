"""ALTER SUBSCRIPTION … SKIP: one transaction is skipped, and no other."""

from __future__ import annotations

from dataclasses import replace

import anyio

from subscriber.lsn import Lsn
from tests.scenarios.conftest import Pair

CONTEXT = r"in transaction \d+, finished at ([0-9A-F]+/[0-9A-F]+)"


async def stuck(pair: Pair) -> str:
    """Write a transaction of two tables that fails in one of them. Returns the position at which it finished."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE other (id int PRIMARY KEY)")
    await pair.subscribe("FOR ALL TABLES")
    await pair.target.execute("INSERT INTO t VALUES (7, 'in the way')")
    await pair.source.execute("BEGIN; INSERT INTO other VALUES (1); INSERT INTO t VALUES (7, 'late'); COMMIT")
    await pair.source.execute("INSERT INTO t VALUES (8, 'behind it')")
    return (await pair.subscriber.log.wait_for(CONTEXT))[1]


async def test_the_named_transaction_is_skipped_whole_and_what_follows_is_applied(pair: Pair) -> None:
    position = await stuck(pair)
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{position}')")
    await pair.subscriber.log.wait_for(f"LOG:  logical replication completed skipping transaction at LSN {position}")
    await pair.caught_up()
    assert await pair.target.rows("SELECT id, v FROM t ORDER BY id") == [(7, "in the way"), (8, "behind it")]
    assert await pair.target.rows("SELECT * FROM other") == []
    assert await pair.target.value("SELECT subskiplsn::text FROM subscriber.subscription") == "0/0"


async def test_a_position_that_does_not_come_is_cleared_by_the_next_transaction(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SKIP (lsn = 'F/FFFFFFFF')")
    assert pair.subscriber.launcher is not None
    with anyio.fail_after(20):
        while not pair.subscriber.launcher.supervisor("s").skip_lsn:  # the launcher has not read the statement yet
            await anyio.sleep(0.01)
    await pair.change("INSERT INTO t VALUES (1, 'kept')")
    await pair.subscriber.log.wait_for('WARNING:  skip-LSN of subscription "s" cleared')
    await pair.assert_same("SELECT * FROM t")
    assert await pair.target.value("SELECT subskiplsn::text FROM subscriber.subscription") == "0/0"


async def test_an_older_read_of_the_catalog_does_not_bring_a_cleared_position_back(pair: Pair) -> None:
    """Else the next transaction would log that it does not match a position that is gone."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t")
    assert pair.subscriber.launcher is not None
    supervisor = pair.subscriber.launcher.supervisor("s")
    read_before = supervisor.subscription = replace(supervisor.subscription, skip_lsn=Lsn(16))
    supervisor.skip_cleared()
    await supervisor.update(read_before)
    assert supervisor.skip_lsn == 0
    await supervisor.update(replace(read_before, skip_lsn=Lsn(0)))
    assert supervisor._cleared_skip == 0  # from now on a statement may set the same position again


async def test_a_skipped_transaction_stays_skipped_after_a_restart(pair: Pair) -> None:
    position = await stuck(pair)
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{position}')")
    await pair.caught_up()
    await pair.subscriber.restart()
    await pair.change("INSERT INTO other VALUES (2)")
    assert await pair.target.rows("SELECT * FROM other") == [(2,)]
    assert await pair.target.value("SELECT v FROM t WHERE id = 7") == "in the way"
