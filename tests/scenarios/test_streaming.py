"""Transactions that arrive while they run: spooled, applied meanwhile, truncated, committed in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.settings import Settings
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.transactions import OpenTransactions
from subscriber.worker.supervision.launcher import Launcher
from tests.plugins.fix_subscriber import QUICK
from tests.scenarios.conftest import Pair

MODES = [pytest.param("off", marks=pytest.mark.soak), "on", "parallel"]
STREAMED = "SELECT stream_count > 0 FROM pg_stat_replication_slots WHERE slot_name = 's'"


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Return the directory of the files; at the end it may contain only folders."""
    return tmp_path


@pytest.fixture
def settings(spool: Path) -> Settings:
    return replace(QUICK, spool_dir=spool)


@pytest.fixture(autouse=True)
async def no_file_left(spool: Path, pair: Pair) -> AsyncIterator[None]:
    yield
    await pair.subscriber.stop()
    assert [path for path in spool.rglob("*") if path.is_file()] == []


async def subscribed(pair: Pair, streaming: str, **options: object) -> None:
    """Subscribe to table t with a thousand rows on both sides. The publisher streams all transactions."""
    await pair.source.stream_everything()
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.source.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 1000) i")
    await pair.subscribe("FOR ALL TABLES", streaming=streaming, **options)
    await pair.subscriber.wait_for_ready(pair.source)


@pytest.mark.parametrize("streaming", MODES)
async def test_a_streamed_transaction_with_every_kind_of_change_arrives(pair: Pair, streaming: str) -> None:
    await subscribed(pair, streaming)
    await pair.change(
        """
        BEGIN;
        INSERT INTO t SELECT i, 'new' FROM generate_series(1001, 1500) i;
        UPDATE t SET v = 'changed' WHERE id % 3 = 0;
        DELETE FROM t WHERE id % 7 = 0;
        SAVEPOINT a;
        INSERT INTO t VALUES (9001, 'undone');
        SAVEPOINT b;
        INSERT INTO t VALUES (9002, 'undone with a');
        RELEASE b;
        ROLLBACK TO a;
        INSERT INTO t VALUES (9003, 'kept');
        SAVEPOINT c;
        UPDATE t SET v = 'undone' WHERE id < 100;
        ROLLBACK TO c;
        UPDATE t SET id = id + 100000 WHERE id BETWEEN 10 AND 20;
        COMMIT
        """
    )
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    assert await pair.source.value(STREAMED) == (streaming != "off")


@pytest.mark.parametrize("streaming", MODES)
async def test_a_streamed_transaction_that_is_rolled_back_leaves_nothing(pair: Pair, streaming: str) -> None:
    await subscribed(pair, streaming)
    await pair.source.execute("BEGIN; UPDATE t SET v = 'undone'; SAVEPOINT a; DELETE FROM t; ROLLBACK")
    await pair.change("INSERT INTO t VALUES (5000, 'after it')")
    await pair.assert_same("SELECT * FROM t ORDER BY id")


@pytest.mark.parametrize("streaming", MODES)
async def test_many_streamed_transactions_arrive_with_small_transactions_between_them(
    pair: Pair, streaming: str
) -> None:
    await subscribed(pair, streaming)
    open_ones = [await pair.source.connect() for _ in range(4)]
    for number, connection in enumerate(open_ones):
        await connection.execute("BEGIN")
        await connection.execute(
            f"INSERT INTO t SELECT i, 'of {number}' FROM generate_series({number + 1}0000, {number + 1}0400) i"
        )
    await pair.change("INSERT INTO t VALUES (5000, 'small')")
    assert await pair.rows("SELECT v FROM t WHERE id >= 5000") == [("small",)]
    for number, connection in enumerate(open_ones):
        await connection.execute(f"UPDATE t SET v = v || '!' WHERE id BETWEEN {number + 1}0000 AND {number + 1}0100")
        await connection.execute("ROLLBACK" if number == 2 else "COMMIT")
        await connection.close()
    await pair.source.wait_for_catchup("s")
    await pair.assert_same("SELECT * FROM t ORDER BY id")


