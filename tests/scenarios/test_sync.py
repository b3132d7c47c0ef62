"""Initial copies: complete, restartable at every step, and without leftovers on either server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import anyio
import asyncpg
import pytest

from subscriber import failpoints, telemetry
from subscriber.errors import SubscriberError
from subscriber.failpoints import Point
from tests.scenarios.conftest import Pair

SYNC_SLOTS = (
    "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pg_%_sync_%' AND database = current_database()"
)
SYNC_ORIGINS = r"""
SELECT count(*) FROM pg_replication_origin o, subscriber.subscription s WHERE roname LIKE 'pg\_' || s.subid || '\_%'
"""
SESSIONS = "SELECT sessions FROM pg_stat_database WHERE datname = current_database()"
SYNC_PROGRESS = "SELECT count(*) FROM subscriber.progress WHERE relid <> 0"


async def assert_nothing_left(pair: Pair) -> None:
    """Wait until slots, origins and progress rows of table synchronization are removed."""
    await pair.source.wait_for(SYNC_SLOTS, 0)
    await pair.target.wait_for(SYNC_ORIGINS, 0)
    await pair.target.wait_for(SYNC_PROGRESS, 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """Collect the types that sessions ask their server for. That query takes longer than all others of a start."""
    asked_types: list[Sequence[int]] = []
    introspect = asyncpg.Connection._introspect_types  # type: ignore[attr-defined]

    async def ask(connection: object, types: Sequence[int], timeout: float | None) -> object:
        asked_types.append(types)
        return await introspect(connection, types, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", ask)
    return asked_types


async def test_many_tables_are_copied_and_nothing_is_left_over(pair: Pair, asked: list[Sequence[int]]) -> None:
    names = [f"t{number}" for number in range(6)]
    for name in names:
        await pair.both(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
        await pair.source.execute(f"INSERT INTO {name} SELECT g, 'v' || g FROM generate_series(1, 500) g")
    await pair.subscribe("FOR ALL TABLES")
    for name in names:
        await pair.assert_same(f"SELECT count(*), sum(id), max(v) FROM {name}")
    await pair.subscriber.wait_for_ready(pair.source)
    await assert_nothing_left(pair)
    assert asked == []


async def test_sync_workers_keep_their_sessions_from_table_to_table(pair: Pair) -> None:
    for number in range(20):
        await pair.both(f"CREATE TABLE t{number} (id int PRIMARY KEY)")
        await pair.source.execute(f"INSERT INTO t{number} VALUES ({number})")
    before = await pair.target.value(SESSIONS)
    await pair.subscribe("FOR ALL TABLES")
    await pair.subscriber.wait_for_ready(pair.source)
    await assert_nothing_left(pair)
    await anyio.sleep(0.2)  # sessions are counted when they end
    assert await pair.target.value(SESSIONS) - before < 20


async def test_only_later_changes_arrive_without_copy_data(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.subscribe("FOR TABLE t", copy_data=False)
    await pair.change("INSERT INTO t VALUES (2)")
    assert await pair.rows("SELECT id FROM t") == [(2,)]
    assert await pair.rows("SELECT srsubstate FROM subscriber.subscription_rel") == [(b"r",)]


async def test_a_copy_that_fails_is_done_again_once_it_can_be(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE fine (id int PRIMARY KEY)")
    await pair.target.execute("INSERT INTO t VALUES (5, 'in the way')")
    await pair.source.execute(
        "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 10) g", "INSERT INTO fine VALUES (1)"
    )
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t, fine")
    await pair.subscriber.create(pair.source, "p")
    await pair.fails('ERROR:  duplicate key value violates unique constraint "t_pkey"')
    await pair.target.wait_for("SELECT srsubstate FROM subscriber.subscription_rel WHERE srrelid = 't'::regclass", b"d")
    await pair.target.wait_for("SELECT count(*) FROM fine", 1)
    await pair.target.wait_for("SELECT sync_error_count > 0 FROM subscriber.subscription_stats")
    await pair.source.execute("INSERT INTO t VALUES (11, 'while it fails')")
    await pair.target.execute("DELETE FROM t")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    await pair.subscriber.wait_for_ready(pair.source)
    await assert_nothing_left(pair)


async def test_the_keys_of_an_error_name_the_worker_that_had_it(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.both("CREATE TABLE followed (id int PRIMARY KEY)")
    await pair.target.execute("INSERT INTO t VALUES (1)", "INSERT INTO followed VALUES (2)")
    await pair.source.execute("INSERT INTO t VALUES (1)", "INSERT INTO followed VALUES (1)")
    await pair.source.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await pair.subscriber.create(pair.source, "p")
    await pair.fails('ERROR:  duplicate key value violates unique constraint "t_pkey"')
    state = "SELECT srsubstate::text FROM subscriber.subscription_rel WHERE srrelid = 'followed'::regclass"
    await pair.target.wait_for(state, "r")  # until then its own worker applies changes
    await pair.source.execute("INSERT INTO followed VALUES (2)")
    await pair.fails("ERROR:  conflict detected")
    errors = [record for record in pair.subscriber.log.records if record.levelno >= telemetry.ERROR]
    places = {(keys.get("worker"), keys.get("relation")) for keys in (error.__dict__["keys"] for error in errors)}
    assert places == {("tablesync", "public.t"), ("apply", "public.followed")}
    await pair.target.execute("TRUNCATE t, followed")


async def test_a_table_added_later(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE late (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("INSERT INTO late VALUES (1)", "ALTER PUBLICATION p ADD TABLE late")
    await pair.change("INSERT INTO late VALUES (2)", "INSERT INTO t VALUES (1)")
    assert await pair.rows("SELECT count(*) FROM late") == [(0,)]  # nothing before REFRESH
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    await pair.change("INSERT INTO late VALUES (3)")
    assert await pair.rows("SELECT id FROM late ORDER BY 1") == [(1,), (2,), (3,)]


async def test_a_table_that_is_missing_on_the_target(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("CREATE TABLE absent (id int PRIMARY KEY)", "CREATE PUBLICATION q FOR TABLE t, absent")
    with pytest.raises(SubscriberError, match=r'relation "public.absent" does not exist'):
        await pair.subscriber.create(pair.source, "q")
    assert await pair.source.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 's'") == 0
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE absent", "INSERT INTO absent VALUES (1)")
    await pair.fails('ERROR:  logical replication target relation "public.absent" does not exist')
    await pair.target.execute("CREATE TABLE absent (id int PRIMARY KEY)")
    await pair.caught_up()
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    assert await pair.rows("SELECT id FROM absent") == [(1,)]


async def test_a_subscription_is_dropped_while_a_copy_waits_for_a_lock(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    blocker = await pair.target.connect()
    async with blocker.transaction():
        await blocker.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        await pair.subscriber.create(pair.source, "p")
        await pair.target.wait_for("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass", 1)
        await pair.subscriber.execute("DROP SUBSCRIPTION s")
    assert await pair.source.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
    assert await pair.target.value("SELECT count(*) FROM pg_replication_origin") == 0
    assert await pair.rows("SELECT count(*) FROM t") == [(0,)]


async def test_a_subscription_is_dropped_while_a_copy_keeps_failing(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.target.execute("INSERT INTO t VALUES (1)")
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    await pair.subscriber.create(pair.source, "p")
    await pair.fails("ERROR:  duplicate key value")
    await pair.subscriber.execute("DROP SUBSCRIPTION s")
    assert await pair.source.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
    assert await pair.target.value("SELECT count(*) FROM pg_replication_origin") == 0


async def test_a_table_dropped_on_the_target_is_forgotten(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t, u")
    await pair.source.execute("ALTER PUBLICATION p DROP TABLE u")
    await pair.target.execute("DROP TABLE u")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.change("INSERT INTO t VALUES (1)")
    assert await pair.rows("SELECT count(*) FROM subscriber.subscription_rel") == [(1,)]


async def test_a_copy_is_resumed_wherever_it_was_cut_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is cancelled at each step of a table's synchronization, with changes flowing."""
    subscriber = pair.subscriber
    await pair.both("CREATE TABLE first (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE first")
    of_a_copy = list(Point)[: list(Point).index(Point.READY_STORED) + 1]
    for point in (*of_a_copy, Point.TRANSACTION_BEGUN, Point.RECORDED):
        table = f"t_{point.name.lower()}"
        await pair.both(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        await pair.source.execute(
            f"INSERT INTO {table} SELECT g, 'copied' FROM generate_series(1, 50) g",
            f"ALTER PUBLICATION p ADD TABLE {table}",
        )
        reached: list[Point] = []

        def cut_off(point: Point = point, reached: list[Point] = reached) -> None:
            if not reached:
                reached.append(point)
                subscriber.cancel()

        monkeypatch.setitem(failpoints.armed, point, cut_off)
        await subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        with anyio.fail_after(30):
            for number in count(1):  # changes before, while and after it is cut off
                await pair.source.execute(
                    f"INSERT INTO {table} VALUES ({100 + number}, 'followed')",
                    f"DELETE FROM {table} WHERE id = {number}",
                )
                if number % 10 == 0:  # a position that no change of ours records, and time to see it
                    await pair.source.execute("SELECT pg_logical_emit_message(false, 'test', '')")
                    await anyio.sleep(0.1)
                if reached:
                    break
        await subscriber.stop()
        monkeypatch.delitem(failpoints.armed, point)
        await pair.source.execute(f"UPDATE {table} SET v = v || '!'")
        subscriber.start()
        await pair.caught_up()
        await subscriber.wait_for_ready(pair.source)
        await pair.assert_same(f"SELECT * FROM {table} ORDER BY id")
        await assert_nothing_left(pair)
    assert not subscriber.log.has("ERROR:|conflict detected")
