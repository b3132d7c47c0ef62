"""Policies from the user's view: statements, counters, functions of a program, and a worker that is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import anyio
import pytest

import subscriber
from subscriber.demo.servers import Server
from subscriber.errors import StatementError
from tests.plugins.fix_cluster import Database, database_with_schema
from tests.plugins.fix_subscriber import Program, Subscriptions, running_subscriber
from tests.scenarios.conftest import Pair

DECISIONS = "SELECT conflict_type, policy, resolution, occurrences FROM subscriber.conflict_history ORDER BY id"


@pytest.fixture
async def tracked_db(tracking: Server) -> AsyncIterator[Database]:
    async with database_with_schema(tracking) as database:
        yield database


@pytest.fixture
async def pair(source_db: Database, tracked_db: Database) -> AsyncIterator[Pair]:
    """Create a source, and a launcher on a target that tracks commit timestamps."""
    async with running_subscriber(tracked_db) as running:
        yield Pair(source_db, tracked_db, running)


@pytest.mark.parametrize("options", [{"binary": False}, {}], ids=["text", "binary"])
async def test_conflicts_with_rows_of_others_have_postgresqls_messages(pair: Pair, options: dict[str, bool]) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, n numeric, d date)")
    await pair.source.execute("INSERT INTO t VALUES (1, 1.50, '2024-05-01'), (2, 2, NULL)")
    await pair.subscribe("FOR TABLE t", **options)
    await pair.target.execute("UPDATE t SET n = 7")
    await pair.change("BEGIN; UPDATE t SET n = 2.50 WHERE id = 1; DELETE FROM t WHERE id = 2; COMMIT")
    form = "text" if options else "binary"
    assert await pair.target.value("SELECT format FROM subscriber.worker WHERE relid = 0") == form
    row = r"Existing local row \(1, 7, 2024-05-01\); remote row \(1, 2\.50, 2024-05-01\); replica identity \(id\)=\(1\)"
    await pair.fails(
        r"conflict=update_origin_differs\n.*DETAIL:  Updating the row that was modified locally .*\n\s*" + row
    )
    row = r"Existing local row \(2, 7, null\); replica identity \(id\)=\(2\)\.\n"
    await pair.fails(
        r"conflict=delete_origin_differs\n.*DETAIL:  Deleting the row that was modified locally .*\n\s*" + row
    )


async def test_a_policy_is_given_altered_and_taken_back(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t", conflict_policy="last_update_wins", conflict_log_rows=True)
    await pair.target.execute("INSERT INTO t VALUES (1, 'target'), (2, 'target')")
    await pair.change("INSERT INTO t VALUES (1, 'source')")  # later than the target's
    await pair.assert_same("SELECT * FROM t WHERE id = 1")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (conflict_policy = 'public.t: keep_local, error')")
    await pair.subscriber.log.wait_for('subscription "s" will restart because of a parameter change')
    await pair.change("INSERT INTO t VALUES (2, 'source')")
    assert await pair.rows("SELECT id, v FROM t ORDER BY id") == [(1, "source"), (2, "target")]
    decided = [("insert_exists", "last_update_wins", "updated", 1), ("insert_exists", "keep_local", "skipped", 1)]
    assert await pair.rows(DECISIONS) == decided
    assert (
        await pair.rows("SELECT local_row->>'v', remote_row->>'v' FROM subscriber.conflict_history")
        == [("target", "source")] * 2
    )
    assert pair.subscriber.log.has(
        r'LOG:  conflict detected on relation "public.t": conflict=insert_exists\n.*'
        r'DETAIL:  Key already exists in unique index "t_pkey", modified locally in transaction \d+ at .*\n.*'
        r"Key \(id\)=\(2\); existing local row \(2, target\); remote row \(2, source\)\.\n.*"
        r'Resolution: skipped, by conflict policy "keep_local"\.'
    )
    assert "source" not in pair.subscriber.log.text("json")
    await pair.target.wait_for(
        "SELECT (confl_insert_exists, apply_error_count) = (2, 0) FROM subscriber.pg_stat_subscription_stats"
    )
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (conflict_policy = '', conflict_history = none)")
    await pair.target.execute("INSERT INTO t VALUES (3, 'target')")
    await pair.source.execute("INSERT INTO t VALUES (3, 'source')")
    await pair.fails("ERROR:  conflict detected on relation")
    assert await pair.rows(DECISIONS) == decided


async def test_an_error_is_one_line_however_often_it_is_tried(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("INSERT INTO t VALUES (1, 'target')")
    await pair.source.execute("INSERT INTO t VALUES (1, 'source')")
    await pair.target.wait_for("SELECT occurrences >= 3 FROM subscriber.conflict_history")
    ((attempts, lsn),) = await pair.rows("SELECT occurrences, remote_finish_lsn::text FROM subscriber.conflict_history")
    await pair.target.wait_for(f"SELECT confl_insert_exists >= {attempts} FROM subscriber.pg_stat_subscription_stats")
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{lsn}')")
    await pair.caught_up()
    assert len(await pair.rows(DECISIONS)) == 1


async def test_counters_are_reset(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t VALUES (1), (2)")
    await pair.subscribe("FOR TABLE t", conflict_policy="skip")
    await pair.target.execute("DELETE FROM t")
    await pair.change("DELETE FROM t")
    stats = "FROM subscriber.pg_stat_subscription_stats"
    await pair.target.wait_for(f"SELECT confl_delete_missing {stats}", 2)
    oid = await pair.target.value("SELECT oid FROM subscriber.pg_subscription")
    await pair.target.execute(f"SELECT subscriber.pg_stat_reset_subscription_stats({oid})")
    assert await pair.rows(f"SELECT confl_delete_missing, stats_reset > now() - interval '1 minute' {stats}") == [
        (0, True)
    ]
    await pair.source.execute("INSERT INTO t VALUES (3)")
    await pair.source.wait_for_catchup("s")
    await pair.target.execute("DELETE FROM t", "SELECT subscriber.pg_stat_reset_subscription_stats(NULL)")
    await pair.change("DELETE FROM t")
    await pair.target.wait_for(f"SELECT confl_delete_missing {stats}", 1)


async def test_a_policy_that_needs_commit_timestamps_is_refused_without_them(
    source_db: Database, target_db: Database
) -> None:
    """Before anything is created."""
    await source_db.execute("CREATE PUBLICATION p")
    subscriptions = Subscriptions(target_db)
    for policy in ("last_update_wins", "'skip, delete_origin_differs: error'"):
        with pytest.raises(StatementError, match="needs track_commit_timestamp on the target") as caught:
            await subscriptions.create(source_db, "p", conflict_policy=policy)
        assert "restart it" in (caught.value.hint or "")
        assert (
            await source_db.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
        )
    await subscriptions.create(source_db, "p", conflict_policy="keep_local")
    with pytest.raises(StatementError, match="needs track_commit_timestamp on the target"):
        await subscriptions.execute("ALTER SUBSCRIPTION s SET (conflict_policy = last_update_wins)")
    with pytest.raises(StatementError, match="invalid value for parameter"):
        await subscriptions.execute("ALTER SUBSCRIPTION s SET (conflict_policy = 'public.t: last_update')")
    assert await target_db.value("SELECT subconflictpolicy FROM subscriber.subscription") == "keep_local"
    await subscriptions.execute("DROP SUBSCRIPTION s")


async def test_a_function_of_the_program(source_db: Database, tracked_db: Database) -> None:
    """Counters of both sides are added up."""

    async def add(conflict: subscriber.Conflict) -> dict[str, object]:
        assert conflict.local is not None
        assert conflict.remote is not None
        await anyio.sleep(0.1)
        return {"n": int(conflict.local["n"] or 0) + int(conflict.remote["n"] or 0)}

    for database in (source_db, tracked_db):
        await database.execute("CREATE TABLE counter (name text PRIMARY KEY, n int)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE counter")
    async with subscriber.connect(tracked_db.dsn()) as db:
        options = "conflict_policy = 'public.counter insert_exists: call add', copy_data = false"
        await db.execute(f"CREATE SUBSCRIPTION s CONNECTION '{source_db.dsn()}' PUBLICATION p WITH ({options})")
        await tracked_db.execute("INSERT INTO counter VALUES ('a', 2)")
        async with db.running(resolvers={"add": add}):
            await db.wait_for_sync("s")
            await source_db.execute("INSERT INTO counter VALUES ('a', 40), ('b', 1)")
            await source_db.wait_for_catchup("s")
            assert await tracked_db.rows("SELECT name, n FROM counter ORDER BY 1") == [("a", 42), ("b", 1)]
        await db.execute("DROP SUBSCRIPTION s")


@pytest.fixture
def killed(tracked_db: Database, processes: Path) -> Iterator[Program]:
    """Return `subscriber run` on the target, not started yet."""
    program = Program(tracked_db.dsn(), processes / "run.log")
    yield program
    program.kill()


ROWS = 600  # that take 4 s


@pytest.mark.parametrize("policy", ["apply_remote", pytest.param("skip", marks=pytest.mark.soak)])
async def test_each_conflict_is_recorded_once_however_often_the_worker_is_killed(
    source_db: Database, tracked_db: Database, killed: Program, policy: str
) -> None:
    for database in (source_db, tracked_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    await source_db.execute(f"INSERT INTO t SELECT g, 0 FROM generate_series(1, {ROWS}) g")
    subscriptions = Subscriptions(tracked_db)
    await subscriptions.create(source_db, "p", conflict_policy=policy, copy_data=False)
    random = Random(4)
    await killed.start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_update_one_by_one, source_db, ROWS)
        for _ in range(3):
            await anyio.sleep(random.uniform(0.6, 1.2))
            killed.kill()
            await killed.start()
    await source_db.wait_for_catchup("s", timeout=60)
    lines = await tracked_db.rows(
        "SELECT conflict_type, resolution, count(*), count(DISTINCT remote_finish_lsn), count(DISTINCT key->>'id')"
        " FROM subscriber.conflict_history GROUP BY 1, 2"
    )
    resolution = "skipped" if policy == "skip" else "inserted"
    assert lines == [("update_missing", resolution, ROWS, ROWS, ROWS)]
    assert await tracked_db.value("SELECT count(*) FROM t") == (0 if policy == "skip" else ROWS)
    assert await killed.stop() == 0
    await subscriptions.execute("DROP SUBSCRIPTION s")


async def _update_one_by_one(source: Database, number: int) -> None:
    connection = await source.connect()
    for id_ in range(1, number + 1):
        await connection.execute(f"UPDATE t SET n = 1 WHERE id = {id_}")
        await anyio.sleep(0.005)  # the kill has to happen while they arrive


async def test_copied_rows_are_the_publishers(pair: Pair) -> None:
    """They have the snapshot's time, even if the copy takes long. The publisher's next changes are later."""
    for table in ("t", "u"):
        await pair.source.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text)",
            f"INSERT INTO {table} SELECT g, 'copied' FROM generate_series(1, 3) g",
        )
        await pair.target.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text, copied timestamptz DEFAULT clock_timestamp())"
        )
    await pair.subscribe("FOR TABLE t, u", conflict_policy="'public.t: keep_local, public.u: last_update_wins'")
    await pair.subscriber.wait_for_ready(pair.source)
    for table in ("t", "u"):
        assert await pair.target.value(
            f"SELECT bool_and(w.timestamp < {table}.copied AND w.roident > 0)"
            f" FROM {table}, pg_xact_commit_timestamp_origin({table}.xmin) w"
        )
        await pair.change(f"UPDATE {table} SET v = 'later' WHERE id = 1")
        assert await pair.target.value(f"SELECT v FROM {table} WHERE id = 1") == "later"
        await pair.target.execute(f"UPDATE {table} SET v = 'local' WHERE id IN (1, 2)")
        await pair.change(f"UPDATE {table} SET v = 'last'", f"DELETE FROM {table} WHERE id = 2")
    assert await pair.rows("SELECT id, v FROM t ORDER BY id") == [(1, "local"), (2, "local"), (3, "last")]
    assert await pair.rows("SELECT id, v FROM u ORDER BY id") == [(1, "last"), (3, "last")]


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
async def test_a_prepared_transaction_takes_its_record_with_it(pair: Pair, how: str) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t", two_phase=True, conflict_policy="apply_remote")
    await pair.subscriber.wait_for_ready(pair.source)
    await pair.target.wait_for("SELECT subtwophasestate = 'e' FROM subscriber.pg_subscription")
    await pair.subscriber.wait_for_state("streaming")
    await pair.target.execute("INSERT INTO t VALUES (1, 'target')")
    connection = await pair.source.connect()
    for statement in ("BEGIN", "INSERT INTO t VALUES (1, 'source')", "PREPARE TRANSACTION 'p'"):
        await connection.execute(statement)
    await pair.source.wait_for_catchup("s")
    assert await pair.rows(DECISIONS) == []
    await pair.change(f"{how} PREPARED 'p'")
    committed = how == "COMMIT"
    assert await pair.rows(DECISIONS) == [("insert_exists", "apply_remote", "updated", 1)] * committed
    assert await pair.rows("SELECT v FROM t") == [("source" if committed else "target",)]


async def test_a_streamed_transaction_is_decided_when_it_is_committed(pair: Pair) -> None:
    """Its timestamp is that of its commit, which is not known while it arrives."""
    await pair.source.stream_everything()
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t", streaming="parallel", conflict_policy="last_update_wins")
    await pair.subscriber.wait_for_ready(pair.source)
    connection = await pair.source.connect()
    await connection.execute("BEGIN")
    await connection.execute("INSERT INTO t SELECT g, 'source' FROM generate_series(1, 100) g")
    await pair.source.wait_for("SELECT stream_count > 0 FROM pg_stat_replication_slots WHERE slot_name = 's'")
    await pair.target.execute("INSERT INTO t VALUES (1, 'before its commit')")
    await connection.execute("SAVEPOINT one; UPDATE t SET v = 'never'; ROLLBACK TO one")
    await connection.execute("COMMIT")
    await pair.source.wait_for_catchup("s")
    assert await pair.rows("SELECT DISTINCT v FROM t") == [("source",)]
    assert await pair.rows(DECISIONS) == [("insert_exists", "last_update_wins", "updated", 1)]


async def test_rows_of_the_other_apply_sessions_are_no_conflicts(pair: Pair) -> None:
    """Each session has an origin of its own, and none of them counts as another subscription's."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v int)")
    await pair.source.stream_everything()
    await pair.subscribe("FOR TABLE t", streaming="parallel", apply_sessions=3)
    await pair.subscriber.wait_for_ready(pair.source)
    for first in range(0, 60, 20):
        await pair.source.execute(*(f"INSERT INTO t VALUES ({first + number}, 0)" for number in range(20)))
        await pair.source.execute(*("UPDATE t SET v = v + 1" for _ in range(5)))
    await pair.source.wait_for_catchup("s")
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    used = await pair.target.value(
        "SELECT count(*) FROM pg_replication_origin_status p, subscriber.subscription s"
        " WHERE p.external_id ~ ('^pg_' || s.subid || '(_[0-9]{1,4})?$') AND p.local_lsn <> '0/0'"
    )
    assert used > 1
    counted = "SELECT confl_update_origin_differs FROM subscriber.subscription_stats"
    assert await pair.rows(counted) == [(0,)]
    await pair.target.execute("UPDATE t SET v = 0 WHERE id = 1")
    await pair.change("UPDATE t SET v = 1 WHERE id = 1")
    await pair.target.wait_for(counted, 1)
