"""Streamed transactions combined with loops, cascades, copies, prepared transactions, and skipping."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import QUICK, running_subscriber
from tests.scenarios.conftest import Pair

MODES = ["on", "parallel"]
PARALLEL = [pytest.param("on", marks=pytest.mark.soak), "parallel"]  # for long tests
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
STREAMED = "SELECT stream_count > 0 FROM pg_stat_replication_slots WHERE slot_name = '{}'"
PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
ENABLED = "SELECT subtwophasestate::text FROM subscriber.pg_subscription WHERE subname = '{}'"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(QUICK, spool_dir=tmp_path)


@pytest.fixture
async def third_db(source_db: Database) -> AsyncIterator[Database]:
    """Create another database on the publisher's server."""
    async with fresh_database(source_db.server) as database:
        yield database


@pytest.mark.parametrize("streaming", PARALLEL)
async def test_streamed_transactions_in_both_directions_do_not_loop(pair: Pair, streaming: str) -> None:
    await pair.both(TABLE, "CREATE PUBLICATION p FOR TABLE t")
    for database in (pair.source, pair.target):
        await database.stream_everything()
    options = {"origin": "none", "copy_data": False, "streaming": streaming}
    async with running_subscriber(pair.source, settings=pair.subscriber.settings) as back:
        await pair.subscriber.create(pair.source, "p", "there", **options)
        await back.create(pair.target, "p", "back", **options)
        await pair.source.execute(
            "BEGIN; INSERT INTO t SELECT generate_series(1, 500), 'source'; SAVEPOINT s; DELETE FROM t; ROLLBACK TO s;"
            " UPDATE t SET v = v || '!' WHERE id <= 100; COMMIT"
        )
        await pair.source.wait_for_catchup("there")
        await pair.target.execute("UPDATE t SET v = 'target' WHERE id > 400")
        await pair.target.wait_for_catchup("back")
        await pair.source.execute("DELETE FROM t WHERE id = 500")
        await pair.source.wait_for_catchup("there")
        await pair.target.wait_for_catchup("back")
        await pair.assert_same("SELECT * FROM t ORDER BY id")
        assert await pair.rows("SELECT v, count(*) FROM t GROUP BY v ORDER BY v") == [
            ("source", 300),
            ("source!", 100),
            ("target", 99),
        ]
        assert await pair.source.value(STREAMED.format("there"))
        assert await pair.target.value(STREAMED.format("back"))
        for subscriber in (pair.subscriber, back):
            assert not subscriber.log.has("ERROR|conflict")


@pytest.mark.parametrize("streaming", MODES)
async def test_a_table_is_copied_while_a_transaction_is_streamed(pair: Pair, streaming: str) -> None:
    """It begins and ends while the copy is at work, and changes both tables."""
    await pair.both(TABLE, "CREATE TABLE late (id int PRIMARY KEY, v text)")
    await pair.source.stream_everything()
    await pair.source.execute("INSERT INTO late SELECT generate_series(1, 1000), 'copied'")
    await pair.subscribe("FOR TABLE t", streaming=streaming)
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE late")
    holder = await pair.target.connect()
    await holder.execute("BEGIN; LOCK TABLE late IN SHARE MODE")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    copying = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'late'::regclass"
    await pair.target.wait_for(copying, 1)
    await pair.source.execute(
        "BEGIN; INSERT INTO t SELECT generate_series(1, 300), 'before'; UPDATE late SET v = 'during';"
        " SAVEPOINT a; DELETE FROM late; ROLLBACK TO a; DELETE FROM late WHERE id % 2 = 0; COMMIT",
        "INSERT INTO late VALUES (5000, 'small')",
    )
    await holder.close()
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    await pair.assert_same("SELECT * FROM late ORDER BY id")
    assert await pair.rows("SELECT v, count(*) FROM late GROUP BY v ORDER BY v") == [("during", 500), ("small", 1)]
    assert await pair.source.value(STREAMED.format("s"))