@pytest.mark.parametrize("streaming", MODES)
async def test_the_table_changes_inside_the_transaction(pair: Pair, streaming: str) -> None:
    await subscribed(pair, streaming)
    await pair.target.execute("ALTER TABLE t ADD COLUMN w int, ADD COLUMN x int")
    await pair.change(
        """
        BEGIN;
        INSERT INTO t VALUES (2001, 'before');
        ALTER TABLE t ADD COLUMN w int;
        INSERT INTO t VALUES (2002, 'between', 1);
        SAVEPOINT a;
        ALTER TABLE t ADD COLUMN x int;
        INSERT INTO t VALUES (2003, 'undone', 1, 2);
        ROLLBACK TO a;
        INSERT INTO t VALUES (2004, 'after', 3);
        COMMIT
        """,
        "INSERT INTO t VALUES (2005, 'later', 4)",
    )
    await pair.assert_same("SELECT id, v, w FROM t ORDER BY id")


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("streaming", MODES)
async def test_a_streamed_transaction_is_prepared_and_resolved(pair: Pair, streaming: str, how: str) -> None:
    await subscribed(pair, streaming, two_phase=True)
    await pair.target.wait_for("SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
    await pair.subscriber.wait_for_state("streaming")
    connection = await pair.source.connect()
    await connection.execute("BEGIN; UPDATE t SET v = 'prepared'; SAVEPOINT a; DELETE FROM t; ROLLBACK TO a")
    await connection.execute("INSERT INTO t VALUES (2000, 'prepared')")
    await connection.execute("PREPARE TRANSACTION 'g'")
    await connection.close()
    await pair.source.wait_for_catchup("s")
    prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
    assert await pair.target.value(prepared) == 1
    await pair.change("INSERT INTO t VALUES (3000, 'meanwhile')")
    await pair.change(f"{how} PREPARED 'g'")
    assert await pair.target.value(prepared) == 0
    await pair.assert_same("SELECT * FROM t ORDER BY id")


@pytest.mark.parametrize("streaming", MODES)
async def test_an_error_names_the_position_and_skip_passes_it_over(pair: Pair, streaming: str) -> None:
    await subscribed(pair, streaming)
    await pair.target.execute("INSERT INTO t VALUES (2000, 'in the way')")
    await pair.source.execute("INSERT INTO t SELECT i, 'late' FROM generate_series(1500, 2500) i")
    match = await pair.subscriber.log.wait_for(r"in transaction \d+, finished at ([0-9A-F]+/[0-9A-F]+)")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{match[1]}')")
    await pair.change("INSERT INTO t VALUES (3000, 'goes on')")
    assert await pair.rows("SELECT id, v FROM t WHERE id > 1000 ORDER BY id") == [
        (2000, "in the way"),
        (3000, "goes on"),
    ]


@pytest.mark.parametrize("streaming", MODES)
async def test_a_missing_row_in_a_streamed_transaction_is_reported_once(pair: Pair, streaming: str) -> None:
    """A batch is rejected and applied row by row, within each of the savepoints."""
    await subscribed(pair, streaming)
    await pair.target.execute("DELETE FROM t WHERE id IN (50, 150, 250, 350)")
    await pair.change(
        """
        BEGIN;
        UPDATE t SET v = 'first' WHERE id <= 100;
        SAVEPOINT a;
        UPDATE t SET v = 'second' WHERE id BETWEEN 101 AND 200;
        SAVEPOINT b;
        UPDATE t SET v = 'undone' WHERE id BETWEEN 201 AND 300;
        ROLLBACK TO b;
        INSERT INTO t SELECT i, 'new' FROM generate_series(2001, 2100) i;
        SAVEPOINT c;
        DELETE FROM t WHERE id BETWEEN 301 AND 400;
        RELEASE c;
        UPDATE t SET v = v || '!' WHERE id <= 500;
        COMMIT
        """
    )
    rows = "SELECT v, count(*) FROM t WHERE id NOT IN (50, 150, 250) GROUP BY v ORDER BY v"
    assert await pair.rows(rows) == await pair.source.rows(rows)
    told = [pair.subscriber.log.text().count(f"conflict={what}_missing") for what in ("update", "delete")]
    # A parallel worker may also report changes that are rolled back later, as PostgreSQL's does.
    assert told in ([[5, 1], [6, 1]] if streaming == "parallel" else [[5, 1]])


async def shown(pair: Pair) -> OpenTransactions:
    """Return the open transactions as `subscriber status` shows them."""
    async with CatalogConnection.open(pair.target.dsn(), "test") as catalog:
        (status,) = await assess_all(await read_catalog(catalog, ["s"]))
    return status.unfinished


@pytest.mark.parametrize("streaming", ["on", "parallel"])
async def test_status_shows_what_is_being_streamed(pair: Pair, streaming: str) -> None:
    await subscribed(pair, streaming)
    connection = await pair.source.connect()
    await connection.execute("BEGIN; UPDATE t SET v = 'x'")
    await pair.source.flush_wal()
    await pair.target.wait_for("SELECT jsonb_array_length(streamed) FROM subscriber.worker WHERE relid = 0", 1)
    many = "SELECT (streamed->0->>'changes')::int > 900 FROM subscriber.worker WHERE relid = 0"
    await pair.target.wait_for(many)  # not all: the publisher sends only flushed WAL
    ((worker,),) = await pair.target.rows("SELECT streamed->0->>'worker' FROM subscriber.worker WHERE relid = 0")
    assert worker == (None if streaming == "on" else "1")
    if streaming == "parallel":
        workers = "SELECT worker_type, leader_pid IS NOT NULL FROM subscriber.pg_stat_subscription ORDER BY 1"
        await pair.target.wait_for(f"SELECT count(*) FROM ({workers}) w", 2)
        assert await pair.rows(workers) == [("apply", False), ("parallel apply", True)]
    unfinished = await shown(pair)
    assert [(transaction.changes > 900, transaction.worker) for transaction in unfinished.streamed] == [
        (True, worker and 1)
    ]
    assert len(unfinished.parallel_pids) == (1 if streaming == "parallel" else 0)
    await connection.execute("COMMIT")
    await connection.close()
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    await pair.target.wait_for("SELECT jsonb_array_length(streamed) FROM subscriber.worker WHERE relid = 0", 0)


async def test_a_deadlock_that_no_server_sees_is_resolved(pair: Pair) -> None:
    """Only the target has a unique index: the leader's INSERT waits for a transaction that ends later."""
    await subscribed(pair, "parallel")
    await pair.target.execute("CREATE UNIQUE INDEX here_only ON t (v) WHERE id > 1000")
    connection = await pair.source.connect()
    # The parallel worker finds the table altered, and restarts.
    await connection.execute("BEGIN; INSERT INTO t VALUES (2000, 'same')")
    await pair.source.flush_wal()
    await pair.target.wait_for("SELECT (streamed->0->>'worker') FROM subscriber.worker WHERE relid = 0", "1")
    # Not the attempt before the restart, which ends at once.
    await pair.target.wait_for(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL"
        " AND clock_timestamp() - xact_start > '0.3 s'",
        1,
    )
    await pair.source.execute("INSERT INTO t VALUES (3000, 'same')")
    await pair.subscriber.log.wait_for("ERROR:  deadlock detected")
    await pair.target.wait_for("SELECT count(*) FROM t WHERE id = 3000", 1)
    await connection.execute("DELETE FROM t WHERE id = 2000; COMMIT")
    await connection.close()
    await pair.target.execute("DROP INDEX here_only")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")


async def test_a_worker_sees_what_was_committed_before_its_change(pair: Pair) -> None:
    """Its update needs a row of a transaction that the leader has sent, and the target is still busy with."""
    await pair.both("CREATE TABLE slow (id int PRIMARY KEY)")
    await subscribed(pair, "parallel")
    await pair.target.execute(
        "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(0.7); RETURN NEW; END$$",
        "CREATE TRIGGER slowly BEFORE INSERT ON slow FOR EACH ROW EXECUTE FUNCTION slowly()",
        "ALTER TABLE slow ENABLE ALWAYS TRIGGER slowly",
    )
    await pair.source.execute(f"ALTER DATABASE {pair.source.name} RESET ALL")
    await pair.source.execute(f"ALTER DATABASE {pair.source.name} SET logical_decoding_work_mem = '64kB'")
    await pair.subscriber.restart()
    await pair.subscriber.wait_for_state("streaming")
    connection = await pair.source.connect()
    await connection.execute("BEGIN; INSERT INTO t SELECT i, 'early' FROM generate_series(10000, 11000) i")
    await pair.source.flush_wal()
    await pair.target.wait_for("SELECT (streamed->0->>'worker') FROM subscriber.worker WHERE relid = 0", "1")
    await pair.source.execute("BEGIN; INSERT INTO t VALUES (5000, 'x'); INSERT INTO slow VALUES (1); COMMIT")
    await connection.execute("UPDATE t SET v = 'streamed' WHERE id = 5000")
    await connection.execute("UPDATE t SET v = 'streamed' WHERE id >= 10000; COMMIT")
    await connection.close()
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t WHERE id >= 5000 ORDER BY id")


# That the parallel worker waits for another transaction, or does not and has come to its changes of table t.
DELETED_OR_WAITS = """
SELECT count(*) > 0 FROM pg_locks
 WHERE locktype = 'transactionid' AND NOT granted
    OR relation = 't'::regclass AND mode = 'RowExclusiveLock' AND pid = $1
"""


@pytest.mark.parametrize("other", ["ordinary", "streamed"])
async def test_a_transaction_leaves_equal_rows_to_those_in_progress(pair: Pair, other: str) -> None:
    """A transaction inserts a row and deletes it again, while a streamed one deletes another that is equal to it."""
    await pair.both(
        "CREATE TABLE equal (a int)",
        "ALTER TABLE equal REPLICA IDENTITY FULL",
        "CREATE TABLE first (a int)",
        "CREATE TABLE second (a int)",
    )
    await pair.source.execute("INSERT INTO equal VALUES (1), (2)")
    await subscribed(pair, "parallel")
    await pair.source.execute(f"ALTER DATABASE {pair.source.name} RESET ALL")
    await pair.source.execute(f"ALTER DATABASE {pair.source.name} SET logical_decoding_work_mem = '64kB'")
    await pair.subscriber.restart()
    await pair.subscriber.wait_for_state("streaming")
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'relation' AND NOT granted"
    async with (
        pair.target.connection() as holding_first,
        pair.target.connection() as holding_second,
        pair.source.connection() as streamed,
    ):
        await holding_first.execute("BEGIN; LOCK TABLE first")
        await holding_second.execute("BEGIN; LOCK TABLE second")
        await streamed.execute("BEGIN; INSERT INTO first VALUES (1); DELETE FROM equal WHERE a = 1")
        await streamed.execute("INSERT INTO t SELECT i, 'streamed' FROM generate_series(10000, 11000) i")
        await pair.source.flush_wal()
        await pair.target.wait_for(waiting, 1)
        worker = await pair.target.value("SELECT pid FROM pg_locks WHERE locktype = 'relation' AND NOT granted")
        large = (
            "INSERT INTO t SELECT i, 'streamed' FROM generate_series(20000, 21000) i;" if other == "streamed" else ""
        )
        await pair.source.execute(
            f"BEGIN; {large} INSERT INTO equal VALUES (1); DELETE FROM equal WHERE ctid = '(0,3)';"
            " INSERT INTO second VALUES (1); COMMIT"
        )
        await pair.target.wait_for(waiting, 2)
        await holding_first.execute("COMMIT")
        await pair.target.wait_for(DELETED_OR_WAITS.replace("$1", str(worker)), True)
        await holding_second.execute("COMMIT")
        await streamed.execute("COMMIT")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM equal")


async def test_more_transactions_than_workers_wait_in_their_files(pair: Pair) -> None:
    await subscribed(pair, "parallel")
    open_ones = [await pair.source.connect() for _ in range(5)]
    for number, connection in enumerate(open_ones):
        await connection.execute(
            f"BEGIN; INSERT INTO t SELECT i, 'x' FROM generate_series({number + 1}0000, {number + 1}0400) i"
        )
    await pair.source.flush_wal()
    await pair.target.wait_for("SELECT jsonb_array_length(streamed) FROM subscriber.worker WHERE relid = 0", 5)
    for connection in reversed(open_ones):
        await connection.execute("COMMIT")
        await connection.close()
    await pair.source.wait_for_catchup("s")
    await pair.assert_same("SELECT * FROM t ORDER BY id")


async def test_changes_of_a_parallel_worker_have_an_origin(pair: Pair) -> None:
    """A loop filter on the target applies: the changes are not sent to subscribers with origin = none."""
    await subscribed(pair, "parallel")
    await pair.target.execute("CREATE PUBLICATION back FOR TABLE t")
    slot = "SELECT pg_create_logical_replication_slot('back', 'pgoutput')"
    await pair.target.execute(slot)
    await pair.change("BEGIN; UPDATE t SET v = 'streamed'; COMMIT")
    await pair.target.execute("INSERT INTO t VALUES (7000, 'local')")
    letters = await pair.target.rows(
        "SELECT chr(get_byte(data, 0)), count(*) FROM pg_logical_slot_get_binary_changes('back', NULL, NULL,"
        " 'proto_version', '4', 'publication_names', 'back', 'origin', 'none') GROUP BY 1 ORDER BY 1"
    )
    await pair.target.execute("SELECT pg_drop_replication_slot('back')")
    assert dict(letters).get("U") is None
    assert dict(letters)["I"] == 1


async def test_a_full_spool_is_an_error_that_loses_nothing(pair: Pair) -> None:
    await subscribed(pair, "on")
    await pair.subscriber.stop()
    await pair.source.execute("UPDATE t SET v = 'x'")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            Launcher(pair.target.dsn(), settings=replace(pair.subscriber.settings, spool_limit=10_000)).run
        )
        await pair.subscriber.log.wait_for("ERROR:  .*spool.*")
        tasks.cancel_scope.cancel()
    assert await pair.rows("SELECT DISTINCT v FROM t") == [("copied",)]
    pair.subscriber.start()
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")


@pytest.mark.parametrize("streaming", ["on", "parallel"])
@pytest.mark.parametrize("passed_over", [False, True], ids=["applied", "skipped"])
async def test_relations_described_in_a_streamed_transaction_stay_known_after_it(
    pair: Pair, streaming: str, passed_over: bool
) -> None:
    await pair.source.execute(f"ALTER DATABASE {pair.source.name} SET logical_decoding_work_mem = '64kB'")
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t", streaming=streaming)
    if passed_over:
        await pair.target.execute("INSERT INTO t VALUES (2000, 'in the way')")
    await pair.source.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 3000) i")
    if passed_over:
        match = await pair.subscriber.log.wait_for(r"in transaction \d+, finished at ([0-9A-F]+/[0-9A-F]+)")
        await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{match[1]}')")
    await pair.change("INSERT INTO t VALUES (5000, 'small, and not streamed')")
    assert await pair.source.value(STREAMED)
    assert await pair.target.value("SELECT count(*) FROM t") == (2 if passed_over else 3001)
