"""Settings of the target's database for its users that would stop or slow our sessions."""

from __future__ import annotations

import anyio
import pytest

from tests.plugins.fix_cluster import Database
from tests.scenarios.conftest import Pair

TIMEOUTS = {
    "statement_timeout": 14,  # since which major version
    "lock_timeout": 14,
    "idle_in_transaction_session_timeout": 14,
    "idle_session_timeout": 14,
    "transaction_timeout": 17,
}
SHORT = 0.5  # seconds
# Without nested loops a batch read a whole index, without TID scans each row of a table without a key the whole table.
PLANS = ("enable_nestloop", "enable_tidscan", "enable_indexscan", "enable_bitmapscan")
ROWS = 20_000

_READ = """
SELECT (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 't')::int
     + (SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 't')::int
"""


async def set_for_database(database: Database, **settings: object) -> None:
    """Set the settings for new sessions."""
    await database.execute(
        "; ".join(f"ALTER DATABASE {database.name} SET {name} = '{value}'" for name, value in settings.items())
    )


async def test_a_database_that_is_read_only_for_others(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v int)")
    await pair.source.execute("INSERT INTO t VALUES (1, 0)")
    await pair.subscriber.stop()
    await set_for_database(pair.target, default_transaction_read_only="on")
    pair.subscriber.start()
    await pair.subscribe("FOR TABLE t", two_phase=True, streaming="parallel")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.change("INSERT INTO t SELECT i, i FROM generate_series(2, 100) i")
    assert await pair.rows("SELECT count(*) FROM t") == [(100,)]
    assert not pair.subscriber.log.has("ERROR|WARNING|FATAL")
    async with pair.target.connection() as connection:
        await connection.execute("SET default_transaction_read_only = off")
        await connection.execute(f"ALTER DATABASE {pair.target.name} RESET default_transaction_read_only")


async def test_timeouts_of_the_targets_database_end_nothing(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v int)")
    await pair.source.execute("INSERT INTO t VALUES (1, 0)")
    locking = await pair.target.connect()
    major = locking.get_server_version().major
    settings = {name: f"{SHORT * 1000:.0f}ms" for name, since in TIMEOUTS.items() if major >= since}
    await pair.subscriber.stop()
    await pair.subscriber.execute()  # makes the schema, which takes longer
    await set_for_database(pair.target, **settings)
    pair.subscriber.start()
    await pair.subscribe("FOR TABLE t")
    async with locking.transaction():
        await locking.execute("LOCK TABLE t IN EXCLUSIVE MODE")
        await pair.source.execute("UPDATE t SET v = 1")
        await anyio.sleep(3 * SHORT)  # the worker waits for the lock, everything else is idle
    await pair.change("UPDATE t SET v = 2")
    await anyio.sleep(3 * SHORT)  # all sessions are idle
    await pair.change("UPDATE t SET v = 3")
    assert await pair.rows("SELECT * FROM t") == [(1, 3)]
    assert not pair.subscriber.log.has("ERROR|WARNING|FATAL")


@pytest.mark.parametrize("without_key", [False, True])
async def test_planner_settings_of_the_targets_database_do_not_make_a_change_read_everything(
    pair: Pair, without_key: bool
) -> None:
    identity = "REPLICA IDENTITY FULL" if without_key else "ADD PRIMARY KEY (id)"
    await pair.both("CREATE TABLE t (id int NOT NULL, v int)", "CREATE INDEX ON t (id)", f"ALTER TABLE t {identity}")
    await pair.source.execute(f"INSERT INTO t SELECT i, 0 FROM generate_series(1, {ROWS}) i")
    await pair.subscribe("FOR TABLE t")
    await pair.subscriber.stop()
    await pair.target.execute("ANALYZE t")
    await set_for_database(pair.target, **dict.fromkeys(PLANS, "off"))
    before = await pair.target.value(_READ)
    pair.subscriber.start()
    await pair.change(f"UPDATE t SET v = 1 WHERE id % {ROWS // 50} = 0")
    await pair.subscriber.stop()
    # Sessions that end have reported the rows that they read.
    await pair.target.wait_for("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'subscriber: s'", 0)
    assert await pair.target.value(_READ) - before < ROWS
    assert await pair.target.value("SELECT count(*) FROM t WHERE v = 1") == 50