@pytest.mark.parametrize("prepared", [False, True], ids=["committed", "prepared"])
@pytest.mark.parametrize("streaming", MODES)
async def test_an_error_disables_and_what_was_skipped_is_passed_over(
    pair: Pair, streaming: str, prepared: bool
) -> None:
    await pair.both(TABLE)
    await pair.source.stream_everything()
    await pair.subscribe("FOR TABLE t", streaming=streaming, disable_on_error=True, two_phase=True)
    await pair.target.wait_for(ENABLED.format("s"), "e")
    await pair.target.execute("INSERT INTO t VALUES (200, 'in the way')")
    end = "PREPARE TRANSACTION 'g'" if prepared else "COMMIT"
    await pair.source.execute(f"BEGIN; INSERT INTO t SELECT generate_series(1, 300), 'lost'; {end}")
    match = await pair.subscriber.log.wait_for(r"in transaction \d+, finished at ([0-9A-F]+/[0-9A-F]+)")
    await pair.target.wait_for("SELECT subenabled FROM subscriber.pg_subscription", False)
    assert await pair.rows("SELECT * FROM t") == [(200, "in the way")]
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{match[1]}')", "ALTER SUBSCRIPTION s ENABLE")
    if prepared:
        await pair.source.execute("COMMIT PREPARED 'g'")
    await pair.source.execute("BEGIN; INSERT INTO t SELECT generate_series(1001, 1300), 'goes on'; COMMIT")
    await pair.source.wait_for_catchup("s")
    assert await pair.rows("SELECT v, count(*) FROM t GROUP BY v ORDER BY v") == [("goes on", 300), ("in the way", 1)]
    assert await pair.target.value(PREPARED) == 0


@pytest.mark.parametrize("streaming", PARALLEL)
async def test_streamed_and_prepared_transactions_arrive_in_a_chain_of_servers(
    pair: Pair, third_db: Database, streaming: str
) -> None:
    """Transactions prepared on the first server are prepared and resolved on the second and the third as well."""
    await pair.both(TABLE)
    await third_db.execute(TABLE)
    for database in (pair.source, pair.target):
        await database.stream_everything()
    await pair.target.execute("CREATE PUBLICATION q FOR TABLE t")
    await pair.subscribe("FOR TABLE t", streaming=streaming, two_phase=True)
    await pair.target.wait_for(ENABLED.format("s"), "e")
    async with running_subscriber(third_db, settings=pair.subscriber.settings) as last:
        await last.create(pair.target, "q", "s2", streaming=streaming, two_phase=True)
        await last.wait_for_ready(pair.target, "s2")
        await third_db.wait_for(ENABLED.format("s2"), "e")

        async def everywhere() -> None:
            await pair.source.wait_for_catchup("s")
            await pair.target.wait_for_catchup("s2")

        for number, end in enumerate(["COMMIT", "ROLLBACK"]):
            await pair.source.execute(
                f"BEGIN; INSERT INTO t SELECT generate_series({number * 1000 + 1}, {number * 1000 + 300}), '{end}';"
                " SAVEPOINT a; UPDATE t SET v = 'undone'; ROLLBACK TO a; PREPARE TRANSACTION 'g'"
            )
            await everywhere()
            assert [await pair.target.value(PREPARED), await third_db.value(PREPARED)] == [1, 1]
            await pair.source.execute(f"{end} PREPARED 'g'")
            await everywhere()
            assert [await pair.target.value(PREPARED), await third_db.value(PREPARED)] == [0, 0]
        await pair.source.execute("BEGIN; UPDATE t SET v = 'last' WHERE id > 200; COMMIT")
        await everywhere()
        query = "SELECT v, count(*) FROM t GROUP BY v ORDER BY v"
        assert await third_db.rows(query) == await pair.rows(query) == [("COMMIT", 200), ("last", 100)]
        assert await pair.target.value(STREAMED.format("s2"))
